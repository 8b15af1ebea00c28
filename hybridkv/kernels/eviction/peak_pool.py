"""pool_peaks: peak scores spread to their neighbours, so that a number or a name stays whole.

Only entries older than the window change, and only among themselves. Each becomes the largest of `kernel` neighbours;
with `floor`, no less than the mean of the stream's old entries before that; with `norms`, times its value's norm.

The mean is summed in chunks of CHUNK entries, in ascending order, so its bits do not depend on how long the rows of
other streams are. On a GPU a launch sums the chunks, and a second one does the rest. There the largest of two
neighbours gives the largest of four, and so on: log2(kernel) steps on what a program holds, one load for each entry.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.errors import HybridKVError
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.exact import tree_sum

CHUNK = 1024  # entries that are summed in one fixed order
SPAN = 1024  # entries that a program holds
MAX_KERNEL = 127
SUMS = 64  # sums of chunks that are added at once
_SUMS = tl.constexpr(SUMS)


def pool_peaks_ref(
    scores: Tensor, lengths: Tensor, window: int, kernel: int, floor: bool, norms: Tensor | None = None
) -> Tensor:
    G, L = scores.shape
    if not scores.numel():
        return scores.clone()
    last = (lengths - window).clamp(min=0)[:, None]
    old = torch.arange(L, device=scores.device) < last
    pooled = scores
    if kernel > 1:
        pooled = F.max_pool1d(scores.masked_fill(~old, -torch.inf)[:, None], kernel, 1, kernel // 2)[:, 0]
    if floor:
        chunks = F.pad(scores.masked_fill(~old, 0), (0, -L % CHUNK)).view(G, -1, CHUNK)
        mean = torch.zeros(G, 1, device=scores.device)
        for chunk in tree_sum(chunks).unbind(1):
            mean = mean + chunk
        pooled = torch.maximum(pooled, mean / last.clamp(min=1))
    return torch.where(old, pooled if norms is None else pooled * norms, scores)


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


@triton.jit(do_not_specialize=["L", "window", "kernel", "chunks"])
def pool_peaks_kernel(
    x,  # [G, L] f32
    lengths,  # [G] int64
    sums,  # [G, chunks] f32, or None: no floor
    norms,  # [G, L] f32, or None
    out,  # [G, L] f32
    L,
    window,
    kernel,
    chunks,
    SPAN: tl.constexpr,
    OUT: tl.constexpr,
):
    """A program holds SPAN neighbours; the first OUT of them become the entries kernel // 2 further on."""
    i_g = tl.program_id(1).to(tl.int64)
    old = old_entries(lengths, i_g, window, L)
    o_s = tl.arange(0, SPAN)
    o_l = tl.program_id(0) * OUT + o_s
    o_near = o_l - kernel // 2
    b_x = tl.load(x + i_g * L + o_near, mask=(o_near >= 0) & (o_near < old), other=float("-inf"))
    width = 1  # each place holds the largest of itself and of what follows, so many together
    while width < kernel:
        step = tl.minimum(width, kernel - width)
        b_next = tl.gather(b_x, tl.minimum(o_s + step, SPAN - 1), 0)
        b_x = tl.maximum(b_x, b_next, propagate_nan=tl.PropagateNan.ALL)
        width += step
    if sums is not None:
        b_sum = tl.zeros([_SUMS], tl.float32)
        for first in range(0, chunks, _SUMS):
            o_c = first + tl.arange(0, _SUMS)
            b_sum += tl.load(sums + i_g * chunks + o_c, mask=o_c < chunks, other=0.0)
        mean = tl.sum(b_sum, 0) / tl.maximum(old, 1).to(tl.float32)
        b_x = tl.maximum(b_x, mean, propagate_nan=tl.PropagateNan.ALL)
    m_old, m_out = o_l < old, (o_s < OUT) & (o_l < L)
    if norms is not None:
        b_x *= tl.load(norms + i_g * L + o_l, mask=m_out & m_old, other=0.0)
    b_own = tl.load(x + i_g * L + o_l, mask=m_out & (o_l >= old), other=0.0)
    tl.store(out + i_g * L + o_l, tl.where(m_old, b_x, b_own), mask=m_out)


def pool_peaks_triton(
    scores: Tensor, lengths: Tensor, window: int, kernel: int, floor: bool, norms: Tensor | None = None
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
    kept = SPAN - (MAX_KERNEL + 1)  # even: what programs write begins at whole lines
    pool_peaks_kernel[(triton.cdiv(L, kept), G)](
        scores, lengths, sums, None if norms is None else norms.contiguous(), out, L, window, kernel, chunks,
        SPAN=SPAN, OUT=kept,
    )  # fmt: skip
    return out


def pool_peaks(
    scores: Tensor,  # [G, L] f32
    lengths: Tensor,  # [G] int64
    window: int,
    kernel: int,
    floor: bool,
    norms: Tensor | None = None,  # [G, L] f32
) -> Tensor:
    """Scores [G, L] f32: those older than the window pooled, floored and weighted. Past `lengths` they mean nothing."""
    if not 1 <= kernel <= MAX_KERNEL or kernel % 2 == 0:
        raise HybridKVError(f"peaks are pooled over an odd number of entries from 1 to {MAX_KERNEL}, not {kernel}")
    form = pool_peaks_triton if use_triton(scores) else pool_peaks_ref
    return form(scores, lengths, window, kernel, floor, norms)
