"""The Triton kernels of attention_exact: one split of a row's keys, and the joining of a row's splits."""

from __future__ import annotations

from hybridkv.kernels.attention.tile_kernel import attend_tile
from hybridkv.kernels.backend import tl, triton


@triton.jit
def split_keys(length, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys of one split of a stream: the smallest multiple of SPLIT that needs no more than MAX_SPLITS."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, SPLIT), MAX_SPLITS), 1) * SPLIT


@triton.jit(
    do_not_specialize=["stride_table_b", "stride_table_g", "stride_length_b", "stride_length_g", "splits"],
)
def attention_split_kernel(
    q,  # [B, H, D]
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    table,  # [B, G, N]
    lengths,  # [B, G]
    part,  # [B, H, splits, D] f32
    lse,  # [B, H, splits] f32, in powers of two
    scale,  # times log2(e)
    stride_q_b,
    stride_q_h,
    stride_page,
    stride_entry,
    stride_scale,
    stride_table_b,
    stride_table_g,
    stride_length_b,
    stride_length_g,
    splits,
    GROUP: tl.constexpr,  # query heads that share a KV head
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
):
    i_s, i_g, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + i_b * stride_length_b + i_g * stride_length_g).to(tl.int32)
    size = split_keys(length, SPLIT, MAX_SPLITS)
    begin = i_s * size
    if begin >= length:
        return
    end = tl.minimum(begin + size, length)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    m_q = (o_m[:, None] < GROUP) & (o_d[None, :] < D)
    o_h = i_g * GROUP + o_m
    b_q = tl.load(q + i_b * stride_q_b + o_h[:, None] * stride_q_h + o_d[None, :], mask=m_q, other=0).to(DOT)
    b_seen = tl.full([BM], 0, tl.int32) + end
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    p_table = table + i_b * stride_table_b + i_g * stride_table_g
    for i_n in tl.range(begin, end, BN):
        b_m, b_z, b_o = attend_tile(
            b_q, b_seen, b_m, b_z, b_o, i_n, end, p_table, k_pool, v_pool, k_scale, v_scale,
            stride_page, stride_entry, stride_scale, scale, P, D, BD, BN, FP8,
        )  # fmt: skip
    o_part = (i_b * tl.num_programs(1) * GROUP + o_h) * splits + i_s  # [BM]
    b_part = b_o / tl.where(b_z == 0, 1.0, b_z)[:, None]
    tl.store(part + o_part[:, None] * D + o_d[None, :], b_part, mask=m_q)
    tl.store(lse + o_part, b_m + tl.log2(b_z), mask=o_m < GROUP)


@triton.jit(do_not_specialize=["stride_length_b", "stride_length_g", "splits"])
def join_splits_kernel(
    part,  # [B, H, splits, D] f32
    lse,  # [B, H, splits] f32
    lengths,  # [B, G]
    out,  # [B, H, D]
    stride_length_b,
    stride_length_g,
    splits,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,  # splits read at once
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + i_b * stride_length_b + (i_h // GROUP) * stride_length_g).to(tl.int32)
    count = tl.cdiv(length, split_keys(length, SPLIT, MAX_SPLITS))
    i_row = i_b * tl.num_programs(0) + i_h
    o_d, o_all = tl.arange(0, BD), tl.arange(0, MAX_SPLITS)
    b_all = tl.load(lse + i_row * splits + o_all, mask=o_all < count, other=float("-inf"))
    b_top = tl.max(b_all, 0)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_z = tl.sum(tl.exp2(b_all - b_top), 0)
    b_o = tl.zeros([BD], tl.float32)
    for i_s in tl.range(0, count, BS):
        o_s = i_s + tl.arange(0, BS)
        m_s = o_s < count
        b_w = tl.exp2(tl.load(lse + i_row * splits + o_s, mask=m_s, other=float("-inf")) - b_top)
        p_part = part + (i_row * splits + o_s[:, None]) * D + o_d[None, :]
        b_part = tl.load(p_part, mask=m_s[:, None] & (o_d[None, :] < D), other=0)
        b_o += tl.sum(b_w[:, None] * b_part, 0)
    b_o = tl.where(b_z == 0, 0.0, b_o / tl.where(b_z == 0, 1.0, b_z))  # a stream without entries gives zeros
    tl.store(out + i_row * D + o_d, b_o.to(out.dtype.element_ty), mask=o_d < D)
