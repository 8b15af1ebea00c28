"""key_differences: how far each key of a stream points from the mean direction of the stream's keys.

Minus the cosine to it: from -1 (as most keys) to 1 (the opposite). Two passes over the keys: the first sums the keys,
each made one long, the second compares each with that sum. Sums run over chunks of a fixed size in a fixed order:
neither the size of pages nor the other streams change a result. The first pass notes what makes a key one long.

On a GPU the first pass leaves a sum for each CHUNK keys, and a small launch adds those. In torch keys are read TILE at
a time and as many streams as BYTES allow, so that what is taken does not grow with the context.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.eviction.page_rows import load_rows
from hybridkv.kernels.formats.kv_format import Pages, format_of, page_tensors, stored_tensors

TILE = 1024  # keys that are read at once in torch
BYTES = 16 << 20  # of f32 keys of a tile
CHUNK = 128  # keys that a program sums
SUMS = 128  # of chunks that are added at once
SUM_WARPS = 16  # of the one program for each stream that adds them
NUMBERS = 4096  # that a program holds at once
STAGES = 3  # blocks under way at once
WARPS = 1  # of a program: many small ones, none of which waits for another warp
SHORTEST = 1e-12  # a key that is shorter counts as one of this length: it points nowhere


def key_differences_ref(k_pool: Pages, table: Tensor, lengths: Tensor, L: int) -> Tensor:
    G, D = len(table), page_tensors(k_pool)[0].shape[-1]
    at_once = max(1, BYTES // (4 * TILE * D))
    parts = [_of_streams(k_pool, table[i : i + at_once], lengths[i : i + at_once], L) for i in range(0, G, at_once)]
    return torch.cat(parts) if parts else torch.empty(0, L, device=table.device)


def _of_streams(k_pool: Pages, table: Tensor, lengths: Tensor, L: int) -> Tensor:
    def unit(start: int) -> Tensor:
        """Keys [G, tile, D] of length 1, 0 past a stream's length."""
        stop = min(start + TILE, L)
        past = torch.arange(start, stop, device=table.device) >= lengths[:, None]
        keys = read_pages(k_pool, table, start, stop).float()
        return F.normalize(keys.masked_fill(past[..., None], 0), dim=-1, eps=SHORTEST)

    starts = range(0, L, TILE)
    total = sum(unit(start).sum(1) for start in starts)
    if not isinstance(total, Tensor):  # there is no entry
        return torch.empty(len(table), 0, device=table.device)
    anchor = F.normalize(total, dim=-1, eps=SHORTEST)[:, None]
    return torch.cat([-(unit(start) * anchor).sum(-1) for start in starts], 1)


@triton.jit
def key_sums_kernel(
    k_pool,  # [N, P, D], FP8 as uint8
    k_scale,  # [N, P] f32, read with FP8 only
    table,  # [G, N]
    lengths,  # [G] int64
    sums,  # [G, chunks, D] f32
    units,  # [G, L] f32: what makes a key one long, as it is stored
    L, D, stride_tg, stride_tn, shortest,
    P: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of a chunk's keys, each one long."""
    i_c, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + i_g)
    b_sum = tl.zeros([BD], tl.float32)
    for first in tl.range(i_c * CHUNK, (i_c + 1) * CHUNK, BN, num_stages=STAGES):
        b_k, b_scale = load_rows(
            k_pool, k_scale, table + i_g * stride_tg, first, length, L, D, stride_tn, P, BN, BD, FP8
        )  # fmt: skip
        b_square = tl.sum(b_k * b_k, 1)
        m_short = b_square * b_scale * b_scale < shortest * shortest
        b_unit = tl.where(m_short, b_scale / shortest, tl.rsqrt(b_square))  # a NaN stays one
        o_n = first + tl.arange(0, BN)
        tl.store(units + i_g * L + o_n, b_unit, mask=o_n < L)
        b_sum += tl.sum(b_k * b_unit[:, None], 0)  # one after the other: a warp has whole keys
    o_d = tl.arange(0, BD)
    tl.store(sums + (i_g * tl.num_programs(0) + i_c) * D + o_d, b_sum, mask=o_d < D)


@triton.jit(do_not_specialize=["chunks"])
def mean_direction_kernel(
    sums,  # [G, chunks, D] f32
    anchors,  # [G, D] f32
    D, chunks, shortest,
    SUMS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The sum of a stream's chunks, one long."""
    i_g = tl.program_id(0).to(tl.int64)
    o_c, o_d = tl.arange(0, SUMS), tl.arange(0, BD)
    b_total = tl.zeros([BD], tl.float32)
    for first in range(0, chunks, SUMS):
        o_row = i_g * chunks + first + o_c
        m_sum = (first + o_c < chunks)[:, None] & (o_d < D)
        b_total += tl.sum(tl.load(sums + o_row[:, None] * D + o_d, mask=m_sum, other=0.0), 0)
    norm = tl.sqrt_rn(tl.sum(b_total * b_total, 0))
    tl.store(anchors + i_g * D + o_d, b_total / tl.where(norm < shortest, shortest, norm), mask=o_d < D)


@triton.jit(do_not_specialize=["L"])
def key_differences_kernel(
    k_pool, k_scale, table, lengths, anchors, units,
    out,  # [G, L] f32
    L, D, stride_tg, stride_tn,
    P: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Minus the cosine of each key to the mean direction."""
    i_c, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BD)
    b_anchor = tl.load(anchors + i_g * D + o_d, mask=o_d < D, other=0.0)
    length = tl.load(lengths + i_g)
    for first in tl.range(i_c * CHUNK, (i_c + 1) * CHUNK, BN, num_stages=STAGES):
        o_n = first + tl.arange(0, BN)
        b_unit = tl.load(units + i_g * L + o_n, mask=o_n < L, other=0.0)
        b_k, _ = load_rows(
            k_pool, k_scale, table + i_g * stride_tg, first, length, L, D, stride_tn, P, BN, BD, FP8
        )  # fmt: skip
        tl.store(out + i_g * L + o_n, -tl.sum(b_k * b_anchor[None, :], 1) * b_unit, mask=o_n < L)


def key_differences_triton(k_pool: Pages, table: Tensor, lengths: Tensor, L: int) -> Tensor:
    G, (keys, k_scale) = len(table), stored_tensors(k_pool)
    out = torch.empty(G, L, device=keys.device)
    if not G or not L:
        return out
    P, D = keys.shape[1:]
    BD, chunks = triton.next_power_of_2(D), triton.cdiv(L, CHUNK)
    sums, anchors = torch.empty(G, chunks, D, device=keys.device), torch.empty(G, D, device=keys.device)
    units = torch.empty_like(out)
    where = (keys, keys if k_scale is None else k_scale, table, lengths)
    sizes = (L, D, *table.stride())
    form = dict(
        P=P, CHUNK=CHUNK, BN=min(CHUNK, max(1, NUMBERS // BD)), BD=BD, FP8=format_of(k_pool).quantised, STAGES=STAGES,
        num_warps=WARPS,
    )  # fmt: skip
    key_sums_kernel[(chunks, G)](*where, sums, units, *sizes, SHORTEST, **form)
    mean_direction_kernel[(G,)](sums, anchors, D, chunks, SHORTEST, SUMS=SUMS, BD=BD, num_warps=SUM_WARPS)
    key_differences_kernel[(chunks, G)](*where, anchors, units, out, *sizes, **form)
    return out


def key_differences(
    k_pool: Pages,  # [N, P, D]
    table: Tensor,  # [G, N] page ids
    lengths: Tensor,  # [G] int64
    L: int,  # of the longest stream
) -> Tensor:
    """[G, L] f32; past a stream's length anything."""
    form = key_differences_triton if use_triton(table) else key_differences_ref
    return form(k_pool, table, lengths, L)
