"""Text to token ids and back, for a Hugging Face folder (tokenizer.json) and for the metadata of a GGUF file.

Encoding is done by the `tokenizers` library. Decoding is done here where it can be: the decoders of the models we run
(byte level, and SentencePiece with byte fallback) only join bytes, so a token is a byte string, a text is the joined
bytes, and a stream of tokens can be turned into text piece by piece with the very same result (`stream.py`). Any
other decoder in a tokenizer.json is left to the library.

A SentencePiece tokenizer puts a space before a text. A text that goes on after other tokens (`encode(..., after=)`)
must not get one in the middle, so it is encoded by a twin of the tokenizer that puts none.

Control tokens (`<|im_end|>`) are found in text only with `special=True`: chat templates need that; the words of a
user must not be able to end their own turn, so they are encoded with `special=False`. Chat templates are rendered in
`chat.py`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from hybridkv.errors import HybridKVError, ModelFileError, RequestError
from hybridkv.text.reasoning import marks_in

MAX_TOKENS = 1 << 24  # tokens in a vocabulary; the largest in use have 262 144
MAX_TOKEN_CHARS = 1 << 14  # in one token


class Tokenizer:
    """`encode` and `decode` for one model, and what the files say about its special tokens."""

    def __init__(
        self,
        backend: Backend,
        plain: Callable[[], Backend],  # makes the twin that does not see control tokens in text
        *,
        before: Sequence[int] = (),  # what encode puts in front of a text
        after: Sequence[int] = (),
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        eos_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._make_plain = plain
        self._before, self._after = list(before), list(after)
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.bos_text = None if bos_id is None else backend.id_to_token(bos_id)
        self.eos_text = None if eos_id is None else backend.id_to_token(eos_id)
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        marks = marks_in(chat_template or "") or ()
        # without text in an answer; marks around thoughts have one, whether or not they are control tokens
        self._hidden = frozenset(i for i in self._special if self._added[i] not in marks)
        self._unspaced: dict[bool, Backend] = {}  # special -> the twin that puts no space before a text
        self._spaces = _space_rule(backend)
        self._pieces: dict[int, bytes] = {}  # token id -> its bytes, filled as tokens are met
        self._join, self.strips_space = _joining_decoder(backend)

    @property
    def add_bos(self) -> bool:
        """Whether `encode` begins a text with the model's own token for that."""
        return self.bos_id is not None and self.bos_id in self._before

    @staticmethod
    def from_folder(path: str | Path, generation: dict[str, Any] | None = None) -> Tokenizer | None:
        """None when the folder has no tokenizer.json. `generation`: generation_config.json, if it was read before."""
        from hybridkv.text.tokenizer_folder import read_folder

        return read_folder(Path(path), generation)

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
        """None when the file says that it has no tokenizer."""
        from hybridkv.text.tokenizer_gguf import read_metadata

        return read_metadata(metadata)

    @cached_property
    def _plain(self) -> Backend:
        return self._make_plain()

    def encode(
        self, text: str, *, bos: bool | None = None, special: bool = True, after: int | None = None
    ) -> list[int]:
        """Token ids. `bos`: None as the model wants it, True with it if there is one, False the text alone (templates
        write their own). `special=False`: the text of control tokens stays plain text. `after`: the token that the
        text follows; it is then the middle of a text, encoded alone and without the space that begins one."""
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RequestError(f"the text is not valid Unicode: {e.reason} at character {e.start}") from None
        begins = after is None or self._spaces is None or (self._spaces == "each" and after in self._added)
        with guarded("the text cannot be tokenized", RequestError):
            backend = self._backend if special else self._plain
            ids = _ids(backend, text) if begins else self._middle(backend, text, special)
        if not special and not self.control.isdisjoint(ids):
            forged = self.token_text(next(i for i in ids if i in self.control))
            raise RequestError(
                f"the text spells the control token {forged!r} in a way this tokenizer cannot keep apart"
            )
        if bos is False or after is not None:
            return ids
        before = self._before
        if bos and not self.add_bos and self.bos_id is not None:
            before = [self.bos_id]
        return before + ids + self._after

    def _middle(self, backend: Backend, text: str, special: bool) -> list[int]:
        """Without a space before the text; from the first added token on as ever."""
        if special not in self._unspaced:
            self._unspaced[special] = _without_space(backend)
        [found] = self._unspaced[special].encode_batch([text], add_special_tokens=False)  # with offsets
        stop = next((n for n, i in enumerate(found.ids) if i in self._added), None)
        if stop is None:
            return found.ids
        return found.ids[:stop] + _ids(backend, text[found.offsets[stop][0] :])

    def spells_control(self, text: str) -> bool:
        """Whether the text spells a control token, which plain `encode` would take for the real thing."""
        if self.spelled_one_way:
            return bool(self._control_texts) and self._control_pattern.search(text) is not None
        return not self.control.isdisjoint(self.encode(text, bos=False))

    @cached_property
    def spelled_one_way(self) -> bool:
        """Whether only a control token's own letters give it. Else, with some tokenizers, other letters do that are
        normalized to the same, or such as the model itself puts together."""
        added, model = self._backend.get_added_tokens_decoder(), self._backend.model
        own = {i: model.id_to_token(i) for i in self.control}
        return not any(
            added[i].normalized or (text and i in (part.id for part in model.tokenize(text))) for i, text in own.items()
        )

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """The parts of the text (begin, end) that spell a control token, and its end if it may begin one that
        another text completes. Words are left alone in this: templates compare them ('user', 'text')."""
        if not self._control_texts:
            return []
        spans = [m.span() for m in self._control_pattern.finditer(text)]
        last = spans[-1][1] if spans else 0
        if not text.isidentifier():
            for begin in range(max(last, len(text) - self._longest_control), len(text)):
                at = bisect_left(self._control_texts, text[begin:])
                if at < len(self._control_texts) and self._control_texts[at].startswith(text[begin:]):
                    return [*spans, (begin, len(text))]
        return spans

    @cached_property
    def _control_texts(self) -> list[str]:
        return sorted({self._added[i] for i in self.control if self._added[i]})

    @cached_property
    def _longest_control(self) -> int:
        return max(map(len, self._control_texts), default=0)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._control_texts, key=len, reverse=True))))

    @cached_property
    def control(self) -> frozenset[int]:
        """Special tokens that no plain text may give; a model may have its unknown token for what it cannot spell."""
        unknown = getattr(self._backend.model, "unk_token", None)
        return self._special - {self._backend.token_to_id(unknown) if unknown else None}

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Ids outside the vocabulary (padding rows of a model) have no text."""
        if self._join is None:
            known = [i for i in ids if 0 <= i < self.vocab_size]
            with guarded("the tokens cannot be turned into text", RequestError):
                shown = [i for i in known if not skip_special or i not in self._hidden]
                return self._backend.decode(shown, skip_special_tokens=False)
        raw = b"".join(self.piece(i, skip_special) for i in ids)
        text = raw.decode("utf-8", "replace")
        return text[1:] if self.strips_space and text.startswith(" ") else text

    @property
    def added(self) -> dict[int, str]:
        """Tokens beside the vocabulary, control tokens among them, with their texts."""
        return self._added

    def as_json(self) -> str:
        """As a tokenizer.json has it."""
        return self._backend.to_str()

    @property
    def joins_bytes(self) -> bool:
        """Whether a text is the joined bytes of its tokens (`piece`), less one leading space if `strips_space`."""
        return self._join is not None

    def piece(self, id: int, skip_special: bool = True) -> bytes:
        """The bytes of one token, where `joins_bytes`."""
        if skip_special and id in self._hidden:
            return b""
        if id not in self._pieces:
            assert self._join is not None
            token = self._backend.id_to_token(id) if 0 <= id < self.vocab_size else None
            raw = b"" if token is None else self._added[id].encode() if id in self._added else self._join(token)
            self._pieces[id] = raw
        return self._pieces[id]

    def token_text(self, id: int) -> str:
        """One token on its own, control tokens included; bytes that are no character show as U+FFFD."""
        if self._join is None:
            return self.decode([id], skip_special=False)
        return self.piece(id, skip_special=False).decode("utf-8", "replace")


def _ids(backend: Backend, text: str) -> list[int]:
    """One text as a list of one: other threads of Python run while the library encodes a list, and stand still while it
    encodes a text."""
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


@contextmanager
def guarded(what: str, error: type[HybridKVError]) -> Iterator[None]:
    """The library reports bad data by plain Exceptions and by panics, which derive from BaseException alone."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, HybridKVError):
        raise
    except BaseException as e:
        raise error(f"{what}: {str(e)[:500]}") from None


def check_vocabulary(vocab: Mapping[str, int], size: int, where: str) -> None:
    """Refuse a vocabulary that is empty or too large, before anything is built from it."""
    if not vocab:
        raise ModelFileError(f"{where}: the vocabulary is empty")
    if size > MAX_TOKENS:
        raise ModelFileError(f"{where}: the vocabulary goes up to id {size - 1}; at most {MAX_TOKENS} tokens are read")
    longest = max(vocab, key=len)
    if len(longest) > MAX_TOKEN_CHARS:
        raise ModelFileError(
            f"{where}: token {vocab[longest]} has {len(longest)} characters; at most {MAX_TOKEN_CHARS} are read"
        )


# The space before a text


def _parts(component: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer, or the members of a Sequence of them."""
    if component is None:
        return []
    return component[inner] if component["type"] == "Sequence" else [component]


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _space_rule(backend: Backend) -> str | None:
    """Where the tokenizer puts a space: None nowhere, "first" at the beginning, "each" also after every added token."""
    rules = {"each" for p in _parts(_state(backend.normalizer), "normalizers") if p["type"] == "Prepend"}
    for part in _parts(_state(backend.pre_tokenizer), "pretokenizers"):
        if part["type"] == "Metaspace" and part.get("prepend_scheme") != "never":
            rules.add("first" if part.get("prepend_scheme") == "first" else "each")
        if part["type"] == "ByteLevel" and part["add_prefix_space"]:
            rules.add("each")
    return min(rules, default=None)  # "each" if any does


def _without_space(backend: Backend) -> Backend:
    state = json.loads(backend.to_str())
    normalizers = [p for p in _parts(state["normalizer"], "normalizers") if p["type"] != "Prepend"]
    state["normalizer"] = {"type": "Sequence", "normalizers": normalizers} if normalizers else None
    for part in _parts(state["pre_tokenizer"], "pretokenizers"):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    twin = Backend.from_str(json.dumps(state))
    twin.encode_special_tokens = backend.encode_special_tokens
    return twin


# Decoding: token text -> bytes


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[c] for c in token)
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _joining_decoder(backend: Backend) -> tuple[Callable[[str], bytes] | None, bool]:
    """(token -> bytes, whether one leading space goes), or (None, False) for a decoder that does more than join."""
    if backend.decoder is None:
        return None, False
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    if [p["type"] for p in parts] == ["ByteLevel"]:
        return _byte_level, False
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if parts[:3] == [replace, {"type": "ByteFallback"}, {"type": "Fuse"}] and parts[3:] in ([], [strip]):
        return _sentencepiece, len(parts) == 4
    return None, False
