"""top_entries: the k largest of each row's visible logits, as ascending indices.

Exact: of equal logits the lower index wins, -0 equals 0, NaN is above +inf. A row that sees k entries or fewer gets
all of them, then -1. What lies past `visible` has no say.

A long row is searched from above: the k largest lie in the k groups of neighbours whose largest are the k largest, and
of groups that tie the first hold the entries that win the tie. So one launch reads the row and writes the largest of
every RATIO entries, and of those again; the next keeps k groups, k of their parts, and at last k entries:

    262,144 logits -> 32,768 largest of 8 -> 4,096 largest of 64;  512 of 4,096 -> 512 of 512 x 8 -> 512 of 512 x 8

A program holds what it chooses from in registers and finds the k-th largest by narrowing a bound. The bound of the
groups is one for their parts, and a tight one. The launches follow from k and the rows' width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

RATIO = 8  # of one level's groups to the next
TOP = 8192  # groups to begin with, at most
MOST = 16384  # that a program chooses from, whatever k is
TILE = 2048  # entries of a program that reads a row
HELD = 32  # entries of a thread
MANY, REGISTERS = 264, 128  # rows from which on four programs share a multiprocessor, with as many registers a thread


def top_entries_ref(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    (T, width), visible = logits.shape, visible[:, None]
    logits = logits.masked_fill(logits.isnan(), torch.nan)  # without their signs, which a sort on CUDA would heed
    hidden = torch.arange(width, device=logits.device) >= visible
    # a stable sort leaves the hidden, which come last, behind a visible -inf; it takes NaN for the largest
    order = logits.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    order = order.masked_fill(order >= visible, width).sort(-1).values
    out = torch.full((T, k), -1, dtype=torch.int32, device=logits.device)
    out[:, : order.shape[1]] = order.masked_fill(order == width, -1)
    return out


@triton.jit
def flip_negative(b_x):
    """Bits of a float -> an integer of the same order, and back."""
    return b_x ^ ((b_x >> 31) & 0x7FFFFFFF)


@triton.jit
def order_keys(b_x):
    """Floats -> int32 in the same order, above -2^31 and below 2^31 - 1. NaN is the largest; -0 equals 0."""
    b_key = flip_negative(tl.where(b_x == 0, 0.0, b_x).to(tl.int32, bitcast=True))
    return tl.where(b_x == b_x, b_key, 0x7FFFFFFE)


@triton.jit
def kth_largest(b_key, low, high, count, k):
    """A bound that k keys or more reach; more than k only if it is the k-th largest itself, and has equals.

    low is reached by `count` keys, k or more; high by none.
    """
    size, top, turn = tl.log2(k.to(tl.float32)), -1.0, 0  # top: log2 of the count at high, of a half for none
    while (low + 1 < high) & (count != k):
        # A guess as if the count fell exponentially is quick on ordinary numbers; the keys' middle ends the search in
        # 32 turns whatever they are.
        middle = (low & high) + ((low ^ high) >> 1)
        low_value = flip_negative(low).to(tl.float32, bitcast=True)
        high_value = flip_negative(high).to(tl.float32, bitcast=True)
        at = tl.log2(count.to(tl.float32))
        part = (at - size) / (at - top)
        guess = flip_negative((low_value * (1 - part) + high_value * part).to(tl.int32, bitcast=True))
        middle = tl.where((turn % 2 == 0) & (guess > low) & (guess < high), guess, middle)
        reach = tl.sum((b_key >= middle).to(tl.int32), 0)
        count = tl.where(reach >= k, reach, count)
        top = tl.where(reach >= k, top, tl.log2(tl.maximum(reach.to(tl.float32), 0.5)))
        low = tl.where(reach >= k, middle, low)
        high = tl.where(reach >= k, high, middle)
        turn += 1
    return low


@triton.jit
def keep_largest(b_key, b_index, low, p_out, k, BLOCK_K: tl.constexpr):
    """Of the keys above -2^31 the k largest: their indices, in the order they have, to p_out, then -1.

    low: a bound that k of them may reach. Returns such a bound for the keys of their parts.
    """
    n = tl.sum((b_key > -0x80000000).to(tl.int32), 0)
    kept = tl.minimum(n, k)
    count = tl.sum((b_key >= low).to(tl.int32), 0)
    if count < kept:
        low = tl.min(tl.where(b_key > -0x80000000, b_key, 0x7FFFFFFF), 0)
        count = n
    low = kth_largest(b_key, low, tl.max(b_key, 0) + 1, count, kept)
    b_over, b_equal = (b_key > low).to(tl.int32), (b_key == low).to(tl.int32)
    room = kept - tl.sum(b_over, 0)  # for the first of the equals
    b_both = (b_over << 16) + b_equal
    b_before = tl.cumsum(b_both, 0) - b_both  # how many of either come before: one sum for both
    b_equals = b_before & 0xFFFF
    m_kept = (b_key > low) | ((b_key == low) & (b_equals < room))
    tl.store(p_out + (b_before >> 16) + tl.minimum(b_equals, room), b_index, mask=m_kept)
    o_k = tl.arange(0, BLOCK_K)
    tl.store(p_out + o_k, -1, mask=(o_k >= kept) & (o_k < k))
    return low


@triton.jit
def visible_of(visible, i_t, width):
    return tl.minimum(tl.load(visible + i_t), width).to(tl.int32)


@triton.jit(do_not_specialize=["k"])
def group_largest_kernel(
    x,  # [T, ...] f32
    visible,  # [T] int64
    largest,  # [T, ...] int32: keys of the groups of RATIO, of RATIO^2, ...
    k,
    width,
    stride_x,
    stride_l,
    RATIO: tl.constexpr,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
):
    i_t, i_p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = visible_of(visible, i_t, width)
    if (n <= k) | (i_p * TILE >= n):
        return
    o_n = i_p * TILE + tl.arange(0, TILE)
    b_x = tl.load(x + i_t * stride_x + o_n, mask=o_n < width, other=0.0)  # by `width`: loads stay wide
    b_key = tl.where(o_n < n, order_keys(b_x), -0x80000000)
    p_level, groups = largest + i_t * stride_l, TILE
    for _ in tl.static_range(LEVELS):
        groups = groups // RATIO
        b_key = tl.max(tl.reshape(b_key, [b_key.shape[0] // RATIO, RATIO]), 1)
        tl.store(p_level + i_p * groups + tl.arange(0, b_key.shape[0]), b_key)
        p_level += tl.num_programs(1) * groups


@triton.jit(do_not_specialize=["k"])
def top_entries_kernel(
    x,  # [T, ...] f32
    visible,  # [T] int64
    largest,  # [T, ...] int32, as group_largest_kernel writes them from `tiles` tiles
    chosen,  # [T, LEVELS, k] int32: groups, from the largest on
    out,  # [T, k] int32
    k,
    width,
    tiles,
    stride_x,
    stride_l,
    RATIO: tl.constexpr,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    n = visible_of(visible, i_t, width)
    if n <= k:
        o_k = tl.arange(0, BLOCK_K)
        tl.store(out + i_t * k + o_k, tl.where(o_k < n, o_k, -1), mask=o_k < k)
        return
    p_x, p_chosen = x + i_t * stride_x, chosen + i_t * LEVELS * k
    p_level = largest + i_t * stride_l
    for i in tl.static_range(1, LEVELS):
        p_level += tiles * (TILE // RATIO**i)
    low = 0x7FFFFFFF
    for i in tl.static_range(LEVELS, -1, -1):
        if i == LEVELS:
            b_index = tl.arange(0, BLOCK)
            m_group = b_index >= 0
        else:
            tl.debug_barrier()  # other threads wrote what follows
            o_k = tl.arange(0, BLOCK_K)
            b_group = tl.load(p_chosen + o_k, mask=o_k < k, other=-1)[:, None]
            b_index, m_group = b_group * RATIO + tl.arange(0, RATIO), b_group >= 0
            p_chosen += k
        if i > 0:
            b_key = tl.load(p_level + b_index, mask=m_group & (b_index < tiles * (TILE // RATIO**i)), other=0)
            p_level -= tiles * (TILE // RATIO ** (i - 1))
        else:
            b_key = order_keys(tl.load(p_x + b_index, mask=m_group & (b_index < width), other=0.0))
        m_key = m_group & (b_index < tl.cdiv(n, RATIO**i))
        b_key, b_index = tl.ravel(tl.where(m_key, b_key, -0x80000000)), tl.ravel(b_index)
        p_out = p_chosen if i > 0 else out + i_t * k
        low = keep_largest(b_key, b_index, low, p_out, k, BLOCK_K)


def plan_levels(width: int, k: int) -> tuple[int, int]:
    """The ratio of the groups, and how many levels of them."""
    ratio, levels = min(RATIO, MOST // triton.next_power_of_2(k)), 0
    while -(-width // ratio**levels) > max(TOP, k * ratio):
        levels += 1
    return ratio, levels


def top_entries_triton(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    T, width = logits.shape
    assert k <= MOST // 2, "groups of one would be no groups"
    assert logits.dtype == torch.float32 and (width <= 1 or logits.stride(1) == 1) and visible.is_contiguous()
    out = torch.empty((T, k), dtype=torch.int32, device=logits.device)
    if not T or not k:
        return out
    ratio, levels = plan_levels(width, k)
    tile = max(TILE, ratio**levels)
    tiles = triton.cdiv(width, tile) if levels else 0
    largest = out.new_empty((T, sum(tiles * (tile // ratio**i) for i in range(1, levels + 1))))
    chosen = out.new_empty((T, levels * k))
    plan = dict(RATIO=ratio, LEVELS=levels, TILE=tile)
    if levels:
        group_largest_kernel[T, tiles](
            logits, visible, largest, k, width, logits.stride(0), largest.stride(0), **plan
        )  # fmt: skip
    block, block_k = max(128, triton.next_power_of_2(-(-width // ratio**levels))), triton.next_power_of_2(k)
    top_entries_kernel[(T,)](
        logits, visible, largest, chosen, out, k, width, tiles, logits.stride(0), largest.stride(0), **plan,
        BLOCK=block, BLOCK_K=block_k, num_warps=min(16, max(4, max(block, block_k * ratio) // (32 * HELD))),
        maxnreg=REGISTERS if T > MANY else None,
    )  # fmt: skip
    return out


def top_entries(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    """Indices [T, k] int32 of the k largest of logits [T, width] f32 before visible [T] int64; ascending, then -1."""
    form = top_entries_triton if use_triton(logits) and k <= MOST // 2 else top_entries_ref
    return form(logits, visible, k)
