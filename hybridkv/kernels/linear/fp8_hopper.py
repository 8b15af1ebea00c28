"""linear_fp8's kernel for Hopper GPUs and up to eight rows of x, in Gluon, after the pattern of packed_hopper.py.

Every program takes tiles of 16 rows of W (GATED: 16 gates and their 16 ups) one after the other, and all columns of
each, 128 at a time for each of its S warps. The copy engine brings W into a ring in shared memory, DEPTH steps ahead.
Lane 4 g + t holds rows g and g + 8 of W, and of each 64 columns those from 16 t on; of x it holds row g. Codes are
upcast in registers, so every product is exact.
"""

from __future__ import annotations

from hybridkv.kernels.backend import triton
from hybridkv.kernels.gluon import cuda, fence_async_shared, gl, gluon, mbarrier, tma
from hybridkv.kernels.linear.packed_parts_hopper import after, layout, mma, release
from hybridkv.kernels.linear.packed_vector_hopper import framed, operands


@triton.constexpr_function
def multiply_e4m3():
    """PTX: 16 words of codes (row, half of the columns, word) by x (8 registers a half) -> two sums, one a half.

    The seven low bits of a code, put at exponent and mantissa of BF16, are 2^120 times too small.
    """
    body = "mov.b32 k, 0x7b807b80;\n"
    for p in (0, 1):
        for w in range(4):
            for r in (0, 1):
                for q, which in ((0, "0x9180"), (1, "0xb3a2")):
                    body += f"prmt.b32 a, ${16 + 8 * r + 4 * p + w}, 0, {which};\nshl.b32 a, a, 4;\n"
                    body += f"and.b32 a, a, 0x87f087f0;\nmul.bf16x2 l{r}{w}{q}, a, k;\n"
            body += mma(f"c{p}", f"{{l0{w}0, l1{w}0, l0{w}1, l1{w}1}}", 32 + 8 * p + 2 * w, w == 0)
    return framed(body, False)


@triton.constexpr_function
def tile_layout(S):
    """[16, 32 S] words."""
    regs, lanes = [[0, 1], [0, 2], [0, 16], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return layout(regs, lanes, [0, 32], [16, 32 * S], S)


@gluon.jit
def loader(
    w, ring, full, free, tiles, steps, i_p, P, N,
    TILES: gl.constexpr, S: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    slot, phase = 0, 0
    for tile in range(i_p, tiles, P):
        for step in range(steps):
            bar = full.index(slot)
            mbarrier.wait(free.index(slot), phase ^ 1)
            mbarrier.expect(bar, TILES * S * 16 * 128)
            for j in gl.static_range(TILES):
                at = [tile * 16 + j * N, step * (32 * S)]
                tma.async_copy_global_to_shared(w, at, bar, ring.index(slot * TILES + j))
            slot, phase = after(slot, phase, DEPTH)
    cuda.gdc_launch_dependents()


@gluon.jit
def product(b_y, tile, b_x, S: gl.constexpr):
    """b_y [lanes, 16] and the product with a tile's words of a step."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [S, 1], [1, 0])
    b_w = gl.permute(gl.reshape(tile.load(tile_layout(S)), [2, 8, S, 2, 4, 4]), (2, 1, 4, 0, 3, 5))
    b_w = gl.convert_layout(gl.reshape(b_w, [32 * S, 16]), L, assert_trivial=True)
    return b_y + gl.inline_asm_elementwise(
        multiply_e4m3(), operands(2), [b_w, b_x], dtype=gl.float32, is_pure=True, pack=16
    )


@gluon.jit
def rows_of(b_y, scale, bias, o_n, BIAS: gl.constexpr, S: gl.constexpr, L: gl.constexpr):
    """The sums of all warps [lanes, 16] -> [128]: (g, two rows of x, row g or g + 8, row of x)."""
    b_y = gl.sum(gl.reshape(b_y, [S, 32, 2, 4, 2]), 4)  # both halves; the other registers are zero
    b_out = gl.convert_layout(gl.reshape(gl.sum(gl.sum(b_y, 2), 0), [128]), L) * gl.load(scale + o_n)
    if BIAS:
        b_out += gl.load(bias + o_n).to(gl.float32)
    return b_out


@gluon.jit
def worker(
    x, scale, bias, y, ring, full, free, tiles, steps, i_p, P, T, N, K, stride_x,
    BIAS: gl.constexpr, GATED: gl.constexpr, EVEN: gl.constexpr, TILES: gl.constexpr, S: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [S, 1], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [S], [0])
    o_l = gl.arange(0, 32 * S, layout=gl.SliceLayout(1, L))[:, None]
    o_r = gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :]
    row = gl.minimum(o_l % 32 // 4, T - 1)  # sums of rows past the end are not stored
    o_k = o_l // 32 * 64 + o_r // 8 * 32 + o_l % 4 * 8 + o_r % 8
    o = gl.arange(0, 128, layout=L1)
    o_t = o // 4 % 4 * 2 + o % 2
    slot, phase, i = 0, 0, 0
    cuda.gdc_wait()
    for tile in range(i_p, tiles, P):
        b_y = gl.zeros([32 * S, 16], gl.float32, layout=L)
        b_up = gl.zeros([32 * S, 16], gl.float32, layout=L)
        for step in range(steps):
            p_x = x + row.to(gl.int64) * stride_x + step * (64 * S) + o_k
            if EVEN:
                b_x = gl.load(p_x)
            else:
                b_x = gl.load(p_x, mask=step * (64 * S) + o_k < K // 2, other=0)
            mbarrier.wait(full.index(slot), phase)
            release(free, slot, i, DEPTH)
            b_y = product(b_y, ring.index(slot * TILES), b_x, S)
            if GATED:
                b_up = product(b_up, ring.index(slot * TILES + 1), b_x, S)
            slot, phase = after(slot, phase, DEPTH)
            i += 1
        o_n = tile * 16 + o // 16 + o // 2 % 2 * 8
        b_out = rows_of(b_y, scale, bias, o_n, BIAS, S, L1)
        if GATED:
            b_out *= rows_of(b_up, scale, bias, o_n + N, BIAS, S, L1) / (1.0 + gl.exp(-b_out))
        gl.store(y + o_t.to(gl.int64) * N + o_n, b_out.to(y.dtype.element_ty), mask=o_t < T)


@gluon.jit(do_not_specialize=["T", "tiles"])
def linear_fp8_hopper_kernel(
    x,  # [T, K] as words, rows stride_x words apart
    w,  # [N, K], GATED: [2 N, K], as words, in boxes [16, 32 S]
    scale,
    bias,
    y,  # [T, N]
    T,
    N,
    K,
    stride_x,
    tiles,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    EVEN: gl.constexpr,  # all warps have as many steps
    S: gl.constexpr,  # warps
    DEPTH: gl.constexpr,  # steps that are loaded ahead
):
    TILES: gl.constexpr = 2 if GATED else 1
    i_p, P = gl.program_id(0), gl.num_programs(0)
    steps = (K + 128 * S - 1) // (128 * S)
    ring = gl.allocate_shared_memory(gl.int32, [DEPTH * TILES, 16, 32 * S], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (worker, (
                x, scale, bias, y, ring, full, free, tiles, steps, i_p, P, T, N, K, stride_x,
                BIAS, GATED, EVEN, TILES, S, DEPTH,
            )),
            (loader, (w, ring, full, free, tiles, steps, i_p, P, N, TILES, S, DEPTH)),
        ],
        [1],
        [40],
    )  # fmt: skip
