"""DeepSeek-V4's attention over the cache: choosing entries, and attending over the window and the chosen entries.

Requests that decode one token read the window where it is stored. A prompt chunk overwrites window rows that its own
first tokens still need, so its window lies in a workspace that `write_swa` has filled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache import CompressedHandle
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.topk import top_entries
from hybridkv.kernels.v4.gather import flat_entries, gather_entries
from hybridkv.kernels.v4.indexer import index_logits
from hybridkv.kernels.v4.sparse import Entries, attention_sparse

Angles = tuple[Tensor, Tensor]  # cos, sin [T, rope / 2] f32
MAX_LOGITS = 1 << 26  # index scores held at once
DEQUANTISED_PAGE = 128  # entries of a page of dequantised entries


def select(
    handle: CompressedHandle,
    q: Tensor,  # [T, index heads, index_dim] rotated
    weights: Tensor,  # [T, index heads] f32 signed and scaled
    topk: int,
) -> Tensor | None:
    """The entries that each token reads: int32 [T, topk] ascending, -1 past the end; None: all it can see."""
    ratio, view = handle.schema.ratio, handle.stream
    if view.max_entries <= topk:
        return None
    table, (pages, fmt) = handle.table, handle.pages("index")
    index = handle.index
    visible = torch.where(index.token_slots >= 0, (index.positions + 1) // ratio, 0)
    block = max(1, MAX_LOGITS // view.max_entries)
    chosen = []
    for begin in range(0, len(q), block):
        part = slice(begin, begin + block)
        tokens = index.part(begin, begin + block)
        logits = index_logits(q[part], weights[part], pages, fmt, table, tokens, ratio, view.max_entries, topk)
        chosen.append(top_entries(logits, visible[part], topk))
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def attend(
    handle: CompressedHandle,
    q: Tensor,  # [T, heads, head_dim]
    sink: Tensor,  # [heads] f32
    scale: float,
    angles: Angles,
    chosen: Tensor | None = None,  # [T, K] entries of each token; None: all it can see
) -> Tensor:  # [T, heads, head_dim]
    """Attention over the window and the chosen entries; the result is rotated back by the token's angles."""
    decodes, requests = handle.step.num_decodes, len(handle.step.slots)
    if decodes == requests:
        return attend_decodes(handle, q, sink, scale, angles, chosen)
    if decodes == 0:
        return attend_chunks(handle, q, sink, scale, angles, chosen)
    return torch.cat(
        [
            attend_decodes(handle, q, sink, scale, angles, chosen),
            attend_chunks(handle, q, sink, scale, angles, chosen),
        ]
    )


def attend_decodes(
    handle: CompressedHandle, q: Tensor, sink: Tensor, scale: float, angles: Angles, chosen: Tensor | None
) -> Tensor:
    """[num_decodes, heads, head_dim] of the requests with one token, the first of the step."""
    n = handle.step.num_decodes
    cos, sin = angles
    index = handle.index.part(0, n)
    return attention_sparse(
        q[:n], handle.state["window"], handle.schema.entries, index.slots, handle.schema.window, sink, scale,
        cos[:n], sin[:n], index, stored_entries(handle, None if chosen is None else chosen[:n]),
    )  # fmt: skip


def attend_chunks(
    handle: CompressedHandle, q: Tensor, sink: Tensor, scale: float, angles: Angles, chosen: Tensor | None
) -> Tensor:
    """[T - num_decodes, heads, head_dim] of the prompt chunks."""
    n = handle.step.num_decodes
    cos, sin = angles
    read = chunk_sources(handle, q.dtype, None if chosen is None else chosen[n:])
    return attention_sparse(
        q[n:], read.ring, read.format, read.rows, handle.schema.window, sink, scale, cos[n:], sin[n:], read.index,
        read.entries,
    )  # fmt: skip


@dataclass(frozen=True)
class ChunkSources:
    """What prompt chunks attend over."""

    ring: Tensor  # [chunks, R, width] window rows
    format: PageFormat  # of window rows and entries
    rows: Tensor  # [chunks] row of the ring that each chunk reads
    index: StepIndex  # of the chunks alone
    entries: Entries | None


def chunk_sources(handle: CompressedHandle, dtype: torch.dtype, chosen: Tensor | None) -> ChunkSources:
    """Many tokens of a chunk read the same rows. Rows of a format with scales are therefore dequantised once, unless
    the chunks read only a few of them.
    """
    ring, fmt, index = handle.take_workspace(), handle.schema.entries, handle.chunk_index
    rows = torch.arange(len(ring), device=ring.device)
    if fmt.plain or reads_little(handle, chosen):
        return ChunkSources(ring, fmt, rows, index, stored_entries(handle, chosen))
    plain = entry_format("f32" if dtype == torch.float32 else "bf16", fmt.dim, fmt.rope)
    every = torch.arange(ring.shape[0] * ring.shape[1], device=ring.device).view(ring.shape[:2])
    return ChunkSources(
        ring=gather_entries(ring, fmt, every, plain.dtype),
        format=plain,
        rows=rows,
        index=replace(index, slots=rows),
        entries=None if handle.view is None else dequantised_entries(handle, plain, chosen),
    )


def dequantised_entries(handle: CompressedHandle, plain: PageFormat, chosen: Tensor | None) -> Entries:
    """All entries of the chunks' requests, in pages of their own."""
    index, ratio = handle.chunk_index, handle.schema.ratio
    stored, fmt = handle.pages("entries")
    owner, number, table = (x.to(stored.device) for x in dequantised_pages(handle.chunk_entries()))
    entry = number[:, None] * DEQUANTISED_PAGE + torch.arange(DEQUANTISED_PAGE, device=stored.device)
    lengths = (index.num_computed + index.query_start_loc.diff()) // ratio
    entry = torch.where(entry < lengths[owner, None], entry, -1)
    flat = flat_entries(handle.table, index.slots[owner, None], entry, stored.shape[1])
    return Entries(gather_entries(stored, fmt, flat, plain.dtype), table, ratio, chosen)


def dequantised_pages(entries: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of DEQUANTISED_PAGE rows for requests that have this many entries each.

    Returns the request of each page [N], its number in that request [N], and the page table [requests, pages].
    """
    counts = [-(-n // DEQUANTISED_PAGE) for n in entries]
    owner = np.repeat(np.arange(len(counts)), counts)
    table = np.full((len(counts), max(1, *counts)), -1, np.int32)
    starts = np.cumsum([0, *counts[:-1]])
    for i, (start, n) in enumerate(zip(starts, counts, strict=True)):
        table[i, :n] = np.arange(start, start + n)
    return torch.from_numpy(owner), torch.from_numpy(np.arange(len(owner)) - starts[owner]), torch.from_numpy(table)


def reads_little(handle: CompressedHandle, chosen: Tensor | None) -> bool:
    """Whether the chunks read fewer entries than there are: a short question after a long text."""
    return chosen is not None and chosen.numel() < sum(handle.chunk_entries())


def stored_entries(handle: CompressedHandle, chosen: Tensor | None) -> Entries | None:
    """The entries where they are stored; None: the layer has none."""
    if handle.view is None:
        return None
    return Entries(handle.paged["entries"], handle.table, handle.schema.ratio, chosen)
