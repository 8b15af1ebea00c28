"""best_part and join_parts: best_tokens where a row of logits is cut into parts, one on each of several ranks.

A part is 16 bytes a row: its largest logit, or NaN if it holds one, and the token of it; both are exact as float64. The
joined result is that of best_tokens on the whole row: the highest logit wins and, among equal ones, the lowest token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.best_tokens import PIECE, piece_kernel


def best_part_ref(logits: Tensor, first: int) -> Tensor:
    """logits [S, v] of the tokens from `first` on -> [S, 2] f64: the largest, and its token."""
    value, token = logits.max(1)  # NaN if there is one; the first among equals
    return torch.stack((value.double(), (token + first).double()), 1)


def join_parts_ref(parts: Tensor) -> Tensor:
    """parts [n, S, 2] f64, in order of their tokens -> [2, S] int64: the tokens, and 1 where a row is broken."""
    values, tokens = parts.unbind(2)
    nan = values.isnan().any(0)
    values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = values.amax(0)
    token = tokens.masked_fill(values != best, torch.inf).amin(0).long()
    return torch.stack((token, (nan | best.isinf()).long()))


@triton.jit
def part_kernel(largest, place, found, N, first, BN: tl.constexpr):
    """Joins the pieces of a row (best_tokens.py)."""
    i_s = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    b_x = tl.load(largest + i_s * N + o_n, mask=o_n < N, other=float("-inf"))
    b_place = tl.load(place + i_s * N + o_n, mask=o_n < N, other=2147483647)
    nan = tl.max((b_x != b_x).to(tl.int32), 0) > 0
    b_x = tl.where(b_x != b_x, float("-inf"), b_x)
    best = tl.max(b_x, 0)
    token = tl.min(tl.where(b_x == best, b_place, 2147483647), 0)
    tl.store(found + 2 * i_s, tl.where(nan, float("nan"), best).to(tl.float64))
    tl.store(found + 2 * i_s + 1, (token + first).to(tl.float64))


@triton.jit(do_not_specialize=["S"])
def join_parts_kernel(parts, found, S, N, BN: tl.constexpr):
    i_s = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    p_row = parts + (o_n * S + i_s) * 2
    b_x = tl.load(p_row, mask=o_n < N, other=float("-inf"))
    b_token = tl.load(p_row + 1, mask=o_n < N, other=2147483647.0).to(tl.int64)
    nan = tl.max((b_x != b_x).to(tl.int32), 0) > 0
    b_x = tl.where(b_x != b_x, float("-inf"), b_x)
    best = tl.max(b_x, 0)
    token = tl.min(tl.where(b_x == best, b_token, 2147483647), 0)
    broken = nan | (best == float("inf")) | (best == float("-inf"))
    tl.store(found + i_s, token)
    tl.store(found + S + i_s, broken.to(tl.int64))


def best_part_triton(logits: Tensor, first: int) -> Tensor:
    S, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    found = torch.empty((S, 2), dtype=torch.float64, device=logits.device)
    if S:
        N = triton.cdiv(V, PIECE)
        largest = torch.empty((S, N), dtype=torch.float32, device=logits.device)
        place = torch.empty((S, N), dtype=torch.int32, device=logits.device)
        piece_kernel[N, S](logits, largest, place, V, logits.stride(0), BV=PIECE, num_warps=4)
        part_kernel[(S,)](largest, place, found, N, first, BN=triton.next_power_of_2(N), num_warps=1)
    return found


def join_parts_triton(parts: Tensor) -> Tensor:
    N, S, _ = parts.shape
    found = torch.empty((2, S), dtype=torch.int64, device=parts.device)
    if S:
        join_parts_kernel[(S,)](parts.contiguous(), found, S, N, BN=triton.next_power_of_2(N), num_warps=1)
    return found


def best_part(logits: Tensor, first: int) -> Tensor:
    """logits [S, v] of the tokens from `first` on -> [S, 2] f64: the largest, or NaN if there is one, and its token."""
    return best_part_triton(logits, first) if use_triton(logits) else best_part_ref(logits, first)


def join_parts(parts: Tensor) -> Tensor:
    """parts [n, S, 2], as best_part gives them -> [2, S] int64: the best tokens, and 1 where a row is broken."""
    return join_parts_triton(parts) if use_triton(parts) else join_parts_ref(parts)
