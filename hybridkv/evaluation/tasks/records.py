"""Records: a phone book, and a transcript of tool calls in which each call needs what an earlier one gave."""

from __future__ import annotations

import json
import random

from hybridkv.evaluation.sample import Question
from hybridkv.evaluation.tasks import words
from hybridkv.evaluation.tasks.draft import Draft, Request, Stream
from hybridkv.evaluation.tasks.facts import a_name
from hybridkv.evaluation.tasks.needles import different
from hybridkv.evaluation.tasks.prose import prose

CALLS = 20
FIND = ("find", "open", "create", "load")  # what the calls of a transcript do
NEXT = ("close", "print", "approve", "archive")  # what the call after them does


def a_phone_number(rng: random.Random) -> str:
    """Three digits, a hyphen and four digits."""
    return f"{rng.randrange(200, 1000)}-{rng.randrange(10000):04}"


def an_id(rng: random.Random) -> str:
    """A capital letter and five digits: `K-48213`."""
    return f"{rng.choice('ABCDEFGHJKLMNPQRSTUVWXYZ')}-{rng.randrange(10000, 100000)}"


def phone_book(request: Request) -> Draft:
    """Names and numbers, a line each; one number is asked for."""
    names, numbers = different(a_name, request.rng), different(a_phone_number, request.rng)
    name, value = next(names), next(numbers)
    stream = Stream(f"{next(names)}: {next(numbers)}" for _ in iter(int, 1))

    def document(units: int) -> str:
        lines = stream.take(units)
        here = round(request.depth * units)
        return "\n".join(["This is a phone book.", "", *lines[:here], f"{name}: {value}", *lines[here:]])

    asked = Question(f"What is the phone number of {name}?", (value,), f"The phone number of {name} is", 24)
    return Draft(document, (asked,), least=1)


def tool_chain(request: Request) -> Draft:
    """A transcript of tool calls whose arguments are earlier results; the next argument, or a result, is asked for."""
    rng = request.rng
    calls = min(CALLS, max(3, request.tokens // 100))
    fields = rng.sample(words.FIELDS, calls)
    ids = different(an_id, rng)
    results = [next(ids) for _ in range(calls)]
    tools = [f"{rng.choice(FIND)}_{field}" for field in fields]
    needs = [rng.randrange(max(0, i - 4), i) for i in range(1, calls)]  # the earlier result that call i uses
    arguments = [{"name": a_name(rng)}] + [{fields[i]: results[i]} for i in needs]
    notes = Stream(prose(rng))

    def document(units: int) -> str:
        sentences = notes.take(units)
        lines = ["This is a transcript of tool calls and their results.", ""]
        for i in range(calls):
            note = " ".join(sentences[i::calls])
            result = {fields[i]: results[i], **({"note": note} if note else {})}
            lines += [json.dumps({"tool": tools[i], **arguments[i]}), json.dumps(result)]
        return "\n".join(lines)

    asked = int(request.depth * calls)
    field, value = fields[asked], json.dumps(results[asked])
    if request.number % 2 == 0:
        following = f"{rng.choice(NEXT)}_{field}"
        question = Question(
            f"The next call is {following}. Which {field} does it need?",
            (value,),
            f'{{"tool": "{following}", "{field}":',
            24,
        )
    else:
        question = Question(
            f"Which {field} did {tools[asked]} return?", (value,), f'{tools[asked]} returned {{"{field}":', 24
        )
    return Draft(document, (question,))
