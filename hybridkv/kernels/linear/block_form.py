"""BlockForm: matrices of small codes with a scale for each block of them, in numbers. No torch.

    bits   codes                                                 blocks
    8      a byte of E4M3 a value                                128 x 128, ragged at the edges (DeepSeek)
    4      E2M1, two in a byte, the even column in the low half  32 columns of a row (MXFP4)

A scale is a byte of E8M0, which is a power of two, or an f32. The tensors are in block_scaled.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

FP8_BLOCK = (128, 128)
FP4_BLOCK = (1, 32)
LEAST_COLUMNS = 32  # of a block that the kernels take, which are powers of two


@dataclass(frozen=True)
class BlockForm:
    """What a matrix of codes looks like."""

    bits: int  # of a code: 8 or 4
    rows: int  # of a block
    columns: int
    scale_bytes: int  # 1: E8M0; 4: f32

    @property
    def kept(self) -> bool:
        """Whether products read these codes; matrices of other blocks are dequantised when they are loaded."""
        return self.columns >= LEAST_COLUMNS and self.columns & (self.columns - 1) == 0

    def joined(self, *parts: int) -> BlockForm:
        """Of matrices with these numbers of rows, one below the other: no block may reach over a border. Blocks of
        fewer rows repeat their scales.
        """
        return replace(self, rows=gcd(self.rows, *parts[:-1]))

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Bytes of the codes of a matrix."""
        return rows, columns * self.bits // 8

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Scales of a matrix."""
        return -(-rows // self.rows), -(-columns // self.columns)

    def nbytes(self, rows: int, columns: int) -> int:
        """Of codes and scales of a matrix."""
        return prod(self.code_shape(rows, columns)) + self.scale_bytes * prod(self.scale_shape(rows, columns))


RELEASED_FP8 = BlockForm(8, *FP8_BLOCK, 1)  # DeepSeek-V4: attention and the shared experts
RELEASED_FP4 = BlockForm(4, *FP4_BLOCK, 1)  # its routed experts
