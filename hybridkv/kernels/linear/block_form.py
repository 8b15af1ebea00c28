"""BlockForm: matrices of small codes with a scale for each block of them, in numbers. No torch.

    bits   codes                                                 blocks
    8      a byte of E4M3 a value                                128 x 128, ragged at the edges (DeepSeek)
    4      E2M1, two in a byte, the even column in the low half  32 columns of a row (MXFP4)

A scale is a byte of E8M0, which is a power of two, or an f32. The tensors are in block_scaled.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

FP8_BLOCK = (128, 128)
FP4_BLOCK = (1, 32)
LEAST_COLUMNS, MOST_COLUMNS = 32, 128  # of a block that the kernels take, which are powers of two
WRITTEN = 1 << 24  # values of a matrix that are written out at once, on a GPU, where many rows are multiplied

Span = tuple[int, int]  # first, and one past the last


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
        return LEAST_COLUMNS <= self.columns <= MOST_COLUMNS and self.columns & (self.columns - 1) == 0

    def joined(self, *parts: int) -> BlockForm:
        """Of matrices with these numbers of rows, one below the other: no block may reach over a border. Blocks of
        fewer rows repeat their scales.
        """
        return replace(self, rows=gcd(self.rows, *parts[:-1]))

    def part(self, rows: Sequence[Span] = (), columns: Sequence[Span] = ()) -> BlockForm:
        """Of some rows or columns of a matrix, one span after the other: smaller blocks where a span begins or ends
        inside of one and reaches over its border. Each has the scale of the block that it lies in.
        """
        return replace(self, rows=_block_of_spans(self.rows, rows), columns=_block_of_spans(self.columns, columns))

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Bytes of the codes of a matrix."""
        return rows, columns * self.bits // 8

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Scales of a matrix."""
        return -(-rows // self.rows), -(-columns // self.columns)

    def nbytes(self, rows: int, columns: int) -> int:
        """Of codes and scales of a matrix."""
        return prod(self.code_shape(rows, columns)) + self.scale_bytes * prod(self.scale_shape(rows, columns))


def _block_of_spans(block: int, spans: Sequence[Span]) -> int:
    inside = [begin // block == (end - 1) // block for begin, end in spans]
    begins = (begin for (begin, _), one in zip(spans, inside, strict=True) if not one)
    return gcd(block, *begins, *(end - begin for begin, end in spans[:-1]))


RELEASED_FP8 = BlockForm(8, *FP8_BLOCK, 1)  # DeepSeek-V4: attention and the shared experts
RELEASED_FP4 = BlockForm(4, *FP4_BLOCK, 1)  # its routed experts
