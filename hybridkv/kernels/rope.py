"""Rotary embedding: angles from absolute positions, once a step; then a rotation of the first 2R channels of each head.

half-split   pairs (i, i + R)       Llama, Qwen
interleaved  pairs (2i, 2i + 1)     DeepSeek
Channels past 2R pass through (partial rotation).
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW_TOKENS = 4  # up to here a CPU rotates by a product: one operation in place of ten, for 64 times the arithmetic


def rope_angles(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R] in f32 for positions [T] and frequencies [R]."""
    angle = positions.float()[:, None] * inv_freq[None, :]
    return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)


def rope_matrices(cos: Tensor, sin: Tensor) -> Tensor:
    """[T, 2 R, 2 R] f32 by which the rows of x [T, heads, 2 R] are multiplied: half-split pairs, channels in place."""
    R = cos.shape[-1]
    turn = cos.new_zeros(len(cos), 2 * R, 2 * R)
    turn.diagonal(0, 1, 2).copy_(torch.cat((cos, cos), -1)[:, 0])
    turn.diagonal(R, 1, 2).copy_(sin[:, 0])
    turn.diagonal(-R, 1, 2).copy_(sin[:, 0].neg())
    return turn


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate x [T, heads, D] by angles [T, 1, R]; arithmetic in f32, result in x's dtype."""
    R = cos.shape[-1]
    first = x[..., : 2 * R].float()
    rotated = torch.empty_like(first)
    a, b = _pairs(first, R, interleaved)
    to_a, to_b = _pairs(rotated, R, interleaved)
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin)
    rotated = rotated.to(x.dtype)
    return rotated if x.shape[-1] == 2 * R else torch.cat((rotated, x[..., 2 * R :]), -1)


def _pairs(x: Tensor, R: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :R], x[..., R:])


rope = rope_ref


def rope_exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split pairs, one rounding for each operation: no product is fused with a sum."""
    R = cos.shape[-1]
    a, b = x[..., :R].float(), x[..., R : 2 * R].float()
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return torch.cat((rotated, x[..., 2 * R :]), -1)
