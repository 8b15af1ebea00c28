"""gdn_scan_hopper compiles where there is no GPU. What it computes is tested on one: tests/gpu."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import torch
import triton
from kernels.no_device import SHARED_MEMORY, built
from hybridkv.kernels import gdn_prefill as file
from hybridkv.kernels.backend import GLUON
from hybridkv.kernels.gdn_weights import DeltaNet

assert triton.__version__.startswith(GLUON), "another Triton than gdn_scan_hopper is written for"
file.on_hopper = lambda x, net: True
net = DeltaNet(16, 48, 128, 128, torch.zeros(10240, 4), torch.zeros(48), torch.zeros(48), torch.zeros(128), 1e-6)
x = torch.zeros(70, sum(net.columns), dtype=torch.bfloat16)
for dtype in (torch.float32, torch.bfloat16):
    file.gdn_prefill_triton(x, net, torch.zeros(3, 10240, dtype=dtype), torch.zeros(48, 128, 128, dtype=dtype))
for name, kernel in built:
    assert kernel.metadata.shared <= SHARED_MEMORY
    print(name, kernel.asm["ptx"].count("wgmma.mma_async"))
"""


def test_it_compiles_for_either_state(tmp_path: Path) -> None:
    """In a process without the interpreter, which would take the place of the compiler."""
    tests = Path(__file__).parents[1]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # steps of 16: channels of k S and q S, tokens of B (..), P F and k^T F
    products = 2 * 128 // 16 + 3 * 64 // 16
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in kernels] == ["gdn_inputs_kernel", "gdn_solve_kernel", "gdn_scan_hopper_kernel"] * 2
    assert {int(count) for name, count in kernels if "scan" in name} == {products}
