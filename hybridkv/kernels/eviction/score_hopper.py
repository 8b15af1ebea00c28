"""window_scores on Hopper GPUs in one pass, where the log-sum-exp of the window's queries is known.

Written in Gluon, the language below Triton: here layouts, shared memory and the work of each warp are explicit. A
program holds the queries of a KV head's query heads in shared memory and goes over its share of the tiles of 64 keys:

    4 warps load         the queries once, then tile after tile of keys, through one buffer or more
    2 x 4 warps work     in turns: a tile's keys into registers, then for each query head K q^T -> weights -> their sum

The product of the next head runs while the weights of this one are computed, and the other worker fills what is left of
the tensor cores' time. Queries lie along a thread's registers, so a sum over the window stays in its thread except for
two exchanges. Every sum runs in one fixed order.
"""

from __future__ import annotations

from hybridkv.kernels.formats import small_floats
from hybridkv.kernels.gluon import (
    PropagateNan,
    async_copy,
    fence_async_shared,
    from_triton,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = 64  # in a tile
QUERIES = 64  # of a window at most
WARPS = 4  # of a worker, and of the loaders
WORKER_REGISTERS, LOADER_REGISTERS = 208, 96  # of a thread
_BN, _BW, _WARPS = gl.constexpr(KEYS), gl.constexpr(QUERIES), gl.constexpr(WARPS)
_WORKER_REGISTERS, _LOADER_REGISTERS = gl.constexpr(WORKER_REGISTERS), gl.constexpr(LOADER_REGISTERS)

_NAN_STAYS = gl.constexpr(PropagateNan.ALL)

e4m3_value_tile = from_triton(small_floats.e4m3_value_tile)


@gluon.jit
def loaders(
    q, k_pool, k_scale, p_table, p_at, q_tiles, k_tiles, ats, scales, q_full, full, empty, i_g, first, step, tiles,
    L, W, stride_qw, stride_qh, stride_tn, stride_pl,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, TILES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    # 64 channels of a row lie in 4 (bytes) or 8 (bf16) threads, 16 bytes each
    B: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPS, 1], [1, 0])
    C: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [_WARPS, 1], [1, 0]) if FP8 else B
    o_w = gl.arange(0, _BW, layout=gl.SliceLayout(1, B))
    o_qd = gl.arange(0, D, layout=gl.SliceLayout(0, B))
    i_tile, phase, mine = 0, 1, 0
    for i_n in range(first, tiles, step):
        o_n = i_n * _BN + gl.arange(0, _BN, layout=gl.SliceLayout(1, C))
        b_at = gl.load(p_at + o_n.to(gl.int64) * stride_pl, mask=o_n < L, other=-1).to(gl.int32)
        m_n = b_at >= 0
        b_page = gl.load(p_table + (o_n // P) * stride_tn, mask=m_n, other=0).to(gl.int64)
        o_row = b_page * P + o_n % P
        k_tile = k_tiles.index(i_tile)
        if FP8:
            b_scale = gl.load(k_scale + o_row, mask=m_n, other=0.0)
            HALF: gl.constexpr = D // 2
            o_d = gl.arange(0, HALF, layout=gl.SliceLayout(0, C))
            p_k = k_pool + o_row[:, None] * D + o_d[None, :]
            b_0 = gl.load(p_k, mask=m_n[:, None], other=0)
            b_1 = gl.load(p_k + HALF, mask=m_n[:, None], other=0)
            mbarrier.wait(empty.index(i_tile), phase)
            k_tile.slice(0, HALF, dim=1).store(e4m3_value_tile(b_0).to(gl.bfloat16))
            k_tile.slice(HALF, HALF, dim=1).store(e4m3_value_tile(b_1).to(gl.bfloat16))
            scales.index(i_tile).store(b_scale)
        else:
            mbarrier.wait(empty.index(i_tile), phase)
            o_d = gl.arange(0, D, layout=gl.SliceLayout(0, C))
            p_k = k_pool + o_row[:, None] * D + o_d[None, :]
            async_copy.async_copy_global_to_shared(k_tile, p_k, mask=m_n[:, None])  # zeros where there is no key
        async_copy.commit_group()
        ats.index(i_tile).store(b_at)
        if i_n == first:  # the queries follow the first keys, one head after the other
            for r in gl.static_range(R):
                p_q = q + (i_g * R + r) * stride_qh + o_w[:, None] * stride_qw + o_qd[None, :]
                async_copy.async_copy_global_to_shared(q_tiles.index(r), p_q, mask=(o_w < W)[:, None])
                async_copy.commit_group()
            async_copy.wait_group(R)
        else:
            async_copy.wait_group(0)
        gl.thread_barrier()
        mbarrier.arrive(full.index(mine * TILES + i_tile), count=1)
        mine ^= 1
        if i_n == first:
            for r in gl.static_range(R):
                async_copy.wait_group(R - 1 - r)
                fence_async_shared()  # the tensor cores read what these threads wrote
                gl.thread_barrier()
                mbarrier.arrive(q_full.index(r), count=1)
        i_tile += 1
        if i_tile == TILES:
            i_tile, phase = 0, phase ^ 1


@gluon.jit
def larger(b_x, b_y):
    return gl.maximum(b_x, b_y, propagate_nan=_NAN_STAYS)


@gluon.jit
def worker(
    out, q_tiles, k_tiles, ats, scales, lses, whens, q_full, full, empty, earliest, i_g, first, step, tiles, L, scale,
    I: gl.constexpr, R: gl.constexpr, TILES: gl.constexpr, FP8: gl.constexpr, PEAK: gl.constexpr, RAISE: gl.constexpr,
):  # fmt: skip
    """Every second tile of the program's, from the I-th on. Of `full` each worker has its own: it sees every turn."""
    CYCLE: gl.constexpr = TILES if TILES % 2 == 0 else 2 * TILES  # tiles until a worker meets a buffer again
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _BW, 16])  # of scores [BN, BW]
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    b_0 = gl.zeros([_BN, _BW], gl.float32, layout=S)
    b_when = whens.load(gl.SliceLayout(0, S))
    turn = I
    for i_n in range(first + I * step, tiles, 2 * step):
        i_tile = turn % TILES
        mbarrier.wait(full.index(I * TILES + i_tile), (turn // CYCLE) & 1)
        b_k = k_tiles.index(i_tile).load(A)
        b_at = ats.index(i_tile).load(gl.SliceLayout(1, S))
        b_factor = scale
        if FP8:
            b_factor = scales.index(i_tile).load(gl.SliceLayout(1, S))[:, None] * scale
        gl.thread_barrier()
        mbarrier.arrive(empty.index(i_tile), count=1)
        turn += 2
        late = gl.max(b_at, 0) > earliest  # some query does not see some key
        o_n = i_n * _BN + gl.arange(0, _BN, layout=gl.SliceLayout(1, S))
        zero = turn >> 30  # keeps what follows from r in the loop: 16 addresses a head would not fit the registers
        b_most = gl.full([_BN], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))  # for PEAK
        mbarrier.wait(q_full.index(0), 0)
        b_next = warpgroup_mma(b_k, q_tiles.index(zero).permute((1, 0)), b_0, use_acc=False, is_async=True)
        for r in gl.static_range(R):
            if r + 1 < R:
                b_this = b_next
                mbarrier.wait(q_full.index(r + 1), 0)
                b_next = warpgroup_mma(
                    b_k, q_tiles.index(zero + (r + 1)).permute((1, 0)), b_0, use_acc=False, is_async=True
                )
                b_s = warpgroup_mma_wait(num_outstanding=1, deps=[b_this])
            else:
                b_s = warpgroup_mma_wait(num_outstanding=0, deps=[b_next])
            b_log = b_s * b_factor - lses.index(r).load(gl.SliceLayout(0, S))[None, :]
            if PEAK:  # of logarithms: one power for each key is enough
                if late:
                    b_log = gl.where(b_at[:, None] <= b_when[None, :], b_log, float("-inf"))
                b_most = larger(b_most, gl.reduce(b_log, 1, larger))
            else:
                b_weight = gl.exp2(b_log)
                if late:
                    b_weight = gl.where(b_at[:, None] <= b_when[None, :], b_weight, 0.0)
                b_sum = gl.where(b_at >= 0, gl.sum(b_weight, 1), 0.0)
                gl.store(out + (i_g * R + r) * L + o_n, b_sum, mask=o_n < L)
        if PEAK:
            b_peak = gl.where(b_at >= 0, gl.exp2(b_most), 0.0)
            if RAISE:
                b_peak = larger(b_peak, gl.load(out + i_g * L + o_n, mask=o_n < L, other=0.0))
            gl.store(out + i_g * L + o_n, b_peak, mask=o_n < L)


@gluon.jit(do_not_specialize=["L", "W", "tiles"])
def score_known_hopper_kernel(
    q,  # [W, H, D] bf16
    when,  # [W] int64, ascending
    k_pool,  # [N, P, D] bf16, or FP8 as uint8
    k_scale,  # [N, P] f32, read with FP8 only
    table,  # [G, N]
    positions,  # [G, L]
    lse,  # [W, H] f32, natural
    out,  # [H, L] f32
    L,
    W,
    tiles,
    scale,  # times log2(e)
    log2_e,
    stride_qw,
    stride_qh,
    stride_tg,
    stride_tn,
    stride_pg,
    stride_pl,
    stride_lw,
    stride_lh,
    R: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    TILES: gl.constexpr,
    FP8: gl.constexpr,
    PEAK: gl.constexpr,  # out [G, L]: the largest weight of each key instead of sums over the window
    RAISE: gl.constexpr,  # of that and what stands in `out`
):
    first, step, i_g = gl.program_id(0), gl.num_programs(0), gl.program_id(1).to(gl.int64)
    M: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    F: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [R, _BW, D], M)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [TILES, _BN, D], M)
    ats = gl.allocate_shared_memory(gl.int32, [TILES, _BN], F)
    scales = gl.allocate_shared_memory(gl.float32, [TILES, _BN], F) if FP8 else ats
    lses = gl.allocate_shared_memory(gl.float32, [R, _BW], F)
    whens = gl.allocate_shared_memory(gl.int32, [_BW], F)
    q_full = gl.allocate_shared_memory(gl.int64, [R, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2 * TILES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TILES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(full.index(TILES + i), count=1)
        mbarrier.init(empty.index(i), count=1)
    B: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    o_w = gl.arange(0, _BW, layout=B)
    whens.store(gl.load(when + o_w, mask=o_w < W, other=0x7FFFFFFF).to(gl.int32))
    for r in gl.static_range(R):
        mbarrier.init(q_full.index(r), count=1)
        p_lse = lse + o_w * stride_lw + (i_g * R + r) * stride_lh
        b_lse = gl.load(p_lse, mask=o_w < W, other=float("inf")) * log2_e
        lses.index(r).store(gl.where(b_lse == float("-inf"), float("inf"), b_lse))  # sees nothing: weights 0, not NaN
    earliest = gl.load(when).to(gl.int32)
    gl.thread_barrier()
    p_table, p_at = table + i_g * stride_tg, positions + i_g * stride_pg
    gl.warp_specialize(
        [
            (worker, (
                out, q_tiles, k_tiles, ats, scales, lses, whens, q_full, full, empty, earliest, i_g, first, step,
                tiles, L, scale, 0, R, TILES, FP8, PEAK, RAISE,
            )),
            (worker, (
                out, q_tiles, k_tiles, ats, scales, lses, whens, q_full, full, empty, earliest, i_g, first, step,
                tiles, L, scale, 1, R, TILES, FP8, PEAK, RAISE,
            )),
            (loaders, (
                q, k_pool, k_scale, p_table, p_at, q_tiles, k_tiles, ats, scales, q_full, full, empty, i_g, first, step,
                tiles, L, W, stride_qw, stride_qh, stride_tn, stride_pl, R, D, P, TILES, FP8,
            )),
        ],
        [_WARPS, _WARPS],
        [_WORKER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
