"""Gated DeltaNet, what it computes: the causal convolution in front of it and the gated delta rule, as a recurrence and
in chunks. gdn_step and gdn_prefill run them, together with all else that stands between a layer's projections.

For each value head, with state S [K, V], decay g <= 0, strength beta, unit key k and scaled unit query q:

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

Over a chunk of 64 tokens with G_i = g_1 + .. + g_i the recurrence becomes a few matrix products: the corrected values
U and the keys' reach W into the incoming state solve one unit lower-triangular system,

    A_ij = beta_i (k_i . k_j) exp(G_i - G_j)  for j < i,    (I + A) [U | W] = diag(beta) [V | exp(G) K]
    V' = U - W S;   O = (q exp(G)) S + tril(q k^T exp(G_i - G_j)) V';   S <- exp(G_64) S + (k exp(G_64 - G))^T V'

A last chunk is padded with zeros (g = 0, beta = 0), which leaves S as it is. All arithmetic is f32. State is changed
in place.

The exact forms run the recurrence and the convolution in one formula for one token and for many, in operations whose
result does not depend on the batch (exact.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.exact import silu_exact, tree_sum

CHUNK = 64


def causal_conv_ref(x: Tensor, weight: Tensor, tail: Tensor) -> Tensor:
    """silu of the depthwise causal convolution of x [T, C] with weight [C, taps]; the last tap meets the newest token.

    `tail` [taps - 1, C] holds the inputs before x, oldest first, and is left holding those before the next call.
    """
    taps, T = weight.shape[1], len(x)
    rows = torch.cat((tail, x.float()))  # [taps - 1 + T, C]
    out = rows[:T] * weight[:, 0].float()
    for i in range(1, taps):
        out.addcmul_(rows[i : i + T], weight[:, i].float())
    tail.copy_(rows[T:])
    return F.silu(out)


def causal_conv_step_ref(x: Tensor, weight: Tensor, tails: Tensor) -> Tensor:
    """One token of each of B requests: x [B, C], tails [B, taps - 1, C]."""
    rows = torch.cat((tails, x.float().unsqueeze(1)), 1)  # [B, taps, C]
    tails.copy_(rows[:, 1:])
    return F.silu((rows * weight.float().t()).sum(1))


def causal_conv_exact(x: Tensor, weight: Tensor, tails: Tensor) -> Tensor:
    """T tokens of each of B requests: x [B, T, C], tails [B, taps - 1, C]."""
    T, rows = x.shape[1], torch.cat((tails, x.float()), 1)  # [B, taps - 1 + T, C]
    out = rows[:, :T] * weight[:, 0].float()
    for i in range(1, weight.shape[1]):
        out = out + rows[:, i : i + T] * weight[:, i].float()
    tails.copy_(rows[:, T:])
    return silu_exact(out)


def gated_delta_ref(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The recurrence over T tokens of one request. q, k [T, H, K], v [T, H, V], g, beta [T, H], state [H, K, V] -> [T,
    H, V].
    """
    out = torch.empty_like(v)
    for t in range(len(v)):
        out[t] = gated_delta_step_ref(q[t, None], k[t, None], v[t, None], g[t, None], beta[t, None], state[None])[0]
    return out


def gated_delta_step_ref(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """One token of B requests. q, k [B, H, K], v [B, H, V], g, beta [B, H], states [B, H, K, V] -> [B, H, V]."""
    states.mul_(g.exp()[..., None, None])
    u = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ states).squeeze(-2))
    states.add_(k.unsqueeze(-1) * u.unsqueeze(-2))
    return (q.unsqueeze(-2) @ states).squeeze(-2)


def gated_delta_exact_torch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """T tokens of each of B requests. q, k [B, T, H, K], v [B, T, H, V], g, beta [B, T, H], states [B, H, K, V] ->
    [B, T, H, V].
    """
    out, fade = torch.empty_like(v), g.exp()[..., None, None]
    q, k, v, beta = q.unsqueeze(-1), k.unsqueeze(-1), v.unsqueeze(-2), beta[..., None, None]
    for t in range(v.shape[1]):
        states.mul_(fade[:, t])
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
    """One launch for any number of tokens; a program keeps its part of the state in registers from the first to the
    last.
    """
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
    form = gated_delta_scan if use_triton(v) else gated_delta_exact_torch
    return form(q, k, v, g, beta, states)


def gated_delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The same as gated_delta_ref, 64 tokens at a time."""
    T = len(v)
    pad = -T % CHUNK
    q, k, v, g, beta = (
        F.pad(x, (0, 0) * (x.ndim - 1) + (0, pad)).transpose(0, 1).unflatten(1, (-1, CHUNK)) for x in (q, k, v, g, beta)
    )  # [H, chunks, 64, ...]
    decay = g.double().cumsum(-1)  # G; in f32 one strong decay would cost all later differences their digits
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    reach = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).float()  # G_i - G_j
    reach = reach.masked_fill(~below, -torch.inf).exp()  # exp(G_i - G_j), j <= i
    to_end, decay = (decay[..., -1:] - decay).float(), decay.float()
    A = (beta.unsqueeze(-1) * (k @ k.transpose(-1, -2)) * reach).tril(-1)
    right = beta.unsqueeze(-1) * torch.cat((v, k * decay.exp().unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    U, W = solved.split((v.shape[-1], k.shape[-1]), -1)
    within = (q @ k.transpose(-1, -2)) * reach
    q_in = q * decay.exp().unsqueeze(-1)
    k_out = k * to_end.exp().unsqueeze(-1)
    fade = decay[..., -1].exp()  # [H, chunks]
    out = torch.empty_like(v)
    for c in range(v.shape[1]):
        fresh = U[:, c] - W[:, c] @ state
        out[:, c] = q_in[:, c] @ state + within[:, c] @ fresh
        state.mul_(fade[:, c, None, None]).add_(k_out[:, c].transpose(-1, -2) @ fresh)
    return out.flatten(1, 2)[:, :T].transpose(0, 1)
