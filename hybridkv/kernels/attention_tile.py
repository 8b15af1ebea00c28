"""Softmax attention over one tile of keys, with the log-sum-exp that lets tiles be joined exactly.

Attention over paged history reads its pages a tile at a time, so the workspace is bounded by the tile and never by the
context. `tile_attention` handles one tile, `TileSum` joins tiles in ascending order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.quant import Fp8Pages, Pages, fp8_decode

KEY_TILE = 2048  # keys read at once


def read_pages(pool: Pages, table: Tensor, start: int, stop: int) -> Tensor:
    """Entries [start, stop) of each stream of `table` [..., N], out of pool [N, P, D] -> [..., stop - start, D].

    FP8 entries come as f32. Table entries past a stream's pages are -1; what is read there must be masked by the
    caller.
    """
    if isinstance(pool, Fp8Pages):
        scale = read_pages(pool.scale.unsqueeze(-1), table, start, stop).squeeze(-1)
        return fp8_decode(read_pages(pool.codes, table, start, stop), scale)
    P, D = pool.shape[1:]
    first = start // P
    pages = table[..., first : -(-stop // P)].clamp(min=0)
    entries = pool.index_select(0, pages.reshape(-1)).view(*pages.shape[:-1], -1, D)
    return entries[..., start - first * P : stop - first * P, :]


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
