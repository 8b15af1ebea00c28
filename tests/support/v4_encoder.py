"""The byte layouts of DeepSeek-V4 cache pages, written a second time: numpy, tables of values and frexp, no torch.

Tests compare the pages of the package with these byte for byte. Every number format is a list of the values its codes
have, and encoding is a search for the nearest; powers of two come from frexp and ldexp.
"""

import math

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.array([math.ldexp(c % 8 + 8 * (c >= 8), max(c // 8, 1) - 10) for c in range(127)])  # code 127 is NaN
F32_TINY = 2.0**-126


def nearest_code(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Codes of the nearest values; halfway: the even code; past the end: the last."""
    x = np.nan_to_num(np.abs(x.astype(np.float64)), posinf=1e300)
    high = np.clip(np.searchsorted(table, x), 1, len(table) - 1)
    low = high - 1
    to_low, to_high = x - table[low], table[high] - x
    return np.where((to_low < to_high) | ((to_low == to_high) & (low % 2 == 0)), low, high)


def e4m3(x: np.ndarray) -> np.ndarray:
    code = nearest_code(E4M3, x) + 128 * np.signbit(x)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def e2m1(x: np.ndarray) -> np.ndarray:
    code = nearest_code(E2M1, x) + 8 * np.signbit(x)
    return np.where(np.isnan(x), 0, code).astype(np.uint8)


def bf16(x: float) -> float:
    """Nearest number with 8 significant bits, ties to even, no exponent under that of 2^-126."""
    if not math.isfinite(x) or x == 0:
        return x
    quantum = max(math.frexp(x)[1], -125) - 8
    rounded = math.ldexp(round(math.ldexp(x, -quantum)), quantum)  # Python rounds halves to even
    return math.copysign(math.inf, x) if abs(rounded) >= 2.0**128 else math.copysign(rounded, x)


def bf16_bytes(x: np.ndarray) -> np.ndarray:
    rounded = np.array([bf16(float(v)) for v in x], np.float32)
    return np.ascontiguousarray((rounded.view(np.uint32) >> 16).astype("<u2")).view(np.uint8)


def amax(x: np.ndarray) -> float:
    finite = x[np.isfinite(x)]
    return float(np.abs(finite).max()) if len(finite) else 0.0


def exponent(largest: float, limit: float) -> int:
    """Smallest k with largest <= limit x 2^k, by trial."""
    k = math.frexp(largest / limit)[1] - 2
    while math.ldexp(limit, k) < largest:
        k += 1
    return k


def groups(x: np.ndarray, size: int) -> list[np.ndarray]:
    return [x[i : i + size] for i in range(0, len(x), size)]


def packed(codes: np.ndarray) -> np.ndarray:
    return np.array([low + 16 * high for low, high in codes.reshape(-1, 2).tolist()], np.uint8)


def hadamard(x: np.ndarray) -> np.ndarray:
    """The product with the matrix of signs. Exact only where all sums are: give it numbers on a coarse grid."""
    D = len(x)
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(D)] for i in range(D)], np.float64)
    return (x.astype(np.float64) @ signs).astype(np.float32) * np.float32(D**-0.5)


def fp8_groups(x: np.ndarray, size: int) -> tuple[np.ndarray, list[int]]:
    """E4M3 codes under a power of two for each group, and the powers."""
    x = np.array([bf16(float(v)) for v in x])
    powers = [exponent(max(amax(g), float(np.float32(1e-4))), 448.0) for g in groups(x, size)]
    return np.concatenate([e4m3(np.ldexp(g, -k)) for g, k in zip(groups(x, size), powers)]), powers


def entry_fp8(x: np.ndarray, rope: int) -> tuple[np.ndarray, np.ndarray]:
    kept = len(x) - rope
    codes, powers = fp8_groups(x[:kept], 64)
    scales = np.zeros(-(-len(powers) // 8) * 8, np.uint8)
    scales[: len(powers)] = [k + 127 for k in powers]
    return np.concatenate((codes, bf16_bytes(x[kept:]))), scales


def entry_fp8_entry(x: np.ndarray, rope: int) -> tuple[np.ndarray, np.ndarray]:
    kept, one = x[: len(x) - rope], np.float32(1)
    largest = np.float32(amax(kept))
    scale = max(largest * np.float32(1 / 448), np.float32(F32_TINY)) if largest > 0 else one
    codes = e4m3(kept * (one / scale))
    return np.concatenate((codes, bf16_bytes(x[len(x) - rope :]))), np.frombuffer(np.float32(scale).tobytes(), np.uint8)


def index_fp8(x: np.ndarray, rope: int) -> tuple[np.ndarray, np.ndarray]:
    codes, (k,) = fp8_groups(x, len(x))
    return codes, np.frombuffer(np.float32(math.ldexp(1, k)).tobytes(), np.uint8)


def index_mxfp4(x: np.ndarray, rope: int) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = [], []
    for g in groups(hadamard(x), 32):
        k = exponent(max(amax(g), 6 * F32_TINY), 6.0)
        codes.append(e2m1(np.ldexp(g.astype(np.float64), -k)))
        scales.append(255 if np.isnan(g).any() else k + 127)
    return packed(np.concatenate(codes)), np.array(scales, np.uint8)


def index_nvfp4(x: np.ndarray, rope: int) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = [], []
    for g in groups(x, 16):
        scale = int(e4m3(np.maximum(np.float32(amax(g)) * np.float32(1 / 6), np.float32(2.0**-9)).reshape(1))[0])
        codes.append(e2m1(g / np.float32(E4M3[scale])))
        scales.append(0x7F if np.isnan(g).any() else scale)
    return packed(np.concatenate(codes)), np.array(scales, np.uint8)


ENCODERS = {
    ("entry", "fp8"): entry_fp8,
    ("entry", "fp8_entry"): entry_fp8_entry,
    ("index", "fp8"): index_fp8,
    ("index", "mxfp4"): index_mxfp4,
    ("index", "nvfp4"): index_nvfp4,
}


def page_bytes(kind: str, name: str, rope: int, rows: np.ndarray) -> np.ndarray:
    """One full page [bytes] of rows [P, D] f32: all value rows, then all scale rows, padding 0."""
    parts = [ENCODERS[kind, name](row, rope) for row in rows.astype(np.float32)]
    return np.concatenate([values for values, _ in parts] + [scales for _, scales in parts])
