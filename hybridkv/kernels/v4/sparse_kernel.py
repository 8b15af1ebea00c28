"""The Triton kernels of attention_sparse, for any width, dtype and GPU.

A tile of keys lies in the ring, which is one page of R rows, or in pages of P entries: one loop walks both.
"""

from __future__ import annotations

from hybridkv.kernels.attention.tile import LOG2_E
from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.page_format import load_rows

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def find_keys(
    i_n,  # the tile's first key
    first,  # of the entries' tiles
    count_w,  # keys of the window
    count_e,  # columns of chosen, or all that is visible
    visible,
    position,
    p_table,  # the request's row of the table
    p_chosen,  # the token's row of chosen
    R: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Page (0: the ring's; -1: no key) and row in it of a tile's keys, each [BN] int32."""
    o_n = i_n + tl.arange(0, BN)
    b_page = tl.where(o_n < count_w, 0, -1)
    b_row = tl.where(o_n < count_w, position - o_n, 0).to(tl.uint32) % R
    if ENTRIES:
        o_e = o_n - first
        m_e = (o_e >= 0) & (o_e < count_e)
        b_e = tl.load(p_chosen + o_e, mask=m_e, other=-1) if CHOSEN else o_e
        b_e = b_e.to(tl.uint32)  # what is negative is past all that is visible
        m_e = m_e & (b_e < visible.to(tl.uint32))
        b_held = tl.load(p_table + b_e // P, mask=m_e, other=-1)
        b_page = tl.where(i_n < first, b_page, b_held)
        b_row = tl.where(i_n < first, b_row, b_e % P)
    return b_page, b_row.to(tl.int32)


@triton.jit
def derotate_tile(b_o, p_cos, p_sin, D: tl.constexpr, ROPE: tl.constexpr):
    """b_o [rows, BD] f32, rotated back by the angles of one token."""
    PAIRS: tl.constexpr = b_o.shape[1] // 2
    o_p = tl.arange(0, PAIRS) - (D - ROPE) // 2
    m_p = (o_p >= 0) & (o_p < ROPE // 2)
    b_cos = tl.load(p_cos + o_p, mask=m_p, other=1.0)
    b_sin = tl.load(p_sin + o_p, mask=m_p, other=0.0)
    b_even, b_odd = tl.split(tl.reshape(b_o, [b_o.shape[0], PAIRS, 2]))
    return tl.reshape(tl.join(b_even * b_cos + b_odd * b_sin, b_odd * b_cos - b_even * b_sin), b_o.shape)


@triton.jit(do_not_specialize=["H", "K", "N", "splits"])
def attention_sparse_kernel(
    q,  # [T, H, D]
    ring,  # [S, R, width]
    pages,  # [N, P, width]
    table,  # [slots, N]
    chosen,  # [T, K]
    rows,  # [B]
    slots,  # [B]
    owner,  # [T]
    positions,  # [T]
    sink,  # [H]
    cos,  # [T, ROPE / 2]
    sin,
    out,  # [T, H, D] where there is one split
    part,  # [T, H, splits, D] f32, else
    lse,  # [T, H, splits] f32, in powers of two
    scale,  # times log2(e)
    stride_q_t,
    stride_q_h,
    stride_table,
    stride_chosen,
    H,
    K,
    N,
    splits,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,  # of a row of values, and
    SCALE: tl.constexpr,  # of a row of scales: elements of ring and pages
    FORMAT: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHOSEN: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
):
    blocks = tl.cdiv(H, BH)
    i_t = (tl.program_id(0) // blocks).to(tl.int64)
    i_s = tl.program_id(1)
    o_h = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    o_d = tl.arange(0, BD)
    m_o = (o_h < H)[:, None] & (o_d < D)[None, :]
    i_b = tl.load(owner + i_t)
    i_slot, i_ring = tl.load(slots + i_b), tl.load(rows + i_b)
    p_out = out + (i_t * H + o_h)[:, None] * D + o_d[None, :]
    if (i_slot < 0) | (i_ring < 0):
        if not SPLIT:
            tl.store(p_out, tl.zeros([BH, BD], out.dtype.element_ty), mask=m_o)
        return
    position = tl.load(positions + i_t).to(tl.int32)
    count_w = tl.minimum(position + 1, WINDOW)
    first = tl.cdiv(count_w, BN) * BN
    visible, count_e = 0, 0
    if ENTRIES:
        visible = tl.minimum((position + 1) // RATIO, N * P)
        count_e = K if CHOSEN else visible
    count = first + count_e
    each = tl.cdiv(tl.cdiv(count, BN), splits) * BN
    begin = i_s * each
    end = tl.minimum(begin + each, count)
    if SPLIT and begin >= end:
        tl.store(lse + (i_t * H + o_h) * splits + i_s, tl.full([BH], float("-inf"), tl.float32), mask=o_h < H)
        return
    p_ring = ring + i_ring * (R * (VALUE + SCALE))
    p_table = table + i_slot * stride_table if ENTRIES else table
    p_chosen = chosen + i_t * stride_chosen if CHOSEN else chosen

    b_q = tl.load(q + i_t * stride_q_t + o_h[:, None] * stride_q_h + o_d[None, :], mask=m_o, other=0).to(DOT)
    b_m = tl.full([BH], float("-inf"), tl.float32)
    b_z = tl.zeros([BH], tl.float32)
    b_o = tl.zeros([BH, BD], tl.float32)
    for i_n in tl.range(begin, end, BN):
        b_page, b_row = find_keys(
            i_n, first, count_w, count_e, visible, position, p_table, p_chosen, R, P, BN, ENTRIES, CHOSEN
        )
        m_k = b_page >= 0
        p_held = tl.where(i_n < first, p_ring, pages) if ENTRIES else p_ring
        held = tl.where(i_n < first, R, P)  # rows of a page
        b_k = load_rows(p_held, b_page.to(tl.int64), b_row, m_k, o_d, held, D, ROPE, FORMAT).to(DOT)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [BH, BN]
        b_s = tl.where(m_k[None, :], b_s, float("-inf"))
        b_top = tl.maximum(b_m, tl.max(b_s, 1))
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)  # nothing seen yet: weights 0, not NaN
        b_p = tl.exp2(b_s - b_base[:, None])
        b_keep = tl.exp2(b_m - b_base)
        b_z = b_z * b_keep + tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(DOT), b_k, b_o * b_keep[:, None], input_precision="ieee")
        b_m = b_top

    if SPLIT:
        o_part = (i_t * H + o_h) * splits + i_s
        b_z = tl.where(b_z == 0, 1.0, b_z)  # no key in these tiles: zeros, of weight 2^-inf
        tl.store(part + o_part[:, None] * D + o_d[None, :], b_o / b_z[:, None], mask=m_o)
        tl.store(lse + o_part, b_m + tl.log2(b_z), mask=o_h < H)
    else:
        b_sink = tl.load(sink + o_h, mask=o_h < H, other=0.0).to(tl.float32) * _LOG2_E
        b_top = tl.maximum(b_m, b_sink)
        b_keep = tl.exp2(b_m - b_top)
        b_o = b_o * (b_keep / (b_z * b_keep + tl.exp2(b_sink - b_top)))[:, None]
        b_o = derotate_tile(b_o, cos + i_t * (ROPE // 2), sin + i_t * (ROPE // 2), D, ROPE)
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=m_o)


@triton.jit(do_not_specialize=["H", "splits"])
def join_sparse_kernel(
    part,  # [T, H, splits, D] f32
    lse,  # [T, H, splits] f32
    rows,  # [B]
    slots,  # [B]
    owner,  # [T]
    sink,  # [H]
    cos,  # [T, ROPE / 2]
    sin,
    out,  # [T, H, D]
    H,
    splits,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROPE: tl.constexpr,
    BS: tl.constexpr,  # splits read at once
    OVERLAP: tl.constexpr,  # launched beside the kernel that writes the parts, for whose end it waits
    EARLY: tl.constexpr,  # the next kernel may come at once
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    i_row = tl.program_id(0).to(tl.int64)
    i_t, i_h = i_row // H, i_row % H
    o_d = tl.arange(0, BD)
    p_out = out + i_row * D + o_d[None, :]
    i_b = tl.load(owner + i_t)
    i_slot, i_ring = tl.load(slots + i_b), tl.load(rows + i_b)
    b_m = tl.load(sink + i_h).to(tl.float32) * _LOG2_E
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # what was read so far was there before that kernel began
    if (i_slot < 0) | (i_ring < 0):
        tl.store(p_out, tl.zeros([1, BD], out.dtype.element_ty), mask=(o_d < D)[None, :])
        return
    b_z = tl.full([], 1.0, tl.float32)  # the sink, which has no value
    b_o = tl.zeros([BD], tl.float32)
    for i_s in tl.range(0, splits, BS):
        o_s = i_row * splits + i_s + tl.arange(0, BS)
        b_lse = tl.load(lse + o_s, mask=i_s + tl.arange(0, BS) < splits, other=float("-inf"))
        b_top = tl.maximum(b_m, tl.max(b_lse, 0))  # the first split has the token's own row: not -inf
        b_keep = tl.exp2(b_m - b_top)
        b_w = tl.exp2(b_lse - b_top)
        m_s = (b_lse != float("-inf"))[:, None] & (o_d < D)[None, :]
        b_part = tl.load(part + o_s[:, None] * D + o_d[None, :], mask=m_s, other=0.0)
        b_z = b_z * b_keep + tl.sum(b_w, 0)
        b_o = b_o * b_keep + tl.sum(b_w[:, None] * b_part, 0)
        b_m = b_top
    b_o = derotate_tile((b_o / b_z)[None, :], cos + i_t * (ROPE // 2), sin + i_t * (ROPE // 2), D, ROPE)
    tl.store(p_out, b_o.to(out.dtype.element_ty), mask=(o_d < D)[None, :])
