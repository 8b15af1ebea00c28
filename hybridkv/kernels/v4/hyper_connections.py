"""Hyper-connections: a residual of n streams X [n, D] a token, mixed by coefficients that come from the streams.

    v = F vec(X) / rms(vec(X))                                   n | n | n n values, each with a scale and a base
    pre = sigmoid(v_pre) + eps                                   x = RMSNorm(sum_i pre_i X_i) goes into the sub-layer
    post = 2 sigmoid(v_post)                                     f, the sub-layer's result, comes back:
    C = Sinkhorn(softmax of the rows of v_comb + eps)            X'_k = post_k f + sum_i C[i, k] X_i

Sinkhorn divides the columns by their sums, then rows and columns in turn, `iters` times in all, so that C is nearly
doubly stochastic. At the exit of the model there is only `pre`. All arithmetic is f32; streams and x have the model's
dtype, and the collapsed row is rounded to it before it is normed.

On a GPU a sub-layer takes three launches. F is long (n D) and thin, so its product is split into chunks of inputs
that run side by side; the programs that read their partial sums add them in one order: one program a token collapses,
another keeps C in registers and balances it meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.norm import rms_norm_ref

CHUNK = 512  # inputs that one program of the projection sums over


@dataclass(frozen=True)
class HyperMap:
    """Weights that map the streams to coefficients and a sub-layer's input. The model's exit has n rows, one scale."""

    fn: Tensor  # [n (n + 2), n D] f32
    base: Tensor  # [n (n + 2)] f32
    scale: Tensor  # [3] f32
    norm: Tensor  # [D] f32, the weight of the norm after the collapse
    norm_eps: float
    eps: float
    iters: int


def hyper_mix_ref(streams: Tensor, m: HyperMap) -> tuple[Tensor, Tensor, Tensor]:
    """pre [T, n], post [T, n] and C [T, n, n] of streams [T, n, D], f32."""
    n = streams.shape[1]
    values, bases = _project_ref(streams, m).split([n, n, n * n], -1), m.base.split([n, n, n * n])
    pre, post, comb = (v * s + b for v, s, b in zip(values, m.scale, bases))
    C = comb.unflatten(-1, (n, n)).softmax(-1) + m.eps
    C = C / (C.sum(-2, keepdim=True) + m.eps)
    for _ in range(m.iters - 1):
        C = C / (C.sum(-1, keepdim=True) + m.eps)
        C = C / (C.sum(-2, keepdim=True) + m.eps)
    return pre.sigmoid() + m.eps, 2 * post.sigmoid(), C


def _project_ref(streams: Tensor, m: HyperMap) -> Tensor:
    flat = streams.flatten(1).float()
    return F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + m.norm_eps), m.fn)


def _collapse_ref(streams: Tensor, pre: Tensor, m: HyperMap) -> Tensor:
    return rms_norm_ref((pre.unsqueeze(-1) * streams).sum(1).to(streams.dtype), m.norm, m.norm_eps)


def hyper_enter_ref(streams: Tensor, m: HyperMap) -> tuple[Tensor, Tensor, Tensor]:
    """The sub-layer's input x [T, D], then post [T, n] and C [T, n, n] for its result."""
    pre, post, C = hyper_mix_ref(streams, m)
    return _collapse_ref(streams, pre, m), post, C


def hyper_expand_ref(streams: Tensor, f: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_k = post_k f + sum_i C[i, k] X_i for f [T, D]."""
    mixed = comb.transpose(1, 2) @ streams.float()
    return (post.unsqueeze(-1) * f.float().unsqueeze(1) + mixed).to(streams.dtype)


def hyper_exit_ref(streams: Tensor, m: HyperMap) -> Tensor:
    """The collapsed and normed row [T, D] that the head reads; `m.fn` is [n, n D]."""
    pre = (_project_ref(streams, m) * m.scale + m.base).sigmoid() + m.eps
    return _collapse_ref(streams, pre, m)


@triton.jit(do_not_specialize=["T"])
def project_kernel(
    x,  # [T, K]
    fn,  # [N, K]
    partial,  # [T, S, N + 1]: products, then the sum of squares
    T,
    K,
    N,
    S,
    CHUNK: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    i_s = tl.program_id(0).to(tl.int64)
    o_t = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    o_n = tl.arange(0, BN)
    m_t, m_n = o_t < T, o_n < N
    b_v = tl.zeros([BT, BN], tl.float32)
    b_square = tl.zeros([BT], tl.float32)
    for i_k in tl.range(0, CHUNK, BK):
        o_k = i_s * CHUNK + i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_x = tl.load(x + o_t[:, None] * K + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0).to(tl.float32)
        b_f = tl.load(fn + o_n[None, :] * K + o_k[:, None], mask=m_n[None, :] & m_k[:, None], other=0.0)
        b_v = tl.dot(b_x, b_f, b_v, input_precision="tf32x3")
        b_square += tl.sum(b_x * b_x, 1)
    o_p = (o_t * S + i_s) * (N + 1)
    tl.store(partial + o_p[:, None] + o_n[None, :], b_v, mask=m_t[:, None] & m_n[None, :])
    tl.store(partial + o_p + N, b_square, mask=m_t)


@triton.jit
def enter_kernel(
    x,  # [T, n, D]
    partial,  # [T, S, N + 1]
    base,  # [N]
    scale,  # [3] or [1]
    weight,  # [D]
    y,  # [T, D]
    post,  # [T, n]
    comb,  # [T, n, n]
    S,
    N,
    D,
    norm_eps,
    eps,
    n: tl.constexpr,
    ITERS: tl.constexpr,
    BS: tl.constexpr,
    BI: tl.constexpr,
    BD: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_s, o_i, o_k = tl.arange(0, BS), tl.arange(0, BI), tl.arange(0, BI)
    m_s, m_i = o_s < S, o_i < n
    p_row = partial + i_t * S * (N + 1)
    b_square = tl.sum(tl.load(p_row + o_s * (N + 1) + N, mask=m_s, other=0.0))
    b_r = tl.rsqrt(b_square / (n * D) + norm_eps)
    m_si = m_s[:, None] & m_i[None, :]
    if tl.program_id(1) == 0:
        b_pre = tl.sum(tl.load(p_row + o_s[:, None] * (N + 1) + o_i[None, :], mask=m_si, other=0.0), 0)
        b_pre = tl.sigmoid(b_pre * b_r * tl.load(scale) + tl.load(base + o_i, mask=m_i, other=0.0)) + eps
        o_d = tl.arange(0, BD)
        m_d = o_d < D
        b_y = tl.zeros([BD], tl.float32)
        for i in tl.static_range(n):
            b_x = tl.load(x + (i_t * n + i) * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_y += tl.sum(tl.where(o_i == i, b_pre, 0.0)) * b_x
        b_y = b_y.to(y.dtype.element_ty).to(tl.float32)
        b_y = b_y * tl.rsqrt(tl.sum(b_y * b_y) / D + norm_eps) * tl.load(weight + o_d, mask=m_d, other=0.0)
        tl.store(y + i_t * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)
    else:
        b_post = tl.sum(tl.load(p_row + o_s[:, None] * (N + 1) + n + o_i[None, :], mask=m_si, other=0.0), 0)
        b_post = b_post * b_r * tl.load(scale + 1) + tl.load(base + n + o_i, mask=m_i, other=0.0)
        tl.store(post + i_t * n + o_i, 2 * tl.sigmoid(b_post), mask=m_i)
        o_c = o_i[:, None] * n + o_k[None, :]
        m_c = (o_i[:, None] < n) & (o_k[None, :] < n)
        p_c = p_row + o_s[:, None, None] * (N + 1) + 2 * n + o_c[None, :, :]
        b_c = tl.sum(tl.load(p_c, mask=m_s[:, None, None] & m_c[None, :, :], other=0.0), 0)
        b_c = b_c * b_r * tl.load(scale + 2) + tl.load(base + 2 * n + o_c, mask=m_c, other=0.0)
        b_c = tl.where(m_c, b_c, float("-inf"))
        b_top = tl.where(m_i, tl.max(b_c, 1), 0.0)
        b_c = tl.exp(b_c - b_top[:, None])
        b_c = b_c / tl.where(m_i, tl.sum(b_c, 1), 1.0)[:, None]
        b_c = tl.where(m_c, b_c + eps, 0.0)
        b_c = b_c / (tl.sum(b_c, 0) + eps)[None, :]
        for _ in range(ITERS - 1):
            b_c = b_c / (tl.sum(b_c, 1) + eps)[:, None]
            b_c = b_c / (tl.sum(b_c, 0) + eps)[None, :]
        tl.store(comb + i_t * n * n + o_c, b_c, mask=m_c)


@triton.jit
def expand_kernel(x, f, post, comb, y, D, n: tl.constexpr, BD: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_f = tl.load(f + i_t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    for k in tl.static_range(n):
        b_y = tl.load(post + i_t * n + k) * b_f
        for i in tl.static_range(n):
            b_x = tl.load(x + (i_t * n + i) * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_y += tl.load(comb + (i_t * n + i) * n + k) * b_x
        tl.store(y + (i_t * n + k) * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


def _project_triton(streams: Tensor, fn: Tensor) -> Tensor:
    T, K, N = len(streams), streams[0].numel(), len(fn)
    S = triton.cdiv(K, CHUNK)
    partial = torch.empty((T, S, N + 1), dtype=torch.float32, device=streams.device)
    BT = 16 if T <= 16 else 64
    project_kernel[S, triton.cdiv(T, BT)](
        streams, fn, partial, T, K, N, S,
        CHUNK=CHUNK, BT=BT, BN=max(16, triton.next_power_of_2(N)), BK=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return partial


def _collapse_triton(streams: Tensor, m: HyperMap, post: Tensor, comb: Tensor, programs: int) -> Tensor:
    T, n, D = streams.shape
    y = torch.empty((T, D), dtype=streams.dtype, device=streams.device)
    if T:
        partial = _project_triton(streams, m.fn)
        S = partial.shape[1]
        enter_kernel[T, programs](
            streams, partial, m.base, m.scale, m.norm, y, post, comb, S, len(m.fn), D, m.norm_eps, m.eps,
            n=n, ITERS=m.iters, BS=triton.next_power_of_2(S), BI=triton.next_power_of_2(n),
            BD=triton.next_power_of_2(D), num_warps=8 if D > 1024 else 4,
        )  # fmt: skip
    return y


def hyper_enter_triton(streams: Tensor, m: HyperMap) -> tuple[Tensor, Tensor, Tensor]:
    T, n, _ = streams.shape
    post, comb = (torch.empty(shape, dtype=torch.float32, device=streams.device) for shape in ((T, n), (T, n, n)))
    return _collapse_triton(streams.contiguous(), m, post, comb, programs=2), post, comb


def hyper_exit_triton(streams: Tensor, m: HyperMap) -> Tensor:
    return _collapse_triton(streams.contiguous(), m, m.base, m.base, programs=1)  # neither post nor C is written


def hyper_expand_triton(streams: Tensor, f: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    T, n, D = streams.shape
    out = torch.empty((T, n, D), dtype=streams.dtype, device=streams.device)
    BD = min(1024, triton.next_power_of_2(D))
    if T:
        expand_kernel[T, triton.cdiv(D, BD)](streams.contiguous(), f.contiguous(), post, comb, out, D, n=n, BD=BD)
    return out


def hyper_enter(streams: Tensor, m: HyperMap) -> tuple[Tensor, Tensor, Tensor]:
    return hyper_enter_triton(streams, m) if use_triton(streams) else hyper_enter_ref(streams, m)


def hyper_exit(streams: Tensor, m: HyperMap) -> Tensor:
    return hyper_exit_triton(streams, m) if use_triton(streams) else hyper_exit_ref(streams, m)


def hyper_expand(streams: Tensor, f: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    expand = hyper_expand_triton if use_triton(streams) else hyper_expand_ref
    return expand(streams, f, post, comb)
