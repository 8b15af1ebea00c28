"""attention_exact: every query is a row of its own, whatever step it came in and whatever ran beside it.

A row runs over its keys in tiles of a fixed width that begin at entry 0. Keys that it may not see are masked, and tiles
are joined in ascending order. A tile that is masked whole changes nothing, so rows of different lengths run together.
Prompt chunks and single tokens are the same rows; the rows of a chunk only share the reading of their pages.

Triton    a row's stream has at most 64 splits of at least SPLIT keys, one program each with the query heads of a KV
          head as its rows, and a second kernel joins the splits in ascending order (exact_kernel.py). Splits follow
          from the row's own length alone.
Hopper    bf16 queries over bf16 or FP8 pages take the prompt kernel (prefill_hopper.py), in which a token among many
          and one alone are the same rows. Keys are split at multiples of HOPPER_SPLIT whatever the row's length, and
          splits are joined in ascending order; one that a row does not see adds zeros. What splits have gathered lies
          in memory until they are joined: queries run together as far as HOPPER_WORKSPACE allows, which changes no
          result.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.attention.exact_kernel import attention_split_kernel, join_splits_kernel
from hybridkv.kernels.attention.launch import dot_dtype, kernel_pages, kernel_streams
from hybridkv.kernels.attention.prefill import attention_prefill_hopper, suits_hopper
from hybridkv.kernels.attention.tile import LOG2_E, TRITON_DTYPE, TileShape, read_pages
from hybridkv.kernels.backend import triton, use_triton
from hybridkv.kernels.formats.kv_format import Pages, stored_values

KEY_TILE = 256
SPLIT = 128  # keys of a split at least; longer streams take a multiple
MAX_SPLITS = 64
QUERY_BLOCK = 256  # rows that run together: bounds the workspace and changes no result
WORKSPACE = 1 << 28  # bytes of the split kernel's partial results
FOLD = 16  # query heads of a KV head are padded to a multiple: then torch's CPU kernel aligns its buffers alike
HOPPER_SPLIT = 2048  # keys of a split
HOPPER_WORKSPACE = 1 << 29  # bytes of what the splits have gathered


def _rows(
    q: Tensor,  # [n, G, H/G, D]
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,  # [m, G, N], m = n or 1
    seen: np.ndarray,  # [n, G] keys that each row sees
    held: np.ndarray,  # [m, G] entries that hold anything
    scale: float,
) -> Tensor:
    n, G, folds, _ = q.shape
    P = stored_values(k_pool).shape[1]
    width = -(-int(seen.max()) // KEY_TILE) * KEY_TILE
    table = F.pad(table, (0, max(0, -(-width // P) - table.shape[2])), value=-1)
    ends, stored = (torch.from_numpy(x).to(q.device).unsqueeze(-1) for x in (seen, held))
    rows = F.pad(q.float(), (0, 0, 0, -folds % FOLD))  # [n, G, M, D]
    peak = torch.full((n, G, rows.shape[2], 1), -torch.inf, device=q.device)
    mass = torch.zeros_like(peak)
    total = torch.zeros_like(rows)
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
        total = total * old + out * new
        mass = mass * old + new
        peak = best
    return (total / mass)[:, :, :folds].to(q.dtype)


def _tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp). torch's CPU kernel runs each row and head on its own, with shapes that never change."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)


def split_shape(D: int, group: int, dot: torch.dtype) -> TileShape:
    rows = max(16, triton.next_power_of_2(group))  # the tensor cores take 16 rows or more
    if dot == torch.float32:
        return TileShape(rows, 32, 8 if D > 64 else 4, 1)
    return TileShape(rows, 64, 4, 2) if D <= 256 and rows < 64 else TileShape(rows, 32, 4, 1)


def attention_split_triton(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray,
    scale: float,
    device_lengths: Tensor | None = None,
    shape: TileShape | None = None,
    split: int = SPLIT,
) -> Tensor:
    B, H, D = q.shape
    G = table.shape[1]
    pages = kernel_pages(k_pool, v_pool)
    out = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    if B == 0:
        return out
    if device_lengths is None:
        device_lengths = torch.from_numpy(lengths).to(q.device)
    splits = max(1, min(-(-int(lengths.max()) // split), MAX_SPLITS))
    dot = dot_dtype(q, k_pool)
    shape = shape or split_shape(D, H // G, dot)
    assert split % shape.keys == 0 and q.stride(2) == 1
    part = torch.empty((B, H, splits, D), dtype=torch.float32, device=q.device)
    lse = torch.empty((B, H, splits), dtype=torch.float32, device=q.device)
    attention_split_kernel[splits, G, B](
        q=q,
        part=part,
        lse=lse,
        scale=scale * LOG2_E,
        stride_q_b=q.stride(0),
        stride_q_h=q.stride(1),
        splits=splits,
        GROUP=H // G,
        BM=shape.rows,
        BN=shape.keys,
        SPLIT=split,
        MAX_SPLITS=MAX_SPLITS,
        DOT=TRITON_DTYPE[dot],
        num_warps=shape.warps,
        num_stages=shape.stages,
        **pages,
        **kernel_streams(table, device_lengths),
    )
    join_splits_kernel[H, B](
        part=part,
        lse=lse,
        lengths=device_lengths,
        out=out,
        stride_length_b=device_lengths.stride(0),
        stride_length_g=device_lengths.stride(1),
        splits=splits,
        GROUP=H // G,
        D=D,
        BD=pages["BD"],
        BS=16,
        SPLIT=split,
        MAX_SPLITS=MAX_SPLITS,
        num_warps=4,
    )
    return out


def _split_rows(
    q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, owner: np.ndarray, seen: np.ndarray, scale: float
) -> Tensor:
    splits = min(MAX_SPLITS, -(-int(seen.max()) // SPLIT))
    block = max(1, min(WORKSPACE // (4 * splits * q[0].numel()), 32768))
    whose, ends = torch.from_numpy(owner).to(q.device), torch.from_numpy(seen).to(q.device)
    parts = []
    for a in range(0, len(q), block):
        rows = slice(a, a + block)
        parts.append(attention_split_triton(q[rows], k_pool, v_pool, table[whose[rows]], seen[rows], scale, ends[rows]))
    return torch.cat(parts)


def exact_runs(lengths: list[int], starts: list[int], room: int) -> list[list[tuple[int, int, int]]]:
    """(request, first query, last) in runs of no more than `room` queries times splits, or of one query.

    `lengths` [B] are the longest streams of the requests, `starts` [B + 1] where their queries begin.
    """
    runs: list[list[tuple[int, int, int]]] = [[]]
    count = 0  # queries of the run
    max_splits = 0  # of a query of the run
    for b, (begin, end) in enumerate(pairwise(starts)):
        splits = max(1, -(-lengths[b] // HOPPER_SPLIT))
        while begin < end:
            left = room // max(max_splits, splits) - count
            if left <= 0 and count:
                runs.append([])
                count = max_splits = 0
                continue
            last = min(end, begin + max(left, 1))
            runs[-1].append((b, begin, last))
            count += last - begin
            max_splits = max(max_splits, splits)
            begin = last
    return runs


def attention_exact_hopper(
    q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, lengths: np.ndarray, starts: list[int], scale: float
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not len(q):
        return out
    room = HOPPER_WORKSPACE // (4 * q[:1].numel())
    for run in exact_runs(lengths.max(1).tolist(), starts, room):
        owner = [b for b, _, _ in run]
        seen = lengths[owner] - np.array([starts[b + 1] - last for b, _, last in run])[:, None]
        part = slice(run[0][1], run[-1][2])  # queries
        begins = [begin - part.start for _, begin, _ in run] + [part.stop - part.start]
        rows = torch.tensor(owner).to(q.device)
        out[part] = attention_prefill_hopper(
            q[part], k_pool, v_pool, table, seen, begins, scale, rows=rows, split=HOPPER_SPLIT
        )
    return out


def attention_exact(
    q: Tensor,  # [T, H, D] the requests' queries, one request after the other
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids, -1 past the end
    lengths: np.ndarray,  # [B, G] entries held, the new ones included
    starts: list[int],  # [B + 1] where each request's queries begin
    scale: float,
) -> Tensor:
    """Attention of every query over the entries that it sees -> [T, H, D]; its bits do not depend on the others."""
    G = table.shape[1]
    counts = np.diff(starts)
    owner = np.repeat(np.arange(len(counts)), counts)  # [T]
    seen = lengths[owner] - (np.array(starts)[owner + 1] - 1 - np.arange(len(owner)))[:, None]  # [T, G]
    if suits_hopper(q[:1], k_pool):  # the same form whatever the number of queries
        return attention_exact_hopper(q, k_pool, v_pool, table, lengths, starts, scale)
    if use_triton(q):
        return _split_rows(q, k_pool, v_pool, table, owner, seen, scale)
    num_decodes = int((counts == 1).argmin()) if (counts > 1).any() else len(counts)
    # requests with one token run together, each over its own pages; then each chunk over the pages it shares
    runs = [(0, num_decodes, slice(0, num_decodes))] if num_decodes else []
    runs += [(starts[b], starts[b + 1], slice(b, b + 1)) for b in range(num_decodes, len(counts))]
    out = torch.empty_like(q)
    for begin, end, requests in runs:
        for a in range(begin, end, QUERY_BLOCK):
            b = min(a + QUERY_BLOCK, end)
            one = slice(a, b) if requests.stop - requests.start > 1 else requests
            heads = q[a:b].view(b - a, G, -1, q.shape[-1])
            held = lengths[one]
            out[a:b] = _rows(heads, k_pool, v_pool, table[one], seen[a:b], held, scale).reshape(b - a, *q.shape[1:])
    return out
