"""Gated DeltaNet in exact mode: the convolution and the delta rule (rule.py) with results that no batch changes.

One formula serves for one token and for many, in operations whose result depends on their own inputs alone (exact.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.exact import silu_exact, tree_sum


def causal_conv_exact(x: Tensor, weight: Tensor, conv_states: Tensor) -> Tensor:
    """T tokens of each of B requests: x [B, T, C], weight [C, W], conv_states [B, W - 1, C] -> [B, T, C]."""
    T = x.shape[1]
    rows = torch.cat((conv_states, x.float()), 1)  # [B, W - 1 + T, C]
    out = rows[:, :T] * weight[:, 0].float()
    for i in range(1, weight.shape[1]):
        out = out + rows[:, i : i + T] * weight[:, i].float()
    conv_states.copy_(rows[:, T:])
    return silu_exact(out)


def gated_delta_exact_torch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    out = torch.empty_like(v)
    alpha = g.exp()[..., None, None]
    q, k, v, beta = q.unsqueeze(-1), k.unsqueeze(-1), v.unsqueeze(-2), beta[..., None, None]
    for t in range(v.shape[1]):
        states.mul_(alpha[:, t])
        u = beta[:, t] * (v[:, t] - tree_sum(states * k[:, t], -2))  # [B, H, 1, V]
        states.add_(k[:, t] * u)
        out[:, t] = tree_sum(states * q[:, t], -2).squeeze(-2)
    return out


@triton.jit(do_not_specialize=["T", "stride_state"])
def gated_delta_scan_kernel(
    q,  # [B, T, H, K]
    k,
    v,  # [B, T, H, V]
    g,  # [B, T, H]
    beta,
    state,  # [B, H, K, V]
    out,  # [B, T, H, V]
    T,
    stride_state,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    p_s = state + i_b * stride_state + (i_h * K + o_k[:, None]) * V + o_v[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0.0)
    for i_t in tl.range(0, T):
        row = (i_b * T + i_t) * H + i_h
        b_q = tl.load(q + row * K + o_k, mask=m_k, other=0.0)
        b_k = tl.load(k + row * K + o_k, mask=m_k, other=0.0)
        b_v = tl.load(v + row * V + o_v, mask=m_v, other=0.0)
        b_s = b_s * tl.exp(tl.load(g + row))
        b_u = tl.load(beta + row) * (b_v - tl.sum(b_s * b_k[:, None], 0))
        b_s = b_s + b_k[:, None] * b_u[None, :]
        tl.store(out + row * V + o_v, tl.sum(b_s * b_q[:, None], 0), mask=m_v)
    tl.store(p_s, b_s, mask=m_s)


def gated_delta_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """One launch for any number of tokens; a program keeps its part of the state in registers throughout."""
    B, T, H, K = q.shape
    V, BV = v.shape[-1], 16
    q, k, v, g, beta = (x.float().contiguous() for x in (q, k, v, g, beta))
    assert states.stride()[1:] == (K * V, V, 1) and states.dtype == torch.float32
    out = torch.empty_like(v)
    gated_delta_scan_kernel[triton.cdiv(V, BV), H, B](
        q, k, v, g, beta, states, out, T, states.stride(0),
        H=H, K=K, V=V, BK=triton.next_power_of_2(K), BV=BV, num_warps=4,
    )  # fmt: skip
    return out


def gated_delta_exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """T tokens of each of B requests.

    q, k [B, T, H, K], v [B, T, H, V], g, beta [B, T, H], states [B, H, K, V] f32, changed in place -> [B, T, H, V].
    """
    form = gated_delta_scan if use_triton(v) else gated_delta_exact_torch
    return form(q, k, v, g, beta, states)
