"""attention_decode compiles for a Hopper GPU at the 27B model's widths, where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import torch
from kernels.no_device import SHARED_MEMORY, built
from hybridkv.kernels import attention_decode as file
from hybridkv.kernels.quant import Fp8Pages

file.on_gpu = file.overlaps = lambda q: True
table = torch.zeros(5, 4, 3, dtype=torch.int32)
codes = Fp8Pages(torch.zeros(4, 64, 256, dtype=torch.uint8), torch.zeros(4, 64))
for B in (file.FEW, file.FEW + 1):
    q, rows = torch.zeros(B, 24, 256, dtype=torch.bfloat16), torch.zeros(B, dtype=torch.int64)
    lengths = torch.zeros(B, 4, dtype=torch.int64)
    for pool in (torch.zeros(4, 64, 256, dtype=torch.bfloat16), codes):
        file.attention_decode_triton(q, pool, pool, table, None, 1.0, lengths, rows, (torch.zeros(9, 24), rows))
for name, kernel in built:
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_MEMORY, name
    print(name, *(op for op in ("ldmatrix", "e4m3x2", "launch_dependents", "griddepcontrol.wait") if op in ptx))
"""


def test_every_default_shape_compiles_and_fits(tmp_path: Path) -> None:
    """In a process without the interpreter. The second kernel is told early, waits, and FP8 is converted in pairs."""
    tests = Path(__file__).parents[1]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == 2 * [
        "attention_decode_kernel ldmatrix launch_dependents",
        "join_parts_kernel griddepcontrol.wait",
        "attention_decode_kernel ldmatrix e4m3x2 launch_dependents",
        "join_parts_kernel griddepcontrol.wait",
    ]
