"""Requests that wait on the host, and other parts: too little room, copies that fail or are late, ends of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from long_form import spread
from torch import Tensor

from engine.driving import count_tokens, prompt, run
from engine.preempting import CPU, TEXT, alone, assert_back, builder, computed, halfway, host, params, two, ways
from engine.reusing import check, poison, same
from hybridkv import SamplingParams
from hybridkv.cache import KVCacheManager, away
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import Arrival, HostTier
from hybridkv.engine.engine import Engine
from hybridkv.request import Request


@pytest.fixture(scope="module")
def built(engine_of: Callable) -> Callable[..., Engine]:
    return builder(engine_of)


@spread("why, kind", ("full", "slow", "off", "down", "up", "later"), ("llama", "qwen3_5"))
def test_what_does_not_reach_the_host_or_come_back_is_read_again(
    why: str, kind: str, built: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is full, slow or off; a copy to it fails, or the one back, or the one after that."""
    want = alone(built(kind), prompt(90, 4), params(1))
    engine = built(kind, host=host(1 if why == "full" else 400))
    manager, copies = engine.manager, []
    request = engine.add(prompt(90, 4), params(1))
    halfway(engine, request)
    if why == "slow":  # beside the model
        manager.host._rate, manager.host.speed = 1e6, 1e9
    manager.host.preempted = why != "off"
    name = "_down" if why == "down" else "_up"
    copy, fails = getattr(HostTier, name), {"down": 2, "up": 1, "later": 2}.get(why, 0)

    def broken(self: HostTier, *args: Any) -> Any:
        copies.append(1)
        if len(copies) == fails:
            raise RuntimeError("a copy that was made to fail")
        return copy(self, *args)

    monkeypatch.setattr(HostTier, name, broken)
    engine.scheduler.preempt(request)
    check(engine)
    sent = why in ("up", "later")
    assert (request.key in manager.away) == sent and (manager.host.used > 0) == sent
    counts = count_tokens(engine)
    run(engine)
    assert same(request, want) and request.preemptions == 1 and request.restored == 0
    assert sum(counts) == computed([want]), "all of it is computed again"
    assert ways(engine) == (int(sent), 0, 1) and manager.host.failed == (why in ("down", "up", "later"))
    assert "restored" not in request.stats
    assert_back(engine)


def test_where_the_device_has_no_memory_to_copy_with_it_is_read_again(
    built: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is on the device when that shows."""
    want = alone(built("qwen3_5"), prompt(90, 4), params(1))
    engine = built("qwen3_5")
    request = engine.add(prompt(90, 4), params(1))
    halfway(engine, request)
    engine.scheduler.preempt(request)

    def broken(*args: Any) -> None:
        raise torch.OutOfMemoryError("made to fail")

    with monkeypatch.context() as patched:
        patched.setattr(away, "restore_state", broken)
        engine.step()
    assert ways(engine) == (1, 0, 1) and engine.manager.host.failed == 1
    check(engine)
    run(engine)
    assert same(request, want)
    assert_back(engine)


def test_what_pays_is_decided_by_bytes_rate_and_tokens_alone(built: Callable) -> None:
    engine = built("qwen3_5")
    manager, request = engine.manager, engine.add(prompt(90, 4), params(1))
    halfway(engine, request)
    manager.host._rate = 1e6
    for speed, pays in ((0.69, True), (0.71, False)):
        nbytes = manager.used_bytes(request.key) + BLOCK  # the state takes a whole one
        manager.host.speed = speed * manager.position(request.key) / (1e-3 + nbytes / 1e6)
        engine.scheduler.preempt(request)
        assert (request.key in manager.away) == pays
        halfway(engine, request, request.answer_tokens + 1)
    run(engine)
    assert_back(engine)


def test_it_takes_the_room_of_held_caches_and_gives_them_none(built: Callable) -> None:
    """On the host there is room for one of them; then for none."""
    engine = built("qwen3_5", host=host(3))
    held = alone(engine, prompt(40, 1), SamplingParams(max_tokens=3), hold=True)
    engine.scheduler.spare(held)
    assert engine.manager.frozen[held.key].exported is not None
    first, second = (engine.add(prompt(70, i), params(i)) for i in (4, 5))
    halfway(engine, second)
    engine.scheduler.preempt(second)
    assert engine.manager.away and held not in engine.scheduler.held
    engine.scheduler.preempt(first)
    assert list(engine.manager.away) == [second.key] and ways(engine) == (1, 0, 1)
    run(engine)
    assert (first.restored, second.restored) == (0, 1)
    assert_back(engine)


def test_no_held_cache_goes_where_that_would_not_be_enough(built: Callable) -> None:
    engine = built("qwen3_5", host=host(3))
    held = alone(engine, prompt(40, 1), SamplingParams(max_tokens=3), hold=True)
    engine.scheduler.spare(held)
    request = engine.add(prompt(450, 4), params(4))
    halfway(engine, request)
    engine.scheduler.preempt(request)
    assert not engine.manager.away and held in engine.scheduler.held
    run(engine)
    engine.abort(held)
    assert_back(engine)


@pytest.mark.parametrize("end", ["abort", "stop", "forget", "export"])
def test_one_that_is_away_can_be_ended_or_moved(end: str, built: Callable) -> None:
    engine = built("qwen3_5", rows=6)
    first, second = two(engine)
    engine.scheduler.preempt(second)
    assert engine.manager.away
    if end == "forget":  # what it was to share is gone
        engine.manager.reuse.forget()  # type: ignore[union-attr]
    elif end == "export":  # as its tokens
        assert engine.export(second).snapshot is None
    else:
        getattr(engine, end)(second)
        assert not engine.manager.away and second.finish_reason == "abort"
    check(engine)
    run(engine)
    want = alone(built("qwen3_5"), [*TEXT, *prompt(20, 7)], params(1))
    assert end in ("abort", "stop") or same(second, want)
    assert second.restored == (end == "export") and first.error is None
    assert_back(engine)


class Slow(Arrival):
    """Copies that are there when they have been asked for often enough, or are waited for, and not before."""

    def __init__(self, asked: int) -> None:
        self.left, self.waited = asked, 0
        self.writes: list[tuple[Tensor, Tensor, Tensor]] = []  # memory, where, and what is still to be written there

    def ready(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self._land()
        return self.left < 0

    def wait(self) -> None:
        self.waited += 1
        self._land()

    def _land(self) -> None:
        for memory, at, values in self.writes:
            memory[at] = values
        self.writes = []


class SlowTier(HostTier):
    """Copies that are on their way back for some steps. Until then hostile bytes are where they go."""

    def __init__(self, asked: int) -> None:
        super().__init__(400 * BLOCK, CPU, pages=True, preempted=True)
        self.asked, self.arrivals = asked, list[Slow]()
        self.memory: list[Tensor] = []  # bytes of the pools and of the states

    def of(self, engine: Engine) -> Engine:
        pools = [pool for table in engine.manager.tables.values() for pool in table.pool.tensors.values()]
        self.memory = [t.view(-1).view(torch.uint8) for t in (*pools, *engine.manager.state.tensors.values())]
        return engine

    @contextmanager
    def aside(self) -> Iterator[Arrival | None]:
        arrival, before = Slow(self.asked), [memory.clone() for memory in self.memory]
        self.arrivals.append(arrival)
        yield arrival
        for memory, old in zip(self.memory, before, strict=True):
            at = memory != old
            arrival.writes.append((memory, at, memory[at]))
            memory[at] = 255


def crowd(tier: SlowTier, kind: str, built: Callable) -> list[Request]:
    """Requests of which the youngest makes room now and then, and what is free then is hostile."""
    engine = tier.of(built(kind, host=tier))
    asked = [engine.add(prompt(n, i), params(i)) for i, n in enumerate((70, 41, 96))]

    def look(step: int) -> None:
        poison(engine)
        if step % 5 == 4 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(max(engine.scheduler.running, key=lambda r: r.order))

    run(engine, look)
    assert tier.arrivals and not engine.manager.arriving
    return asked


@spread("kind, asked", ("llama", "qwen3_5"), (1, 4, 10**6))
def test_nobody_reads_what_is_on_its_way_or_writes_there(kind: str, asked: int, built: Callable) -> None:
    want = [alone(built(kind), prompt(n, i), params(i)) for i, n in enumerate((70, 41, 96))]
    found = crowd(tier := SlowTier(asked), kind, built)
    assert len(tier.arrivals) > 3 and not any(arrival.writes for arrival in tier.arrivals)
    assert all(same(mine, its) for mine, its in zip(found, want, strict=True))


def test_a_step_that_does_not_wait_is_found(built: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "has_arrived", lambda self, request: True)
    monkeypatch.setattr(Slow, "wait", lambda self: None)
    want = [alone(built("qwen3_5"), prompt(n, i), params(i)) for i, n in enumerate((70, 41, 96))]
    found = crowd(SlowTier(10**6), "qwen3_5", built)
    assert not all(same(mine, its) for mine, its in zip(found, want, strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_others_go_on_while_it_is_on_its_way_back(kind: str, built: Callable) -> None:
    want = [alone(built(kind), prompt(50, i), params(i)) for i in (4, 5)]
    tier = SlowTier(5)
    engine = tier.of(built(kind, host=tier))
    first, second = (engine.add(prompt(50, i), params(i)) for i in (4, 5))
    halfway(engine, second)
    engine.scheduler.preempt(second)
    ahead = [(len(first.tokens), len(second.tokens))]
    for _ in range(8):
        engine.step()
        ahead.append((len(first.tokens), len(second.tokens)))
    grown = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ahead)]
    assert grown[:3] == [(1, 0)] * 3 and grown[-2:] == [(1, 1)] * 2, grown
    assert [a.waited for a in tier.arrivals] == [1] and not engine.manager.arriving
    run(engine)
    assert same(first, want[0]) and same(second, want[1])
    assert_back(engine)


@pytest.mark.parametrize("then", ["alone", "abort", "preempt", "stop", "rebuild"])
def test_what_is_on_its_way_is_waited_for_by_whoever_needs_its_pages(then: str, built: Callable) -> None:
    tier = SlowTier(10**6)
    engine = tier.of(built("qwen3_5", host=tier))
    first, second = (engine.add(prompt(50, i), params(i), hold=i == 5) for i in (4, 5))
    halfway(engine, second)
    engine.scheduler.preempt(second)
    engine.step()
    [arrival] = tier.arrivals
    assert len(engine.manager.arriving) == 1 and not arrival.waited
    if then == "alone":  # nothing else is left to do
        engine.abort(first)
        engine.step()
    elif then == "preempt":
        engine.scheduler.preempt(second)
    elif then == "rebuild":  # as where an interrupt came while it was released
        del engine.manager.slot_of[second.key]
        engine.manager.rebuild()
        engine.scheduler.rebuild()
    else:
        getattr(engine, then)(second)
    assert arrival.waited == 1
    run(engine)
    for request in (first, second):
        engine.abort(request)
    assert_back(engine)
