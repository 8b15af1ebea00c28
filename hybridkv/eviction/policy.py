"""Policy: says how much each entry of a layer matters. Which survive is decided in `keep.py`, for all policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from torch import Tensor

from hybridkv.eviction.over_ranks import OverRanks
from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.formats.kv_format import Pages


@dataclass(frozen=True)
class LayerCache:
    """What a policy may look at: one attention layer of one request."""

    layer: int  # counted among the attention layers
    layers: int
    queries: Tensor  # [W, H, D] the last queries, after norm and rotation; W is 0 where the policy needs none
    query_positions: Tensor  # [W] ascending
    positions: Tensor  # [G, L] absolute position of each entry; -1 past a stream's length
    lengths: np.ndarray  # [G]
    k_pool: Pages  # [N, P, D]
    v_pool: Pages
    table: Tensor  # [G, N]
    scale: float
    tokens: int  # of the request: every position is less
    lse: Tensor | None = None  # [W, H] f32, where known: log of the sum of exp(q . k * scale) that each query saw
    weights: Tensor | None = None  # [G] f32 up to 1, where the policy needs them: how much each stream copies
    ends: Tensor | None = None  # [G] int64, where they are there already: the lengths on the device
    ranks: OverRanks | None = None  # these are the streams of one rank, and `score` may ask the others
    longest: int = 0  # over ranks: entries of the layer's longest stream on any of them

    @cached_property
    def device_lengths(self) -> Tensor:
        """[G] int64, where the kernels read them."""
        return (self.positions >= 0).sum(1) if self.ends is None else self.ends

    @cached_property
    def keys(self) -> Tensor:
        """[G, L, D] f32, 0 past a stream's length."""
        return self._read(self.k_pool)

    @cached_property
    def values(self) -> Tensor:
        """[G, L, D] f32, 0 past a stream's length."""
        return self._read(self.v_pool)

    def _read(self, pool: Pages) -> Tensor:
        entries = read_pages(pool, self.table, 0, self.positions.shape[1]).float()
        return entries.masked_fill(self.positions.unsqueeze(-1) < 0, 0)


class Policy:
    """Scores entries; may also spread the budget unevenly over heads and layers."""

    # whether `score` looks at each stream by itself, or `scores` at all of them: either may then get several layers as
    # one, streams after streams
    batchable: ClassVar[bool] = False
    # between what `budgets` shares unevenly: the heads of a layer ("heads"), layers only ("layers"); None: it is even
    spread: ClassVar[str | None] = None
    # entries at the beginning that stay whatever their score, unless `EvictionConfig.first` says otherwise
    first: ClassVar[int] = 0
    # whether `score` looks at `LayerCache.weights`, which are measured once for a model
    needs_weights: ClassVar[bool] = False
    # whether `score` looks at the last queries; without them a cache is scored that has no query buffer
    needs_queries: ClassVar[bool] = True
    # whether scores come from reading the text once more (replay.py) instead of from `score`
    needs_replay: ClassVar[bool] = False

    def __init_subclass__(cls, **more: object) -> None:
        """A subclass that brings its own `score` or `budgets` and says nothing else gets the careful answer."""
        super().__init_subclass__(**more)
        if "together" in cls.__dict__:  # the name before 0.2
            cls.batchable = cls.__dict__["together"]
        elif "score" in cls.__dict__ and "batchable" not in cls.__dict__:
            cls.batchable = False
        if "score" in cls.__dict__ and "needs_queries" not in cls.__dict__:
            cls.needs_queries = True
        # a `score` of one's own is not passed over by the `scores` of a parent
        from_class = {name: next(c for c in cls.__mro__ if name in c.__dict__) for name in ("score", "scores")}
        if cls.__mro__.index(from_class["score"]) < cls.__mro__.index(from_class["scores"]):
            cls.scores = Policy.scores  # type: ignore[method-assign]
        if "budgets" in cls.__dict__ and "spread" not in cls.__dict__:
            cls.spread = "heads"

    def score(self, layer: LayerCache) -> Tensor:
        """[G, L] f32: the higher, the more the entry matters. Scores past a stream's length are ignored."""
        raise TypeError(f"{type(self).__name__} does not define score(layer)")

    def scores(self, layers: Sequence[LayerCache]) -> list[Tensor]:
        """`score` of each. A policy whose scores of a layer depend on other layers says it here, for all of them."""
        return [self.score(layer) for layer in layers]

    def budgets(self, scores: list[Tensor], lengths: np.ndarray, budget: int, recent: int) -> np.ndarray:
        """[layers, G] entries each stream keeps, for lengths [layers, G]; on average no more than `budget`.

        recent: entries that stay in every stream, the first ones and the last ones together.
        """
        return np.full(lengths.shape, budget, np.int64)
