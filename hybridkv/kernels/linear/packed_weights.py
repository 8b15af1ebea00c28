"""Packed: a matrix [N, K] in one of GGUF's formats, its blocks taken apart into planes that a GPU loads well.

A block of the file, little-endian, and the bytes it takes for its weights:
    Q8_0   34 for 32    f16 d; 32 x i8 code                                             w = d code
    Q4_K  144 for 256   f16 d, f16 dmin; 8 x (6-bit sc, 6-bit m) in 12 bytes; nibbles   w = d sc code - dmin m
    Q5_K  176 for 256   the same with a fifth bit of each code in 32 bytes before the nibbles
    Q6_K  210 for 256   nibbles; two more bits of each code in 64 bytes; 16 x i8 sc; f16 d     w = d sc (code - 32)

Columns go in groups of 32 with a scale each (Q6_K: two of 16), eight groups to a block of 256. The planes:
    codes   u8 [N, K]        Q8_0
            u8 [N, K / 2]    else: 32 bytes hold groups 2c (low nibbles) and 2c + 1 (high nibbles)
    high    u8 [N, K / 8]    Q5_K: 32 bytes a block, bit g of each for group g
            u8 [N, K / 4]    Q6_K: 32 bytes for four groups, two bits of each for one
    scales  i32 [N, K / 64]  four bytes for two groups: Q8_0 d d', Q4_K and Q5_K sc m sc' m', Q6_K four sc
    d       i32 [N, K / 256] d in the lower half, dmin in the upper; not for Q8_0

So no load is narrower than four bytes, and a Q4_K block takes 148 bytes, Q5_K 180, Q6_K 212. Where heads of fewer than
256 columns change places, d is repeated for each of them.

In the end 16 rows lie beside each other: of each plane 32 bytes (codes, high) or one number (scales, d) of the first
row, as many of the second, and so on. A kernel's tile is then read as it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton

BITS = {"Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}  # the formats with planes, and what tells them apart
BLOCK_BYTES = {8: 34, 4: 144, 5: 176, 6: 210}
GROUP, BLOCK, PAIR = 32, 256, 64  # columns
AT_ONCE = 1 << 24  # weights taken apart at once: what is in between takes a few times their bytes


@dataclass(frozen=True)
class Packed:
    bits: int
    inputs: int
    codes: Tensor
    high: Tensor
    scales: Tensor
    d: Tensor
    each: int  # columns that one d is for
    beside: int = 1  # rows that lie beside each other

    @property
    def planes(self) -> tuple[Tensor, ...]:
        return self.codes, self.high, self.scales, self.d

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.inputs

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def factors(self) -> Tensor:
        """All numbers that codes are multiplied by in the end, f16."""
        return (self.scales if self.bits == 8 else self.d).contiguous().view(torch.float16)

    def rows(self, which: Tensor | slice) -> Packed:
        """Where rows lie beside each other, a slice from one 16th row to another."""
        codes, high, scales, d = (plane[which] for plane in self.planes)
        return replace(self, codes=codes, high=high, scales=scales, d=d)

    def laid(self, beside: int) -> Packed:
        """With so many rows beside each other, if that divides them."""
        if self.beside == beside or self.shape[0] % max(self.beside, beside):
            return self
        codes, high, scales, d = (
            lay(plane, unit, self.beside, beside) for plane, unit in zip(self.planes, (GROUP, GROUP, 1, 1), strict=True)
        )
        return replace(self, codes=codes, high=high, scales=scales, d=d, beside=beside)

    def like(self, other: Packed) -> bool:
        return (self.bits, self.inputs, self.each, self.beside) == (other.bits, other.inputs, other.each, other.beside)


def lay(plane: Tensor, unit: int, before: int, after: int) -> Tensor:
    """[N, W] in memory order [N / before, W / unit, before, unit] -> the same with `after` rows beside each other."""
    N, W = plane.shape
    rows = plane.view(N // before, W // unit, before, unit).transpose(1, 2).reshape(N // after, after, W // unit, unit)
    return rows.transpose(1, 2).reshape(N, W).contiguous()


def join(parts: Sequence[Packed]) -> Packed:
    """Matrices of one format, one below the other."""
    codes, high, scales, d = (torch.cat(planes) for planes in zip(*(part.planes for part in parts), strict=True))
    return replace(parts[0], codes=codes, high=high, scales=scales, d=d)


def each_for(bits: int, K: int, heads: int) -> int | None:
    """Columns for one d where the columns move in so many parts (1: they stay); None: these planes cannot be."""
    each = gcd(BLOCK, K // heads) if bits != 8 else BLOCK
    fits = K % (GROUP if bits == 8 else BLOCK) == 0 and K % (heads * GROUP) == 0
    return each if fits and each >= PAIR else None


def plane_bytes(bits: int, K: int, each: int) -> tuple[int, int, int, int]:
    """Bytes of a row in codes, high, scales and d."""
    if bits == 8:
        return K, 0, 4 * -(-K // PAIR), 0
    return K // 2, K // 8 * (bits - 4), 4 * (K // PAIR), 4 * (K // each)


def pack(blocks: Tensor, bits: int, order: Tensor | None = None) -> Packed:
    """blocks u8 [N, bytes of a row], as the file has them. `order`: the columns in len(order) equal parts, and which of
    them stands at each place.
    """
    N = len(blocks)
    K = blocks.shape[1] // BLOCK_BYTES[bits] * (GROUP if bits == 8 else BLOCK)
    each = each_for(bits, K, 1 if order is None else len(order))
    assert each is not None
    kinds = torch.uint8, torch.uint8, torch.int32, torch.int32
    sizes = zip(plane_bytes(bits, K, each), kinds, strict=True)
    codes, high, scales, d = (torch.empty(N, n // kind.itemsize, dtype=kind, device=blocks.device) for n, kind in sizes)
    packed = Packed(bits, K, codes, high, scales, d, each)
    step = max(1, AT_ONCE // K)
    for a in range(0, N, step):
        for plane, part in zip(packed.planes, _planes(blocks[a : a + step], bits, order, each), strict=True):
            plane[a : a + step].view(torch.uint8).copy_(part.flatten(1))
    return packed


def _planes(blocks: Tensor, bits: int, order: Tensor | None, each: int) -> tuple[Tensor, ...]:
    """The bytes of codes, high, scales and d."""
    n = len(blocks)
    split = blocks.view(n, -1, BLOCK_BYTES[bits])  # [n, blocks, bytes]
    if bits == 8:
        codes, scales, d = split[..., 2:], split[..., :2], split[..., :0]
    else:
        codes, scales, d = (_six_bits if bits == 6 else _four_or_five_bits)(split, bits)
        d = d.repeat_interleave(BLOCK // each, 1)
    codes, scales = codes.reshape(n, -1, GROUP), scales.reshape(n, -1, 2)  # [n, groups, ..]
    if order is not None:
        codes, scales, d = (
            p.unflatten(1, (len(order), -1))[:, order].flatten(1, 2) if p.numel() else p for p in (codes, scales, d)
        )
    if bits == 8:
        return codes, d, F.pad(scales, (0, 0, 0, scales.shape[1] % 2)), d
    pairs = codes.view(n, -1, 2, GROUP)
    nibbles = pairs[:, :, 0] & 15 | pairs[:, :, 1] << 4
    high = codes[:, :0]
    if bits > 4:
        sharing = 8 // (bits - 4)  # groups in one byte
        above = (codes >> 4).view(n, -1, sharing, GROUP)
        high = sum((above[:, :, i] << i * (bits - 4) for i in range(sharing)), torch.zeros_like(above[:, :, 0]))
    return nibbles, high, scales, d


def _four_or_five_bits(split: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, blocks, 8, 32], (sc, m) [n, blocks, 8, 2], d and dmin [n, blocks, 4]."""
    d, packed, rest = split.tensor_split((4, 16), -1)
    low, mins, both = packed.unflatten(-1, (3, 4)).unbind(-2)
    sc = torch.cat([low & 63, both & 15 | low >> 2 & 48], -1)
    m = torch.cat([mins & 63, both >> 4 | mins >> 2 & 48], -1)
    fifth, nibbles = rest.tensor_split((32 * (bits - 4),), -1)
    nibbles = nibbles.unflatten(-1, (4, GROUP))
    codes = torch.stack([nibbles & 15, nibbles >> 4], -2).flatten(-3, -2)
    if bits == 5:
        codes |= torch.stack([(fifth >> g & 1) << 4 for g in range(8)], -2)
    return codes, torch.stack([sc, m], -1), d


def _six_bits(split: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, blocks, 8, 32], two sc for each group [n, blocks, 8, 2], d and zero [n, blocks, 4]."""
    nibbles, high, sc, d = split.tensor_split((128, 192, 208), -1)
    nibbles, high = nibbles.unflatten(-1, (2, 2, GROUP)), high.unflatten(-1, (2, GROUP))
    low = torch.stack([nibbles & 15, nibbles >> 4], -3).flatten(-3, -2)  # [n, blocks, 2, 4, 32]
    above = torch.stack([high >> 2 * i & 3 for i in range(4)], -2)
    return (low | above << 4).flatten(-3, -2), sc, F.pad(d, (0, 2))


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
    """Where rows of a plane begin, of which R lie beside each other."""
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
