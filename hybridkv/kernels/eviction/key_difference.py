"""key_differences: how far each key of a stream points from the mean direction of the stream's keys.

Minus the cosine to it: from -1 (as most keys) to 1 (the opposite). Two passes over the keys: the first sums the keys,
each made one long, the second compares each with that sum. Sums run over chunks of a fixed size in a fixed order:
neither the size of pages nor the other streams change a result.

On a GPU the first pass leaves a sum for each CHUNK keys, and a small launch adds those. In torch keys are read TILE at
a time and as many streams as BYTES allow, so that what is taken does not grow with the context.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.kv_format import Pages, format_of, page_tensors, stored_tensors

TILE = 1024  # keys that are read at once in torch
BYTES = 16 << 20  # of f32 keys of a tile
CHUNK = 128  # keys that a program sums
SUMS = 32  # of chunks that are added at once
NUMBERS = 8192  # that a program holds at once
SHORTEST = 1e-12  # a key that is shorter counts as one of this length: it points nowhere


def key_differences_ref(k_pool: Pages, table: Tensor, positions: Tensor) -> Tensor:
    G, L = positions.shape
    D = page_tensors(k_pool)[0].shape[-1]
    at_once = max(1, BYTES // (4 * TILE * D))
    parts = [_of_streams(k_pool, table[i : i + at_once], positions[i : i + at_once]) for i in range(0, G, at_once)]
    return torch.cat(parts) if parts else torch.empty(0, L, device=positions.device)


def _of_streams(k_pool: Pages, table: Tensor, positions: Tensor) -> Tensor:
    G, L = positions.shape

    def unit(start: int) -> Tensor:
        """Keys [G, tile, D] of length 1, 0 past a stream's length."""
        stop = min(start + TILE, L)
        keys = read_pages(k_pool, table, start, stop).float()
        return F.normalize(keys.masked_fill(positions[:, start:stop, None] < 0, 0), dim=-1, eps=SHORTEST)

    starts = range(0, L, TILE)
    total = sum(unit(start).sum(1) for start in starts)
    if not isinstance(total, Tensor):  # there is no entry
        return torch.empty(G, 0, device=positions.device)
    anchor = F.normalize(total, dim=-1, eps=SHORTEST)[:, None]
    return torch.cat([-(unit(start) * anchor).sum(-1) for start in starts], 1)


@triton.jit
def load_keys(k_pool, k_scale, table, positions, i_g, o_n, L, D, stride_tg, stride_tn, stride_pg, shortest,
              P: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """Keys [BN, BD] f32 of entries o_n, 0 past the stream's length, and [BN] what makes each one long: a division for
    each key, not for each number.
    """
    o_d = tl.arange(0, BD)
    m_n = o_n < L
    m_n = m_n & (tl.load(positions + i_g * stride_pg + o_n, mask=m_n, other=-1) >= 0)
    b_page = tl.load(table + i_g * stride_tg + (o_n // P) * stride_tn, mask=m_n, other=0).to(tl.int64)
    o_row = b_page * P + o_n % P
    b_k = tl.load(k_pool + o_row[:, None] * D + o_d, mask=m_n[:, None] & (o_d < D), other=0)
    if FP8:
        b_k = b_k.to(tl.float8e4nv, bitcast=True)
    b_k = b_k.to(tl.float32)
    b_norm = tl.sqrt_rn(tl.sum(b_k * b_k, 1))
    b_scale = tl.full(b_norm.shape, 1.0, tl.float32)
    if FP8:
        b_scale = tl.load(k_scale + o_row, mask=m_n, other=0.0)
    b_length = b_norm * b_scale
    return b_k, b_scale / tl.where(b_length < shortest, shortest, b_length)  # a NaN stays one


@triton.jit(do_not_specialize=["L"])
def key_sums_kernel(
    k_pool,  # [N, P, D], FP8 as uint8
    k_scale,  # [N, P] f32, read with FP8 only
    table,  # [G, N]
    positions,  # [G, L]; -1 past a stream's length
    sums,  # [G, chunks, D] f32
    L, D, stride_tg, stride_tn, stride_pg, shortest,
    P: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """The sum of a chunk's keys, each one long."""
    i_c, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n, o_d = i_c * CHUNK + tl.arange(0, BN), tl.arange(0, BD)
    b_sum = tl.zeros([BD], tl.float32)
    for first in tl.static_range(0, CHUNK, BN):  # unrolled: the loads of all blocks are under way at once
        b_k, b_unit = load_keys(
            k_pool, k_scale, table, positions, i_g, first + o_n, L, D, stride_tg, stride_tn, stride_pg, shortest,
            P, BD, FP8,
        )  # fmt: skip
        b_sum += tl.sum(b_k * b_unit[:, None], 0)
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
    k_pool, k_scale, table, positions, anchors,
    out,  # [G, L] f32
    L, D, stride_tg, stride_tn, stride_pg, shortest,
    P: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Minus the cosine of each key to the mean direction."""
    i_g = tl.program_id(1).to(tl.int64)
    o_n, o_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    b_anchor = tl.load(anchors + i_g * D + o_d, mask=o_d < D, other=0.0)
    b_k, b_unit = load_keys(
        k_pool, k_scale, table, positions, i_g, o_n, L, D, stride_tg, stride_tn, stride_pg, shortest, P, BD, FP8
    )  # fmt: skip
    tl.store(out + i_g * L + o_n, -tl.sum(b_k * b_anchor[None, :], 1) * b_unit, mask=o_n < L)


def key_differences_triton(k_pool: Pages, table: Tensor, positions: Tensor) -> Tensor:
    G, L = positions.shape
    keys, k_scale = stored_tensors(k_pool)
    out = torch.empty(G, L, device=keys.device)
    if not G or not L:
        return out
    P, D = keys.shape[1:]
    BD = triton.next_power_of_2(D)
    BN, chunks = min(CHUNK, max(1, NUMBERS // BD)), triton.cdiv(L, CHUNK)
    if positions.stride(1) != 1:
        positions = positions.contiguous()
    sums, anchors = torch.empty(G, chunks, D, device=keys.device), torch.empty(G, D, device=keys.device)
    where = (keys, keys if k_scale is None else k_scale, table, positions)
    sizes = (L, D, *table.stride(), positions.stride(0), SHORTEST)
    form = dict(P=P, BN=BN, BD=BD, FP8=format_of(k_pool).quantised)
    key_sums_kernel[(chunks, G)](*where, sums, *sizes, CHUNK=CHUNK, **form)
    mean_direction_kernel[(G,)](sums, anchors, D, chunks, SHORTEST, SUMS=SUMS, BD=BD)
    key_differences_kernel[(triton.cdiv(L, BN), G)](*where, anchors, out, *sizes, **form)
    return out


def key_differences(
    k_pool: Pages,  # [N, P, D]
    table: Tensor,  # [G, N] page ids
    positions: Tensor,  # [G, L] of each entry; -1 past a stream's length
) -> Tensor:
    """[G, L] f32; past a stream's length anything."""
    form = key_differences_triton if use_triton(table) else key_differences_ref
    return form(k_pool, table, positions)
