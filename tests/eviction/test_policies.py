"""Every policy against its definition written out in loops; budgets that add up; a policy of one's own."""

import runpy
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eviction.layer_cache import Dense, attention, make
from eviction.shared_oracle import share_by_loops
from hybridkv.eviction import POLICIES, Ada, All, LayerCache, Policy, Pyramid
from hybridkv.eviction.keep import choose, choose_shared
from hybridkv.eviction.named import find_policy
from hybridkv.eviction.policies import COPIES, Heads, KeyDiff, Knorm, Leverage, Peak, Random, Streaming, Tova

CASES = {
    "equal lengths": dict(lengths=[40, 40]),
    "lengths differ": dict(lengths=[33, 9, 50], position=70),
    "shorter than the window": dict(lengths=[5, 5], window=64),
    "one head": dict(lengths=[30], folds=1),
}


def tova(dense: Dense) -> list[Tensor]:
    H = dense.cache.queries.shape[1]
    rows = [attention(dense, -1, h) for h in range(H)]
    folds = H // len(dense.keys)
    width = max(dense.cache.lengths)
    padded = [torch.cat((row, torch.zeros(width - len(row), dtype=row.dtype))) for row in rows]
    mean = torch.stack(padded).mean(0)
    return [mean[: len(rows[g * folds])] for g in range(len(dense.keys))]


def peak(dense: Dense, policy: Peak) -> list[Tensor]:
    c, spreads = dense.cache, []
    assert c.weights is not None
    folds, W = c.queries.shape[1] // len(dense.keys), len(c.queries)
    for g, v in enumerate(dense.values):
        rows = [attention(dense, w, h) for w in range(W) for h in range(g * folds, (g + 1) * folds)]
        most = torch.stack(rows).max(0).values
        old = max(0, len(v) - W)  # peaks of entries older than the window spread among themselves
        spread = most.clone()
        for j in range(old):
            near = range(max(0, j - policy.ahead), min(old, j + policy.behind + 1))
            spread[j] = max(most[i] * policy.decay ** abs(i - j) for i in near)
        spreads.append(spread)
    looked_at: dict[int, float] = {}  # by position, whichever stream it is
    for spread, places, weight in zip(spreads, dense.positions, c.weights.tolist()):
        for place, x in zip(places.tolist(), spread.tolist()):
            looked_at[place] = max(looked_at.get(place, 0.0), x * weight)
    found = []
    for g, (v, place) in enumerate(zip(dense.values, standing(dense, policy.pooling))):
        spread = spreads[g]
        if policy.shared:
            others = [looked_at[p] for p in dense.positions[g].tolist()]
            spread = torch.maximum(spread, torch.tensor(others, dtype=spread.dtype))
        score = policy.strength * spread + place
        if policy.values and c.weights[g] >= COPIES:
            score = score * v.norm(dim=-1) / v.norm(dim=-1).mean()
        found.append(score * c.weights[g].double() ** policy.heads)
    return found


def heads(dense: Dense, policy: Heads) -> list[Tensor]:
    assert dense.cache.weights is not None
    weights = dense.cache.weights.double() ** policy.heads
    return [place * weight for place, weight in zip(standing(dense, policy.pooling), weights)]


def standing(dense: Dense, pooling: int) -> list[Tensor]:
    """Of each entry the part of its stream that does not lie in a better bin, by pooled key difference.

    Differences are the policy's own, which `keydiff` is compared with: at the edge of a bin the last bit of one decides
    where it falls.
    """
    found = []
    for alone, n in zip(KeyDiff().score(dense.cache).tolist(), map(len, dense.keys)):
        half = pooling // 2
        row = [max(alone[max(0, j - half) : min(n, j + half + 1)]) for j in range(n)]
        bins = [struct.unpack("i", struct.pack("f", min(max(1 + x, 2**-20), 2)))[0] >> 15 for x in row]
        found.append(torch.tensor([1 - sum(b > own for b in bins) / n for own in bins], dtype=torch.float64))
    return found


def leverage(dense: Dense) -> list[Tensor]:
    found = []
    for k in dense.keys:
        gram = k.T @ k
        ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        found.append(torch.stack([x @ torch.linalg.inv(gram + ridge) @ x for x in k]))
    return found


def keydiff(dense: Dense) -> list[Tensor]:
    found = []
    for k in dense.keys:
        anchor = torch.stack([x / x.norm() for x in k]).mean(0)
        found.append(torch.stack([-(x @ anchor) / x.norm() / anchor.norm() for x in k]))
    return found


WEIGHTS = (0.04, 1.0)  # of the first stream, which hardly copies, to the last
PEAKS = {
    "peak": Peak(),
    "peak that spreads nowhere": Peak(ahead=0, behind=0, pooling=1),
    "peak that does not fade": Peak(ahead=3, behind=0, decay=1.0, values=False),
    "peak that fades fast": Peak(ahead=2, behind=5, decay=0.5, strength=100.0, heads=0.0),
    "peak that spreads to an odd number": Peak(ahead=2, behind=1, decay=0.9, pooling=3, heads=2.5),
    "peaks do not count": Peak(strength=0.0, heads=0.5),
    "every stream for itself": Peak(ahead=4, behind=4, shared=False, strength=30.0),
}
ORACLES: dict[str, tuple[Policy, Callable[..., list[Tensor]]]] = {
    "tova": (Tova(), tova),
    **{name: (policy, lambda d, policy=policy: peak(d, policy)) for name, policy in PEAKS.items()},
    "heads": (Heads(), lambda d: heads(d, Heads())),
    "heads by the square": (Heads(pooling=1, heads=2.0), lambda d: heads(d, Heads(pooling=1, heads=2.0))),
    "leverage": (Leverage(), leverage),
    "knorm": (Knorm(), lambda d: [-torch.stack([x.square().sum().sqrt() for x in k]) for k in d.keys]),
    "keydiff": (KeyDiff(), keydiff),
}


@pytest.mark.parametrize("dtype", ("f32", "bf16", "fp8"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ORACLES)
def test_scores_equal_the_definition(name: str, case: str, dtype: str) -> None:
    policy, oracle = ORACLES[name]
    dense = make(**CASES[case], dtype=dtype)  # type: ignore[arg-type]
    dense.cache = replace(dense.cache, weights=torch.linspace(WEIGHTS[0], WEIGHTS[1], len(dense.keys)))
    got = policy.score(dense.cache)
    assert got.shape == dense.cache.positions.shape
    for g, want in enumerate(oracle(dense)):
        assert torch.allclose(got[g, : len(want)].double(), want, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("name", ("peak:shared=no", "heads"))
def test_without_weights_all_streams_are_alike(name: str) -> None:
    policy = find_policy(name)
    assert policy.needs_weights and isinstance(policy, All)
    cache = make([40, 33]).cache
    equal = replace(cache, weights=torch.ones(2))
    assert torch.equal(policy.score(cache), policy.score(equal))
    weighed = policy.score(replace(cache, weights=torch.tensor([0.5, 1.0])))
    assert torch.equal(weighed[1], policy.score(cache)[1]) and (weighed[0] < policy.score(cache)[0]).all()
    alike = replace(policy, policy=replace(policy.policy, heads=0.0))  # type: ignore[type-var]
    assert torch.equal(alike.score(replace(cache, weights=torch.tensor([0.5, 1.0]))), policy.score(cache))


EVICTED = (([40, 33], 1), ([50, 44], 2))  # lengths and seeds of two layers


def test_what_one_stream_looks_at_counts_in_all() -> None:
    """Of other layers, too, and by absolute position: streams that were evicted hold it at another place."""
    here, there = (replace(make(n, position=70, seed=seed).cache, weights=torch.ones(2)) for n, seed in EVICTED)
    plain = Peak(ahead=0, behind=0, pooling=1, values=False, heads=0.0)
    alone = [replace(plain, shared=False).score(layer) for layer in (here, there)]
    own = [
        (score - replace(plain, strength=0.0).score(layer)) / plain.strength
        for layer, score in zip((here, there), alone)
    ]
    looked_at = torch.zeros(70)
    for layer, peaks in zip((here, there), own):
        for g, p in (layer.positions >= 0).nonzero().tolist():
            at = layer.positions[g, p]
            looked_at[at] = max(looked_at[at], peaks[g, p])
    got = plain.scores([here, there])
    for layer, score, before, peaks in zip((here, there), got, alone, own):
        held = layer.positions >= 0
        raised = looked_at[layer.positions.clamp(min=0)] - peaks
        assert torch.allclose((score - before)[held], plain.strength * raised[held], atol=1e-5)
        assert int((raised[held] > 1e-3).sum()) > 10
    assert torch.equal(find_policy("peak").scores([here, there])[1], Peak().scores([here, there])[1])


def test_a_stream_that_does_not_copy_tells_the_others_little() -> None:
    cache = make([40, 40]).cache
    before = Peak(shared=False, heads=0.0, values=False).score(replace(cache, weights=torch.tensor([1e-3, 1.0])))
    after = Peak(heads=0.0, values=False).score(replace(cache, weights=torch.tensor([1e-3, 1.0])))
    assert torch.allclose(after[1], before[1], atol=0.01) and (after[0] - before[0]).max() > 0.5


class Mixin:
    def score(self, layer: LayerCache) -> Tensor:
        return torch.zeros(layer.positions.shape)


def test_a_score_of_ones_own_is_not_passed_over() -> None:
    class Turned(Peak):
        def score(self, layer: LayerCache) -> Tensor:
            return -super().score(layer)

    class Mixed(Mixin, Peak):
        pass

    cache = make([40, 33]).cache
    assert torch.equal(Mixed().scores([cache])[0], torch.zeros(2, 40))
    assert torch.equal(Turned().scores([cache])[0], -Peak().score(cache))
    assert torch.equal(All(Turned()).scores([cache])[0], -Peak().score(cache))


@pytest.mark.parametrize("name", ("peak", "heads"))
def test_a_key_that_is_nan_is_not_hidden(name: str) -> None:
    """Its rank would be a number; a broken cache is to be refused."""
    cache = make([40, 33]).cache
    cache.k_pool[int(cache.table[1, 2]), 3] = torch.nan  # type: ignore[index]
    scores = find_policy(name).score(cache)
    assert scores[1, :33].isnan().any() and not scores[0].isnan().any()


@pytest.mark.parametrize("weights", (None, [0.04, 1.0], [1.0, 1.0]))
def test_a_value_that_is_nan_is_not_hidden(weights: list[float] | None) -> None:
    """Also where norms of values do not count."""
    cache = replace(make([40, 33]).cache, weights=None if weights is None else torch.tensor(weights))
    cache.v_pool[int(cache.table[0, 2]), 3] = torch.nan  # type: ignore[index]
    scores = Peak().score(cache)
    assert scores[0].isnan().any() and not scores[1, :33].isnan().any()


@pytest.mark.parametrize("name", [name for name, make in POLICIES.items() if not make().needs_replay])
@pytest.mark.parametrize("case", CASES)
def test_dirty_pages_past_the_end_do_not_reach_the_scores(name: str, case: str) -> None:
    dense = make(**CASES[case])  # type: ignore[arg-type]  # unused places of its pages hold NaN
    got = POLICIES[name]().score(dense.cache)
    for g, n in enumerate(dense.cache.lengths):
        assert not got[g, :n].isnan().any()


@pytest.mark.parametrize("sinks", (0, 1, 4))
@pytest.mark.parametrize("budget", (8, 12, 39))
def test_streaming_keeps_sinks_and_the_latest(sinks: int, budget: int) -> None:
    dense = make([40, 40])
    keep = choose([Streaming(sinks).score(dense.cache)], np.full((1, 2), 40), np.full((1, 2), budget), 8, "head")
    count = min(sinks, budget - 8)
    assert keep[0][0].tolist() == [*range(count), *range(40 - budget + count, 40)] == keep[0][1].tolist()


def test_streaming_goes_by_position_where_entries_were_dropped_before() -> None:
    dense = make([12], position=100, window=2)
    scores = Streaming(4).score(dense.cache)[0]
    for place, score in zip(dense.positions[0], scores.tolist()):
        assert score == (float("inf") if place < 4 else place)


def test_random_is_the_same_each_time_and_differs_by_layer_and_seed() -> None:
    a, b = make([40, 40], layer=0).cache, make([40, 40], layer=1).cache
    assert torch.equal(Random().score(a), Random().score(a))
    assert not torch.equal(Random().score(a), Random().score(b))
    assert not torch.equal(Random().score(a), Random(seed=1).score(a))
    assert not torch.equal(Random().score(a)[0], Random().score(a)[1])


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    budget=st.integers(1, 48),
    recent=st.integers(0, 48),
    floor=st.sampled_from((0.0, 0.2, 0.5, 1.0)),
    steepness=st.sampled_from((1.0, 2.0, 20.0)),
    which=st.integers(0, 5),
    ties=st.booleans(),
)
def test_shared_budgets_never_exceed_what_was_asked(
    lengths: list[tuple], budget: int, recent: int, floor: float, steepness: float, which: int, ties: bool
) -> None:
    recent = min(recent, budget)
    pyramid = Pyramid(steepness=steepness)
    policy = (
        Ada(floor=floor),
        pyramid,
        Ada(pyramid, floor),
        All(floor=floor),
        All(pyramid, floor),
        All(pyramid, floor, 0.75),
    )[which]
    n = np.array(lengths)
    torch.manual_seed(budget)
    scores = [torch.zeros(3, 40) if ties else torch.rand(3, 40) for _ in lengths]
    budgets = policy.budgets(scores, n, budget, recent)
    assert budgets.shape == n.shape and budgets.sum() <= budget * n.size
    assert budgets.min() >= 1, "no stream is emptied"
    keep = choose(scores, n, budgets, recent, "head")
    kept = np.array([[len(g) for g in layer] for layer in keep])
    assert (kept <= n).all() and kept.sum() <= budget * n.size
    if which == 0:
        assert (budgets.sum(1) <= 3 * budget).all(), "a layer's heads share that layer's budget"
    if which in (0, 3):
        assert (budgets >= np.minimum(np.minimum(recent, budget), n)).all(), "recent entries stay in every head"
    for layer, each in zip(keep, n):
        for g, length in zip(layer, each):
            tail = min(recent, len(g))
            assert g[len(g) - tail :].tolist() == list(range(length - tail, length))


def test_ada_keeps_the_best_of_all_heads_of_a_layer() -> None:
    torch.manual_seed(1)
    scores = torch.rand(4, 50) * torch.tensor([1.0, 0.1, 0.5, 0.9])[:, None]
    n = np.full((1, 4), 50)
    budgets = Ada(floor=0.0).budgets([scores], n, 20, 5)
    keep = choose([scores], n, budgets, 5, "head")[0]
    free = scores[:, :45]
    ranked = sorted((-free[g, j].item(), g, j) for g in range(4) for j in range(45))[: 4 * 20 - 4 * 5]
    want = [sorted([j for _, h, j in ranked if h == g] + list(range(45, 50))) for g in range(4)]
    assert [k.tolist() for k in keep] == want and budgets.sum() == 80
    assert budgets[0, 0] > budgets[0, 1], "the head with the higher scores keeps more"


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=4),
    budget=st.integers(1, 34),
    recent=st.integers(0, 34),
    floor=st.sampled_from((0.0, 0.2, 0.5, 1.0)),
    ties=st.booleans(),
)
def test_all_layers_share_one_budget(lengths: list[tuple], budget: int, recent: int, floor: float, ties: bool) -> None:
    """Against loops: each stream keeps its recent entries and its best up to the floor, and the best of all that is
    left in any stream of any layer fill what remains of one budget."""
    recent, n = min(recent, budget), np.array(lengths)
    torch.manual_seed(budget)
    scores = [torch.randint(0, 3, (2, 30)).float() if ties else torch.rand(2, 30) for _ in lengths]
    keep = choose_shared(scores, n, np.full(n.shape, budget), recent, floor, 0.0)
    streams = [(scores[i][g].tolist(), int(n[i, g])) for i in range(len(n)) for g in range(2)]
    want, rest, room = [], [], budget * n.size
    for s, (row, length) in enumerate(streams):
        old = max(0, length - recent)
        ranked = sorted(range(old), key=lambda j: (-row[j], j))
        least = max(0, max(1, int(budget * floor), min(recent, length)) - min(recent, length))
        want.append(set(ranked[:least]) | set(range(old, length)))
        room -= len(want[-1])
        rest += [(-row[j], s, j) for j in ranked[least:]]
    for _, s, j in sorted(rest)[: max(0, room)]:
        want[s].add(j)
    assert [e.tolist() for layer in keep for e in layer] == [sorted(each) for each in want]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=4),
    budget=st.integers(1, 34),
    recent=st.integers(0, 34),
    floor=st.sampled_from((0.0, 0.2, 0.5, 1.0)),
    layers=st.sampled_from((0.0, 0.1, 0.5, 0.75, 0.99, 1.0)),
    ties=st.booleans(),
)
def test_a_part_of_a_budget_stays_in_its_layer(
    lengths: list[tuple], budget: int, recent: int, floor: float, layers: float, ties: bool
) -> None:
    """Against loops: the streams of a layer win a part of its budget among themselves; the best of all that is left in
    any stream of any layer fill the rest. The whole budget is used where there are so many entries."""
    recent, n = min(recent, budget), np.array(lengths)
    torch.manual_seed(budget)
    scores = [torch.randint(0, 3, (2, 30)).float() if ties else torch.rand(2, 30) for _ in lengths]
    keep = choose_shared(scores, n, np.full(n.shape, budget), recent, floor, layers)
    want, _ = share_by_loops([each.tolist() for each in scores], n, budget, recent, floor, layers)
    assert [[e.tolist() for e in layer] for layer in keep] == want
    if layers < 1:
        assert sum(len(e) for layer in keep for e in layer) == min(n.sum(), budget * n.size)


def test_the_part_that_stays_in_its_layer_protects_a_quiet_layer() -> None:
    scores = [torch.full((2, 50), 0.1), torch.full((2, 50), 0.9)]
    n = np.full((2, 2), 50)
    found = [All(floor=0.25, layers=part).budgets(scores, n, 20, 4).sum(1).tolist() for part in (0.0, 0.5, 0.75, 1.0)]
    assert found == [[10, 70], [20, 60], [30, 50], [40, 40]]


def test_one_budget_over_all_layers_gives_a_loud_layer_more() -> None:
    scores = [torch.full((2, 50), 0.1), torch.full((2, 50), 0.9)]
    n = np.full((2, 2), 50)
    assert All(floor=0.25).budgets(scores, n, 20, 4).tolist() == [[5, 5], [50, 20]]  # ties: the lower stream first
    assert Ada(floor=0.25).budgets(scores, n, 20, 4).sum(1).tolist() == [40, 40]
    assert All(floor=1.0).budgets(scores, n, 20, 4).tolist() == [[20, 20], [20, 20]]


def test_adas_floor_protects_a_quiet_head() -> None:
    scores = torch.ones(2, 50)
    scores[1] = 0
    budgets = Ada(floor=0.5).budgets([scores], np.full((1, 2), 50), 20, 0)
    assert budgets.tolist() == [[30, 10]]


def test_pyramid_gives_early_layers_more() -> None:
    n = np.full((5, 2), 1000)
    budgets = Pyramid(steepness=20.0).budgets([], n, 100, 20)
    assert (np.diff(budgets[:, 0]) < 0).all() and (budgets[:, 0] == budgets[:, 1]).all()
    assert 100 * 10 - 10 <= budgets.sum() <= 100 * 10 and budgets.min() >= 20 + 80 // 20
    assert Pyramid().budgets([], np.full((1, 2), 1000), 100, 20).tolist() == [[100, 100]]


def test_ada_over_pyramid_uses_each_layers_share() -> None:
    torch.manual_seed(0)
    n = np.full((4, 2), 200)
    scores = [torch.rand(2, 200) for _ in range(4)]
    even = Pyramid().budgets(scores, n, 50, 8)
    assert (Ada(Pyramid()).budgets(scores, n, 50, 8).sum(1) == even.sum(1)).all()


@pytest.mark.parametrize("wrapper", (Ada, All, Pyramid))
def test_wrappers_score_as_the_policy_inside(wrapper: type) -> None:
    cache = make([40, 40]).cache
    assert torch.equal(wrapper(Knorm()).score(cache), Knorm().score(cache))
    assert torch.equal(wrapper().score(cache), Peak().score(cache))


def test_the_example_of_an_own_policy_runs(
    oracle: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYBRIDKV_BUDGET", raising=False)
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_policy.py"))
    example["main"](str(oracle("qwen3_5").folder), tiny.token_ids(400))
    assert "400 prompt tokens" in capsys.readouterr().out
