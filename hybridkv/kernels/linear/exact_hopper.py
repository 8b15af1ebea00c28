"""linear_exact's kernel for Hopper GPUs, in Gluon: one order of additions for any number of rows of x.

Tensor cores add 16 products at a time to an f32 accumulator, in ascending order of the columns; a sum is one chain of
these. Rows of W are the first side of an instruction's products (64 of them) and rows of x the second, of which it
takes 8 to 256: an element's bits do not depend on how many, nor on its place (tests/gpu/test_exact_linear.py). So the
number of rows may choose the tiles. No sum is divided: a narrow W has enough programs with few of its rows each.

A program runs tiles, ROWS rows of W by BT rows of x over all columns:

    1 loader         brings steps of 64 C columns of W and x into a ring in shared memory with the copy engine
    4 or 8 workers   multiply them; each four have 64 rows of W

Where ROWS is less than 64, an instruction's other rows of W are what lies behind the tile in the ring, and their sums
are dropped: reading W takes longer than the products. GATED: the 64 rows are 32 gates and the ups that belong to them.

The launch overlaps the kernel before it: W is constant, so the ring is filled with it before x is there. The next
kernel may come when a program has asked for its last step.
"""

from __future__ import annotations

from hybridkv.kernels.gluon import (
    cuda,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_M, _BK = gl.constexpr(64), gl.constexpr(64)  # rows of W in an instruction; columns of a tile
_TOGETHER = gl.constexpr(8)  # tiles of x that are run beside each other with the same rows of W
_CHUNK = gl.constexpr(64)  # rows of x that are written at once


@gluon.jit
def tile_at(i, across, along):
    """The place of the i-th tile: its block of rows of W, of which there are `across`, and of x, `along`."""
    group, within = i // (_TOGETHER * across), i % (_TOGETHER * across)
    size = gl.minimum(along - group * _TOGETHER, _TOGETHER)
    return within // size, group * _TOGETHER + within % size


@gluon.jit
def load_w(
    w, w_tiles, bar, i_s, i_w, step, N,
    GATED: gl.constexpr, ROWS: gl.constexpr, BT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """W of a step, for which x comes to the same barrier."""
    mbarrier.expect(bar, 2 * _BK * C * (ROWS + BT))
    for c in gl.static_range(C):
        w_tile, o_k = w_tiles.index(i_s * C + c), (step * C + c) * _BK
        if GATED:
            for i in gl.static_range(0, ROWS, _M):
                row = (i_w * ROWS + i) // 2
                tma.async_copy_global_to_shared(w, [row, o_k], bar, w_tile.slice(i, _M // 2))
                tma.async_copy_global_to_shared(w, [N + row, o_k], bar, w_tile.slice(i + _M // 2, _M // 2))
        else:
            tma.async_copy_global_to_shared(w, [i_w * ROWS, o_k], bar, w_tile)


@gluon.jit
def load_x(x, x_tiles, bar, i_s, i_x, step, BT: gl.constexpr, C: gl.constexpr):
    for c in gl.static_range(C):
        tma.async_copy_global_to_shared(x, [i_x * BT, (step * C + c) * _BK], bar, x_tiles.index(i_s * C + c))


@gluon.jit
def loader(
    x, w, x_tiles, w_tiles, full, free, across, along, steps, N,
    GATED: gl.constexpr, ROWS: gl.constexpr, BT: gl.constexpr, S: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    i_p, P = gl.program_id(0), gl.num_programs(0)
    i_w, i_x = tile_at(i_p, across, along)
    ahead = gl.minimum(steps, S)
    for i in range(ahead):
        load_w(w, w_tiles, full.index(i), i, i_w, i, N, GATED, ROWS, BT, C)
    cuda.gdc_wait()
    for i in range(ahead):
        load_x(x, x_tiles, full.index(i), i, i_x, i, BT, C)
    i = ahead
    for tile in range(i_p, across * along, P):
        i_w, i_x = tile_at(tile, across, along)
        for step in range(gl.where(tile == i_p, ahead, 0), steps):
            i_s = i % S
            mbarrier.wait(free.index(i_s), ((i // S) & 1) ^ 1)
            load_w(w, w_tiles, full.index(i_s), i_s, i_w, step, N, GATED, ROWS, BT, C)
            load_x(x, x_tiles, full.index(i_s), i_s, i_x, step, BT, C)
            i += 1
    cuda.gdc_launch_dependents()


@gluon.jit
def multiply(
    x_tiles, w_tiles, full, free, begin, steps,
    W: gl.constexpr, ROWS: gl.constexpr, BT: gl.constexpr, S: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The sums [64, BT] of the W-th 64 rows over the ring's steps from `begin` on."""
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    b_y = gl.zeros([_M, BT], gl.float32, layout=A)
    for i in range(begin, begin + steps):
        i_s = i % S
        mbarrier.wait(full.index(i_s), (i // S) & 1)
        for c in gl.static_range(C):
            w_tile = w_tiles.index(i_s * C + c)
            if ROWS > _M:
                w_tile = w_tile.slice(W * _M, _M)
            elif ROWS < _M:
                w_tile = w_tile._reinterpret(gl.bfloat16, [_M, _BK], w_tile.layout)
            b_y = warpgroup_mma(w_tile, x_tiles.index(i_s * C + c).permute((1, 0)), b_y, is_async=True)
        b_y = warpgroup_mma_wait(C, deps=[b_y])  # the step before is done
        gl.thread_barrier()
        mbarrier.arrive(free.index((i + S - 1) % S), count=1, pred=i > begin)
    b_y = warpgroup_mma_wait(0, deps=[b_y])
    gl.thread_barrier()
    mbarrier.arrive(free.index((begin + steps - 1) % S), count=1)
    return b_y + 0.0  # never -0: of the zeros past the last column, steps of other sizes add more or fewer


@gluon.jit
def write(b_y, y, row, end, i_t, T, N, GATED: gl.constexpr):
    """b_y [64, rows of x from i_t on] to y [T, N], in pieces of CHUNK rows of x."""
    BT: gl.constexpr = b_y.shape[1]
    if BT > _CHUNK:
        b_0, b_1 = gl.split(gl.permute(gl.reshape(b_y, [_M, 2, BT // 2]), (0, 2, 1)))
        write(b_0, y, row, end, i_t, T, N, GATED)
        write(b_1, y, row, end, i_t + BT // 2, T, N, GATED)
    else:
        if GATED:
            L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])  # both halves of 64 columns in a thread
            b_both = gl.reshape(gl.convert_layout(gl.permute(b_y, (1, 0)), L), [BT, 2, _M // 2])
            b_gate, b_up = gl.split(gl.permute(b_both, (0, 2, 1)))
            b_out = (b_gate / (1.0 + gl.exp(-b_gate)) * b_up).to(y.dtype.element_ty)
            b_out = gl.convert_layout(b_out, L)
        else:
            L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            b_out = gl.convert_layout(gl.permute(b_y.to(y.dtype.element_ty), (1, 0)), L)
        o_t = i_t + gl.arange(0, BT, layout=gl.SliceLayout(1, L))
        o_n = row + gl.arange(0, b_out.shape[1], layout=gl.SliceLayout(0, L))
        p_y = y + o_t.to(gl.int64)[:, None] * N + o_n[None, :]
        gl.store(p_y, b_out, mask=(o_t < T)[:, None] & (o_n < gl.minimum(N, end))[None, :])


@gluon.jit
def worker(
    y, bias, x_tiles, w_tiles, full, free, across, along, steps, T, N,
    GATED: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, BT: gl.constexpr, S: gl.constexpr, C: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    OUT: gl.constexpr = ROWS // 2 if GATED else ROWS  # columns of y
    i_p, P = gl.program_id(0), gl.num_programs(0)
    cuda.gdc_wait()  # before this, nothing is written
    begin = 0
    for tile in range(i_p, across * along, P):
        i_w, i_x = tile_at(tile, across, along)
        row, end = i_w * OUT + W * (_M // 2 if GATED else _M), (i_w + 1) * OUT
        b_y = multiply(x_tiles, w_tiles, full, free, begin, steps, W, ROWS, BT, S, C)
        begin += steps
        if BIAS:
            o_m = gl.arange(0, _M, layout=gl.SliceLayout(1, A))
            o_n = row + (o_m % (_M // 2) if GATED else o_m)
            b_bias = gl.load(bias + o_n + (gl.where(o_m < _M // 2, 0, N) if GATED else 0), mask=o_n < N, other=0.0)
            b_y += b_bias.to(gl.float32)[:, None]
        write(b_y, y, row, end, i_x * BT, T, N, GATED)


@gluon.jit(do_not_specialize=["T", "across", "along", "steps"])
def linear_exact_hopper_kernel(
    x,  # [T, K], in boxes [BT, 64]
    w,  # [N, K], in boxes [ROWS, 64]; GATED: [2 N, K], in boxes [32, 64]
    bias,
    y,  # [T, N]
    T,
    N,
    across,  # blocks of ROWS rows of W
    along,  # blocks of BT rows of x
    steps,  # of 64 C columns
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    BT: gl.constexpr,
    S: gl.constexpr,
    C: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread of the second four workers
):
    HALVES: gl.constexpr = 2 if ROWS > _M else 1
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [S * C, BT, _BK], x.layout)
    # and what an instruction reads past the last tile
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [S * C + (_M - 1) // ROWS, ROWS, _BK], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=HALVES)
    fence_async_shared()
    gl.thread_barrier()
    if HALVES == 2:
        gl.warp_specialize(
            [
                (worker, (
                    y, bias, x_tiles, w_tiles, full, free, across, along, steps, T, N, GATED, BIAS, ROWS, BT, S, C, 0,
                )),
                (worker, (
                    y, bias, x_tiles, w_tiles, full, free, across, along, steps, T, N, GATED, BIAS, ROWS, BT, S, C, 1,
                )),
                (loader, (x, w, x_tiles, w_tiles, full, free, across, along, steps, N, GATED, ROWS, BT, S, C)),
            ],
            [4, 1],
            [REGISTERS, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (worker, (
                    y, bias, x_tiles, w_tiles, full, free, across, along, steps, T, N, GATED, BIAS, ROWS, BT, S, C, 0,
                )),
                (loader, (x, w, x_tiles, w_tiles, full, free, across, along, steps, N, GATED, ROWS, BT, S, C)),
            ],
            [1],
            [40],
        )  # fmt: skip
