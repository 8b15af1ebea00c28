"""Evictions left to the GPU: nothing waits while they are launched, in flight everything is consistent, and what is
kept is what the host keeps.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_same_bytes
from random_model import engine_for, random_decoder

from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor, LayerCache, SnapKV
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Decoder
from hybridkv.models.known import KNOWN
from hybridkv.request import Request

pytestmark = pytest.mark.gpu

STREAMS, PROMPT, BUDGET = "attention", 3000, 512
SAY = SamplingParams(max_tokens=8, ignore_eos=True)
SLEEP = 200_000_000  # cycles: a tenth of a second


@pytest.fixture(scope="module")
def model() -> Decoder:
    small = dict(intermediate_size=64, vocab_size=4096, num_hidden_layers=16)
    return random_decoder(ModelConfig.from_dict(KNOWN["Qwen3.5-27B"] | small), "cuda", torch.bfloat16)


def tokens(n: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 4096, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(model: Decoder, deferred: bool | None = None, kv_dtype: str = "bf16", **more: Any) -> Engine:
    cache = CacheConfig(kv_dtype, budget=BUDGET, **more)
    engine = engine_for(model, cache, "cuda", torch.bfloat16, pool=4 * PROMPT, slots=4, context=PROMPT + 512)
    assert engine.evictor is not None
    engine.evictor = engine.scheduler.evictor = replace(engine.evictor, deferred=deferred)
    return engine


def run(engine: Engine) -> None:
    for _ in range(500):
        if engine.idle:
            return
        engine.step()
    raise AssertionError("not idle after 500 steps")


def streams(engine: Engine, request: Request) -> list[dict[str, torch.Tensor]]:
    """All bytes of each stream's entries, in order."""
    table, slot = engine.manager.tables[STREAMS], engine.manager.slot_of[request.key]
    P, found = table.schema.entries_per_page, []
    for pages, n in zip(table.pages[slot], table.lengths[slot], strict=True):
        at = np.arange(n)
        page, place = (torch.from_numpy(x).cuda() for x in (pages[at // P].astype(np.int64), at % P))
        found.append({name: t[page, place] for name, t in table.pool.lane(0).items()})
    return found


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """From its second time on, `Evictor.start` may not wait for the device; counts how often it ran like that."""
    start, times = Evictor.start, [0, 0]

    def started(evictor: Evictor, *args: Any) -> None:
        times[0] += 1
        if times[0] == 1:  # compiles, measures stream weights, makes tables of constants
            return start(evictor, *args)
        torch.cuda.set_sync_debug_mode("error")
        try:
            start(evictor, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        times[1] += 1
        return None

    monkeypatch.setattr(Evictor, "start", started)
    yield times
    torch.cuda.set_sync_debug_mode("default")


CASES: dict[str, dict[str, Any]] = {
    "auto": {},
    "fp8": {"kv_dtype": "fp8"},
    "snapkv": {"policy": "snapkv"},
    "keydiff": {"policy": "keydiff:pooling=9"},
    "heads": {"policy": "heads"},
    "a layer": {"scope": "layer"},
    "global": {"scope": "global", "policy": "snapkv"},
    "while it answers": {"decode_every": 3},
    "bounded": {"bounded": True},
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_and_the_same_is_kept(model: Decoder, case: str, strict: list[int]) -> None:
    held, requests = [], []
    for deferred in (False, None):
        engine = engine_of(model, deferred, **CASES[case])
        for again in range(2):
            request = engine.add(tokens(PROMPT), SAY, hold=bool(again))
            run(engine)
            assert request.error is None and request.finish_reason == "length"
        engine.manager.check_integrity()
        held.append(streams(engine, request))
        requests.append(request)
        assert (strict[1] > 0) == (deferred is None)
    one, other = requests
    assert list(one.evictions) == list(other.evictions) and one.evictions
    assert one.generated == other.generated and one.policy == other.policy
    for at in one.evictions:
        for mine, its in zip(one.evictions[at].lists(), other.evictions[at].lists(), strict=True):
            assert all(map(np.array_equal, mine, its))
    for mine, its in zip(*held, strict=True):
        for name in mine:
            assert_same_bytes(mine[name], its[name])


def test_in_flight_others_go_on_and_counts_are_exact(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sleeps before the eviction, so that it is really under way."""
    engine = engine_of(model)
    allocator, table = engine.manager.tables[STREAMS].allocator, engine.manager.tables[STREAMS]
    warm = engine.add(tokens(PROMPT), SAY)
    run(engine)
    assert warm.evictions
    start = Evictor.start

    def slept(evictor: Evictor, *args: Any) -> None:
        torch.cuda._sleep(SLEEP)
        start(evictor, *args)

    monkeypatch.setattr(Evictor, "start", slept)
    other = engine.add(tokens(40, seed=2), SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(4):
        engine.step()
    long = engine.add(tokens(PROMPT), SAY)
    while long.evicting is None:
        assert not long.finished
        engine.step()
    [compacting] = engine.manager.compacting.values()
    slot = engine.manager.slot_of[long.key]
    assert not compacting.ready() and (table.lengths[slot] == PROMPT).all() and long.answer_tokens == 1
    assert allocator.held == int(table.held.sum())
    engine.manager.check_integrity()
    said = other.answer_tokens
    engine.step()
    assert other.answer_tokens == said + 1 and long.answer_tokens == 1, "its neighbour did not wait for it"
    assert long.evictions and not engine.manager.compacting and allocator.held == int(table.held.sum())
    run(engine)
    assert long.answer_tokens == 8 and other.answer_tokens == 40 and long.error is other.error is None
    engine.manager.check_integrity()
    assert allocator.held == 0


def test_two_prompts_are_started_one_after_the_other(model: Decoder, strict: list[int]) -> None:
    engine = engine_of(model)
    engine.add(tokens(900), SAY)
    run(engine)
    both = [engine.add(tokens(900, seed), SAY) for seed in (3, 4)]
    strict[1] = 0
    while not any(request.evicting for request in both):
        engine.step()
    assert strict[1] == 2 and len(engine.manager.compacting) == 2
    run(engine)
    assert all(request.evictions.keys() == {900} and request.answer_tokens == 8 for request in both)
    assert engine.manager.tables[STREAMS].allocator.held == 0


@pytest.mark.parametrize("end", ("abort", "preempt", "fork"))
def test_a_request_in_flight_ends_is_preempted_or_forked(
    model: Decoder, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    warm = engine.add(tokens(PROMPT), SAY)
    run(engine)
    start = Evictor.start

    def slept(evictor: Evictor, *args: Any) -> None:
        torch.cuda._sleep(SLEEP)
        start(evictor, *args)

    monkeypatch.setattr(Evictor, "start", slept)
    request = engine.add(tokens(PROMPT), SAY)
    while request.evicting is None:
        engine.step()
    if end == "abort":
        engine.abort(request)
    elif end == "preempt":
        engine.scheduler.preempt(request)
        assert request.evictions
    else:
        engine.manager.fork_request(request.key, "fork")
        assert engine.manager.lengths("fork")[STREAMS].mean() <= BUDGET
        engine.manager.release_request("fork")
    run(engine)
    assert request.finish_reason == ("abort" if end == "abort" else "length")
    if end != "abort":
        assert request.generated == warm.generated
    engine.manager.check_integrity()
    assert engine.manager.tables[STREAMS].allocator.held == 0


class Broken(SnapKV):
    """No scores for a long prompt."""

    def score(self, layer: LayerCache) -> torch.Tensor:
        scores = super().score(layer)
        return scores * torch.nan if scores.shape[-1] == PROMPT else scores


def test_broken_scores_end_the_request_and_move_nothing(model: Decoder) -> None:
    engine = engine_of(model, policy=Broken())
    good = engine.add(tokens(900, seed=5), SAY)
    run(engine)
    other = engine.add(tokens(900, seed=5), SAY)
    bad = engine.add(tokens(PROMPT), SAY)
    run(engine)
    assert bad.finish_reason == "error" and "NaN scores in attention layer 0" in str(bad.error)
    assert other.finish_reason == "length" and other.evictions and good.evictions
    engine.manager.check_integrity()
    assert engine.manager.tables[STREAMS].allocator.held == 0
