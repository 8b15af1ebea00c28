"""pool_heads and select_entries: from scores of query heads to the entries that stay, with nothing left to the host.

pool_heads smooths scores [H, L] along the prompt, per query head, and sums the heads that share a KV head. It smooths
entries older than the window, among themselves: the mean or the largest of `kernel` neighbours; for a mean, places past
their ends count as zeros.

select_entries picks, of each row's first `visible` scores, the `count` largest, ties to the lower index; the entries
from there to the row's length stay whatever their score. A row's survivors are ascending, then come -1. Long rows are
searched as in topk.py. -0 equals 0; NaN is above +inf, and for the caller to refuse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.topk import MOST, top_entries_triton

POOL_BLOCK = 512


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
    L = scores.shape[1]
    visible, count, lengths = visible[:, None], count[:, None], lengths[:, None]
    place = torch.arange(max(L, width), device=scores.device)
    scores = scores.masked_fill(scores.isnan(), torch.nan)  # without their signs, which a sort on CUDA would heed
    # a stable sort leaves the hidden, which come last, behind a visible -inf; it takes NaN for the largest
    order = scores.masked_fill(place[:L] >= visible, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    order = order.masked_fill((place[:L] >= count) | (order >= visible), L).sort(-1).values[:, :width]
    count = torch.minimum(count, visible)
    rest = visible + place[:width] - count
    out = torch.where(rest < lengths, rest, -1)
    chosen = F.pad(order, (0, width - order.shape[1]))
    return torch.where(place[:width] < count, chosen, out).to(torch.int32)


def select_entries_triton(scores: Tensor, visible: Tensor, count: Tensor, lengths: Tensor, width: int) -> Tensor:
    return top_entries_triton(scores, visible, width, count, lengths)


def select_entries(scores: Tensor, visible: Tensor, count: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Survivors [R, width] int32 of rows that hold `lengths` [R] entries, scored by scores [R, L] f32.

    The `count` [R] best of the first `visible` [R] and all that follow; ascending, then -1. All three int64.
    """
    form = select_entries_triton if use_triton(scores) and width <= MOST // 2 else select_entries_ref
    return form(scores, visible, count, lengths, width)
