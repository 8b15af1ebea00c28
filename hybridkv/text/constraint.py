"""What an answer must look like, token by token: thoughts that are free, or end at their budget, then a grammar.

    thoughts         free, but for tokens that would end the answer or open a call; at their budget the end mark is
                     written for the model, token by token
    grammar          the tokens that it allows; one that ends the answer only where the grammar accepts
    complete         nothing can follow: the answer has ended, whatever else would end it

All of it is a function of the tokens so far, so a preemption, or a step that was launched in vain, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridkv.text.chat import ChatTemplate
from hybridkv.text.grammar import Grammar, GrammarError, Timer
from hybridkv.text.reasoning import ReasoningSplitter, marks_in
from hybridkv.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

FREE, OPEN, THINKING, BOUND = "free", "open", "thinking", "bound"


@dataclass(frozen=True)
class Thoughts:
    """How an answer's thoughts begin and end.

    Args:
        tokenizer: that spells them.
        marks: what opens and what closes them.
        opened: the prompt opened them already.
        budget: tokens after which they are ended; None: never.
    """

    tokenizer: Tokenizer
    marks: tuple[str, str]
    opened: bool
    budget: int | None = None

    def ids(self, which: int) -> tuple[int, ...]:
        """A mark as tokens."""
        return tuple(self.tokenizer.encode(self.marks[which], bos=False, after=-1))


def thoughts_of(
    template: ChatTemplate, tokenizer: Tokenizer, splitter: ReasoningSplitter, budget: int | None = None
) -> Thoughts | None:
    """How the answer to a prompt thinks, whose thoughts `splitter` divides; None: it does not."""
    marks = marks_in(template.source)
    return Thoughts(tokenizer, marks, splitter.opened, budget) if marks is not None and splitter.marked else None


@dataclass(frozen=True)
class Constraint:
    """What answers must look like; `start` for each of them.

    Args:
        grammar: of all that follows the thoughts; None: free.
        thoughts: None: there are none.
        opening: tokens that would open a call where none may be: in thoughts before a grammar.
        banned: tokens that must never come.
        timer: where masks are counted.
    """

    grammar: Grammar | None = None
    thoughts: Thoughts | None = None
    opening: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    timer: Timer | None = None

    @property
    def follows(self) -> bool:
        """Whether tokens have to be followed at all."""
        return self.grammar is not None or (self.thoughts is not None and self.thoughts.budget is not None)

    def start(self, ends_at: frozenset[int]) -> Following:
        """At the beginning of an answer. `ends_at`: tokens that would end it."""
        return Following(self, ends_at)


class Following:
    """One answer's place in its constraint."""

    def __init__(self, constraint: Constraint, ends_at: frozenset[int]) -> None:
        self._constraint, self._ends_at = constraint, ends_at
        self._matcher: LLMatcher | None = None if constraint.grammar is None else constraint.grammar.matcher()
        self.timer = constraint.timer or Timer()
        self._seen = 0  # tokens of the answer
        self._said = b""  # the end of the thoughts' text
        self._forced = 0  # tokens of the end mark that were written for the model
        thoughts = constraint.thoughts
        self._begin = () if thoughts is None else thoughts.ids(0)
        self._end = () if thoughts is None else thoughts.ids(1)
        after = FREE if self._matcher is None else BOUND
        self._state = after if thoughts is None else THINKING if thoughts.opened else OPEN
        if self._state == OPEN and self._matcher is not None and len(self._begin) != 1:
            self._state = BOUND  # the mark's letters might as well begin the grammar
        self._after = after
        self.words = 0 if constraint.grammar is None else constraint.grammar.words

    @property
    def bound(self) -> bool:
        """Whether a grammar says what ends the answer."""
        return self._matcher is not None

    # ---- tokens that came

    def see(self, token: int) -> str | None:
        """The answer's next token. "end": it ends the answer and is no part of it; "done": the answer is complete."""
        self._seen += 1
        if self._state == OPEN:
            self._open(token)
            if self._state != BOUND:
                return None
        if self._state == THINKING:
            self._think(token)
            return "done" if self._state == BOUND and self._stopped else None
        return self._consume(token) if self._state == BOUND else None

    def _open(self, token: int) -> None:
        """The first tokens: of the mark that opens thoughts, or of the answer."""
        if token != self._begin[self._seen - 1]:
            self._state = self._after
        elif self._seen == len(self._begin):
            self._state = THINKING

    def _think(self, token: int) -> None:
        thoughts = self._constraint.thoughts
        assert thoughts is not None
        if self._forcing:
            self._forced += 1
            if self._forced == len(self._end):
                self._state = self._after
            return
        mark, tokenizer = thoughts.marks[1].encode(), thoughts.tokenizer
        if not tokenizer.joins_bytes:
            self._said += tokenizer.token_text(token).encode()
        else:
            self._said += tokenizer.piece(token, skip_special=False)
        before, found, rest = self._said.partition(mark)
        self._said = rest if found else before[-len(mark) :]
        if found:
            self._state = self._after
            self._begin_with(rest)

    def _begin_with(self, rest: bytes) -> None:
        """A token ended the thoughts and goes on with text: that is the beginning of the answer."""
        text = rest.decode("utf-8", "replace").lstrip()
        thoughts = self._constraint.thoughts
        if text and self._matcher is not None and thoughts is not None:
            for token in thoughts.tokenizer.encode(text, bos=False, special=False, after=-1):
                self._consume(token)

    def _consume(self, token: int) -> str | None:
        matcher = self._matcher
        assert matcher is not None
        ends = token in self._ends_at
        if ends and matcher.is_accepting():
            return "end"
        if not matcher.consume_token(token):
            raise GrammarError(f"the grammar does not take a token of its own mask: {matcher.get_error()[:200]}")
        if self._stopped:
            return "end" if matcher.stop_reason() == "EndOfSentence" else "done"
        return "done" if ends and matcher.is_accepting() else None

    @property
    def _stopped(self) -> bool:
        matcher = self._matcher
        if matcher is None:
            return False
        if matcher.is_error():
            raise GrammarError(f"the grammar failed: {matcher.get_error()[:200]}")
        return matcher.is_stopped()

    # ---- tokens that may come

    @property
    def _forcing(self) -> bool:
        """Whether the thoughts have used up their budget. The token that is seen now is counted already."""
        thoughts = self._constraint.thoughts
        budget = None if thoughts is None else thoughts.budget
        return budget is not None and (self._forced > 0 or self._seen > budget)

    def fill(self, row: np.ndarray) -> bool:
        """Write a bit for each token that may come next to row [words] int32; False: all may, and nothing is
        written. Raises GrammarError.
        """
        thoughts = self._constraint.thoughts
        if self._state == THINKING and thoughts is not None:
            if thoughts.budget is not None and self._seen >= thoughts.budget:
                return self._only(row, self._end[self._forced])
            if self._matcher is None:
                return False
            row[:] = -1
            _clear(row, [*self._ends_at, *self._constraint.opening])
            return True
        if self._matcher is None:
            return False
        matcher = self._matcher
        words = row[: self.words]
        row[self.words :] = 0
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise GrammarError(f"the grammar failed: {matcher.get_error()[:200]}")
        if self._state == OPEN:
            _set(row, self._begin)
        if matcher.is_accepting():
            _set(row, self._ends_at)
        if not row.any():
            raise GrammarError("the grammar leaves no token to choose from")
        return True

    @staticmethod
    def _only(row: np.ndarray, token: int) -> bool:
        row[:] = 0
        _set(row, (token,))
        return True


def _bits(ids: Sequence[int] | frozenset[int]) -> tuple[Any, Any]:
    found = np.fromiter(ids, np.int64)
    return found >> 5, (np.int64(1) << (found & 31)).astype(np.uint32).view(np.int32)


def _set(row: np.ndarray, ids: Sequence[int] | frozenset[int]) -> None:
    np.bitwise_or.at(row, *_bits(ids))


def _clear(row: np.ndarray, ids: Sequence[int]) -> None:
    places, bits = _bits(ids)
    np.bitwise_and.at(row, places, ~bits)
