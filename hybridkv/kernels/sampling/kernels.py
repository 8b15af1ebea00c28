"""The kernels of sample_rows over pieces of rows. launch.py says which are launched when; sample.py what they compute.

A row's numbers are read from its table (rows.py) by every program. What a program computes of a logit is cheap beside
reading it, so nothing is written that is as long as a row.
"""

from __future__ import annotations

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.sampling import rows
from hybridkv.kernels.sampling.noise import (
    FINE_SHIFT,
    MOST_NOISE,
    gumbel,
    gumbel_bound,
    random_row,
    random_words,
    weight_parts,
)
from hybridkv.kernels.topk import flip_negative, order_keys

_WORDS = tl.constexpr(len(rows.WORDS))
_ROW, _OUT, _FLAGS, _POSITION, _SEED, _RATE, _TOP_K, _TOP_P, _FARTHEST = (tl.constexpr(i) for i in range(9))
_REPETITION, _FREQUENCY, _PRESENCE, _SEEN, _BIAS, _FORBIDDEN, _OWN = (tl.constexpr(i) for i in range(9, 16))
DRAWS, COUNTED, BIASED, FORBIDS = map(tl.constexpr, (rows.DRAWS, rows.COUNTED, rows.BIASED, rows.FORBIDS))
OWN_LOGITS, SURVEYED, BY_K, BY_P = map(tl.constexpr, (rows.OWN_LOGITS, rows.SURVEYED, rows.TOP_K, rows.TOP_P))
LISTED, WHOLE, WEIGHED = map(tl.constexpr, (rows.LISTED, rows.WHOLE, rows.WEIGHED))
_MOST_NOISE = tl.constexpr(MOST_NOISE)
NOWHERE = tl.constexpr(2147483647)
COUNTS = ("n", "steps", "S", "P", "G", "i_r", "rounds")  # they follow from the batch: one kernel for all
MAX_STEPS = 200  # blocks of a piece: so many weights are added up in 32 bits (noise.py)


@triton.jit
def number(p_row, place: tl.constexpr):
    """A float64 of a row's table, as f32."""
    return tl.load(p_row + place).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def adjusted_logits(logits, stride, p_row, masks, flags, o_v, V):
    """x f32 of tokens o_v; -inf past the last."""
    m_v = o_v < V
    if (flags & OWN_LOGITS) != 0:
        p_own = tl.load(p_row + _OWN).to(tl.pointer_type(tl.float32))
        b_x = tl.load(p_own + o_v, mask=m_v, other=float("-inf"))
    else:
        b_x = tl.load(logits + tl.load(p_row + _ROW) * stride + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
    if (flags & FORBIDS) != 0:
        b_bits = tl.load(masks + tl.load(p_row + _FORBIDDEN) * 2 + (o_v >> 5), mask=m_v, other=0)
        b_x = tl.where(((b_bits >> (o_v & 31)) & 1) != 0, float("-inf"), b_x)
    if (flags & BIASED) != 0:
        b_x += tl.load(tl.load(p_row + _BIAS).to(tl.pointer_type(tl.float32)) + o_v, mask=m_v, other=0.0)
    if (flags & COUNTED) != 0:
        p_seen = tl.load(p_row + _SEEN).to(tl.pointer_type(tl.int32))
        b_bits = tl.load(p_seen + (o_v >> 5), mask=m_v, other=0)
        m_seen = m_v & (((b_bits >> (o_v & 31)) & 1) != 0)  # few are: only their counts are read
        b_count = tl.load(p_seen + (V + 31) // 32 + o_v, mask=m_seen, other=0)
        b_factor = tl.zeros_like(b_x) + number(p_row, _REPETITION)
        b_less = tl.where(b_x > 0, tl.div_rn(b_x, b_factor), b_x * b_factor)
        b_x = tl.where(m_seen, b_less, b_x)
        b_times = b_count >> 1
        b_x = b_x - number(p_row, _FREQUENCY) * b_times.to(tl.float32)
        b_x = b_x - number(p_row, _PRESENCE) * (b_times > 0).to(tl.float32)
    return b_x


@triton.jit
def best_of(logits, stride, p_row, flags, known, found, i_s):
    """The largest adjusted logit of a row, and its token."""
    if (flags & SURVEYED) != 0:
        best = tl.load(known + i_s * 4).to(tl.float32, bitcast=True)
        place = tl.load(known + i_s * 4 + 1)
    else:
        place = tl.load(found + tl.load(p_row + _OUT)).to(tl.int32)
        best = tl.load(logits + tl.load(p_row + _ROW) * stride + place).to(tl.float32)
    return best, place


@triton.jit
def is_broken(p_row, flags, known, found, n, i_s):
    """Whether no token can be chosen: by the logits as given, or as they were adjusted."""
    broken = tl.load(found + n + tl.load(p_row + _OUT)) != 0
    if (flags & SURVEYED) != 0:
        broken = broken | (tl.load(known + i_s * 4 + 3) != 0)
    return broken


@triton.jit
def distances(logits, stride, p_row, masks, flags, o_v, V, best):
    """Distances f32 from the best, 0 or more; inf past the last token. Not -0: they are also compared by their bits."""
    return tl.abs((best - adjusted_logits(logits, stride, p_row, masks, flags, o_v, V)) * number(p_row, _RATE))


@triton.jit
def distance_of(logits, stride, p_row, masks, flags, token, V, best):
    """The distance of one token."""
    return tl.max(distances(logits, stride, p_row, masks, flags, tl.arange(0, 1) + token, V, best), 0)


@triton.jit
def before_or_at(b_d, b_id, d, last):
    """Which tokens come in order before the one of distance d and id `last`, or are it."""
    return (b_d < d) | ((b_d == d) & (b_id <= last))


@triton.jit
def noise_of(seed, position, token):
    """The noise of one token."""
    return tl.max(gumbel(random_words(seed, position, tl.arange(0, 1) * 0 + token)), 0)


@triton.jit
def draw_block(b_d, seed, position, first, value, token, BV: tl.constexpr):
    """The better one of (value, token) and of the tokens from `first` on: of noise minus distance. Tokens that are left
    out have the distance inf.

    Noise is only computed where it may matter. It is at most MOST_NOISE; it is cheaply bounded for the smallest word of
    a block, whose noise is the largest, and then for each word.
    """
    closest = tl.min(b_d, 0)
    if closest <= _MOST_NOISE - value:
        b_word = random_row(seed, position, first, BV)
        if gumbel_bound(tl.min(b_word, 0)) - closest >= value:  # noqa: SIM102  # both sides of `and` are computed
            if tl.max(gumbel_bound(b_word) - b_d, 0) >= value:
                b_value = gumbel(b_word) - b_d
                top = tl.max(b_value, 0)
                place = tl.min(tl.where(b_value == top, first + tl.arange(0, BV), NOWHERE), 0)
                if (top > value) | ((top == value) & (place < token)):
                    value = top
                    token = place
    return value, token


@triton.jit
def note_drawn(p_drawn, value, token):
    """Raise what was drawn of a row to this: the larger value first, then the lower token."""
    order = (order_keys(value) ^ -0x80000000).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_max(p_drawn, (order << 31) | (token ^ NOWHERE).to(tl.int64), sem="relaxed")


@triton.jit
def drawn_of(p_drawn, logits, stride, p_row, masks, flags, V, best):
    """The token that was drawn of a row, and its distance."""
    token = (tl.load(p_drawn, cache_modifier=".cg") & NOWHERE).to(tl.int32) ^ NOWHERE
    return token, distance_of(logits, stride, p_row, masks, flags, token, V, best)


@triton.jit
def part_of(p_row, total):
    """The weight before which tokens pass top-p: the part p of all, rounded up."""
    part = tl.load(p_row + _TOP_P).to(tl.float64, bitcast=True) * total.to(tl.float64)
    limit = part.to(tl.int64)
    return limit + (limit.to(tl.float64) < part).to(tl.int64)


@triton.jit
def passes(p_row, sums, i_r, i_s, S):
    """Whether the token drawn in round i_r passes top-p."""
    before = tl.load(sums + (i_r * S + i_s) * 2 + 1, cache_modifier=".cg")
    return before < part_of(p_row, tl.load(sums + i_s * 2, cache_modifier=".cg"))


@triton.jit(do_not_specialize=COUNTS)
def survey_kernel(
    logits,  # [R, V] f32 or bf16
    table,  # [S, words] int64
    masks,  # int32: the bits that the table points to
    largest,  # [S, P] f32: the largest adjusted logit of a piece, or NaN
    place,  # [S, P] int32: where it is
    groups,  # [S, G] int32: keys of the largest of GROUP neighbours
    V,
    steps,  # blocks of a piece
    G,
    stride,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # whether any row asks for them
):
    i_p, i_s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_row = table + i_s * _WORDS
    flags = tl.load(p_row + _FLAGS)
    if (flags & SURVEYED) == 0:
        return
    best, at, broken = float("-inf"), NOWHERE, 0
    for step in range(steps):
        first = (i_p * steps + step) * BV
        if first < V:
            o_v = first + tl.arange(0, BV)
            b_x = adjusted_logits(logits, stride, p_row, masks, flags, o_v, V)
            broken = tl.maximum(broken, tl.max((b_x != b_x).to(tl.int32), 0))
            b_x = tl.where(b_x != b_x, float("-inf"), b_x)
            top = tl.max(b_x, 0)
            if top > best:
                at = tl.min(tl.where(b_x == top, o_v, NOWHERE), 0)
                best = top
            if GROUPS:
                b_key = tl.max(tl.reshape(order_keys(b_x), [BV // GROUP, GROUP]), 1)
                tl.store(groups + i_s * G + first // GROUP + tl.arange(0, BV // GROUP), b_key)
    o_out = i_s * tl.num_programs(0) + i_p
    tl.store(largest + o_out, tl.where(broken > 0, float("nan"), best))
    tl.store(place + o_out, at)


@triton.jit(do_not_specialize=COUNTS)
def bound_kernel(
    table,
    largest,  # [S, P], as survey_kernel wrote them
    place,
    groups,  # [S, G]
    known,  # [S, 4] int32: bits of the largest logit, its token, bits of the list's last distance, 1 if broken
    V,
    P,
    G,
    BP: tl.constexpr,
    BG: tl.constexpr,
):
    """The best of each row; and a distance within which its k best tokens lie, and few others."""
    i_s = tl.program_id(0).to(tl.int64)
    p_row = table + i_s * _WORDS
    flags = tl.load(p_row + _FLAGS)
    if (flags & SURVEYED) == 0:
        return
    o_p = tl.arange(0, BP)
    b_x = tl.load(largest + i_s * P + o_p, mask=o_p < P, other=float("-inf"))
    b_place = tl.load(place + i_s * P + o_p, mask=o_p < P, other=NOWHERE)
    nan = tl.max((b_x != b_x).to(tl.int32), 0) > 0
    b_x = tl.where(b_x != b_x, float("-inf"), b_x)
    best = tl.max(b_x, 0)
    token = tl.min(tl.where(b_x == best, b_place, NOWHERE), 0)
    broken = nan | (best == float("inf")) | (best == float("-inf"))
    tl.store(known + i_s * 4, best.to(tl.int32, bitcast=True))
    tl.store(known + i_s * 4 + 1, tl.minimum(token, V - 1))
    tl.store(known + i_s * 4 + 3, broken.to(tl.int32))
    if ((flags & LISTED) != 0) & (not broken):
        k = tl.load(p_row + _TOP_K).to(tl.int32)
        last = tl.full((), float("inf"), tl.float32)
        if k <= G:  # the k-th largest of the groups' largest: k tokens reach it, or more
            o_g = tl.arange(0, BG)
            b_key = tl.load(groups + i_s * G + o_g, mask=o_g < G, other=-0x80000000)
            low, high = -0x7FFFFFFF, 0x7FFFFFFF
            while low + 1 < high:
                middle = (low & high) + ((low ^ high) >> 1)
                enough = tl.sum((b_key >= middle).to(tl.int32), 0) >= k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            x = flip_negative(low).to(tl.float32, bitcast=True)
            last = (best - x) * number(p_row, _RATE)
        tl.store(known + i_s * 4 + 2, last.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=COUNTS)
def list_kernel(
    logits,
    table,
    masks,
    found,  # [2, n] int64: the best token of the logits as given, and 1 where they are broken
    known,
    count,  # [S] int32, zeros: entries of a row's list, also of those for which there is no room
    listed_d,  # [S, CAP] int32: bits of their distances
    listed_id,  # [S, CAP] int32
    groups,  # [S, G] int32, as survey_kernel wrote them
    V,
    n,
    steps,
    G,
    stride,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    CAP: tl.constexpr,
):
    """The tokens that reach the bound, in any order. Blocks whose largest logit does not are left out unread."""
    i_p, i_s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_row = table + i_s * _WORDS
    flags = tl.load(p_row + _FLAGS)
    if (flags & LISTED) == 0:
        return
    if is_broken(p_row, flags, known, found, n, i_s):
        return
    best = tl.load(known + i_s * 4).to(tl.float32, bitcast=True)
    last_d = tl.load(known + i_s * 4 + 2).to(tl.float32, bitcast=True)
    rate = number(p_row, _RATE)
    for step in range(steps):
        first = (i_p * steps + step) * BV
        closest = float("inf")
        if first < V:
            b_key = tl.load(groups + i_s * G + first // GROUP + tl.arange(0, BV // GROUP))
            closest = (best - flip_negative(tl.max(b_key, 0)).to(tl.float32, bitcast=True)) * rate
        if closest <= last_d:
            o_v = first + tl.arange(0, BV)
            b_d = distances(logits, stride, p_row, masks, flags, o_v, V, best)
            b_in = ((o_v < V) & (b_d <= last_d)).to(tl.int32)
            few = tl.sum(b_in, 0)
            if few > 0:
                b_to = tl.atomic_add(count + i_s, few, sem="relaxed") + tl.cumsum(b_in, 0) - 1
                m_to = (b_in > 0) & (b_to < CAP)
                tl.store(listed_d + i_s * CAP + b_to, b_d.to(tl.int32, bitcast=True), mask=m_to)
                tl.store(listed_id + i_s * CAP + b_to, o_v, mask=m_to)


@triton.jit
def draw_piece(
    logits, table, masks, found, known, drawn, V, n, steps, i_r, i_p, i_s, S, stride,
    BV: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    p_row = table + i_s * _WORDS
    flags = tl.load(p_row + _FLAGS)
    best, best_id = best_of(logits, stride, p_row, flags, known, found, i_s)
    last_d, last_id = number(p_row, _FARTHEST), V
    if AGAIN:
        last_id, last_d = drawn_of(drawn + (i_r - 1) * S + i_s, logits, stride, p_row, masks, flags, V, best)
        last_id -= 1
    seed, position = tl.load(p_row + _SEED), tl.load(p_row + _POSITION)
    top, at = noise_of(seed, position, best_id), best_id
    for step in range(steps):
        first = (i_p * steps + step) * BV
        if first < V:
            b_d = distances(logits, stride, p_row, masks, flags, first + tl.arange(0, BV), V, best)
            if AGAIN:
                m_pass = before_or_at(b_d, first + tl.arange(0, BV), last_d, last_id)
            else:
                m_pass = b_d <= last_d
            top, at = draw_block(tl.where(m_pass, b_d, float("inf")), seed, position, first, top, at, BV)
    note_drawn(drawn + i_r * S + i_s, top, at)


@triton.jit(do_not_specialize=COUNTS)
def draw_kernel(
    logits, table, masks, found, known,  # as list_kernel has them
    drawn,  # [rounds, S] int64, zeros: the token that was drawn (note_drawn)
    left,  # [rounds, 1 + S] int32, as weigh_kernel leaves them
    V, n, steps, i_r, S, stride,
    BV: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Round 0: the token drawn from the whole row, by temperature and min-p alone. A later round (AGAIN): of rows whose
    token did not pass top-p, the one drawn from all tokens before it."""
    i_p = tl.program_id(0)
    if AGAIN:
        for i in range(tl.program_id(1), tl.load(left + (i_r - 1) * (1 + S)), tl.num_programs(1)):
            i_s = tl.load(left + (i_r - 1) * (1 + S) + 1 + i).to(tl.int64)
            draw_piece(
                logits, table, masks, found, known, drawn, V, n, steps, i_r, i_p, i_s, S, stride, BV, AGAIN
            )  # fmt: skip
    else:
        i_s = tl.program_id(1).to(tl.int64)
        flags = tl.load(table + i_s * _WORDS + _FLAGS)
        if (flags & WHOLE) == 0:
            return
        if is_broken(table + i_s * _WORDS, flags, known, found, n, i_s):
            return
        draw_piece(logits, table, masks, found, known, drawn, V, n, steps, i_r, i_p, i_s, S, stride, BV, AGAIN)


@triton.jit
def weigh_piece(
    logits, table, masks, found, known, drawn, sums, came, left, V, steps, i_r, i_p, i_s, S, stride,
    BV: tl.constexpr,
):  # fmt: skip
    p_row = table + i_s * _WORDS
    flags = tl.load(p_row + _FLAGS)
    best, _ = best_of(logits, stride, p_row, flags, known, found, i_s)
    last_id, last_d = drawn_of(drawn + i_r * S + i_s, logits, stride, p_row, masks, flags, V, best)
    b_total, b_total_fine = tl.zeros([BV], tl.int32), tl.zeros([BV], tl.int32)
    b_before, b_before_fine = tl.zeros([BV], tl.int32), tl.zeros([BV], tl.int32)
    for step in range(steps):
        first = (i_p * steps + step) * BV
        if first < V:
            o_v = first + tl.arange(0, BV)
            b_d = distances(logits, stride, p_row, masks, flags, o_v, V, best)
            if tl.min(b_d, 0) < 29.0:  # others weigh nothing, as those past the last token do
                b_above, b_fine = weight_parts(b_d)
                m_before = before_or_at(b_d, o_v, last_d, last_id - 1)
                b_total += b_above
                b_total_fine += b_fine
                b_before += tl.where(m_before, b_above, 0)
                b_before_fine += tl.where(m_before, b_fine, 0)
    total = (tl.sum(b_total.to(tl.int64), 0) << FINE_SHIFT) + tl.sum(b_total_fine.to(tl.int64), 0)
    before = (tl.sum(b_before.to(tl.int64), 0) << FINE_SHIFT) + tl.sum(b_before_fine.to(tl.int64), 0)
    p_sum = sums + (i_r * S + i_s) * 2
    tl.atomic_add(p_sum, total, sem="relaxed")
    tl.atomic_add(p_sum + 1, before, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(came + i_r * S + i_s, 1, sem="acq_rel") == tl.num_programs(0) - 1:  # the row's last piece
        tl.debug_barrier()
        if not passes(p_row, sums, i_r, i_s, S):
            p_left = left + i_r * (1 + S)
            tl.store(p_left + 1 + tl.atomic_add(p_left, 1, sem="relaxed"), i_s.to(tl.int32))


@triton.jit(do_not_specialize=COUNTS)
def weigh_kernel(
    logits, table, masks, found, known, drawn,  # as draw_kernel has them
    sums,  # [rounds, S, 2] int64, zeros: the weight of all tokens, and of those before the one that was drawn
    came,  # [rounds, S] int32, zeros: pieces of a row that are weighed
    left,  # [rounds, 1 + S] int32, zeros: how many rows have a token that does not pass, and which, in any order
    V, n, steps, i_r, S, stride,
    BV: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0)
    if AGAIN:
        for i in range(tl.program_id(1), tl.load(left + (i_r - 1) * (1 + S)), tl.num_programs(1)):
            i_s = tl.load(left + (i_r - 1) * (1 + S) + 1 + i).to(tl.int64)
            weigh_piece(
                logits, table, masks, found, known, drawn, sums, came, left, V, steps, i_r, i_p, i_s, S, stride, BV
            )  # fmt: skip
    else:
        i_s = tl.program_id(1).to(tl.int64)
        flags = tl.load(table + i_s * _WORDS + _FLAGS)
        if (flags & WEIGHED) == 0:
            return
        if is_broken(table + i_s * _WORDS, flags, known, found, n, i_s):
            return
        weigh_piece(logits, table, masks, found, known, drawn, sums, came, left, V, steps, i_r, i_p, i_s, S, stride, BV)
