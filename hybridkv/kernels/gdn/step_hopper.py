"""gdn_step's kernel for many requests on Hopper GPUs, in Gluon: heads of 128, convolutions of width four.

One program for each request and value head, as in step.py, but the state lies in shared memory, where it arrives while
the convolution is computed, and is read twice: for S^T k and S^T q, and to be stored. That takes few registers, so
three programs (f32) or six (bf16) share a multiprocessor, and some wait for memory while others compute.

The launch uses PDL, as in step.py, with any number of requests.

A thread has 16 bytes of each of 32 neighbouring rows, copies them itself and sums over them; sums pass between the four
(f32) or two (bf16) warps once.
"""

from __future__ import annotations

from hybridkv.kernels.gluon import async_copy, cuda, gl, gluon

_D = gl.constexpr(128)  # K and V


@gluon.jit
def add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def silu(b_x):
    return b_x / (1.0 + gl.exp(-b_x))


_UPCAST = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@gluon.jit
def upcast(b_s):
    """To f32; of two bf16 that share a register, one is a shift and one a mask."""
    NARROW: gl.constexpr = b_s.dtype == gl.bfloat16
    if NARROW:
        b_s = gl.inline_asm_elementwise(_UPCAST, "=r,=r,r", [b_s], gl.float32, True, 2)
    return b_s


@gluon.jit
def load_conv_weights(conv, start, CL: gl.constexpr):
    """The weights of 128 channels, oldest input first; a channel's four are one load."""
    TL: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    o_c, o_t = gl.arange(0, _D, gl.SliceLayout(1, TL)), gl.arange(0, 4, gl.SliceLayout(0, TL))
    b_w = gl.load(conv + (start + o_c)[:, None] * 4 + o_t[None, :])
    b_even, b_odd = gl.split(b_w.reshape([_D, 2, 2]))
    b_0, b_2 = gl.split(b_even)
    b_1, b_3 = gl.split(b_odd)
    return (
        gl.convert_layout(b_0, CL),
        gl.convert_layout(b_1, CL),
        gl.convert_layout(b_2, CL),
        gl.convert_layout(b_3, CL),
    )


@gluon.jit
def load_conv_state(p_conv, channels: gl.constexpr):
    return gl.load(p_conv), gl.load(p_conv + channels), gl.load(p_conv + 2 * channels)


@gluon.jit
def convolve(before, b_x, weights):
    b_y = (
        before[0].to(gl.float32) * weights[0]
        + before[1].to(gl.float32) * weights[1]
        + before[2].to(gl.float32) * weights[2]
    )
    return silu(b_y + b_x.to(gl.float32) * weights[3])


@gluon.jit
def store_conv_state(p_conv, before, b_x, m_c, channels: gl.constexpr):
    gl.store(p_conv, before[1], mask=m_c)
    gl.store(p_conv + channels, before[2], mask=m_c)
    gl.store(p_conv + 2 * channels, b_x.to(p_conv.dtype.element_ty), mask=m_c)


@gluon.jit
def gdn_step_hopper_kernel(
    x,  # [B, q | k | v, z, b, a]
    conv,  # [channels, 4]
    decay,  # [Hv]
    dt_bias,
    norm,  # [V]
    conv_states,  # [slots, 3, channels]
    states,  # [slots, Hv, K, V]
    slots,  # [B]
    arrivals,  # [slots, Hk] int32, zeros before and after
    out,  # [B, Hv, V]
    eps,
    stride_x,
    stride_conv,
    stride_state,
    HK: gl.constexpr,
    HV: gl.constexpr,
):
    GROUP: gl.constexpr = HV // HK
    channels: gl.constexpr = (2 * HK + HV) * _D
    f32: gl.constexpr = gl.float32
    W: gl.constexpr = gl.num_warps()
    VEC: gl.constexpr = 128 // states.dtype.element_ty.primitive_bitwidth  # 16 bytes
    PARTS: gl.constexpr = W * 32 * VEC // _D  # a state is [parts, rows of a thread, columns]
    ROWS: gl.constexpr = _D // PARTS
    SL: gl.constexpr = gl.BlockedLayout([1, 1, VEC], [PARTS // W, 1, _D // VEC], [W, 1, 1], [2, 1, 0])
    PL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, SL))
    RL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SL))
    KL: gl.constexpr = gl.SliceLayout(2, SL)  # rows of the state
    ZL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, SL))  # its columns
    CL: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])  # a channel a thread
    WL: gl.constexpr = gl.BlockedLayout([4], [32], [W], [0])  # all of them in each warp
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    cuda.gdc_launch_dependents()
    i_h, i_b = gl.program_id(0), gl.program_id(1).to(gl.int64)
    i_g = i_h // GROUP
    slot = gl.load(slots + i_b).to(gl.int64)
    o_z, o_c = gl.arange(0, _D, ZL), gl.arange(0, _D, CL)
    p_out = out + (i_b * HV + i_h) * _D + o_c
    s_s = gl.allocate_shared_memory(
        states.dtype.element_ty, [PARTS, ROWS, _D], gl.SwizzledSharedLayout(VEC, 1, 1, [2, 1, 0])
    )
    if slot < 0:
        cuda.gdc_wait()
        gl.store(p_out, gl.zeros([_D], out.dtype.element_ty, CL))
        return
    p_state = states + slot * stride_state + i_h * (_D * _D)
    o_row = (gl.arange(0, PARTS, PL) * ROWS)[:, None] + gl.arange(0, ROWS, RL)[None, :]
    async_copy.async_copy_global_to_shared(s_s, p_state + o_row[:, :, None] * _D + o_z[None, None, :])
    async_copy.commit_group()
    q_start, k_start, v_start = i_g * _D, (HK + i_g) * _D, (2 * HK + i_h) * _D
    p_conv = conv_states + slot * stride_conv + o_c
    q_before, k_before = load_conv_state(p_conv + q_start, channels), load_conv_state(p_conv + k_start, channels)
    v_before = load_conv_state(p_conv + v_start, channels)
    q_weights, k_weights = load_conv_weights(conv, q_start, CL), load_conv_weights(conv, k_start, CL)
    v_weights = load_conv_weights(conv, v_start, CL)
    b_dt, b_decay, b_w = gl.load(dt_bias + i_h), gl.load(decay + i_h), gl.load(norm + o_c)
    cuda.gdc_wait()  # so far nothing of this step was read, and nothing written
    x += i_b * stride_x
    x_q, x_k, x_v = gl.load(x + q_start + o_c), gl.load(x + k_start + o_c), gl.load(x + v_start + o_c)
    b_z = gl.load(x + channels + i_h * _D + o_c)
    b_b, b_a = gl.load(x + channels + HV * _D + i_h), gl.load(x + channels + HV * _D + HV + i_h)

    s_q = gl.allocate_shared_memory(f32, [_D], VECTOR, convolve(q_before, x_q, q_weights))
    s_k = gl.allocate_shared_memory(f32, [_D], VECTOR, convolve(k_before, x_k, k_weights))
    s_v = gl.allocate_shared_memory(f32, [_D], VECTOR, convolve(v_before, x_v, v_weights))
    b_beta = 1.0 / (1.0 + gl.exp(-b_b.to(f32)))
    b_a = b_a.to(f32) + b_dt
    b_alpha = gl.exp(-b_decay * (gl.maximum(b_a, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(b_a)))))
    gl.thread_barrier()  # all have used what they read of the conv_state: count it now, look at the answer last
    p_arrivals, b_ticket = arrivals + slot * HK + i_g, o_c
    if GROUP > 1:
        b_ticket = gl.atomic_add(p_arrivals + o_c * 0, o_c * 0 + 1, mask=o_c == 0, sem="relaxed")
    b_q, b_k, b_v = s_q.load(WL), s_k.load(WL), s_v.load(ZL)
    b_kk, b_qq, b_kq = gl.sum(b_k * b_k, 0), gl.sum(b_q * b_q, 0), gl.sum(b_k * b_q, 0)
    k_scale, q_scale = gl.rsqrt(b_kk + 1e-6), gl.rsqrt(b_qq + 1e-6) * (_D**-0.5)

    b_sk, b_sq = gl.zeros([PARTS, 1, _D], f32, SL), gl.zeros([PARTS, 1, _D], f32, SL)
    k_rows, q_rows = s_k.reshape([PARTS, ROWS]), s_q.reshape([PARTS, ROWS])
    async_copy.wait_group(0)
    for i in gl.static_range(ROWS):
        b_s = upcast(s_s.slice(i, 1, 1).load(SL))
        b_sk += b_s * k_rows.slice(i, 1, 1).load(KL)[:, :, None]
        b_sq += b_s * q_rows.slice(i, 1, 1).load(KL)[:, :, None]
    b_sk, b_sq = gl.reduce((b_sk, b_sq), 1, add_pairs)
    b_sk, b_sq = gl.reduce((b_sk, b_sq), 0, add_pairs)
    b_u = b_beta * (b_v - b_alpha * k_scale * b_sk)
    b_o = q_scale * (b_alpha * b_sq + b_kq * k_scale * b_u)
    b_u = b_u * k_scale
    o_few = (gl.arange(0, PARTS, PL) * ROWS)[:, None] + gl.arange(0, 1, RL)[None, :]
    p_rows = p_state + o_few[:, :, None] * _D + o_z[None, None, :]
    for i in gl.static_range(ROWS):
        b_s = upcast(s_s.slice(i, 1, 1).load(SL)) * b_alpha
        b_s += k_rows.slice(i, 1, 1).load(KL)[:, :, None] * b_u[None, None, :]
        gl.store(p_rows + i * _D, b_s.to(states.dtype.element_ty))
    b_o = b_o * gl.rsqrt(gl.sum(b_o * b_o, 0) / _D + eps)
    s_o = gl.allocate_shared_memory(f32, [_D], VECTOR, b_o)
    m_c = o_c >= 0
    store_conv_state(p_conv + v_start, v_before, x_v, m_c, channels)
    tickets = gl.allocate_shared_memory(gl.int32, [_D], VECTOR, b_ticket)
    gl.store(p_out, (s_o.load(CL) * b_w * silu(b_z.to(f32))).to(out.dtype.element_ty))
    if GROUP > 1:
        last = gl.sum(tickets.slice(0, 1).load(CL), 0) == GROUP - 1
        gl.store(p_arrivals, 0, mask=last)
        m_c = m_c & last
    store_conv_state(p_conv + q_start, q_before, x_q, m_c, channels)
    store_conv_state(p_conv + k_start, k_before, x_k, m_c, channels)
