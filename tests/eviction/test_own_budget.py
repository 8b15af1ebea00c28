"""Requests that bring a budget to a cache opened without one: one query buffer, and nothing changes for the others."""

from collections.abc import Callable

import pytest
import tiny
import torch
from long_form import spread

from engine.driving import assert_nothing_held, run
from hybridkv import LLM, CacheConfig, EvictionConfig, SamplingParams
from hybridkv.config import EngineConfig
from hybridkv.engine.engine import Engine
from hybridkv.engine.workspace import workspace
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import query_buffers_for
from hybridkv.models import cache_schema, with_query_buffer
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.request import Request

SAY = SamplingParams(max_tokens=12, ignore_eos=True)
KINDS = ("llama", "qwen3_5")
OWN = EvictionConfig(40, window=16, recent=8)


def answer(engine: Engine, length: int, **how: object) -> Request:
    request = engine.add(tiny.token_ids(length), SAY, **how)  # type: ignore[arg-type]
    run(engine)
    assert request.error is None
    return request


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ({}, {"bounded": True}, {"decode_every": 4}, {"policy": "keydiff"}), ids=str)
def test_a_request_keeps_what_it_would_under_a_default_budget(kind: str, how: dict, evicting: Callable) -> None:
    """Three at once with one buffer between them, and one that keeps everything beside them."""
    eviction = EvictionConfig(40, window=16, recent=8, **how)
    lengths = (150, 130, 90)
    with_default = evicting(kind, budget=40, **how)
    want = [answer(with_default, n) for n in lengths]
    engine = evicting(kind, query_buffers=1)
    assert engine.evictor is not None and engine.evictor.default is None
    engine.launches_ahead = True
    requests = [engine.add(tiny.token_ids(n), SAY, eviction=eviction) for n in lengths]
    plain = engine.add(tiny.token_ids(140), SAY)
    run(engine)
    for one, other in zip(requests, want, strict=True):
        assert one.generated == other.generated and list(one.evictions) == list(other.evictions) and one.evictions
        assert one.stats["kept_tokens"] == other.stats["kept_tokens"] < 90
    assert not plain.evictions and plain.generated == answer(evicting(kind), 140).generated
    assert_nothing_held(engine)


def test_a_number_is_a_budget_with_the_settings_of_the_cache(evicting: Callable) -> None:
    engine = evicting("llama", query_buffers=1, policy="streaming")
    request = answer(engine, 150, eviction=48)
    assert request.eviction == EvictionConfig(48, window=16, recent=8, policy="streaming")
    assert request.stats["kept_tokens"] == 48 + 11
    other = answer(evicting("llama", budget=100, policy="tova"), 150, eviction=48)
    assert other.eviction == EvictionConfig(48, window=16, recent=8, policy="tova")
    for bad in (0, -5, 4):
        with pytest.raises(HybridKVError, match="budget"):
            engine.add([1, 2], SAY, eviction=bad)
    with pytest.raises(RequestError, match=r"a window of 64 queries .* the cache keeps 16"):
        engine.add([1, 2], SAY, eviction=EvictionConfig(100))
    with pytest.raises(HybridKVError, match="gives them different budgets"):
        engine.add([1, 2], SAY, eviction=EvictionConfig(48, 16, 8, policy=engine_ada(), scope="layer"))
    assert engine.idle


def engine_ada() -> object:
    from hybridkv.eviction import Ada, SnapKV

    return Ada(SnapKV())


def test_steps_of_requests_that_keep_everything_know_nothing_of_queries(evicting: Callable) -> None:
    """On the CPU they are the very steps of a cache without a buffer; also after another request has had it."""
    engine, steps = evicting("qwen3_5", query_buffers=1), []
    forward = engine.runner.forward
    engine.runner.forward = lambda inputs: (steps.append(inputs.step), forward(inputs))[1]
    answer(engine, 100)
    assert len(steps) > 12 and all(step.query_rows is None for step in steps)
    answer(engine, 100, eviction=OWN)
    assert any(step.query_rows is not None for step in steps)
    steps.clear()
    answer(engine, 100)
    assert all(step.query_rows is None for step in steps)


def test_a_held_cache_without_a_budget_can_still_be_cut_back(evicting: Callable) -> None:
    """A next turn that goes on from the middle reuses what it can, as in a cache that stores no queries."""
    for buffers in (None, 1):
        engine = evicting("llama", query_buffers=buffers)
        first = engine.add(tiny.token_ids(100), SAY, hold=True)
        run(engine)
        second = engine.add([*first.tokens[:60], 5, 6, 7], SAY, after=first)
        run(engine)
        assert second.cached_tokens == 60
        assert_nothing_held(engine)


def test_a_held_cache_with_a_budget_is_not_cut_back(evicting: Callable) -> None:
    engine = evicting("llama", query_buffers=1)
    first = engine.add(tiny.token_ids(100), SAY, hold=True, eviction=OWN)
    run(engine)
    assert first.evictions
    second = engine.add([*first.tokens[:60], 5, 6, 7], SAY, after=first)
    run(engine)
    assert second.cached_tokens == 0 and second.error is None
    assert second.generated == answer_of(evicting("llama"), second.tokens[:63])
    assert_nothing_held(engine)


def answer_of(engine: Engine, tokens: list[int]) -> list[int]:
    request = engine.add(tokens, SAY)
    run(engine)
    return request.generated


@pytest.mark.parametrize("kind", KINDS)
def test_an_llm_without_a_budget_evicts_for_who_asks_and_counts_what_that_takes(kind: str, oracle: Callable) -> None:
    llm = LLM(oracle(kind).folder, "cpu", max_requests=3, max_context=512)
    assert llm.plan.query_buffers == 1 and llm.manager.query_buffers.count == 1
    assert llm.manager.memory_bytes() == llm.plan.nbytes
    tokens = tiny.token_ids(200)
    [kept, all_kept] = llm.generate([tokens, tokens], SAY, eviction=[70, None])
    assert kept.stats["kept_tokens"] < 90 and all_kept.stats["kept_tokens"] == 211
    assert llm.generate([tokens], SAY)[0].token_ids == all_kept.token_ids
    none = LLM(oracle(kind).folder, "cpu", max_requests=3, max_context=512, cache=CacheConfig(query_buffers=0))
    assert none.plan.query_buffers == 0 and none.plan.nbytes < llm.plan.nbytes
    assert llm.plan.nbytes - none.plan.nbytes == llm.plan.schema.query_buffer_bytes
    assert none.plan.workspace < llm.plan.workspace
    with pytest.raises(RequestError, match="query_buffers=1 or more"):
        none.generate([tokens], SAY, eviction=70)
    assert none.generate([tokens], SAY)[0].token_ids == all_kept.token_ids


def test_a_budget_that_is_not_known_is_planned_for_as_the_context() -> None:
    config = ModelConfig.from_dict(KNOWN["Qwen3.5-27B"])
    plain = with_query_buffer(config, CacheConfig())
    limits = EngineConfig()

    def eviction(cache: CacheConfig) -> int:
        schema = cache_schema(config, cache, torch.bfloat16)
        return workspace(config, schema, cache, limits, 4096, torch.bfloat16, True).eviction

    assert plain.query_buffers == 1 and query_buffers_for(plain, 512, 8) == 1
    assert eviction(plain) == eviction(CacheConfig(budget=4096)) > eviction(CacheConfig(budget=512)) > 0
    assert eviction(CacheConfig(query_buffers=0)) == 0
    asked = CacheConfig(budget=512)
    assert with_query_buffer(config, asked) is asked
    v4 = ModelConfig.from_dict(KNOWN["DeepSeek-V4-Flash"])
    assert with_query_buffer(v4, CacheConfig()).query_buffers is None


def test_query_buffers_may_be_none_only_without_a_budget() -> None:
    assert CacheConfig(query_buffers=0).query_buffers == 0
    with pytest.raises(HybridKVError, match="query_buffers must be from 1"):
        CacheConfig(budget=100, query_buffers=0)
    with pytest.raises(HybridKVError, match="query_buffers must be from 0"):
        CacheConfig(query_buffers=-1)


# ---- what is said about it


@spread(
    "length, ahead, kind",
    [(n, True) for n in (15, 16, 17, 20, 21, 31, 32, 63, 64, 128)] + [(n, False) for n in (16, 17, 63)],
    KINDS,
)
def test_no_request_keeps_more_bytes_than_all(kind: str, ahead: bool, length: int, evicting: Callable) -> None:
    """Pages hold 16 entries. One that was taken ahead for a token that never came is not kept by anybody."""
    for how in ({}, {"eviction": OWN}, {"eviction": EvictionConfig(16, 16, 8, bounded=True)}):
        for say in (1, 2, 17):
            engine = evicting(kind, query_buffers=1)
            engine.launches_ahead = ahead
            request = engine.add(tiny.token_ids(length), SamplingParams(max_tokens=say, ignore_eos=True), **how)
            run(engine)
            stats, schema = request.stats, engine.manager.schema
            assert stats["kv_bytes_kept"] <= stats["kv_bytes_full"] == schema.kv_bytes(len(request.tokens) - 1)
            if not request.evictions:
                assert stats["kv_bytes_kept"] == stats["kv_bytes_full"]
            elif length >= 63:
                assert stats["kv_bytes_kept"] < stats["kv_bytes_full"]
