"""The values of packed weights (packed_weights.py): dequantised in torch, by a kernel, and the pieces kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.linear.packed_planes import BLOCK, GROUP
from hybridkv.kernels.linear.packed_weights import Packed


def dequantise_ref(packed: Packed) -> Tensor:
    """[N, K] f32."""
    N, K = packed.shape
    packed = packed.laid(1)
    scales = packed.scales.contiguous().view(torch.uint8).view(N, -1, 2)[:, : K // GROUP]  # [N, groups, 2]
    if packed.bits == 8:
        codes = packed.codes.view(torch.int8).view(N, -1, GROUP)
        return (codes.float() * scales.contiguous().view(torch.float16).float()).view(N, K)
    nibbles = packed.codes.view(N, -1, GROUP)
    codes = torch.stack([nibbles & 15, nibbles >> 4], 2).view(N, -1, GROUP)
    if packed.bits > 4:
        width = packed.bits - 4
        high = packed.high.view(N, -1, 1, GROUP)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=high.device).view(-1, 1)
        codes |= (high >> shifts & (1 << width) - 1).view(N, -1, GROUP) << 4
    d = packed.d.contiguous().view(torch.float16).view(N, -1, 2).float()
    d = d.repeat_interleave(packed.each // GROUP, 1)  # [N, groups, 2]
    if packed.bits == 6:
        a = (d[..., :1] * scales.view(torch.int8).float()).unsqueeze(-1)  # [N, groups, 2, 1]
        return (a * (codes.view(N, -1, 2, 16).float() - 32)).view(N, K)
    a, b = (d * scales.float()).unsqueeze(-1).unbind(-2)  # [N, groups, 1]
    return (a * codes.float() - b).view(N, K)


@triton.jit
def place(o_row, width, UNIT: tl.constexpr, R: tl.constexpr):
    """Where rows of a plane begin, of which R are interleaved."""
    return o_row // R * (R * width) + o_row % R * UNIT


@triton.jit
def f16_at(b_v, SHIFT: tl.constexpr):
    return ((b_v >> SHIFT) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def u8_at(b_v, SHIFT: tl.constexpr):
    return ((b_v >> SHIFT) & 0xFF).to(tl.float32)


@triton.jit
def i8_at(b_v, SHIFT: tl.constexpr):
    return (b_v << (24 - SHIFT) >> 24).to(tl.float32)


@triton.jit
def pair_codes(b_q, b_h, BITS: tl.constexpr, c: tl.constexpr):
    """Groups 2c and 2c + 1 of a block as numbers: bytes of the planes -> f32."""
    lo, hi = b_q & 15, b_q >> 4
    if BITS == 5:
        lo, hi = lo | (((b_h >> (2 * c)) & 1) << 4), hi | (((b_h >> (2 * c + 1)) & 1) << 4)
    elif BITS == 6:
        lo, hi = lo | (((b_h >> (4 * (c % 2))) & 3) << 4), hi | (((b_h >> (4 * (c % 2) + 2)) & 3) << 4)
    less: tl.constexpr = 32.0 if BITS == 6 else 0.0
    return lo.to(tl.float32) - less, hi.to(tl.float32) - less


@triton.jit
def dequantise_kernel(
    codes, high, scales, d,
    out,  # [N, K]
    N,
    K,
    BITS: tl.constexpr,
    EACH: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0)
    o_n, o_j = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, 32)[None, :]
    o_row = o_n.to(tl.int64)
    m_n = o_n < N
    for c in tl.static_range(4):
        o_k = i_b * 256 + c * 64
        m_lo, m_hi = m_n & (o_k < K), m_n & (o_k + 32 < K)
        b_s = tl.load(scales + place(o_row, (K + 63) // 64, 1, R) + o_k // 64 * R, mask=m_lo, other=0)[:, None]
        if BITS == 8:
            p_q = codes + place(o_row, K, 32, R)[:, None] + o_k * R + o_j
            lo = f16_at(b_s, 0) * tl.load(p_q, mask=m_lo[:, None], other=0).to(tl.int8, bitcast=True).to(tl.float32)
            hi = tl.load(p_q + 32 * R, mask=m_hi[:, None], other=0).to(tl.int8, bitcast=True).to(tl.float32)
            hi = f16_at(b_s, 16) * hi
        else:
            b_q = tl.load(
                codes + place(o_row, K // 2, 32, R)[:, None] + o_k // 2 * R + o_j, mask=m_lo[:, None], other=0
            )
            b_h = b_q
            if BITS == 5:
                p_h = high + place(o_row, K // 8, 32, R)[:, None] + i_b * 32 * R + o_j
                b_h = tl.load(p_h, mask=m_lo[:, None], other=0)
            elif BITS == 6:
                p_h = high + place(o_row, K // 4, 32, R)[:, None] + (i_b * 2 + c // 2) * 32 * R + o_j
                b_h = tl.load(p_h, mask=m_lo[:, None], other=0)
            lo, hi = pair_codes(b_q, b_h, BITS, c)
            b_d = tl.load(d + place(o_row, K // EACH, 1, R) + o_k // EACH * R, mask=m_lo, other=0)[:, None]
            a, b = f16_at(b_d, 0), f16_at(b_d, 16)
            if BITS == 6:
                first = o_j < 16
                lo *= a * tl.where(first, i8_at(b_s, 0), i8_at(b_s, 8))
                hi *= a * tl.where(first, i8_at(b_s, 16), i8_at(b_s, 24))
            else:
                lo = a * u8_at(b_s, 0) * lo - b * u8_at(b_s, 8)
                hi = a * u8_at(b_s, 16) * hi - b * u8_at(b_s, 24)
        p_out = out + o_row[:, None] * K + o_k + o_j
        tl.store(p_out, lo.to(out.dtype.element_ty), mask=m_lo[:, None])
        tl.store(p_out + 32, hi.to(out.dtype.element_ty), mask=m_hi[:, None])


def dequantise_triton(weight: Packed, out: Tensor) -> Tensor:
    """Into out [N, K], contiguous."""
    N, K = weight.shape
    if N:
        dequantise_kernel[triton.cdiv(K, BLOCK), triton.cdiv(N, 32)](
            *weight.planes, out, N, K, BITS=weight.bits, EACH=weight.each, R=weight.beside, BN=32, num_warps=4
        )
    return out
