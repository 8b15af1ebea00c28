"""How a budget is spread over streams: policies that take another policy's scores and share the budget by them.

    even      every stream keeps the budget (any policy by itself)
    Ada       the heads of a layer share one budget
    All       all heads of all layers share one
    Pyramid   early layers keep more than late ones, whatever the scores

Sharing compares scores of different streams: it needs a policy whose scores mean the same in each (attention weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from hybridkv.errors import HybridKVError
from hybridkv.eviction.keep import share
from hybridkv.eviction.policies import Peak
from hybridkv.eviction.policy import LayerCache, Policy


@dataclass(frozen=True)
class Spread(Policy):
    """Another policy's scores, with budgets of its own."""

    policy: Policy = field(default_factory=Peak)

    @property
    def batchable(self) -> bool:  # type: ignore[override]
        return self.policy.batchable

    @property
    def first(self) -> int:  # type: ignore[override]
        return self.policy.first

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self.policy.needs_weights

    @property
    def needs_queries(self) -> bool:  # type: ignore[override]
        return self.policy.needs_queries

    @property
    def needs_replay(self) -> bool:  # type: ignore[override]
        return self.policy.needs_replay

    def score(self, layer: LayerCache) -> Tensor:
        return self.policy.score(layer)

    def scores(self, layers: Sequence[LayerCache]) -> list[Tensor]:
        return self.policy.scores(layers)


@dataclass(frozen=True)
class Ada(Spread):
    """Heads of a layer share one budget: the best entries of all of them stay. Feng et al. 2024, arXiv 2407.11550.

    Every head keeps at least `floor` of its even share.
    """

    floor: float = 0.2
    layers: float = 1.0  # the part of a budget that stays in its layer
    spread: ClassVar[str | None] = "heads"

    def __post_init__(self) -> None:
        for name in ("floor", "layers"):
            if not 0 <= getattr(self, name) <= 1:
                raise HybridKVError(f"{name} must be a part of the even share, from 0 to 1, not {getattr(self, name)}")

    def budgets(self, scores: list[Tensor], lengths: np.ndarray, budget: int, recent: int) -> np.ndarray:
        _, counts = share(scores, lengths, self.even(scores, lengths, budget, recent), recent, self.floor, self.layers)
        return counts.cpu().numpy().reshape(lengths.shape)

    def even(self, scores: list[Tensor], lengths: np.ndarray, budget: int, recent: int) -> np.ndarray:
        """[layers, G] what each stream would keep if nothing were shared."""
        return self.policy.budgets(scores, lengths, budget, recent)


@dataclass(frozen=True)
class All(Ada):
    """All heads of all layers share one budget: `layers` of it within a layer, the rest with all. Feng et al. 2025
    (Layer-DefensiveKV), arXiv 2510.13334.

    Every head keeps at least `floor` of its even share.
    """

    layers: float = 0.0


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
        if not self.steepness >= 1:
            raise HybridKVError(f"steepness must be 1 (even) or more, not {self.steepness}")

    def budgets(self, scores: list[Tensor], lengths: np.ndarray, budget: int, recent: int) -> np.ndarray:
        fixed = min(recent, budget)
        free = budget - fixed
        low = max(free / self.steepness, min(free, 1))  # a stream keeps one entry at the least
        share_of = np.linspace(2 * free - low, low, len(lengths)) if len(lengths) > 1 else np.array([float(free)])
        return np.broadcast_to((fixed + share_of).astype(np.int64)[:, None], lengths.shape).copy()
