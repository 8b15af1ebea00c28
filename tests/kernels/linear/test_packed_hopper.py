"""The PTX of linear_packed's and linear_fp8's kernels for Hopper GPUs, run in numpy against plain sums of codes.

What the kernels load and add up is compared on a GPU (tests/gpu/test_linear_packed.py); here they are compiled.
"""

import numpy as np
import pytest
import torch
from ptx_warp import LANES, G, T, Warp, halves, joined

from hybridkv.kernels.backend import HAS_GLUON
from hybridkv.kernels.linear.fp8_hopper import multiply_e4m3
from hybridkv.kernels.linear.packed_hopper import multiply_bytes, multiply_nibbles, sum_columns

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="the kernels are written for another Triton")
Sums = np.ndarray  # [32 lanes, 8]: (row g or g + 8, column 2 t or 2 t + 1, product)


def words(rng: np.random.Generator, count: int = 8) -> np.ndarray:
    return rng.integers(0, 1 << 32, (32, count), dtype=np.uint32)


def run(ptx: str, *inputs: np.ndarray) -> Sums:
    """Inputs [32, 8]; what the asm statement returns."""
    flat = np.concatenate(inputs, 1)
    warp = Warp({f"${8 + i}": flat[:, i] for i in range(flat.shape[1])})
    warp.run(ptx)
    return np.stack([warp[f"${i}"] for i in range(8)], 1)


def drawn_x(rng: np.random.Generator) -> np.ndarray:
    """[32 lanes, 8 registers] of two BF16: lane 4 n + t has 16 columns of column n of the product."""
    return np.stack([joined(rng.standard_normal(32), rng.standard_normal(32)) for _ in range(8)], 1)


def sums(codes: np.ndarray, x: np.ndarray) -> np.ndarray:
    """codes [32 lanes, 2 rows, 16], in the order of the columns of x; -> [16, 8]: every product by its definition."""
    left, right = np.zeros((16, 4, 16)), np.zeros((8, 4, 16))
    for row in (0, 1):
        left[G + 8 * row, T] = codes[:, row]
    right[G, T] = np.stack([half for i in range(8) for half in halves(x[:, i])], 1)
    return np.einsum("rtk,ctk->rc", left, right)


def expected(products: list[np.ndarray]) -> Sums:
    found = np.zeros((32, 8))
    for i, product in enumerate(products):
        for row in (0, 1):
            for column in (0, 1):
                found[LANES, 4 * row + 2 * column + i] = product[G + 8 * row, 2 * T + column]
    return found


def bytes_of(w: np.ndarray) -> np.ndarray:
    """Words [32, (half, row, word)] -> bytes [32, row, (half, 8)]."""
    return w.copy().view(np.uint8).reshape(32, 2, 2, 8).transpose(0, 2, 1, 3).reshape(32, 2, 16)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_nibbles(bits: int) -> None:
    rng = np.random.default_rng(bits)
    w, high, x, x2 = words(rng), words(rng, 4), drawn_x(rng), drawn_x(rng)
    high = np.concatenate([high, high], 1)  # both pairs of groups have the same bytes
    low, above = bytes_of(w), bytes_of(high)
    pair, width = np.repeat([0, 1], 8), bits - 4
    codes = []
    for up in (0, 1):
        more = above >> ((2 * pair + up) * width).astype(np.uint8) & (1 << width) - 1
        codes.append((low >> 4 * up & 15 | more << 4) + 128.0)
    got = run(multiply_nibbles(bits), w, x, x2, *([high] if width else []))
    np.testing.assert_allclose(got, expected([sums(codes[0], x), sums(codes[1], x2)]), rtol=1e-12, atol=1e-9)
    ones = np.ones((32, 2, 16))
    np.testing.assert_allclose(
        run(sum_columns(), x, x2), expected([sums(ones, x), sums(ones, x2)]), rtol=1e-12, atol=1e-9
    )


def test_bytes() -> None:
    rng = np.random.default_rng(8)
    w, x = words(rng), drawn_x(rng)
    got = run(multiply_bytes(), w, x)
    want = expected([sums(bytes_of(w).view(np.int8).astype(np.float64), x), np.zeros((16, 8))])
    np.testing.assert_allclose(got.reshape(32, 4, 2).sum(2), want.reshape(32, 4, 2).sum(2), rtol=1e-12, atol=1e-9)


def test_e4m3() -> None:
    """16 bytes of a row lie side by side there; NaN becomes 480."""
    rng = np.random.default_rng(1)
    w, x = words(rng), drawn_x(rng)
    codes = torch.from_numpy(w.copy().view(np.uint8).reshape(32, 2, 16)).view(torch.float8_e4m3fn)
    true = codes.double().numpy()
    true = np.where(np.isnan(true), np.where(codes.view(torch.uint8).numpy() > 127, -480.0, 480.0), true)
    got, want = run(multiply_e4m3(), w, x), expected([sums(true, x), np.zeros((16, 8))])
    np.testing.assert_allclose(got.reshape(32, 4, 2).sum(2), want.reshape(32, 4, 2).sum(2), rtol=1e-12, atol=1e-9)
