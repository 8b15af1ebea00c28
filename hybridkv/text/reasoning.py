"""Thoughts apart from the answer, where the chat template marks them, piece by piece as the text comes.

Three kinds of prompt: one that ends with the mark that opens the thoughts (the answer's text begins inside them), one
that ends with the mark that closes them (thinking is off: all of it is answer), and one that ends with neither (the
model opens them itself, first thing, or answers at once).

White space beside a mark belongs to the mark, not to the text: templates strip it and write their own when they show a
turn again. (SGLang's parser strips it too, vLLM's leaves it.) An answer without thoughts is left as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.text.chat import ChatTemplate

MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
)


class ChatPiece(NamedTuple):
    """A piece of what a model says: `reasoning` True in its thoughts, False in its answer."""

    text: str
    reasoning: bool


class ReasoningSplitter:
    """Divides the text of one turn into reasoning and answer. How it came in pieces changes nothing.

    marks: what opens and closes the thoughts; None: there are none, all is answer.
    opened: the prompt opened them already.
    """

    def __init__(self, marks: tuple[str, str] | None, opened: bool = False) -> None:
        self._marks = marks or ("", "")
        self.marked, self.opened = marks is not None, opened
        self._step = self._start if marks else self._answer
        self._held = ""  # not given out yet: white space and perhaps the beginning of a mark
        self._texts: tuple[list[str], list[str]] = ([], [])  # answer, reasoning
        self._last = False  # no more text comes

    @property
    def reasoning(self) -> str | None:
        """The thoughts given out so far; None: there were none."""
        return "".join(self._texts[True]) or None

    @property
    def answer(self) -> str:
        """The answer given out so far."""
        return "".join(self._texts[False])

    @property
    def answering(self) -> bool:
        """Whether the thoughts are over, or there are none."""
        return self._step in (self._answer, self._closed) or (self._step == self._start and not self.opened)

    def end_thoughts(self) -> list[ChatPiece]:
        """What follows is no thought, though no mark said so; returns what was held back."""
        self._last = True
        pieces = self.push("")
        self._last, self._step = False, self._answer
        return pieces

    def push(self, text: str) -> list[ChatPiece]:
        """More text; returns what is certain now, at most a piece of each kind."""
        self._held += text
        pieces: list[ChatPiece] = []
        step = None
        while step != self._step:  # a step that meets its mark hands the rest to the next one
            step = self._step
            if piece := step():
                pieces.append(piece)
        return pieces

    def finish(self) -> list[ChatPiece]:
        """No more text; returns what was held back. An answer cut inside its thoughts is all reasoning."""
        self._last = True
        return self.push("")

    # Each step takes from the front of what is held; where it ends, it names the next.

    def _start(self) -> ChatPiece | None:
        """Before the first character that counts. A mark is dropped even if the prompt wrote one before."""
        text, mark = self._held.lstrip(), self._marks[0]
        if text.startswith(mark):
            self._held, self._step = text[len(mark) :], self._open
        elif self._last or not mark.startswith(text):
            self._step = self._open if self.opened else self._answer
        return None

    def _open(self) -> ChatPiece | None:
        """After the opening mark: white space goes."""
        self._held = self._held.lstrip()
        if self._held or self._last:
            self._step = self._thoughts
        return None

    def _thoughts(self) -> ChatPiece | None:
        mark = self._marks[1]
        text, found, rest = self._held.partition(mark)
        if found:
            self._step = self._closed
            text = text.rstrip()
        else:
            text = text[: len(text) - (0 if self._last else begun(text, mark))].rstrip()
            rest = "" if self._last else self._held[len(text) :]
        self._held = rest
        return self._give(text, reasoning=True)

    def _closed(self) -> ChatPiece | None:
        """After the closing mark: white space goes."""
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._answer
        return None

    def _answer(self) -> ChatPiece | None:
        text, self._held = self._held, ""
        return self._give(text, reasoning=False)

    def _give(self, text: str, *, reasoning: bool) -> ChatPiece | None:
        if not text:
            return None
        self._texts[reasoning].append(text)
        return ChatPiece(text, reasoning)


def begun(text: str, mark: str) -> int:
    """How many characters of the text's end may be the beginning of the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def marks_in(source: str) -> tuple[str, str] | None:
    """The marks around thoughts that a template knows; None: it knows none."""
    return next((marks for marks in MARKS if marks[1] in source), None)


def reasoning_of(template: ChatTemplate, prompt: str) -> ReasoningSplitter:
    """The splitter for the answer to a rendered prompt."""
    marks, prompt = marks_in(template.source), prompt.rstrip()
    if marks is None or prompt.endswith(marks[1]):
        return ReasoningSplitter(None)
    return ReasoningSplitter(marks, opened=prompt.endswith(marks[0]))


def assistant_message(answer: str, reasoning: str | None = None) -> dict[str, str]:
    """A turn of the model for the messages of the next prompt. Thoughts stand in a key of their own: the template
    decides whether earlier ones are shown again.
    """
    message = {"role": "assistant", "content": answer}
    return message | {"reasoning_content": reasoning} if reasoning else message
