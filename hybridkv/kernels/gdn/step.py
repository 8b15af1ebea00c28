"""gdn_step: everything of a Gated DeltaNet layer between its two projections, for one new token of each of B requests.

With the projection's output q | k | v, z, b, a, a request's conv_state (the convolution's last inputs) and, for each
value head, its state S [K, V]:

    q, k, v = silu(causal convolution);   q = l2(q) / sqrt(K);   k = l2(k)
    g = -decay softplus(a + dt_bias);   alpha = exp(g);   beta = sigmoid(b)
    S <- alpha S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q
    out = rms_norm(o) weight silu(z)

Arithmetic is f32. conv_states and states are changed in place, rounded once where they are stored in bf16. A padding
row has slot -1: it touches no state and gives zeros.

One launch, one program for each request and value head, with S in registers: S^T k and S^T q come from one pass over
what was loaded, as o = alpha S^T q + (k . q) u. Value heads that share a key head all read its part of the conv_state;
the last of them to have read it, which `arrivals` counts, writes the new one. No program waits for another. Many
requests take step_hopper.py's kernel where there is one.

With few requests, and in that kernel, the launch uses PDL (overlap.py). State, conv_state and weights are read before
the wait. This is safe only because every step contains a kernel launched without PDL (the embedding lookup), which
orders it after the previous step over the same slots.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import COMPILED, has_gluon, tl, triton, use_triton
from hybridkv.kernels.gdn.rule import causal_conv_step_ref, gated_delta_step_ref
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.norm import gated_rms_norm_ref, l2_norm_ref
from hybridkv.kernels.overlap import can_overlap

TILE = 4096  # elements of S for each warp: more warps, and their sums, cost more than they hide
MANY = 264  # programs: with more, a bf16 state stays bf16 in registers, so that a third program fits beside two


def gdn_step_ref(
    x: Tensor, net: DeltaNet, conv_states: Tensor, states: Tensor, slots: Tensor, out: Tensor | None = None
) -> Tensor:
    out = x.new_empty(len(x), net.value_heads * net.value_dim) if out is None else out
    out.zero_()
    real = slots >= 0
    x, slots = x[real], slots[real]
    mixed, z, b, a = x.split(net.columns, -1)
    conv_state, state = conv_states[slots].float(), states[slots].float()
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    q, k, v = causal_conv_step_ref(mixed, net.conv, conv_state).split([keys, keys, values], -1)
    group = net.value_heads // net.key_heads
    q, k = (l2_norm_ref(t.unflatten(-1, (net.key_heads, -1))).repeat_interleave(group, 1) for t in (q, k))
    v, z = (t.unflatten(-1, (net.value_heads, -1)) for t in (v, z))
    g = -net.decay * F.softplus(a.float() + net.dt_bias)
    o = gated_delta_step_ref(q * net.key_dim**-0.5, k, v, g, b.float().sigmoid(), state)
    conv_states[slots], states[slots] = conv_state.to(conv_states.dtype), state.to(states.dtype)
    out[real] = gated_rms_norm_ref(o, z, net.norm, net.eps).flatten(1).to(out.dtype)
    return out


@triton.jit
def add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add_triples(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def load_conv_weights(conv, o_c, m_c, WIDTH: tl.constexpr):
    """The weights of channels o_c, oldest input first; the four of a channel are one load."""
    weights = ()
    if WIDTH == 4:
        b_w = tl.load(conv + o_c[:, None] * 4 + tl.arange(0, 4)[None, :], mask=m_c[:, None], other=0.0)
        b_even, b_odd = tl.split(tl.reshape(b_w, [o_c.shape[0], 2, 2]))
        b_0, b_2 = tl.split(b_even)
        b_1, b_3 = tl.split(b_odd)
        weights += (b_0, b_1, b_2, b_3)
    else:
        for i in tl.static_range(WIDTH):
            weights += (tl.load(conv + o_c * WIDTH + i, mask=m_c, other=0.0),)
    return weights


@triton.jit
def load_conv_state(p_conv, channels: tl.constexpr, m_c, WIDTH: tl.constexpr):
    rows = ()
    for i in tl.static_range(WIDTH - 1):
        rows += (tl.load(p_conv + i * channels, mask=m_c, other=0.0),)
    return rows


@triton.jit
def convolve(b_x, rows, weights, WIDTH: tl.constexpr):
    b_y = b_x.to(tl.float32) * weights[WIDTH - 1]
    for i in tl.static_range(WIDTH - 1):
        b_y += rows[i].to(tl.float32) * weights[i]
    return b_y * tl.sigmoid(b_y)


@triton.jit
def store_conv_state(p_conv, rows, b_x, channels: tl.constexpr, m_c, WIDTH: tl.constexpr):
    for i in tl.static_range(WIDTH - 2):
        tl.store(p_conv + i * channels, rows[i + 1], mask=m_c)
    tl.store(p_conv + (WIDTH - 2) * channels, b_x.to(p_conv.dtype.element_ty), mask=m_c)


@triton.jit
def gdn_step_kernel(
    x,  # [B, q | k | v, z, b, a]
    conv,  # [channels, WIDTH]
    decay,  # [Hv]
    dt_bias,
    norm,  # [V]
    conv_states,  # [slots, WIDTH - 1, channels]
    states,  # [slots, Hv, K, V]
    slots,  # [B]
    arrivals,  # [slots, Hk] int32, zeros before and after
    out,  # [B, Hv, V]
    eps,
    stride_x,
    stride_conv,
    stride_state,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BD: tl.constexpr,  # holds K and V
    THREADS: tl.constexpr,
    NARROW: tl.constexpr,  # a bf16 state stays so in registers between its two uses
    OVERLAP: tl.constexpr,
):
    if OVERLAP and not NARROW:
        tl.extra.cuda.gdc_launch_dependents()
    GROUP: tl.constexpr = HV // HK
    channels: tl.constexpr = 2 * HK * K + HV * V
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_g = i_h // GROUP
    o_d = tl.arange(0, BD)
    m_k, m_v = o_d < K, o_d < V
    p_out = out + (i_b * HV + i_h) * V + o_d
    slot = tl.load(slots + i_b).to(tl.int64)
    o_q, o_k, o_v = i_g * K + o_d, (HK + i_g) * K + o_d, 2 * HK * K + i_h * V + o_d
    w_q = load_conv_weights(conv, o_q, m_k, WIDTH)
    w_k = load_conv_weights(conv, o_k, m_k, WIDTH)
    w_v = load_conv_weights(conv, o_v, m_v, WIDTH)
    b_dt, b_decay = tl.load(dt_bias + i_h), tl.load(decay + i_h)
    b_w = tl.load(norm + o_d, mask=m_v, other=0.0)
    if slot < 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        tl.store(p_out, tl.zeros([BD], out.dtype.element_ty), mask=m_v)
        return
    p_conv = conv_states + slot * stride_conv
    r_q, r_k = load_conv_state(p_conv + o_q, channels, m_k, WIDTH), load_conv_state(p_conv + o_k, channels, m_k, WIDTH)
    r_v = load_conv_state(p_conv + o_v, channels, m_v, WIDTH)
    p_s = states + slot * stride_state + (i_h * K + o_d[:, None]) * V + o_d[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    b_held = tl.load(p_s, mask=m_s, other=0.0, eviction_policy="evict_first")  # not wanted before the next step
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    x += i_b * stride_x
    x_q, x_k = tl.load(x + o_q, mask=m_k, other=0.0), tl.load(x + o_k, mask=m_k, other=0.0)
    x_v = tl.load(x + o_v, mask=m_v, other=0.0)
    b_beta = tl.sigmoid(tl.load(x + channels + HV * V + i_h).to(tl.float32))
    b_a = tl.load(x + channels + HV * V + HV + i_h).to(tl.float32) + b_dt
    b_z = tl.load(x + channels + i_h * V + o_d, mask=m_v, other=0.0).to(tl.float32)
    b_softplus = tl.maximum(b_a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_a)))
    b_alpha = tl.exp(-b_decay * b_softplus)
    b_q, b_k = convolve(x_q, r_q, w_q, WIDTH), convolve(x_k, r_k, w_k, WIDTH)
    b_v = convolve(x_v, r_v, w_v, WIDTH)
    b_kk, b_qq, b_kq = tl.reduce((b_k * b_k, b_q * b_q, b_k * b_q), 0, add_triples)
    b_k_scale, b_q_scale = tl.rsqrt(b_kk + 1e-6), tl.rsqrt(b_qq + 1e-6) * (K**-0.5)

    b_s = b_held.to(tl.float32)
    b_sk, b_sq = tl.reduce((b_s * b_k[:, None], b_s * b_q[:, None]), 0, add_pairs)
    b_u = b_beta * (b_v - b_alpha * (b_sk * b_k_scale))
    b_o = b_q_scale * (b_alpha * b_sq + b_kq * b_k_scale * b_u)
    if NARROW:  # upcast again, so that the f32 values above need not be kept
        b_held = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_held], b_held.dtype, is_pure=False, pack=2)
        b_s = b_held.to(tl.float32)
    b_s = b_s * b_alpha + b_k[:, None] * (b_k_scale * b_u)[None, :]
    tl.debug_barrier()  # all threads have used their part of the conv_state: count it now, look at the answer last
    o_n = tl.arange(0, THREADS)
    p_arrivals, b_ticket = arrivals + slot * HK + i_g, o_n
    if GROUP > 1:
        b_ticket = tl.atomic_add(p_arrivals + o_n * 0, 1, mask=o_n == 0, sem="relaxed")
    if OVERLAP and NARROW:  # the next kernel gets room only now
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(p_s, b_s.to(states.dtype.element_ty), mask=m_s, eviction_policy="evict_first")
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) / V + eps)
    tl.store(p_out, (b_o * b_w * b_z * tl.sigmoid(b_z)).to(out.dtype.element_ty), mask=m_v)
    store_conv_state(p_conv + o_v, r_v, x_v, channels, m_v, WIDTH)
    if GROUP > 1:
        last = tl.sum(tl.where(o_n == 0, b_ticket, 0), 0) == GROUP - 1
        tl.store(p_arrivals, 0, mask=last)
        m_k = m_k & last
    store_conv_state(p_conv + o_q, r_q, x_q, channels, m_k, WIDTH)
    store_conv_state(p_conv + o_k, r_k, x_k, channels, m_k, WIDTH)


@cache
def _arrivals(conv_states: int, count: int, device: torch.device) -> Tensor:
    """How many programs have read a part of a conv_state; zeros before and after each launch.

    One for each pool, which two steps never use at the same time. It lives on, as captured graphs hold it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("gdn_step must run once on its states before it is captured: counters would be the graph's")
    return torch.zeros(count, dtype=torch.int32, device=device)


def suits_hopper(x: Tensor, net: DeltaNet, states: Tensor) -> bool:
    """Whether step_hopper.py's kernel computes this. Its copies take 16 bytes at a time."""
    if not has_gluon(x.device):
        return False
    if net.key_dim != 128 or net.value_dim != 128 or net.conv.shape[1] != 4:
        return False
    return states.data_ptr() % 16 == 0 and states.stride(0) * states.element_size() % 16 == 0


def gdn_step_triton(
    x: Tensor, net: DeltaNet, conv_states: Tensor, states: Tensor, slots: Tensor, out: Tensor | None = None
) -> Tensor:
    B, (HV, K, V) = len(x), states.shape[1:]
    assert x.stride(1) == 1 and conv_states.stride()[1:] == (net.channels, 1) and states.stride()[1:] == (K * V, V, 1)
    out = torch.empty((B, HV * V), dtype=x.dtype, device=x.device) if out is None else out
    assert out.is_contiguous()
    if not B:
        return out
    arrivals = _arrivals(conv_states.data_ptr(), len(conv_states) * net.key_heads, x.device)
    args = (
        x, net.conv, net.decay, net.dt_bias, net.norm, conv_states, states, slots, arrivals, out, net.eps,
        x.stride(0), conv_states.stride(0), states.stride(0),
    )  # fmt: skip
    heads = {"HK": net.key_heads, "HV": HV}
    wide = states.dtype != torch.bfloat16
    overlap = can_overlap(x)
    if not overlap and suits_hopper(x, net, states):
        from hybridkv.kernels.gdn.step_hopper import gdn_step_hopper_kernel

        gdn_step_hopper_kernel[HV, B](*args, **heads, num_warps=4 if wide else 2, launch_pdl=True)
        return out
    BD = triton.next_power_of_2(max(K, V))
    warps = max(1, min(16, BD * BD // TILE))
    narrow = COMPILED and not wide and B * HV > MANY and 64 * warps <= BD * BD and warps <= 8  # 168 registers a thread
    gdn_step_kernel[HV, B](
        *args, **heads, K=K, V=V, WIDTH=net.conv.shape[1], BD=BD, THREADS=32 * warps, NARROW=narrow, OVERLAP=overlap,
        num_warps=warps, launch_pdl=overlap, maxnreg=168 if narrow else None,
    )  # fmt: skip
    return out


def gdn_step(
    x: Tensor,  # [B, sum(net.columns)]
    net: DeltaNet,
    conv_states: Tensor,  # [slots, W - 1, channels], oldest input first
    states: Tensor,  # [slots, Hv, K, V]
    slots: Tensor,  # [B] int64, -1: padding
    out: Tensor | None = None,  # where results go
) -> Tensor:  # [B, Hv V] in x's dtype
    op = gdn_step_triton if use_triton(x) and net.conv.shape[1] > 1 else gdn_step_ref
    return op(x, net, conv_states, states, slots, out)
