"""FP8 keys and values: E4M3 numbers with one f32 scale for each entry (a token's key or value of one head).

    values   | x_0 / scale | x_1 / scale | ... | x_{D-1} / scale |     D bytes; E4M3 has 1 sign, 4 exponent and
                                                                       3 mantissa bits, its largest number is 448
    scale    | f32 |                                                   largest magnitude of the entry / 448

There is nothing to calibrate: an entry's scale comes from the entry itself. A stored value is off by at most 1/16 of
itself and by 16/448 of the entry's largest. Values below 2^-6 x scale are off by at most half a step of 2^-9 x scale.

Special values: NaN stays NaN (byte 0x7F). Infinity does not count for the scale and is stored as the largest finite
number, 448 x scale. An entry of zeros has scale 1.

Both divisions are products with a reciprocal, in the reference as in the kernels, because torch on a GPU divides by a
constant that way too. This costs one more f32 rounding and leaves the bounds above as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
SMALLEST_SCALE = 2.0**-126  # f32 loses digits below this
BLOCK_ROWS = 16  # entries that a program converts at once
BLOCK_VALUES = 4096  # values in a program's tile at most: wide entries come in fewer rows


class ScaledPages(NamedTuple):
    """A pool of quantised keys or values. Each format has a subclass."""

    values: Tensor  # [N, P, ...]
    scale: Tensor  # [N, P, ...]


class Fp8Pages(ScaledPages):
    """values [N, P, D] uint8, scale [N, P] f32."""

    __slots__ = ()


def fp8_encode_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    largest = x.masked_fill(~x.isfinite(), 0).abs().amax(-1)
    scale = torch.where(largest > 0, (largest * (1 / E4M3_MAX)).clamp(min=SMALLEST_SCALE), 1.0)
    # clamp before the cast: some versions of torch give NaN past 464
    scaled = (x * scale.reciprocal().unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    values = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return values.masked_fill(x.isnan(), E4M3_NAN), scale


def fp8_decode_ref(values: Tensor, scale: Tensor) -> Tensor:
    return values.view(torch.float8_e4m3fn).float() * scale.unsqueeze(-1)


@triton.jit
def fp8_encode_tile(b_x):
    """A tile [rows, D] of f32 -> values [rows, D] uint8, scale [rows]. Columns past D must be 0."""
    b_size = tl.abs(b_x)
    b_largest = tl.max(tl.where(b_size < float("inf"), b_size, 0.0), 1)  # neither infinity nor NaN is less
    b_scale = tl.where(b_largest > 0, tl.maximum(b_largest * (1 / 448), 1.1754943508222875e-38), 1.0)
    b_scaled = b_x * tl.div_rn(1.0, b_scale)[:, None]
    b_scaled = tl.minimum(tl.maximum(b_scaled, -448.0), 448.0)
    b_code = b_scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(b_x == b_x, b_code, 0x7F).to(tl.uint8), b_scale  # NaN alone differs from itself


@triton.jit(do_not_specialize=["N"])
def fp8_encode_kernel(x, values, scale, N, D, BN: tl.constexpr, BD: tl.constexpr):
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n = o_n < N
    o_x = o_n[:, None] * D + o_d
    m_x = m_n[:, None] & (o_d < D)
    b_code, b_scale = fp8_encode_tile(tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32))
    tl.store(values + o_x, b_code, mask=m_x)
    tl.store(scale + o_n, b_scale, mask=m_n)


@triton.jit(do_not_specialize=["N"])
def fp8_decode_kernel(values, scale, out, N, D, BN: tl.constexpr, BD: tl.constexpr):
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n = o_n < N
    o_x = o_n[:, None] * D + o_d
    m_x = m_n[:, None] & (o_d < D)
    b_code = tl.load(values + o_x, mask=m_x, other=0).to(tl.float8e4nv, bitcast=True)
    b_scale = tl.load(scale + o_n, mask=m_n, other=0.0)
    tl.store(out + o_x, b_code.to(tl.float32) * b_scale[:, None], mask=m_x)


def tile_shape(D: int) -> tuple[int, int]:
    """Rows and columns of a program's tile, for entries of D values."""
    columns = triton.next_power_of_2(D)
    return max(1, min(BLOCK_ROWS, BLOCK_VALUES // columns)), columns


def fp8_encode_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    N, D = scale.numel(), x.shape[-1]
    if N:
        rows, columns = tile_shape(D)
        fp8_encode_kernel[(triton.cdiv(N, rows),)](
            x.contiguous(), values, scale, N, D, BN=rows, BD=columns, num_warps=4 if columns <= BLOCK_VALUES else 16
        )
    return values, scale


def fp8_decode_triton(values: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    N, D = scale.numel(), values.shape[-1]
    if N:
        rows, columns = tile_shape(D)
        grid = (triton.cdiv(N, rows),)
        fp8_decode_kernel[grid](values.contiguous(), scale.contiguous(), out, N, D, BN=rows, BD=columns)
    return out


def fp8_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] of any dtype -> values [..., D] uint8, scale [...] f32."""
    return fp8_encode_triton(x) if use_triton(x) else fp8_encode_ref(x)


def fp8_decode(values: Tensor, scale: Tensor) -> Tensor:
    """values [..., D] uint8, scale [...] f32 -> [..., D] f32."""
    return fp8_decode_triton(values, scale) if use_triton(values) else fp8_decode_ref(values, scale)
