"""Norms over the last dimension, arithmetic in f32, result in the input's dtype.

add_rms_norm stands between two parts of a layer: a part's result is added to the residual stream, and the sum is normed
for the next part. The sum is rounded to its dtype first, so the norm is that of the stream as it is kept.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.exact import silu_exact, tree_sum
from hybridkv.kernels.overlap import MANY_TOKENS, can_overlap, wait_for_inputs


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def add_rms_norm_ref(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if delta is None else x + delta
    return total, rms_norm_ref(total, weight, eps)


@triton.jit
def rms_norm_kernel(
    x,  # [N / H, H, D]
    delta,  # [N, D]
    weight,  # [D]
    total,  # [N, D]
    y,  # [N, D]
    H,
    D,
    eps,
    stride_t,
    stride_h,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
    BD: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_w = tl.load(weight + o_d, mask=m_d, other=0.0)
    wait_for_inputs(OVERLAP)
    b_x = tl.load(x + i_n // H * stride_t + i_n % H * stride_h + o_d, mask=m_d, other=0.0).to(tl.float32)
    if ADD:
        b_x += tl.load(delta + i_n * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_total = b_x.to(total.dtype.element_ty)
        tl.store(total + i_n * D + o_d, b_total, mask=m_d)
        b_x = b_total.to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps)
    tl.store(y + i_n * D + o_d, (b_x * b_w).to(y.dtype.element_ty), mask=m_d)


def add_rms_norm_triton(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """A program for each row, whose sums have an order that the width alone decides. In exact mode products are not
    fused with sums: short steps and long ones are compiled apart.
    """
    D = x.shape[-1]
    assert weight.shape == (D,) and (delta is None or (delta.shape == x.shape and delta.dtype == x.dtype))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(y)
    # [T, H, D]; other numbers of dimensions become [rows, 1, D]
    rows = x if x.ndim == 3 else x.reshape(-1, 1, D)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    if y.numel():
        BD, overlap = triton.next_power_of_2(D), can_overlap(x, MANY_TOKENS)
        rms_norm_kernel[(y.numel() // D,)](
            rows, rows if delta is None else delta.contiguous(), weight, total, y, rows.shape[1], D, eps,
            rows.stride(0), rows.stride(1), ADD=delta is not None, OVERLAP=overlap, BD=BD,
            num_warps=min(16, max(1, BD // 1024)), launch_pdl=overlap, enable_fp_fusion=not exact,
        )  # fmt: skip
    return total, y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, x [..., D], weight [D] f32: zero-centred weights get their 1 at load."""
    if use_triton(x):
        return add_rms_norm_triton(x, None, weight, eps)[1]
    if x.dtype == torch.float32:
        return _rms_norm_row(x, weight, eps) if x.numel() == x.shape[-1] else F.rms_norm(x, weight.shape, weight, eps)
    return rms_norm_ref(x, weight, eps)


def _rms_norm_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same for a single row on a CPU in two operations, where F.rms_norm has eight that take a microsecond each."""
    norm = torch.linalg.vector_norm(x).item()
    return torch.addcmul(_zero(), x, weight, value=1 / math.sqrt(norm * norm / x.shape[-1] + eps))


@cache
def _zero() -> Tensor:
    return torch.zeros(())


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta in x's dtype, its norm), all [..., D]. Without a delta the sum is x itself."""
    if use_triton(x):
        return add_rms_norm_triton(x, delta, weight, eps)
    total = x if delta is None else x + delta
    return total, rms_norm(total, weight, eps)


def gated_rms_norm_ref(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate), gate in f32."""
    return rms_norm_ref(x.float(), weight, eps) * F.silu(gate.float())


gated_rms_norm = gated_rms_norm_ref


def rms_norm_exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if use_triton(x):
        return add_rms_norm_triton(x, None, weight, eps, exact=True)[1]
    wide = x.float()
    return (wide * torch.rsqrt(tree_sum(wide * wide) / x.shape[-1] + eps) * weight).to(x.dtype)


def add_rms_norm_exact(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if use_triton(x):
        return add_rms_norm_triton(x, delta, weight, eps, exact=True)
    total = x if delta is None else x + delta
    return total, rms_norm_exact(total, weight, eps)


def gated_rms_norm_exact(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_exact(x.float(), weight, eps) * silu_exact(gate.float())


def l2_norm_ref(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps), in f32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


l2_norm = l2_norm_ref


def l2_norm_exact(x: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(tree_sum(wide * wide) + eps)
