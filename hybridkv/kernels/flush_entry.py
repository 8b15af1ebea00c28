"""From a pooled vector to a stored entry: RMSNorm with weight, rotation of the last channels, the page's format.

Everything in f32 up to the format's own rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.norm_rope import norm_rope_ref
from hybridkv.kernels.page_format import PageFormat, store_entries_ref, store_tile


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
    o_pair = tl.arange(0, BC // 2) - (C - TURNED) // 2
    m_pair = (o_pair >= 0) & (o_pair < TURNED // 2)
    b_cos = tl.load(cos + i_t * stride_cos + o_pair, mask=m_pair, other=1.0)
    b_sin = tl.load(sin + i_t * stride_sin + o_pair, mask=m_pair, other=0.0)
    b_a, b_b = tl.split(tl.reshape(b_x, [BC // 2, 2]))
    b_x = tl.reshape(tl.join(b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin), [1, BC])
    o_e = i_e + tl.zeros([1], tl.int64)
    store_tile(pages, o_e, o_e >= 0, o_c, b_x, P, C, ROPE, FORMAT)
