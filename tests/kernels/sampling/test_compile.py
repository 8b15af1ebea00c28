"""The kernels of sampling compile for a Hopper GPU, without fused multiply-add: it would leave out a rounding."""

import pytest
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
from long_form import more
from no_device import built
import torch
from hybridkv.kernels.sampling.launch import sample_rows_triton
from hybridkv.kernels.sampling.log_sum import log_sum_exp_triton
from hybridkv.kernels.sampling.mask import mask_rows_triton
from hybridkv.kernels.sampling.rows import SampleRow

for dtype in (torch.bfloat16, *more(torch.float32)):
    logits = torch.zeros(2, 248320, dtype=dtype)
    rows = [SampleRow(1.0, top_p=0.9), SampleRow(1.0, top_k=50, row=1, out=1)]
    sample_rows_triton(logits, rows, torch.zeros(2, 2, dtype=torch.int64))
    log_sum_exp_triton(logits)
    mask_rows_triton(logits, torch.zeros(2, 7760, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
for name, kernel in built:
    ptx = kernel.asm["ptx"]
    print(name, "fma.rn.f32" in ptx or "div.full" in ptx or "ex2.approx" in ptx)
"""
EXACT = {"survey_kernel", "bound_kernel", "list_kernel", "draw_kernel", "weigh_kernel", "finish_kernel", "mask_kernel"}


@pytest.mark.slow
@pytest.mark.long
def test_every_launch_compiles() -> None:
    built = {tuple(line.split()) for line in compile_alone(COMPILE).splitlines()}
    assert {name for name, _ in built} == EXACT | {"log_sum_piece_kernel", "log_sum_join_kernel"}
    assert {name for name, rough in built if rough == "False"} == EXACT
