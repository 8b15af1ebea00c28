"""Tokenizers from Hugging Face folders, against transformers where it can read them too."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from hybridkv.errors import ModelFileError, RequestError
from hybridkv.text.tokenizer import Tokenizer


def backend(*, bos: bool = False) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | {"he": 256}, merges=[("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<eot>")])
    made.add_tokens([AddedToken("<think>", special=False), AddedToken("café", special=False)])
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
    return made


def folder(path: Path, *, bos: bool = False, **files: Any) -> Path:
    backend(bos=bos).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None
    return tokenizer


def test_a_folder_without_a_tokenizer_is_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    assert Tokenizer.from_folder(tmp_path / "absent") is None


@pytest.mark.parametrize("bos", [False, True])
def test_encodes_and_decodes_as_transformers(tmp_path: Path, bos: bool) -> None:
    ours = load(folder(tmp_path, bos=bos, tokenizer_config={"bos_token": "<bos>", "eos_token": "<eos>"}))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in ("he he", "", "a<eos>b<think>", "日本 🙂 \n", "<bos>he"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    assert ours.add_bos is bos
    assert ours.encode("he", bos=False) == [256]
    assert ours.encode("he", bos=True) == [257, 256]


def test_the_settings_override_the_post_processor(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "add_bos_token": False, "add_eos_token": True}
    tokenizer = load(folder(tmp_path, bos=True, tokenizer_config=config))
    assert tokenizer.encode("he") == [256, 258] and tokenizer.add_bos is False
    config["add_bos_token"] = True
    assert load(folder(tmp_path, tokenizer_config=config)).encode("he") == [257, 256, 258]


def test_a_begin_token_that_only_the_post_processor_knows_is_found(tmp_path: Path) -> None:
    tokenizer = load(folder(tmp_path, bos=True))
    assert tokenizer.bos_id == 257 and tokenizer.bos_text == "<bos>" and tokenizer.add_bos


def test_end_tokens_are_collected_from_all_files(tmp_path: Path) -> None:
    tokenizer = load(
        folder(
            tmp_path,
            tokenizer_config={"eos_token": "<eos>"},
            generation_config={"eos_token_id": [259, 7]},
            config={"eos_token_id": None, "text_config": {"eos_token_id": 9}},
        )
    )
    assert tokenizer.eos_ids == {258, 259, 7, 9} and tokenizer.eos_text == "<eos>"
    only = load(folder(tmp_path, tokenizer_config={}, generation_config={"eos_token_id": 259}, config={}))
    assert only.eos_ids == {259} and only.eos_text == "<eot>"


def test_plain_text_cannot_forge_control_tokens(tmp_path: Path) -> None:
    tokenizer = load(folder(tmp_path))
    assert tokenizer.encode("<eos>") == [258]
    plain = tokenizer.encode("<eos><think>", special=False)
    assert 258 not in plain and plain[-1] == 260 and tokenizer.decode(plain) == "<eos><think>"
    assert tokenizer.encode("<eos>") == [258]


def test_a_tokenizer_that_cannot_keep_control_tokens_apart_refuses(tmp_path: Path) -> None:
    words = Backend(models.WordLevel({"<unk>": 0, "<eos>": 1, "hi": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<eos>", "<unk>"])
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("hi there", special=False) == [2, 0]
    with pytest.raises(RequestError, match="<eos>"):
        tokenizer.encode("hi <eos>", special=False)
    assert tokenizer.decode([2, 2]) == "hi hi"


def test_added_tokens_keep_their_letters(tmp_path: Path) -> None:
    tokenizer = load(folder(tmp_path))
    assert tokenizer.decode(tokenizer.encode("un café")) == "un café"


def test_templates_are_found_in_each_place(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert load(folder(tmp_path)).chat_template is None
    assert load(folder(tmp_path, tokenizer_config={"chat_template": "S"})).chat_template == "S"
    assert load(folder(tmp_path, tokenizer_config={"chat_template": named})).chat_template == "D"
    assert load(folder(tmp_path, chat_template={"chat_template": "J"})).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    assert load(tmp_path).chat_template == "{{ 'é' }}"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "Mystery"}}', "\x00" * 100, "[" * 100_000],
)
def test_broken_tokenizer_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    Backend(models.BPE(vocab={}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFileError, match="empty"):
        Tokenizer.from_folder(tmp_path)


def test_absurd_tokens_and_ids_are_refused(tmp_path: Path) -> None:
    Backend(models.WordLevel({"a": 0, "x" * 1_000_000: 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFileError, match="1000000 characters"):
        Tokenizer.from_folder(tmp_path)
    Backend(models.WordLevel({"a": 0, "b": 77}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    source = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(source.replace("77", str(2**31)))
    with pytest.raises(ModelFileError, match="2147483648"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("value", [-1, "2", 1.5, True, [1, "x"], {"a": 1}])
def test_bad_end_ids_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelFileError, match="eos_token_id"):
        load(folder(tmp_path, generation_config={"eos_token_id": value}))


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
SPACES: dict[str, dict[str, Any]] = {
    "legacy": {"normalizer": PREPEND},
    "first": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
    "always": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")},
    "never": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="never")},
    "bytes": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},
    "bytes with a space": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "among others": {
        "normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁")]),
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)]),
    },
}


@pytest.mark.parametrize("kind", SPACES)
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.sampled_from(["a", "b ", " a", " ", "  ", "<e>", "<t>", "1"]), min_size=1, max_size=6))
def test_a_text_in_parts_is_encoded_as_the_whole(tmp_path: Path, kind: str, parts: list[str]) -> None:
    """Characters are the only tokens, so that cuts between them change nothing but the space before a text."""
    letters = ["<unk>", *sorted({*pre_tokenizers.ByteLevel.alphabet(), "▁", " "})]
    made = Backend(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[], unk_token="<unk>"))
    for name, part in SPACES[kind].items():
        setattr(made, name, part)
    made.add_special_tokens([AddedToken("<e>", special=True, normalized=False)])
    made.add_tokens([AddedToken("<t>", special=False, normalized=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    for special in (True, False):
        ids = tokenizer.encode(parts[0], bos=False, special=special)
        for part in parts[1:]:
            ids += tokenizer.encode(part, special=special, after=ids[-1])
        assert ids == tokenizer.encode("".join(parts), bos=False, special=special)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model_max_length": NaN}', "NaN"),
        (b'{"bos_token": "<bos>", "bos_token": "<eos>"}', "twice"),
        (b'{"a": 1e999}', "too large"),
        (b"[" * 100_000, "nested"),
        (b'{"a": "' + b"x" * (16 << 20) + b'"}', "at most"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "generation_config", "chat_template"])
def test_settings_are_read_as_strictly_as_a_models_config(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    folder(tmp_path)
    (tmp_path / f"{name}.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_tokenizer_files_that_are_no_files_are_refused(tmp_path: Path, name: str) -> None:
    folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelFileError, match="a FIFO"):
        load(tmp_path)


def test_settings_that_are_no_json_object_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="expected an object"):
        load(folder(tmp_path, tokenizer_config=[1, 2]))
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
        load(tmp_path)
