"""The one stream of events that every dialect formats: what a model said, and how it ended.

An answer is divided once, here: thoughts, text and calls. A dialect is a function of these events and of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hybridkv.request import TokenLogprobs
from hybridkv.text.reasoning import ReasoningSplitter


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


Event = Said | Tokens | Finish


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
    def made_calls(self) -> bool:
        """Whether a whole call was made."""
        return False


@dataclass(frozen=True)
class Prompt:
    """Token ids to begin with, and what divides each answer to them."""

    tokens: list[int]
    divider: Callable[[int], Divider] = field(default=lambda choice: Divider(choice, ReasoningSplitter(None)))
