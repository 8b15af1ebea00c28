"""scan_hopper.py compiles where there is no GPU. What it computes is tested on one: tests/gpu."""

import pytest
from long_form import LONG
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import torch
import triton
from long_form import more
from no_device import SHARED_MEMORY, built
from hybridkv.kernels.gdn import prefill as file
from hybridkv.kernels.backend import GLUON
from hybridkv.kernels.gdn.segments import Segments
from hybridkv.kernels.gdn.weights import DeltaNet

assert triton.__version__.startswith(GLUON), "another Triton than scan_hopper.py is written for"
file.suits_hopper = lambda x, net: True
net = DeltaNet(16, 48, 128, 128, torch.zeros(10240, 4), torch.zeros(48), torch.zeros(48), torch.zeros(128), 1e-6)
x = torch.zeros(70, sum(net.columns), dtype=torch.bfloat16)
for dtype in (torch.float32, *more(torch.bfloat16)):
    states = torch.zeros(3, 3, 10240, dtype=dtype), torch.zeros(3, 48, 128, 128, dtype=dtype)
    segments = Segments.of([(1, 0, 65), (-1, 65, 70)], x.device)
    file.gdn_prefill_triton(x, net, *states, segments, torch.zeros(70, 6144, dtype=x.dtype))
for name, kernel in built:
    assert kernel.metadata.shared <= SHARED_MEMORY
    print(name, kernel.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.long
def test_it_compiles_for_either_state() -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    printed = compile_alone(COMPILE)
    # steps of 16: channels of k S and q S, tokens of B (..), P F and k^T F
    products = 2 * 128 // 16 + 3 * 64 // 16
    kernels = [line.split() for line in printed.splitlines()]
    one = ["gdn_inputs_kernel", "gdn_solve_kernel", "gdn_scan_hopper_kernel"]
    assert [name for name, _ in kernels] == one * (1 + LONG)
    assert {int(count) for name, count in kernels if "scan" in name} == {products}
