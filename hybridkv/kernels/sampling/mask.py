"""mask_rows: logits of tokens that may not come are -inf, in chosen rows alone.

A mask has a bit for each token, 32 in an int32 word, the lowest bit first. All other rows of the logits stay as they
are, bit for bit, and so do those of tokens that may come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

WORDS = 32  # that a program takes: logits of 1024 tokens


def mask_rows_ref(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Row by row: all of them at once would unpack to 32 times the masks' memory."""
    V, device = logits.shape[1], logits.device
    places = torch.arange(32, device=device, dtype=torch.int32)
    for mask, row in zip(masks, rows.tolist(), strict=True):
        if row >= 0:
            allowed = (mask[: (V + 31) // 32, None] >> places) & 1
            logits[row].masked_fill_(allowed.view(-1)[:V] == 0, -torch.inf)


@triton.jit
def mask_kernel(logits, masks, rows, V, stride_s, stride_v, stride_m, BW: tl.constexpr):
    """One piece of one mask: -inf where a token's bit is 0. Nothing is read of the logits."""
    i_m = tl.program_id(1).to(tl.int64)
    i_s = tl.load(rows + i_m).to(tl.int64)
    if i_s >= 0:
        o_w = tl.program_id(0) * BW + tl.arange(0, BW)
        b_words = tl.load(masks + i_m * stride_m + o_w, mask=o_w * 32 < V, other=0)
        bits = (b_words[:, None] >> tl.arange(0, 32)[None, :]) & 1
        o_v = (o_w[:, None] * 32 + tl.arange(0, 32)[None, :]).to(tl.int64)
        place = logits + i_s * stride_s + o_v * stride_v
        b_x = tl.full((BW, 32), float("-inf"), logits.dtype.element_ty)
        tl.store(place, b_x, mask=(bits == 0) & (o_v < V))


def mask_rows_triton(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    V, M = logits.shape[1], len(masks)
    assert masks.stride(1) == 1
    if M:
        grid = (triton.cdiv(V, 32 * WORDS), M)
        strides = (*logits.stride(), masks.stride(0))
        mask_kernel[grid](logits, masks, rows, V, *strides, BW=WORDS, num_warps=4)


def mask_rows(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Write -inf to logits [R, V] in place.

    Args:
        logits: f32 or bf16, rows of any stride.
        masks: [M, W] int32 with W * 32 >= V; bits from V on are not looked at.
        rows: [M] int64, the row of each mask, no row twice; -1: none, nothing is written.
    """
    (mask_rows_triton if use_triton(logits) else mask_rows_ref)(logits, masks, rows)
