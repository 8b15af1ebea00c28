"""Softmax attention over one tile of keys, with the log-sum-exp that lets tiles be joined exactly.

Attention over paged history reads its pages a tile at a time, so the workspace is bounded by the tile and never by the
context. `tile_attention` handles one tile, `TileSum` joins tiles in ascending order: these are the torch form.

The Triton kernels of attention_decode and attention_prefill share `attend_tile`: one tile of keys out of the pages,
joined to the running result of a block of query rows. A row's numbers come from that row and from fixed block sizes
alone: keys lie in tiles counted from entry 0, and a tile that a row does not see leaves its result as it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.kv_format import Pages, format_of, page_tensors, stored_tensors

KEY_TILE = 2048  # keys read at once
LOG2_E = 1.4426950408889634


def read_pages(pool: Pages, table: Tensor, start: int, stop: int) -> Tensor:
    """Entries [start, stop) of each stream of `table` [..., N], out of pool [N, P, D] -> [..., stop - start, D].

    Quantised entries come as f32, others as they are stored. Table entries past a stream's pages are -1: the caller
    masks what is read there.
    """
    return format_of(pool).decode(*(_read_entries(x, table, start, stop) for x in page_tensors(pool)))


def _read_entries(stored: Tensor, table: Tensor, start: int, stop: int) -> Tensor:
    """The same for one of the pool's tensors [N, P, ...] -> [..., stop - start, ...]."""
    P = stored.shape[1]
    first = start // P
    pages = table[..., first : -(-stop // P)].clamp(min=0)
    entries = stored.index_select(0, pages.reshape(-1)).view(*pages.shape[:-1], -1, *stored.shape[2:])
    inside = slice(start - first * P, stop - first * P)
    return entries[(..., inside, *[slice(None)] * (stored.ndim - 2))]


def causal_mask(M: int, L: int, diagonal: int, folds: int, like: Tensor) -> Tensor:
    """[M, L] to be added to scores: 0 where query i sees key j <= diagonal + i, else -inf."""
    mask = torch.full((M // folds, L), -torch.inf, dtype=like.dtype, device=like.device).triu_(diagonal + 1)
    return mask.repeat(folds, 1)


def tile_attention_ref(
    q: Tensor,  # [B, H, M, D]
    k: Tensor,  # [B, H, L, D]
    v: Tensor,  # [B, H, L, D]
    scale: float,
    diagonal: int | None = None,  # query i sees keys 0 .. diagonal + i; None: all keys
    visible: Tensor | None = None,  # [B, H, 1, L] bool
    folds: int = 1,  # the M rows are so many runs of the same queries (the query heads that share a KV head)
) -> tuple[Tensor, Tensor]:
    """(output [B, H, M, D], log-sum-exp [B, H, M]), arithmetic in f32 at least. A row that sees nothing gives (0,
    -inf).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    if diagonal is not None:
        scores = scores + causal_mask(q.shape[-2], k.shape[-2], diagonal, folds, scores)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
        v = v.masked_fill(~visible.transpose(-1, -2), 0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(lse.isneginf().unsqueeze(-1), 0)
    return (weights @ v.to(wide)).to(q.dtype), lse


def tile_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | None = None,
    visible: Tensor | None = None,
    folds: int = 1,
) -> tuple[Tensor, Tensor]:
    """The same through torch's blocked CPU kernel: no score matrix, f32 sums."""
    mask = None if diagonal is None else causal_mask(q.shape[-2], k.shape[-2], diagonal, folds, q)
    if visible is not None:
        hidden = ~visible.transpose(-1, -2)
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)  # what is hidden may be NaN
        assert mask is None
        mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, -torch.inf)
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    if visible is not None:
        blind = ~visible.any(-1).expand(lse.shape)
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, -torch.inf)
    return out, lse


def tile_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | None = None,
    visible: Tensor | None = None,
    folds: int = 1,
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, k.dtype)
    form = tile_attention_cpu if q.device.type == "cpu" else tile_attention_ref
    out, lse = form(q.to(dtype), k.to(dtype), v.to(dtype), scale, diagonal, visible, folds)
    return out.to(q.dtype), lse


class TileSum:
    """The running result over tiles: softmax over their union. One tile alone passes through untouched."""

    def __init__(self) -> None:
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        if self.out is None or self.lse is None:
            self.out, self.lse = out, lse
            return
        both = torch.logaddexp(self.lse, lse)
        both = both.masked_fill(both.isneginf(), 0)  # a row that saw nothing yet: weights 0, not NaN
        left, right = (self.lse - both).exp().unsqueeze(-1), (lse - both).exp().unsqueeze(-1)
        self.out = self.out.float() * left + out.float() * right
        self.lse = torch.logaddexp(self.lse, lse)

    def result(self, dtype: torch.dtype) -> Tensor:
        assert self.out is not None
        return self.out.to(dtype)


class TileShape(NamedTuple):
    """How a kernel is launched. Picked by head width and dtype alone, never by lengths or by the batch."""

    rows: int  # query rows of a block
    keys: int  # keys of a tile
    warps: int
    stages: int


def dot_dtype(q: Tensor, pool: Pages) -> torch.dtype:
    """What the dot products multiply; they add in f32. 16-bit queries over 16-bit or FP8 pages run as they are stored
    (every E4M3 code is a bf16 number), all else in f32.
    """
    return q.dtype if q.dtype == format_of(pool).dot_dtype else torch.float32


def kernel_pages(k_pool: Pages, v_pool: Pages) -> dict[str, Any]:
    """The arguments by which a kernel reads two pools of one shape and format."""
    (k, k_scale), (v, v_scale) = stored_tensors(k_pool), stored_tensors(v_pool)
    assert format_of(k_pool) is format_of(v_pool)
    if k_scale is not None and v_scale is not None:
        assert k_scale.stride() == v_scale.stride() and k_scale.stride(1) == 1
    assert k.shape == v.shape and k.stride() == v.stride() and k.stride(2) == 1
    return dict(
        k_pool=k,
        v_pool=v,
        k_scale=k_scale,
        v_scale=v_scale,
        stride_page=k.stride(0),
        stride_entry=k.stride(1),
        stride_scale=0 if k_scale is None else k_scale.stride(0),
        P=k.shape[1],
        D=k.shape[2],
        BD=max(16, triton.next_power_of_2(k.shape[2])),
        FP8=format_of(k_pool).quantised,
    )


TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def attend_tile(
    b_q,  # [BM, BD] in the dtype of the dot products
    b_seen,  # [BM] how many entries each row sees
    b_m,  # [BM] running largest score, in powers of two
    b_z,  # [BM] running sum of weights
    b_o,  # [BM, BD] running sum of weighted values
    i_n,  # the tile's first entry
    end,  # entries of the stream that may be read
    p_table,  # the stream's row of the page table
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    stride_page,
    stride_entry,
    stride_scale,
    scale,  # times log2(e)
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FP8: tl.constexpr,
):
    o_n = i_n + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n = o_n < end
    if P % BN == 0:  # the whole tile lies in one page
        b_page = tl.load(p_table + i_n // P).to(tl.int64)
    else:
        b_page = tl.load(p_table + o_n // P, mask=m_n, other=0).to(tl.int64)  # [BN]
    o_entry = b_page * stride_page + (o_n % P) * stride_entry  # [BN]
    o_kv = o_entry[:, None] + o_d[None, :]  # [BN, BD]
    o_scale = b_page * stride_scale + o_n % P
    m_kv = m_n[:, None] & (o_d[None, :] < D)

    b_k = tl.load(k_pool + o_kv, mask=m_kv, other=0)
    b_v = tl.load(v_pool + o_kv, mask=m_kv, other=0)
    if FP8:
        b_k = b_k.to(tl.float8e4nv, bitcast=True)
        b_v = b_v.to(tl.float8e4nv, bitcast=True)
    b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee") * scale  # [BM, BN]
    if FP8:
        b_s *= tl.load(k_scale + o_scale, mask=m_n, other=0)[None, :]
    b_s = tl.where(o_n[None, :] < b_seen[:, None], b_s, float("-inf"))

    b_top = tl.maximum(b_m, tl.max(b_s, 1))
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)  # a row that sees nothing yet: weights 0, not NaN
    b_p = tl.exp2(b_s - b_base[:, None])
    b_keep = tl.exp2(b_m - b_base)
    b_z = b_z * b_keep + tl.sum(b_p, 1)
    if FP8:
        b_p *= tl.load(v_scale + o_scale, mask=m_n, other=0)[None, :]
    b_o = b_o * b_keep[:, None] + tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), input_precision="ieee")
    return b_top, b_z, b_o
