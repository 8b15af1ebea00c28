"""attention_decode: one query per request over its pages, split along the keys.

The torch form runs all requests together. A tile of keys is read for those requests that reach it; streams shorter
than the tile's end are masked. The tile is the only copy made, so the workspace does not grow with the context.

The Triton form gives each stream at most 64 splits of at least SPLIT keys, one program each with the query heads of a
KV head as its rows, and a second kernel joins the splits in ascending order. A stream's splits follow from its own
length alone, so a request gets the same bits in any batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.attention_prefill import attention_prefill_ref
from hybridkv.kernels.attention_tile import (
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
)
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.quant import Pages

SPLIT = 128  # keys of a split at least; longer streams take a multiple
MAX_SPLITS = 64


def attention_decode_ref(
    q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, lengths: np.ndarray, scale: float
) -> Tensor:
    """The definition: a prefill of one token for each request."""
    return attention_prefill_ref(q, k_pool, v_pool, table, lengths, list(range(len(q) + 1)), scale)


def attention_decode_torch(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray,
    scale: float,
    device_lengths: Tensor | None = None,
    key_tile: int = KEY_TILE,
) -> Tensor:
    ends = torch.from_numpy(lengths).to(q.device) if device_lengths is None else device_lengths
    B, G = table.shape[:2]
    heads = q.view(B, G, -1, q.shape[-1])  # [B, G, H/G, D]
    longest = lengths.max(axis=1)
    if int(longest.max()) <= key_tile:
        return _tile(heads, k_pool, v_pool, table, lengths, ends, 0, int(longest.max()), scale)[0].reshape(q.shape)
    out = torch.empty_like(heads)
    # requests with the same number of tiles run together
    tiles = -(-longest // key_tile)
    for count in np.unique(tiles).tolist():
        rows = np.flatnonzero(tiles == count)
        at = torch.from_numpy(rows).to(q.device)
        total = TileSum()
        for start in range(0, count * key_tile, key_tile):
            stop = min(start + key_tile, int(longest[rows].max()))
            total.add(*_tile(heads[at], k_pool, v_pool, table[at], lengths[rows], ends[at], start, stop, scale))
        out[at] = total.result(q.dtype)
    return out.view(q.shape)


def _tile(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray,
    ends: Tensor,
    start: int,
    stop: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    visible = None
    if int(lengths.min()) < stop:
        visible = torch.arange(start, stop, device=q.device) < ends[:, :, None, None]  # [B, G, 1, tile]
    k, v = read_pages(k_pool, table, start, stop), read_pages(v_pool, table, start, stop)
    return tile_attention(q, k, v, scale, visible=visible)


@triton.jit
def split_keys(length, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys of one split of a stream: the smallest multiple of SPLIT that needs no more than MAX_SPLITS."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, SPLIT), MAX_SPLITS), 1) * SPLIT


@triton.jit(
    do_not_specialize=["stride_table_b", "stride_table_g", "stride_length_b", "stride_length_g", "splits"],
)
def attention_decode_kernel(
    q,  # [B, H, D]
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    table,  # [B, G, N]
    lengths,  # [B, G]
    part,  # [B, H, splits, D] f32
    lse,  # [B, H, splits] f32, in powers of two
    scale,  # times log2(e)
    stride_q_b,
    stride_q_h,
    stride_page,
    stride_entry,
    stride_scale,
    stride_table_b,
    stride_table_g,
    stride_length_b,
    stride_length_g,
    splits,
    GROUP: tl.constexpr,  # query heads that share a KV head
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
):
    i_s, i_g, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + i_b * stride_length_b + i_g * stride_length_g).to(tl.int32)
    size = split_keys(length, SPLIT, MAX_SPLITS)
    begin = i_s * size
    if begin >= length:
        return
    end = tl.minimum(begin + size, length)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    m_q = (o_m[:, None] < GROUP) & (o_d[None, :] < D)
    o_h = i_g * GROUP + o_m
    b_q = tl.load(q + i_b * stride_q_b + o_h[:, None] * stride_q_h + o_d[None, :], mask=m_q, other=0).to(DOT)
    b_seen = tl.full([BM], 0, tl.int32) + end
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    p_table = table + i_b * stride_table_b + i_g * stride_table_g
    for i_n in tl.range(begin, end, BN):
        b_m, b_z, b_o = attend_tile(
            b_q, b_seen, b_m, b_z, b_o, i_n, end, p_table, k_pool, v_pool, k_scale, v_scale,
            stride_page, stride_entry, stride_scale, scale, P, D, BD, BN, FP8,
        )  # fmt: skip
    o_part = (i_b * tl.num_programs(1) * GROUP + o_h) * splits + i_s  # [BM]
    b_part = b_o / tl.where(b_z == 0, 1.0, b_z)[:, None]
    tl.store(part + o_part[:, None] * D + o_d[None, :], b_part, mask=m_q)
    tl.store(lse + o_part, b_m + tl.log2(b_z), mask=o_m < GROUP)


@triton.jit(do_not_specialize=["stride_length_b", "stride_length_g", "splits"])
def join_splits_kernel(
    part,  # [B, H, splits, D] f32
    lse,  # [B, H, splits] f32
    lengths,  # [B, G]
    out,  # [B, H, D]
    stride_length_b,
    stride_length_g,
    splits,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,  # splits read at once
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + i_b * stride_length_b + (i_h // GROUP) * stride_length_g).to(tl.int32)
    count = tl.cdiv(length, split_keys(length, SPLIT, MAX_SPLITS))
    i_row = i_b * tl.num_programs(0) + i_h
    o_d, o_all = tl.arange(0, BD), tl.arange(0, MAX_SPLITS)
    b_all = tl.load(lse + i_row * splits + o_all, mask=o_all < count, other=float("-inf"))
    b_top = tl.max(b_all, 0)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_z = tl.sum(tl.exp2(b_all - b_top), 0)
    b_o = tl.zeros([BD], tl.float32)
    for i_s in tl.range(0, count, BS):
        o_s = i_s + tl.arange(0, BS)
        m_s = o_s < count
        b_w = tl.exp2(tl.load(lse + i_row * splits + o_s, mask=m_s, other=float("-inf")) - b_top)
        p_part = part + (i_row * splits + o_s[:, None]) * D + o_d[None, :]
        b_part = tl.load(p_part, mask=m_s[:, None] & (o_d[None, :] < D), other=0)
        b_o += tl.sum(b_w[:, None] * b_part, 0)
    b_o = tl.where(b_z == 0, 0.0, b_o / tl.where(b_z == 0, 1.0, b_z))  # a stream without entries gives zeros
    tl.store(out + i_row * D + o_d, b_o.to(out.dtype.element_ty), mask=o_d < D)


def decode_shape(D: int, group: int, dot: torch.dtype) -> TileShape:
    rows = max(16, triton.next_power_of_2(group))  # the tensor cores take 16 rows or more
    if dot == torch.float32:
        return TileShape(rows, 32, 8 if D > 64 else 4, 1)
    return TileShape(rows, 64, 4, 2)


def attention_decode_triton(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray | None,  # None: as many programs as the table has room for
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
        assert lengths is not None, "attention_decode needs the lengths on the host or on the device"
        device_lengths = torch.from_numpy(lengths).to(q.device)
    longest = table.shape[2] * pages["P"] if lengths is None else int(lengths.max())
    splits = max(1, min(-(-longest // split), MAX_SPLITS))
    dot = dot_dtype(q, k_pool)
    shape = shape or decode_shape(D, H // G, dot)
    assert split % shape.keys == 0 and q.stride(2) == 1 and table.stride(2) == 1
    part = torch.empty((B, H, splits, D), dtype=torch.float32, device=q.device)
    lse = torch.empty((B, H, splits), dtype=torch.float32, device=q.device)
    attention_decode_kernel[splits, G, B](
        q=q,
        table=table,
        lengths=device_lengths,
        part=part,
        lse=lse,
        scale=scale * LOG2_E,
        stride_q_b=q.stride(0),
        stride_q_h=q.stride(1),
        stride_table_b=table.stride(0),
        stride_table_g=table.stride(1),
        stride_length_b=device_lengths.stride(0),
        stride_length_g=device_lengths.stride(1),
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


def attention_decode(
    q: Tensor,  # [B, H, D]
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids, -1 past the end
    lengths: np.ndarray,  # [B, G] entries held, the new one included; on the host: no branch waits for the device
    scale: float,
    device_lengths: Tensor | None = None,  # [B, G] the same lengths on q's device, where the caller has them there
    key_tile: int = KEY_TILE,  # of the torch form
) -> Tensor:
    if use_triton(q):
        return attention_decode_triton(q, k_pool, v_pool, table, lengths, scale, device_lengths)
    return attention_decode_torch(q, k_pool, v_pool, table, lengths, scale, device_lengths, key_tile)
