"""The Triton kernels of attention_prefill: attention of a block of query rows, and the joining of split keys.

The second is for the Hopper kernel (prefill_hopper.py), which may split the keys over programs.
"""

from __future__ import annotations

from hybridkv.kernels.attention.tile_kernel import attend_tile
from hybridkv.kernels.backend import tl, triton


@triton.jit(do_not_specialize=["stride_table_b", "stride_table_g", "stride_length_b", "stride_length_g"])
def attention_prefill_kernel(
    q,  # [T, H, D]
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    table,  # [B, G, N], with rows [slots, G, N]
    rows,  # [B] each request's row of the table, -1: padding
    lengths,  # [B, G]
    blocks,  # [blocks, 4] int32: request, its first query, its queries, the block's first row
    out,  # [T, H, D]
    lse,  # [R, H] f32
    lse_index,  # [T]
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
    FP8: tl.constexpr,
    DOT: tl.constexpr,
    LN_2: tl.constexpr = 0.6931471805599453,
):
    i_g = tl.program_id(1)
    p_block = blocks + tl.program_id(0).to(tl.int64) * 4
    i_b = tl.load(p_block).to(tl.int64)
    i_t = tl.load(p_block + 1).to(tl.int64)
    n = tl.load(p_block + 2)
    i_m = tl.load(p_block + 3)
    length = tl.load(lengths + i_b * stride_length_b + i_g * stride_length_g).to(tl.int32)
    i_table = i_b
    if rows is not None:
        i_table = tl.load(rows + i_b)
        length = tl.where(i_table >= 0, length, 0)

    o_row, o_d = i_m + tl.arange(0, BM), tl.arange(0, BD)
    o_t, o_h = o_row // GROUP, i_g * GROUP + o_row % GROUP  # row = query * GROUP + head
    m_q = (o_t[:, None] < n) & (o_d[None, :] < D)
    o_q = (i_t + o_t)[:, None] * stride_q_t + o_h[:, None] * stride_q_h + o_d[None, :]
    b_q = tl.load(q + o_q, mask=m_q, other=0).to(DOT)
    b_seen = tl.where(o_t < n, length - n + o_t + 1, 0)
    end = length - n + tl.minimum((i_m + BM - 1) // GROUP, n - 1) + 1  # what the block's last query sees
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    p_table = table + i_table * stride_table_b + i_g * stride_table_g
    for i_n in tl.range(0, end, BN):
        b_m, b_z, b_o = attend_tile(
            b_q, b_seen, b_m, b_z, b_o, i_n, end, p_table, k_pool, v_pool, k_scale, v_scale,
            stride_page, stride_entry, stride_scale, scale, P, D, BD, BN, FP8,
        )  # fmt: skip
    b_z = tl.where(b_z == 0, 1.0, b_z)  # a row that sees nothing gives zeros, and a sum of -inf
    b_o = b_o / b_z[:, None]
    o_out = ((i_t + o_t)[:, None] * tl.num_programs(1) * GROUP + o_h[:, None]) * D + o_d[None, :]
    tl.store(out + o_out, b_o.to(out.dtype.element_ty), mask=m_q)
    if lse is not None:
        b_at = tl.load(lse_index + i_t + o_t, mask=o_t < n, other=-1)
        tl.store(lse + b_at * tl.num_programs(1) * GROUP + o_h, (b_m + tl.log2(b_z)) * LN_2, mask=b_at >= 0)


@triton.jit(do_not_specialize=["N", "splits"])
def join_states_kernel(
    state_o,  # [splits, N, D] f32, N = T H
    state_m,  # [splits, N] f32, in powers of two
    state_z,
    out,  # [N, D]
    lse,  # [R, H] f32
    lse_index,  # [T]
    starts,  # [C + 1]: queries before the first prompt's are not touched
    N,
    H,
    splits,
    D: tl.constexpr,
    LN_2: tl.constexpr = 0.6931471805599453,
):
    i, N = tl.program_id(0).to(tl.int64), tl.cast(N, tl.int64)
    if starts is not None:  # noqa: SIM102 - decided when the kernel is compiled
        if i < tl.load(starts) * H:
            return
    o_d = tl.arange(0, D)
    top = float("-inf")
    for i_s in tl.range(0, splits):
        top = tl.maximum(top, tl.load(state_m + i_s * N + i))
    base = tl.where(top == float("-inf"), 0.0, top)
    b_o, z = tl.zeros([D], tl.float32), 0.0
    for i_s in tl.range(0, splits):
        i_row = i_s * N + i
        w = tl.exp2(tl.load(state_m + i_row) - base)
        z += tl.load(state_z + i_row) * w
        b_o += tl.load(state_o + i_row * D + o_d) * w
    z = tl.where(z == 0, 1.0, z)  # nothing seen
    tl.store(out + i * D + o_d, (b_o / z).to(out.dtype.element_ty))
    if lse is not None:
        at = tl.load(lse_index + i // H)
        tl.store(lse + at * H + i % H, (top + tl.log2(z)) * LN_2, mask=at >= 0)
