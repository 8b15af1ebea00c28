"""From a pooled vector to a stored entry: RMSNorm with weight, rotation of the last channels, the page's format.

Everything in f32 up to the format's own rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.page_format import store_entries_ref, store_rows
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.v4.norm_rope import norm_rope_ref, rotate_pairs


def warps(columns: int) -> int:
    """Warps of a program with this many channels: a thread has four, 16 bytes of f32."""
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
    pages, i_page, i_row, b_x, b_weight, angles, eps, P, C: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Store a pooled vector, 0 past its C channels, in row i_row of page i_page. `angles`: load_angles' for one row."""
    b_cos, b_sin, m_r = angles
    b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / C + eps) * b_weight
    b_x = rotate_pairs(b_x[None, :], b_cos, b_sin, m_r)
    o_page, o_row = i_page + tl.zeros([1], tl.int64), i_row + tl.zeros([1], tl.int64)
    store_rows(pages, o_page, o_row, o_page >= 0, tl.arange(0, b_x.shape[1]), b_x, P, C, ROPE, FORMAT)
