"""Sample: a text to read, and what is asked about it. What every task makes and every run asks."""

from __future__ import annotations

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
        """Share of the references that the answer has, from 0 to 1; 0 if it has a forbidden word."""
        said = answer.lower()
        if any(word.lower() in said for word in self.forbidden):
            return 0.0
        return sum(reference.lower() in said for reference in self.references) / len(self.references)


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
