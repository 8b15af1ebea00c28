"""value_norms: the length of each entry's value, which bounds what the entry can add to an answer."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.attention.tile import KEY_TILE, read_pages
from hybridkv.kernels.exact import tree_sum
from hybridkv.kernels.formats.kv_format import Pages


def value_norms_ref(v_pool: Pages, table: Tensor, lengths: Tensor, L: int) -> Tensor:
    out = torch.zeros(len(table), L, device=table.device)
    place = torch.arange(L, device=table.device)
    for start in range(0, L, KEY_TILE):
        stop = min(start + KEY_TILE, L)
        values = read_pages(v_pool, table, start, stop).float()
        norms = tree_sum(values.square()).squeeze(-1).sqrt()
        out[:, start:stop] = norms.masked_fill(place[start:stop] >= lengths[:, None], 0)
    return out


def value_norms(
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [G, N] page ids, -1 past the end
    lengths: Tensor,  # [G] int64
    L: int,  # of the longest stream
) -> Tensor:
    """Euclidean norms [G, L] f32 of the values of a request's streams, 0 past a stream's length."""
    return value_norms_ref(v_pool, table, lengths, L)
