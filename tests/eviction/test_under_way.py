"""Evictions that are left to the device: they keep what the host keeps, and in between everything stays consistent.

On a CPU the device is done at once. `slow` says otherwise: lists count as not there until somebody waits for them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from long_form import spread
from numerics import assert_same_bytes
from torch import Tensor

from engine.driving import assert_nothing_held, run
from hybridkv.cache import compacting
from hybridkv.cache.compacting import Compacting, Survivors
from hybridkv.cache.page_table import PageTable
from hybridkv.cache.snapshot import restore_request, snapshot_request
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.errors import RequestError
from hybridkv.eviction import Evictor, LayerCache, Policy, SnapKV
from hybridkv.eviction_record import EvictionRecord
from hybridkv.request import Request

SAY = SamplingParams(max_tokens=12, ignore_eos=True)
STREAMS = "attention"


class Watched:
    """Which evictions were started, and which had been waited for by when."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.replaced = 0  # compactions whose survivors are on fresh pages
        start, survivors, replace_pages = Evictor.start, Compacting.survivors.func, PageTable.replace

        def started(evictor: Evictor, request: Request, *args: Any) -> None:
            start(evictor, request, *args)
            self.events.append(f"start {request.order}")

        def waited(compacting: Compacting) -> Survivors:
            if "survivors" not in compacting.__dict__:
                self.events.append("wait")
                compacting.__dict__["survivors"] = survivors(compacting)
            return compacting.__dict__["survivors"]

        def replaced(table: PageTable, *args: Any) -> None:
            replace_pages(table, *args)
            self.replaced += 1

        patch.setattr(PageTable, "replace", replaced)
        patch.setattr(Evictor, "start", started)
        patch.setattr(Compacting, "survivors", property(waited))
        patch.setattr(Compacting, "ready", lambda compacting: False)

    @property
    def started(self) -> int:
        return sum(event.startswith("start") for event in self.events)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    yield Watched(monkeypatch)


@pytest.fixture
def deferring(evicting: Callable) -> Callable[..., Engine]:
    """`evicting`, with evictions left to the device."""

    def build(*args: Any, deferred: bool = True, **more: Any) -> Engine:
        engine = evicting(*args, **more)
        engine.evictor = engine.scheduler.evictor = replace(engine.evictor, deferred=deferred)
        return engine

    return build


def entries(engine: Engine, request: Request) -> list[dict[str, Tensor]]:
    """All bytes of each stream's entries, in order."""
    table, slot = engine.manager.tables[STREAMS], engine.manager.slot_of[request.key]
    P, found = table.schema.entries_per_page, []
    for pages, n in zip(table.pages[slot], table.lengths[slot], strict=True):
        at = np.arange(n)
        page, place = (torch.from_numpy(x) for x in (pages[at // P].astype(np.int64), at % P))
        found.append({name: t[page, place] for name, t in table.pool.lane(0).items()})
    return found


def assert_same_lists(a: EvictionRecord, b: EvictionRecord) -> None:
    assert np.array_equal(a.lengths, b.lengths) and (a.kept, a.even) == (b.kept, b.even)
    for mine, others in zip(a.lists(), b.lists(), strict=True):
        for x, y in zip(mine, others, strict=True):
            assert np.array_equal(x, y)


def assert_same_end(engines: list[Engine], requests: list[Request]) -> None:
    """Tokens, records, lengths, pages, positions, bytes and figures of two held requests."""
    (a, b), (one, other) = engines, requests
    assert one.generated == other.generated and one.finish_reason == other.finish_reason
    assert one.policy == other.policy and list(one.evictions) == list(other.evictions) and one.evictions
    for at in one.evictions:
        assert_same_lists(one.evictions[at], other.evictions[at])
    tables = [e.manager.tables[STREAMS] for e in engines]
    slots = [e.manager.slot_of[r.key] for e, r in zip(engines, requests, strict=True)]
    assert np.array_equal(tables[0].lengths[slots[0]], tables[1].lengths[slots[1]])
    assert np.array_equal(tables[0].held[slots[0]], tables[1].held[slots[1]])
    assert tables[0].allocator.free == tables[1].allocator.free
    for x, y in zip(*(e.manager.entry_positions(r.key, STREAMS) for e, r in zip(engines, requests)), strict=True):
        assert np.array_equal(x, y)
    for x, y in zip(entries(a, one), entries(b, other), strict=True):
        for name in x:
            assert_same_bytes(x[name], y[name])
    for figure in ("kept_tokens", "kv_bytes_full", "kv_bytes_kept", "eviction_record_bytes"):
        assert one.stats[figure] == other.stats[figure]


CASES: dict[str, dict[str, Any]] = {
    **{name: {"policy": name} for name in ("auto", "snapkv", "tova", "knorm", "keydiff", "leverage", "streaming")},
    "random": {"policy": "random"},
    "ada": {"policy": "peak:spread=layer"},
    "all": {"policy": "peak:spread=all:layers=0"},
    "even": {"policy": "peak:spread=even"},
    "pyramid": {"policy": "peak:spread=pyramid"},
    "a layer": {"scope": "layer"},
    "global": {"scope": "global"},
    "bf16": {"kv_dtype": "bf16"},
    "fp8": {"kv_dtype": "fp8"},
    "bounded": {"bounded": True},
    "bounded, even": {"bounded": True, "policy": "snapkv"},
    "while it answers": {"decode_every": 4},
    "fp8, while it answers": {"decode_every": 3, "kv_dtype": "fp8", "policy": "peak:spread=all"},
}


@spread("kind, case", ("llama", "qwen3_5"), tuple(CASES))
def test_the_device_keeps_what_the_host_keeps(kind: str, case: str, deferring: Callable, slow: Watched) -> None:
    engines, requests = [], []
    for deferred in (False, True):
        engine = deferring(kind, budget=40, **CASES[case], deferred=deferred)
        request = engine.add(tiny.token_ids(150), SAY, hold=True)
        run(engine)
        engine.manager.check_integrity()
        assert (slow.started > 0) == deferred and not engine.manager.compacting and request.evicting is None
        engines.append(engine)
        requests.append(request)
    assert_same_end(engines, requests)
    assert slow.started == len(requests[1].evictions)
    assert (len(requests[1].evictions) > 1) == any(word in case for word in ("bounded", "answers"))


@pytest.mark.parametrize("ready", (False, True))
def test_in_flight_the_request_holds_all_its_pages_and_others_go_on(
    ready: bool, deferring: Callable, slow: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of others is launched before the lists are waited for; where they have come, none is."""
    engine = deferring("llama", budget=40, pool=4096)
    table, allocator = engine.manager.tables[STREAMS], engine.manager.tables[STREAMS].allocator
    others = [engine.add(tiny.token_ids(20, seed=i), SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(2)]
    for _ in range(3):
        engine.step()
    long = engine.add(tiny.token_ids(60 + 90), SAY)
    while long.evicting is None:
        assert not long.finished
        engine.step()
    slot = engine.manager.slot_of[long.key]
    held = {request: int(table.held[engine.manager.slot_of[request.key]].sum()) for request in (long, *others)}
    assert allocator.held == sum(held.values()) and held[long] >= 150 // 16 * table.schema.streams
    assert (table.lengths[slot] == 150).all() and not long.evictions and len(long.generated) == 1
    engine.manager.check_integrity()
    assert slow.events == [f"start {long.order}"]
    monkeypatch.setattr(Compacting, "ready", lambda compacting: ready)
    said = [len(request.tokens) for request in others]
    engine.step()
    assert [len(request.tokens) for request in others] == [n + 1 for n in said]
    assert len(long.generated) == (2 if ready else 1), "the step was launched without it"
    assert long.evicting is None and long.evictions and not engine.manager.compacting
    kept = long.evictions[150].counts().ravel()
    assert np.array_equal(table.lengths[slot], kept + (1 if ready else 0))
    need = -(-table.lengths[slot] // 16)
    assert np.array_equal(table.held[slot], need)
    assert allocator.held == sum(int(table.held[engine.manager.slot_of[r.key]].sum()) for r in (long, *others))
    engine.step()
    assert len(long.generated) == (3 if ready else 2)
    run(engine)
    assert_nothing_held(engine)


def test_neighbours_say_what_they_say_alone(deferring: Callable, slow: Watched) -> None:
    prompts = [tiny.token_ids(n, seed=n) for n in (150, 20, 97, 64, 130, 40)]
    engine = deferring("qwen3_5", budget=40, pool=4096, slots=6, step_tokens=128)
    together = [engine.add(ids, SAY) for ids in prompts]
    run(engine)
    assert slow.started == sum(bool(request.evictions) for request in together) == 4
    for ids, request in zip(prompts, together):
        single = deferring("qwen3_5", budget=40, step_tokens=128, deferred=False)
        alone = single.add(ids, SAY)
        run(single)
        assert request.generated == alone.generated and request.evictions.keys() == alone.evictions.keys()
    assert_nothing_held(engine)


def test_prompts_that_end_together_are_started_together(deferring: Callable, slow: Watched) -> None:
    engine = deferring("llama", budget=40, pool=4096, step_tokens=512)
    first, second = (engine.add(tiny.token_ids(n, seed=n), SAY) for n in (150, 131))
    engine.step()
    assert slow.events == [f"start {first.order}", f"start {second.order}"]
    assert len(engine.manager.compacting) == 2 and first.answer_tokens == second.answer_tokens == 1
    run(engine)
    assert slow.events.count("wait") == 2 and first.evictions and second.evictions
    assert_nothing_held(engine)


def in_flight(engine: Engine, tokens: int = 150, params: SamplingParams = SAY, **more: Any) -> Request:
    """A request whose eviction has been started, and whose first token is known."""
    request = engine.add(tiny.token_ids(tokens), params, **more)
    while request.evicting is None:
        assert not request.finished
        engine.step()
    return request


@pytest.mark.parametrize("hold", (False, True))
@pytest.mark.parametrize("end", ("abort", "stop"))
def test_a_request_that_ends_in_flight_gives_all_back(end: str, hold: bool, deferring: Callable, slow: Watched) -> None:
    engine = deferring("qwen3_5", budget=40)
    request = in_flight(engine, hold=hold)
    getattr(engine, end)(request)
    assert request.finish_reason == "abort" and request.evicting is None and not engine.manager.compacting
    if end == "stop" and hold:
        assert request in engine.scheduler.held
        assert engine.manager.lengths(request.key)[STREAMS].mean() <= 40
        again = engine.add(request.tokens + tiny.token_ids(5, seed=1), SAY, after=request)
        run(engine)
        assert again.cached_tokens == 150 and again.finish_reason == "length" and 150 in again.evictions
    assert_nothing_held(engine)


def test_an_answer_of_one_token_ends_in_flight(deferring: Callable, slow: Watched) -> None:
    engine = deferring("llama", budget=40)
    request = engine.add(tiny.token_ids(150), SamplingParams(max_tokens=1))
    run(engine)
    assert request.finish_reason == "length" and request.answer_tokens == 1 and request.evictions
    assert request.stats["kept_tokens"] <= 40
    assert_nothing_held(engine)


class BrokenFor(SnapKV):
    """No scores for prompts of 150 tokens."""

    def score(self, layer: LayerCache) -> Tensor:
        scores = super().score(layer)
        return scores * torch.nan if scores.shape[-1] == 150 else scores


@pytest.mark.parametrize("deferred", (False, True))
@pytest.mark.parametrize("neighbour", (False, True))
@pytest.mark.parametrize("n", (1, 3))
def test_broken_scores_end_the_request_when_they_come(
    n: int, neighbour: bool, deferred: bool, deferring: Callable, slow: Watched
) -> None:
    engine = deferring("llama", budget=40, pool=4096, slots=6, policy=BrokenFor(), deferred=deferred)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    beside = [engine.add(tiny.token_ids(90, seed=1), params)] if neighbour else []
    bad = engine.add(tiny.token_ids(150), replace(params, n=n))
    updates = run(engine)
    for request in (bad, *bad.siblings):
        assert request.finish_reason == "error" and "NaN scores in attention layer 0" in str(request.error)
        assert not request.evictions and sum(u.request is request and u.token is None for u in updates) == 1
    for request in beside:
        single = deferring("llama", budget=40, policy=BrokenFor(), deferred=False)
        alone = single.add(tiny.token_ids(90, seed=1), params)
        run(single)
        assert request.generated == alone.generated and request.evictions
    assert slow.started == (1 + len(beside) if deferred else 0)
    assert_nothing_held(engine)


@pytest.mark.parametrize("end", ("abort", "preempt", "one token"))
def test_broken_scores_of_a_request_that_ends_or_is_preempted(end: str, deferring: Callable, slow: Watched) -> None:
    engine = deferring("llama", budget=40, policy=BrokenFor())
    if end == "one token":
        request = engine.add(tiny.token_ids(150), SamplingParams(max_tokens=1))
    else:
        request = in_flight(engine)
        engine.abort(request) if end == "abort" else engine.scheduler.preempt(request)
    run(engine)
    assert request.finish_reason == ("abort" if end == "abort" else "error") and not request.evictions
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_request_preempted_in_flight_drops_the_same_again(kind: str, deferring: Callable, slow: Watched) -> None:
    single = deferring(kind, budget=40, deferred=False)
    alone = single.add(tiny.token_ids(150), SAY)
    run(single)
    engine = deferring(kind, budget=40)
    request = in_flight(engine)
    engine.scheduler.preempt(request)
    record = request.evictions[150]
    assert engine.manager.tables[STREAMS].allocator.held == 0 and not engine.manager.compacting
    run(engine)
    assert request.generated == alone.generated and request.evictions[150] is record
    assert slow.started == 1, "computed again, it goes by the lists that are known"
    assert_same_lists(record, alone.evictions[150])
    assert_nothing_held(engine)


def test_siblings_begin_with_what_was_kept(deferring: Callable, slow: Watched) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, n=3, temperature=1.0, seed=3)
    found = []
    for deferred in (False, True):
        engine = deferring("qwen3_5", budget=40, pool=4096, deferred=deferred)
        first = engine.add(tiny.token_ids(150), params)
        run(engine)
        found.append([r.generated for r in (first, *first.siblings)])
        assert all(r.evictions.keys() == {150} for r in (first, *first.siblings))
        assert_nothing_held(engine)
    assert found[0] == found[1] and slow.started == 1


@pytest.mark.parametrize("kv_dtype", ("f32", "fp8"))
def test_pages_that_a_sibling_reads_stay_as_they_are(kv_dtype: str, deferring: Callable, slow: Watched) -> None:
    """Survivors go into fresh pages: written over, they would change what the other request reads."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=3, temperature=1.0, seed=1)
    found = []
    for deferred in (False, True):
        engine = deferring("llama", budget=40, decode_every=4, pool=4096, kv_dtype=kv_dtype, deferred=deferred)
        first = engine.add(tiny.token_ids(150), params)
        run(engine)
        found.append([(r.generated, [e.lists() for e in r.evictions.values()]) for r in (first, *first.siblings)])
        assert slow.replaced == (3 if deferred else 0)  # all at once; from then on each is alone with its pages
        assert_nothing_held(engine)
    assert str(found[0]) == str(found[1]) and slow.started > 3


def test_without_pages_beside_shared_ones_the_host_sees_to_it(
    deferring: Callable, slow: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, n=2, temperature=1.0, seed=1)
    found = []
    for pages in (None, 1 << 20):
        if pages is not None:
            monkeypatch.setattr(compacting, "most_pages", lambda *about: 1 << 20)  # more than there are
        engine, slow.replaced = deferring("llama", budget=40, decode_every=4, pool=4096), 0
        first = engine.add(tiny.token_ids(150), params)
        run(engine)
        found.append([r.generated for r in (first, *first.siblings)])
        assert len(first.evictions) > 1 and (slow.replaced > 0) == (pages is None)
        assert_nothing_held(engine)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_what_others_begin_with_stays_as_it_is(kind: str, deferring: Callable, slow: Watched) -> None:
    """A request with a budget leaves its columns whole, and the device chooses, moves and frees all the same."""
    tokens, params = tiny.token_ids(400), SamplingParams(max_tokens=8, ignore_eos=True)
    whole = deferring(kind, budget=40, pool=4096)
    cold = whole.add(tokens, params, eviction=None)
    run(whole)
    found = []
    for deferred in (False, True):
        engine = deferring(kind, budget=40, pool=4096, deferred=deferred, reuse=8)
        manager = engine.manager
        marks = [(256, "client"), (384, "client")]
        cut = engine.add(tokens, params, marks=marks)
        run(engine)
        manager.check_integrity()
        again = engine.add(tokens, params)
        run(engine)
        plain = engine.add(tokens, params, eviction=None)
        run(engine)
        assert again.cached_tokens >= 256 and plain.cached_tokens >= 384
        assert plain.generated == cold.generated and again.generated == cut.generated
        assert_same_lists(cut.evictions[400], again.evictions[400])
        found.append((cut.generated, [each.tolist() for layer in cut.evictions[400].lists() for each in layer]))
        assert slow.started == (2 if deferred else 0) and not manager.compacting
        manager.check_integrity()
        manager.reuse.forget()
        assert_nothing_held(engine)
    assert found[0] == found[1]


def test_whoever_asks_for_the_entries_waits_for_them(deferring: Callable, slow: Watched) -> None:
    """Fork, snapshot and truncation of a request in flight, by hand."""
    lengths = []
    for what in ("fork", "snapshot", "truncate", "step"):
        engine = deferring("llama", budget=40, pool=4096)
        request, manager = in_flight(engine), engine.manager
        if what == "fork":
            manager.fork_request(request.key, "fork")
            lengths.append(manager.lengths("fork")[STREAMS])
            manager.release_request("fork")
        elif what == "snapshot":
            restore_request(manager, snapshot_request(manager, request.key), "copy")
            lengths.append(manager.lengths("copy")[STREAMS])
            manager.release_request("copy")
        elif what == "truncate":
            with pytest.raises(RequestError, match="entries were evicted at position 150"):
                manager.truncate_request(request.key, 140)
        else:
            manager.prepare_forward([(request.key, 1)])
        assert not manager.compacting and request.evicting is not None, "the record is made when it is scheduled"
        lengths.append(manager.lengths(request.key)[STREAMS])
        run(engine)
        assert request.evictions and request.answer_tokens == 12
        assert_nothing_held(engine)
    assert lengths[0].mean() <= 40 and all(np.array_equal(lengths[0], each) for each in lengths)


def test_pages_that_are_needed_are_waited_for_before_anybody_is_preempted(deferring: Callable, slow: Watched) -> None:
    engine = deferring("llama", budget=40, pool=230, slots=4)
    other = engine.add(tiny.token_ids(30, seed=1), SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(8):
        engine.step()
    long = engine.add(tiny.token_ids(150), SamplingParams(max_tokens=20, ignore_eos=True))
    run(engine)
    assert long.evictions and long.preemptions == other.preemptions == 0
    assert_nothing_held(engine)


def test_a_waiting_request_gets_the_pages_that_come_back(deferring: Callable, slow: Watched) -> None:
    engine = deferring("llama", budget=40, pool=180)
    long = engine.add(tiny.token_ids(150), SamplingParams(max_tokens=25, ignore_eos=True))
    other = engine.add(tiny.token_ids(60, seed=1), SAY)
    for _ in range(5):
        engine.step()
    assert other.status.value == "running" and not long.finished
    run(engine)
    assert long.preemptions == other.preemptions == 0
    assert_nothing_held(engine)


def test_a_prompt_that_fills_the_pools_may_grow_once_it_is_evicted(deferring: Callable, slow: Watched) -> None:
    engine = deferring("llama", budget=40, pool=160, context=512)
    request = engine.add(tiny.token_ids(159), SamplingParams(max_tokens=30, ignore_eos=True))
    run(engine)
    assert request.answer_tokens == 30 and request.error is None


class OnTheHost(Policy):
    """Scores that lie where the cache may not."""

    def score(self, layer: LayerCache) -> Tensor:
        return layer.positions.cpu().float() % 7


def test_a_policy_of_ones_own_is_left_to_the_device_too(deferring: Callable, slow: Watched) -> None:
    found = []
    for deferred in (False, True):
        engine = deferring("llama", budget=40, policy=OnTheHost(), deferred=deferred)
        request = engine.add(tiny.token_ids(150), SAY, hold=True)
        run(engine)
        found.append((engine, request))
    assert slow.started == 1
    assert_same_end(*(list(x) for x in zip(*found)))


def test_scoring_a_text_waits_for_its_evictions(deferring: Callable, slow: Watched) -> None:
    """`Engine.score` runs outside the queues, so nobody would settle what it left."""
    ids = tiny.token_ids(120)
    logits = [deferring("llama", budget=40, deferred=d).score(ids, prefill=100, chunk=64) for d in (False, True)]
    assert_same_bytes(*logits)
    assert not slow.started


def test_on_a_cpu_nothing_is_deferred_by_default(evicting: Callable, slow: Watched) -> None:
    engine = evicting("llama", budget=40)
    request = engine.add(tiny.token_ids(150), SAY)
    run(engine)
    assert request.evictions and not slow.started
