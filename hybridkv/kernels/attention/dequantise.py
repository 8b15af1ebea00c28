"""dequantise: keys and values of streams as dense bf16 tiles, out of pages of any size, bf16 or FP8.

A prompt's queries read the same keys many times. Where a kernel needs them in bf16, and in tiles of its own, they are
written out once for all queries of a chunk. Entries past a stream's end come as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.attention.launch import kernel_pages, kernel_streams
from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.kv_format import Pages, stored_values

KEYS = 64  # entries in a tile


def dequantise_ref(
    k_pool: Pages, v_pool: Pages, table: Tensor, lengths: Tensor, tiles: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    G = table.shape[1]
    D = stored_values(k_pool).shape[2]
    out = torch.zeros((2, G, len(tiles), KEYS, D), dtype=torch.bfloat16, device=table.device)
    for i, (b, first) in enumerate(tiles.tolist()):
        row = b if rows is None else int(rows[b])
        for g in range(G if first >= 0 else 0):
            last = min(first + KEYS, int(lengths[b, g]))
            if row >= 0 and first < last:
                for x, pool in zip(out, (k_pool, v_pool)):
                    x[g, i, : last - first] = read_pages(pool, table[row, g : g + 1], first, last)[0].bfloat16()
    return out[0], out[1]


@triton.jit(do_not_specialize=["stride_table_b", "stride_table_g", "stride_length_b", "stride_length_g"])
def dequantise_kernel(
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    table,  # [B, G, N], with rows [slots, G, N]
    rows,  # [B] each request's row of the table, -1: padding
    lengths,  # [B, G]
    tiles,  # [tiles, 2] int32
    k_out,  # [G, tiles, BN, D] bf16
    v_out,
    stride_page,
    stride_entry,
    stride_scale,
    stride_table_b,
    stride_table_g,
    stride_length_b,
    stride_length_g,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FP8: tl.constexpr,
):
    i_tile, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = tl.load(tiles + i_tile * 2).to(tl.int64)
    first = tl.load(tiles + i_tile * 2 + 1)
    if first < 0:
        return
    length = tl.load(lengths + i_b * stride_length_b + i_g * stride_length_g).to(tl.int32)
    i_row = i_b
    if rows is not None:
        i_row = tl.load(rows + i_b)
        length = tl.where(i_row >= 0, length, 0)
    o_n, o_d = tl.arange(0, BN), tl.arange(0, BD)
    m_n = first + o_n < length
    p_table = table + i_row * stride_table_b + i_g * stride_table_g
    b_page = tl.load(p_table + (first + o_n) // P, mask=m_n, other=0).to(tl.int64)
    o_n_page = (first + o_n) % P
    o_kv = (b_page * stride_page + o_n_page * stride_entry)[:, None] + o_d[None, :]
    m_kv = m_n[:, None] & (o_d[None, :] < D)
    b_k = tl.load(k_pool + o_kv, mask=m_kv, other=0)
    b_v = tl.load(v_pool + o_kv, mask=m_kv, other=0)
    if FP8:
        o_scale = b_page * stride_scale + o_n_page
        b_k = (
            b_k.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(k_scale + o_scale, mask=m_n, other=0)[:, None]
        )
        b_v = (
            b_v.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(v_scale + o_scale, mask=m_n, other=0)[:, None]
        )
    o_out = ((i_g * tl.num_programs(0) + i_tile) * BN + o_n)[:, None] * D + o_d[None, :]
    m_d = (o_d < D)[None, :] & (o_n >= 0)[:, None]
    tl.store(k_out + o_out, b_k.to(tl.bfloat16), mask=m_d)
    tl.store(v_out + o_out, b_v.to(tl.bfloat16), mask=m_d)


def dequantise_triton(
    k_pool: Pages, v_pool: Pages, table: Tensor, lengths: Tensor, tiles: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    pages = kernel_pages(k_pool, v_pool)
    G = table.shape[1]
    k_out, v_out = torch.empty((2, G, len(tiles), KEYS, pages["D"]), dtype=torch.bfloat16, device=table.device)
    if len(tiles):
        dequantise_kernel[len(tiles), G](
            rows=rows,
            tiles=tiles,
            k_out=k_out,
            v_out=v_out,
            BN=KEYS,
            num_warps=8,
            **pages,
            **kernel_streams(table, lengths),
        )
    return k_out, v_out


def dequantise(
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids
    lengths: Tensor,  # [B, G] int64
    tiles: Tensor,  # [tiles, 2] int32: request, and the first of the tile's KEYS entries; -1: nothing is written
    rows: Tensor | None = None,  # [B] int64: the table is [slots, G, N] and these are the requests' rows (-1: padding)
) -> tuple[Tensor, Tensor]:
    """Keys and values [G, tiles, KEYS, D] bf16."""
    form = dequantise_triton if use_triton(table) else dequantise_ref
    return form(k_pool, v_pool, table, lengths, tiles, rows)
