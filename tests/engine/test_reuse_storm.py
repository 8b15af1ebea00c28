"""A storm over reuse: thousands of prompts with random shared beginnings where there is hardly room for one of them.

Pages for 1.2 of the longest requests, two checkpoints; on the host conversations that wait for their next turn and what
prompts begin with, to and from which every 50th copy fails or comes late. Every answer has the bits of the same prompt
read cold, and in the end nothing is held.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from long_form import LONG

from cache.late_tier import LateTier
from engine.driving import assert_nothing_held, prompt
from engine.reusing import ASK, Cold, check, same
from hybridkv.cache.column_pages import ColumnPages
from hybridkv.cache.lookup import Asked, Hit
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier
from hybridkv.engine.engine import Engine
from hybridkv.request import Request

LONGEST = 224  # tokens of a request
ROOM = int(1.2 * LONGEST)
REQUESTS = 10_000 if LONG else 140
TROUBLE = 50  # one copy in so many
STEPS = 40  # that a request may take
HOST = 40 * BLOCK  # for a few caches, and what prompts begin with


@dataclass
class Storm:
    """Requests at random; each is compared with a cold one."""

    engine: Engine
    cold: Cold
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    held: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        texts = [prompt(LONGEST, seed) for seed in range(4)]
        self.begins = [texts[i][:n] for i in range(4) for n in (64, 100, 128, 170)]
        # some begin alike for a while, and part then
        self.begins += [[*texts[i][:80], *texts[j][:60]] for i in range(4) for j in range(4) if i != j]

    def asks(self) -> tuple[list[int], Request | None, bool]:
        """(prompt, the turn before it, whether another turn may follow)"""
        rng = self.rng
        if self.held and rng.random() < 0.35:
            before = self.held.pop(rng.randrange(len(self.held)))
            tokens = [*before.tokens, *prompt(rng.choice((1, 30)), rng.randrange(2))]
            if len(tokens) < LONGEST - 24:
                return tokens, before, rng.random() < 0.5
            self.engine.abort(before)
        rest = prompt(rng.choice((1, 3, 40)), 50 + rng.randrange(2))
        return [*rng.choice(self.begins), *rest], None, rng.random() < 0.15

    def begin(self) -> tuple[Request, list[int]]:
        rng = self.rng
        tokens, before, hold = self.asks()
        marks = [(at, "client") for at in (64, 128, 192) if at <= len(tokens)]
        marks = rng.sample(marks, min(len(marks), rng.randrange(3)))
        cache = rng.choice((True, True, True, True, "read", "write", False)) if before is None else True
        params = replace(ASK, max_tokens=20 if rng.random() < 0.08 else rng.choice((1, 2, 3)))
        request = self.engine.add(tokens, params, hold=hold, after=before, marks=sorted(marks), cache=cache)
        self.counts["turns"] += before is not None
        return request, tokens

    def run(self, requests: int) -> None:
        rng, left = self.rng, requests
        while left:
            some = [self.begin() for _ in range(min(left, rng.choice((1, 1, 2, 5))))]
            left -= len(some)
            gone = some.pop()[0] if len(some) > 1 and rng.random() < 0.1 else None
            for step in range(STEPS * (len(some) + 1)):
                if gone is not None and step == rng.randrange(1, 4):
                    self.counts["aborted"] += not gone.finished
                    self.engine.abort(gone)
                    gone = None
                if self.engine.idle:
                    break
                self.engine.step()
            assert self.engine.idle, "some request did not come to an end"
            if gone is not None and gone in self.engine.scheduler.held:
                self.engine.abort(gone)
            for request, tokens in some:
                self.look_at(request, tokens)
            check(self.engine)

    def look_at(self, request: Request, tokens: list[int]) -> None:
        assert request.error is None, request.error
        assert same(request, self.cold(tokens, request.params)), (request.reuse, request.stats)
        self.counts["hits"] += request.cached_tokens > 0
        self.counts["hits from the host"] += request.reuse.get("tier") == "host"
        self.counts["replays"] += request.reuse["matched"] > request.reuse["cached"]
        self.counts["cached tokens"] += request.cached_tokens
        self.counts["prompt tokens"] += len(tokens)
        self.counts["preempted"] += request.preemptions
        self.counts["given up"] += bool(request.given_up)
        if request in self.engine.scheduler.held:
            self.held.append(request)
        self.held = [each for each in self.held if each in self.engine.scheduler.held]


@pytest.fixture(scope="module")
def storm_over(engine_of: Callable, two_layers: Path) -> Callable[[str, int], Storm]:
    """`storm_over("qwen3_5", seed)`: on a model of two layers, since in exact mode a CPU reads token by token."""
    sizes = {"exact": True, "context": LONGEST}

    def build(kind: str, seed: int, every: int = TROUBLE) -> Storm:
        sizes["folder"] = two_layers if kind == "qwen3_5" else None
        engine = engine_of(kind, rows=2, slots=3, pool=ROOM, step_tokens=128, host=LateTier(HOST, every), **sizes)
        engine.launches_ahead = True
        cold = Cold(lambda: engine_of(kind, slots=1, pool=LONGEST + 16, **sizes))
        return Storm(engine, cold, random.Random(seed))

    return build


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("kind", "part"), [("qwen3_5", 4), ("llama", 1)])
def test_every_answer_of_a_storm_is_the_cold_one(kind: str, part: int, storm_over: Callable) -> None:
    """Four fifths of the requests on a hybrid, the rest on a model without state."""
    storm = storm_over(kind, 1)
    requests = REQUESTS * part // 5
    storm.run(requests)
    engine, counts = storm.engine, storm.counts
    host, scheduler = engine.manager.host, engine.scheduler
    assert isinstance(host, LateTier) and engine.manager.reuse is not None
    prefixes = engine.manager.reuse.host
    seen = counts + scheduler.counts + Counter(engine.manager.reuse.counts) + prefixes.counts + host.trouble
    if LONG:
        print(f"\n{kind}: {requests} requests, {host.copies} copies\n{dict(sorted(seen.items()))}")
    # it was one: hits, too little room, and trouble
    for what in ("hits", "turns", "columns_dropped", "frozen", "thawed", "exported", "imported", "loads"):
        assert seen[what] > requests // 100, (what, dict(seen))
    assert (seen["preempted"] and seen["came_back"]) or not LONG
    assert (host.trouble["fails"] and host.trouble["late"]) or host.copies < 2 * TROUBLE
    assert host.failed == host.trouble["fails"]
    assert 0 < counts["cached tokens"] < counts["prompt tokens"]
    if kind == "qwen3_5":
        assert engine.manager.reuse.checkpoints.dropped["rows"] > requests // 50 and counts["replays"]
    for held in list(scheduler.held):
        engine.abort(held)
    assert_nothing_held(engine)
    engine.manager.reuse.forget()
    assert host.used == 0 and not engine.manager.frozen and not engine.manager.away
    assert engine.manager.free_pages() == {n: t.allocator.total for n, t in engine.manager.tables.items()}


def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from the host is read before what is late has been written."""
    monkeypatch.setattr(LateTier, "_up", HostTier._up)


def wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit takes the state of another checkpoint."""
    attach = Reuse.attach

    def other(self: Reuse, request: Hashable, hit: Hit, asked: Asked) -> int:
        rows = [row for row in self.checkpoints.all if hit.checkpoint is not None and row != hit.checkpoint.row]
        slot = attach(self, request, hit, asked)
        if rows:
            self.manager.state.copy(rows[0], slot)
        return slot

    monkeypatch.setattr(Reuse, "attach", other)


def page_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that is dropped keeps its pages."""
    monkeypatch.setattr(ColumnPages, "disown", lambda self, pages: None)


@pytest.mark.parametrize("plant", [no_wait, wrong_row, page_lost])
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], storm_over: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    storm = storm_over("qwen3_5", 2, 3)
    with monkeypatch.context() as patched:
        plant(patched)
        with pytest.raises(AssertionError):
            storm.run(250)
