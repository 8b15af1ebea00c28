"""gdn_step: everything of a Gated DeltaNet layer between its two projections, for one new token of each of B requests.

With the projection's output q | k | v, z, b, a, a request's tail (the convolution's last inputs) and, for each value
head, its state S [K, V]:

    q, k, v = silu(causal convolution);   q = l2(q) / sqrt(K);   k = l2(k)
    g = -decay softplus(a + dt_bias);   beta = sigmoid(b)
    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q
    out = rms_norm(o) weight silu(z)

Arithmetic is f32; tails and states are changed in place, rounded once where they are stored narrower. A padding row has
slot -1: it touches no state and gives zeros.

One launch, one program for each request and value head, with S in registers: S^T k and S^T q come from one pass over
what was loaded, as o = exp(g) S^T q + (k . q) u. Value heads that share a key head all read its part of the tail; the
last of them to have read it moves it on.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.gdn import causal_conv_step_ref, gated_delta_step_ref
from hybridkv.kernels.gdn_weights import DeltaNet
from hybridkv.kernels.norm import gated_rms_norm_ref, l2_norm_ref

TILE = 4096  # elements of S for each warp: more warps, and their sums, cost more than they hide


def gdn_step_ref(
    x: Tensor,  # [B, sum(net.columns)]
    net: DeltaNet,
    tails: Tensor,  # [slots, taps - 1, channels], oldest first
    states: Tensor,  # [slots, Hv, K, V]
    slots: Tensor,  # [B] int64, -1: padding
) -> Tensor:
    """-> [B, Hv V] in x.dtype."""
    out = x.new_zeros(len(x), net.value_heads * net.value_dim)
    real = slots >= 0
    x, slots = x[real], slots[real]
    mixed, z, b, a = x.split(net.columns, -1)
    tail, state = tails[slots].float(), states[slots].float()
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    q, k, v = causal_conv_step_ref(mixed, net.conv, tail).split([keys, keys, values], -1)
    group = net.value_heads // net.key_heads
    q, k = (l2_norm_ref(t.unflatten(-1, (net.key_heads, -1))).repeat_interleave(group, 1) for t in (q, k))
    v, z = (t.unflatten(-1, (net.value_heads, -1)) for t in (v, z))
    g = -net.decay * F.softplus(a.float() + net.dt_bias)
    o = gated_delta_step_ref(q * net.key_dim**-0.5, k, v, g, b.float().sigmoid(), state)
    tails[slots], states[slots] = tail.to(tails.dtype), state.to(states.dtype)
    out[real] = gated_rms_norm_ref(o, z, net.norm, net.eps).flatten(1).to(out.dtype)
    return out


@triton.jit
def add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add_triples(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def gdn_step_kernel(
    x,  # [B, q | k | v, z, b, a]
    conv,  # [channels, TAPS]
    decay,  # [Hv]
    dt_bias,
    norm,  # [V]
    tails,  # [slots, TAPS - 1, channels]
    states,  # [slots, Hv, K, V]
    slots,  # [B]
    arrivals,  # [slots, Hk] int32, zeros before and after
    out,  # [B, Hv, V]
    eps,
    stride_x,
    stride_tail,
    stride_state,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    BD: tl.constexpr,  # holds K and V
):
    GROUP: tl.constexpr = HV // HK
    channels: tl.constexpr = 2 * HK * K + HV * V
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_g = i_h // GROUP
    o_d = tl.arange(0, BD)
    m_k, m_v = o_d < K, o_d < V
    p_out = out + (i_b * HV + i_h) * V + o_d
    x += i_b * stride_x
    # the convolution's channels: those of q, k, v and nothing, side by side
    o_i, o_p = o_d[:, None], tl.arange(0, 4)[None, :]
    o_c = tl.where(o_p < 2, (o_p * HK + i_g) * K, 2 * HK * K + i_h * V) + o_i  # [BD, 4]
    m_qk, m_vc = (o_p < 2) & (o_i < K), (o_p == 2) & (o_i < V)
    m_c = m_qk | m_vc
    b_x = tl.load(x + o_c, mask=m_c, other=0.0).to(tl.float32)
    taps = ()
    for i in tl.static_range(TAPS):
        taps += (tl.load(conv + o_c * TAPS + i, mask=m_c, other=0.0),)
    b_beta = tl.sigmoid(tl.load(x + channels + HV * V + i_h).to(tl.float32))
    b_a = tl.load(x + channels + HV * V + HV + i_h).to(tl.float32) + tl.load(dt_bias + i_h)
    b_softplus = tl.maximum(b_a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_a)))
    b_fade = tl.exp(-tl.load(decay + i_h) * b_softplus)
    b_z = tl.load(x + channels + i_h * V + o_d, mask=m_v, other=0.0).to(tl.float32)
    slot = tl.load(slots + i_b)
    if slot < 0:
        tl.store(p_out, tl.zeros([BD], out.dtype.element_ty), mask=m_v)
        return
    p_tail = tails + slot * stride_tail + o_c
    rows = ()  # of the tail, asked for before the state, which takes longer
    for i in tl.static_range(TAPS - 1):
        rows += (tl.load(p_tail + i * channels, mask=m_c, other=0.0).to(tl.float32),)
    p_s = states + slot * stride_state + (i_h * K + o_d[:, None]) * V + o_d[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)

    b_y = b_x * taps[TAPS - 1]
    for i in tl.static_range(TAPS - 1):
        b_y += rows[i] * taps[i]
    b_y *= tl.sigmoid(b_y)
    b_qv, b_k = tl.split(tl.reshape(b_y, [BD, 2, 2]))  # q and v, k and nothing
    b_q, b_v = tl.split(b_qv)
    b_k, _ = tl.split(b_k)
    b_kk, b_qq, b_kq = tl.reduce((b_k * b_k, b_q * b_q, b_k * b_q), 0, add_triples)
    b_k_scale, b_q_scale = tl.rsqrt(b_kk + 1e-6), tl.rsqrt(b_qq + 1e-6) * (K**-0.5)
    b_k, b_q = b_k * b_k_scale, b_q * b_q_scale

    tl.debug_barrier()  # warps may read the same place of a tail: all have, before any writes or counts
    if GROUP > 1:
        p_arrivals = arrivals + slot * HK + i_g
        last = tl.atomic_add(p_arrivals, 1, sem="relaxed") == GROUP - 1  # the sums above have used what was read
        tl.store(p_arrivals, 0, mask=last)
        m_c = m_vc | (m_qk & last)
    for i in tl.static_range(TAPS - 2):
        tl.store(p_tail + i * channels, rows[i + 1].to(tails.dtype.element_ty), mask=m_c)
    tl.store(p_tail + (TAPS - 2) * channels, b_x.to(tails.dtype.element_ty), mask=m_c)

    b_sk, b_sq = tl.reduce((b_s * b_k[:, None], b_s * b_q[:, None]), 0, add_pairs)
    b_u = b_beta * (b_v - b_fade * b_sk)
    b_o = b_fade * b_sq + b_kq * b_k_scale * b_q_scale * b_u
    b_s = b_s * b_fade + b_k[:, None] * b_u[None, :]
    tl.store(p_s, b_s.to(states.dtype.element_ty), mask=m_s)
    b_w = tl.load(norm + o_d, mask=m_v, other=0.0)
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) / V + eps)
    tl.store(p_out, (b_o * b_w * b_z * tl.sigmoid(b_z)).to(out.dtype.element_ty), mask=m_v)


@cache
def _arrivals(tails: int, count: int, device: torch.device) -> Tensor:
    """How many programs have read a tail. One for each pool of tails: it lives on, as captured graphs hold it."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "the first call cannot be captured"
    return torch.zeros(count, dtype=torch.int32, device=device)


def gdn_step_triton(x: Tensor, net: DeltaNet, tails: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    B, (HV, K, V), taps = len(x), states.shape[1:], net.conv.shape[1]
    assert x.stride(1) == 1 and tails.stride()[1:] == (net.channels, 1) and states.stride()[1:] == (K * V, V, 1)
    out = torch.empty((B, HV * V), dtype=x.dtype, device=x.device)
    if B:
        arrivals = _arrivals(tails.data_ptr(), len(tails) * net.key_heads, x.device)
        BD = triton.next_power_of_2(max(K, V))
        gdn_step_kernel[HV, B](
            x, net.conv, net.decay, net.dt_bias, net.norm, tails, states, slots, arrivals, out, net.eps,
            x.stride(0), tails.stride(0), states.stride(0),
            HK=net.key_heads, HV=HV, K=K, V=V, TAPS=taps, BD=BD,
            num_warps=max(1, min(16, BD * BD // TILE)),
        )  # fmt: skip
    return out


def gdn_step(x: Tensor, net: DeltaNet, tails: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    op = gdn_step_triton if use_triton(x) and net.conv.shape[1] > 1 else gdn_step_ref
    return op(x, net, tails, states, slots)
