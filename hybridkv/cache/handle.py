"""LayerHandle: a layer's view of the cache in one step.

It shows where the layer's pages and state rows are and writes this step's entries. It allocates no pages, decides
nothing and computes no attention: that is the mixers' part (models/).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from hybridkv.cache.step import ForwardStep, StreamView
from hybridkv.kernels.attention.append import append
from hybridkv.kernels.formats.kv_format import Pages, pages_of


class Observer(Protocol):
    """Looks on while a step runs: attention layers show it their queries once these have attended."""

    @property
    def lse_rows(self) -> tuple[Tensor, Tensor] | None:
        """([n, H], [T]): where the log-sum-exp of each token's attention goes, and in which row; None: nowhere."""
        ...

    def __call__(self, handle: LayerHandle, queries: Tensor) -> None:
        """queries [T, H, D] of the step, after norm and rotation, in the layer of the handle."""
        ...


class LayerHandle:
    """B requests, T tokens; G KV heads, each with a stream of its own. A layer without pages has only state."""

    observer: Observer | None = None  # who looks on; steps of requests have none

    def __init__(
        self,
        step: ForwardStep,
        view: StreamView | None,  # None: the layer has no pages
        rows: slice,  # the layer's streams in the view
        paged: Mapping[str, Tensor],  # [N, P, ...]
        state: Mapping[str, Tensor],  # [slots, ...], lent ones [query buffers, ...]
    ) -> None:
        self.step = step
        self.view = view
        self.rows = rows
        self.paged = paged
        self.state = state

    @property
    def slots(self) -> Tensor:
        """[B] state and table row of each request; -1: padding."""
        return self.step.index.slots

    # ---- pages

    def pages(self, name: str) -> Pages:
        """The layer's pool of keys ("k") or values ("v")."""
        return pages_of(self.paged, name)

    @property
    def stream(self) -> StreamView:
        """The streams of all layers of this kind."""
        if self.view is None:
            raise ValueError("a layer without pages has no streams")
        return self.view

    @cached_property
    def table(self) -> Tensor:
        """[slots, G, N] page ids of every slot, -1 past the end."""
        return self.stream.table[:, self.rows]

    @cached_property
    def lengths(self) -> np.ndarray | None:
        """[B, G] entries held once this step's are stored; None in a graph, which serves any."""
        lengths = self.stream.lengths
        return None if lengths is None else lengths[:, self.rows]

    @cached_property
    def device_lengths(self) -> Tensor:
        """[B, G] the same on the device; 0: padding."""
        return self.stream.device_lengths[:, self.rows]

    @property
    def max_entries(self) -> int:
        """Entries that the longest stream of the step may hold."""
        return self.stream.max_entries

    @property
    def places(self) -> Tensor:
        """[G, T] flat place of each new entry in the pages."""
        return self.stream.entry_index[self.rows]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store this step's keys and values [T, G, D]."""
        append(self.pages("k"), self.pages("v"), k, v, self.places)

    # ---- last queries, kept for eviction

    @property
    def query_buffer(self) -> Tensor | None:
        """[buffers, W, H, D] the last W queries of requests that have a buffer; None: the layer keeps none."""
        return self.state.get("queries")

    @property
    def query_rows(self) -> Tensor | None:
        """[T] row of each token's query in the buffers, viewed as [buffers * W, H, D]; -1: not kept."""
        return self.step.query_rows if "queries" in self.state else None

    @property
    def lse_rows(self) -> tuple[Tensor, Tensor] | None:
        """([buffers * W, H], [T]): where the log-sum-exp of each token's attention is kept, and in which row."""
        if self.observer is not None:
            return self.observer.lse_rows
        lse = self.state.get("lse")
        if lse is None or self.step.query_rows is None:
            return None
        return lse.view(-1, lse.shape[-1]), self.step.query_rows

    @property
    def lse_window(self) -> int:
        """Last tokens of a request whose log-sum-exp is kept, so that none may be left out; 0: nobody asks for them."""
        kept = self.observer is None and self.lse_rows is not None
        return self.state["lse"].shape[1] if kept else 0

    def observe(self, q: Tensor) -> None:
        """Show the queries [T, H, D] to whoever looks on."""
        if self.observer is not None:
            self.observer(self, q)

    def capture(self, q: Tensor) -> None:
        """Keep the last W queries [T, H, D] of each request that has a buffer. Position p has row p mod W, however a
        prompt is divided into chunks.
        """
        buffer, rows = self.query_buffer, self.query_rows
        if buffer is not None and rows is not None:
            kept = rows >= 0
            buffer.view(-1, *q.shape[1:])[rows[kept]] = q[kept].to(buffer.dtype)
