"""Which entries stay: one rule for all policies, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.machine_model import snapshot as facts
from eviction.harness import Run, request_of
from hybridkv.cache import CacheSchema, KVCacheManager, StateSchema, TensorSpec
from hybridkv.config import CacheConfig
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Evictor, LayerCache, Policy
from hybridkv.eviction.keep import best, choose, pick
from hybridkv.eviction.named import find_policy


@dataclass(frozen=True)
class Given(Policy):
    """Scores that a test made up."""

    value: float = 0.0
    where: int | None = None
    share: int | None = None

    def score(self, layer: LayerCache) -> torch.Tensor:
        scores = torch.zeros(layer.positions.shape)
        scores[:, self.where if self.where is not None else slice(None)] = self.value
        return scores

    def budgets(self, scores: list[torch.Tensor], lengths: np.ndarray, budget: int, recent: int) -> np.ndarray:
        return np.full(lengths.shape, budget if self.share is None else self.share)


@given(
    scores=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    budget=st.integers(1, 50),
    recent=st.integers(0, 50),
)
def test_best_is_the_recent_and_the_highest_with_ties_to_the_lower(scores: list[int], budget: int, recent: int) -> None:
    n = len(scores)
    got = best(torch.tensor(scores, dtype=torch.float32), n, budget, recent).tolist()
    fixed = min(recent, budget) if budget < n else 0
    ranked = sorted(range(n - fixed), key=lambda j: (-scores[j], j))[: budget - fixed]
    want = sorted(ranked) + list(range(n - fixed, n)) if budget < n else list(range(n))
    assert got == want and len(got) == min(n, budget) and got == sorted(set(got))


def test_all_equal_scores_keep_the_first_and_the_recent() -> None:
    assert best(torch.zeros(100), 100, 10, 4).tolist() == [0, 1, 2, 3, 4, 5, 96, 97, 98, 99]


def test_infinities_are_scores_like_any_other() -> None:
    scores = torch.tensor([0.0, -torch.inf, torch.inf, 1.0, torch.inf, 0.0])
    assert best(scores, 6, 4, 1).tolist() == [2, 3, 4, 5]


def test_what_stands_past_a_streams_length_is_not_looked_at() -> None:
    scores = torch.tensor([[1.0, 2, 3, torch.nan, torch.inf], [5.0, 4, 3, 2, 1]])
    got = choose([scores], np.array([[3, 5]]), np.array([[2, 2]]), 0, "head")
    assert [g.tolist() for g in got[0]] == [[1, 2], [0, 1]]


@pytest.mark.parametrize("scope", ("head", "layer", "global"))
def test_what_was_picked_lies_in_memory_as_kernels_read_it(scope: str) -> None:
    """Where streams have one list, it is theirs in memory, too, and not by a stride of 0."""
    found = pick(torch.rand(6, 9), np.full((3, 2), 9), np.full((3, 2), 4), 1, scope)
    assert found.counts.stride() == (1,) and found.counts.tolist() == [4] * 6
    lists = [x.tolist() for layer in found.lists() for x in layer]
    assert len({tuple(x) for x in lists}) <= {"head": 6, "layer": 3, "global": 1}[scope] and len(lists) == 6


@pytest.mark.parametrize("scope", ("layer", "global"))
def test_one_list_for_streams_of_different_lengths_is_refused(scope: str) -> None:
    with pytest.raises(HybridKVError, match="scope"):
        choose([torch.zeros(2, 5)], np.array([[3, 5]]), np.array([[2, 2]]), 0, scope)
    with pytest.raises(HybridKVError, match="scope"):
        choose([torch.zeros(2, 5)], np.array([[5, 5]]), np.array([[1, 2]]), 0, scope)


@pytest.fixture
def filled(run_of: Callable) -> Run:
    run = run_of("llama", budget=32, recent=8)
    run.feed(tiny.token_ids(100), 64)
    return run


def evictor_of(filled: Run, policy: Policy) -> Evictor:
    eviction = replace(filled.config, policy=policy).eviction
    assert eviction is not None
    return Evictor(eviction, 1.0)


@pytest.mark.parametrize("where", (0, 50, 99), ids=("first", "middle", "recent"))
def test_nan_scores_are_an_error_and_the_pool_is_unchanged(filled: Run, where: int, run_of: Callable) -> None:
    evictor = evictor_of(filled, Given(float("nan"), where))
    before = facts(filled.manager)
    with pytest.raises(HybridKVError, match="NaN"):
        evictor.choose(request_of(tiny.token_ids(100)), filled.manager)
    assert facts(filled.manager) == before and not filled.manager.compactions


@pytest.mark.parametrize("share", (0, -3, 33, 1 << 40))
def test_a_policy_that_asks_for_too_much_or_nothing_is_refused(filled: Run, share: int) -> None:
    before = facts(filled.manager)
    with pytest.raises(HybridKVError, match="budgets"):
        evictor_of(filled, Given(share=share)).choose(request_of(tiny.token_ids(100)), filled.manager)
    assert facts(filled.manager) == before


BAD_LISTS = {
    "unsorted": [5, 3, 9],
    "repeated": [3, 5, 5],
    "negative": [-1, 4],
    "past the end": [4, 100],
    "empty": [],
    "unsigned and unsorted": np.array([5, 3], np.uint64),
    "a mask": np.ones(100, bool),
    "not whole": [1.0, 2.5],
    "not numbers": [float("nan")],
    "two-dimensional": [[1, 2]],
}


@pytest.mark.parametrize("what", BAD_LISTS)
@pytest.mark.parametrize("where", (0, -1), ids=("first stream", "last stream"))
def test_a_bad_keep_list_is_refused_and_the_pool_is_unchanged(filled: Run, what: str, where: int) -> None:
    heads = filled.model.config.kv_heads
    keep = {layer: [np.arange(10, 20)] * heads for layer in filled.layers}
    keep[filled.layers[where]][where] = BAD_LISTS[what]  # type: ignore[call-overload]
    before = facts(filled.manager)
    with pytest.raises(ValueError, match="ascending"):
        filled.manager.compact_request("r", keep)
    assert facts(filled.manager) == before and not filled.manager.compactions


def test_a_missing_layer_or_head_is_refused(filled: Run) -> None:
    heads = filled.model.config.kv_heads
    keep = {layer: [np.arange(10)] * heads for layer in filled.layers}
    before = facts(filled.manager)
    for bad in ({**keep, filled.layers[0]: keep[filled.layers[0]][:-1]}, dict(list(keep.items())[1:])):
        with pytest.raises(ValueError, match="needs a list"):
            filled.manager.compact_request("r", bad)
        assert facts(filled.manager) == before


def test_keeping_everything_changes_nothing(filled: Run) -> None:
    before = facts(filled.manager)
    keep = {layer: [np.arange(100)] * filled.model.config.kv_heads for layer in filled.layers}
    assert filled.manager.compact_request("r", keep) == 0
    assert facts(filled.manager) == before and not filled.manager.compactions


def test_truncating_to_what_was_evicted_is_refused(run_of: Callable) -> None:
    run = run_of("llama")  # without a budget there is no state, so that a plain cache can be truncated
    run.feed(tiny.token_ids(100))
    run.keep({layer: [np.arange(0, 100, 2)] * run.model.config.kv_heads for layer in run.layers})
    run.feed(tiny.token_ids(5))
    before = facts(run.manager)
    for position in (0, 40, 99):
        with pytest.raises(HybridKVError, match="evicted"):
            run.manager.truncate_request("r", position)
        assert facts(run.manager) == before
    run.manager.truncate_request("r", 105)
    assert facts(run.manager) == before


@pytest.mark.parametrize(
    ("bad", "says"),
    (
        (dict(budget=0), "budget"), (dict(budget=-5), "budget"), (dict(budget=2.5), "budget"),
        (dict(budget=True), "budget"), (dict(budget=10, recent=11), "recent"), (dict(budget=63), "recent"),
        (dict(budget=64, window=0), "window"), (dict(budget=64, recent=-1), "recent"),
        (dict(budget=64, scope="token"), "scope"), (dict(bounded=True), "budget"), (dict(decode_every=4), "budget"),
        (dict(budget=64, decode_every=-1), "decode_every"), (dict(budget=10**40, window="x"), "window"),
    ),
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(bad: dict, says: str) -> None:
    with pytest.raises(HybridKVError, match=says):
        CacheConfig(**bad)


@pytest.mark.parametrize("policy", ("snap", "", 3, None, object()))
def test_an_unknown_policy_is_refused(policy: object) -> None:
    with pytest.raises(HybridKVError, match="policy"):
        find_policy(policy)


def test_a_budget_for_a_model_without_full_attention_is_refused() -> None:
    schema = CacheSchema((), (StateSchema("gdn", (0, 1), (TensorSpec("s", (4,), torch.float32),)),))
    manager = KVCacheManager(schema, {}, 1, 64)
    with pytest.raises(HybridKVError, match="no full-attention layer"):
        Evictor.make(CacheConfig(budget=64), manager, scale=1.0)
    assert Evictor.make(CacheConfig(), manager, scale=1.0) is None


def test_a_policy_without_score_says_so(filled: Run) -> None:
    with pytest.raises(TypeError, match="score"):
        evictor_of(filled, Policy()).choose(request_of(tiny.token_ids(100)), filled.manager)
