"""Traces of chats, agents and documents: who asks what when, in segments of text that are told apart by numbers.

Standard library alone, and seeded: the same trace on every machine. A segment stands for so many tokens of one text;
two prompts share what their segments share. `reuse_simulation.py` drives the cache's own bookkeeping with them.

    python bench/reuse_traces.py           requests, tokens and the mean prompt of each trace
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import exp

# Sizes, counts and edits are given; when conversations begin, how quick agents are, how long a context may be and how
# much more often one document is asked about than the next are not, and these are chosen:
SPREAD = {"chat": 2000.0, "agent": 3600.0}  # seconds over which conversations begin
TURN_SECONDS = 60.0  # from one question to the next
CALL_SECONDS = 8.0  # from one call of an agent to the next
CONTEXT = 110_000  # tokens that a prompt can have: what is past it goes, the oldest pairs first
TRIM_AT = 60_000  # of agents that trim before they must
DOCUMENT_SECONDS = 10.0
DOCUMENT_REQUESTS = 300
ZIPF = 1.5  # how much more often the first document is asked about than the second, as a power


@dataclass(frozen=True)
class Segment:
    """`size` tokens of one text, whose name is `number`. Kinds: system, user, thinking, answer, result, and what
    goes on with the message before it: reminder, question.
    """

    number: int
    size: int
    kind: str


@dataclass(frozen=True)
class Asked:
    """A request: the prompt, what the model answers, and whether a later prompt will show that answer as it was."""

    at: float  # seconds
    who: int
    prompt: tuple[Segment, ...]
    answer: tuple[Segment, ...]
    shown_again: bool = True

    @property
    def tokens(self) -> int:
        """Of the prompt."""
        return sum(segment.size for segment in self.prompt)

    @property
    def marks(self) -> list[tuple[int, str]]:
        """Where messages begin; before the last one, and where the reply to the last question begins, are wishes."""
        at, last, reply, asked = 0, 0, 0, False
        found = {}
        for segment in self.prompt:
            if segment.kind not in ("question", "reminder"):  # these go on with the message before them
                reply = at if asked else reply
                asked = segment.kind == "user"
                if segment.kind != "answer":  # thoughts and answer are one message
                    found[at] = "begin"
                    last = at if segment.kind in ("user", "result") else last
            at += segment.size
        found |= {last: "message", at if asked else reply: "reply"}
        return sorted((place, kind) for place, kind in found.items() if place)


class Writer:
    """Makes segments, each with a number of its own."""

    def __init__(self, seed: int) -> None:
        self.rng, self._numbers = random.Random(seed), count(1)

    def text(self, kind: str, size: float) -> Segment:
        return Segment(next(self._numbers), max(1, int(size)), kind)

    def drawn(self, kind: str, median: float, spread: float, most: float = 1e9) -> Segment:
        """A lognormal size."""
        return self.text(kind, min(most, median * exp(self.rng.gauss(0.0, spread))))

    def times(self, least: int, mean: float) -> int:
        return least + int(self.rng.expovariate(1 / mean))


def chat(seed: int, conversations: int = 60) -> list[Asked]:
    """People who talk: thoughts are dropped when the next question comes."""
    write = Writer(seed)
    systems = [write.drawn("system", 900, 0.6) for _ in range(4)]

    def talk(who: int) -> Iterator[Asked]:
        said = [write.rng.choice(systems)]
        at = write.rng.uniform(0.0, SPREAD["chat"])
        for _ in range(write.times(1, 7)):
            said.append(write.drawn("user", 150, 1.0))
            thought, answer = write.drawn("thinking", 600, 0.8), write.drawn("answer", 350, 0.7)
            yield Asked(at, who, tuple(said), (thought, answer), shown_again=False)
            said.append(answer)
            at += TURN_SECONDS

    return _in_order(talk(who) for who in range(conversations))


Edit = Callable[[Writer, list[Segment], bool], list[Segment]]


def agent(
    seed: int, agents: int = 10, trim: float | None = None, reminders: bool = False, tools_change: float = 0.0
) -> list[Asked]:
    """Loops of calls and results, on tasks that a person gives one after the other.

    trim: the oldest pairs go when a prompt is past 60K tokens, down to this share of it; without it they go when the
    context is full. reminders: 120 tokens at the end, which the next prompt does not have. tools_change: how often, of
    all requests, the tools are other ones.
    """
    write = Writer(seed)
    most, share = (CONTEXT, 0.97) if trim is None else (TRIM_AT, trim)
    shared = write.text("system", 9000)

    def work(who: int) -> Iterator[Asked]:
        tools, own = shared, write.text("system", 800)
        said: list[Segment] = []
        at = write.rng.uniform(0.0, SPREAD["agent"])
        for _ in range(write.times(2, 3)):
            said = [segment for segment in said if segment.kind != "thinking"]
            said.append(write.drawn("user", 300, 0.8))
            calls = write.times(3, 12)
            for call in range(calls):
                if write.rng.random() < tools_change:
                    tools = write.text("system", 9000)
                fixed = tools.size + own.size
                if _size(said) + fixed > most:
                    said = _trimmed(said, most * share - fixed)
                prompt = [tools, own, *said]
                if reminders:
                    prompt.append(write.text("reminder", 120))
                thought, made = write.drawn("thinking", 180, 0.8), write.drawn("answer", 120, 0.8)
                last = call == calls - 1
                yield Asked(at, who, tuple(prompt), (thought, made), shown_again=not last and not reminders)
                said += [thought, made]
                if not last:
                    said.append(write.drawn("result", 900, 1.1, 12_000))
                at += CALL_SECONDS
            at += TURN_SECONDS

    return _in_order(work(who) for who in range(agents))


def documents(seed: int, requests: int = DOCUMENT_REQUESTS, unique: int = 0) -> list[Asked]:
    """Questions about a dozen documents, and every fifth about something that comes once. `unique`: more of those."""
    write = Writer(seed)
    system = write.text("system", 700)
    listed = [write.drawn("user", 24_000, 0.6) for _ in range(12)]
    weights = [(i + 1) ** -ZIPF for i in range(len(listed))]
    found = []
    for i in range(requests):
        once = i % 5 == 4
        document = write.text("user", 6000) if once else write.rng.choices(listed, weights)[0]
        question, answer = write.drawn("question", 60, 0.6), write.drawn("answer", 200, 0.7)
        found.append(Asked(i * DOCUMENT_SECONDS, i, (system, document, question), (answer,), shown_again=False))
    for i in range(unique):
        at = write.rng.uniform(0.0, requests * DOCUMENT_SECONDS)
        prompt = (system, write.text("user", 6000), write.text("question", 60))
        found.append(Asked(at, requests + i, prompt, (write.text("answer", 200),), shown_again=False))
    return sorted(found, key=lambda asked: asked.at)


TRACES: dict[str, Callable[[int], list[Asked]]] = {
    "chat": chat,
    "agent": agent,
    "reminders": lambda seed: agent(seed, reminders=True),
    "trims each turn": lambda seed: agent(seed, trim=0.97),
    "trims to half": lambda seed: agent(seed, trim=0.5),
    "tools change": lambda seed: agent(seed, tools_change=0.03),
    "documents": documents,
}


def shortened(trace: list[Asked], factor: int, requests: int, apart: int = 1) -> list[Asked]:
    """Requests of a trace with every segment `factor` times shorter, and what the model says ten times that: `requests`
    in all, of so many in turn.
    """

    def less(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        by = {"thinking": 10 * factor, "answer": 10 * factor}
        return tuple(replace(segment, size=-(-segment.size // by.get(segment.kind, factor))) for segment in segments)

    mine = [[asked for asked in trace if asked.who % apart == i] for i in range(apart)]
    turns = [asked for together in zip(*mine) for asked in together][:requests]
    return [replace(asked, prompt=less(asked.prompt), answer=less(asked.answer)) for asked in turns]


def _size(segments: list[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _trimmed(said: list[Segment], most: float) -> list[Segment]:
    """Without its oldest pairs: whole messages from the front, up to the next question or answer."""
    while _size(said) > most and len(said) > 1:
        said = said[1:]
        while len(said) > 1 and said[0].kind == "result":
            said = said[1:]
    return said


def _in_order(talks: Iterator[Iterator[Asked]]) -> list[Asked]:
    return sorted((asked for talk in talks for asked in talk), key=lambda asked: asked.at)


if __name__ == "__main__":
    for name, make in TRACES.items():
        made = make(1)
        total = sum(asked.tokens for asked in made)
        print(f"{name:16} {len(made):5} requests {total:12,} tokens, {total // len(made):7,} a prompt")
