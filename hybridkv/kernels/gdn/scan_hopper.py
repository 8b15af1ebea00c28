"""The scan of chunk.py on Hopper GPUs, together with the gated norm behind it, in Gluon: for bf16 and heads of 128.

A program has 64 of a head's value channels for one prompt and three kinds of warps:

    1 loader    brings the tiles of a chunk with the copy engine, three chunks ahead
    4 chain     F and the state, transposed: what the next chunk waits for, and nothing else
    4 output    O = enter (q S) + P F from the S and F that the chain leaves in shared memory, norm and gate

A norm is over 128 channels, of which the head's other program has half. Each writes its sums of squares and finishes a
chunk when it has the other's, a chunk later; before, -1 is there, from gdn_solve_kernel.

Why this wait ends: the two programs of a head are neighbours in the grid, programs are started in the order of the
grid, and neither waits for any other. So every program that runs has its other half beside it, or is the last one that
its grid has started and gets it as soon as any program on the card ends. For all to wait, every multiprocessor would
have to hold such a last program, each of another grid that runs at the same time. prefill.py takes this kernel only on
cards with more multiprocessors than processes can share them (MIN_SMS).
"""

from __future__ import annotations

from hybridkv.kernels.attention.tile import LOG2_E
from hybridkv.kernels.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_C, _D, _BV = gl.constexpr(64), gl.constexpr(128), gl.constexpr(64)  # tokens, dim of a head, channels of a program
_TILES = gl.constexpr(3)  # chunks in shared memory
_LOG2_E = gl.constexpr(LOG2_E)


@gluon.jit
def loader(k, q, v, inverse, within, z, chain, output, full, free, i_k, i_h, i_v, first, begin, N, HV: gl.constexpr):
    k_tiles, v_tiles, b_tiles = chain
    q_tiles, p_tiles, z_tiles = output
    for i_n in range(N):
        i_tile, phase, row = i_n % _TILES, (i_n // _TILES) & 1, (first + i_n) * HV + i_h
        mbarrier.wait(free.index(i_tile), phase ^ 1)
        bar = full.index(i_tile)
        mbarrier.expect(bar, 2 * (_C * _D + 2 * _C * _C))
        tma.async_copy_global_to_shared(k, [(first + i_n) * _C, i_k], bar, k_tiles.index(i_tile))
        tma.async_copy_global_to_shared(v, [row * _D + i_v, 0], bar, v_tiles.index(i_tile))
        tma.async_copy_global_to_shared(inverse, [row * _C, 0], bar, b_tiles.index(i_tile))
        mbarrier.wait(free.index(_TILES + i_tile), phase ^ 1)
        bar = full.index(_TILES + i_tile)
        mbarrier.expect(bar, 2 * (_C * _D + 2 * _C * _C))
        tma.async_copy_global_to_shared(q, [(first + i_n) * _C, i_k], bar, q_tiles.index(i_tile))
        tma.async_copy_global_to_shared(within, [row * _C, 0], bar, p_tiles.index(i_tile))
        tma.async_copy_global_to_shared(z, [begin + i_n * _C, i_h * _D + i_v], bar, z_tiles.index(i_tile))


@gluon.jit
def chain_warps(gates, state, chain, s_tile, f_tile, full, free, handed, taken, i_h, i_v, N, HV: gl.constexpr):
    """State and F of every chunk. `handed` and `taken`: of S, of F."""
    F: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _C, 16])  # of F^T [64, 64]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _D, 16])  # of S^T [64, K]
    k_tiles, v_tiles, b_tiles = chain
    o_k, o_v = gl.arange(0, _D, layout=gl.SliceLayout(0, S)), gl.arange(0, _BV, layout=gl.SliceLayout(1, S))
    p_s = state + (i_h * _D + o_k[None, :]) * _D + (i_v + o_v)[:, None]
    b_s = gl.load(p_s).to(gl.float32)  # of a prompt without tokens another one's, and not written
    p_g = gates + i_h * (4 * _C)
    o_c = gl.arange(0, _C, layout=gl.SliceLayout(0, F))
    b_enter, b_leave, alpha = gl.load(p_g + o_c), gl.load(p_g + _C + o_c), gl.load(p_g + _C - 1)
    b_0 = gl.zeros([_BV, _C], gl.float32, layout=F)
    b_0s = gl.zeros([_BV, _D], gl.float32, layout=S)
    for i_n in range(N):
        i_tile, phase = i_n % _TILES, (i_n // _TILES) & 1
        k_tile = k_tiles.index(i_tile)
        b_half = b_s.to(gl.bfloat16)
        b_start = gl.convert_layout(b_half, gl.DotOperandLayout(0, F, 2))
        mbarrier.wait(full.index(i_tile), phase)
        k_done = warpgroup_mma(b_start, k_tile.permute((1, 0)), b_0, use_acc=False, is_async=True)
        mbarrier.wait(taken.index(0), (i_n & 1) ^ 1)
        s_tile.store(b_half)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(handed.index(0), count=1)
        b_v = v_tiles.index(i_tile).load(F).to(gl.float32)
        b_kept, b_start = warpgroup_mma_wait(0, deps=[k_done, b_start])
        b_new = gl.convert_layout((b_v - b_kept * b_enter[None, :]).to(gl.bfloat16), gl.DotOperandLayout(0, F, 2))
        f_done = warpgroup_mma(b_new, b_tiles.index(i_tile).permute((1, 0)), b_0, use_acc=False, is_async=True)
        b_fresh, b_new = warpgroup_mma_wait(0, deps=[f_done, b_new])
        b_late = gl.convert_layout((b_fresh * b_leave[None, :]).to(gl.bfloat16), gl.DotOperandLayout(0, S, 2))
        s_done = warpgroup_mma(b_late, k_tile, b_0s, use_acc=False, is_async=True)
        mbarrier.wait(taken.index(1), (i_n & 1) ^ 1)
        f_tile.store(b_fresh.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(handed.index(1), count=1)
        now = alpha
        p_g += gl.where(i_n + 1 < N, HV * (4 * _C), 0)
        b_enter, b_leave, alpha = gl.load(p_g + o_c), gl.load(p_g + _C + o_c), gl.load(p_g + _C - 1)
        b_add, b_late = warpgroup_mma_wait(0, deps=[s_done, b_late])
        gl.thread_barrier()
        mbarrier.arrive(free.index(i_tile), count=1)
        b_s = b_s * now + b_add
    if N > 0:
        gl.store(p_s, b_s.to(state.dtype.element_ty))


@gluon.jit
def normed(b_gated, b_sum, p_sum, eps):
    """A chunk's result, when the other half's sums of squares are there."""
    b_other = gl.load(p_sum, volatile=True)
    while gl.min(b_other, 0) < 0.0:
        b_other = gl.load(p_sum, volatile=True)
    b_norm = gl.rsqrt((b_sum + b_other) / _D + eps)
    return (b_gated * b_norm[:, None]).to(gl.bfloat16)


@gluon.jit
def finish(b_gated, b_sum, p_sum, out, o_tile, row, i_o, eps):
    """The result of a whole chunk on its way."""
    b_out = normed(b_gated, b_sum, p_sum, eps)
    tma.store_wait(0)
    gl.thread_barrier()
    o_tile.store(b_out)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [row, i_o], o_tile)


@gluon.jit
def output_warps(
    gates, weight, out, rows, output, s_tile, f_tile, o_tile, full, free, handed, taken, eps, i_h, i_v, begin, end,
    stride_out, N, HV: gl.constexpr,
):  # fmt: skip
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BV, 16])  # of O [64, 64]
    q_tiles, p_tiles, z_tiles = output
    o_t, o_v = gl.arange(0, _C, layout=gl.SliceLayout(1, O)), gl.arange(0, _BV, layout=gl.SliceLayout(0, O))
    b_weight = gl.load(weight + i_v + o_v)[None, :]
    p_g = gates + i_h * (4 * _C) + o_t
    mine, other = 2 * _C + i_v, 3 * _C - i_v  # i_v is 0 or 64: rows 2 and 3
    b_0 = gl.zeros([_C, _BV], gl.float32, layout=O)
    b_gated, b_sum = b_0, gl.zeros([_C], gl.float32, layout=gl.SliceLayout(1, O))
    for i_n in range(N):
        i_tile, phase = i_n % _TILES, (i_n // _TILES) & 1
        b_enter = gl.load(p_g)
        mbarrier.wait(full.index(_TILES + i_tile), phase)
        mbarrier.wait(handed.index(0), i_n & 1)
        q_done = warpgroup_mma(q_tiles.index(i_tile), s_tile.permute((1, 0)), b_0, use_acc=False, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=[q_done])
        gl.thread_barrier()
        mbarrier.arrive(taken.index(0), count=1)
        b_o = b_o * b_enter[:, None]
        mbarrier.wait(handed.index(1), i_n & 1)
        o_done = warpgroup_mma(p_tiles.index(i_tile), f_tile.permute((1, 0)), b_o, is_async=True)
        b_z = z_tiles.index(i_tile).load(O).to(gl.float32)
        b_r = gl.rsqrt(1.0 + gl.exp2(b_z * -_LOG2_E))
        b_z = b_z * b_r * b_r * b_weight
        b_o = warpgroup_mma_wait(0, deps=[o_done])
        gl.thread_barrier()
        mbarrier.arrive(taken.index(1), count=1)
        mbarrier.arrive(free.index(_TILES + i_tile), count=1)
        b_new = gl.sum(b_o * b_o, 1)
        gl.store(p_g + mine, b_new)
        if i_n > 0:
            row = begin + (i_n - 1) * _C
            finish(b_gated, b_sum, p_g - HV * (4 * _C) + other, out, o_tile, row, i_h * _D + i_v, eps)
        b_gated, b_sum = b_o * b_z, b_new
        p_g += HV * (4 * _C)
    if N > 0:  # the last chunk may end inside its tile, where the next prompt's rows begin
        b_out = normed(b_gated, b_sum, p_g - HV * (4 * _C) + other, eps)
        o_row = (begin + (N - 1) * _C + o_t).to(gl.int64)
        p_out = rows + o_row[:, None] * stride_out + (i_h * _D + i_v + o_v)[None, :]
        gl.store(p_out, b_out, mask=(o_row < end)[:, None])
    tma.store_wait(0)


@gluon.jit
def gdn_scan_hopper_kernel(
    k,  # [N * 64, Hk * K]
    q,
    v,  # [N * Hv * V, 64]
    inverse,  # [N * Hv * 64, 64]
    within,
    z,  # [T, Hv * V]
    gates,  # [N, Hv, 4, 64] f32
    states,  # [slots, Hv, K, V]
    weight,  # [V] f32
    out,  # [T, Hv * V]
    rows,  # the same numbers
    slots,  # [C], -1: padding
    starts,  # [C + 1]
    ends,  # [C]: chunks of all prompts up to this one
    stride_state,
    stride_out,
    eps,
    HK: gl.constexpr,
    HV: gl.constexpr,
):
    i_v, i_h = gl.program_id(0) * _BV, gl.program_id(1)
    i_k = i_h // (HV // HK) * _D
    i_b = gl.program_id(2)
    slot = gl.load(slots + i_b).to(gl.int64)
    first = gl.load(ends + i_b - 1, mask=i_b > 0, other=0).to(gl.int32)
    N = gl.where(slot >= 0, gl.load(ends + i_b).to(gl.int32) - first, 0)
    begin, end = gl.load(starts + i_b).to(gl.int32), gl.load(starts + i_b + 1).to(gl.int32)
    state = states + gl.maximum(slot, 0) * stride_state
    gates += gl.where(N > 0, first, 0).to(gl.int64) * (HV * 4 * _C)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [_TILES, _C, _D], k.layout)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [_TILES, _C, _D], q.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [_TILES, _BV, _C], v.layout)
    b_tiles = gl.allocate_shared_memory(gl.bfloat16, [_TILES, _C, _C], inverse.layout)
    p_tiles = gl.allocate_shared_memory(gl.bfloat16, [_TILES, _C, _C], within.layout)
    z_tiles = gl.allocate_shared_memory(gl.bfloat16, [_TILES, _C, _BV], z.layout)
    s_tile = gl.allocate_shared_memory(gl.bfloat16, [_BV, _D], k.layout)
    f_tile = gl.allocate_shared_memory(gl.bfloat16, [_BV, _C], v.layout)
    o_tile = gl.allocate_shared_memory(gl.bfloat16, [_C, _BV], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * _TILES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2 * _TILES, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * _TILES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(handed.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    chain, output = (k_tiles, v_tiles, b_tiles), (q_tiles, p_tiles, z_tiles)
    gl.warp_specialize(
        [
            (chain_warps, (gates, state, chain, s_tile, f_tile, full, free, handed, taken, i_h, i_v, N, HV)),
            (output_warps, (
                gates, weight, out, rows, output, s_tile, f_tile, o_tile, full, free, handed, taken, eps, i_h, i_v,
                begin, end, stride_out, N, HV,
            )),
            (loader, (k, q, v, inverse, within, z, chain, output, full, free, i_k, i_h, i_v, first, begin, N, HV)),
        ],
        [4, 1],
        [184, 40],
    )  # fmt: skip
