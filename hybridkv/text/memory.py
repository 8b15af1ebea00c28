"""What was sampled is remembered as it was: tokens by the text that they say, and calls of functions by their ids.

A client sends text back, not tokens, and encoding it again may give others: then nothing of the cache fits from there
on. `TextMemory` knows the tokens of each answer, with all before it, by a digest of the rendered text up to its end. A
prompt that begins with such a text takes over its tokens, and only the rest is encoded. The text of a prompt is never
changed by it; among token sequences of the same text the one that was sampled is chosen.

Clients also write calls anew, with other spaces, or keys in another order. `CallMemory` knows the text of an answer's
calls by the ids that were given out. Where the same calls come back, that text stands in the prompt.

Neither lets anybody forge a turn. The digest counts what in a text is a control token and what only spells one
(`prompt.py`), and what a model wrote is guarded as what a person wrote. All of it is kept for each salt apart.
"""

from __future__ import annotations

import json
import secrets
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from hybridkv.text.call_formats import CallFormat
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.framed import Pieces
from hybridkv.text.marks import ChatMarks
from hybridkv.text.messages import nests_too_deeply
from hybridkv.text.prompt import encode_pieces
from hybridkv.text.tokenizer import Tokenizer

TEXT_BYTES = 64 << 20
CALL_IDS = 100_000
CALL_BYTES = 64 << 20
OVERHEAD = 512  # bytes of an entry beside its tokens or its text
NAME_DIGITS = 24
DIFFERS = -1
Message = dict[str, Any]


class _Digest:
    """Of a text in pieces. Pieces that do and do not hold control tokens give other digests; how a text is divided
    into pieces of one kind does not.
    """

    def __init__(self, salt: bytes) -> None:
        self._hash, self._real = blake2b(salt, digest_size=16, person=b"hybridkv text"), True
        self._hash.update(len(salt).to_bytes(8, "little"))

    def push(self, text: str, real: bool) -> None:
        if text and real != self._real:
            self._real = real
            self._hash.update(b"\0T" if real else b"\0F")
        self._hash.update(text.encode("utf-8", "surrogatepass").replace(b"\0", b"\0\0"))

    def copy(self) -> _Digest:
        twin = object.__new__(_Digest)
        twin._hash, twin._real = self._hash.copy(), self._real
        return twin

    def value(self) -> bytes:
        return self._hash.digest()


@dataclass(eq=False)
class _Known:
    """The tokens of a text: those of the text that it continues, and its own."""

    key: bytes
    salt: bytes
    before: _Known | None
    own: array  # of token ids, 4 bytes each

    def path(self) -> list[_Known]:
        found, known = [], self
        while known is not None:
            found.append(known)
            known = known.before
        return found[::-1]

    @property
    def nbytes(self) -> int:
        return len(self.own) * self.own.itemsize + OVERHEAD


@dataclass(frozen=True)
class Spelled:
    """A prompt's token ids. `remembered`: how many of them were taken as they were sampled."""

    ids: list[int]
    remembered: int = 0
    salt: bytes = b""
    _digest: _Digest | None = field(default=None, repr=False)
    _before: _Known | None = field(default=None, repr=False)


class TextMemory:
    """Tokens of answers by the text up to their end, the least recently used first out. From any thread.

    Args:
        tokenizer: of the model.
        end: what the template writes after an answer (`marks.py`); "": nothing is remembered.
        limit: bytes.
    """

    def __init__(self, tokenizer: Tokenizer, end: str, limit: int = TEXT_BYTES) -> None:
        self._tokenizer, self._end, self.limit = tokenizer, end, limit
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # a text stands behind all that continue it
        self._lock = threading.Lock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def spell(self, pieces: Pieces, salt: bytes = b"") -> Spelled:
        """Token ids of a prompt: of the longest known text that it begins with, as they were, and of the rest."""
        if not self._end:
            return Spelled(encode_pieces(self._tokenizer, pieces), salt=salt)
        digest, known, at = _Digest(salt), None, (0, 0)
        for number, (text, real) in enumerate(pieces):
            done = 0
            while real and (place := text.find(self._end, done)) >= 0:
                digest.push(text[done:place], real)
                if (found := self._known.get(digest.value())) is not None:
                    known, at = found, (number, place)
                digest.push(self._end, real)
                done = place + len(self._end)
            digest.push(text[done:], real)
        if known is None:
            return Spelled(encode_pieces(self._tokenizer, pieces), 0, salt, digest)
        with self._lock:
            said = [token for each in known.path() for token in each.own]
            self._touch(known)
        (number, place), rest = at, pieces[at[0]]
        ids = encode_pieces(self._tokenizer, [(rest[0][place:], rest[1]), *pieces[number + 1 :]], said)
        return Spelled(ids, len(said), salt, digest, known)

    def remember(self, prompt: Spelled, text: str, ids: Sequence[int]) -> None:
        """An answer to the prompt: all of its text, and its tokens without the one that ended it."""
        tokenizer = self._tokenizer
        if prompt._digest is None or not ids or not text or not tokenizer.control.isdisjoint(ids):
            return
        if tokenizer.decode(ids, skip_special=False) != text:  # cut by a stop text, or in the middle of a character
            return
        digest, before = prompt._digest.copy(), prompt._before
        for piece, real in guarded(tokenizer, text):
            digest.push(piece, real)
        key = digest.value()
        with self._lock:
            there = self._known.get(key)
            if there is not None:  # the same text again: its tokens stay those that others continue
                self._touch(there)
                return
            if before is not None and self._known.get(before.key) is not before:
                before = None  # forgotten meanwhile
            own = array("i", prompt.ids[prompt.remembered if before is not None else 0 :])
            own.extend(ids)
            made = _Known(key, prompt.salt, before, own)
            if made.nbytes > self.limit:
                return
            self._known[key] = made
            self.nbytes += made.nbytes
            self._touch(made)
            while self.nbytes > self.limit:
                self._drop(next(iter(self._known)))

    def forget(self, salt: bytes | None) -> None:
        """All that was said under a salt; None: all there is."""
        with self._lock:
            for key in [key for key, known in self._known.items() if salt in (None, known.salt)]:
                self._drop(key)

    def forget_text(self, salt: bytes, tokens: Sequence[int]) -> None:
        """Answers of a text, from the last one up to where another text continues it."""
        said, ends, found = array("i", tokens), dict[_Known | None, int]({None: 0}), dict[int, _Known]()
        with self._lock:
            mine = [known for known in self._known.values() if known.salt == salt]
            for known in mine:
                if (end := _end_in(said, known, ends)) != DIFFERS:
                    found[end] = known
            continued = Counter(known.before for known in mine)
            for _, known in sorted(found.items(), reverse=True):
                if continued[known]:
                    return
                continued[known.before] -= 1
                self._drop(known.key)

    def _touch(self, known: _Known) -> None:
        """It was used, and all that it continues: those stand behind it, so that none goes before what needs it."""
        for each in reversed(known.path()):
            if each.key in self._known:
                self._known.move_to_end(each.key)

    def _drop(self, key: bytes) -> None:
        self.nbytes -= self._known.pop(key).nbytes


def _end_in(said: array, known: _Known, ends: dict[_Known | None, int]) -> int:
    """How many tokens a text has, if `said` begins with them, else DIFFERS. `ends`: of those that were asked before,
    so that no tokens are compared twice; others wait meanwhile.
    """
    path: list[_Known] = []
    at: _Known | None = known
    while at is not None and at not in ends:
        path.append(at)
        at = at.before
    begin = ends[at]
    for each in reversed(path):
        end = begin + len(each.own)
        begin = ends[each] = end if begin != DIFFERS and said[begin:end] == each.own else DIFFERS
    return begin


# ---- calls


@dataclass(frozen=True)
class MadeCalls:
    """All calls of one answer.

    Args:
        ids: that were given out, without a dialect's prefix.
        calls: (name, arguments as JSON text) of each.
        text: what the model wrote, from the end of the text before the calls to the end of the answer.
    """

    ids: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]
    text: str

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return OVERHEAD + len(self.text) + sum(len(name) + len(arguments) for name, arguments in self.calls)

    def same(self, calls: Sequence[Message]) -> bool:
        """Whether these are the calls, whatever spaces and order of keys they came back with."""
        if len(calls) != len(self.calls) or tuple(bare_id(call.get("id")) for call in calls) != self.ids:
            return False
        for call, (name, arguments) in zip(calls, self.calls):
            function = call["function"]
            if function["name"] != name or not _equal(_value(function["arguments"]), _value(arguments)):
                return False
        return True


class CallMemory:
    """What models wrote for calls, by id and salt, the least recently used first out. From any thread."""

    def __init__(self, most: int = CALL_IDS, limit: int = CALL_BYTES) -> None:
        self.most, self.limit, self.nbytes = most, limit, 0
        self._made: OrderedDict[tuple[bytes, str], MadeCalls] = OrderedDict()  # by the first id of each
        self._ids = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ids

    def remember(self, made: MadeCalls, salt: bytes = b"") -> None:
        """What an answer called."""
        if not made.ids or made.nbytes > self.limit or len(made.ids) > self.most:
            return
        with self._lock:
            self._made[salt, made.ids[0]] = made
            self.nbytes, self._ids = self.nbytes + made.nbytes, self._ids + len(made.ids)
            while self.nbytes > self.limit or self._ids > self.most:
                self._drop(next(iter(self._made)))

    def find(self, calls: Sequence[Message], salt: bytes = b"") -> MadeCalls | None:
        """The answer that made exactly these calls."""
        key = (salt, bare_id(calls[0].get("id")))
        with self._lock:
            made = self._made.get(key)
            if made is None or not made.same(calls):
                return None
            self._made.move_to_end(key)
            return made

    def forget(self, salt: bytes | None, said: str | None = None) -> None:
        """All that was called under a salt (None: all there is), or what a text says of it."""
        with self._lock:
            for key in [key for key in self._made if salt in (None, key[0])]:
                if said is None or self._made[key].text in said:
                    self._drop(key)

    def _drop(self, key: tuple[bytes, str]) -> None:
        made = self._made.pop(key)
        self.nbytes, self._ids = self.nbytes - made.nbytes, self._ids - len(made.ids)


@dataclass(frozen=True)
class _Replay:
    """Calls that are rendered under a name nobody can guess, with another one after the text before them."""

    name: str
    tail: str  # "": there is no text before them
    text: str


class Replays:
    """The calls of one chat whose text is known: `named` before it is rendered, `put_back` afterwards."""

    def __init__(self, tokenizer: Tokenizer, form: CallFormat, memory: CallMemory, salt: bytes = b"") -> None:
        self._tokenizer, self._form, self._memory, self._salt = tokenizer, form, memory, salt
        self._replays: list[_Replay] = []

    def __len__(self) -> int:
        return len(self._replays)

    def named(self, messages: list[Message]) -> list[Message]:
        """The messages with one call under a random name where the text of calls is known."""
        return [self._named(message) if message.get("tool_calls") else message for message in messages]

    def _named(self, message: Message) -> Message:
        content, calls = message.get("content") or "", message["tool_calls"]
        made = self._memory.find(calls, self._salt)
        if made is None or not isinstance(content, str):
            return message
        said = content.rstrip()
        # a control token must not come about where the two meet, nor where the text was guarded for what may follow it
        spans = self._tokenizer.control_spans(said)
        if (spans and spans[-1][1] == len(said)) or any(
            begin < len(said) < end for begin, end in self._tokenizer.control_spans(said + made.text)
        ):
            return message
        name, tail = random_name(), random_name() if said else ""
        self._replays.append(_Replay(name, tail, made.text if said else made.text.lstrip()))
        call = {"id": calls[0].get("id"), "type": "function", "function": {"name": name, "arguments": {}}}
        return message | {"content": said + tail if said else message.get("content"), "tool_calls": [call]}

    def put_back(self, pieces: Pieces) -> Pieces | None:
        """The pieces with the text of the calls; None: the template did something else with a name than write it."""
        for replay in self._replays:
            at = [i for i, (text, real) in enumerate(pieces) if replay.name in text]
            if len(at) != 1:
                return None
            text, real = pieces[at[0]]
            place = self._place(text, replay) if real else None
            if place is None:
                return None
            begin, end = place
            inner = [(text[:begin], True), *guarded(self._tokenizer, replay.text), (text[end:], True)]
            pieces = _merged([*pieces[: at[0]], *inner, *pieces[at[0] + 1 :]])
        return pieces

    def _place(self, text: str, replay: _Replay) -> tuple[int, int] | None:
        """Where the template wrote the call: from the end of the text before it to the end of the call."""
        if text.count(replay.name) != 1 or (replay.tail and text.count(replay.tail) != 1):
            return None
        at, form = text.index(replay.name), self._form
        if form.open:
            begin, end = text.rfind(form.open, 0, at), text.find(form.close, at) + len(form.close)
            if begin < 0 or end < len(form.close):
                return None
        else:
            begin = text.rfind("{", 0, at)
            try:
                end = json.JSONDecoder().raw_decode(text, begin)[1] if begin >= 0 else -1
            except ValueError:
                return None
        if replay.tail:
            tail = text.index(replay.tail)
            if not tail < begin or text[tail + len(replay.tail) : begin].strip():
                return None
            begin = tail
        return (begin, end) if begin < at < end else None


class ChatMemory:
    """What is known of one model's chats: marks of its template, and what was sampled.

    Args:
        template, tokenizer: of the model.
        on: whether anything is remembered.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, on: bool) -> None:
        self.marks = ChatMarks.probe(template, tokenizer)
        self.texts = TextMemory(tokenizer, self.marks.answer_end if on else "")
        self.calls = CallMemory() if on else CallMemory(0, 0)
        self._nothing, self._tokenizer = TextMemory(tokenizer, ""), tokenizer

    def spell(self, pieces: Pieces, salt: bytes = b"", cache: bool | str = True) -> Spelled:
        """Token ids of a prompt. `cache`: as in `LLM.generate`; nothing is taken over unless it is read."""
        return (self.texts if cache in (True, "read") else self._nothing).spell(pieces, salt)

    def remember(self, prompt: Spelled, text: str, ids: Sequence[int], ended: bool, cache: bool | str = True) -> None:
        """An answer with all of its tokens; `ended`: the last one ended it, and has no text."""
        if cache is True:
            self.texts.remember(prompt, text, ids[:-1] if ended else ids)

    def forget(self, salt: bytes | None, tokens: Sequence[int] | None = None) -> None:
        """All that was said under a salt (None: all there is), or what was said and called in one text."""
        if tokens is None:
            self.texts.forget(salt)
            self.calls.forget(salt)
        else:
            self.texts.forget_text(salt or b"", tokens)
            self.calls.forget(salt or b"", self._tokenizer.decode(tokens, skip_special=False))


def guarded(tokenizer: Tokenizer, text: str) -> Pieces:
    """A model's or a person's words in pieces: what spells a control token in them is none."""
    pieces, at = [], 0
    for begin, end in tokenizer.control_spans(text):
        pieces += [(text[at:begin], True), (text[begin:end], False)]
        at = end
    pieces.append((text[at:], True))
    if any(real and tokenizer.spells_control(part) for part, real in pieces):  # spelled otherwise, but the same
        return [(text, False)]
    return [piece for piece in pieces if piece[0]]


def _merged(pieces: Pieces) -> Pieces:
    found: Pieces = []
    for text, real in pieces:
        if found and found[-1][1] == real:
            found[-1] = (found[-1][0] + text, real)
        elif text:
            found.append((text, real))
    return found


def bare_id(given: Any) -> str:
    """An id without the prefix of its dialect: call_, toolu_."""
    return str(given).rpartition("_")[2]


def _value(arguments: Any) -> Any:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return arguments if nests_too_deeply(value) else value


def _equal(a: Any, b: Any) -> bool:
    """Whether two JSON values are the same; 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def random_name() -> str:
    """Digits that nobody can guess, and that no template changes."""
    return f"{secrets.randbelow(10**NAME_DIGITS):0{NAME_DIGITS}}"
