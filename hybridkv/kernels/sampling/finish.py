"""The last kernel of sample_rows: one program for each row chooses among what the others found, and takes note of it.

Most rows are decided by then, or by the short list of their best tokens. A row that is not (top-k above MAX_LISTED_K, a
list that was too short, tokens that did not pass top-p time after time) is searched by its program alone: slower, and
with the same result.
"""

from __future__ import annotations

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.sampling.kernels import (
    _FARTHEST,
    _FLAGS,
    _OUT,
    _POSITION,
    _SEED,
    _SEEN,
    _TOP_K,
    _WORDS,
    BY_K,
    BY_P,
    COUNTED,
    COUNTS,
    DRAWS,
    LISTED,
    NOWHERE,
    before_or_at,
    best_of,
    distance_of,
    distances,
    draw_block,
    drawn_of,
    is_broken,
    noise_of,
    number,
    part_of,
    passes,
)
from hybridkv.kernels.sampling.noise import gumbel, random_words, weights


@triton.jit
def last_of_equals(b_equal, b_id, room):
    """The id of the room-th of the tokens that are equal."""
    low, high = -1, 0x7FFFFFFF
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        enough = tl.sum((b_equal & (b_id <= middle)).to(tl.int32), 0) >= room
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def choose_listed(p_row, flags, p_d, p_id, size, CAP: tl.constexpr):
    """The token of a row from the list of its `size` best, at least k. Distances are compared by their bits."""
    o_n = tl.arange(0, CAP)
    b_bits = tl.load(p_d + o_n, mask=o_n < size, other=NOWHERE)  # behind inf
    b_id = tl.load(p_id + o_n, mask=o_n < size, other=NOWHERE)
    b_d = b_bits.to(tl.float32, bitcast=True)
    k = tl.load(p_row + _TOP_K).to(tl.int32)
    low, high = -1, 0x7F800000  # of inf
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        enough = tl.sum((b_bits <= middle).to(tl.int32), 0) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    room = k - tl.sum((b_bits < high).to(tl.int32), 0)
    m_pass = before_or_at(b_bits, b_id, high, last_of_equals(b_bits == high, b_id, room))
    if (flags & BY_P) != 0:
        b_weight = tl.where(m_pass, weights(tl.where(o_n < size, b_d, 0.0)), 0)
        limit = part_of(p_row, tl.sum(b_weight, 0))
        low, high = -1, 0x7F800000  # of inf
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            enough = tl.sum(tl.where(b_bits <= middle, b_weight, 0), 0) >= limit
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle)
        left = limit - tl.sum(tl.where(b_bits < high, b_weight, 0), 0)
        each = tl.max(tl.where(b_bits == high, b_weight, 0), 0)
        room = tl.minimum((left + each - 1) // each, CAP).to(tl.int32)
        equal = m_pass & (b_bits == high)
        m_pass = m_pass & before_or_at(b_bits, b_id, high, last_of_equals(equal, b_id, room))
    m_pass = m_pass & (b_d <= number(p_row, _FARTHEST))
    b_word = random_words(tl.load(p_row + _SEED), tl.load(p_row + _POSITION), b_id)
    b_value = tl.where(m_pass, gumbel(b_word) - b_d, float("-inf"))
    return tl.min(tl.where(m_pass & (b_value == tl.max(b_value, 0)), b_id, NOWHERE), 0)


@triton.jit
def search_row(logits, stride, p_row, masks, flags, V, best, best_id, last_d, last_id, BV: tl.constexpr):
    """The token of a row whose tokens before (last_d, last_id) may pass, by passes over all of it."""
    k_d, k_id = float("inf"), V
    if (flags & BY_K) != 0:
        k = tl.load(p_row + _TOP_K).to(tl.int32)
        low, high = -1, 0x7F800000  # of inf
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            reach = 0
            for first in range(0, V, BV):
                o_v = first + tl.arange(0, BV)
                b_d = distances(logits, stride, p_row, masks, flags, o_v, V, best)
                reach += tl.sum(((o_v < V) & (b_d.to(tl.int32, bitcast=True) <= middle)).to(tl.int32), 0)
            high = tl.where(reach >= k, middle, high)
            low = tl.where(reach >= k, low, middle)
        k_d = tl.cast(high, tl.float32, bitcast=True)
        closer = 0
        for first in range(0, V, BV):
            b_d = distances(logits, stride, p_row, masks, flags, first + tl.arange(0, BV), V, best)
            closer += tl.sum((b_d < k_d).to(tl.int32), 0)
        room = k - closer
        for first in range(0, V, BV):
            o_v = first + tl.arange(0, BV)
            b_d = distances(logits, stride, p_row, masks, flags, o_v, V, best)
            b_equal = ((o_v < V) & (b_d == k_d)).to(tl.int32)
            equals = tl.sum(b_equal, 0)
            if (room > 0) & (equals >= room):
                k_id = tl.min(tl.where((b_equal > 0) & (tl.cumsum(b_equal, 0) == room), o_v, NOWHERE), 0)
            room -= equals
    limit = tl.zeros((), tl.int64)
    if (flags & BY_P) != 0:
        total = tl.zeros((), tl.int64)
        for first in range(0, V, BV):
            o_v = first + tl.arange(0, BV)
            b_d = distances(logits, stride, p_row, masks, flags, o_v, V, best)
            m_all = (o_v < V) & before_or_at(b_d, o_v, k_d, k_id)
            total += tl.sum(tl.where(m_all, weights(b_d), 0), 0)
        limit = part_of(p_row, total)
    seed, position = tl.load(p_row + _SEED), tl.load(p_row + _POSITION)
    token, done = best_id, 0
    while done == 0:
        value, token = noise_of(seed, position, best_id), best_id
        for first in range(0, V, BV):
            o_v = first + tl.arange(0, BV)
            b_d = distances(logits, stride, p_row, masks, flags, o_v, V, best)
            m_pass = before_or_at(b_d, o_v, k_d, k_id) & before_or_at(b_d, o_v, last_d, last_id)
            value, token = draw_block(tl.where(m_pass, b_d, float("inf")), seed, position, first, value, token, BV)
        d = distance_of(logits, stride, p_row, masks, flags, token, V, best)
        done = 1
        if (flags & BY_P) != 0:
            before = tl.zeros((), tl.int64)
            for first in range(0, V, BV):
                o_v = first + tl.arange(0, BV)
                b_d = distances(logits, stride, p_row, masks, flags, o_v, V, best)
                m_before = (o_v < V) & before_or_at(b_d, o_v, d, token - 1)
                before += tl.sum(tl.where(m_before, weights(b_d), 0), 0)
            done = (before < limit).to(tl.int32)
        last_d, last_id = d, token - 1
    return token


@triton.jit(do_not_specialize=COUNTS)
def finish_kernel(
    logits, table, masks,
    found,  # [2, n] int64: replaced
    known, count, listed_d, listed_id, drawn, sums,  # as draw_kernel and weigh_kernel leave them
    V, n, S, rounds, stride,
    BV: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    i_s = tl.program_id(0).to(tl.int64)
    p_row = table + i_s * _WORDS
    flags = tl.load(p_row + _FLAGS)
    p_found = found + tl.load(p_row + _OUT)
    if is_broken(p_row, flags, known, found, n, i_s):
        if tl.load(p_found + n) == 0:
            tl.store(p_found + n, tl.full((), 2, tl.int64))
        return
    best, best_id = best_of(logits, stride, p_row, flags, known, found, i_s)
    chosen = best_id
    if (flags & DRAWS) != 0:
        chosen = -1
        last_d, last_id = number(p_row, _FARTHEST), V
        if (flags & LISTED) != 0:
            size = tl.load(count + i_s)
            if size <= CAP:
                chosen = choose_listed(p_row, flags, listed_d + i_s * CAP, listed_id + i_s * CAP, size, CAP)
        elif (flags & BY_K) == 0:
            for i_r in range(rounds):
                if chosen < 0:
                    token, d = drawn_of(drawn + i_r * S + i_s, logits, stride, p_row, masks, flags, V, best)
                    if ((flags & BY_P) == 0) | passes(p_row, sums, i_r, i_s, S):
                        chosen = token
                    else:
                        last_d, last_id = d, token - 1
        if chosen < 0:
            chosen = search_row(logits, stride, p_row, masks, flags, V, best, best_id, last_d, last_id, BV)
    tl.store(p_found, chosen.to(tl.int64))
    if (flags & COUNTED) != 0:
        p_seen = tl.load(p_row + _SEEN).to(tl.pointer_type(tl.int32))
        p_count = p_seen + (V + 31) // 32 + chosen
        tl.store(p_count, (tl.load(p_count) | 1) + 2)
        p_bits = p_seen + (chosen >> 5)
        tl.store(p_bits, tl.load(p_bits) | (tl.full((), 1, tl.int32) << (chosen & 31)))
