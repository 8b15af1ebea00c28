"""to_front: survivors of streams to the front of their own pages, in place, from lists that are on the device.

Nothing waits for the device, and no memory is taken beside `report`, which tells the host later what was done:

    report    [R] how many entries each stream keeps | [F] flags | the entries that stay, stream after stream

Where a flag is set nothing moves: the report alone is written.

A list is ascending, so entry i of a stream comes from a place at or behind i. A program has some columns of one stream
and moves its entries in tiles, the first ones first: what a tile writes lies before all that later tiles read. Within a
tile all is read before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.eviction.compact import as_words, compact_ref

TILE_WORDS = 4096  # that a program moves at once, in a tile of entries x columns
COLUMNS = 16  # of 8 bytes: four sectors
ENTRIES = 1024  # of a tile, at the most


def to_front_ref(
    pools: Sequence[Tensor], table: Tensor, entries: Tensor, counts: Tensor, flags: Tensor, report: Tensor
) -> None:
    R, F = len(counts), len(flags)
    there = torch.arange(entries.shape[1], device=entries.device) < counts[:, None]
    kept, (row, place) = entries[there].long(), there.nonzero(as_tuple=True)
    report[:R], report[R : R + F], report[R + F : R + F + len(kept)] = counts, flags, kept
    if flags.any():
        return
    for pool in pools:
        P = pool.shape[1]
        source, target = (table[row, x // P].long() * P + x % P for x in (kept, place))
        compact_ref(pool, source, target)


@triton.jit(do_not_specialize=["R", "F"])
def to_front_kernel(
    a, b,  # [N, P, E] words of two pools
    table,  # [R, N]
    entries,  # [R, ...] int32
    counts,  # [R] int64
    flags,  # [F] int32
    report,  # int32
    R, F, stride_tr, stride_tn, stride_e,
    E: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr,
    REPORT: tl.constexpr,
):  # fmt: skip
    i_r = tl.program_id(1).to(tl.int64)
    o_e = tl.program_id(0) * BE + tl.arange(0, BE)
    if tl.program_id(2) == 1:
        a = b
    n = tl.load(counts + i_r).to(tl.int32)
    stop = tl.zeros([BF], tl.int32)
    for first in range(0, F, BF):
        o_f = first + tl.arange(0, BF)
        stop = tl.maximum(stop, tl.load(flags + o_f, mask=o_f < F, other=0))
    stopped = tl.max(stop, 0) != 0
    p_entries, p_table = entries + i_r * stride_e, table + i_r * stride_tr
    if REPORT and (tl.program_id(0) == 0) & (tl.program_id(2) == 0):
        b_before = tl.zeros([BR], tl.int64)
        for first in range(0, R, BR):
            o_r = first + tl.arange(0, BR)
            b_before += tl.load(counts + o_r, mask=o_r < i_r, other=0)
        tl.store(report + i_r, n)
        if i_r == 0:
            for first in range(0, F, BF):
                o_f = first + tl.arange(0, BF)
                tl.store(report + R + o_f, tl.load(flags + o_f, mask=o_f < F, other=0), mask=o_f < F)
        p_report = report + R + F + tl.sum(b_before, 0)
        for first in range(0, n, BN):
            o_n = first + tl.arange(0, BN)
            tl.store(p_report + o_n, tl.load(p_entries + o_n, mask=o_n < n, other=0), mask=o_n < n)
    if not stopped:
        for first in range(0, n, BN):
            o_n = first + tl.arange(0, BN)
            b_n = tl.load(p_entries + o_n, mask=o_n < n, other=0)
            m_n = (o_n < n) & (b_n != o_n)  # the others are where they belong
            o_from = tl.load(p_table + (b_n // P) * stride_tn, mask=m_n, other=0).to(tl.int64) * P + b_n % P
            o_to = tl.load(p_table + (o_n // P) * stride_tn, mask=m_n, other=0).to(tl.int64) * P + o_n % P
            m_x = m_n[:, None] & (o_e < E)
            b_x = tl.load(a + o_from[:, None] * E + o_e, mask=m_x)
            tl.debug_barrier()  # other threads read what is written next
            tl.store(a + o_to[:, None] * E + o_e, b_x, mask=m_x)


def to_front_triton(
    pools: Sequence[Tensor], table: Tensor, entries: Tensor, counts: Tensor, flags: Tensor, report: Tensor
) -> None:
    R, F = len(counts), len(flags)
    alike: dict[tuple[torch.dtype, int], list[Tensor]] = {}  # (type of a word, words of an entry) -> pools
    for words, E in (as_words(pool) for pool in pools):
        alike.setdefault((words.dtype, E), []).append(words)
    lists = (table, entries, counts, flags, report, R, F, *table.stride(), entries.stride(0))
    P, reported = pools[0].shape[1], False
    for (_, E), found in alike.items():
        columns = min(COLUMNS, triton.next_power_of_2(E))
        tile = dict(E=E, P=P, BN=min(ENTRIES, TILE_WORDS // columns), BE=columns, BR=64, BF=32)
        for a, b in zip(found[::2], found[1::2] + found[-1:], strict=False):
            grid = (triton.cdiv(E, columns), R, 1 if a is b else 2)
            to_front_kernel[grid](a, b, *lists, **tile, REPORT=not reported, num_stages=1)
            reported = True


def to_front(
    pools: Sequence[Tensor],  # [N, P, ...] each, at least one, with as many entries in a page
    table: Tensor,  # [R, N] page ids of the streams, which nobody shares
    entries: Tensor,  # [R, K] int32, ascending: the entries that stay; past `counts` anything
    counts: Tensor,  # [R] int64
    flags: Tensor,  # [F] int32; any that is not 0: nothing moves
    report: Tensor,  # [>= R + F + all counts] int32, written
) -> None:
    """Move each stream's surviving entries to its front, byte for byte, and write the report."""
    assert entries.dtype == report.dtype == flags.dtype == torch.int32 and (len(table) == len(entries) == len(counts))
    if len(counts):
        form = to_front_triton if use_triton(table) else to_front_ref
        form(pools, table, entries.contiguous(), counts.contiguous(), flags, report)
