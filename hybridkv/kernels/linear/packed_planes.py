"""The planes of packed weights (packed_weights.py) in numbers: which formats have them, and their bytes; and the bytes
of a matrix in f16 and in 4 bits on a CPU (half.py, int4.py). No torch.
"""

from __future__ import annotations

from math import gcd

BITS = {"Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}  # the formats with planes, and what tells them apart
BLOCK_BYTES = {8: 34, 4: 144, 5: 176, 6: 210}
GROUP, BLOCK, PAIR = 32, 256, 64  # columns
CODES4 = ("Q4_0", "Q4_1", "Q4_K")  # formats whose codes a CPU can multiply (int4.py)
WORKSPACE = 1 << 26  # weights written out at once, where many rows are multiplied (packed.py)


def each_for(bits: int, K: int, heads: int) -> int | None:
    """Columns that share one d where columns move in `heads` parts (1: they stay); None: these planes do not fit."""
    each = gcd(BLOCK, K // heads) if bits != 8 else BLOCK
    fits = K % (GROUP if bits == 8 else BLOCK) == 0 and K % (heads * GROUP) == 0
    return each if fits and each >= PAIR else None


def plane_bytes(bits: int, K: int, each: int) -> tuple[int, int, int, int]:
    """Bytes of a row in codes, high, scales and d."""
    if bits == 8:
        return K, 0, 4 * -(-K // PAIR), 0
    return K // 2, K // 8 * (bits - 4), 4 * (K // PAIR), 4 * (K // each)


def half_bytes(N: int, K: int) -> int:
    """Bytes that N rows [N, K] of f16 take in FBGEMM's layout: blocks of 512 columns, padded."""
    return 2 * (-(-K // 512) * 512) * N


def suits_half(N: int, K: int) -> bool:
    """Whether that layout, whose blocks have 16 rows, needs no further padding and is smaller than f32."""
    return N > 0 and N % 16 == 0 and half_bytes(N, K) < 4 * N * K


def int4_bytes(N: int, K: int) -> int:
    """Bytes of N rows [N, K] of 4-bit codes for a CPU, a bf16 scale and middle for each group."""
    return N * K // 2 + 4 * (N * K // GROUP)
