"""What facts are hidden in: a few sentences again and again (noise), or prose that never comes twice."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files

from hybridkv.evaluation.tasks import words
from hybridkv.evaluation.tasks.draft import Stream

PARAGRAPH = 7  # sentences of a paragraph

NOISE = (
    "The road is long.", "The river is cold.", "The night is quiet.", "We walk on.", "The lamp is lit.",
    "The wind is low.", "Here comes the rain.", "The hills are green.", "The day is warm.", "Nothing moves.",
    "The door is shut.", "The tea is hot.", "One step and one more.", "The birds are loud.", "The snow is deep.",
    "The town is far.", "The stars are out.", "The field is wide.", "Time goes by.", "The dog is asleep.",
)  # fmt: skip

SENTENCES = (
    "{name} {verb} the {adjective} {noun} behind the {noun2}.",
    "{name} {verb} the {noun} and {verb2} the {adjective} {noun2}.",
    "Near the {noun} in {place} stood the {adjective} {noun2}.",
    "In {place} the {noun} was {adjective} and the {noun2} was {adjective2}.",
    "Nobody in {place} {verb} the {noun} before {name} came.",
    "The {adjective} {noun} lay beside the {adjective2} {noun2}.",
    "When the {noun} was {adjective}, {name} {verb} it at once.",
    "{name} and {name2} {verb} the {noun} on the way to {place}.",
    "Every {noun} in {place} looked {adjective} that morning.",
    "At noon {name} {verb} the {noun}, but not the {noun2}.",
    "They say that the {noun} of {place} is {adjective}.",
    "Under the {noun} {name} {verb} one {adjective} {noun2}.",
    "The people of {place} {verb} their {noun} with care.",
    "It was {adjective} in the {noun}, and {name} {verb} the {noun2} twice.",
    "{name} wrote to {name2} about the {adjective} {noun}.",
    "After supper {name} {verb} the {noun} that {name2} {verb2}.",
    "The {noun} beyond {place} is {adjective}, so {name} {verb} the {noun2} instead.",
    "Some {verb} the {noun}; others {verb2} the {noun2}.",
    "By evening the {noun} had grown {adjective}, and the {noun2} too.",
    "{name} never {verb} the {adjective} {noun} again.",
    "From {place} one can see the {noun} and the {adjective} {noun2}.",
    "Last year {name} {verb} the {noun} for {name2}.",
    "The old road passes the {noun}, then the {adjective} {noun2}, then {place}.",
    "\"Who {verb} the {noun}?\" asked {name}, and {name2} looked {adjective}.",
)  # fmt: skip


@cache
def log_sentences() -> tuple[str, ...]:
    """The sentences of the ship's log that the package has, in order, without its headings."""
    text = files("hybridkv").joinpath("data", "petrel_log.txt").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if len(line) > 80]
    return tuple(sentence for line in lines for sentence in re.split(r"(?<=[a-z]\.)(?<![DM]r\.) (?=[A-Z])", line))


def noise(rng: random.Random) -> Iterator[str]:
    """Five of the noise sentences, over and over."""
    round_of_five = rng.sample(NOISE, 5)
    while True:
        yield from round_of_five


def prose(rng: random.Random, without: Sequence[str] = ()) -> Iterator[str]:
    """Made-up sentences, and now and then a few of the log that follow one another.

    Args:
        rng: chooses the words.
        without: no sentence has one of these words.
    """
    log = log_sentences()
    banned = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in without), re.IGNORECASE) if without else None
    while True:
        if rng.random() < 0.08:
            start = rng.randrange(len(log))
            passage = log[start : start + 3]
        else:
            passage = [made_up(rng) for _ in range(5)]
        for sentence in passage:
            if banned is None or not banned.search(sentence):
                yield sentence


def made_up(rng: random.Random) -> str:
    """One sentence of the grammar."""
    pick = rng.choice
    return pick(SENTENCES).format(
        name=pick(words.FIRST_NAMES), name2=pick(words.FIRST_NAMES), place=pick(words.PLACES),
        noun=pick(words.NOUNS), noun2=pick(words.NOUNS), verb=pick(words.VERBS), verb2=pick(words.VERBS),
        adjective=pick(words.ADJECTIVES), adjective2=pick(words.ADJECTIVES),
    )  # fmt: skip


def hide(needles: Sequence[tuple[float, str]], filler: Iterator[str], heading: str) -> Callable[[int], str]:
    """The document of a draft: a heading, then the filler with each needle at its depth (0: first, 1: last)."""
    stream = Stream(filler)
    placed = sorted(needles, key=lambda needle: needle[0])

    def document(units: int) -> str:
        sentences = stream.take(units)
        whole: list[str] = []
        used = 0
        for depth, needle in placed:
            here = round(depth * units)
            whole += sentences[used:here]
            whole.append(needle)
            used = here
        whole += sentences[used:]
        paragraphs = [" ".join(whole[i : i + PARAGRAPH]) for i in range(0, len(whole), PARAGRAPH)]
        return "\n".join([heading, "", *paragraphs])

    return document


def depths(rng: random.Random, asked: float, others: int) -> list[float]:
    """The depth of what is asked for, then those of the other needles: anywhere."""
    return [asked, *(rng.random() for _ in range(others))]
