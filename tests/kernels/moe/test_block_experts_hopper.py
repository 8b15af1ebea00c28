"""One token's kernel for Hopper GPUs: its PTX, run in numpy against plain sums, and that it compiles. What it loads and
adds up is compared on a GPU: tests/gpu/test_block_products.py, and test_block_experts.py where there is one.
"""

import numpy as np
import pytest
import torch
from own_process import compile_alone
from ptx_warp import LANES, G, T, Warp, halves, joined

from hybridkv.kernels.backend import HAS_GLUON
from hybridkv.kernels.formats.small_floats import e2m1_value, e4m3_value, unpack_pairs
from hybridkv.kernels.moe.block_experts_one_hopper import LEAST_SCALE, MOST_SCALE, multiply_fp4, multiply_fp8

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="the kernel is written for another Triton")


def drawn_x(rng: np.random.Generator, words: int) -> np.ndarray:
    """[32 lanes, words] of two BF16: of the four lanes that share a row; all rows have the same."""
    four = np.stack([joined(rng.standard_normal(4), rng.standard_normal(4)) for _ in range(words)], 1)
    return four[T]


def ran(ptx: str, *inputs: np.ndarray) -> np.ndarray:
    """What an asm statement returns, [32, 4]; its inputs [32, any] are numbered after that."""
    flat = [part[:, i] for part in inputs for i in range(part.shape[1])]
    warp = Warp({f"${4 + i}": each for i, each in enumerate(flat)})
    warp.run(ptx)
    return np.stack([warp[f"${i}"] for i in range(4)], 1)


def of_x(x: np.ndarray) -> np.ndarray:
    """[32, 2 words]: the numbers in order."""
    return np.stack([half for i in range(x.shape[1]) for half in halves(x[:, i])], 1)


def expected(low: np.ndarray, high: np.ndarray, x: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Values of each lane's two rows -> the sums that a lane has: rows g, g, g + 8, g + 8, over its four lanes."""
    sums = [np.zeros(8), np.zeros(8)]
    for to, values in zip(sums, (low, high), strict=True):
        np.add.at(to, G, (values * of_x(x)).sum(1))
    return np.stack([sums[0][G], sums[0][G], sums[1][G], sums[1][G]], 1)[LANES] + before


@pytest.mark.parametrize("step", range(4))
def test_fp4(step: int) -> None:
    """All codes, the ends of the scales, each lane's byte of the right word."""
    rng = np.random.default_rng(step)
    words, x = rng.integers(0, 1 << 32, (32, 8), dtype=np.uint32), drawn_x(rng, 16)
    scales = rng.integers(120, 130, (2, 8, 16)).astype(np.uint8)  # of rows g and g + 8; 4 steps of 4 groups
    scales[:, 0], scales[:, 1] = LEAST_SCALE, MOST_SCALE
    before = rng.standard_normal((8, 4)) * 2.0 ** (scales.max((0, 2)).astype(np.float64) - 127 - 32)[:, None]
    held = [part.view(np.uint32)[G] for part in scales]  # all four lanes have the words of their row
    pick = np.broadcast_to((T * 0x101 + 0x4040).astype(np.uint32)[:, None], (32, 4))
    got = ran(multiply_fp4(step), words, x, *held, pick, before[G])
    rows = []
    for r in (0, 1):
        codes = torch.from_numpy(words[:, 4 * r : 4 * r + 4].copy().view(np.uint8))
        scale = 2.0 ** (scales[r][G, 4 * step + T].astype(np.float64) - 127 - 32)
        rows.append(e2m1_value(unpack_pairs(codes)).double().numpy() * scale[:, None])
    want = expected(*rows, x, before[G])
    largest = np.abs(want).reshape(8, -1).max(1)[G][:, None]  # of a row: sums may cancel
    np.testing.assert_allclose(got / largest, want / largest, rtol=0, atol=1e-12)


def test_fp8() -> None:
    rng = np.random.default_rng(8)
    codes = rng.integers(0, 256, (32, 32)).astype(np.uint8)
    codes[(codes & 127) == 127] = 0  # files with NaN are refused
    x, before = drawn_x(rng, 8), rng.standard_normal((8, 4))
    got = ran(multiply_fp8(), codes.view(np.uint32), x, before[G])
    values = e4m3_value(torch.from_numpy(codes)).double().numpy()
    np.testing.assert_allclose(got, expected(values[:, :16], values[:, 16:], x, before[G]), rtol=1e-12, atol=1e-12)


COMPILE = """
from no_device import SHARED_MEMORY, built, usage
import torch
from hybridkv.kernels.linear.block_form import RELEASED_FP4, RELEASED_FP8, BlockForm
from hybridkv.kernels.linear.block_scaled import empty_blocks
from hybridkv.kernels.moe import block_experts_one
from hybridkv.kernels.moe.block_experts_one import launch_one_hopper, suits_hopper

cpu, BASE = torch.device("cpu"), BlockForm(8, 128, 128, 4)
# Flash, and a part of eight; Pro, whose columns are no whole number of stages; experts of FP8 alone
for D, I, forms in (
    (4096, 2048, (RELEASED_FP4, RELEASED_FP8)), (4096, 256, (RELEASED_FP4, RELEASED_FP8)),
    (7168, 3072, (RELEASED_FP4, RELEASED_FP8)), (2048, 512, (BASE,)),
):
    chosen = torch.zeros(7, dtype=torch.int32)
    for gated, N, K in ((True, 2 * I, D), (False, D, I)):
        stacks = [empty_blocks(form, (2, N, K), cpu) for form in forms]
        assert suits_hopper(stacks)
        x = torch.empty(1 if gated else 7, K, dtype=torch.bfloat16)
        y = torch.empty(7, N // 2 if gated else N, dtype=torch.bfloat16)
        launch_one_hopper(x, stacks, chosen, y, 10.0, gated)
for name, kernel in built:
    ptx = kernel.asm["ptx"]
    print(name, *usage(kernel), kernel.metadata.shared, ptx.count("mma.sync"), "griddepcontrol.wait" in ptx)
    assert kernel.metadata.shared * 6 <= SHARED_MEMORY, "six programs are to share a multiprocessor"
"""


def test_it_compiles_and_nothing_spills() -> None:
    built = [line.split() for line in compile_alone(COMPILE).splitlines()]
    assert [name for name, *_ in built] == ["one_row_kernel"] * 8
    for _, registers, spilled, _, products, waits in built:
        assert int(registers) <= 80 and spilled == "0" and int(products) > 0 and waits == "True", built
