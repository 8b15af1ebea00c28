"""Rotary embedding: angles once a step from absolute positions, then a rotation of the first 2R channels of each head.

half-split   pairs (i, i + R)       Llama, Qwen
interleaved  pairs (2i, 2i + 1)     DeepSeek
Channels past 2R pass through (partial rotation).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R] in f32 for positions [T] and frequencies [R]."""
    angle = positions.float()[:, None] * inv_freq[None, :]
    return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate x [T, heads, D] by angles [T, 1, R]; arithmetic in f32, result in x's dtype."""
    R = cos.shape[-1]
    turned = x[..., : 2 * R].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        mixed = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned[..., :R], turned[..., R:]
        mixed = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    mixed = mixed.to(x.dtype)
    return mixed if x.shape[-1] == 2 * R else torch.cat((mixed, x[..., 2 * R :]), -1)


rope = rope_ref
