"""best_tokens: the place of the largest logit of each row, and whether the row is broken.

A row is broken if it holds a NaN or +inf, or nothing but -inf: no distribution follows from it. Its token means
nothing, but is one of the vocabulary.

A row of a large vocabulary is cut into pieces, so that one row alone occupies the GPU; a second launch joins them.
Among equal logits the first wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

PIECE = 2048  # logits that a program looks at


def best_tokens_ref(logits: Tensor) -> Tensor:
    """logits [S, V] -> [2, S] int64: the tokens, and 1 where a row is broken."""
    largest, best = logits.max(-1)  # a NaN counts as the largest
    return torch.stack((best, (~largest.isfinite()).long()))


@triton.jit
def piece_kernel(logits, largest, place, V, stride_s, BV: tl.constexpr):
    """A piece's largest logit, or NaN if it holds one, and where it is."""
    i_v, i_s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v = i_v * BV + tl.arange(0, BV)
    b_x = tl.load(logits + i_s * stride_s + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
    bad = tl.max((b_x != b_x).to(tl.int32), 0) > 0
    b_x = tl.where(b_x != b_x, float("-inf"), b_x)
    best = tl.max(b_x, 0)
    o_out = i_s * tl.num_programs(0) + i_v
    tl.store(place + o_out, tl.min(tl.where(b_x == best, o_v, 2147483647), 0))
    tl.store(largest + o_out, tl.where(bad, float("nan"), best))


@triton.jit(do_not_specialize=["S"])
def join_kernel(largest, place, found, S, N, BN: tl.constexpr):
    i_s = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    b_x = tl.load(largest + i_s * N + o_n, mask=o_n < N, other=float("-inf"))
    b_place = tl.load(place + i_s * N + o_n, mask=o_n < N, other=2147483647)
    nan = tl.max((b_x != b_x).to(tl.int32), 0) > 0
    b_x = tl.where(b_x != b_x, float("-inf"), b_x)
    best = tl.max(b_x, 0)
    token = tl.min(tl.where(b_x == best, b_place, 2147483647), 0)
    broken = nan | (best == float("inf")) | (best == float("-inf"))
    tl.store(found + i_s, token.to(tl.int64))
    tl.store(found + S + i_s, broken.to(tl.int64))


def best_tokens_triton(logits: Tensor) -> Tensor:
    S, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    found = torch.empty((2, S), dtype=torch.int64, device=logits.device)
    if S:
        N = triton.cdiv(V, PIECE)
        largest = torch.empty((S, N), dtype=torch.float32, device=logits.device)
        place = torch.empty((S, N), dtype=torch.int32, device=logits.device)
        piece_kernel[N, S](logits, largest, place, V, logits.stride(0), BV=PIECE, num_warps=4)
        join_kernel[(S,)](largest, place, found, S, N, BN=triton.next_power_of_2(N), num_warps=1)
    return found


def best_tokens(logits: Tensor) -> Tensor:
    """logits [S, V] -> [2, S] int64: the tokens of the largest logits, and 1 where a row is broken."""
    return best_tokens_triton(logits) if use_triton(logits) else best_tokens_ref(logits)
