"""Reading back what a compressed layer has stored: methods of CompressedHandle.

The model does not need them; their names come from a specification, and tools and tests use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.v4.gather import flat_entries, gather_entries

if TYPE_CHECKING:
    from hybridkv.cache.compressed_handle import CompressedHandle


@dataclass(frozen=True)
class SWAView:
    """The window of every slot: position u lies in row u mod ring."""

    ring: Tensor  # [slots, ring, width]
    format: PageFormat
    window: int
    slots: Tensor  # [B] of the step's requests
    seen: Tensor  # [B] tokens of each once the step has run

    @property
    def positions(self) -> Tensor:
        """[B, ring] position in each row; -1: none yet, or past the window."""
        R = self.ring.shape[1]
        rows = torch.arange(R, device=self.ring.device)
        last = self.seen[:, None] - 1
        found = last - (last - rows) % R
        return torch.where((found > last - self.window) & (found >= 0) & (self.slots[:, None] >= 0), found, -1)


@dataclass(frozen=True)
class PagedView:
    """Entries, or index keys, of every slot."""

    pages: Tensor  # [N, P, width]
    format: PageFormat
    table: Tensor  # [slots, pages of a request] int32, -1 past the end
    slots: Tensor  # [B] of the step's requests
    lengths: Tensor  # [B] entries of each once the step has run


def read_swa_view(handle: CompressedHandle) -> SWAView:
    """The layer's ring of recent tokens."""
    schema = handle.schema
    return SWAView(handle.state["window"], schema.entries, schema.window, handle.index.slots, handle.seen())


def read_classical_view(handle: CompressedHandle) -> PagedView:
    """The layer's compressed entries, in their pages."""
    return _paged_view(handle, "entries")


def read_indexer_view(handle: CompressedHandle) -> PagedView:
    """The layer's index keys, in their pages."""
    return _paged_view(handle, "index")


def gather_swa_kv(handle: CompressedHandle, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The window of each request [B, window, head_dim] in order of time; rows before the first token are zeros."""
    ring, slots = handle.state["window"], handle.index.slots
    R = ring.shape[1]
    back = torch.arange(-handle.schema.window, 0, device=slots.device)
    at = handle.seen()[:, None] + back
    there = (at >= 0) & (slots[:, None] >= 0)
    flat = torch.where(there, slots[:, None] * R + at % R, -1)
    return gather_entries(ring, handle.schema.entries, flat, dtype)


def gather_compressed_kv(handle: CompressedHandle, chosen: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Entries chosen [T, K] of each token's request -> [T, K, head_dim]; what does not exist is zeros."""
    table, (pages, fmt) = handle.table, handle.pages("entries")
    lengths = (handle.seen() // handle.schema.ratio)[handle.index.token_to_req]
    chosen = torch.where(chosen < lengths[:, None], chosen.long(), -1)
    flat = flat_entries(table, handle.index.token_slots[:, None], chosen, pages.shape[1])
    return gather_entries(pages, fmt, flat, dtype)


def gather_all_compressed_kv(handle: CompressedHandle, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """All entries of each request [B, longest, head_dim]; rows past a request's end are zeros."""
    table, (pages, fmt) = handle.table, handle.pages("entries")
    entry = torch.arange(handle.stream.max_entries, device=pages.device)
    lengths = handle.seen() // handle.schema.ratio
    entry = torch.where(entry < lengths[:, None], entry, -1)
    flat = flat_entries(table, handle.index.slots[:, None], entry, pages.shape[1])
    return gather_entries(pages, fmt, flat, dtype)


def _paged_view(handle: CompressedHandle, name: str) -> PagedView:
    table, (pages, fmt) = handle.table, handle.pages(name)
    return PagedView(pages, fmt, table, handle.index.slots, handle.seen() // handle.schema.ratio)
