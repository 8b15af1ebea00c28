"""The PTX of linear_packed's kernels for Hopper GPUs, run in numpy against plain sums of codes.

What the kernels load and add up is compared on a GPU (tests/gpu/test_linear_packed.py); here they are compiled.
"""

import numpy as np
import pytest
from own_process import compile_alone
from ptx_warp import LANES, G, T, Warp, halves, joined

from hybridkv.kernels.backend import HAS_GLUON
from hybridkv.kernels.linear.packed_rows_hopper import multiply_bytes, multiply_nibbles, sum_columns
from hybridkv.kernels.linear.packed_vector_hopper import multiply_groups, multiply_pairs

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="the kernels are written for another Triton")


def words(rng: np.random.Generator, count: int = 16) -> np.ndarray:
    return rng.integers(0, 1 << 32, (32, count), dtype=np.uint32)


def drawn_x(rng: np.random.Generator, count: int = 16) -> np.ndarray:
    """[32 lanes, registers] of two BF16: lane 4 n + t has as many columns of column n of the product."""
    return np.stack([joined(rng.standard_normal(32), rng.standard_normal(32)) for _ in range(count)], 1)


def returned(count: int, ptx: str, *inputs: np.ndarray) -> np.ndarray:
    """The first `count` registers of what an asm statement returns, [32, count]; the inputs are numbered after them."""
    flat = np.concatenate(inputs, 1)
    warp = Warp({f"${count + i}": flat[:, i] for i in range(flat.shape[1])})
    warp.run(ptx)
    return np.stack([warp[f"${i}"] for i in range(count)], 1)


def run(ptx: str, *inputs: np.ndarray) -> np.ndarray:
    """Inputs [32, 16]; the result as [32 lanes, (of W or of ones), (row, column), pair]."""
    return returned(16, ptx, *inputs).reshape(32, 2, 4, 2)


def sums(codes: np.ndarray, x: np.ndarray) -> np.ndarray:
    """codes [32 lanes, 2 rows, columns], in the order of the columns of x [32, registers] -> [32 lanes, (row, column)]:
    every product by its definition.
    """
    columns = codes.shape[2]
    left, right = np.zeros((16, 4, columns)), np.zeros((8, 4, columns))
    for row in (0, 1):
        left[G + 8 * row, T] = codes[:, row]
    right[G, T] = np.stack([half for i in range(columns // 2) for half in halves(x[:, i])], 1)
    product = np.einsum("rtk,ctk->rc", left, right)
    return np.stack([product[G + 8 * row, 2 * T + column] for row in (0, 1) for column in (0, 1)], 1)[LANES]


def bytes_of(w: np.ndarray) -> np.ndarray:
    """Words [32, (pair, row, 4)] -> bytes [pair, 32, row, 16]."""
    return w.copy().view(np.uint8).reshape(32, 2, 2, 16).transpose(1, 0, 2, 3)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_nibbles(bits: int) -> None:
    rng = np.random.default_rng(bits)
    w, high, x, x2 = words(rng), words(rng, 8), drawn_x(rng), drawn_x(rng)
    high, width = np.concatenate([high, high], 1), bits - 4  # both pairs of groups have the same bytes
    got = run(multiply_pairs(bits, True), w, x, x2, *([high] if width else []))
    for pair, (low, above) in enumerate(zip(bytes_of(w), bytes_of(high), strict=True)):
        part, want, ones = slice(8 * pair, 8 * pair + 8), np.zeros((32, 4)), np.zeros((32, 4))
        for up, given in enumerate((x[:, part], x2[:, part])):
            more = above >> (2 * pair + up) * width & (1 << width) - 1
            want += sums((low >> 4 * up & 15 | more << 4) + 128.0, given)
            ones += sums(np.ones(low.shape), given)
        np.testing.assert_allclose(got[:, 0, :, pair], want, rtol=1e-12, atol=1e-9)
        np.testing.assert_allclose(got[:, 1, :, pair], ones, rtol=1e-12, atol=1e-9)
    again = run(multiply_pairs(bits, False), w, x, x2, *([high] if width else []))
    np.testing.assert_array_equal(again[:, 0], got[:, 0])


def test_bytes() -> None:
    rng = np.random.default_rng(8)
    w, x = words(rng), drawn_x(rng)
    got = run(multiply_groups(), w, x)
    for group, codes in enumerate(bytes_of(w).view(np.int8)):
        want = sums(codes.astype(np.float64), x[:, 8 * group : 8 * group + 8])
        np.testing.assert_allclose(got[:, 0, :, group], want, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_nibbles_by_rows_of_x(bits: int, blocks: int) -> None:
    rng = np.random.default_rng(bits)
    w, high, x = words(rng, 8), words(rng, 4), [drawn_x(rng, 8) for _ in range(2 * blocks)]
    high, width = np.concatenate([high, high], 1), bits - 4
    got = returned(16 * blocks, multiply_nibbles(bits, 2, blocks), w, *x, *([high] if width else []))
    got = got.reshape(32, blocks, 2, 4, 2)
    ones = returned(16 * blocks, sum_columns(2, blocks), *x).reshape(got.shape)
    low, above = (v.copy().view(np.uint8).reshape(32, 2, 2, 8) for v in (w, high))
    for block in range(blocks):
        for pair in (0, 1):
            for up in (0, 1):
                more = above[:, pair] >> (2 * pair + up) * width & (1 << width) - 1
                given = x[2 * block + up][:, 4 * pair : 4 * pair + 4]
                want = sums((low[:, pair] >> 4 * up & 15 | more << 4) + 128.0, given)
                np.testing.assert_allclose(got[:, block, pair, :, up], want, rtol=1e-12, atol=1e-9)
                want = sums(np.ones(low[:, pair].shape), given)
                np.testing.assert_allclose(ones[:, block, pair, :, up], want, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("blocks", [1, 2])
def test_bytes_by_rows_of_x(blocks: int) -> None:
    rng = np.random.default_rng(8)
    w, x = words(rng, 8), [drawn_x(rng, 8) for _ in range(blocks)]
    got = returned(8 * blocks, multiply_bytes(blocks), w, *x).reshape(32, blocks, 4, 2)
    codes = w.copy().view(np.int8).reshape(32, 2, 2, 8).astype(np.float64)
    for block in range(blocks):
        for group in (0, 1):
            want = sums(codes[:, group], x[block][:, 4 * group : 4 * group + 4])
            np.testing.assert_allclose(got[:, block, :, group], want, rtol=1e-12, atol=1e-9)


COMPILE = """
import torch
from no_device import SHARED_MEMORY, built
from hybridkv.kernels.linear import packed
from hybridkv.kernels.linear.packed_planes import plane_bytes
from hybridkv.kernels.linear.packed_weights import Packed

for bits, T, N, K, each, gated in (
    (4, 1, 34816, 5120, 256, True), (4, 16, 5120, 6144, 128, False), (5, 1, 5120, 2560, 64, False),
    (5, 8, 64, 5120, 256, True), (6, 1, 5120, 17408, 256, False), (6, 4, 5120, 768, 128, False),
    (8, 1, 5120, 6144, 256, False), (8, 16, 34816, 5120, 256, True),
):
    sizes = zip(plane_bytes(bits, K, each), (torch.uint8, torch.uint8, torch.int32, torch.int32))
    weight = Packed(bits, K, *(torch.empty(N, n // t.itemsize, dtype=t) for n, t in sizes), each, 16)
    packed.linear_packed_hopper(torch.empty(T, K, dtype=torch.bfloat16), weight, gated=gated)
for name, kernel in built:
    assert kernel.metadata.shared <= SHARED_MEMORY, (name, kernel.metadata.shared)
    assert "mma.sync" in kernel.asm["ptx"] and "griddepcontrol.wait" in kernel.asm["ptx"], name
print(len(built))
"""


def test_the_kernels_compile_and_fit() -> None:
    """Every format, the largest tiles, and columns that are no whole number of steps."""
    assert compile_alone(COMPILE).split() == ["8"]
