"""CompressedHandle: a layer's window, entries and compressor state in one step.

The order inside a layer is fixed: a token's row enters the window, its content enters the compressors, entries that are
full are written, and only then is anything read. So a token sees itself, and the entry that it completes.

    write_swa -> maybe_flush_csa / maybe_flush_hca -> select -> attend          (the last two: models/v4_attention.py)

The same calls are made whatever the positions are; which of them write is decided on the device. One captured graph
therefore serves every position.

A prompt chunk would overwrite window rows that its own first tokens still need. Its window is read from a workspace:
the rows before the chunk and the chunk's own, in a ring that holds them all.

The names `write_swa`, `maybe_flush_csa`, `maybe_flush_hca`, `num_query_heads` and those of `compressed_reads.py` come
from a specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from hybridkv.cache import compressed_reads
from hybridkv.cache.schema import CompressedLayer
from hybridkv.cache.step import ForwardStep, StreamView
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.flush_csa import flush_csa
from hybridkv.kernels.v4.flush_hca import flush_hca
from hybridkv.kernels.v4.running_pool import save_running
from hybridkv.kernels.v4.window_ring import append_window, copy_window

Angles = tuple[Tensor, Tensor]  # cos, sin [T, rope / 2] f32


class CompressedHandle:
    """B requests, T tokens."""

    def __init__(
        self,
        step: ForwardStep,
        layer: CompressedLayer,
        paged: Mapping[str, Tensor],  # [N, P, width]
        state: Mapping[str, Tensor],  # [slots, ...]
        begin: Callable[[], None],  # called before anything is written
    ) -> None:
        self.step = step
        self.schema = layer
        self.paged = paged
        self.state = state
        self.begin = begin
        self.index: StepIndex = step.index  # slots and positions of all tokens
        assert step.chunk_index is not None
        self.chunk_index: StepIndex = step.chunk_index  # of the tokens of prompt chunks
        self.view: StreamView | None = step.streams.get(layer.kind)  # None: a window layer, which has no entries
        self._workspace: Tensor | None = None  # [chunks, R, width] from write_swa until attention has read it

    @property
    def num_query_heads(self) -> int:
        """Heads of the queries; all of them read the same entries."""
        return self.schema.heads

    @property
    def head_dim(self) -> int:
        """Channels of an entry, which is key and value at once."""
        return self.schema.head_dim

    # ---- views

    @property
    def stream(self) -> StreamView:
        """Where the entries are that all layers of this kind share a stream for."""
        if self.view is None:
            raise ValueError(f"a {self.schema.kind} layer has no compressed entries")
        return self.view

    @property
    def table(self) -> Tensor:
        """[slots, N] page ids of every slot, -1 past the end."""
        return self.stream.table[:, 0]

    def pages(self, name: str) -> tuple[Tensor, PageFormat]:
        """Pages [N, P, width] of "entries" or of "index" keys."""
        fmt = self.schema.entries if name == "entries" else self.schema.index
        if fmt is None or name not in self.paged:
            raise ValueError(f"a {self.schema.kind} layer stores no {name}")
        return self.paged[name], fmt

    def seen(self) -> Tensor:
        """[B] tokens of each request once the step has run."""
        return self.index.num_computed + self.index.query_start_loc.diff()

    def chunk_tokens(self) -> list[int]:
        """New tokens of each prompt chunk."""
        return [b - a for a, b in pairwise(self.step.query_start_loc[self.step.num_decodes :])]

    def chunk_entries(self) -> list[int]:
        """Entries of each prompt chunk's request once the step has run."""
        before = self.step.num_computed[self.step.num_decodes :]
        return [(a + n) // self.schema.ratio for a, n in zip(before, self.chunk_tokens(), strict=True)]

    # ---- writing

    def write_swa(self, x: Tensor, weight: Tensor, eps: float, angles: Angles) -> None:
        """Norm, rotate and store the window rows x [T, head_dim] of this step's tokens."""
        self.begin()
        ring = self.state["window"]
        if self.step.num_decodes < len(self.step.slots):
            self._workspace = self._chunk_window(x, weight, eps, angles)
        append_window(ring, self.schema.entries, x, weight, eps, *angles, self.index)

    def _chunk_window(self, x: Tensor, weight: Tensor, eps: float, angles: Angles) -> Tensor:
        """[chunks, R, width]: for each prompt chunk the window rows before it and its own."""
        ring, fmt, n = self.state["window"], self.schema.entries, self.step.num_decodes
        counts = self.chunk_tokens()
        before = self.schema.window - 1
        ring_rows = 1 << (before + max(counts) - 1).bit_length()  # few sizes: kernels are compiled for each
        window = ring.new_empty(len(counts), ring_rows, ring.shape[2])
        chunks = torch.arange(len(counts), device=ring.device)
        copy_window(ring, window, fmt, self.chunk_index, chunks, before)
        cos, sin = angles
        append_window(window, fmt, x[n:], weight, eps, cos[n:], sin[n:], self.chunk_index, chunks)
        return window

    def take_workspace(self) -> Tensor:
        """[chunks, R, width] the window of the prompt chunks, for attention to read; the handle lets go of it."""
        window = self._workspace
        assert window is not None, "write_swa comes before attention"
        self._workspace = None
        return window

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
        entry_index = self.stream.entry_index[0]
        pages, fmt = self.pages("entries" if which == "main" else "index")
        rows = self.state[f"{which}_p"], self.state[f"{which}_z"]
        longest = max(self.chunk_tokens(), default=1)
        flush_csa(
            pages,
            fmt,
            entry_index,
            p,
            z,
            *rows,
            bias,
            weight,
            eps,
            *angles,
            self.index,
            self.schema.ratio,
            longest,
        )

    def maybe_flush_hca(self, p: Tensor, z: Tensor, bias: Tensor, weight: Tensor, eps: float, angles: Angles) -> None:
        """The same for p, z [T, head_dim] of a layer whose entries do not overlap."""
        entry_index, ratio = self.stream.entry_index[0], self.schema.ratio
        pages, fmt = self.pages("entries")
        running = self.state["top"], self.state["total"], self.state["mixed"]
        flush_hca(pages, fmt, entry_index, p, z, *running, bias, weight, eps, *angles, self.index, ratio)
        save_running(*running, p, z, bias, self.index, ratio)

    # ---- reading back

    read_swa_view = compressed_reads.read_swa_view
    read_classical_view = compressed_reads.read_classical_view
    read_indexer_view = compressed_reads.read_indexer_view
    gather_swa_kv = compressed_reads.gather_swa_kv
    gather_compressed_kv = compressed_reads.gather_compressed_kv
    gather_all_compressed_kv = compressed_reads.gather_all_compressed_kv
