"""The policies. Each is a small dataclass whose fields are its settings; `POLICIES` lists them by name.

Scores are comparable within a stream. Those of SnapKV, TOVA and expected attention are comparable across the heads of
a layer too, which is what `Ada` needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache.step import upload
from hybridkv.errors import HybridKVError
from hybridkv.eviction.keep import joined, survivors
from hybridkv.eviction.policy import LayerCache, Policy
from hybridkv.kernels.eviction.score import window_scores
from hybridkv.kernels.eviction.select import pool_heads, rows_at_once


@dataclass(frozen=True)
class SnapKV(Policy):
    """Attention that the last queries pay, summed over the window and over the query heads that share a KV head.

    pooling smooths along the prompt, per query head, over entries older than the window: none | avg | max.
    Li et al. 2024, https://arxiv.org/abs/2404.14469
    """

    pooling: str = "none"
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
class ExpectedAttention(Policy):
    """Attention expected of queries distributed as the captured ones are: exp(mu . k + k . Sigma k / 2), times |v|.

    Mean and covariance are those of the window's queries, per query head. Devoto et al. 2025, arXiv 2510.00636 (there
    the statistics are taken before rotation and averaged over future positions).
    """

    def score(self, layer: LayerCache) -> Tensor:
        W, H, D = layer.queries.shape
        G = len(layer.lengths)
        q = layer.queries.float().view(W, G, H // G, D).permute(1, 2, 0, 3) * layer.scale  # [G, H/G, W, D]
        mean = q.mean(2)  # [G, H/G, D]
        off = q - mean.unsqueeze(2)
        keys = layer.keys.unsqueeze(1)  # [G, 1, L, D]
        spread = (off @ keys.transpose(-1, -2)).square().sum(2) / max(W - 1, 1)  # k . Sigma k, [G, H/G, L]
        logits = (mean.unsqueeze(2) @ keys.transpose(-1, -2)).squeeze(2) + spread / 2
        hidden = (layer.positions < 0).unsqueeze(1)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)  # [G, L]
        return weights * layer.values.norm(dim=-1)


@dataclass(frozen=True)
class Knorm(Policy):
    """Keys of small norm draw attention: minus the norm. Devoto et al. 2024, arXiv 2406.11430."""

    def score(self, layer: LayerCache) -> Tensor:
        return -layer.keys.norm(dim=-1)


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keys unlike the others stay: minus the cosine to the mean key direction. Park et al. 2025, arXiv 2504.15364."""

    def score(self, layer: LayerCache) -> Tensor:
        unit = F.normalize(layer.keys, dim=-1)
        anchor = F.normalize(unit.sum(1, keepdim=True) / layer.device_lengths[:, None, None], dim=-1)
        return -(unit * anchor).sum(-1)


@dataclass(frozen=True)
class Streaming(Policy):
    """The first `sinks` tokens and the most recent ones. Xiao et al. 2023, arXiv 2309.17453."""

    sinks: int = 4

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


@dataclass(frozen=True)
class Spread(Policy):
    """Another policy's scores, with budgets of its own."""

    policy: Policy = field(default_factory=SnapKV)

    @property
    def batchable(self) -> bool:  # type: ignore[override]
        return self.policy.batchable

    def score(self, layer: LayerCache) -> Tensor:
        return self.policy.score(layer)


@dataclass(frozen=True)
class Ada(Spread):
    """Heads of a layer share one budget: the best entries of all of them stay. Feng et al. 2024, arXiv 2407.11550.

    Every head keeps at least `floor` of its even share.
    """

    floor: float = 0.2
    spread: ClassVar[str | None] = "heads"

    def budgets(self, scores: list[Tensor], lengths: np.ndarray, budget: int, recent: int) -> np.ndarray:
        even = self.policy.budgets(scores, lengths, budget, recent)
        fixed = np.minimum(np.minimum(recent, even), lengths)  # recent entries stay in every head
        least = np.minimum(np.maximum(np.maximum(fixed, 1), (even * self.floor).astype(np.int64)), lengths)
        room = np.minimum(even.sum(1), lengths.sum(1)) - least.sum(1)  # what the heads of a layer compete for
        whole: np.ndarray = np.all(lengths <= even, axis=1)  # layers that keep everything
        room = np.where(whole, 0, room)
        L = max(each.shape[1] for each in scores)
        # a block of layers at a time: temporaries do not grow with the number of layers
        step = max(1, rows_at_once(L) // lengths.shape[1])
        won = []
        for first in range(0, len(scores), step):
            some = slice(first, first + step)
            won.append(self._won(scores[some], lengths[some], least[some], room[some], recent, L))
        shares = least + torch.cat(won).cpu().numpy()  # the one wait for the device
        return np.where(whole[:, None], even, shares)

    @staticmethod
    def _won(
        scores: list[Tensor], lengths: np.ndarray, least: np.ndarray, room: np.ndarray, recent: int, L: int
    ) -> Tensor:
        """[layers, G] on the device: entries that each head wins beyond its `least`, of the layer's `room` [layers].

        Rows are padded to L: which of several entries of -inf wins must not depend on how layers are put together.
        """
        layers, G = lengths.shape
        rows = joined([each if each.shape[1] == L else F.pad(each, (0, L - each.shape[1])) for each in scores])
        sure = survivors(rows, lengths.ravel(), least.ravel(), recent).long()
        ends = upload([lengths.ravel()], rows.device)[:, None]
        taken = torch.arange(L, device=rows.device) >= ends
        taken = F.pad(taken, (0, 1)).scatter_(1, sure.where(sure >= 0, L), True)[:, :L]  # -1 goes to an extra column
        contest = rows.masked_fill(taken, -torch.inf).view(layers, -1)
        won = survivors(contest, np.full(layers, G * L), room, 0)  # [layers, largest room]
        heads = torch.where(won >= 0, won // L, -1)[:, None] == torch.arange(G, device=rows.device)[:, None]
        return heads.sum(2)


@dataclass(frozen=True)
class Pyramid(Spread):
    """Early layers keep more, late layers less; the mean is the budget, or less where a layer has fewer entries than
    its share. Cai et al. 2024, arXiv 2406.02069.
    """

    steepness: float = 20.0  # the last layer's share beyond the recent entries is the even one divided by this
    spread: ClassVar[str | None] = "layers"

    def __post_init__(self) -> None:
        if self.policy.spread is not None:
            raise HybridKVError(
                f"Pyramid takes a policy that only scores, not {type(self.policy).__name__}; use Ada(Pyramid())"
            )

    def budgets(self, scores: list[Tensor], lengths: np.ndarray, budget: int, recent: int) -> np.ndarray:
        fixed = min(recent, budget)
        free = budget - fixed
        low = max(free / self.steepness, min(free, 1))  # a stream keeps one entry at the least
        share = np.linspace(2 * free - low, low, len(lengths)) if len(lengths) > 1 else np.array([float(free)])
        return np.broadcast_to((fixed + share).astype(np.int64)[:, None], lengths.shape).copy()


POLICIES: dict[str, type[Policy]] = {
    "snapkv": SnapKV,
    "tova": Tova,
    "expected": ExpectedAttention,
    "knorm": Knorm,
    "keydiff": KeyDiff,
    "streaming": Streaming,
    "random": Random,
}
