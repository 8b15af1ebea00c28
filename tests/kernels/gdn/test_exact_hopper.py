"""exact_hopper.py compiles where there is no GPU. What it computes is tested on one: tests/gpu."""

import pytest
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import torch
from no_device import SHARED_MEMORY, built
from hybridkv.kernels.gdn import exact as file
from hybridkv.kernels.gdn.weights import DeltaNet

net = DeltaNet(16, 48, 128, 128, torch.zeros(10240, 4), torch.zeros(48), torch.zeros(48), torch.zeros(128), 1e-6)
requests = file.Requests(torch.tensor([1, 0, -1]), torch.tensor([0, 1, 60, 70]), torch.zeros(70, dtype=torch.int64))
for dtype in (torch.bfloat16, torch.float32):
    x, tails = torch.zeros(70, sum(net.columns), dtype=dtype), torch.zeros(2, 3, 10240, dtype=dtype)
    for shape in (file.HOPPER_SHAPE, None):
        file.gdn_exact_triton(x, net, tails, torch.zeros(2, 48, 128, 128), requests, shape)
for name, kernel in built:
    assert kernel.metadata.shared <= SHARED_MEMORY
    print(name, kernel.asm["ptx"].count("cp.async"), kernel.asm["ptx"].count("shfl.sync"))
"""


def test_it_compiles_for_either_dtype() -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    found = [line.split() for line in compile_alone(COMPILE).splitlines()]
    before, after = "gdn_exact_inputs_kernel", "gdn_exact_norm_kernel"
    one, other = [before, "gdn_exact_hopper_kernel", after], [before, "gdn_exact_scan_kernel", after]
    assert [name for name, *_ in found] == [*one, *other] * 2
    assert all(int(copies) > 0 and int(exchanges) > 0 for name, copies, exchanges in found if "hopper" in name)
