"""attention_exact: every query is a row of its own, whatever step brought it and whoever ran beside it.

A row runs over its keys in tiles of a fixed width that begin at entry 0; what it may not see of a tile is masked, and
tiles are joined in ascending order. A tile that is masked whole changes nothing, so rows of different lengths run
together. Prompt chunks and single tokens are the same rows; a chunk's rows only share the reading of their pages.

On a GPU a row's stream has at most 64 splits of at least SPLIT keys, one program each with the query heads of a KV head
as its rows, and a second kernel joins the splits in ascending order. Splits follow from the row's own length alone.
A Hopper GPU has a faster form for bf16 queries over bf16 or FP8 pages (attention_exact_wide).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.attention.exact_hopper import attention_exact_wide
from hybridkv.kernels.attention.prefill_hopper_launch import suits_hopper
from hybridkv.kernels.attention.tile import (
    LOG2_E,
    TRITON_DTYPE,
    TileShape,
    attend_tile,
    dot_dtype,
    kernel_pages,
    read_pages,
)
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.fp8 import Pages

KEY_TILE = 256
SPLIT = 128  # keys of a split at least; longer streams take a multiple
MAX_SPLITS = 64
QUERY_BLOCK = 256  # rows that run together: bounds the workspace and changes no result
WORKSPACE = 1 << 28  # bytes of the split kernel's partial results
FOLD = 16  # query heads of a KV head are padded to a multiple: the kernel's inner buffers are then aligned alike


def _rows(
    q: Tensor,  # [n, G, H/G, D]
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,  # [m, G, N], m = n or 1
    seen: np.ndarray,  # [n, G] keys that each row sees
    held: np.ndarray,  # [m, G] entries that hold anything
    scale: float,
) -> Tensor:
    (n, G, folds, _), P = q.shape, (k_pool if isinstance(k_pool, Tensor) else k_pool.codes).shape[1]
    width = -(-int(seen.max()) // KEY_TILE) * KEY_TILE
    table = F.pad(table, (0, max(0, -(-width // P) - table.shape[2])), value=-1)
    ends, stored = (torch.from_numpy(x).to(q.device).unsqueeze(-1) for x in (seen, held))
    rows = F.pad(q.float(), (0, 0, 0, -folds % FOLD))  # [n, G, M, D]
    peak = torch.full((n, G, rows.shape[2], 1), -torch.inf, device=q.device)
    mass, total = torch.zeros_like(peak), torch.zeros_like(rows)
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
        total, mass, peak = total * old + out * new, mass * old + new, best
    return (total / mass)[:, :, :folds].to(q.dtype)


def _tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp). torch's CPU kernel runs each row and head on its own, with shapes that never change."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)


@triton.jit
def split_keys(length, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys of one split of a stream: the smallest multiple of SPLIT that needs no more than MAX_SPLITS."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, SPLIT), MAX_SPLITS), 1) * SPLIT


@triton.jit(
    do_not_specialize=["stride_table_b", "stride_table_g", "stride_length_b", "stride_length_g", "splits"],
)
def attention_split_kernel(
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
    assert split % shape.keys == 0 and q.stride(2) == 1 and table.stride(2) == 1
    part = torch.empty((B, H, splits, D), dtype=torch.float32, device=q.device)
    lse = torch.empty((B, H, splits), dtype=torch.float32, device=q.device)
    attention_split_kernel[splits, G, B](
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


def attention_exact(
    q: Tensor,  # [T, H, D] the requests' queries, one request after the other
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids, -1 past the end
    lengths: np.ndarray,  # [B, G] entries held, the new ones included
    starts: list[int],  # [B + 1] where each request's queries begin
    scale: float,
) -> Tensor:
    G = table.shape[1]
    counts = np.diff(starts)
    owner = np.repeat(np.arange(len(counts)), counts)  # [T]
    seen = lengths[owner] - (np.array(starts)[owner + 1] - 1 - np.arange(len(owner)))[:, None]  # [T, G]
    if suits_hopper(q[:1], k_pool):  # whatever the number of queries
        return attention_exact_wide(q, k_pool, v_pool, table, lengths, starts, scale)
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
