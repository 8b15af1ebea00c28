"""gdn_prefill: a Gated DeltaNet layer over a prompt chunk of one request, between its two projections.

    q, k, v = silu(conv(x));   q, k = l2norm(q) / sqrt(K), l2norm(k);   g = -decay softplus(a + dt_bias)
    o = delta rule (q, k, v, g, sigmoid(b));   out = rms_norm(o) silu(z)

On the GPU: one kernel for all that comes before the delta rule, the two of gdn_chunk.py, one for the norm. What they
hand on is in the dtype of x and whole chunks long, a last one filled with zeros; sums are f32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.gdn import CHUNK, causal_conv_ref, gated_delta_chunks
from hybridkv.kernels.gdn_chunk import delta_chunks
from hybridkv.kernels.gdn_weights import DeltaNet
from hybridkv.kernels.norm import gated_rms_norm_ref, l2_norm_ref

PIECE = 1 << 15  # tokens at a time: what the kernels hand on takes about 50 KB a token at 48 heads of 128
DIMS = (16, 32, 64, 128)  # of heads, that the kernels take


def gdn_prefill_ref(x: Tensor, net: DeltaNet, tail: Tensor, state: Tensor) -> Tensor:
    """x [T, q | k | v | z | b | a] -> [T, Hv * V]. tail [taps - 1, channels] f32, state [Hv, K, V]: moved on."""
    T, Hk, Hv, K, V = len(x), net.key_heads, net.value_heads, net.key_dim, net.value_dim
    mixed, z, b, a = x.split(net.columns, -1)
    q, k, v = causal_conv_ref(mixed, net.conv, tail).split([Hk * K, Hk * K, Hv * V], -1)
    q, k = (l2_norm_ref(t.view(T, Hk, K)).repeat_interleave(Hv // Hk, 1) for t in (q, k))
    g = -net.decay * F.softplus(a.float() + net.dt_bias)
    wide = state.float()
    o = gated_delta_chunks(q * K**-0.5, k, v.view(T, Hv, V), g, torch.sigmoid(b.float()), wide)
    state.copy_(wide)
    return gated_rms_norm_ref(o, z.view(T, Hv, V), net.norm, net.eps).flatten(1).to(x.dtype)


@triton.jit
def conv_tile(x, conv, tail, i_t, T, stride_x, o_c, channels, BT: tl.constexpr, TAPS: tl.constexpr):
    """silu of the convolution of channels o_c [BD] at BT tokens, [BT, BD] f32, zeros past T. The first tile's program
    leaves the tail of the next call.
    """
    o_t = i_t * BT + tl.arange(0, BT)
    b_y = tl.zeros([BT, o_c.shape[0]], tl.float32)
    for i in tl.static_range(TAPS):
        o_r = o_t + (i + 1 - TAPS)
        m_r = (o_r >= 0) & (o_r < T)
        b_x = tl.load(x + o_r.to(tl.int64)[:, None] * stride_x + o_c[None, :], mask=m_r[:, None], other=0.0)
        b_y += b_x.to(tl.float32) * tl.load(conv + o_c * TAPS + i)[None, :]
    if i_t == 0:
        for i in tl.static_range(TAPS - 1):  # what lies before x
            p_tail = tail + (o_t + i)[:, None] * channels + o_c[None, :]
            b_tail = tl.load(p_tail, mask=(o_t + i < TAPS - 1)[:, None], other=0.0)
            b_y += b_tail * tl.load(conv + o_c * TAPS + i)[None, :]
        for i in tl.static_range(TAPS - 1):  # row i of the next tail: row T + i of (tail, x)
            last = T.to(tl.int64) + i - (TAPS - 1)
            if last < 0:
                b_last = tl.load(tail + (T + i) * channels + o_c)
            else:
                b_last = tl.load(x + last * stride_x + o_c).to(tl.float32)
            tl.debug_barrier()  # row i is read before it is written: above, and by no later i
            tl.store(tail + i * channels + o_c, b_last)
    b_y = b_y / (1.0 + tl.exp(-b_y))
    return tl.where((o_t < T)[:, None], b_y, 0.0)


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)); log(1 + e) = log(u) e / (u - 1) keeps its digits where u = 1 + e is rounded."""
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    b_log = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    return tl.maximum(b_x, 0.0) + b_log


@triton.jit(do_not_specialize=["T"])
def gdn_inputs_kernel(
    x,  # [T, q | k | v | z | b | a], rows stride_x apart
    conv,  # [channels, TAPS] f32
    tail,  # [TAPS - 1, channels] f32
    decay,  # [Hv] f32
    dt_bias,
    q,  # [N * 64, Hk, K]
    k,
    v,  # [N, Hv, V, 64]
    g,  # [N * 64, Hv] f32
    beta,
    T,
    stride_x,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    i_c, i_t = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = 2 * HK * K + HV * V
    o_t = (i_t * BT + tl.arange(0, BT)).to(tl.int64)
    if i_c < 2 * HK:  # a query or a key
        o_k = tl.arange(0, K)
        b_y = conv_tile(x, conv, tail, i_t, T, stride_x, i_c * K + o_k, channels, BT, TAPS)
        b_y *= tl.rsqrt(tl.sum(b_y * b_y, 1) + 1e-6)[:, None]
        if i_c < HK:
            p_y, b_y = q + i_c * K, b_y * scale
        else:
            p_y, b_y = k + (i_c - HK) * K, b_y
        tl.store(p_y + o_t[:, None] * (HK * K) + o_k[None, :], b_y.to(q.dtype.element_ty))
    elif i_c < 2 * HK + HV:
        i_h, o_v = i_c - 2 * HK, tl.arange(0, V)
        b_y = conv_tile(x, conv, tail, i_t, T, stride_x, 2 * HK * K + i_h * V + o_v, channels, BT, TAPS)
        p_y = v + ((o_t // 64 * HV + i_h) * (V * 64) + o_t % 64)[None, :] + o_v[:, None] * 64
        tl.store(p_y, tl.trans(b_y.to(v.dtype.element_ty)))
    else:
        o_h = tl.arange(0, BH)
        m_h, m_t = (o_h < HV)[None, :], (o_t < T)[:, None]
        p_b = x + o_t[:, None] * stride_x + (channels + HV * V + o_h)[None, :]
        b_b = tl.load(p_b, mask=m_t & m_h, other=0.0).to(tl.float32)
        b_a = tl.load(p_b + HV, mask=m_t & m_h, other=0.0).to(tl.float32)
        b_a += tl.load(dt_bias + o_h, mask=o_h < HV, other=0.0)[None, :]
        b_g = -tl.load(decay + o_h, mask=o_h < HV, other=0.0)[None, :] * softplus(b_a)
        o_g = o_t[:, None] * HV + o_h[None, :]
        tl.store(g + o_g, tl.where(m_t, b_g, 0.0), mask=m_h)
        tl.store(beta + o_g, tl.where(m_t, 1.0 / (1.0 + tl.exp(-b_b)), 0.0), mask=m_h)


@triton.jit(do_not_specialize=["T"])
def gdn_norm_kernel(
    o,  # [N, Hv, V, 64]
    z,  # [T, Hv, V], rows stride_z apart
    weight,  # [V] f32
    out,  # [T, Hv, V]
    T,
    stride_z,
    eps,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
):
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    o_t, o_v = (i_t * BT + tl.arange(0, BT)).to(tl.int64), tl.arange(0, V)
    p_o = o + ((o_t // 64 * HV + i_h) * (V * 64) + o_t % 64)[None, :] + o_v[:, None] * 64
    b_o = tl.trans(tl.load(p_o)).to(tl.float32)  # rows past T are zeros
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None] * tl.load(weight + o_v)[None, :]
    m_t = (o_t < T)[:, None]
    b_z = tl.load(z + o_t[:, None] * stride_z + (i_h * V + o_v)[None, :], mask=m_t, other=0.0).to(tl.float32)
    b_o *= b_z / (1.0 + tl.exp(-b_z))
    tl.store(out + (o_t[:, None] * HV + i_h) * V + o_v[None, :], b_o.to(out.dtype.element_ty), mask=m_t)


def prepare(x: Tensor, net: DeltaNet, tail: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta as delta_chunks takes them; the tail moves on."""
    T, Hk, Hv, K, V = len(x), net.key_heads, net.value_heads, net.key_dim, net.value_dim
    N, BT = triton.cdiv(T, CHUNK), 32
    q, k = (torch.empty(N * CHUNK, Hk, K, dtype=x.dtype, device=x.device) for _ in range(2))
    v = torch.empty(N, Hv, V, CHUNK, dtype=x.dtype, device=x.device)
    g, beta = (torch.empty(N * CHUNK, Hv, dtype=torch.float32, device=x.device) for _ in range(2))
    gdn_inputs_kernel[2 * Hk + Hv + 1, N * (CHUNK // BT)](
        x, net.conv, tail, net.decay, net.dt_bias, q, k, v, g, beta, T, x.stride(0), K**-0.5,
        HK=Hk, HV=Hv, K=K, V=V, TAPS=net.conv.shape[1], BT=BT, BH=triton.next_power_of_2(Hv), num_warps=4,
    )  # fmt: skip
    return q, k, v, g, beta


def gdn_prefill_triton(x: Tensor, net: DeltaNet, tail: Tensor, state: Tensor) -> Tensor:
    T, Hv, V, BT = len(x), net.value_heads, net.value_dim, 32
    assert x.stride(1) == 1 and tail.is_contiguous() and state.is_contiguous() and net.conv.is_contiguous()
    out = torch.empty(T, Hv * V, dtype=x.dtype, device=x.device)
    for start in range(0, T, PIECE):
        part = x[start : start + PIECE]
        o, z = delta_chunks(*prepare(part, net, tail), state), part[:, net.channels :]
        gdn_norm_kernel[Hv, triton.cdiv(len(part), BT)](
            o, z, net.norm, out[start:], len(part), x.stride(0), net.eps, HV=Hv, V=V, BT=BT, num_warps=4
        )
    return out


def gdn_prefill(x: Tensor, net: DeltaNet, tail: Tensor, state: Tensor) -> Tensor:
    taken = use_triton(x) and net.key_dim in DIMS and net.value_dim in DIMS
    taken = taken and 1 < net.conv.shape[1] <= 33  # a tile of 32 tokens reads the tail, or the tile before it alone
    return (gdn_prefill_triton if taken else gdn_prefill_ref)(x, net, tail, state)
