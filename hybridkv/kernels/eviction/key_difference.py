"""key_differences: how far each key of a stream points from the mean direction of the stream's keys.

Minus the cosine to it: from -1 (as most keys) to 1 (the opposite). Two passes over the keys, TILE of them at a time and
as many streams as BYTES allow, so that what is taken does not grow with the context. Sums run over tiles in ascending
order: neither the size of pages nor the other streams change a result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.formats.kv_format import Pages, page_tensors

TILE = 1024  # keys that are read at once
BYTES = 16 << 20  # of f32 keys of a tile


def key_differences(
    k_pool: Pages,  # [N, P, D]
    table: Tensor,  # [G, N] page ids
    positions: Tensor,  # [G, L] of each entry; -1 past a stream's length
) -> Tensor:
    """[G, L] f32; past a stream's length anything."""
    G, L = positions.shape
    D = page_tensors(k_pool)[0].shape[-1]
    at_once = max(1, BYTES // (4 * TILE * D))
    parts = [_of_streams(k_pool, table[i : i + at_once], positions[i : i + at_once]) for i in range(0, G, at_once)]
    return torch.cat(parts) if parts else torch.empty(0, L, device=positions.device)


def _of_streams(k_pool: Pages, table: Tensor, positions: Tensor) -> Tensor:
    G, L = positions.shape

    def unit(start: int) -> Tensor:
        """Keys [G, tile, D] of length 1, 0 past a stream's length."""
        stop = min(start + TILE, L)
        keys = read_pages(k_pool, table, start, stop).float()
        return F.normalize(keys.masked_fill(positions[:, start:stop, None] < 0, 0), dim=-1)

    starts = range(0, L, TILE)
    total = sum(unit(start).sum(1) for start in starts)
    if not isinstance(total, Tensor):  # there is no entry
        return torch.empty(G, 0, device=positions.device)
    anchor = F.normalize(total, dim=-1)[:, None]
    return torch.cat([-(unit(start) * anchor).sum(-1) for start in starts], 1)
