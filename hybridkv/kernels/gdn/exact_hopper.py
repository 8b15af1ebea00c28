"""The recurrence of gdn_exact on Hopper GPUs, in Gluon: heads of 128.

A program has BV value channels of one head of one request and keeps its part of the state, [128, BV] f32, in registers
over all tokens; nothing passes between warps. A thread has COLUMNS channels and, of the 128 key channels, four of each
4 THREADS. So S^T k and S^T q are sums inside a thread and log2(THREADS) exchanges between threads. Queries, keys,
values and gates come BLOCK tokens at a time into shared memory, while the block before is computed.
"""

from __future__ import annotations

from hybridkv.kernels.gluon import async_copy, gl, gluon

_D = gl.constexpr(128)  # K and V


@gluon.jit
def add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def load_block(
    qk, v, gates, tiles, i, first, end, i_g, i_h, i_v,
    HK: gl.constexpr, HV: gl.constexpr, BV: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Tokens from `first` on into the tiles of block i; what lies past the end is not read."""
    qk_tiles, v_tiles, gate_tiles = tiles
    W: gl.constexpr = gl.num_warps()
    VEC: gl.constexpr = min(128 // v.dtype.element_ty.primitive_bitwidth, BV)  # 16 bytes
    QL: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    VL: gl.constexpr = gl.BlockedLayout([1, VEC], [32 * VEC // BV, BV // VEC], [W, 1], [1, 0])
    GL: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [W, 1], [1, 0])
    if first < end:
        o_t = first + gl.arange(0, BLOCK, gl.SliceLayout(1, QL))
        p_q = qk + ((o_t * HK + i_g) * (2 * _D))[:, None] + gl.arange(0, 2 * _D, gl.SliceLayout(0, QL))[None, :]
        async_copy.async_copy_global_to_shared(qk_tiles.index(i % 2), p_q, mask=(o_t < end)[:, None])
        o_t = first + gl.arange(0, BLOCK, gl.SliceLayout(1, VL))
        p_v = v + ((o_t * HV + i_h) * _D + i_v * BV)[:, None] + gl.arange(0, BV, gl.SliceLayout(0, VL))[None, :]
        async_copy.async_copy_global_to_shared(v_tiles.index(i % 2), p_v, mask=(o_t < end)[:, None])
        o_t = first + gl.arange(0, BLOCK, gl.SliceLayout(1, GL))
        p_g = gates + ((o_t * HV + i_h) * 4)[:, None] + gl.arange(0, 4, gl.SliceLayout(0, GL))[None, :]
        async_copy.async_copy_global_to_shared(gate_tiles.index(i % 2), p_g, mask=(o_t < end)[:, None])
    async_copy.commit_group()


@gluon.jit
def move_conv_state(x, p_state, o_c, m_c, begin, end, stride_x, channels):
    """As in exact_kernel.py, for a convolution of width four."""
    T = end - begin
    for i in gl.static_range(3):
        last = T + (i - 3)
        m_x, m_s = m_c & (last >= 0), m_c & (last < 0)
        b_x = gl.load(x + (begin + last) * stride_x + o_c, mask=m_x, other=0.0).to(p_state.dtype.element_ty)
        b_s = gl.load(p_state + (T + i) * channels + o_c, mask=m_s, other=0.0)
        gl.store(p_state + i * channels + o_c, gl.where(last >= 0, b_x, b_s), mask=m_c)


@gluon.jit
def load_token(qk_rows, v_rows, i, KL: gl.constexpr, CL: gl.constexpr):
    qk = qk_rows.index(i)
    return qk.slice(0, _D).load(KL), qk.slice(_D, _D).load(KL), v_rows.index(i).load(CL).to(gl.float32)


@gluon.jit
def gdn_exact_hopper_kernel(
    x,  # [T, q | k | v, z, b, a]
    qk,  # [T, Hk, 2, 128] f32
    v,  # [T, Hv, 128]
    gates,  # [T, Hv, 4] f32
    out,  # [T, Hv, 128] f32
    conv_states,  # [slots, 3, channels]
    states,  # [slots, Hv, 128, 128] f32
    slots,  # [B], -1: padding
    starts,  # [B + 1]
    stride_x,
    stride_conv,
    stride_state,
    HK: gl.constexpr,
    HV: gl.constexpr,
    BV: gl.constexpr,
    COLUMNS: gl.constexpr,
    THREADS: gl.constexpr,
    BLOCK: gl.constexpr,
    AHEAD: gl.constexpr = True,
    ORDER: gl.constexpr = 0,
):
    GROUP: gl.constexpr = HV // HK
    channels: gl.constexpr = (2 * HK + HV) * _D
    W: gl.constexpr = gl.num_warps()
    f32: gl.constexpr = gl.float32
    SL: gl.constexpr = gl.BlockedLayout([4, COLUMNS], [THREADS, 32 // THREADS], [1, W], [ORDER, 1 - ORDER])
    KL: gl.constexpr = gl.SliceLayout(1, SL)
    CL: gl.constexpr = gl.SliceLayout(0, SL)
    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    i_v, i_h = gl.program_id(0), gl.program_id(1)
    i_b = gl.num_programs(2) - 1 - gl.program_id(2)  # prompts are the last requests, and take longest
    slot = gl.load(slots + i_b).to(gl.int64)
    begin, end = gl.load(starts + i_b).to(gl.int64), gl.load(starts + i_b + 1).to(gl.int64)
    if slot < 0:
        return
    if begin >= end:
        return
    i_g = i_h // GROUP
    qk_tiles = gl.allocate_shared_memory(f32, [2, BLOCK, 2 * _D], TILE)
    v_tiles = gl.allocate_shared_memory(v.dtype.element_ty, [2, BLOCK, BV], TILE)
    gate_tiles = gl.allocate_shared_memory(f32, [2, BLOCK, 4], TILE)
    tiles = (qk_tiles, v_tiles, gate_tiles)
    qk_rows = qk_tiles._reinterpret(f32, [2 * BLOCK, 2 * _D], ROW)  # the same, token by token
    v_rows = v_tiles._reinterpret(v.dtype.element_ty, [2 * BLOCK, BV], ROW)
    gate_rows = gate_tiles._reinterpret(f32, [2 * BLOCK, 4], ROW)
    load_block(qk, v, gates, tiles, 0, begin, end, i_g, i_h, i_v, HK, HV, BV, BLOCK)
    o_k, o_v = gl.arange(0, _D, KL), i_v * BV + gl.arange(0, BV, CL)
    p_s = states + slot * stride_state + (i_h * _D + o_k[:, None]) * _D + o_v[None, :]
    b_s = gl.load(p_s)
    p_out = out + (begin * HV + i_h) * _D + o_v
    for i in range(0, ((end - begin + BLOCK - 1) // BLOCK).to(gl.int32)):
        first = begin + i * BLOCK
        load_block(qk, v, gates, tiles, i + 1, first + BLOCK, end, i_g, i_h, i_v, HK, HV, BV, BLOCK)
        async_copy.wait_group(1)
        gl.thread_barrier()
        at = i % 2 * BLOCK
        last = at + gl.minimum(end - first, BLOCK).to(gl.int32) - 1
        b_q, b_k, b_v = load_token(qk_rows, v_rows, at, KL, CL)
        for j in range(at, last + 1):
            if not AHEAD:
                b_q, b_k, b_v = load_token(qk_rows, v_rows, j, KL, CL)
            g = gate_rows.index(j)
            b_alpha, b_beta, b_kq = g.slice(0, 1).load(CL), g.slice(1, 1).load(CL), g.slice(2, 1).load(CL)
            b_sk, b_sq = gl.reduce((b_s * b_k[:, None], b_s * b_q[:, None]), 0, add_pairs)
            b_u = b_beta * gl.fma(-b_alpha, b_sk, b_v)
            gl.store(p_out, gl.fma(b_kq, b_u, b_alpha * b_sq))
            p_out += HV * _D
            b_s = gl.fma(b_k[:, None], b_u[None, :], b_s * b_alpha[None, :])
            if AHEAD:
                b_q, b_k, b_v = load_token(qk_rows, v_rows, gl.minimum(j + 1, last), KL, CL)
        gl.thread_barrier()
    gl.store(p_s, b_s)
    p_state = conv_states + slot * stride_conv
    m_v = o_v >= 0
    move_conv_state(x, p_state, 2 * HK * _D + i_h * _D + o_v, m_v, begin, end, stride_x, channels)
    m_k = m_v & (i_h % GROUP == 0)
    move_conv_state(x, p_state, i_g * _D + o_v, m_k, begin, end, stride_x, channels)
    move_conv_state(x, p_state, (HK + i_g) * _D + o_v, m_k, begin, end, stride_x, channels)
