"""The Triton kernels of gdn_exact: what comes before the delta rule, the recurrence, and the gated norm behind it.

A token's numbers come from its own rows alone. Sums over channels have one order, which the size of a tile decides, and
that never changes: one program serves a step of one token and a prompt. Where a tile has several tokens, the compiler
may not fuse products with sums (enable_fp_fusion=False at the launch): of a b + c d it fuses one product in one row and
the other in another. What is to be fused is written as fma. In the recurrence a channel has the same place in every
program, so its sums are compiled once.
"""

from __future__ import annotations

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.gdn.prefill import silu, softplus
from hybridkv.kernels.overlap import wait_for_inputs


@triton.jit
def conv_exact(
    x, conv, conv_states, o_t, b_begin, b_slot, m_t, o_c, m_c, stride_x, stride_conv, channels, WIDTH: tl.constexpr
):
    """silu of the convolution of channels o_c [BD] at tokens o_t [BT]: [BT, BD] f32, oldest input first."""
    b_y = tl.zeros([o_t.shape[0], o_c.shape[0]], tl.float32)
    early = tl.min(tl.where(m_t, o_t - b_begin, WIDTH), 0) < WIDTH - 1  # some need the conv_state
    for i in tl.static_range(WIDTH):
        o_r = o_t - (WIDTH - 1 - i)
        b_back = o_r - b_begin  # below 0: the conv_state has it
        m_x, m_s = m_t & (b_back >= 0), m_t & (b_back < 0)
        b_x = tl.load(x + o_r[:, None] * stride_x + o_c[None, :], mask=m_x[:, None] & m_c[None, :], other=0.0)
        b_in = b_x.to(tl.float32)
        if early:
            o_s = b_slot * stride_conv + (b_back + (WIDTH - 1)) * channels
            b_s = tl.load(conv_states + o_s[:, None] + o_c[None, :], mask=m_s[:, None] & m_c[None, :], other=0.0)
            b_in = tl.where(m_x[:, None], b_in, b_s.to(tl.float32))
        b_w = tl.load(conv + o_c * WIDTH + i, mask=m_c, other=0.0)
        b_y = tl.fma(b_in, tl.broadcast_to(b_w[None, :], b_in.shape), b_y)
    return silu(b_y)


@triton.jit(do_not_specialize=["T"])
def gdn_exact_inputs_kernel(
    x,  # [T, q | k | v, z, b, a]
    conv,  # [channels, WIDTH] f32
    conv_states,  # [slots, WIDTH - 1, channels]
    decay,  # [Hv] f32
    dt_bias,
    qk,  # [T, Hk, 2, K] f32: query, key
    v,  # [T, Hv, V]
    gates,  # [T, Hv, 4] f32: alpha, beta, q . k
    slots,  # [B], -1: padding
    starts,  # [B + 1]
    requests,  # [T] row of each token
    T,
    stride_x,
    stride_conv,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    i_c = tl.program_id(0)
    GROUP: tl.constexpr = HV // HK
    channels: tl.constexpr = 2 * HK * K + HV * V
    o_t = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    b_r = tl.load(requests + o_t, mask=o_t < T, other=0)
    b_slot = tl.load(slots + b_r).to(tl.int64)
    b_begin = tl.load(starts + b_r)
    m_t = (o_t < T) & (b_slot >= 0)
    if i_c < HK:
        o_k = tl.arange(0, BK)
        m_k = o_k < K
        b_q = conv_exact(
            x, conv, conv_states, o_t, b_begin, b_slot, m_t, i_c * K + o_k, m_k, stride_x, stride_conv, channels, WIDTH
        )
        o_c = (HK + i_c) * K + o_k
        b_k = conv_exact(
            x, conv, conv_states, o_t, b_begin, b_slot, m_t, o_c, m_k, stride_x, stride_conv, channels, WIDTH
        )
        b_q *= (tl.rsqrt(tl.sum(b_q * b_q, 1) + 1e-6) * scale)[:, None]
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 1) + 1e-6)[:, None]
        p_y = qk + (o_t * (HK * 2 * K) + i_c * (2 * K))[:, None] + o_k[None, :]
        tl.store(p_y, b_q, mask=m_t[:, None] & m_k[None, :])
        tl.store(p_y + K, b_k, mask=m_t[:, None] & m_k[None, :])
        b_kq = tl.sum(b_q * b_k, 1)
        for i in tl.static_range(GROUP):
            tl.store(gates + (o_t * HV + i_c * GROUP + i) * 4 + 2, b_kq, mask=m_t)
    elif i_c < HK + HV:
        i_h, o_v = i_c - HK, tl.arange(0, BV)
        m_v = o_v < V
        o_c = 2 * HK * K + i_h * V + o_v
        b_v = conv_exact(
            x, conv, conv_states, o_t, b_begin, b_slot, m_t, o_c, m_v, stride_x, stride_conv, channels, WIDTH
        )
        p_v = v + ((o_t * HV + i_h) * V)[:, None] + o_v[None, :]
        tl.store(p_v, b_v.to(v.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])
    else:
        o_h = tl.arange(0, BH)
        m_h = m_t[:, None] & (o_h < HV)[None, :]
        p_b = x + o_t[:, None] * stride_x + (channels + HV * V + o_h)[None, :]
        b_b, b_a = tl.load(p_b, mask=m_h, other=0.0), tl.load(p_b + HV, mask=m_h, other=0.0)
        b_a = b_a.to(tl.float32) + tl.load(dt_bias + o_h, mask=o_h < HV, other=0.0)[None, :]
        b_decay = tl.load(decay + o_h, mask=o_h < HV, other=0.0)
        p_g = gates + (o_t[:, None] * HV + o_h[None, :]) * 4
        tl.store(p_g, tl.exp(-b_decay[None, :] * softplus(b_a)), mask=m_h)
        tl.store(p_g + 1, 1.0 / (1.0 + tl.exp(-b_b.to(tl.float32))), mask=m_h)


@triton.jit
def next_conv_rows(x, p_state, o_c, m_c, begin, end, stride_x, channels, WIDTH: tl.constexpr):
    """Channels o_c of the conv_state before the next call: the last rows of (conv_state, x)."""
    rows = ()
    for i in tl.static_range(WIDTH - 1):
        last = end - (WIDTH - 1 - i)
        b_x = tl.load(x + last * stride_x + o_c, mask=m_c & (last >= begin), other=0.0).to(p_state.dtype.element_ty)
        o_s = (end - begin + i) * channels + o_c
        rows += (tl.where(last >= begin, b_x, tl.load(p_state + o_s, mask=m_c & (last < begin), other=0.0)),)
    return rows


@triton.jit
def store_conv_rows(p_state, rows, o_c, m_c, channels, WIDTH: tl.constexpr):
    for i in tl.static_range(WIDTH - 1):
        tl.store(p_state + i * channels + o_c, rows[i], mask=m_c)


@triton.jit
def add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def gdn_exact_scan_kernel(
    x,  # [T, q | k | v, z, b, a]: what conv_states are left with
    qk,  # [T, Hk, 2, K] f32
    v,  # [T, Hv, V]
    gates,  # [T, Hv, 4] f32
    out,  # [T, Hv, V] f32
    conv_states,  # [slots, WIDTH - 1, channels]
    states,  # [slots, Hv, K, V] f32
    slots,  # [B], -1: padding
    starts,  # [B + 1]
    stride_x,
    stride_conv,
    stride_state,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,  # value channels of a program
    BC: tl.constexpr,  # key channels whose conv_state it moves on, if its head is the first of those that share them
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_v, i_h = tl.program_id(0), tl.program_id(1)
    i_b = tl.num_programs(2) - 1 - tl.program_id(2)  # prompts are the last requests, and take longest
    slot = tl.load(slots + i_b).to(tl.int64)
    begin, end = tl.load(starts + i_b).to(tl.int64), tl.load(starts + i_b + 1).to(tl.int64)
    if (slot < 0) | (begin >= end):
        wait_for_inputs(OVERLAP)  # what follows must find all before it done
        return
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    GROUP: tl.constexpr = HV // HK
    channels: tl.constexpr = 2 * HK * K + HV * V
    i_g = i_h // GROUP
    p_s = states + slot * stride_state + (i_h * K + o_k[:, None]) * V + o_v[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0.0)  # no kernel of this step has written it
    wait_for_inputs(OVERLAP)
    p_conv = conv_states + slot * stride_conv
    o_key = i_v * BC + tl.arange(0, BC)
    m_key = (o_key < K) & (i_h % GROUP == 0)
    o_cq, o_ck, o_cv = i_g * K + o_key, (HK + i_g) * K + o_key, 2 * HK * K + i_h * V + o_v
    r_q = next_conv_rows(x, p_conv, o_cq, m_key, begin, end, stride_x, channels, WIDTH)
    r_k = next_conv_rows(x, p_conv, o_ck, m_key, begin, end, stride_x, channels, WIDTH)
    r_v = next_conv_rows(x, p_conv, o_cv, m_v, begin, end, stride_x, channels, WIDTH)
    for i_t in tl.range(begin, end, num_stages=STAGES):
        p_q = qk + (i_t * HK + i_g) * (2 * K) + o_k
        b_q, b_k = tl.load(p_q, mask=m_k, other=0.0), tl.load(p_q + K, mask=m_k, other=0.0)
        row = i_t * HV + i_h
        b_v = tl.load(v + row * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_alpha, b_beta, b_kq = tl.load(gates + row * 4), tl.load(gates + row * 4 + 1), tl.load(gates + row * 4 + 2)
        b_sk, b_sq = tl.reduce((b_s * b_k[:, None], b_s * b_q[:, None]), 0, add_pairs)
        b_u = b_beta * tl.fma(-b_alpha, b_sk, b_v)
        tl.store(out + row * V + o_v, tl.fma(b_kq, b_u, b_alpha * b_sq), mask=m_v)
        b_s = tl.fma(b_k[:, None], b_u[None, :], b_s * b_alpha)
    tl.store(p_s, b_s, mask=m_s)
    tl.debug_barrier()  # all rows were read before one is written
    store_conv_rows(p_conv, r_q, o_cq, m_key, channels, WIDTH)
    store_conv_rows(p_conv, r_k, o_ck, m_key, channels, WIDTH)
    store_conv_rows(p_conv, r_v, o_cv, m_v, channels, WIDTH)


@triton.jit(do_not_specialize=["T"])
def gdn_exact_norm_kernel(
    o,  # [T, Hv, V] f32
    z,  # [T, Hv, V], rows stride_z apart
    weight,  # [V] f32
    out,  # [T, Hv, V]
    slots,  # [B], -1: padding, for which zeros are written
    requests,  # [T]
    T,
    stride_z,
    eps,
    HV: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_h = tl.program_id(0)
    o_t, o_v = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BV)
    m_t, m_v = o_t < T, (o_v < V)[None, :]
    m_o = m_t & (tl.load(slots + tl.load(requests + o_t, mask=m_t, other=0)) >= 0)
    b_w = tl.load(weight + o_v, mask=o_v < V, other=0.0)
    wait_for_inputs(OVERLAP)
    o_o = ((o_t * HV + i_h) * V)[:, None] + o_v[None, :]
    b_o = tl.load(o + o_o, mask=m_o[:, None] & m_v, other=0.0)
    p_z = z + o_t[:, None] * stride_z + (i_h * V + o_v)[None, :]
    b_z = tl.load(p_z, mask=m_o[:, None] & m_v, other=0.0).to(tl.float32)
    b_o = b_o * tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None] * b_w[None, :] * silu(b_z)
    tl.store(out + o_o, b_o.to(out.dtype.element_ty), mask=m_t[:, None] & m_v)
