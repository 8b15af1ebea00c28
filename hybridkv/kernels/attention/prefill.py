"""attention_prefill: causal attention of each request's new tokens over all that its streams hold.

The new keys are already in the pages (append runs first), so query i of n new tokens sees entries 0 .. length - n + i.
The query heads that share a KV head are more rows over the same keys, so K and V are never expanded.

torch     queries in blocks of 256, each over the keys that it sees, a tile at a time; only the last tile has a mask.
Triton    all requests in one launch, a program for each KV head and block of (query, head) rows. Every tile is masked
          in the same way, so a query's result has the same bits wherever it lies in a block: a prompt in one chunk, in
          several, or one token at a time gives the same numbers.
Hopper    bf16 queries over bf16 or FP8 pages (prefill_hopper.py). The kernel reads bf16 tiles of 64 keys. bf16 pages of
          a multiple of 64 entries are such tiles; all else is dequantised first, for as many requests together as
          have no more than PIECE keys. A longer stream comes in pieces, one after the other, so that the workspace
          does not grow with the context; what the queries have gathered is kept between them. Where there are too few
          blocks of queries for the card, the keys are split over more programs and joined at the end. Other chunks
          may be split in other ways, so here a query's last bits may depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.attention.dequantise import KEYS, dequantise
from hybridkv.kernels.attention.launch import dot_dtype, kernel_pages, kernel_streams
from hybridkv.kernels.attention.prefill_kernel import attention_prefill_kernel, join_states_kernel
from hybridkv.kernels.attention.prefill_plan import (
    PIECE,
    ROWS,
    DevicePlan,
    Part,
    dequantised_parts,
    graph_splits,
    key_splits,
    query_blocks,
)
from hybridkv.kernels.attention.tile import (
    KEY_TILE,
    LOG2_E,
    TRITON_DTYPE,
    LseOut,
    TileShape,
    TileSum,
    read_pages,
    store_lse,
    tile_attention,
    tile_attention_ref,
)
from hybridkv.kernels.backend import LARGE_SHARED_MEMORY, has_gluon, shared_memory, sm_count, use_triton
from hybridkv.kernels.formats.kv_format import Pages, format_of
from hybridkv.kernels.gluon import TensorDescriptor, gl

QUERY_BLOCK = 256  # queries that run over the same keys, in the torch form
HOPPER_WIDTHS = (64, 128, 256)  # channels of a head that the Hopper kernel knows


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
    lse: LseOut | None = None,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q) if out is None else out
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    table = table if rows is None else table[rows.clamp(min=0)]
    G, D = table.shape[1], q.shape[-1]
    for b, (begin, end) in enumerate(pairwise(starts)):
        if not lengths[b].any():  # padding
            out[begin:end], sums[begin:end] = 0, -torch.inf
            continue
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
    own = slice(starts[0], starts[-1])
    store_lse(sums[own], None if lse is None else (lse[0], lse[1][own]))
    return out


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


def prefill_shape(D: int, dot: torch.dtype, quantised: bool, room: bool = True) -> TileShape:
    """`room`: whether a program may have the shared memory of a data-centre GPU."""
    if dot == torch.float32:
        return TileShape(16, 32, 8, 1) if D > 64 else TileShape(32, 32, 4, 1)
    if D > 256:
        return TileShape(64 if room else 32, 32, 4, 1)
    if not room and D > 128:
        return TileShape(64, 32, 4, 1)
    return TileShape(128, 64, 8, 1 if quantised and D > 128 else 2)  # 4 warps spill at D = 256


def attention_prefill_triton(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray | None,  # not needed where device_lengths is given
    starts: list[int] | DevicePlan,
    scale: float,
    device_lengths: Tensor | None = None,
    shape: TileShape | None = None,
    rows: Tensor | None = None,
    lse: LseOut | None = None,
    out: Tensor | None = None,
) -> Tensor:
    T, H, D = q.shape
    G = table.shape[1]
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device) if out is None else out
    if T == 0:
        return out
    if device_lengths is None:
        assert lengths is not None, "attention_prefill needs the lengths on the host or on the device"
        device_lengths = torch.from_numpy(lengths).to(q.device)
    assert q.stride(2) == 1 and (lse is None or lse[0].is_contiguous())
    kept, index = lse or (None, None)
    dot = dot_dtype(q, k_pool)
    room = shared_memory(q.device) >= LARGE_SHARED_MEMORY
    shape = shape or prefill_shape(D, dot, format_of(k_pool).quantised, room)
    if isinstance(starts, DevicePlan):
        blocks = starts.blocks(shape.rows, H // G)
    else:
        blocks = query_blocks(tuple(starts), shape.rows, H // G, q.device)
    attention_prefill_kernel[len(blocks), G](
        q=q,
        rows=rows,
        blocks=blocks,
        out=out,
        lse=kept,
        lse_index=index,
        scale=scale * LOG2_E,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        GROUP=H // G,
        BM=shape.rows,
        BN=shape.keys,
        DOT=TRITON_DTYPE[dot],
        num_warps=shape.warps,
        num_stages=shape.stages,
        **kernel_pages(k_pool, v_pool),
        **kernel_streams(table, device_lengths),
    )
    return out


def suits_hopper(q: Tensor, k_pool: Pages) -> bool:
    """Whether the Hopper kernel computes this."""
    if not has_gluon(q.device) or q.dtype != torch.bfloat16:
        return False
    if len(q) * q.shape[1] >= ROWS << 15:  # blocks are a grid's second axis
        return False
    return format_of(k_pool).dot_dtype == torch.bfloat16 and q.shape[2] in HOPPER_WIDTHS


def is_tiled(*pools: Pages) -> bool:
    """Whether the pages are tiles that the Hopper kernel can read."""
    return all(isinstance(x, Tensor) and x.shape[1] % KEYS == 0 and x.is_contiguous() for x in pools)


class Piece(NamedTuple):
    """Keys and values of some requests, from entry `first` of each stream on."""

    k: Tensor  # [N, P, D] bf16
    v: Tensor
    table: Tensor  # [slots, G, N]
    rows: Tensor  # [B]
    first: int


@lru_cache(maxsize=32)
def all_rows(count: int, device: torch.device) -> Tensor:
    return torch.arange(count).to(device)


def attention_prefill_hopper(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray,
    starts: list[int],
    scale: float,
    device_lengths: Tensor | None = None,
    rows: Tensor | None = None,
    lse: LseOut | None = None,
    piece: int = PIECE,
    splits: int | None = None,
    split: int | None = None,  # keys of every split: then a query's bits do not depend on the other requests
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if len(q) == 0:
        return out
    q = _aligned(q)
    ends = torch.from_numpy(lengths).to(q.device) if device_lengths is None else device_lengths
    if is_tiled(k_pool, v_pool):
        assert isinstance(k_pool, Tensor) and isinstance(v_pool, Tensor)
        pages = Piece(k_pool, v_pool, table, all_rows(len(table), q.device) if rows is None else rows, 0)
        spans = [(0, int(lengths.max()))]
        _attend(q, spans, lambda _: pages, ends, tuple(starts), scale, out, lse, splits, split)
        return out
    parts = dequantised_parts(tuple(lengths.max(1).tolist()), table.shape[1], piece, q.device)
    for (first, last), group in groupby(parts, lambda part: part.requests):
        pieces = list(group)  # of the keys of these requests, in ascending order

        def dequantised(i: int, pieces: list[Part] = pieces) -> Piece:
            part = pieces[i]
            k, v = dequantise(k_pool, v_pool, table, ends, part.tiles, rows)
            return Piece(k, v, part.table, all_rows(len(part.table), q.device), part.first)

        own = slice(starts[first], starts[last])  # the queries of these requests
        own_starts = tuple(x - own.start for x in starts[first : last + 1])
        own_lse = None if lse is None else (lse[0], lse[1][own])
        spans = [(part.first, part.last) for part in pieces]
        _attend(q[own], spans, dequantised, ends[first:last], own_starts, scale, out[own], own_lse, splits, split)
    return out


def attention_prefill_graph(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    plan: DevicePlan,
    scale: float,
    ends: Tensor,
    rows: Tensor,
    lse: LseOut | None,
    out: Tensor,
) -> Tensor:
    """The Hopper form where nothing is known on the host, as in a graph. Rows of `out` before the first prompt stay."""
    if is_tiled(k_pool, v_pool):
        assert isinstance(k_pool, Tensor) and isinstance(v_pool, Tensor)
        piece = Piece(k_pool, v_pool, table, rows, 0)
    else:
        k, v = dequantise(k_pool, v_pool, table, ends, plan.tiles, rows)
        own = plan.table(table.shape[1])
        piece = Piece(k, v, own, torch.where(rows >= 0, torch.arange(len(own), device=q.device), -1), 0)
    q = _aligned(q)
    (T, H, D), G = q.shape, ends.shape[1]
    blocks = plan.blocks(ROWS, H // G)
    splits = graph_splits(G * (T * (H // G) // ROWS), sm_count(q.device))
    if splits == 1:
        _launch(q, piece, ends, blocks, scale, out, lse, [None] * 3, 1, 0, True, True)
        return out
    slots = splits, T, H
    state = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in ((*slots, D), slots, slots)]
    _launch(q, piece, ends, blocks, scale, out, lse, [*state], splits, 0, True, False)
    join_states_kernel[(T * H,)](*state, out, *(lse or (None, None)), plan.starts, T * H, H, splits, D=D, num_warps=2)
    return out


def _aligned(q: Tensor) -> Tensor:
    """q, or a copy whose rows begin where copies of 16 bytes can."""
    if q.stride(0) % 16 or q.stride(1) % 16 or q.stride(2) != 1 or q.data_ptr() % 16:
        return q.contiguous()
    return q


def _attend(
    q: Tensor,
    spans: list[tuple[int, int]],  # first and last key of each piece, in ascending order
    piece: Callable[[int], Piece],
    ends: Tensor,
    starts: tuple[int, ...],
    scale: float,
    out: Tensor,
    lse: LseOut | None,
    splits: int | None,  # programs that share the keys of a block; None: what key_splits says
    split: int | None,  # keys of every split, instead
) -> None:
    """Attention over the keys that come in pieces, to `out` and `lse`."""
    T, H, D = q.shape
    G = ends.shape[1]
    blocks = query_blocks(starts, ROWS, H // G, q.device)
    if split is None:
        longest = spans[0][1] - spans[0][0]
        counts = [splits or key_splits(G * len(blocks), longest, q.numel(), sm_count(q.device))] * len(spans)
    else:
        counts = [max(1, -(-(last - first) // split)) for first, last in spans]
    # the next piece goes on with what this one has gathered; with splits every program keeps its own
    carried = split is None and counts[0] == 1
    state: list[Tensor | None] = [None] * 3
    if not carried or len(spans) > 1:
        slots = (1 if carried else sum(counts), T, H)
        state = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in ((*slots, D), slots, slots)]
    done = 0  # splits
    for i, ((first, last), count) in enumerate(zip(spans, counts)):
        own = [None if x is None else x[done:] for x in state]
        size = split or -(-(last - first) // count)
        begins = not carried or i == 0  # with nothing gathered so far
        ends_here = carried and i == len(spans) - 1  # writes the output
        _launch(q, piece(i), ends, blocks, scale, out, lse, own, count, size, begins, ends_here)
        done += 0 if carried else count
    if not carried:
        join_states_kernel[(T * H,)](*state, out, *(lse or (None, None)), None, T * H, H, done, D=D, num_warps=2)


def _launch(
    q: Tensor,
    piece: Piece,
    ends: Tensor,
    blocks: Tensor,
    scale: float,
    out: Tensor,
    lse: LseOut | None,
    state: list[Tensor | None],  # sums of values, largest scores, sums of weights, from the first split on
    splits: int,
    size: int,  # keys of a split; 0: every stream's own, divided evenly
    first: bool,  # nothing was gathered before
    last: bool,  # the output is written
    split: int = 0,  # exact mode: keys after which what was gathered is joined to what was before
) -> None:
    from hybridkv.kernels.attention.prefill_hopper import WARPS, prefill_hopper_kernel

    T, H, D = q.shape
    G, P = ends.shape[1], piece.k.shape[-2]
    layout = gl.NVMMASharedLayout(128, 16, 2)
    k_tensor, v_tensor = (TensorDescriptor.from_tensor(x.view(-1, D), [KEYS, D], layout) for x in (piece.k, piece.v))
    lse_out, lse_index = lse if last and lse else (None, None)
    prefill_hopper_kernel[G, len(blocks), splits](
        q=q,
        k_tensor=k_tensor,
        v_tensor=v_tensor,
        v_pool=piece.v,
        rows=piece.rows,
        blocks=blocks,
        out=out,
        lse=lse_out,
        lse_index=lse_index,
        state_o=state[0],
        state_m=state[1],
        state_z=state[2],
        scale=scale * LOG2_E,
        key_first=piece.first,
        key_size=-(-size // P) * P,  # programs begin with a page
        T=T,
        H=H,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        GROUP=H // G,
        P=P,
        D=D,
        FIRST=first,
        LAST=last,
        SPLIT=split,
        num_warps=WARPS,
        **kernel_streams(piece.table, ends),
    )


def attention_prefill(
    q: Tensor,  # [T, H, D] the requests' queries, one request after the other
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids, -1 past the end
    lengths: np.ndarray | None,  # [B, G] entries held, the new ones included; None: only the device knows them
    starts: list[int] | DevicePlan,  # [B + 1] where each request's queries begin
    scale: float,
    device_lengths: Tensor | None = None,  # [B, G] the same lengths on q's device, where the caller has them there
    key_tile: int = KEY_TILE,  # of the torch form
    rows: Tensor | None = None,  # [B] int64: the table is [slots, G, N] and these are the requests' rows (-1: padding)
    lse: LseOut | None = None,  # where natural log-sum-exps go
    out: Tensor | None = None,  # [T, H, D] where results go; rows of no request stay as they are
) -> Tensor:
    """Attention of every query over the entries that it sees -> [T, H, D]."""
    if isinstance(starts, DevicePlan) and suits_hopper(q, k_pool):
        assert device_lengths is not None and rows is not None and out is not None
        return attention_prefill_graph(q, k_pool, v_pool, table, starts, scale, device_lengths, rows, lse, out)
    if use_triton(q):
        if lengths is None or isinstance(starts, DevicePlan) or not suits_hopper(q, k_pool):
            return attention_prefill_triton(
                q, k_pool, v_pool, table, lengths, starts, scale, device_lengths, rows=rows, lse=lse, out=out
            )
        return attention_prefill_hopper(
            q, k_pool, v_pool, table, lengths, starts, scale, device_lengths, rows, lse, out=out
        )
    if isinstance(starts, DevicePlan):  # a graph's step where there are no graphs
        assert device_lengths is not None
        lengths, starts = device_lengths.cpu().numpy(), starts.starts.tolist()
    assert lengths is not None
    return attention_prefill_torch(q, k_pool, v_pool, table, lengths, starts, scale, key_tile, rows, lse, out)
