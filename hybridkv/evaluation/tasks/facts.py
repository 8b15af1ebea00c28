"""Facts about people, in plain sentences among prose: asked in other words, twice, or under an instruction."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridkv.evaluation.sample import Question
from hybridkv.evaluation.tasks import words
from hybridkv.evaluation.tasks.draft import Draft, Request
from hybridkv.evaluation.tasks.needles import different
from hybridkv.evaluation.tasks.prose import depths, hide, prose

HEADING = "This text tells something about several people. Remember it; you will be asked."
ANSWER_TOKENS = 24
FEW = 512  # tokens under which a text has fewer decoys


@dataclass(frozen=True)
class Kind:
    """A kind of fact: how a text states it, how it is asked for in other words, and its values.

    Args:
        statement, question, answer_prefix: texts with {name}; the statement with {value} too.
        values: words to choose from; empty: a number of four digits.
    """

    statement: str
    question: str
    answer_prefix: str
    values: tuple[str, ...] = ()

    def value(self, rng: random.Random) -> str:
        """One of the values."""
        return rng.choice(self.values) if self.values else str(rng.randrange(2000, 10000))


KINDS = (
    Kind("{name} grew up in {value}.", "Which town was the childhood home of {name}?",
         "The childhood home of {name} was", words.PLACES),
    Kind("{name} earns a living as a {value}.", "What is the occupation of {name}?",
         "By occupation {name} is a", words.TRADES),
    Kind("{name} lives together with a {value}.", "Which pet does {name} have?",
         "The pet of {name} is a", words.ANIMALS),
    Kind("{name} practises the {value} every evening.", "Which instrument does {name} play?",
         "{name} plays the", words.INSTRUMENTS),
    Kind("{name} gets a rash from {value}.", "Which food is {name} allergic to?",
         "{name} is allergic to", words.FOODS),
    Kind("{name} paid {value} crowns for the boat.", "How much did the boat cost {name}?",
         "The price that {name} paid was"),
    Kind("The safe of {name} opens with {value}.", "Which code unlocks the strongbox of {name}?",
         "The code that unlocks the strongbox of {name} is"),
)  # fmt: skip


@dataclass(frozen=True)
class Measure:
    """A number with a unit, and another word for the unit."""

    statement: str
    question: str
    answer_prefix: str
    unit: str
    instead: str


MEASURES = (
    Measure("{name} paid {value} crowns for the boat.", "How much did {name} pay for the boat?",
            "For the boat {name} paid", "crowns", "coins"),
    Measure("{name} walked {value} kilometres in a year.", "How far did {name} walk in a year?",
            "In a year {name} walked", "kilometres", "km"),
    Measure("{name} sold {value} kilograms of flour.", "How much flour did {name} sell?",
            "Of flour {name} sold", "kilograms", "kilos"),
    Measure("{name} spent {value} minutes at the station.", "How long was {name} at the station?",
            "At the station {name} spent", "minutes", "mins"),
)  # fmt: skip

MARKS = (
    ("square brackets", "[", "]"), ("curly brackets", "{", "}"), ("round brackets", "(", ")"), ("hash marks", "#", "#"),
)  # fmt: skip


def a_name(rng: random.Random) -> str:
    """A first and a last name."""
    return f"{rng.choice(words.FIRST_NAMES)} {rng.choice(words.LAST_NAMES)}"


def people(rng: random.Random) -> Iterator[str]:
    """Names of people of whom no two share a first or a last name."""
    first, last = list(words.FIRST_NAMES), list(words.LAST_NAMES)
    rng.shuffle(first)
    rng.shuffle(last)
    return (f"{one} {other}" for one, other in zip(first, last))


def _facts(kind: Kind, names: Iterator[str], number: int, rng: random.Random) -> tuple[list[str], Question]:
    """So many sentences of a kind, about different people and with different values; asked is the first."""
    values = different(kind.value, rng)
    pairs = [(next(names), next(values)) for _ in range(number)]
    name, value = pairs[0]
    sentences = [kind.statement.format(name=name, value=value) for name, value in pairs]
    question = Question(kind.question.format(name=name), (value,), kind.answer_prefix.format(name=name), ANSWER_TOKENS)
    return sentences, question


def paraphrase(request: Request) -> Draft:
    """A fact that is asked for in other words; the text says the same of other people, with other values."""
    rng = request.rng
    sentences, asked = _facts(rng.choice(KINDS), people(rng), 3 if request.tokens < FEW else 7, rng)
    needles = list(zip(depths(rng, request.depth, len(sentences) - 1), sentences))
    return Draft(hide(needles, prose(rng, without=asked.references), HEADING), (asked,))


def two_questions(request: Request) -> Draft:
    """Two facts far apart and two questions, one after the other; odd samples ask for the later fact first."""
    rng = request.rng
    names = people(rng)
    ((early, *_), first), ((late, *_), second) = [_facts(kind, names, 1, rng) for kind in rng.sample(KINDS, 2)]
    # this task is about what is left for the second question, so the answers begin in the text's own words
    first, second = [
        replace(asked, answer_prefix=sentence.split(f" {asked.references[0]}")[0])
        for sentence, asked in ((early, first), (late, second))
    ]
    needles = [(request.depth * 0.35, early), (0.65 + (1 - request.depth) * 0.35, late)]
    questions = (first, second) if request.number % 2 == 0 else (second, first)
    document = hide(needles, prose(rng, without=first.references + second.references), HEADING)
    return Draft(document, questions)


def instruction(request: Request) -> Draft:
    """A fact, asked for while the system prompt says how to answer: a first word, a word never to use, or marks."""
    rng = request.rng
    measure = rng.choice(MEASURES)
    names, numbers = people(rng), different(lambda rng: str(rng.randrange(2000, 10000)), rng)
    pairs = [(next(names), next(numbers)) for _ in range(2 if request.tokens < FEW else 4)]
    name, value = pairs[0]
    text, prefix, forbidden = measure.question.format(name=name), measure.answer_prefix.format(name=name), ()
    if request.number % 3 == 0:
        word = rng.choice(words.ADJECTIVES).capitalize()
        system, prefix = f'Begin every answer with "{word}:".', ""
        text = f"{text} Answer with the number only."
        right = f"{word}: {value}"
    elif request.number % 3 == 1:
        system = f'Never write the word "{measure.unit}". Write "{measure.instead}" instead.'
        right, forbidden = f"{value} {measure.instead}", (measure.unit,)
    else:
        marks, opening, closing = rng.choice(MARKS)
        system = f"Write every number in {marks}, like {opening}12{closing}."
        right = f"{opening}{value}{closing}"
    asked = Question(text, (right,), prefix, ANSWER_TOKENS, forbidden)
    sentences = [measure.statement.format(name=name, value=value) for name, value in pairs]
    needles = list(zip(depths(rng, request.depth, len(sentences) - 1), sentences))
    return Draft(hide(needles, prose(rng, without=(value,)), HEADING), (asked,), system=system)
