"""Numbers of one byte and less, as torch functions and as functions on Triton tiles.

    E4M3   1 sign, 4 exponent, 3 mantissa bits: up to 448; 0x7F and 0xFF are NaN, there is no infinity
    E2M1   1 sign, 2 exponent, 1 mantissa bit: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, codes 0..15 (8: sign)
    E8M0   a power of two: byte b is 2^(b - 127); 255 is NaN

Rounding to E2M1 is to the nearest value; a value halfway goes to the even code, as the OCP microscaling formats say:
.25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4. Values past 6 become 6; the sign of zero is kept.

E4M3 has several ways back, which differ in speed and in what they do with NaN. Each says so here:

    e4m3_value, e4m3_value_tile   by conversion to f32; NaN stays NaN
    e4m3_pairs_tile               two in 16 bits to f16, by PTX on a GPU; NaN stays NaN
    linear/gemv's `upcast`        four in 32 bits to bf16, by PTX on a GPU, for weights; NaN becomes 480

Powers of two come from the exponent bits, not from log2, and are exact at every border.

`hadamard` spreads each channel over all others: x H / sqrt(D) with H[i, j] = (-1)^popcount(i & j), its own inverse. It
runs as log2 D rounds of sums and differences in one fixed order, so every form gives the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.fp8 import E4M3_MAX, E4M3_NAN

E2M1_MAX = 6.0
E8M0_NAN = 255
E8M0_BIAS = 127


def largest_finite(x: Tensor) -> Tensor:
    """Largest magnitude over the last dimension; NaN and infinity do not count."""
    return x.masked_fill(~x.isfinite(), 0).abs().amax(-1)


def ceil_exponent(x: Tensor, limit: float) -> Tensor:
    """Smallest k with x <= limit * 2^k, int32; x > 0."""
    (mantissa, exponent), (at, base) = torch.frexp(x), math.frexp(limit)
    return (exponent - base + (mantissa > at)).int()


def power_of_two(k: Tensor) -> Tensor:
    """2^k in f32 for k in [-126, 127]."""
    return ((k + E8M0_BIAS).int() << 23).view(torch.float32)


def e8m0_value(code: Tensor) -> Tensor:
    value = power_of_two(code.int() - E8M0_BIAS)  # wrong for the two codes without an exponent of f32
    return value.masked_fill(code == 0, 2.0**-127).masked_fill(code == E8M0_NAN, torch.nan)


def e4m3_code(x: Tensor) -> Tensor:
    """Rounded to nearest even, clamped at the largest; NaN stays NaN."""
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)  # past 464 a cast may give NaN
    return code.masked_fill(x.isnan(), E4M3_NAN)


def e4m3_value(code: Tensor) -> Tensor:
    return code.view(torch.float8_e4m3fn).float()


def e2m1_code(x: Tensor) -> Tensor:
    """NaN becomes code 0: the group's scale says it."""
    size = x.abs()
    code = sum(size > tie for tie in (0.25, 1.25, 2.5, 5.0)) + sum(size >= tie for tie in (0.75, 1.75, 3.5))
    return (code + 8 * (x.signbit() & ~x.isnan())).to(torch.uint8)


def e2m1_value(code: Tensor) -> Tensor:
    values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=code.device)
    return torch.cat((values, -values))[code.long()]


def pack_pairs(code: Tensor) -> Tensor:
    """[..., D] codes of four bits -> [..., D / 2] bytes; the even channel is the low half."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] f32, D a power of two."""
    D = x.shape[-1]
    assert D & (D - 1) == 0, f"the transform is for powers of two, not {D}"
    for _ in range(D.bit_length() - 1):  # each round transforms the lowest bit of the index and moves it to the top
        a, b = x[..., 0::2], x[..., 1::2]
        x = torch.cat((a + b, a - b), -1)
    return x * D**-0.5


@triton.jit
def largest_finite_tile(b_x, AXIS: tl.constexpr):
    b_size = tl.abs(b_x)
    return tl.max(tl.where(b_size < float("inf"), b_size, 0.0), AXIS)  # neither infinity nor NaN is less


@triton.jit
def ceil_exponent_tile(b_x, LIMIT_EXPONENT: tl.constexpr, LIMIT_MANTISSA: tl.constexpr):
    """Smallest k with x <= limit * 2^k; the limit is given by its exponent and the 23 bits of its mantissa."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    return (b_bits >> 23) - (127 + LIMIT_EXPONENT) + ((b_bits & 0x7FFFFF) > LIMIT_MANTISSA).to(tl.int32)


@triton.jit
def power_of_two_tile(b_k):
    return ((b_k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value_tile(b_code):
    b_code = b_code.to(tl.int32)
    b_bits = tl.where(b_code == 0, 0x00400000, b_code << 23)  # 2^-127 has no exponent bits
    return tl.where(b_code == 255, 0x7FC00000, b_bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code_tile(b_x):
    b_code = tl.minimum(tl.maximum(b_x, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(b_x == b_x, b_code, 0x7F).to(tl.uint8)  # NaN alone differs from itself


@triton.jit
def e4m3_value_tile(b_code):
    return b_code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_pairs_tile(b_x, GPU: tl.constexpr):
    """Pairs of E4M3 numbers in int16 -> the first and the second of each pair in f16, exactly; NaN stays NaN."""
    if GPU:  # five instructions for four numbers; from the form below the compiler makes fourteen
        b_first, b_second = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 first, second;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {first, second}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r", [b_x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_first = (b_x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        b_second = (b_x >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return b_first, b_second


@triton.jit
def e2m1_code_tile(b_x):
    b_size = tl.abs(b_x)
    b_code = (b_size > 0.25).to(tl.int32) + (b_size >= 0.75).to(tl.int32) + (b_size > 1.25).to(tl.int32)
    b_code += (b_size >= 1.75).to(tl.int32) + (b_size > 2.5).to(tl.int32) + (b_size >= 3.5).to(tl.int32)
    b_code += (b_size > 5.0).to(tl.int32)
    b_negative = (b_x.to(tl.int32, bitcast=True) < 0) & (b_x == b_x)
    return tl.where(b_negative, b_code + 8, b_code).to(tl.uint8)


@triton.jit
def e2m1_value_tile(b_code):
    # Sign, exponent and mantissa go where f32 has them, which is 2^-126 of the value; zero and a half are denormals.
    b_bits = ((b_code.to(tl.int32) << 28) >> 6) & -0x7E400000  # 0x81C00000: the shift back copies the sign
    return b_bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e2m1_pairs_tile(b_packed):
    """Bytes [rows, D / 2] of two codes -> bf16 [rows, D], 2^-126 of the values; both at once, in halves of 32 bits."""
    b_code = b_packed.to(tl.int32) * 0x1001  # the even channel's code at bit 0, the odd one's at bit 16
    b_bits = ((b_code << 6) & 0x01C001C0) | ((b_code << 12) & -0x7FFF8000)  # 0x80008000
    return tl.interleave(b_bits.to(tl.int16), (b_bits >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def e2m1_halves_tile(b_packed, FAST: tl.constexpr):
    """Bytes of two codes -> the even channels and the odd ones, in bf16. FAST: by instructions of Hopper and later."""
    if FAST:  # of four bytes: two of them in the upper bytes of 32 bits, whose codes go to sign and exponent; 2^126
        b_even, b_odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, e, s, t, big;
            mov.b32 big, 0x7e807e80;
            prmt.b32 a, $4, 0, 0x1404;
            prmt.b32 b, $4, 0, 0x3424;
            shl.b32 s, a, 4;
            shr.u32 t, a, 2;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 e, s, 0x80008000, t, 0xea;
            mul.bf16x2 $0, e, big;
            shl.b32 s, b, 4;
            shr.u32 t, b, 2;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 e, s, 0x80008000, t, 0xea;
            mul.bf16x2 $1, e, big;
            shr.u32 t, a, 6;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 e, a, 0x80008000, t, 0xea;
            mul.bf16x2 $2, e, big;
            shr.u32 t, b, 6;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 e, b, 0x80008000, t, 0xea;
            mul.bf16x2 $3, e, big;
            }""",
            "=r,=r,=r,=r,r", [b_packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        b_code = b_packed.to(tl.int32)
        b_even = (((b_code & 8) << 12) | ((b_code & 7) << 6)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        b_odd = (((b_code & 128) << 8) | ((b_code & 112) << 2)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        b_even = (b_even.to(tl.float32) * 8.507059173023462e37).to(tl.bfloat16)  # 2^126
        b_odd = (b_odd.to(tl.float32) * 8.507059173023462e37).to(tl.bfloat16)
    return b_even, b_odd


@triton.jit
def pack_pairs_tile(b_code):
    """[rows, D] -> [rows, D / 2]"""
    b_even, b_odd = tl.split(tl.reshape(b_code, [b_code.shape[0], b_code.shape[1] // 2, 2]))
    return b_even | (b_odd << 4)


@triton.jit
def unpack_pairs_tile(b_packed):
    return tl.interleave(b_packed & 15, b_packed >> 4)


@triton.jit
def hadamard_tile(b_x):
    """b_x [rows, D] f32, D a power of two: the bits of `hadamard`."""
    ROWS: tl.constexpr = b_x.shape[0]
    D: tl.constexpr = b_x.shape[1]
    scale: tl.constexpr = D**-0.5
    for i in tl.static_range(16):
        if (1 << i) < D:
            b_even, b_odd = tl.split(tl.reshape(b_x, [ROWS, D // 2, 2]))
            b_x = tl.reshape(tl.permute(tl.join(b_even + b_odd, b_even - b_odd), (0, 2, 1)), [ROWS, D])
    return b_x * scale
