"""The tokenizer of a Hugging Face folder: tokenizer.json, and what the files beside it say about special tokens.

Read: tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json, chat_template.jinja and
chat_template.json.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from hybridkv.errors import ModelFileError
from hybridkv.files import JSON_LIMIT, read_bytes, read_json_if_any
from hybridkv.text.tokenizer import Tokenizer, check_vocabulary, guarded

TOKENIZER_LIMIT = 1 << 28  # bytes; tokenizer.json of a 262 144 token vocabulary has 33 MB


def read_folder(folder: Path, generation: dict[str, Any] | None = None) -> Tokenizer | None:
    """The tokenizer of a folder; None: it has none. `generation`: generation_config.json, if it was read before."""
    file = folder / "tokenizer.json"
    if not os.path.lexists(file):
        return None
    source = read_bytes(file, TOKENIZER_LIMIT)
    with guarded(f"{file} cannot be read as a tokenizer", ModelFileError):
        backend = Backend.from_str(source.decode("utf-8"))
        backend.no_truncation()
        backend.no_padding()
        vocab = backend.get_vocab(with_added_tokens=True)
    check_vocabulary(vocab, max(vocab.values(), default=-1) + 1, str(file))

    settings = read_json_if_any(folder / "tokenizer_config.json")
    special = read_json_if_any(folder / "special_tokens_map.json") | settings
    model = read_json_if_any(folder / "config.json")
    text_model = model.get("text_config")
    generation = read_json_if_any(folder / "generation_config.json") if generation is None else generation

    def named(key: str) -> int | None:
        value = special.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return vocab.get(value) if isinstance(value, str) else None

    declared: list[int] = []
    for source_of_ids in (generation, model, text_model if isinstance(text_model, dict) else {}):
        declared += _ids(source_of_ids.get("eos_token_id"), f"{folder}: eos_token_id")
    eos_id = named("eos_token")
    if eos_id is None and declared:
        eos_id = declared[0]

    with guarded(f"{file} cannot encode text", ModelFileError):
        inner = backend.encode("a", add_special_tokens=False).ids
        whole = backend.encode("a", add_special_tokens=True).ids
    before, after = _around(inner, whole)
    bos_id = named("bos_token")
    if bos_id is None and before and "bos_token" not in special:
        bos_id = before[0]
    if isinstance(settings.get("add_bos_token"), bool):
        before = [bos_id] if settings["add_bos_token"] and bos_id is not None else []
    if isinstance(settings.get("add_eos_token"), bool):
        after = [eos_id] if settings["add_eos_token"] and eos_id is not None else []

    def plain() -> Backend:
        twin = Backend.from_str(backend.to_str())
        twin.encode_special_tokens = True
        return twin

    eos_ids = {*declared, *([] if eos_id is None else [eos_id])}
    return Tokenizer(
        backend,
        plain,
        before=before,
        after=after,
        bos_id=bos_id,
        eos_ids=sorted(eos_ids),
        eos_id=eos_id,
        chat_template=_folder_template(folder, settings),
    )


def _around(inner: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """What a post-processor puts before and after a text."""
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    return [], []


def _folder_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        try:
            return read_bytes(file, JSON_LIMIT).decode("utf-8")
        except UnicodeDecodeError as e:
            raise ModelFileError(f"{file} cannot be read: {e}") from None
    for source in (read_json_if_any(folder / "chat_template.json"), settings):
        template = source.get("chat_template")
        if isinstance(template, list):  # [{"name": "default", "template": "..."}, ...]
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def _ids(value: Any, what: str) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for v in values:
        if not isinstance(v, int) or isinstance(v, bool) or v < 0:
            raise ModelFileError(f"{what} must be a token id or a list of them, got {str(v)[:100]!r}")
    return values
