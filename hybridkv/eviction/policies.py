"""The policies that score. Each is a small dataclass whose fields are its settings; named.py lists them by name.

Scores are comparable within a stream. Those of Peak, SnapKV and TOVA are comparable across streams too, which is what
sharing a budget needs (spread.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.errors import HybridKVError
from hybridkv.eviction.policy import LayerCache, Policy
from hybridkv.kernels.eviction.peak import peak_scores
from hybridkv.kernels.eviction.peak_pool import pool_peaks
from hybridkv.kernels.eviction.score import window_scores
from hybridkv.kernels.eviction.select import pool_heads
from hybridkv.kernels.eviction.value_norms import value_norms


@dataclass(frozen=True)
class Peak(Policy):
    """The strongest attention that any of the last queries pays, of any query head that shares the KV head.

    A needle is looked at by few queries, and a sum over the window drowns them: the largest weight counts. It spreads
    to `pooling` neighbours, `ahead` of them after it (None: half): a number or a name is several tokens, read one after
    the other, and the queries look at the first. With `values` scores are floored at their stream's mean and weighted
    by the norm of the value.
    Feng et al. 2025 (DefensiveKV), arXiv 2510.13334; values: Feng et al. 2025 (CriticalKV), arXiv 2502.03805.
    """

    pooling: int = 15
    ahead: int = -1
    values: bool = False
    batchable: ClassVar[bool] = True
    first: ClassVar[int] = 4

    def __post_init__(self) -> None:
        _check_width(self.pooling)

    def score(self, layer: LayerCache) -> Tensor:
        scores = peak_scores(
            layer.queries, layer.query_positions, layer.k_pool, layer.table, layer.positions, layer.scale, layer.lse
        )
        shift = self.ahead - self.pooling // 2 if self.ahead >= 0 else 0
        if shift > 0:
            old = torch.arange(scores.shape[1], device=scores.device) < (layer.device_lengths - len(layer.queries))[:, None]
            scores = torch.where(old, F.pad(scores, (shift, 0))[:, : scores.shape[1]], scores)
        norms = None
        if self.values:
            norms = value_norms(layer.v_pool, layer.table, layer.device_lengths, scores.shape[1])
        return pool_peaks(scores, layer.device_lengths, len(layer.queries), self.pooling, self.values, norms)


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
        return scores.mean(0, keepdim=True).expand(len(layer.lengths), -1)


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
        unit = F.normalize(layer.keys, dim=-1)
        anchor = F.normalize(unit.sum(1, keepdim=True) / layer.device_lengths[:, None, None], dim=-1)
        return _widened(-(unit * anchor).sum(-1), layer, self.pooling)


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
    if width == 1:
        return scores
    alone = scores.masked_fill(layer.positions < 0, -torch.inf)
    return F.max_pool1d(alone[:, None], width, 1, width // 2)[:, 0]


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
        return torch.rand(layer.positions.shape, generator=generator).to(layer.positions.device)
