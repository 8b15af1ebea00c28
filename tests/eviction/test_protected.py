"""Entries that stay whatever their score: the first, ranges of positions, and the recent ones; NaN stays an error."""

from collections.abc import Callable

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from engine.driving import assert_nothing_held, run
from eviction.harness import Run, request_of
from hybridkv.config import CacheConfig, EvictionConfig, SamplingParams
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Ada, All, LayerCache, Policy, Pyramid, SnapKV
from hybridkv.eviction.keep import Protected
from hybridkv.eviction.policies import Peak, Streaming

SAY = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPT = 100


class Late(Policy):
    """The later, the better: what is protected at the beginning would be the first to go."""

    def score(self, layer: LayerCache) -> Tensor:
        return layer.positions.float()


def chosen(run: Run, policy: Policy, budget: int, **more: object) -> list[np.ndarray]:
    assert run.evictor is not None
    ranges = more.pop("ranges", ())
    eviction = EvictionConfig(budget, window=16, recent=8, policy=policy, **more)  # type: ignore[arg-type]
    keep = run.evictor.choose(request_of([]), run.manager, eviction, policy, ranges=ranges)  # type: ignore[arg-type]
    return [entries for layer in keep for entries in layer]


@pytest.fixture
def filled(run_of: Callable) -> Run:
    run = run_of("llama", budget=32, recent=8)
    run.feed(tiny.token_ids(PROMPT))
    return run


@pytest.mark.parametrize("spread", (lambda p: p, Ada, All, Pyramid), ids=("even", "ada", "all", "pyramid"))
def test_the_first_tokens_stay(spread: Callable, filled: Run) -> None:
    for entries in chosen(filled, spread(Late()), 32, first=6):
        assert entries[:6].tolist() == [0, 1, 2, 3, 4, 5] and entries[-8:].tolist() == list(range(92, 100))
    for entries in chosen(filled, spread(Late()), 32):
        assert entries[0] > 40, "without it they go"


@pytest.mark.parametrize("spread", (lambda p: p, Ada, All), ids=("even", "ada", "all"))
def test_ranges_of_positions_stay(spread: Callable, filled: Run) -> None:
    for entries in chosen(filled, spread(Late()), 32, ranges=[(10, 13), (40, 42)], first=2):
        assert {0, 1, 10, 11, 12, 40, 41} <= set(entries.tolist()) and 2 not in entries and 42 not in entries


def test_ranges_are_positions_also_where_entries_are_gone(filled: Run) -> None:
    every_other = np.arange(0, PROMPT, 2)
    heads = filled.model.config.kv_heads
    filled.keep({layer: [every_other] * heads for layer in filled.layers})
    for entries in chosen(filled, Late(), 20, ranges=[(10, 15)]):
        assert every_other[entries][:3].tolist() == [10, 12, 14]


def test_more_protected_than_the_budget_holds_keeps_the_earliest(filled: Run) -> None:
    """Half the budget is recent, the rest is filled in order of position; nothing goes beyond the budget."""
    for entries in chosen(filled, Late(), 16, ranges=[(0, 60)]):
        assert entries.tolist() == [*range(8), *range(92, 100)]
    for entries in chosen(filled, SnapKV(), 16, first=8):
        assert entries.tolist() == [*range(8), *range(92, 100)]


@pytest.mark.parametrize("spread", (Ada, All), ids=("ada", "all"))
@pytest.mark.parametrize("budget", (8, 9, 10, 12))
def test_a_tiny_budget_with_first_tokens_holds(budget: int, spread: Callable, filled: Run) -> None:
    found = chosen(filled, spread(Peak()), budget)
    assert sum(map(len, found)) == budget * len(found)
    assert all(entries[-8:].tolist() == list(range(92, 100)) for entries in found)


def test_a_policy_has_its_own_first_tokens_unless_others_are_named(filled: Run) -> None:
    """Peak protects 4. Streaming has sinks of its own, which are not the same: they are its best scores."""
    assert all(entries[:4].tolist() == [0, 1, 2, 3] for entries in chosen(filled, Ada(Peak()), 20))
    assert Ada(Peak()).first == All(Peak()).first == 4 and SnapKV().first == Streaming().first == 0
    assert all(entries[:7].tolist() == list(range(7)) for entries in chosen(filled, Peak(), 20, first=7))
    with_none, scores = chosen(filled, Peak(), 20, first=0), Peak()
    assert filled.evictor is not None
    layers = filled.evictor.layers(request_of([]), filled.manager, window=16)
    for entries, row in zip(with_none, torch.cat(scores.scores(layers)), strict=True):
        ranked = sorted(range(92), key=lambda j: (-float(row[j]), j))[:12]
        assert entries.tolist() == [*sorted(ranked), *range(92, 100)]


def test_scores_that_were_given_are_not_changed(filled: Run) -> None:
    assert filled.evictor is not None
    scores = [torch.rand(filled.model.config.kv_heads, PROMPT) for _ in filled.layers]
    before = [each.clone() for each in scores]
    filled.evictor.choose(request_of([]), filled.manager, EvictionConfig(32, 16, 8), Peak(), scores, [(3, 9)])
    assert all(map(torch.equal, scores, before))


@pytest.mark.parametrize("where", (0, 3, 50))
@pytest.mark.parametrize("spread", (lambda p: p, Ada, All), ids=("even", "ada", "all"))
def test_nan_is_an_error_under_a_protected_entry_too(where: int, spread: Callable, filled: Run) -> None:
    class Broken(Late):
        def score(self, layer: LayerCache) -> Tensor:
            scores = super().score(layer)
            scores[-1, where] = torch.nan
            return scores

    before = filled.manager.lengths("r")["attention"].copy()
    with pytest.raises(HybridKVError, match="NaN scores in attention layer 0"):
        chosen(filled, spread(Broken()), 32, first=4, ranges=[(48, 52)])
    assert (filled.manager.lengths("r")["attention"] == before).all()


def test_marking_leaves_other_scores_alone() -> None:
    rows = torch.tensor([[1.0, 2.0, torch.nan, 4.0], [-torch.inf, 6.0, 7.0, 8.0]])
    at = torch.tensor([[0, 5, 6, 7], [0, 1, 7, -1]])
    Protected(1, [(6, 8)], at).mark(rows)
    inf = torch.inf
    assert torch.equal(rows.nan_to_num(-1.0, inf, -inf), torch.tensor([[inf, 2.0, -1.0, inf], [inf, 6.0, inf, 8.0]]))


def test_first_in_the_settings(evicting: Callable) -> None:
    for bad in (-1, 2.5, True, "4"):
        with pytest.raises(HybridKVError, match="first must be a whole number from 0"):
            EvictionConfig(64, first=bad)  # type: ignore[arg-type]
    with pytest.raises(HybridKVError, match="budget 64 is smaller than the 60 recent and the 8 first tokens"):
        CacheConfig(budget=64, recent=60, first=8)
    engine = evicting("qwen3_5", budget=40, first=12)
    request = engine.add(tiny.token_ids(PROMPT), SAY)
    other = engine.add(tiny.token_ids(PROMPT), SAY, eviction=EvictionConfig(40, 16, 8, policy=Late()))
    run(engine)
    assert all(list(e[:12]) == list(range(12)) for layer in request.evictions[PROMPT] for e in layer)
    assert all(e[0] > 50 for layer in other.evictions[PROMPT] for e in layer)
    assert_nothing_held(engine)
