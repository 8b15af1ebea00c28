"""The gated delta rule over whole chunks of 64 tokens of one request, on the GPU (the formulas: gdn.py).

Two kernels. `gdn_solve_kernel` does what no state is needed for, all chunks and heads at once; r_ij = exp(G_i - G_j):

    B = (I + A)^-1 diag(beta)  [64, 64]     P = tril(q k^T r)  [64, 64]     enter = exp(G)     leave = exp(G_64 - G)

`gdn_scan_kernel` then walks through the chunks with a part of a head's state in registers, transposed, so that every
product takes its left side from registers and its right side from shared memory:

    F^T = (V - enter (k S))^T B^T;    O^T = (enter (q S))^T + F^T P^T;    S^T <- enter_64 S^T + (leave F)^T k

q, k and v come rounded to the model's dtype; products of bf16 take the state and F in bf16 too, sums are f32. Sums of g
are f64: their differences keep their digits behind a strong decay. No exponential is of a positive number.

The inverse is by substitution inside four diagonal blocks of 16, D = (I + A_within)^-1. With N = D A_across, N^4 = 0:
(I + A)^-1 = (I - N) (I + N^2) D. These products are in tf32, of f32 models in three parts of it (tf32x3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import roomy, tl, triton
from hybridkv.kernels.gdn import CHUNK


@triton.jit
def unit_lower_inverse(b_a, PRECISION: tl.constexpr):
    """(I + b_a)^-1 of a strictly lower triangular tile [64, 64] f32."""
    o_b, o_i = tl.arange(0, 4), tl.arange(0, 16)
    m_same = o_b[:, None, None, None] == o_b[None, None, :, None]  # blocks on the diagonal
    b_blocks = tl.reshape(b_a, [4, 16, 4, 16])
    b_within = tl.sum(tl.where(m_same, b_blocks, 0.0), 2)  # [4, 16, 16]
    b_d = tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros([4, 16, 16], tl.float32)
    for j in tl.static_range(15):  # row j is done: take it out of the rows below
        b_row = tl.sum(tl.where((o_i == j)[None, :, None], b_d, 0.0), 1)  # [4, 16]
        b_column = tl.sum(tl.where((o_i == j)[None, None, :], b_within, 0.0), 2)
        b_d -= b_column[:, :, None] * b_row[:, None, :]
    b_d = tl.reshape(tl.where(m_same, b_d[:, :, None, :], 0.0), [64, 64])
    b_across = tl.reshape(tl.where(m_same, 0.0, b_blocks), [64, 64])
    b_n = tl.dot(b_d, b_across, input_precision=PRECISION)
    b_n2 = tl.dot(b_n, b_n, input_precision=PRECISION)
    b_d += tl.dot(b_n2, b_d, input_precision=PRECISION)
    return b_d - tl.dot(b_n, b_d, input_precision=PRECISION)


@triton.jit
def gdn_solve_kernel(
    q,  # [N * 64, Hk, K]
    k,
    g,  # [N * 64, Hv] f32
    beta,
    inverse,  # [N, Hv, 64, 64]: B
    within,  # [N, Hv, 64, 64]: P
    enter,  # [N, Hv, 64] f32
    leave,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    C: tl.constexpr = 64
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_i, o_k = tl.arange(0, C), tl.arange(0, K)
    o_qk = ((i_n * C + o_i[:, None]) * HK + i_h) * K + o_k[None, :]
    b_k = tl.load(k + o_qk)
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_qk = tl.dot(tl.load(q + o_qk), tl.trans(b_k), input_precision=PRECISION)
    for i_g in range(HV // HK):  # the value heads of this key head
        i_v = i_h * (HV // HK) + i_g
        o_g, o_c = (i_n * C + o_i) * HV + i_v, i_n * HV + i_v
        b_g = tl.load(g + o_g).to(tl.float64)
        b_sum = tl.cumsum(b_g, 0)
        tl.store(enter + o_c * C + o_i, tl.exp(b_sum.to(tl.float32)))
        tl.store(leave + o_c * C + o_i, tl.exp((tl.sum(b_g, 0) - b_sum).to(tl.float32)))
        b_reach = tl.exp(tl.minimum((b_sum[:, None] - b_sum[None, :]).to(tl.float32), 0.0))
        o_tile = o_c * C * C + o_i[:, None] * C + o_i[None, :]
        b_p = tl.where(o_i[:, None] >= o_i[None, :], b_qk * b_reach, 0.0)
        tl.store(within + o_tile, b_p.to(within.dtype.element_ty))
        b_beta = tl.load(beta + o_g)
        b_a = tl.where(o_i[:, None] > o_i[None, :], b_kk * b_reach * b_beta[:, None], 0.0)
        b_b = unit_lower_inverse(b_a, PRECISION) * b_beta[None, :]
        tl.store(inverse + o_tile, b_b.to(inverse.dtype.element_ty))


@triton.jit(do_not_specialize=["N"])
def gdn_scan_kernel(
    q,  # [N * 64, Hk, K]
    k,
    v,  # [N, Hv, V, 64]
    inverse,  # [N, Hv, 64, 64]
    within,
    enter,  # [N, Hv, 64] f32
    leave,
    state,  # [Hv, K, V]
    out,  # [N, Hv, V, 64]
    N,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    i_v, i_h = tl.program_id(0), tl.program_id(1)
    o_i, o_k, o_v = tl.arange(0, C), tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    p_s = state + (i_h * K + o_k[None, :]) * V + o_v[:, None]  # transposed
    b_s = tl.load(p_s).to(tl.float32)
    o_qk = (o_i[:, None] * HK + i_h // (HV // HK)) * K + o_k[None, :]
    o_vo = (i_h * V + o_v[:, None]) * C + o_i[None, :]
    o_tile = i_h * C * C + o_i[:, None] * C + o_i[None, :]
    for i_n in tl.range(0, N, num_stages=STAGES):
        at = tl.cast(i_n, tl.int64)
        b_k, b_q = tl.load(k + at * (C * HK * K) + o_qk), tl.load(q + at * (C * HK * K) + o_qk)
        b_v = tl.load(v + at * (C * HV * V) + o_vo)
        o_g = at * (HV * C) + i_h * C
        b_enter, b_leave = tl.load(enter + o_g + o_i), tl.load(leave + o_g + o_i)
        b_start = b_s.to(b_k.dtype)
        b_f = tl.dot(b_start, tl.trans(b_k), input_precision=PRECISION)  # [BV, 64]
        b_o = tl.dot(b_start, tl.trans(b_q), input_precision=PRECISION)
        b_f = (b_v.to(tl.float32) - b_f * b_enter[None, :]).to(b_k.dtype)
        b_b = tl.load(inverse + at * (HV * C * C) + o_tile)
        b_f = tl.dot(b_f, tl.trans(b_b), input_precision=PRECISION)
        b_s *= tl.load(enter + o_g + C - 1)
        b_s = tl.dot((b_f * b_leave[None, :]).to(b_k.dtype), b_k, b_s, input_precision=PRECISION)
        b_p = tl.load(within + at * (HV * C * C) + o_tile)
        b_o = tl.dot(b_f.to(b_k.dtype), tl.trans(b_p), b_o * b_enter[None, :], input_precision=PRECISION)
        tl.store(out + at * (C * HV * V) + o_vo, b_o.to(out.dtype.element_ty))
    tl.store(p_s, b_s.to(state.dtype.element_ty))


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """q, k [N * 64, Hk, K], v [N, Hv, V, 64], g, beta [N * 64, Hv] f32, state [Hv, K, V] -> [N, Hv, V, 64].

    The state changes in place. Values and results lie transposed, chunk by chunk. Rows of zeros fill a last chunk and
    leave the state as it is. K and V are powers of two, 16 or more; all is contiguous. Value heads that share a key
    head are neighbours.
    """
    (_, Hk, K), (N, Hv, V, _) = k.shape, v.shape
    wide, BV, out = k.dtype == torch.float32, min(V, 64), torch.empty_like(v)
    inverse, within = (torch.empty(N, Hv, CHUNK, CHUNK, dtype=k.dtype, device=k.device) for _ in range(2))
    enter, leave = (torch.empty(N, Hv, CHUNK, dtype=torch.float32, device=k.device) for _ in range(2))
    precision = "tf32x3" if wide else "tf32"  # of f32 products; those of bf16 are exact
    gdn_solve_kernel[Hk, N](
        q, k, g, beta, inverse, within, enter, leave, HK=Hk, HV=Hv, K=K, PRECISION=precision, num_warps=4
    )
    stages = 1 if wide else 3 if roomy(k.device) else 2
    gdn_scan_kernel[V // BV, Hv](
        q, k, v, inverse, within, enter, leave, state, out, N,
        HK=Hk, HV=Hv, K=K, V=V, BV=BV, PRECISION=precision, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out
