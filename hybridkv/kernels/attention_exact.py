"""attention_exact: every query is a row of its own, whatever step brought it and whoever ran beside it.

A row runs over its keys in tiles of a fixed width that begin at entry 0; what it may not see of a tile is masked, and
tiles are joined in ascending order. A tile that is masked whole changes nothing, so rows of different lengths run
together. Prompt chunks and single tokens are the same rows; a chunk's rows only share the reading of their pages.

On a GPU the rows go through the decode kernel, whose splits follow from a row's own length.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.attention_decode import MAX_SPLITS, SPLIT, attention_decode_triton
from hybridkv.kernels.attention_tile import read_pages
from hybridkv.kernels.backend import use_triton
from hybridkv.kernels.quant import Pages

KEY_TILE = 256
QUERY_BLOCK = 256  # rows that run together: bounds the workspace and changes no result
WORKSPACE = 1 << 28  # bytes of the decode kernel's partial results
FOLD = 16  # query heads of a KV head are padded to a multiple: the kernel's inner buffers are then aligned alike


def attention_exact(
    q: Tensor,  # [T, H, D] the requests' queries, one request after the other
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids, -1 past the end
    lengths: np.ndarray,  # [B, G] entries held, the new ones included
    starts: list[int],  # [B + 1] where each request's queries begin
    scale: float,
) -> Tensor:
    G = table.shape[1]
    counts = np.diff(starts)
    owner = np.repeat(np.arange(len(counts)), counts)  # [T]
    seen = lengths[owner] - (np.array(starts)[owner + 1] - 1 - np.arange(len(owner)))[:, None]  # [T, G]
    if use_triton(q):
        return _decode_rows(q, k_pool, v_pool, table, owner, seen, scale)
    singles = int((counts == 1).argmin()) if (counts > 1).any() else len(counts)
    # requests with one token run together, each over its own pages; then each chunk over the pages it shares
    runs = [(0, singles, slice(0, singles))] if singles else []
    runs += [(starts[b], starts[b + 1], slice(b, b + 1)) for b in range(singles, len(counts))]
    out = torch.empty_like(q)
    for begin, end, requests in runs:
        for a in range(begin, end, QUERY_BLOCK):
            b = min(a + QUERY_BLOCK, end)
            one = slice(a, b) if requests.stop - requests.start > 1 else requests
            heads = q[a:b].view(b - a, G, -1, q.shape[-1])
            held = lengths[one]
            out[a:b] = _rows(heads, k_pool, v_pool, table[one], seen[a:b], held, scale).reshape(b - a, *q.shape[1:])
    return out


def _decode_rows(
    q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, owner: np.ndarray, seen: np.ndarray, scale: float
) -> Tensor:
    splits = min(MAX_SPLITS, -(-int(seen.max()) // SPLIT))
    block = max(1, min(WORKSPACE // (4 * splits * q[0].numel()), 32768))
    whose, ends = torch.from_numpy(owner).to(q.device), torch.from_numpy(seen).to(q.device)
    parts = []
    for a in range(0, len(q), block):
        rows = slice(a, a + block)
        parts.append(
            attention_decode_triton(q[rows], k_pool, v_pool, table[whose[rows]], seen[rows], scale, ends[rows])
        )
    return torch.cat(parts)


def _rows(
    q: Tensor,  # [n, G, H/G, D]
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,  # [m, G, N], m = n or 1
    seen: np.ndarray,  # [n, G] keys that each row sees
    held: np.ndarray,  # [m, G] entries that hold anything
    scale: float,
) -> Tensor:
    (n, G, folds, _), P = q.shape, (k_pool if isinstance(k_pool, Tensor) else k_pool.codes).shape[1]
    width = -(-int(seen.max()) // KEY_TILE) * KEY_TILE
    table = F.pad(table, (0, max(0, -(-width // P) - table.shape[2])), value=-1)
    ends, stored = (torch.from_numpy(x).to(q.device).unsqueeze(-1) for x in (seen, held))
    rows = F.pad(q.float(), (0, 0, 0, -folds % FOLD))  # [n, G, M, D]
    peak = torch.full((n, G, rows.shape[2], 1), -torch.inf, device=q.device)
    mass, total = torch.zeros_like(peak), torch.zeros_like(rows)
    for start in range(0, width, KEY_TILE):
        at = torch.arange(start, start + KEY_TILE, device=q.device)
        unused = (at >= stored).unsqueeze(-1)  # [m, G, tile, 1]: may hold NaN
        k, v = (
            read_pages(pool, table, start, start + KEY_TILE).float().masked_fill(unused, 0).expand(n, -1, -1, -1)
            for pool in (k_pool, v_pool)
        )
        hidden = at >= ends  # [n, G, tile]
        mask = torch.zeros(hidden.shape, device=q.device).masked_fill_(hidden, -torch.inf)
        out, lse = _tile(rows, k, v, mask.unsqueeze(2).expand(-1, -1, rows.shape[2], -1), scale)
        blind = hidden[..., :1, None]  # the tile's first key is hidden, so all are
        out, lse = out.masked_fill(blind, 0), lse.unsqueeze(-1).masked_fill(blind, -torch.inf)
        best = torch.maximum(peak, lse)
        old, new = torch.exp(peak - best), torch.exp(lse - best)
        total, mass, peak = total * old + out * new, mass * old + new, best
    return (total / mass)[:, :, :folds].to(q.dtype)


def _tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp). torch's CPU kernel runs each row and head on its own, with shapes that never change."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
