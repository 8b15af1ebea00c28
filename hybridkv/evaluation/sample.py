"""Sample: a text to read, and what is asked about it. What every task makes and every run asks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

CountTokens = Callable[[str], int]  # tokens of a text, as the model under test counts them


@dataclass(frozen=True)
class Question:
    """What is asked after the text.

    Args:
        text: the question.
        references: strings that a right answer has; case does not matter.
        answer_prefix: how the answer begins; it is given, not generated. "": nothing is given.
        max_tokens: tokens of the answer at the most.
        forbidden: words that a right answer must not have.
    """

    text: str
    references: tuple[str, ...]
    answer_prefix: str = ""
    max_tokens: int = 32
    forbidden: tuple[str, ...] = ()

    def score(self, answer: str) -> float:
        """Share of the references that the answer has, from 0 to 1; 0 if it has a forbidden word.

        A reference counts as a whole word only: `sea` is not in "season", nor 123 in "41234".
        """
        if any(_has(answer, word) for word in self.forbidden):
            return 0.0
        return sum(_has(answer, reference) for reference in self.references) / len(self.references)


@dataclass(frozen=True)
class Sample:
    """One text and the questions about it. `questions` after the first are asked of the same cache, as next turns.

    Args:
        task: the name of the task.
        number: which of the task's samples.
        document: what is read, and what may be cut before the question is known.
        questions: one, or several that follow one another.
        system: what stands in the system prompt; "": the model's own default.
    """

    task: str
    number: int
    document: str
    questions: tuple[Question, ...]
    system: str = ""


def _has(answer: str, words: str) -> bool:
    """Whether the words stand in the answer, in any case, and are not a part of longer words or numbers."""
    before = r"(?<!\w)" if words[0].isalnum() else ""
    after = r"(?!\w)" if words[-1].isalnum() else ""
    spaced = r"\s+".join(re.escape(word) for word in words.split())
    return re.search(before + spaced + after, answer, re.IGNORECASE) is not None
