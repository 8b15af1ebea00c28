"""The recurrence of gdn_exact on Hopper GPUs, in Gluon: heads of 128.

A program has BV value channels of one head of one request and keeps its part of the state, [128, BV] f32, in registers
over all tokens; nothing passes between warps. A thread has COLUMNS channels and, of the 128 key channels, four of each
4 THREADS. So S^T k and S^T q are sums inside a thread and log2(THREADS) exchanges between threads. Queries, keys,
values and gates come BLOCK tokens at a time into shared memory, while the block before is computed.
"""

from __future__ import annotations

from hybridkv.kernels.gdn import exact_kernel
from hybridkv.kernels.gluon import async_copy, cuda, from_triton, gl, gluon

_D = gl.constexpr(128)  # K and V


add_pairs, next_conv_rows = from_triton(exact_kernel.add_pairs), from_triton(exact_kernel.next_conv_rows)
store_conv_rows = from_triton(exact_kernel.store_conv_rows)


@gluon.jit
def load_block(
    qk, v, gates, tiles, i, first, end, i_g, i_h, i_v,
    HK: gl.constexpr, HV: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    """Tokens from `first` on into tiles i; what lies past the end is not read."""
    qk_tiles, v_tiles, gate_tiles = tiles
    BLOCK: gl.constexpr = qk_tiles.shape[1]
    W: gl.constexpr = gl.num_warps()
    VEC: gl.constexpr = min(128 // v.dtype.element_ty.primitive_bitwidth, BV)  # 16 bytes
    QL: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    VL: gl.constexpr = gl.BlockedLayout([1, VEC], [32 * VEC // BV, BV // VEC], [W, 1], [1, 0])
    GL: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [W, 1], [1, 0])
    if first < end:
        o_t = first + gl.arange(0, BLOCK, gl.SliceLayout(1, QL))
        p_q = qk + ((o_t * HK + i_g) * (2 * _D))[:, None] + gl.arange(0, 2 * _D, gl.SliceLayout(0, QL))[None, :]
        async_copy.async_copy_global_to_shared(qk_tiles.index(i), p_q, mask=(o_t < end)[:, None])
        o_t = first + gl.arange(0, BLOCK, gl.SliceLayout(1, VL))
        p_v = v + ((o_t * HV + i_h) * _D + i_v * BV)[:, None] + gl.arange(0, BV, gl.SliceLayout(0, VL))[None, :]
        async_copy.async_copy_global_to_shared(v_tiles.index(i), p_v, mask=(o_t < end)[:, None])
        o_t = first + gl.arange(0, BLOCK, gl.SliceLayout(1, GL))
        p_g = gates + ((o_t * HV + i_h) * 4)[:, None] + gl.arange(0, 4, gl.SliceLayout(0, GL))[None, :]
        async_copy.async_copy_global_to_shared(gate_tiles.index(i), p_g, mask=(o_t < end)[:, None])
    async_copy.commit_group()


@gluon.jit
def load_token(qk_rows, v_rows, i, KL: gl.constexpr, CL: gl.constexpr):
    qk = qk_rows.index(i)
    return qk.slice(0, _D).load(KL), qk.slice(_D, _D).load(KL), v_rows.index(i).load(CL).to(gl.float32)


@gluon.jit
def gdn_exact_hopper_kernel(
    x,  # [T, q | k | v, z, b, a]: what conv_states are left with
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
    BLOCKS: gl.constexpr,  # in shared memory
):
    cuda.gdc_launch_dependents()
    W: gl.constexpr = gl.num_warps()
    f32: gl.constexpr = gl.float32
    SL: gl.constexpr = gl.BlockedLayout([4, COLUMNS], [THREADS, 32 // THREADS], [1, W], [0, 1])
    KL: gl.constexpr = gl.SliceLayout(1, SL)
    CL: gl.constexpr = gl.SliceLayout(0, SL)
    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    i_v, i_h = gl.program_id(0), gl.program_id(1)
    i_b = gl.num_programs(2) - 1 - gl.program_id(2)  # prompts are the last requests, and take longest
    slot = gl.load(slots + i_b).to(gl.int64)
    begin, end = gl.load(starts + i_b).to(gl.int64), gl.load(starts + i_b + 1).to(gl.int64)
    if (slot < 0) | (begin >= end):
        cuda.gdc_wait()  # what follows must find all before it done
        return
    i_g = i_h // (HV // HK)
    o_k, o_v = gl.arange(0, _D, KL), i_v * BV + gl.arange(0, BV, CL)
    p_s = states + slot * stride_state + (i_h * _D + o_k[:, None]) * _D + o_v[None, :]
    b_s = gl.load(p_s, eviction_policy="evict_first")  # no kernel of this step has written it
    qk_tiles = gl.allocate_shared_memory(f32, [BLOCKS, BLOCK, 2 * _D], TILE)
    v_tiles = gl.allocate_shared_memory(v.dtype.element_ty, [BLOCKS, BLOCK, BV], TILE)
    gate_tiles = gl.allocate_shared_memory(f32, [BLOCKS, BLOCK, 4], TILE)
    tiles = (qk_tiles, v_tiles, gate_tiles)
    qk_rows = qk_tiles._reinterpret(f32, [BLOCKS * BLOCK, 2 * _D], ROW)  # the same, token by token
    v_rows = v_tiles._reinterpret(v.dtype.element_ty, [BLOCKS * BLOCK, BV], ROW)
    gate_rows = gate_tiles._reinterpret(f32, [BLOCKS * BLOCK, 4], ROW)
    cuda.gdc_wait()
    for i in gl.static_range(BLOCKS - 1):
        load_block(qk, v, gates, tiles, i, begin + i * BLOCK, end, i_g, i_h, i_v, HK, HV, BV)
    p_conv, m_v, m_key = conv_states + slot * stride_conv, o_v >= 0, (o_v >= 0) & (i_h % (HV // HK) == 0)
    o_cq, o_ck, o_cv = i_g * _D + o_v, (HK + i_g) * _D + o_v, (2 * HK + i_h) * _D + o_v
    channels: gl.constexpr = (2 * HK + HV) * _D
    r_q = next_conv_rows(x, p_conv, o_cq, m_key, begin, end, stride_x, channels, 4)
    r_k = next_conv_rows(x, p_conv, o_ck, m_key, begin, end, stride_x, channels, 4)
    r_v = next_conv_rows(x, p_conv, o_cv, m_v, begin, end, stride_x, channels, 4)
    p_out = out + (begin * HV + i_h) * _D + o_v
    for i in range(0, ((end - begin + BLOCK - 1) // BLOCK).to(gl.int32)):
        first = begin + i * BLOCK
        async_copy.wait_group(BLOCKS - 2)
        gl.thread_barrier()  # block i is there, and block i - 1 has been read by all
        i_new = (i + BLOCKS - 1) % BLOCKS
        load_block(qk, v, gates, tiles, i_new, first + (BLOCKS - 1) * BLOCK, end, i_g, i_h, i_v, HK, HV, BV)
        at = i % BLOCKS * BLOCK
        for j in range(at, at + gl.minimum(end - first, BLOCK).to(gl.int32)):
            b_q, b_k, b_v = load_token(qk_rows, v_rows, j, KL, CL)
            g = gate_rows.index(j)
            b_alpha, b_beta, b_kq = g.slice(0, 1).load(CL), g.slice(1, 1).load(CL), g.slice(2, 1).load(CL)
            b_sk, b_sq = gl.reduce((b_s * b_k[:, None], b_s * b_q[:, None]), 0, add_pairs)
            b_u = b_beta * gl.fma(-b_alpha, b_sk, b_v)
            gl.store(p_out, gl.fma(b_kq, b_u, b_alpha * b_sq))
            p_out += HV * _D
            b_s = gl.fma(b_k[:, None], b_u[None, :], b_s * b_alpha[None, :])
    gl.store(p_s, b_s, eviction_policy="evict_first")
    gl.thread_barrier()  # all rows were read before one is written
    store_conv_rows(p_conv, r_q, o_cq, m_key, channels, 4)
    store_conv_rows(p_conv, r_k, o_ck, m_key, channels, 4)
    store_conv_rows(p_conv, r_v, o_cv, m_v, channels, 4)
