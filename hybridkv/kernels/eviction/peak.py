"""peak_scores: the most attention that any query of a window pays to an entry, whichever head of the group it is from.

For KV head g and key j: the largest of softmax_j(q_w . k_j * scale) over the queries w that see j and over the query
heads of g's group. A sum over the window drowns what one query looks for; the largest weight does not.

The queries go in blocks of 64, and each block raises the scores that the blocks before it left. So a long text takes no
more memory than a window, and may come in several calls (`out`).

The kernels are those of score.py, which take the largest weight instead of the sum where they are told to: of the
logarithms, so that there is one power to compute for each key, not for each score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.attention.tile import KEY_TILE, read_pages
from hybridkv.kernels.backend import use_triton
from hybridkv.kernels.eviction.score import ScoreBlocks, launch_scores
from hybridkv.kernels.formats.kv_format import Pages

QUERIES = 64  # of a block


def peak_scores_ref(
    queries: Tensor,
    query_positions: Tensor,
    k_pool: Pages,
    table: Tensor,
    positions: Tensor,
    scale: float,
    lse: Tensor | None = None,
    out: Tensor | None = None,
    key_tile: int = KEY_TILE,
) -> Tensor:
    W, H, D = queries.shape
    G, L = positions.shape
    out = torch.zeros(G, L, device=queries.device) if out is None else out
    for first in range(0, W, QUERIES):
        block = queries[first : first + QUERIES].float()
        rows = block.view(-1, G, H // G, D).permute(1, 2, 0, 3).reshape(G, -1, D)  # [G, H/G * block, D]
        when = query_positions[first : first + QUERIES].repeat(H // G).view(1, -1, 1)

        def logits(start: int, rows: Tensor = rows, when: Tensor = when) -> Tensor:
            stop = min(start + key_tile, L)
            at = positions[:, None, start:stop]  # [G, 1, tile]
            k = read_pages(k_pool, table, start, stop).float().masked_fill(at.transpose(1, 2) < 0, 0)
            return (rows @ k.transpose(1, 2) * scale).masked_fill((at < 0) | (at > when), -torch.inf)

        if lse is None:
            sums = torch.full(rows.shape[:2], -torch.inf, device=rows.device)
            for start in range(0, L, key_tile):
                sums = torch.logaddexp(sums, logits(start).logsumexp(-1))
        else:
            sums = lse[first : first + QUERIES].reshape(-1, G, H // G).permute(1, 2, 0).reshape(G, -1)
        sums = sums.masked_fill(sums.isneginf(), 0).unsqueeze(-1)  # a query that sees nothing: weights 0, not NaN
        for start in range(0, L, key_tile):
            peaks = (logits(start) - sums).amax(1).exp()
            part = out[:, start : start + key_tile]
            part.copy_(torch.maximum(part, peaks))
    return out


def peak_scores_triton(
    queries: Tensor,
    query_positions: Tensor,
    k_pool: Pages,
    table: Tensor,
    positions: Tensor,
    scale: float,
    lse: Tensor | None = None,
    out: Tensor | None = None,
    config: ScoreBlocks | None = None,
) -> Tensor:
    W, raised = len(queries), out is not None
    peaks = torch.empty(positions.shape, device=queries.device) if out is None else out
    assert peaks.dtype == torch.float32 and peaks.is_contiguous()
    if not W or not peaks.numel():
        return peaks if raised else peaks.zero_()
    where = (k_pool, table, positions, scale)
    for first in range(0, W, QUERIES):
        rows = slice(first, first + QUERIES)
        sums = None if lse is None else lse[rows]
        launch_scores(
            queries[rows], query_positions[rows], *where, sums, peaks, config, PEAK=True, RAISE=raised or first > 0
        )  # fmt: skip
    return peaks


def peak_scores(
    queries: Tensor,  # [W, H, D] after norm and rope
    query_positions: Tensor,  # [W] ascending
    k_pool: Pages,  # [N, P, D]
    table: Tensor,  # [G, N] page ids, -1 past the end
    positions: Tensor,  # [G, L] of each entry; -1 past a stream's length
    scale: float,
    lse: Tensor | None = None,  # [W, H] f32, where known: natural logarithms of the queries' sums of exp(q . k * scale)
    out: Tensor | None = None,  # [G, L] f32 contiguous: what earlier queries left; raised in place
) -> Tensor:
    """The largest weight that a query pays to each entry of a request's streams -> [G, L] f32.

    0 past a stream's length and where no query sees the entry.
    """
    form = peak_scores_triton if use_triton(queries) else peak_scores_ref
    return form(queries, query_positions, k_pool, table, positions, scale, lse, out)
