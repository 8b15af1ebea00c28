"""add_shared: the expert of Qwen3.5 that all tokens share, behind a gate.

y = routed + shared(x) * sigmoid(gate . x)
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.linear.exact import linear_ref


def add_shared_ref(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    return routed + shared * torch.sigmoid(linear_ref(x, gate))


@triton.jit
def add_shared_kernel(routed, shared, x, gate, y, D, BD: tl.constexpr):
    """Rounded where torch rounds: the product, the sigmoid, the gated row and the sum."""
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_x = i_t * D + o_d
    b_gate = tl.load(gate + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_shared = tl.load(shared + o_x, mask=m_d, other=0.0).to(tl.float32)
    b_routed = tl.load(routed + o_x, mask=m_d, other=0.0).to(tl.float32)
    dot = tl.sum(tl.load(x + o_x, mask=m_d, other=0.0).to(tl.float32) * b_gate, 0)
    dtype = y.dtype.element_ty
    weight = (1.0 / (1.0 + tl.exp(-dot.to(dtype).to(tl.float32)))).to(dtype)
    b_shared = (b_shared * weight.to(tl.float32)).to(dtype)
    tl.store(y + o_x, (b_routed + b_shared.to(tl.float32)).to(dtype), mask=m_d)


def add_shared_triton(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    T, D = x.shape
    y = torch.empty((T, D), dtype=x.dtype, device=x.device)
    routed, shared, x = (t.contiguous() for t in (routed, shared, x))
    if y.numel():
        BD = triton.next_power_of_2(D)
        add_shared_kernel[(T,)](
            routed, shared, x, gate.contiguous(), y, D, BD=BD, num_warps=min(16, max(4, BD // 1024))
        )
    return y


def add_shared(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """routed + shared * sigmoid(gate . x): routed, shared, x [T, D], gate [1, D] -> [T, D]."""
    op = add_shared_triton if use_triton(x) else add_shared_ref
    return op(routed, shared, x, gate)
