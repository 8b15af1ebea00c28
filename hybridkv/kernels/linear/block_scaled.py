"""BlockScaled: a matrix, or a stack of them, as codes with a scale for each block (block_form.py draws the formats).

value = code * scale, which bf16 holds exactly if the scale is a power of two. Files with NaN or with scales past
those of LARGEST_SCALE are refused when they are read, so every value is finite and kernels need not look for NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.small_floats import (
    e2m1_pairs_tile,
    e2m1_value,
    e4m3_value,
    e8m0_value,
    e8m0_value_tile,
    unpack_pairs,
)
from hybridkv.kernels.linear.block_form import BlockForm, Span
from hybridkv.kernels.linear.gemv import upcast

TILE = 1 << 22  # values dequantised at once where there is no kernel
# As E8M0, by the bits of a code: 2^33, by which block_experts_one_hopper.py can multiply E2M1 in bf16, and 2^119, which
# times 448 is below the largest f32
LARGEST_SCALE = {4: 160, 8: 246}


@dataclass(frozen=True)
class BlockScaled:
    """[N, K], or a stack [E, N, K] whose matrices have scales of their own."""

    codes: Tensor  # uint8 [..., N, K], of 4 bits [..., N, K / 2]
    scales: Tensor  # uint8 (E8M0) or f32 [..., blocks of N, blocks of K]
    form: BlockForm

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.form.bits)

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, i: int) -> BlockScaled:
        """One matrix of a stack."""
        return BlockScaled(self.codes[i], self.scales[i], self.form)

    def stacked(self) -> BlockScaled:
        """A matrix as a stack of one."""
        return BlockScaled(self.codes[None], self.scales[None], self.form)

    def part(self, row: int, rows: int) -> BlockScaled:
        """Rows of a matrix, from the first of a block on, in the same memory."""
        R = self.form.rows
        assert row % R == 0, f"row {row} begins no block of {R}"
        scales = self.scales[row // R : -(-(row + rows) // R)]
        return BlockScaled(self.codes[row : row + rows], scales, self.form)

    def taken(self, rows: Tensor) -> BlockScaled:
        """Rows [n] of a matrix whose rows have scales of their own, in this order."""
        assert self.form.rows == 1, f"blocks of {self.form.rows} rows cannot be taken apart"
        return BlockScaled(self.codes[rows], self.scales[rows], self.form)

    def finite(self) -> bool:
        """Whether all values are."""
        largest = LARGEST_SCALE[self.form.bits]
        if self.scales.dtype == torch.uint8:
            fine = bool((self.scales <= largest).all())
        else:
            fine = bool((self.scales.abs() <= 2.0 ** (largest - 127)).all())  # false for NaN
        return fine and (self.form.bits == 4 or not bool(((self.codes & 127) == 127).any()))


def empty_blocks(form: BlockForm, shape: Sequence[int], device: torch.device) -> BlockScaled:
    """Room for [..., N, K]."""
    *stack, N, K = shape
    scale = torch.uint8 if form.scale_bytes == 1 else torch.float32
    codes = torch.empty((*stack, *form.code_shape(N, K)), dtype=torch.uint8, device=device)
    return BlockScaled(codes, torch.empty((*stack, *form.scale_shape(N, K)), dtype=scale, device=device), form)


def put_blocks(
    out: BlockScaled,
    row: int,
    part: BlockScaled,  # whose first scales are of the block in which its first row lies
    inside: int = 0,  # rows of that block before it
    columns: Span | None = None,  # that `out` has; None: all
) -> None:
    """A matrix, or some of its rows or columns, into rows of one whose blocks may be smaller (BlockForm.part)."""
    N, (begin, end) = part.shape[0], columns or (0, part.shape[1])
    rows = _scales_of(N, out.form.rows, inside, part.form.rows)
    places = _scales_of(end - begin, out.form.columns, begin, part.form.columns)
    each, R = 8 // part.form.bits, out.form.rows
    assert begin % each == end % each == 0 == row % R, f"rows from {row}, columns {begin} to {end}: no whole blocks"
    out.codes[row : row + N] = part.codes[:, begin // each : -(-end // each)].to(out.codes.device)
    scales = part.scales[rows][:, places] if part.form.rows != R or columns else part.scales
    out.scales[row // R : row // R + len(scales)] = scales.to(out.scales.device)


def _scales_of(count: int, block: int, first: int, stored: int) -> Tensor:
    """Which stored block each block of a part lies in, whose first row (or column) is number `first` of the stored."""
    begins = torch.arange(0, count, block, device="cpu")
    ends = (begins + block).clamp(max=count) - 1
    found = (first + begins) // stored
    assert torch.equal(found, (first + ends) // stored), f"blocks of {block} reach over those of {stored}"
    return found


def dequantise_rows(weight: BlockScaled, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Rows of a matrix [N, K] -> [end - begin, K]."""
    form, K = weight.form, weight.shape[1]
    codes, at = weight.codes[begin:end], torch.arange(begin, end, device=weight.codes.device) // form.rows
    scales = weight.scales[at]  # [rows, blocks of K]
    scales = e8m0_value(scales) if scales.dtype == torch.uint8 else scales
    if form.bits == 8:
        values = e4m3_value(codes)
    else:
        values = F.embedding(codes.int(), _pairs(codes.device)).flatten(1)
    whole = K // form.columns * form.columns
    values[:, :whole].view(len(codes), -1, form.columns).mul_(scales[:, : K // form.columns, None])
    if whole < K:
        values[:, whole:] *= scales[:, -1:]
    return values.to(dtype)


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2] f32: the two values of a byte."""
    return e2m1_value(unpack_pairs(torch.arange(256, dtype=torch.uint8, device=device)[:, None]))


def tile_rows(K: int) -> int:
    """Rows that are dequantised at once."""
    return max(1, TILE // max(K, 1))


def dequantise_ref(weight: BlockScaled, dtype: torch.dtype) -> Tensor:
    """[N, K]; beside it a tile."""
    N, K = weight.shape
    out, step = torch.empty(N, K, dtype=dtype, device=weight.codes.device), tile_rows(K)
    for a in range(0, N, step):
        out[a : a + step] = dequantise_rows(weight, a, min(N, a + step), dtype)
    return out


@triton.jit
def e4m3_bf16_tile(b_code, FAST: tl.constexpr):
    """E4M3 as uint8 -> bf16. FAST: by the instructions of Hopper and later; else on any GPU."""
    if FAST:
        return upcast(b_code, True)
    else:  # exponent and mantissa go where f32 has them, which is 2^-120 of the value
        b_bits = ((b_code.to(tl.int32) & 0x7F) << 20) | ((b_code.to(tl.int32) & 0x80) << 24)
        return (b_bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(tl.bfloat16)  # 2^120


@triton.jit
def block_tile(
    codes,
    scales,
    o_row,  # [BN] int64: rows of the codes
    o_scale,  # [BN] int64: rows of the scales
    i_k,
    K,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a block, a power of two
    POWERS: tl.constexpr,  # scales are E8M0
    WHOLE: tl.constexpr,  # K is a multiple of BK
    FAST: tl.constexpr,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Columns i_k .. i_k + BK of rows, dequantised: [BN, BK] in DTYPE; zeros past K."""
    PER: tl.constexpr = 8 // BITS  # values of a byte
    GROUPS: tl.constexpr = BK // COLUMNS if BK > COLUMNS else 1
    o_byte = i_k // PER + tl.arange(0, BK // PER)
    p_code = codes + o_row[:, None] * (K // PER) + o_byte[None, :]
    o_group = i_k // COLUMNS + tl.arange(0, GROUPS)
    p_scale = scales + o_scale[:, None] * ((K + COLUMNS - 1) // COLUMNS) + o_group[None, :]
    if WHOLE:
        b_code, b_scale = tl.load(p_code), tl.load(p_scale)
    else:
        b_code = tl.load(p_code, mask=(o_byte * PER < K)[None, :], other=0)
        b_scale = tl.load(p_scale, mask=(o_group * COLUMNS < K)[None, :], other=0)
    b_scale = e8m0_value_tile(b_scale) if POWERS else b_scale
    if BITS == 8:
        b_w = e4m3_bf16_tile(b_code, FAST)
    else:  # 2^-126 of the values, then 2^-6
        b_w = e2m1_pairs_tile(b_code) * tl.full([1, 1], 1.329227995784916e36, tl.bfloat16)
        b_scale *= 64.0
    b_w = tl.reshape(b_w, [BN, GROUPS, BK // GROUPS])
    if POWERS and tl.bfloat16 == DTYPE:
        b_w *= b_scale.to(tl.bfloat16)[:, :, None]  # exact
    else:
        b_w = (b_w.to(tl.float32) * b_scale[:, :, None]).to(DTYPE)
    return tl.reshape(b_w, [BN, BK])
