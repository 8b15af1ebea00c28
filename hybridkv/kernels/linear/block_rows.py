"""The product of a few rows of x with rows of W in codes that have a scale for each block (block_scaled.py), for
kernels that are launched in a decode step: bytes alone are to decide their time.

A program multiplies a tile of rows of W, all columns of them, G groups of columns at a time, where a group has one
scale. Each group is a product of its own on tensor cores, whose codes are upcast in registers, and its sum is scaled in
f32: a scale is used once for all rows of x and columns of the group. Two codes in a byte are two products, of the even
columns and of the odd ones, so no code has to be moved. Scales are read a step ahead: a load of so few bytes is waited
for otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.small_floats import e2m1_halves_tile
from hybridkv.kernels.linear.block_scaled import BlockScaled, e4m3_bf16_tile


class RowsForm(NamedTuple):
    """What a kernel has to know of codes of which it takes so many groups of columns at a time. A constant of it."""

    rows: int  # of a block
    bits: int  # of a code
    columns: int  # of a block, and so of a group
    powers: bool  # scales are E8M0
    whole: bool  # all columns are a multiple of so many groups
    groups: int


def rows_form(weight: BlockScaled, columns: int) -> RowsForm:
    """With as many groups as come to so many columns, but for one at the least."""
    form, groups = weight.form, max(1, columns // weight.form.columns)
    whole = weight.shape[-1] % (groups * form.columns) == 0
    return RowsForm(form.rows, form.bits, form.columns, form.scale_bytes == 1, whole, groups)


def as_pairs(x: Tensor) -> Tensor:
    """Rows of an even number of bf16 numbers, of which two are one int32; copied where they do not lie so."""
    odd = x.storage_offset() % 2 or x.stride(-1) != 1 or any(step % 2 for step in x.stride()[:-1])
    return (x.clone(memory_format=torch.contiguous_format) if odd else x).view(torch.int32)


@triton.jit
def few_rows_tile(
    x,  # bf16; of two codes in a byte: pairs
    p_x,  # [BT] where rows of x begin, in numbers of x
    m_x,  # [BT]
    codes,
    scales,
    o_row,  # [BN] int64: rows of the codes
    o_scale,  # [BN] int64: rows of the scales
    K,
    FORM: tl.constexpr,  # a RowsForm
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    """Sums over all columns [BN, BT] f32."""
    BITS: tl.constexpr = FORM[1]
    COLUMNS: tl.constexpr = FORM[2]
    G: tl.constexpr = FORM[5]
    BYTES: tl.constexpr = COLUMNS * BITS // 8  # of a group
    groups = (K + COLUMNS - 1) // COLUMNS
    o_g, o_b = tl.arange(0, G), tl.arange(0, BYTES)
    o_byte = o_g[:, None] * BYTES + o_b[None, :]  # [G, BYTES]; also the numbers of x, or pairs of them
    p_code = codes + o_row[None, :, None] * (K * BITS // 8) + o_byte[:, None, :]  # [G, BN, BYTES]
    p_scale = scales + o_scale[None, :] * groups + o_g[:, None]  # [G, BN]
    p_in = x + p_x[None, None, :] + o_byte[:, :, None]  # [G, BYTES, BT]
    b_y = tl.zeros([G, BN, BT], tl.float32)
    if FORM[4]:
        b_next = tl.load(p_scale)
    else:
        b_next = tl.load(p_scale, mask=(o_g < groups)[:, None], other=0)
    for i_g in tl.range(0, groups, G, num_stages=STAGES):
        if FORM[3]:  # as e8m0_value_tile, in fewer instructions: 255 is refused when files are read
            b_scale = tl.maximum(b_next.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
        else:
            b_scale = b_next
        if FORM[4]:
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
