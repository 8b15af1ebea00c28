"""What storing a vector in DeepSeek-V4's cache does to it, format by format, from the definitions of the formats.

Every number a format can say is listed, and a value goes to the nearest of them, of two equally near ones to that with
the even code. float64 throughout, vectors in the last axis; nothing is shared with the package.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

Round = Callable[[Tensor], Tensor]
# the largest distance of neighbours, over the largest value of a group; scales that are powers of two leave up to half
# of the codes unused
STEP = {"f32": 0.0, "bf16": 2**-7, "fp8": 32 / 224, "fp8_entry": 32 / 448, "mxfp4": 2 / 3, "nvfp4": 2 / 5}

# code 8 e + m: subnormals m 2^-9, then (8 + m) 2^(e - 10); code 127 is NaN
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The nearest of +-table [codes]; past its end the last."""
    size = np.minimum(np.abs(x), table[-1])
    above = np.searchsorted(table, size)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - size, size - table[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(table[code], x)


def power_of_two_above(x: np.ndarray) -> np.ndarray:
    """The smallest power of two that is not smaller."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(1.0, np.where(fraction == 0.5, exponent - 1, exponent))


def bf16_array(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def in_groups(x: np.ndarray, size: int, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`change` applied to each `size` channels; the last group may be short."""
    return np.concatenate([change(x[..., i : i + size]) for i in range(0, x.shape[-1], size)], -1)


def largest(x: np.ndarray) -> np.ndarray:
    return np.abs(x).max(-1, keepdims=True)


def e4m3_power_of_two(x: np.ndarray) -> np.ndarray:
    scale = power_of_two_above(np.maximum(largest(x), 1e-4) / 448)
    return nearest(x / scale, E4M3) * scale


def e4m3_exact_scale(x: np.ndarray) -> np.ndarray:
    scale = (largest(x) / 448).astype(np.float32).astype(np.float64)
    return nearest(x / np.where(scale == 0, 1, scale), E4M3) * scale


def e2m1_power_of_two(x: np.ndarray) -> np.ndarray:
    scale = power_of_two_above(np.maximum(largest(x), 6 * 2.0**-126) / 6)
    return nearest(x / scale, E2M1) * scale


def e2m1_e4m3_scale(x: np.ndarray) -> np.ndarray:
    scale = nearest(np.maximum(largest(x) / 6, 2.0**-9), E4M3)
    return nearest(x / scale, E2M1) * scale


def hadamard_matrix(n: int) -> np.ndarray:
    """H[i, j] = (-1)^(common bits of i and j) / sqrt(n)."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / n**0.5


def fp8_entry_array(x: np.ndarray, rope: int, exact: bool) -> np.ndarray:
    """Channels before the last `rope` in E4M3; the rotary ones in BF16."""
    kept, turned = x[..., : x.shape[-1] - rope], bf16_array(x[..., x.shape[-1] - rope :])
    if exact:
        kept = e4m3_exact_scale(kept.astype(np.float32).astype(np.float64))
    else:
        kept = in_groups(bf16_array(kept), 64, e4m3_power_of_two)
    return np.concatenate((kept, turned), -1)


def mxfp4_array(x: np.ndarray) -> np.ndarray:
    return in_groups(x @ hadamard_matrix(x.shape[-1]), 32, e2m1_power_of_two)


def as_tensors(change: Callable[[np.ndarray], np.ndarray]) -> Round:
    return lambda x: torch.from_numpy(change(x.double().numpy()))


def unchanged(x: Tensor) -> Tensor:
    return x


def row_rounding(name: str, rope: int) -> Round:
    """Of window rows and entries."""
    return {
        "f32": unchanged,
        "bf16": as_tensors(bf16_array),
        "fp8": as_tensors(partial(fp8_entry_array, rope=rope, exact=False)),
        "fp8_entry": as_tensors(partial(fp8_entry_array, rope=rope, exact=True)),
    }[name]


def key_rounding(name: str) -> Round:
    """Of index keys."""
    return {
        "f32": unchanged,
        "bf16": as_tensors(bf16_array),
        "fp8": as_tensors(lambda x: e4m3_power_of_two(bf16_array(x))),
        "mxfp4": as_tensors(mxfp4_array),
        "nvfp4": as_tensors(lambda x: in_groups(x, 16, e2m1_e4m3_scale)),
    }[name]


def query_rounding(name: str) -> Round:
    """Of index queries: where keys are transformed, queries are, and rounded like them."""
    return key_rounding(name) if name == "mxfp4" else unchanged


def count_flips(name: str, want: Tensor, held: Tensor, noise: float) -> int:
    """Values that a rounding of almost the same number sent to a neighbouring code; any farther is an error.

    `noise`: what may differ without a flip, of the largest value: a scale of f32 has its own last bit.
    """
    assert want.shape == held.shape
    largest, away = want.abs().amax(-1, keepdim=True), (want - held).abs()
    assert (away <= STEP[name] * largest).all()
    return int((away > noise * largest).sum())
