"""attention_even: the decode of one request on a CPU whose streams are equally long, the most frequent one there.

What attention_decode does for it, with nothing to find out in a layer: no stream ends before another, so nothing is
masked, and EvenPages says for all layers where the entries are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.activation import sigmoid_mul_ref
from hybridkv.kernels.attention.tile import KEY_TILE
from hybridkv.kernels.even_pages import EvenPages
from hybridkv.kernels.formats.kv_format import Pages

_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def suits_even(q: Tensor, k_pool: Pages, v_pool: Pages, length: int) -> bool:
    """Whether one tile of keys holds all, stored in q's dtype."""
    plain = isinstance(k_pool, Tensor) and isinstance(v_pool, Tensor) and k_pool.dtype == v_pool.dtype == q.dtype
    return plain and length <= KEY_TILE


def attention_even(
    q: Tensor,  # [1, H, D]
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    pages: EvenPages,
    streams: slice,  # of the layer
    scale: float,
    gate: Tensor | None = None,  # [1, H, D]: the result is multiplied by its sigmoid
) -> Tensor:
    """[1, H, D]"""
    assert isinstance(k_pool, Tensor) and isinstance(v_pool, Tensor)
    k, v = pages.entries(k_pool, streams), pages.entries(v_pool, streams)
    out = _attention(q.view(1, k.shape[1], -1, q.shape[2]), k, v, 0.0, False, scale=scale)[0].reshape(q.shape)
    return out if gate is None else sigmoid_mul_ref(out, gate).view_as(q)
