"""attention_prefill: causal attention of each request's new tokens over all that its streams hold.

The new keys are already in the pages (append runs first), so query i of n new tokens sees entries 0 .. length - n + i.
Queries run in blocks of 256, each over the keys it can see and no more, a tile of keys at a time; only the last tile
needs a mask. The query heads that share a KV head are more rows over the same keys, so K and V are never expanded.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.attention_tile import KEY_TILE, TileSum, read_pages, tile_attention, tile_attention_ref
from hybridkv.kernels.quant import Pages

QUERY_BLOCK = 256  # queries that run over the same keys


def attention_prefill(
    q: Tensor,  # [T, H, D] the requests' queries, one request after the other
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids, -1 past the end
    lengths: np.ndarray,  # [B, G] entries held, the new ones included
    starts: list[int],  # [B + 1] where each request's queries begin
    scale: float,
    device_lengths: Tensor | None = None,  # [B, G] the same lengths on q's device; this form branches on the host's
    key_tile: int = KEY_TILE,
) -> Tensor:
    out = torch.empty_like(q)
    G, D = table.shape[1], q.shape[-1]
    for b, (begin, end) in enumerate(pairwise(starts)):
        # streams of equal length run together; after eviction by head they differ and run one by one
        same = bool((lengths[b] == lengths[b, 0]).all())
        for g in [slice(0, G)] if same else [slice(i, i + 1) for i in range(G)]:
            for first in range(begin, end, QUERY_BLOCK):
                last = min(first + QUERY_BLOCK, end)
                seen = int(lengths[b, g][0]) - end + last
                heads = q[first:last].view(last - first, G, -1, D)[:, g]
                mixed = _block(heads, k_pool, v_pool, table[b, g], seen, scale, key_tile)
                out[first:last].view(last - first, G, -1, D)[:, g] = mixed
    return out


def _block(q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, length: int, scale: float, key_tile: int) -> Tensor:
    """q [n, G, H/G, D], the last n of `length` tokens, over streams table [G, N] -> [n, G, H/G, D]."""
    n, G, folds, D = q.shape
    rows = q.permute(1, 2, 0, 3).reshape(1, G, folds * n, D)
    history = length - n
    starts = range(0, history + 1, key_tile)  # so that the last tile holds all of the diagonal
    total = TileSum()
    for start in starts:
        stop = length if start == starts[-1] else start + key_tile
        k, v = (read_pages(pool, table, start, stop).unsqueeze(0) for pool in (k_pool, v_pool))
        total.add(*tile_attention(rows, k, v, scale, history - start if stop == length else None, folds=folds))
    return total.result(q.dtype).view(G, folds, n, D).permute(2, 0, 1, 3)


def attention_prefill_ref(
    q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, lengths: np.ndarray, starts: list[int], scale: float
) -> Tensor:
    """The definition, one query at a time. For tests."""
    out = torch.empty_like(q)
    G = table.shape[1]
    for b, (begin, end) in enumerate(pairwise(starts)):
        for i in range(begin, end):
            for g in range(G):
                seen = int(lengths[b, g]) - (end - 1 - i)
                k = read_pages(k_pool, table[b, g : g + 1], 0, seen)[None]
                v = read_pages(v_pool, table[b, g : g + 1], 0, seen)[None]
                heads = q[i].view(G, -1, q.shape[-1])[g][None, None]  # [1, 1, H/G, D]
                out[i].view(G, -1, q.shape[-1])[g] = tile_attention_ref(heads, k, v, scale)[0][0, 0]
    return out
