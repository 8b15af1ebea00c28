"""Both products of experts in codes (block_experts.py) where experts have few rows: a decode step of some requests. One
with more than a tile's reads its codes again for each.
"""

from __future__ import annotations

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.linear.block_rows import few_rows_tile
from hybridkv.kernels.moe.grouped import clamped_silu_mul, find_tile


@triton.jit
def few_up_kernel(
    x,  # [T, D]; of two codes in a byte [T, D / 2] pairs
    codes,  # of [E, 2 I, D]
    scales,
    order,  # [M]
    offsets,  # [E + 1]
    y,  # [M, I] in order of the experts
    E,
    D,
    I,
    K,  # pairs of a token
    limit,
    blocks_of_rows,  # rows of scales that an expert has
    FORM: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
):
    """A tile has BN gates, then their ups."""
    if FAST:
        tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(I, BN)
    expert, first, end = find_tile(offsets, tl.program_id(0) // blocks, E, BM, BE)
    if expert < E:
        o_m = first + tl.arange(0, BM)
        o_n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
        o_r = tl.arange(0, 2 * BN)
        # rows past the end are read again: no mask
        o_own = tl.minimum(tl.program_id(0) % blocks * BN + o_r % BN, I - 1) + o_r // BN * I
        m_m = o_m < end
        p_x = (tl.load(order + o_m, mask=m_m, other=0) // K).to(tl.int64) * (D * FORM[1] // 8)
        o_row = expert.to(tl.int64) * 2 * I + o_own
        o_scale = expert.to(tl.int64) * blocks_of_rows + o_own // FORM[0]
        b_both = few_rows_tile(x, p_x, m_m, codes, scales, o_row, o_scale, D, FORM, FAST, STAGES, 2 * BN, BM)
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_both, [2, BN, BM]), (1, 2, 0)))
        b_y = clamped_silu_mul(b_gate, b_up, limit)
        o_y = o_m.to(tl.int64)[None, :] * I + o_n[:, None]
        tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_m[None, :] & (o_n < I)[:, None])
    if FAST:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def few_down_kernel(
    x,  # [M, I] in order of the experts; of two codes in a byte [M, I / 2] pairs
    codes,  # of [E, D, I]
    scales,
    order,
    offsets,
    y,  # [M, D] in order of the pairs
    E,
    D,
    I,
    blocks_of_rows,
    FORM: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
):
    if FAST:
        tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(D, BN)
    expert, first, end = find_tile(offsets, tl.program_id(0) // blocks, E, BM, BE)
    if expert < E:
        o_m = first + tl.arange(0, BM)
        o_n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
        m_m, o_own = o_m < end, tl.minimum(o_n, D - 1)
        o_row = expert.to(tl.int64) * D + o_own
        o_scale = expert.to(tl.int64) * blocks_of_rows + o_own // FORM[0]
        b_y = few_rows_tile(
            x, o_m.to(tl.int64) * (I * FORM[1] // 8), m_m, codes, scales, o_row, o_scale, I,
            FORM, FAST, STAGES, BN, BM,
        )  # fmt: skip
        o_pair = tl.load(order + o_m, mask=m_m, other=0).to(tl.int64)
        o_y = o_pair[None, :] * D + o_n[:, None]
        tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_m[None, :] & (o_n < D)[:, None])
    if FAST:
        tl.extra.cuda.gdc_launch_dependents()
