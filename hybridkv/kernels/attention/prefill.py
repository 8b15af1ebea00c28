"""attention_prefill: causal attention of each request's new tokens over all that its streams hold.

The new keys are already in the pages (append runs first), so query i of n new tokens sees entries 0 .. length - n + i.
The query heads that share a KV head are more rows over the same keys, so K and V are never expanded.

The torch form runs queries in blocks of 256, each over the keys it can see and no more, a tile of keys at a time; only
the last tile needs a mask.

The Triton form runs all requests in one launch, a program for each KV head and block of (query, head) rows. Every tile
is masked in the same way, so a query's result has the same bits wherever it lies in a block: a prompt in one chunk, in
several, or one token at a time gives the same numbers.

On Hopper GPUs bf16 queries take attention_prefill_wide instead, which may split the keys otherwise for other chunks.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.attention.prefill_hopper_launch import Sink, attention_prefill_wide, query_blocks, suits_hopper
from hybridkv.kernels.attention.tile import (
    KEY_TILE,
    LOG2_E,
    TRITON_DTYPE,
    TileShape,
    TileSum,
    attend_tile,
    dot_dtype,
    kernel_pages,
    read_pages,
    tile_attention,
    tile_attention_ref,
)
from hybridkv.kernels.backend import LARGE_SHARED_MEMORY, shared_memory, tl, triton, use_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages, Pages

QUERY_BLOCK = 256  # queries that run over the same keys


def attention_prefill_torch(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray,
    starts: list[int],
    scale: float,
    key_tile: int = KEY_TILE,
    rows: Tensor | None = None,
    lse: Sink | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    table = table if rows is None else table[rows.clamp(min=0)]
    G, D = table.shape[1], q.shape[-1]
    for b, (begin, end) in enumerate(pairwise(starts)):
        # streams of equal length run together; after eviction by head they differ and run one by one
        same = bool((lengths[b] == lengths[b, 0]).all())
        for g in [slice(0, G)] if same else [slice(i, i + 1) for i in range(G)]:
            for first in range(begin, end, QUERY_BLOCK):
                last = min(first + QUERY_BLOCK, end)
                seen = int(lengths[b, g][0]) - end + last
                heads = q[first:last].view(last - first, G, -1, D)[:, g]
                mixed, mass = _block(heads, k_pool, v_pool, table[b, g], seen, scale, key_tile)
                out[first:last].view(last - first, G, -1, D)[:, g] = mixed
                sums[first:last].view(last - first, G, -1)[:, g] = mass
    keep_sums(sums, lse)
    return out


def keep_sums(sums: Tensor, lse: Sink | None) -> None:
    """The log-sum-exps [T, H] of those queries that have a place."""
    if lse is not None:
        kept, index = lse
        kept[index[index >= 0]] = sums[index >= 0]


def _block(
    q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, length: int, scale: float, key_tile: int
) -> tuple[Tensor, Tensor]:
    """q [n, G, H/G, D], the last n of `length` tokens, over streams table [G, N] -> [n, G, H/G, D], [n, G, H/G]."""
    n, G, folds, D = q.shape
    rows = q.permute(1, 2, 0, 3).reshape(1, G, folds * n, D)
    history = length - n
    starts = range(0, history + 1, key_tile)  # so that the last tile holds all of the diagonal
    total = TileSum()
    for start in starts:
        stop = length if start == starts[-1] else start + key_tile
        k, v = (read_pages(pool, table, start, stop).unsqueeze(0) for pool in (k_pool, v_pool))
        total.add(*tile_attention(rows, k, v, scale, history - start if stop == length else None, folds=folds))
    assert total.lse is not None
    mass = total.lse.view(G, folds, n).permute(2, 0, 1)
    return total.result(q.dtype).view(G, folds, n, D).permute(2, 0, 1, 3), mass


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


@triton.jit(do_not_specialize=["stride_table_b", "stride_table_g", "stride_length_b", "stride_length_g"])
def attention_prefill_kernel(
    q,  # [T, H, D]
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    table,  # [B, G, N], with rows [slots, G, N]
    rows,  # [B] each request's row of the table, -1: padding
    lengths,  # [B, G]
    blocks,  # [blocks, 4] int32: request, its first query, its queries, the block's first row
    out,  # [T, H, D]
    lse,  # [R, H] f32
    lse_index,  # [T]
    scale,  # times log2(e)
    stride_q_t,
    stride_q_h,
    stride_page,
    stride_entry,
    stride_scale,
    stride_table_b,
    stride_table_g,
    stride_length_b,
    stride_length_g,
    GROUP: tl.constexpr,  # query heads that share a KV head
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
    LN_2: tl.constexpr = 0.6931471805599453,
):
    i_g = tl.program_id(1)
    p_block = blocks + tl.program_id(0).to(tl.int64) * 4
    i_b = tl.load(p_block).to(tl.int64)
    i_t = tl.load(p_block + 1).to(tl.int64)
    n = tl.load(p_block + 2)
    i_m = tl.load(p_block + 3)
    length = tl.load(lengths + i_b * stride_length_b + i_g * stride_length_g).to(tl.int32)
    i_table = i_b
    if rows is not None:
        i_table = tl.load(rows + i_b)
        length = tl.where(i_table >= 0, length, 0)

    o_row, o_d = i_m + tl.arange(0, BM), tl.arange(0, BD)
    o_t, o_h = o_row // GROUP, i_g * GROUP + o_row % GROUP  # row = query * GROUP + head
    m_q = (o_t[:, None] < n) & (o_d[None, :] < D)
    o_q = (i_t + o_t)[:, None] * stride_q_t + o_h[:, None] * stride_q_h + o_d[None, :]
    b_q = tl.load(q + o_q, mask=m_q, other=0).to(DOT)
    b_seen = tl.where(o_t < n, length - n + o_t + 1, 0)
    end = length - n + tl.minimum((i_m + BM - 1) // GROUP, n - 1) + 1  # what the block's last query sees
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    p_table = table + i_table * stride_table_b + i_g * stride_table_g
    for i_n in tl.range(0, end, BN):
        b_m, b_z, b_o = attend_tile(
            b_q, b_seen, b_m, b_z, b_o, i_n, end, p_table, k_pool, v_pool, k_scale, v_scale,
            stride_page, stride_entry, stride_scale, scale, P, D, BD, BN, FP8,
        )  # fmt: skip
    b_z = tl.where(b_z == 0, 1.0, b_z)  # a row that sees nothing gives zeros, and a sum of -inf
    b_o = b_o / b_z[:, None]
    o_out = ((i_t + o_t)[:, None] * tl.num_programs(1) * GROUP + o_h[:, None]) * D + o_d[None, :]
    tl.store(out + o_out, b_o.to(out.dtype.element_ty), mask=m_q)
    if lse is not None:
        b_at = tl.load(lse_index + i_t + o_t, mask=o_t < n, other=-1)
        tl.store(lse + b_at * tl.num_programs(1) * GROUP + o_h, (b_m + tl.log2(b_z)) * LN_2, mask=b_at >= 0)


def prefill_shape(D: int, dot: torch.dtype, fp8: bool, room: bool = True) -> TileShape:
    """`room`: in shared memory."""
    if dot == torch.float32:
        return TileShape(16, 32, 8, 1) if D > 64 else TileShape(32, 32, 4, 1)
    if D > 256:
        return TileShape(64 if room else 32, 32, 4, 1)
    if not room and D > 128:
        return TileShape(64, 32, 4, 1)
    return TileShape(128, 64, 8, 1 if fp8 and D > 128 else 2)  # 4 warps spill at D = 256


def attention_prefill_triton(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray | None,  # not needed where device_lengths is given
    starts: list[int],
    scale: float,
    device_lengths: Tensor | None = None,
    shape: TileShape | None = None,
    rows: Tensor | None = None,
    lse: Sink | None = None,
) -> Tensor:
    T, H, D = q.shape
    G = table.shape[1]
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    if device_lengths is None:
        assert lengths is not None, "attention_prefill needs the lengths on the host or on the device"
        device_lengths = torch.from_numpy(lengths).to(q.device)
    assert q.stride(2) == 1 and table.stride(2) == 1 and (lse is None or lse[0].is_contiguous())
    kept, index = lse or (None, None)
    dot = dot_dtype(q, k_pool)
    room = shared_memory(q.device) >= LARGE_SHARED_MEMORY
    shape = shape or prefill_shape(D, dot, isinstance(k_pool, Fp8Pages), room)
    blocks = query_blocks(tuple(starts), shape.rows, H // G, q.device)
    attention_prefill_kernel[len(blocks), G](
        q=q,
        table=table,
        rows=rows,
        lengths=device_lengths,
        blocks=blocks,
        out=out,
        lse=kept,
        lse_index=index,
        scale=scale * LOG2_E,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_table_b=table.stride(0),
        stride_table_g=table.stride(1),
        stride_length_b=device_lengths.stride(0),
        stride_length_g=device_lengths.stride(1),
        GROUP=H // G,
        BM=shape.rows,
        BN=shape.keys,
        DOT=TRITON_DTYPE[dot],
        num_warps=shape.warps,
        num_stages=shape.stages,
        **kernel_pages(k_pool, v_pool),
    )
    return out


def attention_prefill(
    q: Tensor,  # [T, H, D] the requests' queries, one request after the other
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids, -1 past the end
    lengths: np.ndarray,  # [B, G] entries held, the new ones included
    starts: list[int],  # [B + 1] where each request's queries begin
    scale: float,
    device_lengths: Tensor | None = None,  # [B, G] the same lengths on q's device, where the caller has them there
    key_tile: int = KEY_TILE,  # of the torch form
    rows: Tensor | None = None,  # [B] int64: the table is [slots, G, N] and these are the requests' rows (-1: padding)
    lse: Sink | None = None,  # natural logarithms; queries without a place keep none
) -> Tensor:
    if suits_hopper(q, k_pool):
        return attention_prefill_wide(q, k_pool, v_pool, table, lengths, starts, scale, device_lengths, rows, lse)
    if use_triton(q):
        return attention_prefill_triton(
            q, k_pool, v_pool, table, lengths, starts, scale, device_lengths, rows=rows, lse=lse
        )
    return attention_prefill_torch(q, k_pool, v_pool, table, lengths, starts, scale, key_tile, rows, lse)
