"""norm_rope: RMSNorm over each head, then a rotation of its last 2 R channels in pairs (2i, 2i + 1).

Either part can be left out: DeepSeek-V4 norms its low-rank query with a weight and does not rotate it, norms and
rotates its queries without a weight, and only rotates its index queries. Arithmetic in f32, one rounding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

BLOCK = 4096  # values of a tile


def norm_rope_ref(
    x: Tensor,
    dtype: torch.dtype,
    eps: float | None = None,
    weight: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    y = x.float()
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if angles is None:
        return y.to(dtype)
    cos, sin = (a.unsqueeze(1) for a in angles)
    kept, last = y.split([y.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    a, b = last[..., 0::2], last[..., 1::2]
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((kept, rotated), -1).to(dtype)


@triton.jit
def load_angles(p_cos, p_sin, m_row, D, R, BC: tl.constexpr):
    """cos and sin [rows, BC] of rows of BC pairs, and which pairs [1, BC] are rotated: the last R of D // 2."""
    o_r = (tl.arange(0, BC) - (D // 2 - R))[None, :]
    m_r = (o_r >= 0) & (o_r < R)
    b_cos = tl.load(p_cos + o_r, mask=m_row & m_r, other=1.0)
    return b_cos, tl.load(p_sin + o_r, mask=m_row & m_r, other=0.0), m_r


@triton.jit
def rotate_pairs(b_x, b_cos, b_sin, m_r):
    b_a, b_b = tl.split(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2]))
    b_to_a, b_to_b = b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin
    return tl.interleave(tl.where(m_r, b_to_a, b_a), tl.where(m_r, b_to_b, b_b))  # infinity x 0 would be NaN


@triton.jit
def rotate_tile(b_x, p_cos, p_sin, m_row, D, R):
    """b_x [rows, columns], the last 2 R of its D channels rotated by angles [R] at p_cos, p_sin [rows, 1]."""
    b_cos, b_sin, m_r = load_angles(p_cos, p_sin, m_row, D, R, b_x.shape[1] // 2)
    return rotate_pairs(b_x, b_cos, b_sin, m_r)


@triton.jit(do_not_specialize=["N"])
def norm_rope_kernel(
    x,  # [T, H, D], rows of a token stride_t apart
    weight,  # [D]
    cos,  # [T, R]
    sin,
    y,  # [T, H, D]
    N,  # T * H
    H,
    D,
    R,
    eps,
    stride_t,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROPE: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,  # pairs of channels
):
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_d = tl.arange(0, 2 * BC)
    m_n = o_n < N
    m_x = m_n[:, None] & (o_d < D)[None, :]
    p_x = x + (o_n // H)[:, None] * stride_t + (o_n % H)[:, None] * D + o_d[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    if NORM:
        b_x *= tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
    if WEIGHT:
        b_x *= tl.load(weight + o_d, mask=o_d < D, other=0.0)[None, :]
    if ROPE:
        o_a = (o_n // H)[:, None] * R
        b_x = rotate_tile(b_x, cos + o_a, sin + o_a, m_n[:, None], D, R)
    tl.store(y + o_n[:, None] * D + o_d[None, :], b_x.to(y.dtype.element_ty), mask=m_x)


def norm_rope_triton(
    x: Tensor,
    dtype: torch.dtype,
    eps: float | None = None,
    weight: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    T, H, D = x.shape
    if x.stride()[1:] != (D, 1):
        x = x.contiguous()
    y = torch.empty((T, H, D), dtype=dtype, device=x.device)
    cos, sin = (a.contiguous() for a in angles) if angles is not None else (y, y)
    BC = triton.next_power_of_2(triton.cdiv(D, 2))
    BN = max(1, min(16, BLOCK // (2 * BC)))
    if y.numel():
        norm_rope_kernel[(triton.cdiv(T * H, BN),)](
            x, y if weight is None else weight, cos, sin, y, T * H, H, D, cos.shape[-1], eps or 0.0, x.stride(0),
            NORM=eps is not None, WEIGHT=weight is not None, ROPE=angles is not None, BN=BN, BC=BC, num_warps=4,
        )  # fmt: skip
    return y


def norm_rope(
    x: Tensor,  # [T, H, D]
    dtype: torch.dtype,  # of the result
    eps: float | None = None,  # None: no norm
    weight: Tensor | None = None,  # [D] f32
    angles: tuple[Tensor, Tensor] | None = None,  # cos, sin [T, R] f32; None: no rotation
) -> Tensor:  # [T, H, D]
    op = norm_rope_triton if use_triton(x) else norm_rope_ref
    return op(x, dtype, eps, weight, angles)
