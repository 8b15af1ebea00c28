"""The Hopper kernel of attention_prefill compiles where there is no GPU. tests/gpu tests what it computes."""

import pytest
from long_form import more
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import numpy as np
import torch
import triton
from no_device import SHARED_MEMORY, built
from hybridkv.kernels.attention import prefill as file
from hybridkv.kernels.backend import GLUON
from hybridkv.kernels.formats.fp8 import Fp8Pages
from hybridkv.kernels.attention.dequantise import dequantise_triton

assert triton.__version__.startswith(GLUON), "another Triton than the Hopper kernel is written for"
file.dequantise = dequantise_triton
lengths, rows = np.full((2, 4), 200), torch.zeros(2, dtype=torch.int64)
table, lse_out = torch.zeros(5, 4, 4, dtype=torch.int32), (torch.zeros(9, 24), torch.zeros(50, dtype=torch.int64))
for D, splits in ((256, 1), (64, 2)):
    q, pool = torch.zeros(50, 24, D, dtype=torch.bfloat16), torch.zeros(4, 64, D, dtype=torch.bfloat16)
    if splits > 1:
        pool = Fp8Pages(pool.to(torch.uint8), torch.zeros(4, 64))
    args = (table, lengths, [0, 20, 50], 1.0, torch.from_numpy(lengths))
    file.attention_prefill_hopper(q, pool, pool, *args, rows=rows, lse=lse_out, splits=splits)
for name, kernel in built:
    assert 0 < kernel.metadata.shared <= SHARED_MEMORY or name == "join_states_kernel"
    print(name, kernel.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.slow
def test_it_compiles_over_pages_and_over_dequantised_keys() -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    printed = compile_alone(COMPILE)
    # steps of 16: channels of S = q K^T for the first tile and in both loops, keys of O += P V in both and at the end
    products = {D: 2 * 3 * (D // 16 + 64 // 16) for D in (64, 256)}  # for two workers
    assert printed.splitlines() == [
        f"prefill_hopper_kernel {products[256]}",
        "dequantise_kernel 0",
        f"prefill_hopper_kernel {products[64]}",
        "join_states_kernel 0",
    ]


EXACT = """
import torch
from long_form import more
from no_device import SHARED_MEMORY, built
from hybridkv.kernels.attention import exact as file

file.suits_hopper = lambda q, pool: True
table, rows = torch.zeros(5, 4, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
ends = torch.zeros(2, 4, dtype=torch.int64)
for D, by_split in ((64, False), (256, True), *more((64, True), (128, False), (128, True), (256, False))):
    q, pool = torch.zeros(50, 24, D, dtype=torch.bfloat16), torch.zeros(4, 64, D, dtype=torch.bfloat16)
    file.attention_exact_triton(q, pool, pool, table, ends, [0, 20, 50], 1.0, rows, 5000, q, by_split=by_split)
for name, kernel in built:
    assert kernel.metadata.shared <= SHARED_MEMORY
    print(name, kernel.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.slow
@pytest.mark.long
def test_it_compiles_for_exact_mode() -> None:
    """Splits joined by a program, and left for another kernel to join; the long form has every width with both."""
    names = [line.split()[0] for line in compile_alone(EXACT).splitlines()]
    whole, apart = ["prefill_hopper_kernel"], ["prefill_hopper_kernel", "join_splits_kernel"]
    assert names == [*whole, *apart, *more(*apart, *whole, *apart, *whole)]
