"""The gated delta rule over whole chunks of 64 tokens, on the GPU (the formulas: rule.py).

All prompts of a step are one launch of each kernel; segments.py says which chunk is whose.

Two kernels. `gdn_solve_kernel` does what no state is needed for, all chunks and heads at once; r_ij = exp(G_i - G_j):

    B = (I + A)^-1 diag(beta)  [64, 64]     P = tril(q k^T r)  [64, 64]     enter = exp(G)     leave = exp(G_64 - G)

`gdn_scan_kernel` then walks through the chunks with a part of a head's state in registers, transposed, so that every
product takes its left side from registers and its right side from shared memory:

    F^T = (V - enter (k S))^T B^T;    O^T = (enter (q S))^T + F^T P^T;    S^T <- enter_64 S^T + (leave F)^T k

q, k and v come rounded to the model's dtype; products of bf16 take the state and F in bf16 too, sums are f32. Sums of g
are f64: their differences keep their digits behind a strong decay. No exponential is of a positive number.

The inverse: D = (I + A_8)^-1 by substitution, A_8 the diagonal blocks of 8; then twice D <- (I + D A')^-1 D with what
lies between them, A', first inside blocks of 16, where (D A')^2 = 0, then across them, where (D A')^4 = 0. Every entry
of D and of D A' is at most 1 (unit keys, beta <= 1), so fp16, with the digits of tf32, is enough for products of bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import LARGE_SHARED_MEMORY, shared_memory, tl, triton
from hybridkv.kernels.gdn.rule import CHUNK
from hybridkv.kernels.gdn.segments import Segments

# of a thread at the most, for products of 16 bits: with 128, four programs share a multiprocessor, else three
SOLVE_REGISTERS: int | None = 128


@triton.jit
def product(b_a, b_b, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(b_a, b_b, input_precision="tf32x3")
    return tl.dot(b_a.to(tl.float16), b_b.to(tl.float16))


@triton.jit
def unit_lower_inverse(b_a, WIDE: tl.constexpr):
    """(I + b_a)^-1 of a strictly lower triangular tile [64, 64] f32."""
    o_i = tl.arange(0, 8)
    o_row, o_column = o_i[:, None, None, None], o_i[None, None, :, None]  # of blocks of 8
    m_8, m_16 = o_row == o_column, o_row // 2 == o_column // 2
    b_blocks = tl.reshape(b_a, [8, 8, 8, 8])
    b_8 = tl.sum(tl.where(m_8, b_blocks, 0.0), 2)  # [8, 8, 8]: blocks on the diagonal
    b_d = tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros([8, 8, 8], tl.float32)
    for j in tl.static_range(7):  # row j is done: take it out of the rows below
        b_row = tl.sum(tl.where((o_i == j)[None, :, None], b_d, 0.0), 1)
        b_column = tl.sum(tl.where((o_i == j)[None, None, :], b_8, 0.0), 2)
        b_d -= b_column[:, :, None] * b_row[:, None, :]
    b_d = tl.reshape(tl.where(m_8, b_d[:, :, None, :], 0.0), [64, 64])
    b_inside = tl.reshape(tl.where(m_16 & (o_row > o_column), b_blocks, 0.0), [64, 64])
    b_across = tl.reshape(tl.where(m_16, 0.0, b_blocks), [64, 64])
    b_d -= product(product(b_d, b_inside, WIDE), b_d, WIDE)
    b_n = product(b_d, b_across, WIDE)
    b_d += product(product(b_n, b_n, WIDE), b_d, WIDE)
    return b_d - product(b_n, b_d, WIDE)


@triton.jit
def gdn_solve_kernel(
    q,  # [N * 64, Hk, K]
    k,
    g,  # [N * 64, Hv] f32
    beta,
    inverse,  # [N, Hv, 64, 64]: B
    within,  # [N, Hv, 64, 64]: P
    gates,  # [N, Hv, 4, 64] f32: enter, leave, -1, -1
    parts,  # [N, 4]: slot (-1: nothing is computed), ...
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
):
    C: tl.constexpr = 64
    PRECISION: tl.constexpr = "tf32x3" if WIDE else "tf32"
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(parts + i_n * 4)
    o_i, o_k = tl.arange(0, C), tl.arange(0, K)
    o_qk = ((i_n * C + o_i[:, None]) * HK + i_h // (HV // HK)) * K + o_k[None, :]
    o_g, o_c = (i_n * C + o_i) * HV + i_h, i_n * HV + i_h
    b_g, b_beta = tl.load(g + o_g).to(tl.float64), tl.load(beta + o_g)
    b_k, b_q = tl.load(k + o_qk), tl.load(q + o_qk)
    b_sum = tl.cumsum(b_g, 0)
    b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if slot < 0:  # known by now: it was asked for together with the data, which nobody wrote then
        return
    tl.store(gates + o_c * (4 * C) + o_i, tl.exp(b_sum.to(tl.float32)))
    tl.store(gates + o_c * (4 * C) + C + o_i, tl.exp((tl.sum(b_g, 0) - b_sum).to(tl.float32)))
    # sums of squares that scan_hopper.py's programs leave for each other are not there yet
    tl.store(gates + o_c * (4 * C) + 2 * C + tl.arange(0, 2 * C), tl.full([2 * C], -1.0, tl.float32))
    b_reach = tl.exp(tl.minimum((b_sum[:, None] - b_sum[None, :]).to(tl.float32), 0.0))
    o_tile = o_c * (C * C) + o_i[:, None] * C + o_i[None, :]
    b_p *= b_reach
    tl.store(within + o_tile, tl.where(o_i[:, None] >= o_i[None, :], b_p, 0.0).to(within.dtype.element_ty))
    b_a = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * b_reach * b_beta[:, None]
    b_b = unit_lower_inverse(tl.where(o_i[:, None] > o_i[None, :], b_a, 0.0), WIDE) * b_beta[None, :]
    tl.store(inverse + o_tile, b_b.to(inverse.dtype.element_ty))


@triton.jit
def gdn_scan_kernel(
    q,  # [N * 64, Hk, K]
    k,
    v,  # [N, Hv, V, 64]
    inverse,  # [N, Hv, 64, 64]
    within,
    gates,  # [N, Hv, 4, 64] f32
    states,  # [slots, Hv, K, V]
    slots,  # [C], -1: padding
    ends,  # [C]: parts of all prompts up to this one
    out,  # [N, Hv, V, 64]
    stride_state,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    PRECISION: tl.constexpr = "tf32x3" if WIDE else "tf32"
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + i_b).to(tl.int64)
    first, last = tl.load(ends + i_b - 1, mask=i_b > 0, other=0), tl.load(ends + i_b)
    if (slot < 0) | (first == last):
        return
    o_i, o_k, o_v = tl.arange(0, C), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    p_s = states + slot * stride_state + (i_h * K + o_k[None, :]) * V + o_v[:, None]  # transposed
    b_s = tl.load(p_s).to(tl.float32)
    o_qk = (o_i[:, None] * HK + i_h // (HV // HK)) * K + o_k[None, :]
    o_vo = (i_h * V + o_v[:, None]) * C + o_i[None, :]
    o_tile = i_h * C * C + o_i[:, None] * C + o_i[None, :]
    for i_n in tl.range(first, last, num_stages=STAGES):
        at = tl.cast(i_n, tl.int64)
        b_k, b_q = tl.load(k + at * (C * HK * K) + o_qk), tl.load(q + at * (C * HK * K) + o_qk)
        b_v = tl.load(v + at * (C * HV * V) + o_vo)
        p_g = gates + (at * HV + i_h) * (4 * C)
        b_enter, b_leave = tl.load(p_g + o_i)[None, :], tl.load(p_g + C + o_i)[None, :]
        b_start = b_s.to(b_k.dtype)
        b_f = tl.dot(b_start, tl.trans(b_k), input_precision=PRECISION)  # [BV, 64]
        b_o = tl.dot(b_start, tl.trans(b_q), input_precision=PRECISION)
        b_f = (b_v.to(tl.float32) - b_f * b_enter).to(b_k.dtype)
        b_b = tl.load(inverse + at * (HV * C * C) + o_tile)
        b_f = tl.dot(b_f, tl.trans(b_b), input_precision=PRECISION)
        b_s *= tl.load(p_g + C - 1)
        b_s = tl.dot((b_f * b_leave).to(b_k.dtype), b_k, b_s, input_precision=PRECISION)
        b_p = tl.load(within + at * (HV * C * C) + o_tile)
        b_o = tl.dot(b_f.to(b_k.dtype), tl.trans(b_p), b_o * b_enter, input_precision=PRECISION)
        tl.store(out + at * (C * HV * V) + o_vo, b_o.to(out.dtype.element_ty))
    tl.store(p_s, b_s.to(states.dtype.element_ty))


def solve(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """B, P and the gates of every chunk and value head."""
    (rows, Hk, K), Hv = k.shape, g.shape[1]
    N, wide = rows // CHUNK, k.dtype == torch.float32
    inverse, within = (torch.empty(N, Hv, CHUNK, CHUNK, dtype=k.dtype, device=k.device) for _ in range(2))
    gates = torch.empty(N, Hv, 4, CHUNK, dtype=torch.float32, device=k.device)
    gdn_solve_kernel[Hv, N](
        q, k, g, beta, inverse, within, gates, segments.parts, HK=Hk, HV=Hv, K=K, WIDE=wide,
        num_warps=4, maxnreg=None if wide else SOLVE_REGISTERS,
    )  # fmt: skip
    return inverse, within, gates


def delta_chunks(
    q: Tensor,  # [N * 64, Hk, K]
    k: Tensor,
    v: Tensor,  # [N, Hv, V, 64]
    g: Tensor,  # [N * 64, Hv] f32
    beta: Tensor,
    states: Tensor,  # [slots, Hv, K, V]
    segments: Segments,  # of N parts
) -> Tensor:  # [N, Hv, V, 64]
    """States change in place. Values and results lie transposed, chunk by chunk. Tokens with g = 0 and beta = 0 leave
    the state as it is, whatever else they have: they fill a last chunk. Chunks of padding hold anything. K and V are
    powers of two, 16 or more; all is contiguous. Value heads that share a key head are neighbours.
    """
    (_, Hk, K), (_, Hv, V, _), wide = k.shape, v.shape, k.dtype == torch.float32
    out = torch.empty_like(v)
    BV = min(V, 64)
    if wide:
        stages = 1
    else:
        stages = 3 if shared_memory(k.device) >= LARGE_SHARED_MEMORY else 2
    gdn_scan_kernel[V // BV, Hv, len(segments.slots)](
        q, k, v, *solve(q, k, g, beta, segments), states, segments.slots, segments.ends, out, states.stride(0),
        HK=Hk, HV=Hv, K=K, V=V, BV=BV, WIDE=wide, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out
