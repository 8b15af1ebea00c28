"""top_entries: the k largest of each row's visible logits, as ascending indices.

Exact: of equal logits the lower index wins, -0 equals 0, NaN is above +inf. A row that sees k entries or fewer gets
all of them, then -1. What lies past `visible` is ignored.

A long row is searched from the top of a tree. Its entries lie in groups of RATIO neighbours, groups in groups of RATIO,
and so on; each group knows its largest entry. The k largest entries lie in the k groups with the largest maxima, and
among groups that tie the first ones hold the entries that win the tie. So one launch reads the row and writes the
maxima of every level; the next keeps k groups (or a few more) of the top level, then of their parts, and at last k
entries:

    262,144 logits -> 65,536 largest of 4 -> 16,384 of 16 -> 4,096 of 64
    about 530 of 4,096 -> 560 of 1,024 x 4 -> 560 of 1,024 x 4 -> 512 of 1,024 x 4

A program holds what it chooses from in registers and finds the k-th largest by narrowing a bound. The bound of a level
also holds for the next, and it is so tight that all parts that reach it nearly always fit: only the first and the last
level search. All levels share one loop, because the time of code that runs once is the time to fetch it. The launches
follow from k and the rows' width. On Hopper the second starts beside the first and waits for its end.

The same kernel can take a number of its own for each row and append the entries past `visible` (eviction/select.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.overlap import can_overlap
from hybridkv.kernels.topk_levels import MAX_CHOICES, plan_levels, plan_tiles

HELD = 32  # entries of a thread in the second launch
FEW = 8  # rows: up to here a thread of the second launch has HELD_FEW entries
HELD_FEW = 16
GUESSES = 12  # guesses of a search before every other step halves the interval
_GUESSES = tl.constexpr(GUESSES)
MANY = 264  # rows: above, programs share a multiprocessor and a thread has REGISTERS registers
REGISTERS = 128


def top_entries_ref(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    T, width = logits.shape
    visible = visible[:, None]
    logits = logits.masked_fill(logits.isnan(), torch.nan)  # without signs: a sort on CUDA would order NaN by them
    hidden = torch.arange(width, device=logits.device) >= visible
    # stable: hidden entries come after visible ones of -inf; NaN counts as the largest
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
def rough_log2(count):
    """log2 of a number above 0, plus 127, off by at most 0.01. It is short: every step of a search waits for it."""
    bits = count.to(tl.float32).to(tl.int32, bitcast=True)
    part = (bits & 0x7FFFFF).to(tl.float32) * 1.1920929e-07  # 2^-23
    return bits.to(tl.float32) * 1.1920929e-07 + 0.344 * part * (1 - part)


@triton.jit
def kth_largest(b_key, low, high, count, k, max_kept):
    """A bound that k keys or more reach; how many reach it; how many are above it, where more than `max_kept` reach it.

    More than `max_kept` reach it only if it is the k-th largest key itself and has equals. low: a bound that `count`
    keys reach, k or more; high: one that none reaches.
    """
    size, over, tries, side = rough_log2(k), 0, 0, 0
    # how far either bound's count is from k, in powers of two; none counts as a half
    below, above = rough_log2(count) - size, size - 126.0
    while (low + 1 < high) & (count > max_kept):
        # Guessing as if the count fell exponentially is quick on ordinary numbers; a bound that stays where it is twice
        # in a row counts as half as far (the Illinois method). From step GUESSES on every other step takes the middle,
        # which ends the search whatever the keys are. One away from k there is nothing to guess.
        middle = (low & high) + ((low ^ high) >> 1)
        low_value = flip_negative(low).to(tl.float32, bitcast=True)
        high_value = flip_negative(high).to(tl.float32, bitcast=True)
        part = below / (below + above)
        guess = flip_negative((low_value * (1 - part) + high_value * part).to(tl.int32, bitcast=True))
        middle = tl.where(((tries < _GUESSES) | (tries % 2 == 1)) & (guess > low) & (guess < high), guess, middle)
        if count == k + 1:  # the smallest goes, if it has no equals
            low = tl.min(tl.where(b_key >= low, b_key, 0x7FFFFFFF))
            middle = low + 1
        elif over == k - 1:  # the next one comes, with its equals
            middle = tl.max(tl.where(b_key < high, b_key, -0x80000000))
            high = middle + 1
        reach = tl.sum((b_key >= middle).to(tl.int32))
        away = rough_log2(tl.maximum(reach.to(tl.float32), 0.5)) - size
        enough = reach >= k
        below = tl.where(enough, away, tl.where(side < 0, below * 0.5, below))
        above = tl.where(enough, tl.where(side > 0, above * 0.5, above), -away)
        count = tl.where(enough, reach, count)
        over = tl.where(enough, over, reach)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        side = tl.where(enough, 1, -1)
        tries += 1
    return low, count, over


@triton.jit
def before_each(b_x, ROWS: tl.constexpr):
    """[rows, columns] -> for each the sum of all that come before it. Row i * rows / ROWS + j is the (j * ROWS + i)-th.

    A thread that holds row j of each i adds up its own rows, which are neighbours in that order, and passes on one sum.
    """
    b_row = tl.reshape(tl.sum(b_x, 1), [ROWS, b_x.shape[0] // ROWS])
    b_own = tl.sum(b_row, 0)
    b_row = tl.cumsum(b_row, 0) - b_row + (tl.cumsum(b_own, 0) - b_own)[None, :]
    return tl.reshape(b_row, [b_x.shape[0], 1]) + tl.cumsum(b_x, 1) - b_x


@triton.jit
def keep_largest(b_key, b_index, low, high, p_out, n, k, max_kept, ROWS: tl.constexpr):
    """Write the indices of the k largest keys, in their order, to p_out; or of all that reach a bound, if those are no
    more than `max_kept`.

    b_key [rows, columns]: n keys above -2^31, the rest is padding. low: a bound that k of them reach if there were k
    groups or more; high: one that none reaches. Returns such a bound for the next level, and how many were kept.
    """
    kept = tl.minimum(n, k)
    count = tl.sum((b_key >= low).to(tl.int32))
    if count < kept:  # fewer groups than k
        low = -0x7F800001  # the key of -inf
        count = n
    low, count, over = kth_largest(b_key, low, high, count, kept, max_kept)
    if count <= max_kept:  # all that reach the bound
        kept = count
        b_before = before_each((b_key >= low).to(tl.int32), ROWS)
        tl.store(p_out + b_before, b_index, mask=b_key >= low)
    else:
        room = kept - over  # for the first of the equals
        b_both = ((b_key > low).to(tl.int32) << 16) + (b_key == low).to(tl.int32)
        b_before = before_each(b_both, ROWS)  # of either: one sum for both
        b_equals = b_before & 0xFFFF
        m_kept = (b_key > low) | ((b_key == low) & (b_equals < room))
        tl.store(p_out + (b_before >> 16) + tl.minimum(b_equals, room), b_index, mask=m_kept)
    return low, kept


@triton.jit
def choose_entries(
    p_x, p_level, p_chosen, p_out, n, k, width, tiles,
    RATIO: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Indices of the k largest of a row's first n > k entries to p_out. The pointers are the row's own: of its entries,
    of the keys that group_largest_kernel wrote from `tiles` tiles, of room for KEPT groups."""
    size, groups = 1, tiles * TILE
    for _ in tl.static_range(LEVELS):
        size *= RATIO
        groups = groups // RATIO
        p_level += groups  # behind the last level
    o_k = tl.arange(0, KEPT)
    o_k = o_k % (KEPT // ROWS) * ROWS + o_k // (KEPT // ROWS)  # as before_each takes them
    b_group, low, high = o_k, 0, 0
    for i in tl.range(LEVELS, -1, -1):
        seen = tl.cdiv(n, size)
        b_index = b_group[:, None] * RATIO + tl.arange(0, RATIO)
        m_group = ((b_group >= 0) & (b_group * RATIO < seen))[:, None]  # by groups: loads stay wide
        if i > 0:
            p_level -= groups
            b_key = tl.load(p_level + b_index, mask=m_group, other=-0x80000000)  # as is a key past the last
        else:
            b_x = tl.load(p_x + b_index, mask=m_group & (b_index < width), other=0.0)
            b_key = tl.where(m_group & (b_index < n), order_keys(b_x), -0x80000000)
        if i == LEVELS:
            low, high = tl.min(tl.where(b_key > -0x80000000, b_key, 0x7FFFFFFF)), tl.max(b_key) + 1
        p_kept, max_kept = p_out, k
        if i > 0:  # of the first level few more: its bound is for all
            p_kept, max_kept = p_chosen, tl.where(i == LEVELS, k + (KEPT - k) // 4, KEPT)
        low, kept = keep_largest(b_key, b_index, low, high, p_kept, seen, k, max_kept, ROWS)
        if i > 0:
            tl.debug_barrier()  # other threads wrote what follows
            b_group = tl.load(p_chosen + o_k, mask=o_k < kept, other=-1)
            tl.debug_barrier()
            size, groups = size // RATIO, groups * RATIO


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
    OVERLAP: tl.constexpr,  # top_entries_kernel is launched beside this one
    EARLY: tl.constexpr,  # and this one beside the kernel before it
):
    if EARLY:
        tl.extra.cuda.gdc_wait()  # first: top_entries_kernel reads `visible` at once
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
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
    counts,  # [T] int64, or None: k
    lengths,  # [T] int64, or None: nothing follows
    largest,  # [T, ...] int32, as group_largest_kernel writes them from `tiles` tiles
    chosen,  # [T, KEPT] int32: groups
    out,  # [T, k] int32
    k,
    width,
    tiles,
    stride_x,
    stride_l,
    RATIO: tl.constexpr,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    n = visible_of(visible, i_t, width)
    length = n if lengths is None else tl.load(lengths + i_t).to(tl.int32)
    count = tl.minimum(k if counts is None else tl.load(counts + i_t), n).to(tl.int32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    p_out, o_k = out + i_t * k, tl.arange(0, KEPT)
    b_rest = n + o_k - count
    tl.store(p_out + o_k, tl.where(b_rest < length, b_rest, -1), mask=(o_k >= count) & (o_k < k))
    if count == n:
        tl.store(p_out + o_k, o_k, mask=o_k < n)
    elif count > 0:
        choose_entries(
            x + i_t * stride_x, largest + i_t * stride_l, chosen + i_t * KEPT, p_out, n, count, width, tiles,
            RATIO, LEVELS, TILE, KEPT, ROWS,
        )  # fmt: skip


def top_entries_triton(
    logits: Tensor, visible: Tensor, k: int, counts: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """[T, k] int32, as top_entries. counts [T] int64: how many of each row, instead of k, are chosen.

    lengths [T] int64: the entries from `visible` to there follow the chosen ones.
    """
    T, width = logits.shape
    assert k <= MAX_CHOICES // 2, "groups of one would be no groups"
    assert logits.dtype == torch.float32 and (width <= 1 or logits.stride(1) == 1) and visible.is_contiguous()
    out = torch.empty((T, k), dtype=torch.int32, device=logits.device)
    if not T or not k:
        return out
    kept, ratio, levels = plan_levels(width, k)
    tile, tiles, groups = plan_tiles(width, ratio, levels)
    largest = out.new_empty((T, groups))
    chosen = out.new_empty((T, kept if levels else 0))
    overlap = levels > 0 and can_overlap(logits, None)  # the second launch
    early = overlap and can_overlap(logits)
    plan = dict(RATIO=ratio, LEVELS=levels, TILE=tile, OVERLAP=overlap, EARLY=early)
    if levels:
        group_largest_kernel[T, tiles](
            logits, visible, largest, k if counts is None else 0, width, logits.stride(0), largest.stride(0), **plan,
            launch_pdl=early,
        )  # fmt: skip
    warps = min(16, max(4, kept * ratio // (32 * (HELD_FEW if T <= FEW else HELD))))
    rows = max(1, kept // (32 * warps)) if T <= FEW else 1  # with many rows wide loads are worth more
    top_entries_kernel[(T,)](
        logits, visible, counts, lengths, largest, chosen, out, k, width, tiles, logits.stride(0), largest.stride(0),
        **plan, KEPT=kept, ROWS=rows, launch_pdl=overlap,
        maxnreg=REGISTERS if T > MANY else None, num_warps=warps,
    )  # fmt: skip
    return out


def top_entries(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    """Indices [T, k] int32 of the k largest of logits [T, width] f32 before visible [T] int64; ascending, then -1."""
    form = top_entries_triton if use_triton(logits) and k <= MAX_CHOICES // 2 else top_entries_ref
    return form(logits, visible, k)
