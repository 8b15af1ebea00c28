"""log_sum_exp: the logarithm of the sum of a row's exponentials, without a copy of the row.

A row is cut into pieces, as in best_tokens; a second launch joins them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

PIECE = 4096  # logits that a program looks at


def log_sum_exp_ref(logits: Tensor) -> Tensor:
    """logits [S, V] -> [S] f32."""
    return logits.float().logsumexp(-1)


@triton.jit
def log_sum_piece_kernel(logits, largest, total, V, stride, BV: tl.constexpr):
    """A piece's largest logit, and the sum of exponentials relative to it."""
    i_v, i_s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v = i_v * BV + tl.arange(0, BV)
    b_x = tl.load(logits + i_s * stride + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
    top = tl.max(b_x, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    o_out = i_s * tl.num_programs(0) + i_v
    tl.store(largest + o_out, top)
    tl.store(total + o_out, tl.sum(tl.exp(b_x - top), 0))


@triton.jit
def log_sum_join_kernel(largest, total, out, N, BN: tl.constexpr):
    i_s = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    b_top = tl.load(largest + i_s * N + o_n, mask=o_n < N, other=float("-inf"))
    b_total = tl.load(total + i_s * N + o_n, mask=o_n < N, other=0.0)
    top = tl.max(b_top, 0)
    tl.store(out + i_s, top + tl.log(tl.sum(b_total * tl.exp(b_top - top), 0)))


def log_sum_exp_triton(logits: Tensor) -> Tensor:
    S, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty(S, dtype=torch.float32, device=logits.device)
    if S:
        N = triton.cdiv(V, PIECE)
        largest, total = (torch.empty((S, N), dtype=torch.float32, device=logits.device) for _ in range(2))
        log_sum_piece_kernel[N, S](logits, largest, total, V, logits.stride(0), BV=PIECE, num_warps=4)
        log_sum_join_kernel[(S,)](largest, total, out, N, BN=triton.next_power_of_2(N), num_warps=1)
    return out


def log_sum_exp(logits: Tensor) -> Tensor:
    """logits [S, V], f32 or bf16 -> [S] f32."""
    return log_sum_exp_triton(logits) if use_triton(logits) else log_sum_exp_ref(logits)
