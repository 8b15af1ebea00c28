"""linear_packed's kernel for Hopper GPUs and the few rows of a decode step, in Gluon.

Every program takes tiles of 16 rows of W (GATED: 16 gates and their 16 ups) one after the other, and all columns of
each: a step of 256 columns (BITS = 8: 128) for each of its S workers' warps. One more warp, the loader, keeps a ring in
shared memory filled with W (packed_parts_hopper.py). Workers multiply one row of x (packed_vector_hopper.py) or several
(packed_rows_hopper.py). Codes become BF16 integers in registers, which is exact; sums are scaled in f32.
"""

from __future__ import annotations

from hybridkv.kernels.gluon import fence_async_shared, gl, gluon, mbarrier
from hybridkv.kernels.linear.packed_parts_hopper import loader
from hybridkv.kernels.linear.packed_rows_hopper import multiply_rows
from hybridkv.kernels.linear.packed_vector_hopper import multiply_row


@gluon.jit(do_not_specialize=["T", "tiles", "stride_y"])
def linear_packed_hopper_kernel(
    x,  # [T, K] as words, rows stride_x words apart
    codes,  # planes of [N, K], GATED: [2 N, K], 16 rows interleaved: rows of 32 words
    high,
    scales,  # rows of 16 words
    d,
    bias,
    y,  # [T, N], rows stride_y apart
    T,
    N,
    K,
    stride_x,
    stride_y,
    tiles,
    BITS: gl.constexpr,
    EACH: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    BLOCKS: gl.constexpr,  # of rows of x; 0: there is one row
    EVEN: gl.constexpr,  # all warps have as many steps
    S: gl.constexpr,  # warps
    DEPTH: gl.constexpr,  # steps that are loaded ahead
):
    TILES: gl.constexpr = 2 if GATED else 1
    WORDS: gl.constexpr = 64 if BITS == 8 else 128
    i_p, P = gl.program_id(0), gl.num_programs(0)
    steps = (K // 2 + WORDS * S - 1) // (WORDS * S)
    q_ring = gl.allocate_shared_memory(gl.int32, [DEPTH * TILES, 16 * S, 32], codes.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [DEPTH * TILES, (2 if BITS == 8 else 4) * S, 16], scales.layout)
    d_ring, h_ring = s_ring, q_ring  # where there is none
    if BITS != 8:
        d_ring = gl.allocate_shared_memory(gl.int32, [DEPTH * TILES, S * 256 // EACH, 16], d.layout)
    if BITS == 5 or BITS == 6:
        h_ring = gl.allocate_shared_memory(gl.int32, [DEPTH * TILES, (8 if BITS == 6 else 4) * S, 32], high.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if BLOCKS == 0:
        gl.warp_specialize(
            [
                (multiply_row, (
                    x, bias, y, q_ring, h_ring, s_ring, d_ring, full, free, tiles, steps, i_p, P, N, K,
                    BITS, EACH, BIAS, GATED, EVEN, TILES, S, DEPTH,
                )),
                (loader, (
                    codes, high, scales, d, q_ring, h_ring, s_ring, d_ring, full, free, tiles, steps, i_p, P, N // 16,
                    K, BITS, EACH, TILES, S, DEPTH,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_rows, (
                    x, bias, y, q_ring, h_ring, s_ring, d_ring, full, free, tiles, steps, i_p, P, T, N, K, stride_x,
                    stride_y, BITS, EACH, BIAS, GATED, EVEN, BLOCKS, TILES, S, DEPTH,
                )),
                (loader, (
                    codes, high, scales, d, q_ring, h_ring, s_ring, d_ring, full, free, tiles, steps, i_p, P, N // 16,
                    K, BITS, EACH, TILES, S, DEPTH,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
