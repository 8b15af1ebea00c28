"""attention_decode compiles for a Hopper GPU at the 27B model's widths, where there is none."""

import pytest
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import torch
from no_device import SHARED_MEMORY, built
from hybridkv.kernels.attention import decode as file
from hybridkv.kernels.attention.decode_tuning import FEW, SHORT
from hybridkv.kernels.formats.fp8 import Fp8Pages

file.on_gpu = file.can_overlap = lambda q, max_tokens=None: True
file.has_pdl = lambda device: True
table, wide = (torch.zeros(5, 4, n, dtype=torch.int32) for n in (3, SHORT // 64 + 1))
codes = Fp8Pages(torch.zeros(4, 64, 256, dtype=torch.uint8), torch.zeros(4, 64))
for B in (FEW, FEW + 1):
    q, rows = torch.zeros(B, 24, 256, dtype=torch.bfloat16), torch.zeros(B, dtype=torch.int64)
    lengths = torch.zeros(B, 4, dtype=torch.int64)
    for pool in (torch.zeros(4, 64, 256, dtype=torch.bfloat16), codes):
        lse = torch.zeros(9, 24), rows
        file.attention_decode_triton(q, pool, pool, table, None, 1.0, lengths, rows, lse, q)
q, rows = torch.zeros(1, 24, 256, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
file.attention_decode_triton(q, codes, codes, wide, None, 1.0, torch.zeros(1, 4, dtype=torch.int64), rows)
for name, kernel in built:
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_MEMORY, name
    print(name, *(op for op in ("ldmatrix", "e4m3x2", "launch_dependents", "griddepcontrol.wait") if op in ptx))
"""


@pytest.mark.slow
def test_every_default_shape_compiles_and_fits() -> None:
    """In a process without the interpreter. Both kernels come early and wait; FP8 is converted in pairs."""
    printed = compile_alone(COMPILE)
    second = "join_parts_kernel griddepcontrol.wait"
    bf16 = ["attention_decode_kernel ldmatrix launch_dependents griddepcontrol.wait", second]
    fp8 = ["attention_decode_kernel ldmatrix e4m3x2 launch_dependents griddepcontrol.wait", second]
    assert printed.splitlines() == [*bf16, *fp8, *bf16, *fp8, *fp8]
