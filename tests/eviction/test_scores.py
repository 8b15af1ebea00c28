"""SnapKV's scores and keep sets against dense softmax rows in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eviction.layer_cache import Dense, attention, make
from hybridkv.errors import HybridKVError
from hybridkv.eviction.keep import choose
from hybridkv.eviction.policies import SnapKV
from hybridkv.kernels.eviction.score import window_scores, window_scores_ref

CASES = {
    "equal lengths": dict(lengths=[40, 40]),
    "lengths differ": dict(lengths=[33, 9, 50], position=70),
    "prompt shorter than the window": dict(lengths=[5, 5], window=64),
    "window of one": dict(lengths=[20, 20], window=1),
    "one head, no sharing": dict(lengths=[30], folds=1),
    "whole window is the prompt": dict(lengths=[16, 16], window=16),
}
DTYPES = ("f32", "bf16", "fp8")


def dense_scores(dense: Dense, pooling: str = "none", kernel: int = 5) -> list[Tensor]:
    """For each KV head [n], written out as loops."""
    c = dense.cache
    W, H = c.queries.shape[:2]
    G = len(c.lengths)
    found = []
    for g, n in enumerate(c.lengths.tolist()):
        total = torch.zeros(n, dtype=torch.float64)
        for h in range(g * H // G, (g + 1) * H // G):
            row = sum(attention(dense, w, h) for w in range(W))
            old = row[: n - W] if n > W else row[:0]
            if pooling != "none" and len(old):
                half, padded = kernel // 2, old.clone()
                for j in range(len(old)):
                    near = [old[i].item() for i in range(j - half, j + half + 1) if 0 <= i < len(old)]
                    # the average counts places past the ends as zeros
                    padded[j] = max(near) if pooling == "max" else sum(near) / kernel
                row = torch.cat((padded, row[n - W :]))
            total += row
        found.append(total)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", ("none", "avg", "max"))
@pytest.mark.parametrize("case", CASES)
def test_scores_are_summed_softmax_rows(case: str, pooling: str, dtype: str) -> None:
    dense = make(**CASES[case], dtype=dtype)  # type: ignore[arg-type]
    got = SnapKV(pooling).score(dense.cache)
    for g, want in enumerate(dense_scores(dense, pooling)):
        assert torch.allclose(got[g, : len(want)].double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_all_attention_is_given_out(case: str) -> None:
    """Each query of each head pays 1 in all: H x W a layer."""
    dense = make(**CASES[case])  # type: ignore[arg-type]
    W, H = dense.cache.queries.shape[:2]
    assert SnapKV("none").score(dense.cache).nan_to_num().sum().item() == pytest.approx(H * W, rel=1e-5)


def test_a_query_pays_nothing_to_later_keys() -> None:
    dense = make([30], window=6, folds=1)
    c = dense.cache
    scores = window_scores(c.queries[:1], c.query_positions[:1], c.k_pool, c.table, c.positions, c.scale)
    assert (scores[0, 25:] == 0).all() and (scores[0, :25] > 0).all()


@pytest.mark.parametrize("tile", (1, 3, 8, 64))
def test_tiles_join_to_the_same_scores(tile: int) -> None:
    c = make([33, 9, 50], position=70).cache
    arguments = (c.queries, c.query_positions, c.k_pool, c.table, c.positions, c.scale)
    assert torch.allclose(window_scores_ref(*arguments, key_tile=tile), window_scores_ref(*arguments), atol=1e-6)


def test_equal_inputs_give_equal_bits_wherever_pages_lie() -> None:
    a, b = make([33, 29], seed=3).cache, make([33, 29], seed=3).cache
    shift = torch.roll(torch.arange(len(b.k_pool)), 2)  # type: ignore[arg-type]
    moved = torch.empty_like(b.k_pool)  # type: ignore[arg-type]
    moved[shift] = b.k_pool
    table = torch.where(b.table >= 0, shift[b.table.clamp(min=0).long()].int(), -1)
    first = window_scores(a.queries, a.query_positions, a.k_pool, a.table, a.positions, a.scale)
    second = window_scores(b.queries, b.query_positions, moved, table, b.positions, b.scale)
    assert torch.equal(first, second)


@pytest.mark.parametrize("pooling", ("none", "avg", "max"))
@pytest.mark.parametrize("scope", ("head", "layer", "global"))
@pytest.mark.parametrize("budget", (8, 9, 16, 39, 40, 100))
def test_keep_sets_equal_the_oracles(budget: int, scope: str, pooling: str) -> None:
    layers = [make([40, 40], seed=i, layer=i) for i in range(3)]
    lengths, recent = np.full((3, 2), 40), 8
    got = choose([SnapKV(pooling).score(d.cache) for d in layers], lengths, np.full((3, 2), budget), recent, scope)
    scores = torch.stack([torch.stack(dense_scores(d, pooling)) for d in layers])  # [layers, G, n]
    if scope != "head":
        scores = scores.sum(1, keepdim=True).expand_as(scores)
    if scope == "global":
        scores = scores.sum(0, keepdim=True).expand_as(scores)
    for i in range(3):
        for g in range(2):
            ranked = sorted(range(32), key=lambda j: (-scores[i, g, j].item(), j))
            want = sorted(ranked[: max(0, budget - recent)] + list(range(32, 40))) if budget < 40 else list(range(40))
            assert got[i][g].tolist() == want


def test_pooling_agrees_with_torch_over_entries_older_than_the_window() -> None:
    dense = make([60, 60], window=16)
    plain = window_scores(
        dense.cache.queries, dense.cache.query_positions, dense.cache.k_pool, dense.cache.table,
        dense.cache.positions, dense.cache.scale,
    ).view(2, 3, 60)  # fmt: skip
    pooled = SnapKV("avg").score(dense.cache)
    assert torch.allclose(pooled[:, :44], F.avg_pool1d(plain[:, :, :44], 5, 1, 2).sum(1), atol=1e-6)
    assert torch.allclose(pooled[:, 44:], plain[:, :, 44:].sum(1), atol=1e-6)


@pytest.mark.parametrize("bad", (dict(pooling="median"), dict(pooling="avg", kernel=4), dict(kernel=0)))
def test_unknown_pooling_is_refused(bad: dict) -> None:
    with pytest.raises(HybridKVError, match="pooling"):
        SnapKV(**bad)
