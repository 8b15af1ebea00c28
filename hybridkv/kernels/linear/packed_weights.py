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

Kernels take 16 rows interleaved: of each plane 32 bytes (codes, high) or one number (scales, d) of the first row, as
many of the second, and so on. A tile is then contiguous. The values themselves come out in packed_dequantise.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.linear.int4 import Codes4
from hybridkv.kernels.linear.packed_planes import BLOCK, BLOCK_BYTES, GROUP, each_for, plane_bytes

AT_ONCE = 1 << 24  # weights taken apart at once: temporaries take a few times their bytes


@dataclass(frozen=True)
class Packed:
    bits: int
    inputs: int
    codes: Tensor
    high: Tensor
    scales: Tensor
    d: Tensor
    each: int  # columns that one d is for
    beside: int = 1  # rows that are interleaved

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
        """All f16 numbers that the codes are multiplied by."""
        return (self.scales if self.bits == 8 else self.d).contiguous().view(torch.float16)

    def rows(self, which: Tensor | slice) -> Packed:
        """Some of the rows; where rows are interleaved, a slice whose ends are multiples of 16."""
        codes, high, scales, d = (plane[which] for plane in self.planes)
        return replace(self, codes=codes, high=high, scales=scales, d=d)

    def laid(self, beside: int) -> Packed:
        """The same with `beside` rows interleaved, if that divides the number of rows."""
        if self.beside == beside or self.shape[0] % max(self.beside, beside):
            return self
        codes, high, scales, d = (
            lay(plane, unit, self.beside, beside) for plane, unit in zip(self.planes, (GROUP, GROUP, 1, 1), strict=True)
        )
        return replace(self, codes=codes, high=high, scales=scales, d=d, beside=beside)

    def like(self, other: Packed) -> bool:
        return (self.bits, self.inputs, self.each, self.beside) == (other.bits, other.inputs, other.each, other.beside)


def lay(plane: Tensor, unit: int, before: int, after: int) -> Tensor:
    """[N, W] in memory order [N / before, W / unit, before, unit] -> the same with `after` rows interleaved."""
    N, W = plane.shape
    rows = plane.view(N // before, W // unit, before, unit).transpose(1, 2).reshape(N // after, after, W // unit, unit)
    return rows.transpose(1, 2).reshape(N, W).contiguous()


def join(parts: Sequence[Packed]) -> Packed:
    """Matrices of one format, one below the other."""
    codes, high, scales, d = (torch.cat(planes) for planes in zip(*(part.planes for part in parts), strict=True))
    return replace(parts[0], codes=codes, high=high, scales=scales, d=d)


def pack(blocks: Tensor, bits: int, order: Tensor | None = None, parts: int | None = None) -> Packed:
    """blocks u8 [N, bytes of a row], as the file has them. `order` permutes the columns in len(order) equal parts: part
    order[i] of the file comes to place i. With `parts`, there are so many and `order` takes some of them.
    """
    N = len(blocks)
    K = blocks.shape[1] // BLOCK_BYTES[bits] * (GROUP if bits == 8 else BLOCK)
    parts = parts or (1 if order is None else len(order))
    each = each_for(bits, K, parts)
    assert each is not None
    K = K if order is None else K // parts * len(order)
    kinds = torch.uint8, torch.uint8, torch.int32, torch.int32
    sizes = zip(plane_bytes(bits, K, each), kinds, strict=True)
    codes, high, scales, d = (torch.empty(N, n // kind.itemsize, dtype=kind, device=blocks.device) for n, kind in sizes)
    packed = Packed(bits, K, codes, high, scales, d, each)
    step = max(1, AT_ONCE // K)
    for a in range(0, N, step):
        for plane, part in zip(packed.planes, _planes(blocks[a : a + step], bits, order, parts, each), strict=True):
            plane[a : a + step].view(torch.uint8).copy_(part.flatten(1))
    return packed


def _planes(blocks: Tensor, bits: int, order: Tensor | None, parts: int, each: int) -> tuple[Tensor, ...]:
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
            p.unflatten(1, (parts, -1))[:, order].flatten(1, 2) if p.numel() else p for p in (codes, scales, d)
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


def unpack_codes4(blocks: Tensor, form: str) -> Codes4:
    """u8 [N, bytes of a row] as the file has them. Q4_K as above; Q4_0 and Q4_1 for 32 weights: f16 d, with Q4_1 f16 m,
    and 16 bytes whose low nibbles are the first half. w = d (code - 8), with Q4_1 d code + m.
    """
    n = len(blocks)
    if form == "Q4_K":
        codes, pairs, d = _four_or_five_bits(blocks.view(n, -1, BLOCK_BYTES[4]), 4)
        both = pairs.float() * d.contiguous().view(torch.float16).float().unsqueeze(-2)  # [n, blocks, 8, 2]
        return Codes4(codes.reshape(n, -1), both[..., 0].reshape(n, -1), -both[..., 1].reshape(n, -1))
    head = 4 if form == "Q4_1" else 2
    split = blocks.view(n, -1, head + GROUP // 2)
    factors = split[..., :head].contiguous().view(torch.float16).float()  # [n, groups, 1 or 2]
    nibbles = split[..., head:]
    codes = torch.cat([nibbles & 15, nibbles >> 4], -1).reshape(n, -1)
    scale = factors[..., 0].contiguous()
    return Codes4(codes, scale, factors[..., 1].contiguous() if head == 4 else -8 * scale)
