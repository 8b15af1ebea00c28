"""attention_prefill through the kernel for Hopper GPUs, which reads bf16 tiles of 64 keys.

bf16 pages of a multiple of 64 entries are such tiles. All else (FP8, other page sizes) is widened first, for as many
requests together as have no more than PIECE keys. A longer stream comes in pieces, one after the other, so that the
workspace does not grow with the context; what the queries have gathered is kept between them.

Where there are too few blocks of queries for the card, the keys are split over more programs and joined at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.attention.dequantise import KEYS, widen
from hybridkv.kernels.attention.tile import LOG2_E
from hybridkv.kernels.backend import has_gluon, sm_count, tl, triton
from hybridkv.kernels.formats.fp8 import Pages
from hybridkv.kernels.gluon import TensorDescriptor, gl

ROWS = 128  # query rows of a block
PIECE = 32768  # keys that are widened at once, in all
WIDTHS = (64, 128, 256)
Sink = tuple[Tensor, Tensor]  # where log-sum-exps go: [R, H] f32, and each query's row of it [T] int64 (-1: nowhere)


def suits_hopper(q: Tensor, k_pool: Pages) -> bool:
    """Whether the kernel computes this."""
    if not has_gluon(q.device) or q.dtype != torch.bfloat16:
        return False
    if len(q) * q.shape[1] >= ROWS << 15:  # blocks, which are a grid's second axis
        return False
    if isinstance(k_pool, Tensor) and k_pool.dtype != torch.bfloat16:
        return False
    return q.shape[2] in WIDTHS


def is_tiled(*pools: Pages) -> bool:
    """Whether the pages are tiles that the kernel can read."""
    return all(isinstance(x, Tensor) and x.shape[1] % KEYS == 0 and x.is_contiguous() for x in pools)


@lru_cache(maxsize=32)
def query_blocks(starts: tuple[int, ...], rows: int, group: int, device: torch.device) -> Tensor:
    """[blocks, 4] for a kernel: request, its first query, its queries, the block's first row (query * group + head).

    The same for every layer of a step. The blocks that read most come first.
    """
    blocks = [
        (b, begin, end - begin, row)
        for b, (begin, end) in enumerate(pairwise(starts))
        for row in range(0, (end - begin) * group, rows)
    ]
    return torch.tensor(blocks[::-1], dtype=torch.int32).view(-1, 4).to(device)


class Part(NamedTuple):
    """Requests whose keys are widened together, or a piece of one request's keys."""

    requests: tuple[int, int]  # from, to
    first: int  # key
    last: int
    tiles: Tensor  # [tiles, 2] int32
    table: Tensor  # [B, G, N] int32: tiles of each stream of these requests


@lru_cache(maxsize=32)
def widened_parts(lengths: tuple[int, ...], G: int, piece: int, device: torch.device) -> list[Part]:
    """The parts of a step, `lengths` being the longest stream of each request: the same for every layer."""
    spans: list[tuple[int, int, int, int]] = []  # requests, keys
    total = piece + 1  # keys of the open part; here it is none
    for b, length in enumerate(lengths):
        size = max(1, -(-length // KEYS)) * KEYS
        if total + size <= piece:
            spans[-1] = (spans[-1][0], b + 1, 0, max(spans[-1][3], length))
            total += size
        else:
            spans += [(b, b + 1, first, min(first + piece, length)) for first in range(0, max(length, 1), piece)]
            total = size if size <= piece else piece + 1
    parts = []
    for b_first, b_last, first, last in spans:
        counts = [max(1, -(-(min(lengths[b], last) - first) // KEYS)) for b in range(b_first, b_last)]
        tiles = [(b, first + i * KEYS) for b, count in zip(range(b_first, b_last), counts) for i in range(count)]
        table = np.full((len(counts), G, max(counts)), -1, np.int32)
        for b, (count, at) in enumerate(zip(counts, np.cumsum([0, *counts]))):
            table[b, :, :count] = np.arange(G)[:, None] * len(tiles) + at + np.arange(count)
        plan = torch.tensor(tiles, dtype=torch.int32).view(-1, 2).to(device)
        parts.append(Part((b_first, b_last), first, last, plan, torch.from_numpy(table).to(device)))
    return parts


@triton.jit(do_not_specialize=["N", "splits"])
def join_states_kernel(
    state_o,  # [splits, N, D] f32, N = T H
    state_m,  # [splits, N] f32, in powers of two
    state_z,
    out,  # [N, D]
    lse,  # [R, H] f32
    lse_index,  # [T]
    N,
    H,
    splits,
    D: tl.constexpr,
    LN_2: tl.constexpr = 0.6931471805599453,
):
    i, N = tl.program_id(0).to(tl.int64), tl.cast(N, tl.int64)
    o_d = tl.arange(0, D)
    top = float("-inf")
    for i_s in tl.range(0, splits):
        top = tl.maximum(top, tl.load(state_m + i_s * N + i))
    base = tl.where(top == float("-inf"), 0.0, top)
    b_o, z = tl.zeros([D], tl.float32), 0.0
    for i_s in tl.range(0, splits):
        i_row = i_s * N + i
        w = tl.exp2(tl.load(state_m + i_row) - base)
        z += tl.load(state_z + i_row) * w
        b_o += tl.load(state_o + i_row * D + o_d) * w
    z = tl.where(z == 0, 1.0, z)  # nothing seen
    tl.store(out + i * D + o_d, (b_o / z).to(out.dtype.element_ty))
    if lse is not None:
        at = tl.load(lse_index + i // H)
        tl.store(lse + at * H + i % H, (top + tl.log2(z)) * LN_2, mask=at >= 0)


def key_splits(programs: int, keys: int, outputs: int, processors: int) -> int:
    """Over how many programs the keys of a block are split: more where a card would be filled badly, if that pays.

    In times of one key in one program, about 0.02 us on an H200: a program takes 200 beside its keys, and the joining
    of the splits 1e-4 for each number.
    """

    def cost(splits: int) -> float:
        return -(-programs * splits // processors) * (keys / splits + 200) + (splits > 1) * splits * outputs * 1e-4

    return min(range(1, 17), key=cost)


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


def attention_prefill_wide(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray,
    starts: list[int],
    scale: float,
    device_lengths: Tensor | None = None,
    rows: Tensor | None = None,
    lse: Sink | None = None,
    piece: int = PIECE,
    splits: int | None = None,
    split: int | None = None,  # keys of every split: then a query's bits do not depend on who runs beside it
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q) == 0:
        return out
    if q.stride(0) % 16 or q.stride(1) % 16 or q.stride(2) != 1 or q.data_ptr() % 16:
        q = q.contiguous()  # copies take 16 bytes at a time
    ends = torch.from_numpy(lengths).to(q.device) if device_lengths is None else device_lengths
    if is_tiled(k_pool, v_pool):
        assert isinstance(k_pool, Tensor) and isinstance(v_pool, Tensor)
        pages = Piece(k_pool, v_pool, table, all_rows(len(table), q.device) if rows is None else rows, 0)
        spans = [(0, int(lengths.max()))]
        _attend(q, spans, lambda _: pages, ends, tuple(starts), scale, out, lse, splits, split)
        return out
    parts = widened_parts(tuple(lengths.max(1).tolist()), table.shape[1], piece, q.device)
    for (b, e), group in groupby(parts, lambda part: part.requests):
        own, those = slice(starts[b], starts[e]), list(group)

        def widened(i: int, those: list[Part] = those) -> Piece:
            tiles = widen(k_pool, v_pool, table, ends, those[i].tiles, rows)
            return Piece(*tiles, those[i].table, all_rows(len(those[i].table), q.device), those[i].first)

        begins, kept = tuple(x - own.start for x in starts[b : e + 1]), None if lse is None else (lse[0], lse[1][own])
        spans = [(part.first, part.last) for part in those]
        _attend(q[own], spans, widened, ends[b:e], begins, scale, out[own], kept, splits, split)
    return out


def _attend(
    q: Tensor,
    spans: list[tuple[int, int]],  # first and last key of each piece, in ascending order
    piece: Callable[[int], Piece],
    ends: Tensor,
    starts: tuple[int, ...],
    scale: float,
    out: Tensor,
    lse: Sink | None,
    splits: int | None,
    split: int | None,
) -> None:
    (T, H, D), G = q.shape, ends.shape[1]
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
    at = 0
    for i, ((first, last), count) in enumerate(zip(spans, counts)):
        own = [None if x is None else x[at:] for x in state]
        each = split or -(-(last - first) // count)
        order = not carried or i == 0, carried and i == len(spans) - 1
        _launch(q, piece(i), ends, blocks, scale, out, lse, own, count, each, *order)
        at += 0 if carried else count
    if not carried:
        join_states_kernel[(T * H,)](*state, out, *(lse or (None, None)), T * H, H, at, D=D, num_warps=2)


def _launch(
    q: Tensor,
    piece: Piece,
    ends: Tensor,
    blocks: Tensor,
    scale: float,
    out: Tensor,
    lse: Sink | None,
    state: list[Tensor | None],
    splits: int,
    size: int,
    first: bool,
    last: bool,
) -> None:
    from hybridkv.kernels.attention.prefill_hopper import WARPS, prefill_hopper_kernel

    (T, H, D), G, P = q.shape, ends.shape[1], piece.k.shape[-2]
    layout = gl.NVMMASharedLayout(128, 16, 2)
    k_tensor, v_tensor = (TensorDescriptor.from_tensor(x.view(-1, D), [KEYS, D], layout) for x in (piece.k, piece.v))
    kept, index = lse if last and lse else (None, None)
    prefill_hopper_kernel[G, len(blocks), splits](
        q=q,
        k_tensor=k_tensor,
        v_tensor=v_tensor,
        v_pool=piece.v,
        table=piece.table,
        rows=piece.rows,
        lengths=ends,
        blocks=blocks,
        out=out,
        lse=kept,
        lse_index=index,
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
        stride_table_b=piece.table.stride(0),
        stride_table_g=piece.table.stride(1),
        stride_length_b=ends.stride(0),
        stride_length_g=ends.stride(1),
        GROUP=H // G,
        P=P,
        D=D,
        FIRST=first,
        LAST=last,
        num_warps=WARPS,
    )
