"""The one stream of events that every dialect formats: what a model said, and how it ended.

An answer is divided once, here: thoughts, text and calls. A dialect is a function of these events and of nothing else.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridkv.document import Document
from hybridkv.request import Request, TokenLogprobs
from hybridkv.text.call_bodies import CallPiece
from hybridkv.text.calls import CallParser
from hybridkv.text.memory import MadeCalls
from hybridkv.text.reasoning import ReasoningSplitter, assistant_message
from hybridkv.text.stream import TextStream
from hybridkv.text.tokenizer import Tokenizer

MAX_CALLS = 1 << 20  # of one answer: as many as it makes


@dataclass(frozen=True)
class Said:
    """Text of an answer, or of the thoughts before it."""

    choice: int
    text: str
    reasoning: bool = False


@dataclass(frozen=True)
class Tokens:
    """Tokens that a step gave, with their logprobs where asked for. It follows the text that came with them."""

    choice: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Finish:
    """The end of one answer: "stop", "length", "context" (the context is full) or "calls"."""

    choice: int
    reason: str
    stop: str | None = None  # the stop text that was met


@dataclass(frozen=True)
class CallStart:
    """A call of a function begins; calls of an answer are numbered from 0."""

    choice: int
    index: int
    id: str  # random, without a dialect's prefix
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    choice: int
    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call ends. One that is not whole was cut by a limit, and is none."""

    choice: int
    index: int
    whole: bool = True


Event = Said | Tokens | Finish | CallStart | CallArguments | CallEnd


def whole_calls(events: Sequence[Event]) -> list[tuple[CallStart, str]]:
    """The calls of one answer that came to their end, with the text of their arguments."""
    ended = {event.index for event in events if isinstance(event, CallEnd) and event.whole}
    found = []
    for start in events:
        if isinstance(start, CallStart) and start.index in ended:
            pieces = [e.text for e in events if isinstance(e, CallArguments) and e.index == start.index]
            found.append((start, "".join(pieces)))
    return found


class Divider:
    """Divides the text of one answer. `splitter`: thoughts from the rest."""

    def __init__(self, choice: int, splitter: ReasoningSplitter) -> None:
        self._choice, self._splitter = choice, splitter

    def push(self, text: str, ids: Sequence[int]) -> list[Event]:
        """More text, and the tokens of the step that it came with."""
        return [Said(self._choice, piece.text, piece.reasoning) for piece in self._splitter.push(text)]

    def finish(self, complete: bool) -> list[Event]:
        """No more text. `complete`: the model ended it, no limit did."""
        return [Said(self._choice, piece.text, piece.reasoning) for piece in self._splitter.finish()]

    @property
    def message(self) -> dict[str, Any]:
        """The answer given out so far as clients send it back, without calls."""
        return assistant_message(self._splitter.answer, self._splitter.reasoning)

    @property
    def thinking(self) -> bool:
        """Whether what comes next belongs to thoughts."""
        return not self._splitter.answering

    @property
    def made_calls(self) -> bool:
        """Whether a whole call was made, and none was cut."""
        return False

    @property
    def called(self) -> bool:
        """Whether a call was begun."""
        return False

    def written(self, text: str) -> MadeCalls | None:
        """The calls of an answer that has ended with this text."""
        return None


class CallDivider(Divider):
    """Divides an answer that may call functions.

    Args:
        choice: its number.
        parser: finds the calls.
        tokenizer: to know where in the text opening tokens stand.
        token: that opens calls; None: letters do.
        most: calls that count; the others are left out.
    """

    def __init__(
        self, choice: int, parser: CallParser, tokenizer: Tokenizer, token: int | None = None, most: int = MAX_CALLS
    ) -> None:
        super().__init__(choice, parser.splitter)
        self._parser, self._token, self._most = parser, token, most
        self._text, self._length = TextStream(tokenizer), 0  # the answer once more, to count its characters
        self._width = 0 if token is None else len(tokenizer.token_text(token))
        self._calls, self._cut = 0, False
        self._starts: list[CallStart] = []
        self._arguments: list[str] = []
        self._mixed = False  # text came after a call

    def push(self, text: str, ids: Sequence[int]) -> list[Event]:
        """More text, and the tokens of the step that it came with."""
        places = []
        for token in ids if self._token is not None else ():
            self._length += len(self._text.push(token))
            if token == self._token:
                places.append(self._length - self._width)
        return self._events(self._parser.push(text, tuple(places)))

    def finish(self, complete: bool) -> list[Event]:
        """No more text. `complete`: the model ended it, no limit did."""
        return self._events(self._parser.finish(complete))

    def _events(self, pieces: list[CallPiece]) -> list[Event]:
        found: list[Event] = []
        for kind, text in pieces:
            if kind in ("text", "reasoning"):
                self._mixed |= self._calls > 0 and bool(text.strip())
                found.append(Said(self._choice, text, kind == "reasoning"))
                continue
            self._calls += kind == "start"
            self._cut |= kind == "cut"
            at = self._calls - 1
            if at >= self._most:
                continue
            if kind == "start":
                self._starts.append(CallStart(self._choice, at, _call_id(), text))
                self._arguments.append("")
                found.append(self._starts[-1])
            elif kind == "arguments":
                self._arguments[-1] += text
                found.append(CallArguments(self._choice, at, text))
            else:
                found.append(CallEnd(self._choice, at, kind == "end"))
        return found

    @property
    def made_calls(self) -> bool:
        """Whether a whole call was made, and none was cut."""
        return min(self._parser.made, self._most) > 0 and not self._cut

    @property
    def called(self) -> bool:
        """Whether a call was begun."""
        return self._calls > 0

    def written(self, text: str) -> MadeCalls | None:
        """The calls of an answer that has ended with this text, as they were written; None: there are none, or not all
        of them were given out, in a row at the end.
        """
        begins = self._parser.begins
        if begins is None or not self.made_calls or self._mixed or self._calls > self._most:
            return None
        if text[self._parser.ends :].strip():
            return None
        while begins and text[begins - 1].isspace():
            begins -= 1
        calls = tuple((start.name, arguments) for start, arguments in zip(self._starts, self._arguments))
        return MadeCalls(tuple(start.id for start in self._starts), calls, text[begins:])


def _call_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(24))


@dataclass(frozen=True)
class Sharing:
    """With whom a request shares what it reads: requests of the same salt; and whether it does (`LLM.generate`)."""

    salt: bytes = b""
    cache: bool | str = True
    conversation: str = ""  # that it is a turn of, by the client's name for it; "": of none
    to_disk: bool = True  # whether the conversation may be saved
    prefix: str = ""  # the document that it goes on from; "": none


COMMON = Sharing()  # by all without a key


@dataclass(frozen=True)
class Prompt:
    """Token ids to begin with, and what divides each answer to them."""

    tokens: list[int]
    divider: Callable[[int], Divider] = field(default=lambda choice: Divider(choice, ReasoningSplitter(None)))
    call_format: str = ""  # how calls in it are written; "": there are none
    sharing: Sharing = COMMON
    marks: Sequence[tuple[int, str]] = ()  # where checkpoints are wished
    remembered: int = 0  # tokens that were taken as an earlier answer had them
    replayed: int = 0  # answers whose calls stand in it as they were written
    ended: Callable[[Request, Divider], None] | None = None  # told of each answer
    document: Document | None = None  # that it goes on from
    prefix: Request | None = None  # whose cache that is; known when nothing else is waited for
