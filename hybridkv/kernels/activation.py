"""Products with a gate: silu(gate) * up in a feed-forward layer, x * sigmoid(gate) in gated attention.

The activation is computed in f32 and rounded to the dtype, then the product is rounded: the same two roundings in every
form.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.exact import sigmoid_exact, silu_exact
from hybridkv.kernels.overlap import MANY_TOKENS, can_overlap, wait_for_inputs

FEW_TOKENS = 8  # up to this many, tiles are small, so that there is one for every part of the GPU


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def silu_mul_exact(gate_up: Tensor) -> Tensor:
    if use_triton(gate_up):  # which computes element by element
        return silu_mul_triton(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return silu_exact(gate).mul_(up)


def sigmoid_mul_ref(x: Tensor, gate: Tensor) -> Tensor:
    return (x * torch.sigmoid(gate)).flatten(1)


def sigmoid_mul_exact(x: Tensor, gate: Tensor) -> Tensor:
    if use_triton(x):
        return sigmoid_mul_triton(x, gate)
    return (x * sigmoid_exact(gate)).flatten(1)


@triton.jit
def silu_mul_kernel(gate_up, y, I, stride_t, OVERLAP: tl.constexpr, BI: tl.constexpr):
    blocks = tl.cdiv(I, BI)
    i_t = (tl.program_id(0) // blocks).to(tl.int64)
    o_i = tl.program_id(0) % blocks * BI + tl.arange(0, BI)
    m_i = o_i < I
    wait_for_inputs(OVERLAP)
    p_gate = gate_up + i_t * stride_t + o_i
    b_gate = tl.load(p_gate, mask=m_i, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + I, mask=m_i, other=0.0).to(tl.float32)
    b_gate = (b_gate / (1.0 + tl.exp(-b_gate))).to(y.dtype.element_ty)
    tl.store(y + i_t * I + o_i, (b_gate.to(tl.float32) * b_up).to(y.dtype.element_ty), mask=m_i)


@triton.jit
def times_sigmoid(b_x, b_gate):
    """b_x * sigmoid(b_gate) in the gate's dtype, which the sigmoid is rounded to first."""
    b_sigmoid = (1.0 / (1.0 + tl.exp(-b_gate.to(tl.float32)))).to(b_gate.dtype)
    return (b_x.to(tl.float32) * b_sigmoid.to(tl.float32)).to(b_gate.dtype)


@triton.jit
def sigmoid_mul_kernel(
    x, gate, y, D, HD, stride_xt, stride_xh, stride_gt, stride_gh, OVERLAP: tl.constexpr, BI: tl.constexpr
):  # x, gate [T, H, D], y [T, HD]
    blocks = tl.cdiv(HD, BI)
    i_t = (tl.program_id(0) // blocks).to(tl.int64)
    o_i = tl.program_id(0) % blocks * BI + tl.arange(0, BI)
    m_i = o_i < HD
    o_h, o_d = o_i // D, o_i % D
    wait_for_inputs(OVERLAP)
    b_x = tl.load(x + i_t * stride_xt + o_h * stride_xh + o_d, mask=m_i, other=0.0)
    b_gate = tl.load(gate + i_t * stride_gt + o_h * stride_gh + o_d, mask=m_i, other=0.0)
    tl.store(y + i_t * HD + o_i, times_sigmoid(b_x, b_gate), mask=m_i)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    T, I = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    y = torch.empty((T, I), dtype=gate_up.dtype, device=gate_up.device)
    BI = 512 if T <= FEW_TOKENS else 1024
    if y.numel():
        overlap = can_overlap(gate_up, MANY_TOKENS)
        silu_mul_kernel[(T * triton.cdiv(I, BI),)](
            gate_up, y, I, gate_up.stride(0), OVERLAP=overlap, BI=BI, num_warps=4, launch_pdl=overlap
        )
    return y


def sigmoid_mul_triton(x: Tensor, gate: Tensor) -> Tensor:
    T, H, D = x.shape
    assert gate.shape == x.shape and gate.dtype == x.dtype
    x, gate = (t if t.stride(2) == 1 else t.contiguous() for t in (x, gate))
    y = torch.empty((T, H * D), dtype=x.dtype, device=x.device)
    BI = 512 if T <= FEW_TOKENS else 1024
    if y.numel():
        overlap = can_overlap(x, MANY_TOKENS)
        sigmoid_mul_kernel[(T * triton.cdiv(H * D, BI),)](
            x, gate, y, D, H * D, *x.stride()[:2], *gate.stride()[:2],
            OVERLAP=overlap, BI=BI, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: gate_up [T, 2 I], the gates first -> [T, I]."""
    return silu_mul_triton(gate_up) if use_triton(gate_up) else silu_mul_ref(gate_up)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate): x, gate [T, H, D] -> [T, H D]."""
    return sigmoid_mul_triton(x, gate) if use_triton(x) else sigmoid_mul_ref(x, gate)
