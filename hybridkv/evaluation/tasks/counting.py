"""What is spread over the whole text: a chain of variables (RULER's vt), and words to be counted (cwe, fwe)."""

from __future__ import annotations

import random
import string

from hybridkv.evaluation.sample import Question
from hybridkv.evaluation.tasks import words
from hybridkv.evaluation.tasks.draft import Draft, Request
from hybridkv.evaluation.tasks.needles import different
from hybridkv.evaluation.tasks.prose import hide, noise

HOPS = 4
COMMON = 10  # words that a cwe list has often
FREQUENT = 3  # words that fwe asks for
CODED = 60  # different words of a coded text, at the most
DOTS = "..."  # stands where fwe's text says nothing


def a_variable(rng: random.Random) -> str:
    """A name of five capital letters."""
    return "".join(rng.choices(string.ascii_uppercase, k=5))


def variable_tracking(request: Request) -> Draft:
    """A value is given to a variable, and from it to another, four times, in noise: which variables have it?"""
    rng = request.rng
    makes_names = different(a_variable, rng)
    names = [next(makes_names) for _ in range(HOPS + 1)]
    value = str(rng.randrange(10**4, 10**5))
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {later} = VAR {earlier}." for earlier, later in zip(names, names[1:])]
    where = sorted(rng.random() for _ in lines)
    document = hide(list(zip(where, lines)), noise(rng), "Variables get values in this text. Remember them.")
    asked = Question(
        f"Which variables have the value {value}, directly or from another variable?",
        tuple(names),
        f"The {HOPS + 1} variables with the value {value} are",
        64,
    )
    return Draft(document, (asked,))


def common_words(request: Request) -> Draft:
    """A numbered list in which ten words are ten times as frequent as the rest (30 times and 3 times at 4K tokens)."""
    rng = request.rng
    pool = rng.sample(words.NOUNS + words.ADJECTIVES, len(words.NOUNS) + len(words.ADJECTIVES))
    common, rare = pool[:COMMON], pool[COMMON:]
    order = rng.getrandbits(64)

    def document(units: int) -> str:
        often, seldom = _times(units, len(rare))
        left = units - COMMON * often
        listed = [word for word in rare[: -(-left // seldom)] for _ in range(seldom)][:left]
        listed += [""] * (COMMON * often)  # places of the common words
        shuffler = random.Random(order)
        shuffler.shuffle(listed)
        turns = iter(_in_order_of_first(common, often, shuffler))
        lines = " ".join(f"{i}. {word or next(turns)}" for i, word in enumerate(listed, 1))
        return f"This is a numbered list of words. Some of them come often. Remember those.\n\n{lines}"

    asked = Question(
        f"What are the {COMMON} most common words in the list?",
        tuple(common),
        f"The {COMMON} most common words are",
        96,
    )
    return Draft(document, (asked,), least=5 * COMMON)


def _times(units: int, rare_words: int) -> tuple[int, int]:
    """How often a common and a rare word stand in a list of so many words."""
    often = min(30, max(3, units // (2 * COMMON)))
    seldom = max(1, often // 10)
    enough = -(-(units - COMMON * often) // rare_words)  # a very long list has each rare word more often
    return (often, seldom) if enough <= seldom else (10 * enough, enough)


def _in_order_of_first(common: list[str], times: int, rng: random.Random) -> list[str]:
    """Each word so many times, mixed; the first one comes first, and so on: an answer can follow the list."""
    mixed = [i for i in range(len(common)) for _ in range(times)]
    rng.shuffle(mixed)
    rank = {i: place for place, i in enumerate(dict.fromkeys(mixed))}
    return [common[rank[i]] for i in mixed]


def frequent_words(request: Request) -> Draft:
    """Coded words whose frequency falls with the square of the rank: which three come most often?"""
    rng = request.rng
    makes_words = different(a_coded_word, rng)
    coded = [next(makes_words) for _ in range(CODED)]
    order = rng.getrandbits(64)

    def document(units: int) -> str:
        text = [DOTS] * (units * 6 // 10)
        for word, times in zip(coded, _zipf(units)):
            text += [word] * times
        text = text[:units]
        random.Random(order).shuffle(text)
        return f"This is a coded text; {DOTS} means nothing. Some words come often. Remember those.\n\n{' '.join(text)}"

    asked = Question(
        f"Which {FREQUENT} words come most often in the coded text?",
        tuple(coded[:FREQUENT]),
        f"The {FREQUENT} most frequent words are",
        48,
    )
    return Draft(document, (asked,), least=40)


def _zipf(units: int) -> list[int]:
    """How often each coded word stands in a text of so many words; the last one asked for more often than the next."""
    times = [max(1, round(units * 0.6 / rank**2)) for rank in range(2, 2 + CODED)]  # the dots have rank 1
    return times[:FREQUENT] + [min(often, times[FREQUENT - 1] - 1) for often in times[FREQUENT:]]


def a_coded_word(rng: random.Random) -> str:
    """A word of six letters that means nothing."""
    return "".join(rng.choices(string.ascii_lowercase, k=6))
