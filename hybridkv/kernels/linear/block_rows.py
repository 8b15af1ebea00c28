"""The product of a few rows of x with rows of W in codes that have a scale for each block (block_scaled.py), for
kernels that are launched in a decode step: bytes alone are to decide their time.

A program multiplies tiles of 16 rows of W, or 32, all columns of them, G groups of columns at a time, where a group has
one scale. Each group is a product of its own on tensor cores, whose codes are upcast in registers, and its sum is
scaled in f32: a scale is used once for all rows of x and columns of the group. Two codes in a byte are two products, of
the even columns and of the odd ones, so no code has to be moved. Scales are read a step ahead: a load of so few bytes
is waited for otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.small_floats import e2m1_halves_tile
from hybridkv.kernels.linear.block_scaled import BlockScaled, e4m3_bf16_tile


def as_pairs(x: Tensor) -> Tensor:
    """Two numbers of bf16 as one int32, where rows may be seen so; else x, which no kernel for such codes gets."""
    return x.view(torch.int32) if x.shape[-1] % 2 == 0 else x


def form_of(weight: BlockScaled, columns: int) -> tuple[int, int, int, bool, bool, int]:
    """What kernels need to know of codes of which they take so many columns in a step: ROWS, BITS, COLUMNS, POWERS,
    WHOLE, G.
    """
    form, groups = weight.form, max(1, columns // weight.form.columns)
    whole = weight.shape[-1] % (groups * form.columns) == 0
    return form.rows, form.bits, form.columns, form.scale_bytes == 1, whole, groups


@triton.jit
def few_rows_tile(
    x,  # bf16; BITS = 4: as pairs in int32
    p_x,  # [BT] where rows of x begin, in numbers of x
    m_x,  # [BT]
    codes,
    scales,
    o_row,  # [BN] int64: rows of the codes
    o_scale,  # [BN] int64: rows of the scales
    K,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a group
    POWERS: tl.constexpr,  # scales are E8M0
    WHOLE: tl.constexpr,  # K is a multiple of G groups
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    G: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    """Sums over all columns [BN, BT] f32."""
    BYTES: tl.constexpr = COLUMNS * BITS // 8  # of a group
    groups = (K + COLUMNS - 1) // COLUMNS
    o_g, o_b = tl.arange(0, G), tl.arange(0, BYTES)
    o_byte = o_g[:, None] * BYTES + o_b[None, :]  # [G, BYTES]; also the numbers of x, or pairs of them
    p_code = codes + o_row[None, :, None] * (K * BITS // 8) + o_byte[:, None, :]  # [G, BN, BYTES]
    p_scale = scales + o_scale[None, :] * groups + o_g[:, None]  # [G, BN]
    p_in = x + p_x[None, None, :] + o_byte[:, :, None]  # [G, BYTES, BT]
    b_y = tl.zeros([G, BN, BT], tl.float32)
    if WHOLE:
        b_next = tl.load(p_scale)
    else:
        b_next = tl.load(p_scale, mask=(o_g < groups)[:, None], other=0)
    for i_g in tl.range(0, groups, G, num_stages=STAGES):
        if POWERS:  # 0 is 2^-127, which has no exponent bits; 255 is refused when files are read
            b_scale = tl.maximum(b_next.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
        else:
            b_scale = b_next
        if WHOLE:
            b_next = tl.load(p_scale + tl.where(i_g + G < groups, i_g + G, 0))
            b_code = tl.load(p_code + i_g * BYTES)
            b_x = tl.load(p_in + i_g * BYTES, mask=m_x[None, None, :], other=0)
        else:
            b_next = tl.load(p_scale + i_g + G, mask=(i_g + G + o_g < groups)[:, None], other=0)
            m_b = i_g * BYTES + o_byte < K * BITS // 8
            b_code = tl.load(p_code + i_g * BYTES, mask=m_b[:, None, :], other=0)
            b_x = tl.load(p_in + i_g * BYTES, mask=m_x[None, None, :] & m_b[:, :, None], other=0)
        if BITS == 8:
            b_sum = tl.dot(e4m3_bf16_tile(b_code, FAST), b_x)
        else:
            b_even, b_odd = e2m1_halves_tile(b_code, FAST)
            b_sum = tl.dot(b_even, (b_x & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True))
            b_sum = tl.dot(b_odd, (b_x >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), b_sum)
        b_y += b_sum * b_scale[:, :, None]
    return tl.sum(b_y, 0)
