"""window_scores: how much attention the last W queries pay to every key, per query head.

For query head h and key j: sum over the window's queries w that see j of softmax_j(q_w . k_j * scale). Two passes over
tiles of keys: the log-sum-exp of each query, then the weights. Every sum runs in one fixed order, so equal inputs give
equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.attention_tile import KEY_TILE, read_pages
from hybridkv.kernels.quant import Pages


def window_scores_ref(
    queries: Tensor,  # [W, H, D] after norm and rotation
    query_positions: Tensor,  # [W]
    k_pool: Pages,  # [N, P, D]
    table: Tensor,  # [G, N] page ids, -1 past the end
    positions: Tensor,  # [G, L] of each entry; -1 past a stream's length
    scale: float,
    key_tile: int = KEY_TILE,
) -> Tensor:  # [H, L] f32, 0 past a stream's length
    (W, H, D), (G, L) = queries.shape, positions.shape
    rows = queries.float().view(W, G, H // G, D).permute(1, 2, 0, 3).reshape(G, -1, D)  # [G, H/G * W, D]
    when = query_positions.repeat(H // G).view(1, -1, 1)

    def tile(start: int) -> Tensor:
        stop = min(start + key_tile, L)
        at = positions[:, None, start:stop]  # [G, 1, tile]
        hidden = (at < 0) | (at > when)
        k = read_pages(k_pool, table, start, stop).float().masked_fill(at.transpose(1, 2) < 0, 0)
        return (rows @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)  # [G, H/G * W, tile]

    starts = range(0, L, key_tile)
    lse = torch.full(rows.shape[:2], -torch.inf, device=rows.device)
    for start in starts:
        lse = torch.logaddexp(lse, tile(start).logsumexp(-1))
    parts = [(tile(start) - lse.unsqueeze(-1)).exp().view(G, H // G, W, -1).sum(2) for start in starts]
    return torch.cat(parts, -1).view(H, L)


window_scores = window_scores_ref
