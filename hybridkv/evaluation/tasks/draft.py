"""Draft: a sample whose document can be made of any length, and the search for the length that was asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hybridkv.errors import HybridKVError
from hybridkv.evaluation.sample import CountTokens, Question

TEMPLATE_TOKENS = 60  # room for what a chat template adds
LEAST, AIM = 0.93, 0.97  # shares of the tokens asked for: the shortest that is right, and what is tried first
PROBE = 16  # units of the first guess


@dataclass(frozen=True)
class Request:
    """What a task makes a draft of.

    Args:
        rng: where all choices come from.
        number: which of the task's samples.
        tokens: length of the prompt that is wanted; what stands in a text may depend on it, its length is fitted later.
        depth: where what is asked for should stand, from 0 (the document's beginning) to 1; even over the numbers.
    """

    rng: random.Random
    number: int
    tokens: int
    depth: float


@dataclass(frozen=True)
class Draft:
    """A sample without its length.

    Args:
        document: the document with so many units (sentences, lines, words); the same number gives the same text.
        questions: what is asked.
        least: the fewest units.
        system: the system prompt.
    """

    document: Callable[[int], str]
    questions: tuple[Question, ...]
    least: int = 0
    system: str = ""

    @property
    def surroundings(self) -> str:
        """All that is read besides the document, in one text: only its length counts. Earlier answers are among it."""
        parts = [self.system]
        for question in self.questions:
            parts += [question.text, question.answer_prefix]
        for question in self.questions[:-1]:
            parts.append(", ".join(question.references))
        return "\n\n".join(part for part in parts if part)


@dataclass
class Stream:
    """Units that are made when they are needed, and kept, so that a longer document begins as the shorter one."""

    source: Iterator[str]
    made: list[str] = field(default_factory=list)

    def take(self, units: int) -> list[str]:
        """The first so many units."""
        while len(self.made) < units:
            self.made.append(next(self.source))
        return self.made[:units]


def fit(draft: Draft, tokens: int, count: CountTokens, task: str) -> str:
    """The document with which the whole prompt has at most `tokens` tokens, and hardly fewer.

    The tokenizer is slow beside the generator. So it counts the shortest document and a small one; from these the
    tokens of a character are known, the length is found in characters, and the whole is counted to be sure.
    """

    def counted(document: str) -> int:
        turns = len(draft.questions)
        return count(f"{document}\n\n{draft.surroundings}") + TEMPLATE_TOKENS * turns

    shortest = draft.document(draft.least)
    base = counted(shortest)
    if base > tokens:
        enough = base + base // 8  # a sample of another length has other words
        raise HybridKVError(
            f"task '{task}' does not fit into {tokens} tokens: its shortest prompt has {base} with this tokenizer; "
            f"ask for {enough} tokens or more, or leave the task out"
        )
    fits, too_long, best = draft.least, None, shortest  # units that are known to fit, and not to
    size, a_character = draft.least + PROBE, None
    while True:
        document = draft.document(size)
        found = counted(document)
        if tokens * LEAST <= found <= tokens:
            return document
        if found > tokens:
            too_long = size
        else:
            fits, best = size, document
        if too_long is not None and too_long - fits <= 1:
            return best
        if found > base and len(document) > len(shortest):
            a_character = (found - base) / (len(document) - len(shortest))
        if a_character is None:
            raise HybridKVError(
                f"`count` gives no more tokens for {len(document)} characters than for {len(shortest)}; "
                "give what counts with the model's own tokenizer"
            )
        size = _units_of_length(draft, size, len(shortest) + (tokens * AIM - base) / a_character)
        size = max(size, fits + 1) if too_long is None else min(max(size, fits + 1), too_long - 1)


def _units_of_length(draft: Draft, size: int, wanted: float) -> int:
    """How many units make a document of so many characters: a few steps along the line from the shortest one."""
    shortest = len(draft.document(draft.least))
    for _ in range(3):
        a_unit = max(1, (len(draft.document(size)) - shortest) / (size - draft.least))
        size = draft.least + max(1, int((wanted - shortest) / a_unit))
    return size
