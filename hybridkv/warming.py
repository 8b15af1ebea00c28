"""What the next turn of a chat begins with, for whoever reads it before it comes (engine/warm.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridkv.engine.warm import Seen, WarmReader
from hybridkv.text.marks import ChatMarks

QUESTIONS = ("a", "1 b")  # what the user may say next: all prompts that begin as both of these do begin so


def offer_next_turn(
    reader: WarmReader | None,
    marks: ChatMarks,
    said: Sequence[int],
    prompt: int,
    spell: Callable[[str], Sequence[int]],
    salt: bytes = b"",
) -> None:
    """An answer has been given: its conversation's next turn may be read, if the template shows it otherwise.

    Args:
        reader: of the model; None: next turns are not read before they come.
        marks: of its chat template.
        said: token ids of the prompt and its answer, as they were computed.
        prompt: how many of them are the prompt's.
        spell: token ids of the next prompt, if the user says this; it may fail. Any thread calls it, later.
        salt: under which the conversation is kept.
    """
    if reader is None or not marks.drops_thinking:
        return

    def make() -> Seen:
        first, *others = (list(spell(text)) for text in QUESTIONS)
        same = next((i for i, ids in enumerate(zip(first, *others)) if len(set(ids)) > 1), len(first))
        return first[:same], [(at, "begin") for at, _ in marks.messages(first[:same])]

    reader.offer(salt, said, prompt, make)
