"""standings: an entry's place in its stream by key difference, as a part of all: 1 the best, near 0 the last.

Differences fall into bins by the leading bits of 1 + difference as a float: 256 bins for each power of two, so
that keys which nearly agree are told apart as well as keys that do not. What shares a bin shares a place. Counts are
whole numbers, so no order of work changes a bit, and nothing is sorted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

DROPPED = 15  # bits of a float's 23 that do not tell bins apart
SMALLEST = 2.0**-20  # of 1 + difference: what is smaller shares the last bin
LOWEST = 107 << 8  # the bits of SMALLEST that are left
BINS = (128 << 8) - LOWEST + 1  # up to 1 + difference = 2
BLOCK = 256  # entries of a program that counts
PLACED = 4096  # entries of a program that looks up places
WARPS = 8  # of such a program
COPIES = 4  # of the counts: programs that add to one and the same wait for each other
_DROPPED, _LOWEST, _BINS = tl.constexpr(DROPPED), tl.constexpr(LOWEST), tl.constexpr(BINS)


def standings_ref(differences: Tensor, lengths: Tensor) -> Tensor:
    G, L = differences.shape
    there = torch.arange(L, device=differences.device) < lengths[:, None]
    above = (1 + differences).nan_to_num(0).clamp(SMALLEST, 2)
    bins = (above.view(torch.int32) >> DROPPED).long() - LOWEST
    counts = torch.zeros(G, BINS, dtype=torch.int64, device=differences.device).scatter_add_(1, bins, there.long())
    better = counts.sum(1, keepdim=True) - counts.cumsum(1)
    found = 1 - better.gather(1, bins).float() / lengths[:, None].clamp(min=1).float()
    return torch.where(differences.isnan(), differences, found)


@triton.jit
def find_bins(x, o_l, m_l, smallest):
    b_x = tl.load(x + o_l, mask=m_l, other=-1.0)
    b_above = tl.minimum(tl.maximum(b_x + 1.0, smallest), 2.0)
    b_bin = (b_above.to(tl.int32, bitcast=True) >> _DROPPED) - _LOWEST
    return b_x, tl.where(b_x == b_x, b_bin, 0)  # a NaN stands last, and stays one


@triton.jit(do_not_specialize=["L"])
def count_bins_kernel(x, lengths, counts, L, smallest, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """counts [G, COPIES, BINS] int32 of x [G, L], to be added up."""
    i_g = tl.program_id(1).to(tl.int64)
    o_l = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_l = (o_l < tl.load(lengths + i_g)) & (o_l < L)
    _, b_bin = find_bins(x + i_g * L, o_l, m_l, smallest)
    i_copy = i_g * COPIES + tl.program_id(0) % COPIES
    tl.atomic_add(counts + i_copy * _BINS + b_bin, tl.full([BLOCK], 1, tl.int32), mask=m_l, sem="relaxed")


@triton.jit(do_not_specialize=["L"])
def standings_kernel(x, lengths, counts, out, L, smallest, COPIES: tl.constexpr, BLOCK: tl.constexpr, BB: tl.constexpr):
    """counts [G, COPIES, BINS] int32. Every program adds up all bins of its stream."""
    i_g = tl.program_id(1).to(tl.int64)
    o_l, o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BB)
    b_count = tl.zeros([BB], tl.int32)
    for i in tl.static_range(COPIES):
        b_count += tl.load(counts + (i_g * COPIES + i) * _BINS + o_b, mask=o_b < _BINS, other=0)
    b_x, b_bin = find_bins(x + i_g * L, o_l, o_l < L, smallest)
    b_better = tl.gather(tl.sum(b_count, 0) - tl.cumsum(b_count, 0), b_bin, 0).to(tl.float32)
    length = tl.maximum(tl.load(lengths + i_g), 1).to(tl.float32)
    tl.store(out + i_g * L + o_l, tl.where(b_x == b_x, 1 - tl.div_rn(b_better, length), b_x), mask=o_l < L)


def standings_triton(differences: Tensor, lengths: Tensor) -> Tensor:
    G, L = differences.shape
    differences = differences.contiguous()
    out = torch.empty_like(differences)
    if G and L:
        counts = torch.zeros(G, COPIES, BINS, dtype=torch.int32, device=differences.device)
        grid, copies = (triton.cdiv(L, BLOCK), G), dict(COPIES=COPIES)
        count_bins_kernel[grid](differences, lengths, counts, L, SMALLEST, **copies, BLOCK=BLOCK)
        standings_kernel[triton.cdiv(L, PLACED), G](
            differences, lengths, counts, out, L, SMALLEST, **copies, BLOCK=PLACED, BB=triton.next_power_of_2(BINS),
            num_warps=WARPS,
        )  # fmt: skip
    return out


def standings(
    differences: Tensor,  # [G, L] f32 from -1 to 1; past a stream's length anything
    lengths: Tensor,  # [G] int64
) -> Tensor:
    """[G, L] f32: 1 less the part of the stream's entries that lie in better bins. NaN stays NaN."""
    form = standings_triton if use_triton(differences) else standings_ref
    return form(differences, lengths)
