"""to_fresh: survivors of streams into pages of their own, from lists that are on the device.

What to_front.py does in place is done here where the streams' pages have other owners, who go on reading them. Nothing
waits for the device. How many pages a stream fills is known there alone: streams take the fresh pages one after the
other, and whoever has read the report can tell which are whose (`pages_filled`). The report is that of to_front, and
where a flag is set nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.kernels.eviction.compact import compact


def most_pages(most: int, streams: int, P: int) -> int:
    """Pages that `most` entries of all streams together fill at the most, with an open one for each stream."""
    return (most + streams * (P - 1)) // P


def end_to_end(entries: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first counts [R] numbers of each row of entries [R, L], one row after the other: [most], and of each its row
    and its place there. What stands after the last of them means nothing.

    It takes memory for `most` numbers, not for all entries.
    """
    ends, number = counts.cumsum(0), torch.arange(most, device=entries.device)
    row = torch.searchsorted(ends, number, right=True).clamp(max=len(counts) - 1)
    place = (number - (ends - counts)[row]).clamp(max=entries.shape[1] - 1)
    return entries[row, place], row, place


def to_fresh(
    pools: Sequence[Tensor],  # [N, P, ...] each, at least one, with as many entries in a page
    table: Tensor,  # [R, N] page ids of the streams
    entries: Tensor,  # [R, K] int32, ascending: the entries that stay; past `counts` anything
    counts: Tensor,  # [R] int64, at least 1 each
    flags: Tensor,  # [F] int32; any that is not 0: nothing moves
    fresh: Tensor,  # [n] int64 page ids that nobody uses, as many as `most_pages` says
    report: Tensor,  # [R + F + all counts at the most] int32, written
) -> None:
    """Copy each stream's surviving entries to fresh pages, byte for byte, and write the report."""
    R, F, P = len(counts), len(flags), pools[0].shape[1]
    kept, row, place = end_to_end(entries, counts, len(report) - R - F)
    report[:R], report[R : R + F], report[R + F :] = counts, flags, kept
    there = (torch.arange(len(kept), device=kept.device) < counts.sum()) & ~flags.any()
    kept = torch.where(there, kept, 0).long()
    filled = (counts + (P - 1)) // P
    page = ((filled.cumsum(0) - filled)[row] + place // P).clamp(max=len(fresh) - 1)
    source = table[row, kept // P].long() * P + kept % P
    compact(pools, source, torch.where(there, fresh[page] * P + place % P, -1), apart=True)
