"""The Triton kernels of attention_exact: attention of a block of query rows over one split of the keys or over all of
them, split by split, and the joining of splits that were computed apart.

Splits are joined in ascending order, with the same operations in the same order wherever that happens (here, below and
in prefill_hopper.py): a split that a row does not see leaves its sums as they are. Products that are added are written
as fma, so that no compiler joins them here and not there.
"""

from __future__ import annotations

from hybridkv.kernels.attention.tile_kernel import attend_tile
from hybridkv.kernels.backend import tl, triton

UNKNOWN = ["stride_table_b", "stride_table_g", "stride_length_b", "stride_length_g"]


@triton.jit
def join_weights(b_m, s_m):
    """Largest scores so far and of a split -> of both, and by what the sums of either are multiplied."""
    b_top = tl.maximum(b_m, s_m)
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    return b_top, tl.exp2(b_m - b_base), tl.exp2(s_m - b_base)


@triton.jit(do_not_specialize=[*UNKNOWN, "T"])
def attention_exact_kernel(
    q,  # [T, H, D]
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    table,  # [slots, G, N]
    rows,  # [B] each request's row of the table, -1: padding
    lengths,  # [B, G]
    blocks,  # [blocks, 4] int32: request, its first query, its queries, the block's first row
    out,  # [T, H, D], if all splits are joined here
    state_o,  # [splits, T, H, D] f32, otherwise
    state_m,  # [splits, T, H] f32, in powers of two
    state_z,
    T,
    scale,  # times log2(e)
    stride_q_t,
    stride_q_h,
    stride_page,
    stride_entry,
    stride_scale,
    stride_table_b,
    stride_table_g,
    stride_length_b,
    stride_length_g,
    GROUP: tl.constexpr,  # query heads that share a KV head
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,  # keys
    WHOLE: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
):
    i_g = tl.program_id(1)
    p_block = blocks + tl.program_id(0).to(tl.int64) * 4
    i_b, i_t = tl.load(p_block).to(tl.int64), tl.load(p_block + 1).to(tl.int64)
    n, i_m = tl.load(p_block + 2), tl.load(p_block + 3)
    i_table = tl.load(rows + i_b)
    length = tl.load(lengths + i_b * stride_length_b + i_g * stride_length_g).to(tl.int32)
    length = tl.where(i_table >= 0, length, 0)
    o_row, o_d = i_m + tl.arange(0, BM), tl.arange(0, BD)
    o_t, o_h = o_row // GROUP, i_g * GROUP + o_row % GROUP  # row = query * GROUP + head
    end = length - n + tl.minimum((i_m + BM - 1) // GROUP, n - 1) + 1  # what the block's last query sees
    begin = tl.program_id(2) * SPLIT
    if not WHOLE and begin >= end:
        return
    m_q = (o_t[:, None] < n) & (o_d[None, :] < D)
    o_q = (i_t + o_t)[:, None] * stride_q_t + o_h[:, None] * stride_q_h + o_d[None, :]
    b_q = tl.load(q + o_q, mask=m_q, other=0).to(DOT)
    b_seen = tl.where(o_t < n, length - n + o_t + 1, 0)
    p_table = table + i_table * stride_table_b + i_g * stride_table_g
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    for i_s in tl.range(begin, end if WHOLE else begin + SPLIT, SPLIT):
        s_m = tl.full([BM], float("-inf"), tl.float32)
        s_z = tl.zeros([BM], tl.float32)
        s_o = tl.zeros([BM, BD], tl.float32)
        for i_n in tl.range(i_s, tl.minimum(i_s + SPLIT, end), BN):
            s_m, s_z, s_o = attend_tile(
                b_q, b_seen, s_m, s_z, s_o, i_n, end, p_table, k_pool, v_pool, k_scale, v_scale,
                stride_page, stride_entry, stride_scale, scale, P, D, BD, BN, FP8,
            )  # fmt: skip
        b_m, b_old, b_new = join_weights(b_m, s_m)
        b_z = tl.fma(b_z, b_old, s_z * b_new)
        b_o = tl.fma(b_o, b_old[:, None], s_o * b_new[:, None])
    i_row = (i_t + o_t) * tl.num_programs(1) * GROUP + o_h
    if WHOLE:
        b_o = b_o * (1 / tl.where(b_z == 0, 1.0, b_z))[:, None] + 0.0  # a row that sees nothing gives zeros
        tl.store(out + i_row[:, None] * D + o_d[None, :], b_o.to(out.dtype.element_ty), mask=m_q)
    else:
        i_row += tl.program_id(2).to(tl.int64) * T * tl.num_programs(1) * GROUP
        tl.store(state_o + i_row[:, None] * D + o_d[None, :], b_o, mask=m_q)
        tl.store(state_m + i_row, b_m, mask=o_t < n)
        tl.store(state_z + i_row, b_z, mask=o_t < n)


@triton.jit(do_not_specialize=["stride_length_b", "stride_length_g", "N", "H"])
def join_splits_kernel(
    state_o,  # [splits, N, D] f32, N = T H
    state_m,  # [splits, N] f32
    state_z,
    owners,  # [T, 2] int32: request of each query, and its queries from this one on
    rows,  # [B], -1: padding
    lengths,  # [B, G]
    out,  # [N, D]
    N,
    H,
    stride_length_b,
    stride_length_g,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,  # splits that are read before the first of them is joined
):
    i, N = tl.program_id(0).to(tl.int64), tl.cast(N, tl.int64)
    i_t, i_h = i // H, i % H
    i_b, to_end = tl.load(owners + 2 * i_t).to(tl.int64), tl.load(owners + 2 * i_t + 1)
    length = tl.load(lengths + i_b * stride_length_b + i_h // GROUP * stride_length_g).to(tl.int32)
    seen = tl.where(tl.load(rows + i_b) >= 0, length - to_end + 1, 0)
    count = tl.cdiv(seen, SPLIT)
    o_d = tl.arange(0, BD)
    b_m, b_z = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    b_o = tl.zeros([BD], tl.float32)
    for i_s in tl.range(0, count, AHEAD):
        for j in tl.static_range(AHEAD):
            o_s = (i_s + j) * N + i + tl.zeros([1], tl.int64)
            m_s = i_s + j < count
            s_m = tl.load(state_m + o_s, mask=m_s, other=float("-inf"))
            s_z = tl.load(state_z + o_s, mask=m_s, other=0.0)
            s_o = tl.load(state_o + o_s * D + o_d, mask=m_s & (o_d < D), other=0.0)
            b_m, b_old, b_new = join_weights(b_m, s_m)
            b_z = tl.fma(b_z, b_old, s_z * b_new)
            b_o = tl.fma(b_o, b_old, s_o * b_new)
    b_o = b_o * (1 / tl.where(b_z == 0, 1.0, b_z)) + 0.0
    tl.store(out + i * D + o_d, b_o.to(out.dtype.element_ty), mask=o_d < D)
