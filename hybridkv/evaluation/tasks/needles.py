"""Needles: values of keys, hidden in noise, in prose or among other needles (RULER's niah tasks)."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator

from hybridkv.errors import HybridKVError
from hybridkv.evaluation.sample import Question
from hybridkv.evaluation.tasks import words
from hybridkv.evaluation.tasks.draft import Draft, Request, Stream
from hybridkv.evaluation.tasks.prose import depths, hide, noise, prose

NUMBER_TOKENS = 24  # seven digits, one token each with many tokenizers, and room
UUID_TOKENS = 48  # 36 characters
FOUR = 4
TRIES = 1000  # in a row, for a name that was not used yet

MakeText = Callable[[random.Random], str]


def a_key(rng: random.Random) -> str:
    """A key of two words: `quiet-harbour`."""
    return f"{rng.choice(words.ADJECTIVES)}-{rng.choice(words.NOUNS)}"


def a_number(rng: random.Random) -> str:
    """A number of seven digits."""
    return str(rng.randrange(10**6, 10**7))


def a_uuid(rng: random.Random) -> str:
    """A random UUID, in its usual 36 characters."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def different(make: MakeText, rng: random.Random) -> Iterator[str]:
    """Texts that `make` makes, none of them twice."""
    seen: set[str] = set()
    text, tries = "", 0
    while tries < TRIES:
        text = make(rng)
        tries += 1
        if text not in seen:
            seen.add(text)
            tries = 0
            yield text
    raise HybridKVError(
        f"a text of this length needs more than {len(seen)} different names like '{text}', and there are hardly more; "
        "ask for fewer tokens, or leave the task out"
    )


def needle(kind: str, key: str, value: str) -> str:
    """The sentence that hides a value."""
    return f"The secret {kind} of {key} is {value}."


def heading(kind: str) -> str:
    """What the reader is told before the text."""
    return f"Secret {kind}s are hidden in this text. Remember them; you will be asked."


def question(kind: str, key: str, value: str, max_tokens: int) -> Question:
    """Asks for the value of one key."""
    return Question(f"What is the secret {kind} of {key}?", (value,), f"The secret {kind} of {key} is", max_tokens)


def single_in_noise(request: Request) -> Draft:
    """One number in a few sentences that repeat."""
    rng = request.rng
    key, value = a_key(rng), a_number(rng)
    document = hide([(request.depth, needle("number", key, value))], noise(rng), heading("number"))
    return Draft(document, (question("number", key, value, NUMBER_TOKENS),))


def single_in_prose(request: Request) -> Draft:
    """One number in prose."""
    rng = request.rng
    key, value = a_key(rng), a_number(rng)
    document = hide([(request.depth, needle("number", key, value))], prose(rng), heading("number"))
    return Draft(document, (question("number", key, value, NUMBER_TOKENS),))


def single_uuid_in_prose(request: Request) -> Draft:
    """One UUID in prose."""
    rng = request.rng
    key, value = a_key(rng), a_uuid(rng)
    document = hide([(request.depth, needle("code", key, value))], prose(rng), heading("code"))
    return Draft(document, (question("code", key, value, UUID_TOKENS),))


def four_keys_in_prose(request: Request) -> Draft:
    """Four keys with a number each, in prose; one is asked for."""
    rng = request.rng
    keys, values = different(a_key, rng), different(a_number, rng)
    pairs = [(next(keys), next(values)) for _ in range(FOUR)]
    where = depths(rng, request.depth, FOUR - 1)
    needles = [(depth, needle("number", key, value)) for depth, (key, value) in zip(where, pairs)]
    return Draft(hide(needles, prose(rng), heading("number")), (question("number", *pairs[0], NUMBER_TOKENS),))


def numbers_only(request: Request) -> Draft:
    """Nothing but needles: word keys and numbers."""
    return _needles_only(request, "number", a_key, a_number, NUMBER_TOKENS)


def uuids_only(request: Request) -> Draft:
    """Nothing but needles: UUIDs as keys and as values."""
    return _needles_only(request, "code", a_uuid, a_uuid, UUID_TOKENS)


def _needles_only(request: Request, kind: str, make_key: MakeText, make_value: MakeText, max_tokens: int) -> Draft:
    keys, values = different(make_key, request.rng), different(make_value, request.rng)
    asked = question(kind, next(keys), next(values), max_tokens)
    asked_line = f"{asked.answer_prefix} {asked.references[0]}."
    stream = Stream(needle(kind, next(keys), next(values)) for _ in iter(int, 1))

    def document(units: int) -> str:
        lines = stream.take(units)
        here = round(request.depth * units)
        return "\n".join([heading(kind), "", *lines[:here], asked_line, *lines[here:]])

    return Draft(document, (asked,), least=1)


def four_values(request: Request) -> Draft:
    """One key with four numbers, in prose; all four are asked for."""
    rng = request.rng
    key, values = a_key(rng), different(a_number, rng)
    where = sorted(rng.random() for _ in range(FOUR))
    numbers = [next(values) for _ in range(FOUR)]
    needles = [(depth, f"One secret number of {key} is {number}.") for depth, number in zip(where, numbers)]
    asked = Question(
        f"What are the four secret numbers of {key}?",
        tuple(numbers),
        f"The four secret numbers of {key} are",
        FOUR * NUMBER_TOKENS,
    )
    return Draft(hide(needles, prose(rng), heading("number")), (asked,))


def four_queries(request: Request) -> Draft:
    """Four keys with a number each, in prose; all four are asked for."""
    rng = request.rng
    makes_keys, values = different(a_key, rng), different(a_number, rng)
    keys = [next(makes_keys) for _ in range(FOUR)]
    numbers = [next(values) for _ in range(FOUR)]
    needles = [(rng.random(), needle("number", key, number)) for key, number in zip(keys, numbers)]
    listed = f"{', '.join(keys[:-1])} and {keys[-1]}"
    asked = Question(
        f"What are the secret numbers of {listed}?",
        tuple(numbers),
        f"The secret numbers of {listed} are",
        FOUR * NUMBER_TOKENS,
    )
    return Draft(hide(needles, prose(rng), heading("number")), (asked,))
