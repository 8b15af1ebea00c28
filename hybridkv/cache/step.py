"""ForwardStep: all that one forward pass may touch. `KVCacheManager.prepare_forward` makes it and reserves its pages.

A step's tokens lie one request after the other. The `num_decodes` requests with one new token come first; they run
together in the decode forms of the ops. The others are prompt chunks.

    tokens   [ a | b | c | d d d d d | e e e ]      query_start_loc = [0, 1, 2, 3, 8, 11], num_decodes = 3

Everything that the layers read is one array of whole numbers (`packed`), sent in one copy; the tensors here are views
of it. A CUDA graph holds the addresses of such an array, and a replay copies the next step's over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.even_pages import EvenPages
from hybridkv.kernels.step_index import HostIndex, StepIndex, StepShape

T = TypeVar("T")


@dataclass(frozen=True)
class StreamView:
    """One StreamSchema's part of a step."""

    table: Tensor  # [slots, streams, N] page ids of every slot, -1 past the end; the page table on the device itself
    lengths: np.ndarray | None  # [B, streams] entries held once the step's are appended; None: a graph's, of any length
    device_lengths: Tensor  # [B, streams] int64, the same where the kernels read it; 0: padding
    places: Tensor | None  # entry_index, if the host has found it
    max_entries: int  # of the longest stream of the step
    index: StepIndex | None = None  # of the step, and
    entries_per_page: int = 0  # if the device is to find it
    fresh: Tensor | None = None  # [B] int64: tokens before these are stored already; None: none is

    @cached_property
    def entry_index(self) -> Tensor:
        """[streams, T] flat place of the entry that a token completes; -1: none, or padding."""
        if self.places is not None:
            return self.places
        assert self.index is not None
        return find_places(self.table, self.index, self.device_lengths, self.entries_per_page, self.fresh)

    # what a CPU finds once for all layers of a step; on a GPU each would wait for the device

    @cached_property
    def stores_all(self) -> bool:
        """Whether every token of the step is stored, in every stream."""
        return bool((self.entry_index >= 0).all())

    @cached_property
    def even_pages(self) -> EvenPages | None:
        """The pages of a step's one request, if all of its streams hold `max_entries`; else None."""
        if self.index is None or self.lengths is None or len(self.lengths) != 1:
            return None
        slot = int(self.index.slots[0])
        if slot < 0 or not self.max_entries or (self.lengths != self.max_entries).any():
            return None
        n = -(-self.max_entries // self.entries_per_page)
        return EvenPages.of(self.table[slot, :, :n].numpy(), self.max_entries)


@dataclass(frozen=True)
class ForwardStep:
    """What one forward pass may touch: its requests, and where their entries and state are."""

    host: HostIndex
    index: StepIndex  # the same on the device
    streams: dict[str, StreamView]
    packed: Tensor  # the one array that the tensors here are views of
    chunk_index: StepIndex | None = None  # of the prompt chunks alone, for models with compressed layers
    query_rows: Tensor | None = None  # [T] row of a token's query among those of all query buffers; -1: not kept
    exact: bool = False  # results of a token are the same bits whatever else is in the step
    tail: int | None = None  # trailing tokens of each chunk whose last-layer output is needed; None: all
    shape: StepShape | None = None  # of the graph that it is replayed in; None: it has just the rows that it needs
    any_length: bool = False  # a graph's, which serves requests of any length: those on the host are not theirs
    found: dict[str, Any] = field(default_factory=dict)  # on the device, once for all layers

    @cached_property
    def slots(self) -> list[int]:
        """[B] state rows; -1: padding."""
        return self.host.slots.tolist()

    @cached_property
    def num_computed(self) -> list[int]:
        """[B] tokens that each request had seen before: the position of its first new token."""
        return self.host.num_computed.tolist()

    @cached_property
    def query_start_loc(self) -> list[int]:
        """[B + 1] where each request's tokens begin."""
        return self.host.query_start_loc.tolist()

    @property
    def num_decodes(self) -> int:
        """Rows for requests with one new token; they come first."""
        return self.host.num_decodes

    @property
    def rows(self) -> int:
        """Requests, padding included."""
        return len(self.host.slots)

    def once(self, name: str, make: Callable[[ForwardStep], T]) -> T:
        """What `make` gives, made when it is first asked for: the same for all layers of the step."""
        if name not in self.found:
            self.found[name] = make(self)
        return self.found[name]

    def again(self) -> ForwardStep:
        """The same step, of which nothing has been found on the device yet."""
        return replace(self, streams={name: replace(view) for name, view in self.streams.items()}, found={})

    @property
    def max_entries(self) -> int:
        """Entries of the longest stream."""
        return max((view.max_entries for view in self.streams.values()), default=0)

    @cached_property
    def chunks(self) -> list[tuple[int, int, int]]:
        """(slot, begin, end) of each prompt chunk, in tokens of the step; slot -1: padding."""
        starts, n = self.query_start_loc, self.num_decodes
        return list(zip(self.slots[n:], starts[n:-1], starts[n + 1 :], strict=True))


@dataclass(frozen=True)
class StreamPlan:
    """Where a stream's entries of a step go, on the host."""

    name: str
    table: Tensor  # [slots, streams, N] on the device
    entries_per_page: int
    lengths: np.ndarray  # [B, streams]
    entry_index: np.ndarray | None  # [streams, T]; None: the device finds the places, a prompt has too many
    max_entries: int


_GAP = np.zeros(1, np.int64)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Arrays of int64, one after the other, to the device in one copy that nothing waits for."""
    joined = torch.from_numpy(np.concatenate(arrays))
    return joined.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else joined


def build_step(
    host: HostIndex,
    plans: Sequence[StreamPlan],
    query_rows: np.ndarray | None,  # [T]
    with_chunk_index: bool,
    device: torch.device,
    exact: bool = False,
    any_length: bool = False,  # made to be captured: lengths are on the device alone
    shape: StepShape | None = None,
    fresh: np.ndarray | None = None,  # [B]: where requests may begin with shared pages, as in StreamView
) -> ForwardStep:
    """Send all that the layers read; it is on its way to the device when this returns."""
    arrays = [*host.arrays]
    if with_chunk_index:
        arrays += host.chunks.arrays
    if query_rows is not None:
        arrays.append(query_rows)
    if fresh is not None:
        arrays.append(fresh)
    for plan in plans:
        arrays.append(plan.lengths)
        if plan.entry_index is not None:
            arrays.append(plan.entry_index)
    # each begins at 16 bytes: kernels are compiled for addresses that do, and would be again for those that do not
    packed = upload([part for x in arrays for part in (x.ravel(), _GAP[: x.size % 2])], device)
    pieces = packed.split([x.size + x.size % 2 for x in arrays])
    parts = iter([piece[: x.size].view(x.shape) for piece, x in zip(pieces, arrays, strict=True)])
    index = _next_index(parts)
    chunk_index = _next_index(parts) if with_chunk_index else None
    rows = next(parts) if query_rows is not None else None
    shared = next(parts) if fresh is not None else None
    views = {}
    for plan in plans:
        device_lengths = next(parts)
        places = next(parts) if plan.entry_index is not None else None
        lengths = None if any_length else plan.lengths
        views[plan.name] = StreamView(
            plan.table, lengths, device_lengths, places, plan.max_entries, index, plan.entries_per_page, shared
        )
    return ForwardStep(host, index, views, packed, chunk_index, rows, exact, shape=shape, any_length=any_length)


def _next_index(parts: Iterator[Tensor]) -> StepIndex:
    return StepIndex(*(next(parts) for _ in range(5)))


def find_places(table: Tensor, index: StepIndex, lengths: Tensor, page: int, fresh: Tensor | None = None) -> Tensor:
    """[streams, T] flat place of each new entry where every token is one; -1: padding, or stored already.

    lengths [B, streams]: entries of the streams, the new ones included. fresh [B]: as in StreamView.
    """
    request, slots = index.token_to_req, index.token_slots
    to_end = index.query_start_loc[1:][request] - torch.arange(len(request), device=request.device)
    entry = (lengths.t()[:, request] - to_end).clamp(min=0)  # [streams, T]; a prompt of padding has none
    streams = torch.arange(len(entry), device=request.device)[:, None]
    places = table[slots, streams, entry // page].to(torch.int64) * page + entry % page
    stored = slots >= 0 if fresh is None else (slots >= 0) & (index.positions >= fresh[request])
    return torch.where(stored, places, -1)
