"""CompressedHandle: a layer's window, entries and compressor state in one step.

The order inside a layer is fixed: a token's row enters the window, its content the compressors, entries that are full
are written, and only then is anything read. So a token sees itself, and the entry that it completes.

    write_swa -> maybe_flush_csa / maybe_flush_hca -> select -> attend

The same calls are made whatever the positions are; which of them write is decided on the device. One captured graph
therefore serves every position.

A prompt chunk would overwrite window rows that its own first tokens still need. Its window is read from a workspace:
the rows before the chunk and the chunk's own, in a ring that holds them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.handle import LayerHandle
from hybridkv.cache.schema import CompressedLayer
from hybridkv.cache.step import ForwardStep, StreamView
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.topk import top_entries
from hybridkv.kernels.v4.flush_csa import flush_csa
from hybridkv.kernels.v4.flush_hca import flush_hca
from hybridkv.kernels.v4.gather import flat_entries, gather_entries
from hybridkv.kernels.v4.indexer import index_logits
from hybridkv.kernels.v4.running_pool import save_running
from hybridkv.kernels.v4.sparse import Entries, attention_sparse
from hybridkv.kernels.v4.window_ring import append_window, copy_window

Angles = tuple[Tensor, Tensor]  # cos, sin [T, rope / 2] f32
LOGITS = 1 << 26  # index scores held at once
WIDE_PAGE = 128  # entries of a page that is widened for a prompt chunk


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
        rows, R = torch.arange(self.ring.shape[1], device=self.ring.device), self.ring.shape[1]
        last = self.seen[:, None] - 1
        found = last - (last - rows) % R
        return torch.where((found > last - self.window) & (found >= 0) & (self.slots[:, None] >= 0), found, -1)


@dataclass(frozen=True)
class PagedView:
    """Entries, or index keys, of every slot."""

    pages: Tensor  # [N, P, width]
    format: PageFormat
    table: Tensor  # [slots, pages a request] int32, -1 past the end
    slots: Tensor  # [B] of the step's requests
    lengths: Tensor  # [B] entries of each once the step has run


def wide_pages(entries: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of WIDE_PAGE rows for requests of so many entries: whose each is, its number there, and the table."""
    counts = [-(-n // WIDE_PAGE) for n in entries]
    owner = np.repeat(np.arange(len(counts)), counts)
    table = np.full((len(counts), max(1, *counts)), -1, np.int32)
    starts = np.cumsum([0, *counts[:-1]])
    for i, (start, n) in enumerate(zip(starts, counts, strict=True)):
        table[i, :n] = np.arange(start, start + n)
    return torch.from_numpy(owner), torch.from_numpy(np.arange(len(owner)) - starts[owner]), torch.from_numpy(table)


class CompressedHandle(LayerHandle):
    def __init__(
        self,
        step: ForwardStep,
        layer: CompressedLayer,
        paged: dict[str, Tensor],  # [N, P, width]
        state: dict[str, Tensor],  # [slots, ...]
        begin: Callable[[], None],  # called before anything is written
    ) -> None:
        super().__init__(step, None, slice(0), paged, state)
        self.begin = begin
        self.schema = layer
        assert step.chunk_index is not None
        self.index, self.chunks = step.index, step.chunk_index
        self.entry_view: StreamView | None = step.streams.get(layer.kind)
        self.workspace: Tensor | None = None  # window of the prompt chunks, from write_swa to attend

    @property
    def num_query_heads(self) -> int:
        return self.schema.heads

    @property
    def head_dim(self) -> int:
        return self.schema.head_dim

    # ---- writing

    def write_swa(self, x: Tensor, weight: Tensor, eps: float, angles: Angles) -> None:
        """Norm, rotate and store the window rows x [T, head_dim] of this step's tokens."""
        self.begin()
        fmt, n, ring = self.schema.entries, self.step.num_decodes, self.state["window"]
        if n < len(self.step.slots):
            before = self.schema.window - 1
            longest = max(self._chunk_counts())
            chunks = len(self.step.slots) - n
            rows_held = 1 << (before + longest - 1).bit_length()  # few sizes: kernels are compiled for each
            self.workspace = ring.new_empty(chunks, rows_held, ring.shape[2])
            rows = torch.arange(chunks, device=ring.device)
            copy_window(ring, self.workspace, fmt, self.chunks, rows, before)
            cos, sin = (a[n:] for a in angles)
            append_window(self.workspace, fmt, x[n:], weight, eps, cos, sin, self.chunks, rows)
        append_window(ring, fmt, x, weight, eps, *angles, self.index)

    def maybe_flush_csa(
        self,
        which: str,  # "main": entries; "index": their index keys
        p: Tensor,  # [T, 2 C] f32 content: for the next entry, for the token's own
        z: Tensor,  # [T, 2 C] f32 gate, the same; bias not added
        bias: Tensor,  # [ratio, 2 C] f32
        weight: Tensor,  # [C] f32 of the norm
        eps: float,
        angles: Angles,  # of the first token of the window that a token closes
    ) -> None:
        """Store what the tokens bring, and each entry that is now full."""
        view, ratio = self._entries(), self.schema.ratio
        pages, fmt = self._pages("entries" if which == "main" else "index")
        rows = self.state[f"{which}_p"], self.state[f"{which}_z"]
        longest = max(self._chunk_counts(), default=1)
        flush_csa(pages, fmt, view.entry_index[0], p, z, *rows, bias, weight, eps, *angles, self.index, ratio, longest)

    def maybe_flush_hca(self, p: Tensor, z: Tensor, bias: Tensor, weight: Tensor, eps: float, angles: Angles) -> None:
        """The same for p, z [T, head_dim] of a layer whose entries do not overlap."""
        view, ratio = self._entries(), self.schema.ratio
        pages, fmt = self._pages("entries")
        running = self.state["top"], self.state["total"], self.state["mixed"]
        flush_hca(pages, fmt, view.entry_index[0], p, z, *running, bias, weight, eps, *angles, self.index, ratio)
        save_running(*running, p, z, bias, self.index, ratio)

    # ---- computing

    def select(self, q: Tensor, weights: Tensor, topk: int) -> Tensor | None:
        """The entries that each token reads: int32 [T, topk] ascending, -1 past the end; None: all it can see.

        q [T, index heads, index_dim] rotated, weights [T, index heads] f32 signed and scaled.
        """
        view, ratio = self._entries(), self.schema.ratio
        if view.max_entries <= topk:
            return None
        pages, fmt = self._pages("index")
        index, parts = self.index, []
        visible = torch.where(index.token_slots >= 0, (index.positions + 1) // ratio, 0)
        block = max(1, LOGITS // view.max_entries)
        for a in range(0, len(q), block):
            part, some = slice(a, a + block), index.part(a, a + block)
            logits = index_logits(
                q[part], weights[part], pages, fmt, view.table[:, 0], some, ratio, view.max_entries, topk
            )
            parts.append(top_entries(logits, visible[part], topk))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend(  # type: ignore[override]
        self, q: Tensor, sink: Tensor, scale: float, angles: Angles, chosen: Tensor | None = None
    ) -> Tensor:
        """Attention of q [T, heads, head_dim] over the window and the chosen entries, values turned back."""
        n, window, (cos, sin) = self.step.num_decodes, self.schema.window, angles
        ones, more = (None, None) if chosen is None else (chosen[:n], chosen[n:])
        parts = []
        if n:
            ring, fmt, index = self.state["window"], self.schema.entries, self.index.part(0, n)
            found = self._sources(ones)
            parts.append(
                attention_sparse(q[:n], ring, fmt, index.slots, window, sink, scale, cos[:n], sin[:n], index, found)
            )
        if self.workspace is not None:
            ring, fmt, rows, index, found = self._chunk_window(q.dtype, more)
            parts.append(attention_sparse(q[n:], ring, fmt, rows, window, sink, scale, cos[n:], sin[n:], index, found))
            self.workspace = None
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # ---- reading

    def read_swa_view(self) -> SWAView:
        return SWAView(self.state["window"], self.schema.entries, self.schema.window, self.index.slots, self._seen())

    def read_classical_view(self) -> PagedView:
        return self._paged_view("entries")

    def read_indexer_view(self) -> PagedView:
        return self._paged_view("index")

    def gather_swa_kv(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The window of each request [B, window, head_dim] in order of time; rows before the first token are zeros."""
        R = self.state["window"].shape[1]
        back = torch.arange(-self.schema.window, 0, device=self.index.slots.device)
        at = self._seen()[:, None] + back
        there = (at >= 0) & (self.index.slots[:, None] >= 0)
        flat = torch.where(there, self.index.slots[:, None] * R + at % R, -1)
        return gather_entries(self.state["window"], self.schema.entries, flat, dtype)

    def gather_compressed_kv(self, chosen: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Entries chosen [T, K] of each token's request -> [T, K, head_dim]; what does not exist is zeros."""
        view, (pages, fmt) = self._entries(), self._pages("entries")
        lengths = (self._seen() // self.schema.ratio)[self.index.token_to_req]
        chosen = torch.where(chosen < lengths[:, None], chosen.long(), -1)
        flat = flat_entries(view.table[:, 0], self.index.token_slots[:, None], chosen, pages.shape[1])
        return gather_entries(pages, fmt, flat, dtype)

    def gather_all_compressed_kv(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """All entries of each request [B, longest, head_dim]; rows past a request's end are zeros."""
        view, (pages, fmt) = self._entries(), self._pages("entries")
        entry = torch.arange(view.max_entries, device=pages.device)
        lengths = self._seen() // self.schema.ratio
        entry = torch.where(entry < lengths[:, None], entry, -1)
        flat = flat_entries(view.table[:, 0], self.index.slots[:, None], entry, pages.shape[1])
        return gather_entries(pages, fmt, flat, dtype)

    # ---- inside

    def _seen(self) -> Tensor:
        """[B] tokens of each request once the step has run."""
        return self.index.num_computed + self.index.query_start_loc.diff()

    def _entries(self) -> StreamView:
        if self.entry_view is None:
            raise ValueError(f"a {self.schema.kind} layer has no compressed entries")
        return self.entry_view

    def _pages(self, name: str) -> tuple[Tensor, PageFormat]:
        fmt = self.schema.entries if name == "entries" else self.schema.index
        if fmt is None or name not in self.paged:
            raise ValueError(f"a {self.schema.kind} layer stores no {name}")
        return self.paged[name], fmt

    def _chunk_window(
        self, dtype: torch.dtype, chosen: Tensor | None
    ) -> tuple[Tensor, PageFormat, Tensor, StepIndex, Entries | None]:
        """Ring, format, ring rows, index and entries that prompt chunks attend over.

        Many tokens read the same rows, so those of a format with scales are widened once, not by every token.
        """
        ring, fmt, index = self.workspace, self.schema.entries, self.chunks
        assert ring is not None
        rows = torch.arange(len(ring), device=ring.device)
        if fmt.plain or self._reads_little(chosen):
            return ring, fmt, rows, index, self._sources(chosen)
        wide = entry_format("f32" if dtype == torch.float32 else "bf16", fmt.dim, fmt.rope)
        every = torch.arange(ring.shape[0] * ring.shape[1], device=ring.device).view(ring.shape[:2])
        found = None
        if self.entry_view is not None:
            owner, number, table = (x.to(ring.device) for x in wide_pages(self._chunk_entries()))
            entry = number[:, None] * WIDE_PAGE + torch.arange(WIDE_PAGE, device=ring.device)
            lengths = (index.num_computed + index.query_start_loc.diff()) // self.schema.ratio
            entry = torch.where(entry < lengths[owner, None], entry, -1)
            stored = self.paged["entries"]
            flat = flat_entries(self.entry_view.table[:, 0], index.slots[owner, None], entry, stored.shape[1])
            found = Entries(gather_entries(stored, fmt, flat, wide.dtype), table, self.schema.ratio, chosen)
        return gather_entries(ring, fmt, every, wide.dtype), wide, rows, replace(index, slots=rows), found

    def _chunk_counts(self) -> list[int]:
        """New tokens of each prompt chunk."""
        return [b - a for a, b in pairwise(self.step.query_start_loc[self.step.num_decodes :])]

    def _chunk_entries(self) -> list[int]:
        """Entries of each prompt chunk's request once the step has run."""
        begins = self.step.num_computed[self.step.num_decodes :]
        return [(a + n) // self.schema.ratio for a, n in zip(begins, self._chunk_counts(), strict=True)]

    def _reads_little(self, chosen: Tensor | None) -> bool:
        """Whether the chunks read fewer entries than there are: a short question after a long text."""
        return chosen is not None and chosen.numel() < sum(self._chunk_entries())

    def _sources(self, chosen: Tensor | None) -> Entries | None:
        if self.entry_view is None:
            return None
        return Entries(self.paged["entries"], self.entry_view.table[:, 0], self.schema.ratio, chosen)

    def _paged_view(self, name: str) -> PagedView:
        view, (pages, fmt) = self._entries(), self._pages(name)
        return PagedView(pages, fmt, view.table[:, 0], self.index.slots, self._seen() // self.schema.ratio)
