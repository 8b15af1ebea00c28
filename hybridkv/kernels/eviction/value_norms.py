"""value_norms: the length of each entry's value, which bounds what the entry can add to an answer."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.attention.tile import KEY_TILE, read_pages
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.eviction.page_rows import load_rows
from hybridkv.kernels.exact import tree_sum
from hybridkv.kernels.formats.kv_format import Pages, format_of, stored_tensors

TILE = 8192  # numbers that a program reads
WARPS = 4


def value_norms_ref(v_pool: Pages, table: Tensor, lengths: Tensor, L: int) -> Tensor:
    out = torch.zeros(len(table), L, device=table.device)
    place = torch.arange(L, device=table.device)
    for start in range(0, L, KEY_TILE):
        stop = min(start + KEY_TILE, L)
        values = read_pages(v_pool, table, start, stop).float()
        norms = tree_sum(values.square()).squeeze(-1).sqrt()
        out[:, start:stop] = norms.masked_fill(place[start:stop] >= lengths[:, None], 0)
    return out


@triton.jit(do_not_specialize=["L"])
def value_norms_kernel(
    v_pool,  # [N, P, D], FP8 as uint8
    v_scale,  # [N, P] f32, read with FP8 only
    table,  # [G, N]
    lengths,  # [G] int64
    out,  # [G, L] f32
    L,
    D,
    stride_tg,
    stride_tn,
    P: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    FP8: tl.constexpr,
):
    i_g = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    length = tl.load(lengths + i_g)
    first = tl.program_id(0) * BN
    b_v, b_scale = load_rows(v_pool, v_scale, table + i_g * stride_tg, first, length, L, D, stride_tn, P, BN, BD, FP8)
    b_norm = tl.sqrt_rn(tl.sum(b_v * b_v, 1)) * b_scale
    tl.store(out + i_g * L + o_n, b_norm, mask=o_n < L)


def value_norms_triton(v_pool: Pages, table: Tensor, lengths: Tensor, L: int) -> Tensor:
    G = len(table)
    values, v_scale = stored_tensors(v_pool)
    out = torch.empty(G, L, device=values.device)
    if G and L:
        P, D = values.shape[1:]
        BD = triton.next_power_of_2(D)
        BN = max(1, TILE // BD)
        value_norms_kernel[(triton.cdiv(L, BN), G)](
            values, values if v_scale is None else v_scale, table, lengths, out, L, D, *table.stride(),
            P=P, BN=BN, BD=BD, FP8=format_of(v_pool).quantised, num_warps=WARPS,
        )  # fmt: skip
    return out


def value_norms(
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [G, N] page ids, -1 past the end
    lengths: Tensor,  # [G] int64
    L: int,  # of the longest stream
) -> Tensor:
    """Euclidean norms [G, L] f32 of the values of a request's streams, 0 past a stream's length."""
    form = value_norms_triton if use_triton(table) else value_norms_ref
    return form(v_pool, table, lengths, L)
