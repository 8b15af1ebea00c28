"""What one forward pass may touch. `KVCacheManager.prepare_forward` makes it and has reserved every page in it.

A step's tokens lie one request after the other. The `num_decodes` requests with one new token come first; they run
together in the decode forms of the ops. The others are prompt chunks.

    tokens   [ a | b | c | d d d d d | e e e ]      query_start_loc = [0, 1, 2, 3, 8, 11], num_decodes = 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.step_index import StepIndex


@dataclass(frozen=True)
class StreamView:
    """One StreamSchema's part of a step."""

    table: Tensor  # [slots, streams, N] page ids of every slot, -1 past the end; the manager's own mirror
    lengths: np.ndarray | None  # [B, streams] entries held once the step's are appended; None: a graph's, of any length
    device_lengths: Tensor  # [B, streams] int64, the same where the kernels read it; 0: padding
    entry_index: Tensor | None  # [streams, T] flat place of each new entry; None where an entry is more than one token
    max_entries: int  # entries that the longest stream of the step may hold


@dataclass(frozen=True)
class EntryView:
    """The same for a stream of compressed entries, whose lengths follow from positions."""

    table: Tensor  # [slots, N] page ids of every slot, -1 past the end; the manager's own mirror
    entry_index: Tensor  # [T] flat place of the entry that a token completes; -1: it completes none
    max_entries: int  # entries that the longest request of the step may hold


@dataclass(frozen=True)
class ForwardStep:
    slots: list[int]  # [B] state rows; -1: padding
    num_computed: list[int]  # [B] position of each request's first token
    query_start_loc: list[int]  # [B + 1] where each request's tokens begin
    num_decodes: int  # how many requests have one token; they come first
    packed: Tensor  # all that the step has on the device; what follows are views of it
    index: StepIndex  # of all tokens
    streams: dict[str, StreamView]
    query_rows: Tensor | None = None  # [T] row of a token's query among those of all query_buffers; -1: not kept
    exact: bool = False  # results of a token are the same bits whatever else is in the step
    tail: int | None = None  # the last layer's results are wanted of so many last tokens of each chunk; None: of all

    @property
    def max_entries(self) -> int:
        """Entries that the longest stream may hold."""
        return max((view.max_entries for view in self.streams.values()), default=0)

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """(slot, begin, end) of each prompt chunk."""
        ends = zip(self.slots, self.query_start_loc, self.query_start_loc[1:], strict=False)
        return [(slot, a, b) for slot, a, b in ends if a >= self.num_decodes]


@dataclass(frozen=True, kw_only=True)
class CompressedStep(ForwardStep):
    """A step of layers with compressed attention, which compute token by token."""

    chunk_index: StepIndex  # of the prompt chunks alone
    entries: dict[str, EntryView]  # of each stream


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Arrays of int64, one after the other, to the device in one copy that nobody waits for."""
    joined = torch.from_numpy(np.concatenate(arrays))
    return joined.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else joined


@dataclass(frozen=True)
class StreamPlan:
    """Where a stream's entries of a step go, on the host."""

    name: str
    table: Tensor  # [slots, streams, N]
    lengths: np.ndarray  # [B, streams]
    entry_index: np.ndarray | None  # [streams, T]
    page: int | None = None  # entries of a page: the device finds the places of a prompt's many entries


@dataclass(frozen=True)
class EntryPlan:
    """The same for a compressed stream."""

    name: str
    table: Tensor  # [slots, N]
    entry_index: np.ndarray  # [T]
    max_entries: int


@dataclass(frozen=True)
class Tokens:
    """Which tokens a step has, on the host. Requests with one token come first."""

    slots: np.ndarray  # [B]; -1: padding
    num_computed: np.ndarray  # [B]
    counts: np.ndarray  # [B]
    num_decodes: int

    @staticmethod
    def padding(rows: int) -> Tokens:
        return Tokens(np.full(rows, -1), np.zeros(rows, np.int64), np.ones(rows, np.int64), rows)

    def padded(self, rows: int) -> Tokens:
        """One-token requests, brought to so many rows."""
        spare = self.padding(rows - len(self.slots))
        slots, begins, counts = (np.concatenate(pair) for pair in zip(self.arrays, spare.arrays, strict=True))
        return Tokens(slots, begins, counts, rows)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.slots, self.num_computed, self.counts

    @property
    def chunks(self) -> tuple[np.ndarray, ...]:
        """The arrays of the prompt chunks alone."""
        return tuple(x[self.num_decodes :] for x in self.arrays)

    @property
    def query_start_loc(self) -> list[int]:
        return [0, *np.cumsum(self.counts).tolist()]

    def token_to_req(self) -> tuple[np.ndarray, np.ndarray]:
        """[T] request of each token, and its number among that request's tokens."""
        owner = np.repeat(np.arange(len(self.slots)), self.counts)
        return owner, np.arange(len(owner)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)

    def query_rows(self, window: int, query_buffers: np.ndarray) -> np.ndarray:
        """[T] ring * window + position mod window for the last `window` tokens of each request, -1 for the others.

        `query_buffers`: of each slot; -1: it has none.
        """
        owner, inside = self.token_to_req()
        ring = np.where(self.slots >= 0, query_buffers[self.slots], -1)[owner]
        last = (inside >= self.counts[owner] - window) & (ring >= 0)
        return np.where(last, ring * window + (self.num_computed[owner] + inside) % window, -1)


def dense_step(
    tokens: Tokens,
    plans: Sequence[StreamPlan],
    query_rows: np.ndarray | None,  # [T] where queries are kept
    device: torch.device,
    exact: bool,
    reach: int | None = None,  # made to be captured, for so many entries a stream: lengths are on the device alone
) -> ForwardStep:
    """All that the layers read is on its way to the device, in one copy, when this returns."""
    arrays = [*StepIndex.host(*tokens.arrays)]
    arrays += [query_rows] if query_rows is not None else []
    for plan in plans:
        arrays += [plan.lengths] + ([plan.entry_index] if plan.entry_index is not None else [])
    packed = upload([x.ravel() for x in arrays], device)
    parts = iter([part.view(x.shape) for part, x in zip(packed.split([x.size for x in arrays]), arrays, strict=True)])
    index = StepIndex(*(next(parts) for _ in range(5)))
    kept = next(parts) if query_rows is not None else None
    views = {}
    for plan in plans:
        device_lengths, entry_index = next(parts), next(parts) if plan.entry_index is not None else None
        if plan.page is not None:
            entry_index = find_places(plan.table, index, device_lengths, plan.page)
        lengths, most = (plan.lengths, int(plan.lengths.max(initial=0))) if reach is None else (None, reach)
        views[plan.name] = StreamView(plan.table, lengths, device_lengths, entry_index, most)
    slots, begins = tokens.slots.tolist(), tokens.num_computed.tolist()
    return ForwardStep(slots, begins, tokens.query_start_loc, tokens.num_decodes, packed, index, views, kept, exact)


def find_places(table: Tensor, index: StepIndex, lengths: Tensor, page: int) -> Tensor:
    """[streams, T] flat place of each new entry, of streams that hold lengths [B, streams] with them; -1: padding."""
    owner, slots = index.token_to_req, index.token_slots
    before_end = index.query_start_loc[1:][owner] - torch.arange(len(owner), device=owner.device)
    entry = lengths.t()[:, owner] - before_end  # [streams, T]
    streams = torch.arange(len(entry), device=owner.device)[:, None]
    places = table[slots, streams, entry // page].to(torch.int64) * page + entry % page
    return torch.where(slots >= 0, places, -1)


def compressed_step(tokens: Tokens, entries: Sequence[EntryPlan], device: torch.device) -> CompressedStep:
    arrays = [*StepIndex.host(*tokens.arrays), *StepIndex.host(*tokens.chunks), *(e.entry_index for e in entries)]
    packed = upload(arrays, device)
    parts = packed.split([len(x) for x in arrays])
    views = {e.name: EntryView(e.table, part, e.max_entries) for e, part in zip(entries, parts[10:], strict=True)}
    return CompressedStep(
        tokens.slots.tolist(), tokens.num_computed.tolist(), tokens.query_start_loc, tokens.num_decodes,
        packed, StepIndex(*parts[:5]), {}, chunk_index=StepIndex(*parts[5:10]), entries=views,
    )  # fmt: skip
