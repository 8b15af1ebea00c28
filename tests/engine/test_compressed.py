"""The engine over DeepSeek-V4's cache: requests that come, go, wait and go on give the tokens of each alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_v4
import torch

from engine.driving import count_tokens, run
from engine.reusing import ASK, poison
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cache import KVCacheManager
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier
from hybridkv.engine.engine import Engine
from hybridkv.request import Request


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tiny_v4.Oracle("mini", tmp_path_factory.mktemp("mini")).folder
    return LLM(str(folder), "cpu", "float32", cache=CacheConfig(kv_dtype="f32", block=16), max_context=300)


@pytest.fixture
def engine(llm: LLM) -> Callable[..., Engine]:
    """`engine(pages, slots)`: one with pools of so many pages each, all bytes of them hostile."""

    def build(pages: int, slots: int) -> Engine:
        manager = KVCacheManager(llm.plan.schema, {"csa": pages, "hca": pages}, slots, 300)
        for table in manager.tables.values():
            for pool in table.pool.tensors.values():
                pool.view(torch.uint8).fill_(255)
        return Engine(llm.model, manager, step_tokens=64)

    return build


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def test_preempted_requests_give_what_they_would_alone(llm: LLM, engine: Callable[..., Engine]) -> None:
    """Pools of 14 pages hold 224 tokens; the requests want 450, in four slots that are used again."""
    e = engine(14, 4)
    prompts = [tiny_v4.token_ids(n, seed=n) for n in (1, 3, 60, 15, 16, 17, 90, 100)]
    requests = []
    for i, p in enumerate(prompts):
        requests.append(e.add(p, greedy(9 + 3 * i)))
        e.step()
    run(e)
    assert sum(r.preemptions for r in requests) > 0, "nothing was preempted"
    for r, p in zip(requests, prompts, strict=True):
        assert r.error is None
        assert r.generated == llm.generate([p], r.params)[0].token_ids
    e.manager.check_integrity()


def test_preempted_requests_come_back_from_the_host_wherever_they_stand(
    llm: LLM, engine: Callable[..., Engine]
) -> None:
    """Also between two blocks, where a cache cannot be shared. One alone runs in the same steps: the same bits."""
    want, e = engine(40, 4), engine(40, 4)
    e.manager.host = HostTier(100 * BLOCK, torch.device("cpu"), pages=True, preempted=True)
    how, counts = replace(ASK, max_tokens=20), count_tokens(e)
    one, other = (each.add(tiny_v4.token_ids(150, seed=4), how) for each in (want, e))
    run(want)
    while not e.idle:
        e.step()
        if other in e.scheduler.running:
            e.scheduler.preempt(other)
            poison(e)
    assert other.error is None and torch.equal(v4_logprobs(one), v4_logprobs(other))
    assert other.restored == other.preemptions == len(counts) - 1 and sum(counts) == 150 + 19
    small = engine(14, 4)
    small.manager.host = HostTier(100 * BLOCK, torch.device("cpu"), pages=True, preempted=True)
    prompts, requests = [tiny_v4.token_ids(n, seed=n) for n in (1, 3, 60, 15, 16, 17, 90, 100)], []
    for i, p in enumerate(prompts):
        requests.append(small.add(p, greedy(9 + 3 * i)))
        small.step()
    run(small)
    assert sum(r.restored for r in requests) == sum(r.preemptions for r in requests) > 0
    for r, p in zip(requests, prompts, strict=True):
        assert r.generated == llm.generate([p], r.params)[0].token_ids
    for each in (e, small):
        each.manager.check_integrity()
        assert not each.manager.away and not each.manager.host.used


def v4_logprobs(request: Request) -> torch.Tensor:
    return torch.tensor([[each.token, *sorted(each.top.values())] for each in request.logprobs], dtype=torch.float64)


@pytest.mark.parametrize(("first", "more"), [(14, 1), (15, 3), (16, 5), (40, 40), (3, 1)])
def test_a_held_cache_goes_on_or_is_given_up(first: int, more: int, llm: LLM, engine: Callable[..., Engine]) -> None:
    e = engine(40, 3)
    one = e.add(tiny_v4.token_ids(first), greedy(9), hold=True)
    run(e)
    longer = one.tokens + tiny_v4.token_ids(more, seed=1)
    two = e.add(longer, greedy(9), hold=True, after=one)
    run(e)
    assert two.cached_tokens == len(one.tokens) - 1  # the last token was never fed
    assert two.generated == llm.generate([longer], greedy(9))[0].token_ids
    other = two.tokens[:-5] + [7]  # departs before the end: state cannot go back
    three = e.add(other, greedy(9), after=two)
    run(e)
    assert three.cached_tokens == 0
    assert three.generated == llm.generate([other], greedy(9))[0].token_ids
    assert three.stats["kept_tokens"] == len(three.tokens) - 1  # nothing is evicted
