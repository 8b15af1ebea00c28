"""pool_peaks: peak scores spread to their neighbours, so that a number or a name stays whole.

Only entries older than the window change, and only among themselves. Each becomes the largest of `kernel` neighbours,
of which `ahead` lie before it (it is ahead of their peaks), each times decay ** distance; with `floor`, no less than
the mean of the stream's old entries before that; with `norms`, times its value's norm.

The mean is summed in chunks of CHUNK entries, in ascending order, so its bits do not depend on how long the rows of
other streams are. On a GPU a launch sums the chunks, and a second one does the rest. There the largest of two
neighbours gives the largest of four, and so on: log2(kernel) steps on what a program holds, one load for each entry.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.errors import HybridKVError
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.exact import tree_sum

CHUNK = 1024  # entries that are summed in one fixed order
SPAN = 1024  # entries that a program holds
MAX_KERNEL = 127
SIDE = 128  # neighbours on either side that a program loads beside those it writes
SUMS = 64  # sums of chunks that are added at once
_SUMS = tl.constexpr(SUMS)


def pool_peaks_ref(
    scores: Tensor,
    lengths: Tensor,
    window: int,
    kernel: int,
    floor: bool,
    norms: Tensor | None = None,
    ahead: int | None = None,
    decay: float = 1.0,
) -> Tensor:
    G, L = scores.shape
    if not scores.numel():
        return scores.clone()
    last = (lengths - window).clamp(min=0)[:, None]
    old = torch.arange(L, device=scores.device) < last
    pooled = scores
    if kernel > 1:
        alone = scores.masked_fill(~old, -torch.inf)
        ahead = kernel // 2 if ahead is None else ahead
        pooled = torch.maximum(_reach(alone, ahead, decay), _reach(alone.flip(1), kernel - 1 - ahead, decay).flip(1))
    if floor:
        chunks = F.pad(scores.masked_fill(~old, 0), (0, -L % CHUNK)).view(G, -1, CHUNK)
        mean = torch.zeros(G, 1, device=scores.device)
        for chunk in tree_sum(chunks).unbind(1):
            mean = mean + chunk
        pooled = torch.maximum(pooled, mean / last.clamp(min=1))
    return torch.where(old, pooled if norms is None else pooled * norms, scores)


def _reach(x: Tensor, reach: int, decay: float) -> Tensor:
    """[G, L]: of each entry the largest of itself and of the `reach` before it, each times decay ** distance."""
    width = 1  # each place holds the largest of itself and of what comes before, so many together
    while width < reach + 1:
        step = min(width, reach + 1 - width)
        before = F.pad(x, (step, 0), value=-torch.inf)[:, : x.shape[1]]
        x = torch.maximum(x, before * torch.tensor(decay**step, dtype=torch.float32, device=x.device))
        width += step
    return x


@triton.jit
def old_entries(lengths, i_g, window, L):
    return tl.minimum(tl.maximum(tl.load(lengths + i_g) - window, 0), L).to(tl.int32)


@triton.jit(do_not_specialize=["L", "window"])
def chunk_sums_kernel(x, lengths, sums, L, window, CHUNK: tl.constexpr):
    """sums [G, chunks] f32 of the old entries of x [G, L]."""
    i_c, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_l = i_c * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(x + i_g * L + o_l, mask=o_l < old_entries(lengths, i_g, window, L), other=0.0)
    tl.store(sums + i_g * tl.num_programs(0) + i_c, tl.sum(b_x, 0))


@triton.jit
def reach(b_x, o_s, count, decays, SPAN: tl.constexpr, BACK: tl.constexpr):
    """Of each place the largest of itself and of `count` places before it (BACK: after it), times their decay."""
    b_y = b_x
    width = 1
    while width < count + 1:
        step = tl.minimum(width, count + 1 - width)
        o_from = tl.maximum(o_s - step, 0) if BACK else tl.minimum(o_s + step, SPAN - 1)
        there = (o_s >= step) if BACK else (o_s + step < SPAN)
        b_near = tl.gather(b_y, o_from, 0) * tl.load(decays + step)
        b_y = tl.maximum(b_y, tl.where(there, b_near, float("-inf")), propagate_nan=tl.PropagateNan.ALL)
        width += step
    return b_y


@triton.jit(do_not_specialize=["L", "window", "ahead", "behind", "chunks"])
def pool_peaks_kernel(
    x,  # [G, L] f32
    lengths,  # [G] int64
    decays,  # [MAX_KERNEL + 1] f32: the decay over each distance
    sums,  # [G, chunks] f32, or None: no floor
    norms,  # [G, L] f32, or None
    out,  # [G, L] f32
    L,
    window,
    ahead,
    behind,
    chunks,
    SPAN: tl.constexpr,
    SIDE: tl.constexpr,
):
    """A program holds SPAN neighbours and writes those that have SIDE others on either side."""
    i_g = tl.program_id(1).to(tl.int64)
    old = old_entries(lengths, i_g, window, L)
    o_s = tl.arange(0, SPAN)
    o_l = tl.program_id(0) * (SPAN - 2 * SIDE) + o_s - SIDE
    b_0 = tl.load(x + i_g * L + o_l, mask=(o_l >= 0) & (o_l < old), other=float("-inf"))
    b_x = tl.maximum(
        reach(b_0, o_s, ahead, decays, SPAN, True), reach(b_0, o_s, behind, decays, SPAN, False),
        propagate_nan=tl.PropagateNan.ALL,
    )  # fmt: skip
    if sums is not None:
        b_sum = tl.zeros([_SUMS], tl.float32)
        for first in range(0, chunks, _SUMS):
            o_c = first + tl.arange(0, _SUMS)
            b_sum += tl.load(sums + i_g * chunks + o_c, mask=o_c < chunks, other=0.0)
        mean = tl.sum(b_sum, 0) / tl.maximum(old, 1).to(tl.float32)
        b_x = tl.maximum(b_x, mean, propagate_nan=tl.PropagateNan.ALL)
    m_old = o_l < old
    m_out = (o_s >= SIDE) & (o_s < SPAN - SIDE) & (o_l < L)
    if norms is not None:
        b_x *= tl.load(norms + i_g * L + o_l, mask=m_out & m_old, other=0.0)
    b_own = tl.load(x + i_g * L + o_l, mask=m_out & (o_l >= old), other=0.0)
    tl.store(out + i_g * L + o_l, tl.where(m_old, b_x, b_own), mask=m_out)


@cache
def decay_table(decay: float, device: torch.device) -> Tensor:
    """[MAX_KERNEL + 1] f32: decay ** distance."""
    return torch.tensor([decay**distance for distance in range(MAX_KERNEL + 1)], dtype=torch.float32, device=device)


def pool_peaks_triton(
    scores: Tensor,
    lengths: Tensor,
    window: int,
    kernel: int,
    floor: bool,
    norms: Tensor | None = None,
    ahead: int | None = None,
    decay: float = 1.0,
) -> Tensor:
    G, L = scores.shape
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    if not G or not L:
        return out
    chunks = triton.cdiv(L, CHUNK)
    sums = torch.empty(G, chunks, device=scores.device) if floor else None
    if floor:
        chunk_sums_kernel[(chunks, G)](scores, lengths, sums, L, window, CHUNK=CHUNK)
    ahead = kernel // 2 if ahead is None else ahead
    pool_peaks_kernel[(triton.cdiv(L, SPAN - 2 * SIDE), G)](
        scores, lengths, decay_table(decay, scores.device), sums, None if norms is None else norms.contiguous(), out,
        L, window, ahead, kernel - 1 - ahead, chunks, SPAN=SPAN, SIDE=SIDE,
    )  # fmt: skip
    return out


def pool_peaks(
    scores: Tensor,  # [G, L] f32
    lengths: Tensor,  # [G] int64
    window: int,
    kernel: int,  # odd, unless `ahead` is given
    floor: bool,
    norms: Tensor | None = None,  # [G, L] f32
    ahead: int | None = None,  # entries that a peak spreads to after it; None: as many as before it
    decay: float = 1.0,  # of a peak with every entry
) -> Tensor:
    """Scores [G, L] f32: those older than the window pooled, floored and weighted. Past `lengths` they mean nothing."""
    if ahead is None and kernel % 2 == 0 or not 1 <= kernel <= MAX_KERNEL:
        raise HybridKVError(f"peaks are pooled over an odd number of entries from 1 to {MAX_KERNEL}, not {kernel}")
    if ahead is not None and not 0 <= ahead < kernel:
        raise HybridKVError(f"a peak spreads to 0 to {kernel - 1} of {kernel} neighbours ahead, not to {ahead}")
    if not 0 < decay <= 1:
        raise HybridKVError(f"decay must be above 0 and at most 1 (a peak does not fade), not {decay}")
    form = pool_peaks_triton if use_triton(scores) else pool_peaks_ref
    return form(scores, lengths, window, kernel, floor, norms, ahead, decay)
