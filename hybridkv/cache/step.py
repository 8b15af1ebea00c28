"""What one forward pass may touch. `KVCacheManager.prepare_forward` makes it and has reserved every page in it.

A step's tokens lie one request after the other. Requests with one new token come first (`singles`); they run together
in the decode forms of the ops. The others are prompt chunks.

    tokens   [ a | b | c | d d d d d | e e e ]      starts = [0, 1, 2, 3, 8, 11], singles = 3
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

    table: Tensor  # [B, streams, N] page ids, -1 past the end
    lengths: np.ndarray  # [B, streams] entries held once this step's are appended, on the host
    device_lengths: Tensor  # [B, streams] int64, the same where the kernels read it
    entry_index: Tensor | None  # [streams, T] flat place of each new entry; None where an entry is more than one token


@dataclass(frozen=True)
class EntryView:
    """The same for a stream of compressed entries, whose lengths follow from positions."""

    table: Tensor  # [slots, N] page ids of every slot, -1 past the end; the manager's own mirror
    entry_index: Tensor  # [T] flat place of the entry that a token completes; -1: it completes none
    most: int  # entries that the longest request of the step may hold


@dataclass(frozen=True)
class ForwardStep:
    slots: list[int]  # [B] state rows
    begins: list[int]  # [B] position of each request's first token
    starts: list[int]  # [B + 1] where each request's tokens begin
    singles: int  # how many requests have one token; they come first
    streams: dict[str, StreamView]
    exact: bool = False  # results of a token are the same bits whatever else is in the step

    def single_rows(self, state: Tensor) -> Tensor:
        """State [slots, ...] -> rows of the one-token requests; a view where the slots are consecutive, else a copy."""
        rows = self.slots[: self.singles]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return state[rows[0] : rows[0] + len(rows)]
        return state[rows]

    def store_single_rows(self, state: Tensor, rows: Tensor) -> None:
        """Bring a copy that `single_rows` made back; nothing to do for a view."""
        if rows.untyped_storage().data_ptr() != state.untyped_storage().data_ptr():
            state[self.slots[: self.singles]] = rows


@dataclass(frozen=True, kw_only=True)
class CompressedStep(ForwardStep):
    """A step of layers with compressed attention, which compute token by token."""

    packed: Tensor  # what all below are views of
    index: StepIndex  # of all tokens
    chunks: StepIndex  # of the prompt chunks alone
    entries: dict[str, EntryView]  # of each stream


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Arrays of int64, one after the other, to the device in one copy that nobody waits for."""
    joined = torch.from_numpy(np.concatenate(arrays))
    return joined.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else joined


@dataclass(frozen=True)
class EntryPlan:
    """Where a compressed stream's entries of a step go, on the host."""

    name: str
    table: Tensor  # [slots, N]
    entry_index: np.ndarray  # [T]
    most: int


def compressed_step(
    slots: np.ndarray,  # [B]; -1: padding
    begins: np.ndarray,
    counts: np.ndarray,
    singles: int,
    entries: Sequence[EntryPlan],
    device: torch.device,
) -> CompressedStep:
    arrays = [*StepIndex.host(slots, begins, counts)]
    arrays += StepIndex.host(slots[singles:], begins[singles:], counts[singles:])
    arrays += [e.entry_index for e in entries]
    packed = upload(arrays, device)
    parts = packed.split([len(x) for x in arrays])
    views = {e.name: EntryView(e.table, part, e.most) for e, part in zip(entries, parts[10:], strict=True)}
    index, chunks = StepIndex(*parts[:5]), StepIndex(*parts[5:10])
    starts = [0, *np.cumsum(counts).tolist()]
    return CompressedStep(
        slots.tolist(), begins.tolist(), starts, singles, {}, packed=packed, index=index, chunks=chunks, entries=views
    )
