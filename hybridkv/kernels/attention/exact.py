"""attention_exact: every query is a row of its own, whatever step it came in and whatever ran beside it.

A row runs over its keys in splits of a fixed size that begin at entry 0, a split in tiles of a fixed width, all in
ascending order. Keys that it may not see are masked, and a tile or a split that is masked whole changes nothing, so
rows of different lengths run together. Prompt chunks and single tokens are the same rows.

torch     tiles alone; the rows of a chunk share the reading of their pages.
Triton    a program has a block of (query, head) rows of one KV head, as in attention_prefill. Where there are enough of
          them a program runs through all its splits and joins them (`whole`). Few rows over many keys have a program
          for each split, and a second kernel joins what those have gathered: the same operations, so the same bits.
Hopper    bf16 queries over bf16 pages of whole tiles take the prompt kernel (prefill_hopper.py) in both ways.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.attention.exact_kernel import attention_exact_kernel, join_splits_kernel
from hybridkv.kernels.attention.launch import dot_dtype, kernel_pages, kernel_streams
from hybridkv.kernels.attention.prefill import Piece, _aligned, _launch, is_tiled, suits_hopper
from hybridkv.kernels.attention.prefill_plan import ROWS, DevicePlan, query_blocks, token_blocks
from hybridkv.kernels.attention.tile import LOG2_E, TRITON_DTYPE, TileShape, read_pages
from hybridkv.kernels.backend import LARGE_SHARED_MEMORY, shared_memory, sm_count, triton, use_triton
from hybridkv.kernels.formats.kv_format import Pages, stored_values

KEY_TILE = 256  # of the torch form
QUERY_BLOCK = 256  # rows that run together there: bounds the workspace and changes no result
FOLD = 16  # query heads of a KV head are padded to a multiple: then torch's CPU kernel aligns its buffers alike
SPLIT = 1024  # keys of a split
WORKSPACE = 1 << 27  # bytes of what splits have gathered that are computed apart


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
        base = best.masked_fill(best == -torch.inf, 0)  # padding
        old, new = torch.exp(peak - base), torch.exp(lse - base)
        total = total * old + out * new
        mass = mass * old + new
        peak = best
    return (total / mass.masked_fill(mass == 0, 1))[:, :, :folds].to(q.dtype)


def _tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp). torch's CPU kernel runs each row and head on its own, with shapes that never change."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)


def exact_shape(D: int, dot: torch.dtype, room: bool = True) -> TileShape:
    """One for any number of rows: the size of a tile decides which instruction multiplies it. `room`: whether a program
    may have the shared memory of a data-centre GPU.
    """
    if dot == torch.float32:
        return TileShape(16, 32, 8 if D > 64 else 4, 1)
    if D > 256:
        return TileShape(32, 32, 4, 1)
    return TileShape(64, 64, 8, 2) if room or D <= 128 else TileShape(64, 32, 8, 1)


@lru_cache(maxsize=32)
def owners(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """[T, 2] int32: the request of each query, and its queries from this one on. The same for every layer of a step."""
    found = [(b, end - i) for b, (begin, end) in enumerate(pairwise(starts)) for i in range(begin, end)]
    return torch.tensor(found, dtype=torch.int32).view(-1, 2).to(device)


@cache
def token_owners(count: int, device: torch.device) -> Tensor:
    """owners of so many requests with one query each. It lives on, as captured graphs hold it."""
    return owners.__wrapped__(tuple(range(count + 1)), device)


def apart(programs: int, splits: int, outputs: int, processors: int) -> bool:
    """Whether splits get programs of their own: where too few blocks would fill the card. Changes no result."""
    return splits > 1 and programs < 2 * processors and splits * outputs * 4 <= WORKSPACE


def attention_exact_triton(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    ends: Tensor,
    starts: list[int] | DevicePlan,
    scale: float,
    rows: Tensor,
    keys: int,
    out: Tensor,
    shape: TileShape | None = None,
    split: int = SPLIT,
    by_split: bool | None = None,  # whether splits get programs of their own; None: what `apart` says
) -> Tensor:
    (T, H, D), G = q.shape, table.shape[1]
    if not T:
        return out
    hopper = shape is None and suits_hopper(q[:1], k_pool) and is_tiled(k_pool, v_pool)
    dot = dot_dtype(q, k_pool)
    shape = shape or exact_shape(D, dot, shared_memory(q.device) >= LARGE_SHARED_MEMORY)
    block = ROWS if hopper else shape.rows
    assert split % (64 if hopper else shape.keys) == 0 and q.stride(2) == 1 and out.is_contiguous()
    tokens = not isinstance(starts, DevicePlan) and len(starts) == T + 1  # every request has one query
    if isinstance(starts, DevicePlan):
        blocks, by_split = starts.blocks(block, H // G), False
    elif tokens:
        blocks = token_blocks(T, block, H // G, q.device)
    else:
        blocks = query_blocks(tuple(starts), block, H // G, q.device)
    splits = max(1, -(-keys // split))
    if by_split is None:
        by_split = apart(G * len(blocks), splits, q.numel(), sm_count(q.device))
    slots = (splits if by_split else 1, T, H)
    sums = [torch.empty(slots, dtype=torch.float32, device=q.device) if by_split else None for _ in range(2)]
    # the Hopper kernel keeps there what a program has gathered so far
    state = torch.empty(*slots, D, dtype=torch.float32, device=q.device) if by_split or hopper else None
    if hopper:
        assert isinstance(k_pool, Tensor) and isinstance(v_pool, Tensor)
        piece = Piece(k_pool, v_pool, table, rows, 0)
        size = split if by_split else splits * split
        kept = [state, *sums]
        _launch(_aligned(q), piece, ends, blocks, scale, out, None, kept, slots[0], size, True, not by_split, split)
    else:
        attention_exact_kernel[len(blocks), G, slots[0]](
            q=q, rows=rows, blocks=blocks, out=out, state_o=state, state_m=sums[0], state_z=sums[1], T=T,
            scale=scale * LOG2_E, stride_q_t=q.stride(0), stride_q_h=q.stride(1), GROUP=H // G, BM=shape.rows,
            BN=shape.keys, SPLIT=split, WHOLE=not by_split, DOT=TRITON_DTYPE[dot], num_warps=shape.warps,
            num_stages=shape.stages, **kernel_pages(k_pool, v_pool), **kernel_streams(table, ends),
        )  # fmt: skip
    if by_split:
        assert not isinstance(starts, DevicePlan)
        whose = token_owners(T, q.device) if tokens else owners(tuple(starts), q.device)
        join_splits_kernel[(T * H,)](
            state, *sums, whose, rows, ends, out, T * H, H, ends.stride(0), ends.stride(1),
            GROUP=H // G, D=D, BD=triton.next_power_of_2(D), SPLIT=split, AHEAD=8, num_warps=2,
        )  # fmt: skip
    return out


def attention_exact_torch(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray,  # [B, G]
    starts: list[int],
    scale: float,
    out: Tensor,
) -> Tensor:
    """Neighbouring requests with one query run together, each over its own pages; each chunk over those it shares."""
    G, n = table.shape[1], len(starts) - 1
    ones = [starts[b + 1] - starts[b] == 1 for b in range(n)]
    runs: list[tuple[int, int]] = []  # requests
    for b in range(n):
        if starts[b] == starts[b + 1]:
            continue
        if ones[b] and runs and runs[-1][1] == b and ones[runs[-1][0]]:
            runs[-1] = (runs[-1][0], b + 1)
        else:
            runs.append((b, b + 1))
    for first, last in runs:
        held = lengths[first:last]
        if not held.any():  # padding
            out[starts[first] : starts[last]] = 0
            continue
        for a in range(starts[first], starts[last], QUERY_BLOCK):
            b = min(a + QUERY_BLOCK, starts[last])
            if ones[first]:  # a query of each of these requests
                own = slice(first + a - starts[first], first + b - starts[first])
                seen = lengths[own]
            else:
                own = slice(first, last)
                seen = lengths[first] - (starts[last] - 1 - np.arange(a, b))[:, None]
            heads = q[a:b].view(b - a, G, -1, q.shape[-1])
            mixed = _rows(heads, k_pool, v_pool, table[own], seen, lengths[own], scale)
            out[a:b] = mixed.reshape(b - a, *q.shape[1:])
    return out


def attention_exact(
    q: Tensor,  # [T, H, D] the requests' queries, one request after the other
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [slots, G, N] page ids, -1 past the end
    ends: Tensor,  # [B, G] entries held, the new ones included; 0: padding
    starts: list[int] | DevicePlan,  # [B + 1] where each request's queries begin
    scale: float,
    rows: Tensor,  # [B] int64: the requests' rows of the table (-1: padding)
    keys: int,  # entries that the longest stream may hold
    out: Tensor | None = None,  # [T, H, D] where results go; rows of no request stay as they are
) -> Tensor:
    """Attention of every query over the entries that it sees -> [T, H, D]; its bits do not depend on the others."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if use_triton(q):
        return attention_exact_triton(q, k_pool, v_pool, table, ends, starts, scale, rows, keys, out)
    if isinstance(starts, DevicePlan):  # a graph's step where there are no graphs
        starts = starts.starts.tolist()
    lengths = torch.where(rows[:, None] >= 0, ends, 0).cpu().numpy()
    return attention_exact_torch(q, k_pool, v_pool, table[rows.clamp(min=0)], lengths, starts, scale, out)
