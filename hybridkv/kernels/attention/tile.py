"""Attention over one tile of keys in torch, with the log-sum-exp by which tiles are joined exactly.

Attention over paged history reads its pages a tile at a time, so the workspace is bounded by the tile and never by the
context. `tile_attention` computes one tile, `TileSum` joins tiles in ascending order. The Triton counterpart is
tile_kernel.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl
from hybridkv.kernels.formats.kv_format import Pages, format_of, page_tensors, stored_values

KEY_TILE = 2048  # keys read at once
LOG2_E = 1.4426950408889634
LseOut = tuple[Tensor, Tensor]  # where log-sum-exps go: [R, H] f32, and the row of each query [T] int64 (-1: nowhere)


def read_pages(pool: Pages, table: Tensor, start: int, stop: int) -> Tensor:
    """Entries [start, stop) of each stream of `table` [..., N], out of pool [N, P, D] -> [..., stop - start, D].

    Quantised entries come as f32, others as they are stored. Table entries past a stream's pages are -1: the caller
    masks what is read there.
    """
    return _read(pool, _page_ids(pool, table, start, stop), table.shape[:-1], start, stop)


def read_both(
    k_pool: Pages, v_pool: Pages, table: Tensor, start: int, stop: int, all_held: bool
) -> tuple[Tensor, Tensor]:
    """read_pages of keys and of values. `all_held`: every stream has all of these entries."""
    pages = _page_ids(k_pool, table, start, stop, all_held)
    k, v = (_read(pool, pages, table.shape[:-1], start, stop) for pool in (k_pool, v_pool))
    return k, v


def _page_ids(pool: Pages, table: Tensor, start: int, stop: int, all_held: bool = False) -> Tensor:
    """The pages that hold the entries, in one row; where a stream has none, some page."""
    P = stored_values(pool).shape[1]
    pages = table[..., start // P : -(-stop // P)].flatten()
    return pages if all_held else pages.clamp(min=0)


def _read(pool: Pages, pages: Tensor, streams: torch.Size, start: int, stop: int) -> Tensor:
    def entries(stored: Tensor) -> Tensor:  # of one of the pool's tensors [N, P, ...] -> [..., stop - start, ...]
        found = stored.index_select(0, pages).view(*streams, -1, *stored.shape[2:])
        return found.narrow(len(streams), start % stored.shape[1], stop - start)

    return entries(pool) if isinstance(pool, Tensor) else format_of(pool).decode(*map(entries, page_tensors(pool)))


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
    folds: int = 1,  # query heads that share a KV head: the M rows are this many runs of the same queries
) -> tuple[Tensor, Tensor]:
    """Output [B, H, M, D] and log-sum-exp [B, H, M], in f32 or wider. A row that sees nothing gives 0 and -inf."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * scale
    if diagonal is not None:
        scores = scores + causal_mask(q.shape[-2], k.shape[-2], diagonal, folds, scores)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
        v = v.masked_fill(~visible.transpose(-1, -2), 0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(lse.isneginf().unsqueeze(-1), 0)
    return (weights @ v.to(dtype)).to(q.dtype), lse


def tile_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | None = None,
    visible: Tensor | None = None,
    folds: int = 1,
) -> tuple[Tensor, Tensor]:
    """The same by torch's blocked CPU kernel: no score matrix, f32 sums."""
    mask = None if diagonal is None else causal_mask(q.shape[-2], k.shape[-2], diagonal, folds, q)
    if visible is not None:
        hidden = ~visible.transpose(-1, -2)
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)  # hidden entries may be NaN
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
    """Output [B, H, M, D] in q's dtype and log-sum-exp [B, H, M] f32; arguments as in tile_attention_ref."""
    form = tile_attention_cpu if q.device.type == "cpu" else tile_attention_ref
    if q.dtype == k.dtype == v.dtype:
        return form(q, k, v, scale, diagonal, visible, folds)
    dtype = torch.promote_types(q.dtype, k.dtype)
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
        both = both.masked_fill(both.isneginf(), 0)  # a row that has seen nothing yet: weights 0, not NaN
        left = (self.lse - both).exp().unsqueeze(-1)
        right = (lse - both).exp().unsqueeze(-1)
        self.out = self.out.float() * left + out.float() * right
        self.lse = torch.logaddexp(self.lse, lse)

    def result(self, dtype: torch.dtype) -> Tensor:
        assert self.out is not None
        return self.out.to(dtype)


def store_lse(lse: Tensor, out: LseOut | None) -> None:
    """Log-sum-exps [T, H] of the queries that have a row in `out`."""
    if out is not None:
        kept, index = out
        kept[index[index >= 0]] = lse[index >= 0]


class TileShape(NamedTuple):
    """How a kernel is launched: chosen by head width and dtype alone, never by lengths or by the batch."""

    rows: int  # query rows in a block
    keys: int  # keys in a tile
    warps: int
    stages: int


TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
