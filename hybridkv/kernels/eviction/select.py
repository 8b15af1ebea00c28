"""pool_heads and select_entries: from scores of query heads to the entries that survive. Nothing waits for the device.

pool_heads smooths scores [H, L] along the prompt, per query head, and sums the heads that share a KV head. Only entries
older than the window are smoothed, and only among themselves: each becomes the mean or the largest of `kernel`
neighbours. Places before the first and past the last of them count as zeros in a mean.

select_entries picks the `count` largest of each row's first `visible` scores; ties go to the lower index. The entries
from `visible` to the row's length survive whatever their score. A row lists its survivors in ascending order, then -1.
-0 equals 0. NaN is above +inf: the caller refuses rows that hold it.

The kernel (topk.py) keeps up to MAX_CHOICES // 2 entries of a row. The torch form, which sorts, does the rest: on a
CPU, and for larger budgets. Both take the rows in blocks, so that their temporaries stay below TEMPORARY_BYTES whatever
the number of streams (or at those of one row, if that is more). `select_bytes` says what a selection takes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.eviction.select_sizes import kernel_rows, rows_at_once, runs_kernel
from hybridkv.kernels.topk import top_entries_triton

POOL_BLOCK = 512  # entries of a program


def pool_heads_ref(scores: Tensor, lengths: Tensor, window: int, pooling: str, kernel: int) -> Tensor:
    by_head = scores.view(len(lengths), -1, scores.shape[1])
    if pooling == "none":
        return by_head.sum(1)
    pool = F.avg_pool1d if pooling == "avg" else F.max_pool1d
    old = (torch.arange(scores.shape[1], device=scores.device) < (lengths - window)[:, None])[:, None]
    apart = by_head.masked_fill(~old, 0 if pooling == "avg" else -torch.inf)
    return torch.where(old, pool(apart, kernel, 1, kernel // 2), by_head).sum(1)


@triton.jit(do_not_specialize=["L", "W"])
def pool_heads_kernel(
    x,  # [H, L] f32
    lengths,  # [G] int64
    out,  # [G, L] f32
    L,
    W,
    R: tl.constexpr,
    KERNEL: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_g = tl.program_id(1).to(tl.int64)
    o_l = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = (tl.load(lengths + i_g) - W).to(tl.int32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for r in range(R):
        p_x = x + (i_g * R + r) * L
        b_x = tl.full([BLOCK], 0.0 if MEAN else float("-inf"), tl.float32)
        for i in tl.static_range(KERNEL):
            o_near = o_l + i - KERNEL // 2
            m_near = (o_near >= 0) & (o_near < old)
            b_near = tl.load(p_x + o_near, mask=m_near, other=0.0 if MEAN else float("-inf"))
            b_x = b_x + b_near if MEAN else tl.maximum(b_x, b_near, propagate_nan=tl.PropagateNan.ALL)
        if MEAN:
            b_x /= KERNEL
        b_own = tl.load(p_x + o_l, mask=o_l < L, other=0.0)
        b_sum += tl.where(o_l < old, b_x, b_own)
    tl.store(out + i_g * L + o_l, b_sum, mask=o_l < L)


def pool_heads_triton(scores: Tensor, lengths: Tensor, window: int, pooling: str, kernel: int) -> Tensor:
    (H, L), G = scores.shape, len(lengths)
    out = torch.empty(G, L, device=scores.device)
    if L and G:
        kernel = 1 if pooling == "none" else kernel
        pool_heads_kernel[(triton.cdiv(L, POOL_BLOCK), G)](
            scores.contiguous(), lengths, out, L, window,
            R=H // G, KERNEL=kernel, MEAN=pooling != "max", BLOCK=POOL_BLOCK,
        )  # fmt: skip
    return out


def pool_heads(scores: Tensor, lengths: Tensor, window: int, pooling: str, kernel: int) -> Tensor:
    """Scores [H, L] f32 of query heads -> [G, L] of KV heads that hold `lengths` [G]; pooling: none | avg | max."""
    form = pool_heads_triton if use_triton(scores) else pool_heads_ref
    return form(scores, lengths, window, pooling, kernel)


def select_entries_ref(scores: Tensor, visible: Tensor, count: Tensor, lengths: Tensor, width: int) -> Tensor:
    out = torch.empty((len(scores), width), dtype=torch.int32, device=scores.device)
    step = rows_at_once(scores.shape[1])
    for first in range(0, len(scores), step):
        rows = slice(first, first + step)
        out[rows] = _select_rows(scores[rows], visible[rows, None], count[rows, None], lengths[rows, None], width)
    return out


def _select_rows(scores: Tensor, visible: Tensor, count: Tensor, lengths: Tensor, width: int) -> Tensor:
    """scores [R, L]; visible, count and lengths [R, 1] -> [R, width]."""
    L = scores.shape[1]
    place = torch.arange(max(L, width), device=scores.device)
    keys = scores.masked_fill(scores.isnan(), torch.nan)  # without signs: a sort on CUDA would order NaN by them
    keys.masked_fill_(place[:L] >= visible, -torch.inf)
    # stable: hidden entries come after visible ones of -inf; NaN counts as the largest; at most `width` are chosen
    order = keys.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    not_chosen = (place[: order.shape[1]] >= count) | (order >= visible)
    order = order.masked_fill(not_chosen, L).sort(-1).values
    chosen = F.pad(order, (0, width - order.shape[1]))
    chosen_count = torch.minimum(count, visible)
    following = visible + place[:width] - chosen_count
    following = torch.where(following < lengths, following, -1)
    return torch.where(place[:width] < chosen_count, chosen, following).to(torch.int32)


def select_entries_triton(scores: Tensor, visible: Tensor, count: Tensor, lengths: Tensor, width: int) -> Tensor:
    step = kernel_rows(scores.shape[1], width)
    blocks = [slice(first, first + step) for first in range(0, max(1, len(scores)), step)]
    found = [top_entries_triton(scores[rows], visible[rows], width, count[rows], lengths[rows]) for rows in blocks]
    return found[0] if len(found) == 1 else torch.cat(found)


def select_entries(scores: Tensor, visible: Tensor, count: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Survivors [R, width] int32 of rows that hold `lengths` [R] entries, scored by scores [R, L] f32.

    The `count` [R] best of the first `visible` [R] and all that follow; ascending, then -1. All three int64.
    """
    form = select_entries_triton if use_triton(scores) and runs_kernel(width) else select_entries_ref
    return form(scores, visible, count, lengths, width)
