"""attention_decode: one query per request over its pages, split along the keys.

All requests run together. A tile of keys is read for those requests that reach it; streams shorter than the tile's end
are masked. The tile is the only copy made, so the workspace does not grow with the context.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.attention_prefill import attention_prefill_ref
from hybridkv.kernels.attention_tile import KEY_TILE, TileSum, read_pages, tile_attention
from hybridkv.kernels.quant import Pages


def attention_decode_ref(
    q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, lengths: np.ndarray, scale: float
) -> Tensor:
    """The definition: a prefill of one token for each request."""
    return attention_prefill_ref(q, k_pool, v_pool, table, lengths, list(range(len(q) + 1)), scale)


def attention_decode(
    q: Tensor,  # [B, H, D]
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids, -1 past the end
    lengths: np.ndarray,  # [B, G] entries held, the new one included; on the host: no branch waits for the device
    scale: float,
    device_lengths: Tensor | None = None,  # [B, G] the same lengths on q's device, where the caller has them there
    key_tile: int = KEY_TILE,
) -> Tensor:
    ends = torch.from_numpy(lengths).to(q.device) if device_lengths is None else device_lengths
    B, G = table.shape[:2]
    heads = q.view(B, G, -1, q.shape[-1])  # [B, G, H/G, D]
    longest = lengths.max(axis=1)
    if int(longest.max()) <= key_tile:
        return _tile(heads, k_pool, v_pool, table, lengths, ends, 0, int(longest.max()), scale)[0].reshape(q.shape)
    out = torch.empty_like(heads)
    # requests with the same number of tiles run together
    tiles = -(-longest // key_tile)
    for count in np.unique(tiles).tolist():
        rows = np.flatnonzero(tiles == count)
        at = torch.from_numpy(rows).to(q.device)
        total = TileSum()
        for start in range(0, count * key_tile, key_tile):
            stop = min(start + key_tile, int(longest[rows].max()))
            total.add(*_tile(heads[at], k_pool, v_pool, table[at], lengths[rows], ends[at], start, stop, scale))
        out[at] = total.result(q.dtype)
    return out.view(q.shape)


def _tile(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray,
    ends: Tensor,
    start: int,
    stop: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    visible = None
    if int(lengths.min()) < stop:
        visible = torch.arange(start, stop, device=q.device) < ends[:, :, None, None]  # [B, G, 1, tile]
    k, v = read_pages(k_pool, table, start, stop), read_pages(v_pool, table, start, stop)
    return tile_attention(q, k, v, scale, visible=visible)
