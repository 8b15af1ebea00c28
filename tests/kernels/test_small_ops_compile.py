"""Norms, gates, attention inputs, routing and the best token compile for a Hopper GPU at real widths."""

import pytest
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
from no_device import built
import torch
from hybridkv.kernels import activation, best_parts, norm
from hybridkv.kernels import best_tokens as argmax
from hybridkv.kernels.attention import inputs as attention_inputs
from hybridkv.kernels.moe.shared_expert import add_shared_triton
from hybridkv.kernels.moe.softmax_router import route_softmax_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages

for file in (activation, attention_inputs, norm):
    file.can_overlap = lambda x, max_tokens=None: len(x) == 1


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


f32, i64 = torch.float32, torch.int64
codes, bf16 = Fp8Pages(zeros(4, 64, 256, dtype=torch.uint8), zeros(4, 64, dtype=f32)), zeros(4, 64, 256)
weight = zeros(256, dtype=f32)
for T in (1, 64):
    x = zeros(T, 5120)
    norm.add_rms_norm_triton(x, x, zeros(5120, dtype=f32), 1e-6)
    norm.add_rms_norm_triton(x.view(T, 20, 256), None, weight, 1e-6)
    activation.silu_mul_triton(zeros(T, 34816))
    activation.sigmoid_mul_triton(zeros(T, 24, 256), zeros(T, 24, 512)[..., 256:])
    angles = zeros(T, 1, 32, dtype=f32)
    for pool in (bf16, codes):
        args = (zeros(T, 56 * 256), angles, angles, pool, pool, zeros(4, T, dtype=i64), 24, 4, 256, True)
        ring = zeros(2, 64, 24, 256), zeros(T, dtype=i64)
        attention_inputs.attention_inputs_triton(*args, weight, weight, 1e-6, *ring)
    argmax.best_tokens_triton(zeros(T, 248320, dtype=f32))
    part = best_parts.best_part_triton(zeros(T, 124160), 124160)
    best_parts.join_parts_triton(torch.stack((part, part)))
    route_softmax_triton(zeros(T, 256), 8, True)
    add_shared_triton(*(zeros(T, 2048) for _ in range(3)), zeros(1, 2048))
for name, kernel in built:
    print(name, "griddepcontrol.wait" in kernel.asm["ptx"])
"""
KERNELS = {
    "add_shared_kernel", "attention_inputs_kernel", "join_kernel", "join_parts_kernel", "part_kernel", "piece_kernel",
    "rms_norm_kernel", "route_softmax_kernel", "sigmoid_mul_kernel", "silu_mul_kernel",
}  # fmt: skip
OVERLAP = {"attention_inputs_kernel", "rms_norm_kernel", "sigmoid_mul_kernel", "silu_mul_kernel"}


def test_every_launch_compiles() -> None:
    printed = compile_alone(COMPILE)
    built = {tuple(line.split()) for line in printed.splitlines()}
    assert {name for name, _ in built} == KERNELS
    assert {name for name, waits in built if waits == "True"} == OVERLAP
