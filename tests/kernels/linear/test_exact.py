"""linear_exact's kernel for Hopper GPUs: what decides its bits, when it is taken, and that it compiles without a GPU.
What it computes is tested on one: tests/gpu/test_exact_linear.py.
"""

import pytest
import torch
from numerics import assert_same_bytes
from own_process import compile_alone

from hybridkv.kernels.linear import exact as file
from hybridkv.kernels.linear.exact import FEW, MANY, at_16_bytes, suits_hopper, tiles_for


def test_there_are_tiles_for_any_shape() -> None:
    for N in (64, 1024, 5120, 34816, 248320):
        for T in (1, 8, 9, 16, 17, 33, 64, 65, 128, 500, 4096, 100_000):
            for gated in (False, True):
                tiles = tiles_for(T, N, gated, 132)
                assert min(T, 65) <= tiles.BT and (tiles.rows >= 64 or not gated)


def test_it_is_taken_by_dtype_and_shape_of_the_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "has_gluon", lambda device: True)

    def taken(T: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return suits_hopper(torch.empty(T, K, dtype=dtype), torch.empty(N, K, dtype=dtype))

    for T in (0, 1, 64, 5000):
        assert taken(T, 64, 8) and taken(T, 301, 5120)
        assert (
            not taken(T, 63, 8) and not taken(T, 64, 12) and not taken(T, 64, 0) and not taken(T, 64, 8, torch.float32)
        )


def test_what_the_copy_engine_cannot_read_is_copied() -> None:
    wide = torch.randn(9, 32).bfloat16()
    for x in (wide, wide[:, 8:24], wide[3:, 16:]):
        assert at_16_bytes(x) is x
    for x in (wide[:, 1:9], wide.T, wide[:1].expand(4, -1), wide.flatten()[1:17].view(2, 8)):
        copy = at_16_bytes(x)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0
        assert_same_bytes(x.contiguous(), copy)


COMPILE = """
import re

import torch
import triton
from no_device import SHARED_MEMORY, built
from hybridkv.kernels.linear import exact as file
from hybridkv.kernels.backend import GLUON

assert triton.__version__.startswith(GLUON), "another Triton than linear_hopper is written for"
file.sm_count = lambda device: 132
bias = torch.zeros(320, dtype=torch.bfloat16)
for tiles in [*(tiles for pair in file.FEW.values() for tiles in pair), *file.MANY]:
    x, weight = torch.zeros(tiles.BT, 512, dtype=torch.bfloat16), torch.zeros(320, 512, dtype=torch.bfloat16)
    file.linear_hopper(x, weight, None, False, tiles)
    if tiles.rows >= 64:
        file.linear_hopper(x, weight, bias, True, tiles)
for name, kernel in built:
    assert kernel.metadata.shared <= SHARED_MEMORY
    ptx = kernel.asm["ptx"]
    print(*sorted(set(re.findall(r"m64n\\d+k16", ptx))), ".local" in ptx)
"""


def test_it_compiles() -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    pytest.importorskip("triton", minversion="3.6")
    kernels = [line.split() for line in compile_alone(COMPILE).splitlines()]
    every = [*(tiles for pair in FEW.values() for tiles in pair), *MANY]
    # plain and gated; rows of W are the first side, and no tile is cut into smaller instructions
    want = [[f"m64n{tiles.BT}k16"] for tiles in every for _ in range(2 if tiles.rows >= 64 else 1)]
    assert [shapes for *shapes, _ in kernels] == want
    assert all(local == "False" for *_, local in kernels), "registers were spilled"
