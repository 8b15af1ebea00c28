"""From a pooled vector to a stored entry: RMSNorm with weight, rotation of the last channels, the page's format.

Everything in f32 up to the format's own rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.norm_rope import norm_rope_ref, turn_tile
from hybridkv.kernels.page_format import store_entries_ref, store_tile
from hybridkv.kernels.page_layout import PageFormat


def warps(columns: int) -> int:
    """Of a program with so many channels: four a thread, 16 bytes of f32."""
    return max(1, min(4, columns // 128))


def store_pooled_ref(
    pages: Tensor,  # [N, P, width]
    fmt: PageFormat,
    entries: Tensor,  # [M] int64
    pooled: Tensor,  # [M, c]
    weight: Tensor,  # [c]
    eps: float,
    cos: Tensor,  # [M, r/2]
    sin: Tensor,
) -> None:
    x = norm_rope_ref(pooled.unsqueeze(1), torch.float32, eps, weight, (cos, sin)).squeeze(1)
    store_entries_ref(pages, fmt, entries, x)


@triton.jit
def store_pooled(
    pages, i_e, b_x, weight, eps, cos, sin, i_t, P, stride_cos, stride_sin,
    C: tl.constexpr, BC: tl.constexpr, TURNED: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """A pooled vector [BC], 0 past C, into place i_e. TURNED: how many last channels are rotated."""
    o_c = tl.arange(0, BC)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 0) / C + eps)
    b_x = b_x * b_scale * tl.load(weight + o_c, mask=o_c < C, other=0.0)
    o_e = i_e + tl.zeros([1], tl.int64)
    o_t = i_t + tl.zeros([1, 1], tl.int64)
    b_x = tl.reshape(b_x, [1, BC])
    b_x = turn_tile(b_x, cos + o_t * stride_cos, sin + o_t * stride_sin, o_t >= 0, C, TURNED // 2)
    store_tile(pages, o_e, o_e >= 0, o_c, b_x, P, C, ROPE, FORMAT)
