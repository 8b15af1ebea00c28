"""select_shared: the entries that survive where streams share a budget. Nothing waits for the device.

Rows are streams; `groups` equal runs of neighbouring rows each share a budget: the heads of a layer, or everything. Of
its first `visible` entries a row keeps the `least` best ones, and `room` more entries of the group are the best of what
is left in any of its rows. Ties go to the lower row, then to the lower index. The entries from `visible` to the row's
length survive whatever their score. -0 equals 0. NaN is above +inf: the caller refuses rows that hold it.

What a row keeps is always the best of that row, so the search is for how many. Let c(t) be the entries of a row that
reach a bound t. A row keeps the larger of `least` and c(t), and the bound of a group is the highest t with

    sum over rows of max(0, c(t) - least) >= room

of whose equals only the first ones stay.

The kernel finds all bounds, of groups and of rows that keep no more than their `least`, eight bits at a time, in one
launch. Programs take tiles of rows. In each of six phases all of them work, and then meet:

    0        the counts are set to zero
    1 - 4    of the keys that begin as a bound does, how many have which next eight bits. The last program to come to a
             row adds these bits to the row's own bound, and to what its group would win with each of 256 next bounds;
             the last one of a group then adds them to the group's
    5        entries that reach their row's bound are written

Programs that wait for each other must all be resident: the launch is a cooperative one, which the driver starts whole
or not at all. Counts are whole numbers, so the order in which programs add to them changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.errors import HybridKVError
from hybridkv.kernels.backend import COMPILED, sm_count, tl, triton, use_triton
from hybridkv.kernels.counters import counters
from hybridkv.kernels.eviction.select import select_entries_ref
from hybridkv.kernels.eviction.select_sizes import DIGITS, SHARED_BINS, SHARED_STATE, shared_scratch
from hybridkv.kernels.topk import order_keys

BITS = 32  # of a key
TILE = 8192  # entries of a row that a program takes at once
ROWS = 32  # rows of a group whose counts a program takes at once
WARPS = 16
FEW = 16  # the share of a tile up to which keys are counted one by one
_BINS, _DIGITS, _STATE, _FEW = (tl.constexpr(x) for x in (SHARED_BINS, DIGITS, SHARED_STATE, FEW))


def order_keys_ref(scores: Tensor) -> Tensor:
    """f32 -> int32 in the same order, above -2^31 and below 2^31 - 1. NaN is the largest; -0 equals 0."""
    keys = (scores.contiguous() + 0.0).view(torch.int32)
    keys ^= (keys >> 31).bitwise_and_(0x7FFFFFFF)
    return keys.masked_fill_(scores.isnan(), 0x7FFFFFFE)


def shared_counts_ref(scores: Tensor, visible: Tensor, least: Tensor, groups: int, room: Tensor) -> Tensor:
    """How many of its first `visible` entries each row keeps, [R] int64."""
    R, L = scores.shape
    least = torch.minimum(least.clamp(min=0), visible)
    keys = order_keys_ref(scores)
    keys.masked_fill_(torch.arange(L, device=scores.device) >= visible[:, None], -(2**31))
    left = (visible - least).view(groups, -1).sum(1)
    room = torch.minimum(room.clamp(min=0), left)  # [groups]

    def reach(bound: Tensor) -> Tensor:
        """Entries of each row that reach its group's bound [groups] -> [R]."""
        at_least = keys.view(groups, R // groups, L) >= bound.view(-1, 1, 1).int()
        return at_least.sum(-1, dtype=torch.int32).view(-1)  # torch sums a copy in this dtype: a narrow one

    low = torch.full((groups,), -(2**31) + 1, device=scores.device)  # int64; every key reaches it
    high = low + (2**BITS - 2)  # no key does
    for _ in range(BITS):
        middle = (low + high) >> 1
        enough = (reach(middle) - least).clamp(min=0).view(groups, -1).sum(1) >= room
        low, high = low.where(~enough, middle), high.where(enough, middle)
    above = torch.maximum(reach(low + 1), least)
    tied = torch.maximum(reach(low), least) - above  # each would be one more
    above_all = (above - least).view(groups, -1).sum(1, keepdim=True)
    before = tied.view(groups, -1).cumsum(1) - tied.view(groups, -1)
    return above + torch.minimum((room[:, None] - above_all - before).clamp(min=0).view(-1), tied)


def select_shared_ref(
    scores: Tensor, visible: Tensor, least: Tensor, lengths: Tensor, groups: int, room: Tensor
) -> tuple[Tensor, Tensor]:
    kept = shared_counts_ref(scores, visible, least, groups, room)
    return select_entries_ref(scores, visible, kept, lengths, scores.shape[1]), kept + lengths - visible


@triton.jit
def add_counts(p_counts, b_digit, m_key, TILE: tl.constexpr):
    """Add how many keys of `m_key` have each digit."""
    found = tl.sum(m_key.to(tl.int32), 0)
    if found > TILE // _FEW:
        b_count = tl.histogram(b_digit, _BINS, mask=m_key)
        tl.atomic_add(p_counts + tl.arange(0, _BINS), b_count, mask=b_count > 0, sem="relaxed")
    elif found > 0:
        tl.atomic_add(p_counts + b_digit, 1, mask=m_key, sem="relaxed")


@triton.jit
def row_sizes(visible, least, o_row, m_row, L):
    """What rows show, and what they keep at the least."""
    b_seen = tl.load(visible + o_row, mask=m_row, other=0)
    b_seen = tl.minimum(tl.maximum(b_seen, 0), L).to(tl.int32)
    b_least = tl.load(least + o_row, mask=m_row, other=0)
    return b_seen, tl.minimum(tl.maximum(b_least, 0), b_seen).to(tl.int32)


@triton.jit
def at_digit(p_reach, digit, above, m_row):
    """Of rows how many keys lie above a digit, where `above` are above all of them."""
    b_above = tl.load(p_reach + digit + 1, mask=m_row & (digit < _BINS - 1), other=0, cache_modifier=".cg")
    return tl.where(digit == _BINS - 1, above, b_above)


@triton.jit
def narrow_row(visible, least, p_count, p_before, p_row, p_won, p_group, i_r, shift, L):
    """Eight more bits of a row's own bound, and what the row wins beyond `least` at each of its group's next bounds."""
    o_b = tl.arange(0, _BINS)
    _, few = row_sizes(visible, least, i_r, True, L)
    bound, digit = tl.load(p_group, cache_modifier=".cg"), tl.load(p_group + 1, cache_modifier=".cg")
    own, above = tl.load(p_row, cache_modifier=".cg"), tl.load(p_row + 1, cache_modifier=".cg")
    above_all = tl.load(p_row + 2, cache_modifier=".cg")
    if shift < 24:  # what the group's last digit left above its bound
        above_all = at_digit(p_before + _BINS, digit, above_all, True)
    b_count = tl.load(p_count + o_b, cache_modifier=".cg")
    b_all = b_count
    if own != bound:
        b_all = tl.load(p_count + _BINS + o_b, cache_modifier=".cg")
    b_reach = above + tl.cumsum(b_count, 0, reverse=True)
    own_digit = tl.sum((b_reach >= few).to(tl.int32), 0) - 1
    above += tl.sum(tl.where(o_b > own_digit, b_count, 0), 0)
    b_reach = above_all + tl.cumsum(b_all, 0, reverse=True)
    b_won = tl.maximum(b_reach - few, 0)
    tl.atomic_add(p_won + o_b, b_won, mask=b_won > 0, sem="relaxed")
    tl.debug_barrier()  # other threads read these
    tl.store(p_count + _BINS + o_b, b_reach)
    tl.store(p_row, own | (own_digit << shift))
    tl.store(p_row + 1, above)
    tl.store(p_row + 2, above_all)


@triton.jit
def narrow_group(
    visible, least, lengths, room, counts, p_count, p_state, p_won, p_group, i_g, rows, shift, L,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Eight more bits of a group's bound; with the last ones, what each of its rows keeps."""
    o_b = tl.arange(0, _BINS)
    bound, won_above = tl.load(p_group, cache_modifier=".cg"), tl.load(p_group + 2, cache_modifier=".cg")
    b_won = tl.load(p_won + o_b, cache_modifier=".cg")  # entries beyond `least` that reach a bound with these bits
    shared = tl.minimum(tl.maximum(tl.load(room + i_g), 0), tl.max(b_won, 0)).to(tl.int32)
    digit = tl.sum((b_won >= shared).to(tl.int32), 0) - 1
    won_above = tl.where(digit == _BINS - 1, won_above, tl.sum(tl.where(o_b == digit + 1, b_won, 0), 0))
    bound = bound | (digit << shift)
    tl.debug_barrier()  # other threads read these
    tl.store(p_group, bound)
    tl.store(p_group + 1, digit)
    tl.store(p_group + 2, won_above)
    if shift == 0:
        left = shared - won_above  # for the first of the equals
        for first in range(0, rows, ROWS):
            o_r = first + tl.arange(0, ROWS)
            m_row, o_row = o_r < rows, i_g * rows + o_r
            b_seen, b_least = row_sizes(visible, least, o_row, m_row, L)
            p_row, p_reach = p_state + o_row * _STATE, p_count + o_row * (2 * _BINS) + _BINS
            b_own = tl.load(p_row, mask=m_row, other=0, cache_modifier=".cg")
            b_above_own = tl.load(p_row + 1, mask=m_row, other=0, cache_modifier=".cg")
            b_above = tl.load(p_row + 2, mask=m_row, other=0, cache_modifier=".cg")
            b_above = at_digit(p_reach, digit, b_above, m_row)
            b_reach = tl.load(p_reach + digit, mask=m_row, other=0, cache_modifier=".cg")
            b_sure = tl.maximum(b_above, b_least)
            b_tied = tl.maximum(b_reach, b_least) - b_sure  # each would be one more
            b_before = tl.cumsum(b_tied, 0) - b_tied
            b_kept = b_sure + tl.minimum(tl.maximum(left - b_before, 0), b_tied)
            left -= tl.sum(b_tied, 0)
            m_group = b_reach >= b_least  # what it keeps reaches the group's bound
            b_length = tl.load(lengths + o_row, mask=m_row, other=0)
            tl.store(counts + o_row, b_kept + tl.maximum(b_length - b_seen, 0), mask=m_row)
            tl.store(p_row, tl.where(m_group, bound, b_own), mask=m_row)
            tl.store(p_row + 1, tl.where(m_group, b_kept - b_above, b_least - b_above_own), mask=m_row)
            tl.store(p_row + 3, b_kept, mask=m_row)


@triton.jit
def tile_keys(x, i_r, i_t, n, stride_x, TILE: tl.constexpr):
    """Numbers of the entries of a tile, which of them a row shows, and their keys."""
    o_n = i_t * TILE + tl.arange(0, TILE)
    m_n = o_n < n
    return o_n, m_n, order_keys(tl.load(x + i_r.to(tl.int64) * stride_x + o_n, mask=m_n, other=0.0))


@triton.jit
def meet(word, goal):
    """Wait until so many programs have come here; what they wrote before can then be read."""
    tl.debug_barrier()
    seen = tl.atomic_add(word, 1, sem="acq_rel") + 1
    while seen < goal:
        seen = tl.atomic_add(word, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rows", "groups", "tiles", "L", "size"])
def select_shared_kernel(
    x,  # [R, L] f32
    visible,  # [R] int64
    least,  # [R] int64
    lengths,  # [R] int64
    room,  # [groups] int64
    scratch,  # [size] int32
    word,  # int32: how many programs have met, 0 before and after
    out,  # [R, L] int32
    counts,  # [R] int64
    rows,  # of a group
    groups,
    tiles,  # of a row
    L,
    size,
    stride_x,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,  # phases; a launch that has them all is a cooperative one
    LAST: tl.constexpr,
):
    i_p, programs = tl.program_id(0), tl.num_programs(0)
    all_tiles, R = groups * rows * tiles, groups * rows
    p_wins = scratch + _DIGITS * R * (2 * _BINS)  # of a group, for each digit: what it wins with each next bound
    p_state = p_wins + _DIGITS * groups * _BINS  # of a row: bound, keys above it, keys above the group's, kept
    p_groups = p_state + _STATE * R  # of a group: bound, its last digit, entries won above it
    p_came = p_groups + _STATE * groups  # for each digit: tiles of a row that are counted, rows of a group
    begin, end = all_tiles * i_p // programs, all_tiles * (i_p + 1) // programs
    for phase in range(FIRST, LAST + 1):
        if phase == 0:
            for first in range(i_p * TILE, size, programs * TILE):
                o_s = first + tl.arange(0, TILE)
                tl.store(scratch + o_s, tl.zeros([TILE], tl.int32), mask=o_s < size)
        elif phase <= _DIGITS:
            shift = 8 * (_DIGITS - phase)
            p_count = scratch + (phase - 1) * R * (2 * _BINS)
            for tile in range(begin, end):
                i_r, i_t = tile // tiles, tile % tiles
                i_g = i_r // rows
                n = tl.minimum(tl.load(visible + i_r), L).to(tl.int32)
                if i_t * TILE < n:
                    own = tl.load(p_state + i_r * _STATE, cache_modifier=".cg")
                    bound = tl.load(p_groups + i_g * _STATE, cache_modifier=".cg")
                    _, m_n, b_key = tile_keys(x, i_r, i_t, n, stride_x, TILE)
                    b_key = b_key ^ -0x80000000  # digits in the order of the keys
                    b_digit = (b_key >> shift) & (_BINS - 1)
                    b_high = b_key & tl.where(phase == 1, 0, -256 << shift)  # what comes before the digit
                    add_counts(p_count + i_r * (2 * _BINS), b_digit, m_n & (b_high == own), TILE)
                    if own != bound:
                        add_counts(p_count + i_r * (2 * _BINS) + _BINS, b_digit, m_n & (b_high == bound), TILE)
                tl.debug_barrier()
                p_arrived = p_came + (phase - 1) * (R + groups)
                if tl.atomic_add(p_arrived + i_r, 1, sem="acq_rel") == tiles - 1:
                    tl.debug_barrier()
                    p_won = p_wins + ((phase - 1) * groups + i_g) * _BINS
                    p_row, p_group = p_state + i_r * _STATE, p_groups + i_g * _STATE
                    p_own = p_count + i_r * (2 * _BINS)
                    p_before = p_own - tl.where(phase == 1, 0, R * (2 * _BINS))  # of the digit before
                    narrow_row(visible, least, p_own, p_before, p_row, p_won, p_group, i_r, shift, L)
                    tl.debug_barrier()
                    if tl.atomic_add(p_arrived + R + i_g, 1, sem="acq_rel") == rows - 1:
                        tl.debug_barrier()
                        narrow_group(
                            visible, least, lengths, room, counts, p_count, p_state, p_won, p_group, i_g, rows, shift,
                            L, ROWS,
                        )  # fmt: skip
        else:
            above, equal = 0, 0  # the row's bound, in the tiles before
            for tile in range(begin, end):
                i_r, i_t = tile // tiles, tile % tiles
                n = tl.minimum(tl.load(visible + i_r), L).to(tl.int32)
                p_row = p_state + i_r * _STATE
                last = tl.load(p_row, cache_modifier=".cg") ^ -0x80000000
                rank = tl.load(p_row + 1, cache_modifier=".cg")  # equals that stay
                kept = tl.load(p_row + 3, cache_modifier=".cg")
                if i_t == 0:
                    above, equal = 0, 0
                elif tile == begin:  # another program writes the tiles before
                    for i in range(i_t):
                        _, m_n, b_key = tile_keys(x, i_r, i, n, stride_x, TILE)
                        above += tl.sum((m_n & (b_key > last)).to(tl.int32), 0)
                        equal += tl.sum((m_n & (b_key == last)).to(tl.int32), 0)
                o_n, m_n, b_key = tile_keys(x, i_r, i_t, n, stride_x, TILE)
                m_above, m_equal = m_n & (b_key > last), m_n & (b_key == last)
                b_both = (m_above.to(tl.int32) << 16) + m_equal.to(tl.int32)  # one sum for both
                b_before = tl.cumsum(b_both, 0) - b_both
                b_equal = equal + (b_before & 0xFFFF)
                p_out = out + i_r.to(tl.int64) * L
                b_place = above + (b_before >> 16) + tl.minimum(b_equal, rank)
                tl.store(p_out + b_place, o_n, mask=m_above | (m_equal & (b_equal < rank)))
                length = tl.load(lengths + i_r).to(tl.int32)
                m_rest = (o_n >= n) & (o_n < length)
                tl.store(p_out + kept + o_n - n, o_n, mask=m_rest)
                tl.store(
                    p_out + o_n,
                    tl.full([TILE], -1, tl.int32),
                    mask=(o_n >= kept + tl.maximum(length - n, 0)) & (o_n < L),
                )
                total = tl.sum(b_both, 0)
                above, equal = above + (total >> 16), equal + (total & 0xFFFF)
        if phase < LAST:
            meet(word, (phase + 1) * programs)
    if FIRST < LAST:
        tl.debug_barrier()
        if tl.atomic_add(word, 1, sem="acq_rel") == (LAST + 1) * programs - 1:  # nobody waits any more
            tl.atomic_xchg(word, 0, sem="relaxed")


def select_shared_triton(
    scores: Tensor, visible: Tensor, least: Tensor, lengths: Tensor, groups: int, room: Tensor, at_once: bool = COMPILED
) -> tuple[Tensor, Tensor]:
    """at_once: one launch for all phases; else one for each, as the interpreter needs it, whose programs take turns."""
    R, L = scores.shape
    assert scores.dtype == torch.float32 and (L <= 1 or scores.stride(1) == 1) and R * L < 2**31
    out = torch.empty((R, L), dtype=torch.int32, device=scores.device)
    counts = torch.empty(R, dtype=torch.int64, device=scores.device)
    if not R or not L:
        return out, counts.zero_()
    tile = min(TILE, triton.next_power_of_2(L))
    tiles, size = triton.cdiv(L, tile), shared_scratch(R, groups)
    word, scratch = counters(1, scores.device), out.new_empty(size)
    programs = min(R * tiles, sm_count(scores.device))
    phases = [(0, DIGITS + 1)] if at_once else [(i, i) for i in range(DIGITS + 2)]
    for first, last in phases:
        select_shared_kernel[(programs,)](
            scores, visible, least, lengths, room, scratch, word, out, counts, R // groups, groups, tiles, L, size,
            scores.stride(0), TILE=tile, ROWS=min(ROWS, triton.next_power_of_2(R // groups)), FIRST=first, LAST=last,
            num_warps=WARPS, launch_cooperative_grid=at_once,
        )  # fmt: skip
    return out, counts


def select_shared(
    scores: Tensor,  # [R, L] f32
    visible: Tensor,  # [R] int64
    least: Tensor,  # [R] int64
    lengths: Tensor,  # [R] int64
    groups: int,
    room: Tensor,  # [groups] int64
) -> tuple[Tensor, Tensor]:
    """Survivors [R, L] int32 of rows that hold `lengths` entries, ascending, then -1; and how many each has, [R] int64.

    A row keeps the `least` best of its first `visible`; a group's rows share `room` more; all that follow stay.
    """
    if groups < 1 or len(scores) % groups:
        raise HybridKVError(f"{len(scores)} streams cannot share budgets in {groups} equal groups")
    form = select_shared_triton if use_triton(scores) else select_shared_ref
    return form(scores, visible, least, lengths, groups, room)
