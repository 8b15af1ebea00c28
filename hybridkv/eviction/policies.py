"""The policies that score. Each is a small dataclass whose fields are its settings; named.py lists them by name.

Scores are comparable within a stream. Those of Peak, SnapKV and TOVA are comparable across streams too, which is what
sharing a budget needs (spread.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.errors import HybridKVError
from hybridkv.eviction.policy import LayerCache, Policy
from hybridkv.kernels.eviction.key_difference import key_differences
from hybridkv.kernels.eviction.peak import peak_scores
from hybridkv.kernels.eviction.peak_mix import mix_peaks, raise_strongest
from hybridkv.kernels.eviction.peak_pool import MAX_KERNEL, pool_peaks
from hybridkv.kernels.eviction.score import window_scores
from hybridkv.kernels.eviction.select import pool_heads
from hybridkv.kernels.eviction.standing import standings
from hybridkv.kernels.eviction.value_norms import value_norms

COPIES = 0.05  # a stream whose weight is less hardly copies: norms of its values say nothing of what to keep


@dataclass(frozen=True)
class Peak(Policy):
    """What the last queries look at, then what stands out.

    The strongest attention counts that any of the last queries pays, of any query head that shares the KV head: a
    needle is looked at by few queries, and a sum over the window would drown them. A number or a name is several
    tokens, read one after the other, and the queries look at the first: a peak spreads to the `ahead` entries after it
    and the `behind` before it, fading by `decay` with each. One head finds the place and others read it out, so what
    one stream looks at counts in all of them, by how much that stream copies (`shared`). What an answer needs later the
    question need not look at: where no peak is, an entry counts by how far its key, or that of one of `pooling`
    neighbours, is from the others (KeyDiff), and `strength` is what a peak weighs beside that. In streams that copy,
    all of it is weighted by the norm of the value (`values`); and everywhere by how much the stream copies, to the
    power of `heads` (0: all alike).
    Feng et al. 2025 (DefensiveKV), arXiv 2510.13334; Feng et al. 2025 (CriticalKV), arXiv 2502.03805; Xiao et al. 2024
    (DuoAttention), arXiv 2410.10819.
    """

    ahead: int = 63
    behind: int = 7
    decay: float = 0.97
    strength: float = 5.0
    pooling: int = 9
    values: bool = True
    heads: float = 0.5
    shared: bool = True
    batchable: ClassVar[bool] = True
    first: ClassVar[int] = 4
    needs_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if min(self.ahead, self.behind) < 0 or self.ahead + self.behind >= MAX_KERNEL:
            raise HybridKVError(
                f"a peak may spread to {MAX_KERNEL - 1} entries, not to {self.ahead} ahead and {self.behind} behind"
            )
        if not 0 < self.decay <= 1:
            raise HybridKVError(f"decay must be above 0 and at most 1 (a peak does not fade), not {self.decay}")
        if not 0 <= self.strength <= 1e6:
            raise HybridKVError(f"strength must be from 0 (peaks do not count) to 1e6, not {self.strength}")
        _check_width(self.pooling)
        _check_heads(self.heads)

    def score(self, layer: LayerCache) -> Tensor:
        return Peak.scores(self, [layer])[0]  # a subclass may have a `score` of its own, which `scores` then calls

    def scores(self, layers: Sequence[LayerCache]) -> list[Tensor]:
        peaks = [self._peaks(layer) for layer in layers]
        looked_at = strongest(peaks, layers) if self.shared else None
        if looked_at is not None and layers[0].ranks is not None:
            looked_at = layers[0].ranks.largest(looked_at)
        return [self._beside(layer, peaks.pop(0), looked_at) for layer in layers]

    def _peaks(self, layer: LayerCache) -> Tensor:
        """[G, L] the strongest attention, spread."""
        peaks = peak_scores(
            layer.queries, layer.query_positions, layer.k_pool, layer.table, layer.positions, layer.scale, layer.lse
        )
        width = self.ahead + self.behind + 1
        return pool_peaks(peaks, layer.device_lengths, len(layer.queries), width, False, None, self.ahead, self.decay)

    def _beside(self, layer: LayerCache, peaks: Tensor, looked_at: Tensor | None) -> Tensor:
        """[G, L] scores: the peaks, and what others look at, beside what stands out; weighted."""
        lengths, weights = layer.device_lengths, layer.weights
        place = standing(layer, self.pooling)
        norms = value_norms(layer.v_pool, layer.table, lengths, peaks.shape[1]) if self.values else None
        plain = weights < COPIES if self.values and weights is not None else None
        factors = None if weights is None or self.heads == 0 else weights**self.heads
        return mix_peaks(peaks, layer.positions, looked_at, place, self.strength, norms, lengths, plain, factors)


def strongest(peaks: Sequence[Tensor], layers: Sequence[LayerCache]) -> Tensor:
    """[tokens] of each absolute position the strongest peak of any stream, times how much that stream copies."""
    found = torch.zeros(max(layer.tokens for layer in layers), device=peaks[0].device)
    for layer, own in zip(layers, peaks):
        raise_strongest(found, own, layer.positions, layer.weights)
    return found


def _weighted(scores: Tensor, layer: LayerCache, power: float) -> Tensor:
    """Scores times how much each stream copies, to a power."""
    if layer.weights is None or power == 0:
        return scores
    return scores * layer.weights[:, None] ** power


def _check_heads(power: float) -> None:
    if not 0 <= power <= 8:
        raise HybridKVError(f"heads must be a power from 0 (all streams alike) to 8, not {power}")


def _check_width(width: int) -> None:
    if not 1 <= width <= 127 or width % 2 == 0:
        raise HybridKVError(f"pooling must be an odd number of neighbours from 1 (none) to 127, not {width}")


@dataclass(frozen=True)
class SnapKV(Policy):
    """Attention that the last queries pay, summed over the window and over the query heads that share a KV head.

    pooling smooths along the prompt, per query head, over entries older than the window: none | avg | max.
    Li et al. 2024, https://arxiv.org/abs/2404.14469
    """

    pooling: str = "avg"
    kernel: int = 5
    batchable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pooling not in ("none", "avg", "max") or self.kernel < 1 or self.kernel % 2 == 0:
            raise HybridKVError(
                f"pooling must be none, avg or max with an odd kernel, not {self.pooling}, {self.kernel}"
            )

    def score(self, layer: LayerCache) -> Tensor:
        scores = window_scores(
            layer.queries, layer.query_positions, layer.k_pool, layer.table, layer.positions, layer.scale, layer.lse
        )
        if self.pooling == "none":
            return scores.view(len(layer.lengths), -1, scores.shape[-1]).sum(1)
        return pool_heads(scores, layer.device_lengths, len(layer.queries), self.pooling, self.kernel)


@dataclass(frozen=True)
class Tova(Policy):
    """Attention of the very last query, the mean over the heads of the layer. Oren et al. 2024, arXiv 2401.06104."""

    def score(self, layer: LayerCache) -> Tensor:
        lse = None if layer.lse is None else layer.lse[-1:]
        scores = window_scores(
            layer.queries[-1:], layer.query_positions[-1:], layer.k_pool, layer.table, layer.positions, layer.scale, lse
        )
        L = scores.shape[1]
        if layer.ranks is not None:
            scores = layer.ranks.each(F.pad(scores, (0, layer.longest - L))).flatten(0, 1)
        return scores.mean(0, keepdim=True)[:, :L].expand(len(layer.lengths), -1)


@dataclass(frozen=True)
class Knorm(Policy):
    """Keys of small norm draw attention: minus the norm. Devoto et al. 2024, arXiv 2406.11430."""

    needs_queries: ClassVar[bool] = False

    def score(self, layer: LayerCache) -> Tensor:
        return -layer.keys.norm(dim=-1)


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keys unlike the others stay: minus the cosine to the mean key direction. Park et al. 2025, arXiv 2504.15364.

    `pooling`: an entry counts as much as the best of so many neighbours (1: by itself, as the paper has it).
    """

    pooling: int = 1
    needs_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_width(self.pooling)

    def score(self, layer: LayerCache) -> Tensor:
        found = key_differences(layer.k_pool, layer.table, layer.device_lengths, layer.positions.shape[1])
        return _widened(found, layer, self.pooling)


@dataclass(frozen=True)
class Heads(Policy):
    """Streams that copy keep most; in a stream, keys unlike the others. It needs no question.

    An entry's place among its stream's (the best 1, the last near 0) by key difference, which spreads to `pooling`
    neighbours, times how much the stream copies to the power of `heads`. The streams share one budget. Xiao et al. 2024
    (DuoAttention), arXiv 2410.10819; keys: Park et al. 2025, arXiv 2504.15364.
    """

    pooling: int = 9
    heads: float = 1.0
    first: ClassVar[int] = 4
    needs_queries: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_width(self.pooling)
        _check_heads(self.heads)

    def score(self, layer: LayerCache) -> Tensor:
        return _weighted(standing(layer, self.pooling), layer, self.heads)


def standing(layer: LayerCache, pooling: int) -> Tensor:
    """[G, L] an entry's place in its stream by key difference, which spreads to `pooling` neighbours: 1 the best."""
    return standings(KeyDiff(pooling).score(layer), layer.device_lengths)


@dataclass(frozen=True)
class Leverage(Policy):
    """Keys that others do not span stay: the leverage of each row of K. Chari et al. 2025, arXiv 2507.08143."""

    pooling: int = 1
    values: bool = False
    needs_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_width(self.pooling)

    def score(self, layer: LayerCache) -> Tensor:
        keys = layer.keys  # [G, L, D], 0 past a stream's length
        gram = keys.transpose(1, 2) @ keys
        gram += (
            1e-3 * gram.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(keys.shape[-1], device=keys.device)
        )
        scores = (keys * torch.linalg.solve(gram, keys.transpose(1, 2)).transpose(1, 2)).sum(-1)
        if self.values:
            scores = scores * layer.values.norm(dim=-1)
        return _widened(scores, layer, self.pooling)


def _widened(scores: Tensor, layer: LayerCache, width: int) -> Tensor:
    """[G, L]: of each entry the best of its `width` neighbours in the stream."""
    return scores if width == 1 else pool_peaks(scores, layer.device_lengths, 0, width, False)


@dataclass(frozen=True)
class Streaming(Policy):
    """The first `sinks` tokens and the most recent ones. Xiao et al. 2023, arXiv 2309.17453."""

    sinks: int = 4
    needs_queries: ClassVar[bool] = False

    def score(self, layer: LayerCache) -> Tensor:
        positions = layer.positions.float()
        return torch.where(layer.positions < self.sinks, torch.inf, positions)


@dataclass(frozen=True)
class Random(Policy):
    """The baseline: any entry as good as another; the same ones whenever a request is evicted at the same position."""

    seed: int = 0

    def score(self, layer: LayerCache) -> Tensor:
        position = int(layer.query_positions[-1])
        generator = torch.Generator().manual_seed((self.seed * 1009 + layer.layer) * 1_000_003 + position)
        if layer.ranks is None:
            return torch.rand(layer.positions.shape, generator=generator).to(layer.positions.device)
        drawn = torch.rand((layer.ranks.heads, layer.longest), generator=generator)  # for all heads, on every rank
        return drawn[layer.ranks.own, : layer.positions.shape[1]].to(layer.positions.device)
