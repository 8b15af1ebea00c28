"""Stores and loads of the vectors of a DeepSeek-V4 cache, in pages of any PageFormat (page_layout.py).

Power-of-two scales are the smallest that hold the group's largest magnitude a: 2^ceil(log2(a / 448)), a at least 1e-4,
or 2^ceil(log2(a / 6)), a at least 6 x 2^-126. Values are rounded to BF16 before E4M3 under such a scale, as the
released model does. NVFP4's scale is a / 6 rounded to E4M3, between 2^-9 and 448: past 2688 values saturate.

The Hadamard transform belongs to the format: what a load gives is the transformed key, and a query goes through
`fake_quantise` (`mxfp4_round_tile`) before it meets one.

Special values: NaN stays NaN in E4M3; in E2M1 it makes the scale of its group NaN, and so the whole group. Infinity
saturates: it does not count for a scale, except that MXFP4 takes it as 2^112 before the transform.

Entries are named by their flat number page * P + offset. Anything outside [0, N P) is no entry: it is not stored, and
loads as zeros. The bytes that pad a scale row are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.fp8 import E4M3_MAX, E4M3_NAN, fp8_decode_ref, fp8_encode_ref, fp8_encode_tile
from hybridkv.kernels.formats.page_layout import CODECS, PageFormat
from hybridkv.kernels.formats.small_floats import (
    E2M1_MAX,
    E8M0_BIAS,
    E8M0_NAN,
    ceil_exponent,
    ceil_exponent_tile,
    e2m1_code,
    e2m1_code_tile,
    e2m1_value,
    e2m1_value_tile,
    e4m3_code,
    e4m3_code_tile,
    e4m3_value,
    e4m3_value_tile,
    e8m0_value,
    e8m0_value_tile,
    hadamard,
    hadamard_tile,
    largest_finite,
    largest_finite_tile,
    pack_pairs,
    pack_pairs_tile,
    power_of_two,
    power_of_two_tile,
    unpack_pairs,
    unpack_pairs_tile,
)

SMALLEST_FP8 = 1e-4  # least magnitude a group of E4M3 is scaled to
SMALLEST_FP4 = 6 * 2.0**-126
LARGEST_TRANSFORMED = 2.0**112  # so that sums of 2^15 channels stay finite


FP8, FP8_ENTRY, FP8_INDEX, MXFP4, NVFP4 = (tl.constexpr(code) for code in range(2, 7))
_SMALLEST_FP8, _SMALLEST_FP4 = tl.constexpr(SMALLEST_FP8), tl.constexpr(SMALLEST_FP4)
_LARGEST_TRANSFORMED = tl.constexpr(LARGEST_TRANSFORMED)


def _grouped(x: Tensor, group: int) -> Tensor:
    """[..., D] -> [..., groups, group], the last filled with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _encode(fmt: PageFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, dim] f32 -> value bytes and scale bytes without padding, in a format with scales."""
    kept = fmt.dim - fmt.rope
    values, tail = x[:, :kept], x[:, kept:].to(torch.bfloat16)
    if fmt.name == "fp8_entry":
        codes, scale = fp8_encode_ref(values)
        return torch.cat((codes, _as_bytes(tail)), -1), _as_bytes(scale[:, None])
    if fmt.codec.bits == 8:
        groups = _grouped(values.to(torch.bfloat16).float(), fmt.group)
        exponent = ceil_exponent(largest_finite(groups).clamp(min=SMALLEST_FP8), E4M3_MAX)
        codes = e4m3_code(groups * power_of_two(-exponent)[..., None]).flatten(-2)[:, :kept]
        scales = (exponent + E8M0_BIAS).to(torch.uint8) if fmt.codec.scale_bytes == 1 else power_of_two(exponent)
        return torch.cat((codes, _as_bytes(tail)), -1), _as_bytes(scales)
    if fmt.hadamard:
        values = hadamard(values.clamp(-LARGEST_TRANSFORMED, LARGEST_TRANSFORMED))
    groups = _grouped(values, fmt.group)
    has_nan = groups.isnan().any(-1)
    largest = largest_finite(groups)
    if fmt.hadamard:
        exponent = ceil_exponent(largest.clamp(min=SMALLEST_FP4), E2M1_MAX)
        scaled = groups * power_of_two(-exponent)[..., None]
        scales = (exponent + E8M0_BIAS).to(torch.uint8).masked_fill(has_nan, E8M0_NAN)
    else:
        scales = e4m3_code((largest * (1 / E2M1_MAX)).clamp(min=2.0**-9))
        scaled = groups / e4m3_value(scales)[..., None]
        scales = scales.masked_fill(has_nan, E4M3_NAN)
    return pack_pairs(e2m1_code(scaled).flatten(-2)[:, :kept]), scales


def _decode(fmt: PageFormat, values: Tensor, scales: Tensor) -> Tensor:
    """The inverse: f32 [M, dim]."""
    kept = fmt.dim - fmt.rope
    codes, tail = values[:, : kept * fmt.codec.bits // 8], values[:, kept * fmt.codec.bits // 8 :]
    rotary = tail.contiguous().view(torch.bfloat16).float()
    if fmt.codec.scale_bytes == 4:
        return torch.cat((fp8_decode_ref(codes, scales.contiguous().view(torch.float32)[:, 0]), rotary), -1)
    numbers = e4m3_value(codes) if fmt.codec.bits == 8 else e2m1_value(unpack_pairs(codes))
    factor = e4m3_value(scales) if fmt.name == "nvfp4" else e8m0_value(scales)
    numbers = (_grouped(numbers, fmt.group) * factor[..., None]).flatten(-2)[:, :kept]
    return torch.cat((numbers, rotary), -1)


def fake_quantise(fmt: PageFormat, x: Tensor) -> Tensor:
    """x [..., dim] f32 -> what a load gives after a store."""
    if fmt.plain:
        return x.to(fmt.dtype).float()
    rows = x.reshape(-1, fmt.dim)
    return _decode(fmt, *_encode(fmt, rows)).view(x.shape)


def _rows_of(pages: Tensor, fmt: PageFormat) -> tuple[Tensor, Tensor]:
    """Views [N, P, value bytes] and [N, P, scale bytes] of pages of a format with scales."""
    N, P, width = pages.shape
    assert pages.dtype == fmt.dtype and width == fmt.width and pages.is_contiguous()
    whole = pages.view(N, P * width)
    values, scales = whole.tensor_split((P * fmt.value_bytes,), 1)
    return values.unflatten(1, (P, -1)), scales.unflatten(1, (P, -1))


def store_entries_ref(
    pages: Tensor,  # [N, P, width]
    fmt: PageFormat,
    flat: Tensor,  # [M] int64, all different; outside the pages: not stored
    x: Tensor,  # [M, dim] f32
) -> None:
    N, P, width = pages.shape
    valid = (flat >= 0) & (flat < N * P)
    flat, x = flat[valid], x[valid].float()
    if fmt.plain:
        pages.view(N * P, width)[flat] = x.to(fmt.dtype)
    else:
        values, scales = _encode(fmt, x)
        scales = torch.nn.functional.pad(scales, (0, fmt.scale_bytes - scales.shape[1]))
        for part, new in zip(_rows_of(pages, fmt), (values, scales)):
            part[flat // P, flat % P] = new


def load_entries_ref(pages: Tensor, fmt: PageFormat, flat: Tensor) -> Tensor:
    """flat [...] -> f32 [..., dim]; zeros where there is no entry."""
    N, P, width = pages.shape
    out = torch.zeros(*flat.shape, fmt.dim, device=pages.device)
    valid = (flat >= 0) & (flat < N * P)
    at = flat[valid]
    if fmt.plain:
        out[valid] = pages.view(N * P, width)[at].float()
    else:
        values, scales = _rows_of(pages, fmt)
        held = fmt.groups * fmt.codec.scale_bytes
        out[valid] = _decode(fmt, values[at // P, at % P], scales[at // P, at % P, :held])
    return out


@triton.constexpr_function
def geometry(FORMAT, D, ROPE):
    """Value bytes and scale bytes of an entry, channels of a group, groups, whether there is one f32 scale."""
    fmt = PageFormat("", D, ROPE, CODECS[FORMAT])
    return fmt.value_bytes, fmt.scale_bytes, fmt.group, fmt.groups, fmt.codec.scale_bytes == 4


@triton.jit
def value_at(o_page, o_row, P, ROW: tl.constexpr, OTHER: tl.constexpr):
    """Where a value row begins in pages of P value rows of ROW and P scale rows of OTHER."""
    return o_page * P * (ROW + OTHER) + o_row * ROW


@triton.jit
def scale_at(o_page, o_row, P, ROW: tl.constexpr, OTHER: tl.constexpr):
    return o_page * P * (ROW + OTHER) + P * ROW + o_row * OTHER


@triton.jit
def in_groups(b_x, GROUP: tl.constexpr):
    """[rows, columns] -> [rows, groups, channels of a group]; fewer columns than a group are one group."""
    COUNT: tl.constexpr = b_x.shape[1] // GROUP if b_x.shape[1] > GROUP else 1
    return tl.reshape(b_x, [b_x.shape[0], COUNT, b_x.shape[1] // COUNT])


@triton.jit
def load_tile(pages, o_e, m_e, o_d, P, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr):
    """Entries o_e [rows] int64, channels o_d [columns] -> f32 [rows, columns], zeros where m_e is false or o_d >= D.

    The columns are consecutive channels, a power of two of them, from a multiple of their number. m_e must be false for
    what is no entry.
    """
    o_page = o_e // P
    return load_rows(pages, o_page, o_e - o_page * P, m_e, o_d, P, D, ROPE, FORMAT)


@triton.jit
def load_rows(pages, o_page, o_row, m_e, o_d, P, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr):
    """As load_tile, for entries named by page [rows] int64 and row in it."""
    m_x = m_e[:, None] & (o_d < D)
    if FORMAT < FP8:
        b_x = tl.load(pages + (o_page * P + o_row)[:, None] * D + o_d, mask=m_x, other=0.0).to(tl.float32)
    else:
        g: tl.constexpr = geometry(FORMAT, D, ROPE)
        VALUE: tl.constexpr = g[0]
        SCALE: tl.constexpr = g[1]
        GROUP: tl.constexpr = g[2]
        COLUMNS: tl.constexpr = o_d.shape[0]
        o_value = value_at(o_page, o_row, P, VALUE, SCALE)
        o_first = 0 if COLUMNS >= D else tl.min(o_d, 0)
        if FORMAT >= MXFP4:
            o_b = tl.multiple_of(o_first // 2 + tl.arange(0, COLUMNS // 2), COLUMNS // 2)
            m_b = m_e[:, None] & (o_b < D // 2)
            b_x = e2m1_value_tile(unpack_pairs_tile(tl.load(pages + o_value[:, None] + o_b, mask=m_b, other=0)))
        else:
            m_code = m_e[:, None] & (o_d < D - ROPE)
            b_x = e4m3_value_tile(tl.load(pages + o_value[:, None] + o_d, mask=m_code, other=0))
        if g[4]:
            o_scale = scale_at(o_page, o_row, P, VALUE // 4, SCALE // 4)
            b_x *= tl.load(pages.to(tl.pointer_type(tl.float32)) + o_scale, mask=m_e, other=0.0)[:, None]
        else:
            b_groups = in_groups(b_x, GROUP)
            o_g = o_first // GROUP + tl.arange(0, b_groups.shape[1])
            m_g = m_e[:, None] & (o_g < g[3])
            o_scale = scale_at(o_page, o_row, P, VALUE, SCALE)
            b_code = tl.load(pages + o_scale[:, None] + o_g, mask=m_g, other=0)
            b_scale = e4m3_value_tile(b_code) if FORMAT == NVFP4 else e8m0_value_tile(b_code)
            b_x = tl.reshape(b_groups * b_scale[:, :, None], b_x.shape)
        if ROPE > 0:
            o_tail = value_at(o_page, o_row, P, VALUE // 2, SCALE // 2)[:, None] + (o_d - (D - ROPE) // 2)
            m_tail = m_x & (o_d >= D - ROPE)
            b_tail = tl.load(pages.to(tl.pointer_type(tl.bfloat16)) + o_tail, mask=m_tail, other=0.0)
            b_x = tl.where(o_d < D - ROPE, b_x, b_tail.to(tl.float32))
    return b_x


@triton.jit
def _mxfp4_encode_tile(b_x):
    """[rows, D] -> codes [rows, D], bytes of scales [rows, groups]."""
    b_bound = tl.minimum(tl.maximum(b_x, -_LARGEST_TRANSFORMED), _LARGEST_TRANSFORMED)
    b_x = tl.where(b_x == b_x, b_bound, b_x)  # NaN alone differs from itself, and stays
    b_groups = in_groups(hadamard_tile(b_x), 32)
    b_k = ceil_exponent_tile(tl.maximum(largest_finite_tile(b_groups, 2), _SMALLEST_FP4), 2, 0x400000)
    b_code = e2m1_code_tile(b_groups * power_of_two_tile(-b_k)[:, :, None])
    b_nan = tl.max((b_groups != b_groups).to(tl.int32), 2) > 0
    return tl.reshape(b_code, b_x.shape), tl.where(b_nan, 255, b_k + 127).to(tl.uint8)


@triton.jit
def mxfp4_round_tile(b_x):
    """b_x [rows, D] f32 -> what a load gives after a store as mxfp4."""
    b_code, b_scale = _mxfp4_encode_tile(b_x)
    b_groups = in_groups(e2m1_value_tile(b_code), 32) * e8m0_value_tile(b_scale)[:, :, None]
    return tl.reshape(b_groups, b_x.shape)


@triton.jit
def _nvfp4_encode_tile(b_x):
    b_groups = in_groups(b_x, 16)
    b_scale = e4m3_code_tile(tl.maximum(largest_finite_tile(b_groups, 2) * (1 / 6), 0.001953125))
    b_factor = tl.broadcast_to(e4m3_value_tile(b_scale)[:, :, None], b_groups.shape)
    b_code = e2m1_code_tile(tl.div_rn(b_groups, b_factor))
    b_nan = tl.max((b_groups != b_groups).to(tl.int32), 2) > 0
    return tl.reshape(b_code, b_x.shape), tl.where(b_nan, 0x7F, b_scale).to(tl.uint8)


@triton.jit
def _fp8_encode_tile(b_x, GROUP: tl.constexpr):
    """[rows, columns] -> E4M3 codes [rows, columns], exponents of the scales [rows, groups]."""
    b_groups = in_groups(b_x.to(tl.bfloat16).to(tl.float32), GROUP)
    b_k = ceil_exponent_tile(tl.maximum(largest_finite_tile(b_groups, 2), _SMALLEST_FP8), 8, 0x600000)
    return tl.reshape(e4m3_code_tile(b_groups * power_of_two_tile(-b_k)[:, :, None]), b_x.shape), b_k


@triton.jit
def store_rows(pages, o_page, o_row, m_e, o_d, b_x, P, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr):
    """b_x [rows, columns] f32 into rows o_row of pages o_page, [rows] int64, where m_e; o_d is arange(0, columns),
    columns the power of two that holds D. m_e must be false for what is no entry.
    """
    m_x = m_e[:, None] & (o_d < D)
    if FORMAT < FP8:
        tl.store(pages + (o_page * P + o_row)[:, None] * D + o_d, b_x.to(pages.dtype.element_ty), mask=m_x)
    else:
        g: tl.constexpr = geometry(FORMAT, D, ROPE)
        VALUE: tl.constexpr = g[0]
        SCALE: tl.constexpr = g[1]
        GROUP: tl.constexpr = g[2]
        COLUMNS: tl.constexpr = o_d.shape[0]
        o_value = value_at(o_page, o_row, P, VALUE, SCALE)
        b_kept = tl.where(o_d < D - ROPE, b_x, 0.0)
        if FORMAT == FP8_ENTRY:
            b_code, b_scale = fp8_encode_tile(b_kept)
        elif FORMAT == FP8_INDEX:
            b_code, b_k = _fp8_encode_tile(b_kept, COLUMNS)
            b_scale = tl.reshape(power_of_two_tile(b_k), [b_x.shape[0]])
        elif FORMAT == FP8:
            b_code, b_k = _fp8_encode_tile(b_kept, GROUP)
            b_scale = (b_k + 127).to(tl.uint8)
        elif FORMAT == MXFP4:
            b_code, b_scale = _mxfp4_encode_tile(b_kept)
        else:
            b_code, b_scale = _nvfp4_encode_tile(b_kept)
        if FORMAT >= MXFP4:
            o_b = tl.arange(0, COLUMNS // 2)
            m_b = m_e[:, None] & (o_b < D // 2)
            tl.store(pages + o_value[:, None] + o_b, pack_pairs_tile(b_code), mask=m_b)
        else:
            m_code = m_e[:, None] & (o_d < D - ROPE)
            tl.store(pages + o_value[:, None] + o_d, b_code, mask=m_code)
        if g[4]:
            o_scale = scale_at(o_page, o_row, P, VALUE // 4, SCALE // 4)
            tl.store(pages.to(tl.pointer_type(tl.float32)) + o_scale, b_scale, mask=m_e)
        else:
            o_g = tl.arange(0, b_scale.shape[1])
            p_scale = pages + scale_at(o_page, o_row, P, VALUE, SCALE)[:, None]
            tl.store(p_scale + o_g, b_scale, mask=m_e[:, None] & (o_g < g[3]))
            if g[3] < SCALE:
                o_pad = g[3] + tl.arange(0, 8)  # a row is padded to eight bytes
                b_zero = tl.zeros([b_x.shape[0], 8], tl.uint8)
                tl.store(p_scale + o_pad, b_zero, mask=m_e[:, None] & (o_pad < SCALE))
        if ROPE > 0:
            o_tail = value_at(o_page, o_row, P, VALUE // 2, SCALE // 2)[:, None] + (o_d - (D - ROPE) // 2)
            m_tail = m_x & (o_d >= D - ROPE)
            tl.store(pages.to(tl.pointer_type(tl.bfloat16)) + o_tail, b_x.to(tl.bfloat16), mask=m_tail)
