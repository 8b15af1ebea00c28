"""linear_exact's kernel for Hopper GPUs, in Gluon: one order of additions for any number of rows of x.

An element of x W^T is summed in `segments` of the columns, whose length follows from the shape of W. In a segment the
tensor cores add 16 products at a time to one f32 accumulator, in ascending order of the columns; the segments' sums are
then added in ascending order. Rows of W are always the first side of these products (64 of them in an instruction), and
rows of x the second, of which an instruction takes 8 to 256: an element's bits do not depend on how many (seen on the
card, tests/gpu/test_exact_linear.py). So only speed depends on the tile, and the number of rows may choose it.

A program runs units: a tile of W by a tile of x, over all segments (or SHARED: over one).

    1 loader       brings steps of 64 C columns of W and x into a ring in shared memory with the copy engine
    4 or 8 workers multiply them; each four have 64 rows of W

Where the segments of a tile meet (MODE):

    WHOLE      there is one
    REGISTERS  a program runs them one after the other: few rows of x, so both sums are held
    SCRATCH    the same with many rows: the sum so far waits in `parts`, where each thread finds its own elements again
    SHARED     each has a program, which leaves its sums in `parts`; the last one to arrive adds them up. None waits.

ROWS may be 32: then an instruction's other 32 rows of W are those of the next tile in the ring, whose results are
dropped. That makes twice as many programs of a narrow W.

The launch overlaps the kernel before it: W is constant, so the ring is filled with it before x is there.
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

WHOLE, REGISTERS, SCRATCH, SHARED = range(4)
_WHOLE, _REGISTERS, _SCRATCH, _SHARED = (gl.constexpr(m) for m in (WHOLE, REGISTERS, SCRATCH, SHARED))
_M, _BK = gl.constexpr(64), gl.constexpr(64)  # rows of W in an instruction; columns of a tile
_TOGETHER = gl.constexpr(8)  # tiles of x that are run beside each other with the same tiles of W
_CHUNK = gl.constexpr(64)  # rows of x that are written at once


@gluon.jit
def unit_at(u, tiles_w, tiles_t, steps, length, MODE: gl.constexpr, G):
    """A unit's tile of W, tile of x, first step and end."""
    begin, end = 0, steps
    if MODE == _SHARED:
        begin = u % G * length
        end = gl.minimum(begin + length, steps)
        u = u // G
    group = u // (_TOGETHER * tiles_w)
    r = u % (_TOGETHER * tiles_w)
    size = gl.minimum(tiles_t - group * _TOGETHER, _TOGETHER)
    return r // size, group * _TOGETHER + r % size, begin, end


@gluon.jit
def load_w(w, w_tiles, bar, i_s, row, step, BYTES: gl.constexpr, C: gl.constexpr):
    mbarrier.expect(bar, BYTES)
    for c in gl.static_range(C):
        tma.async_copy_global_to_shared(w, [row, (step * C + c) * _BK], bar, w_tiles.index(i_s * C + c))


@gluon.jit
def load_x(x, x_tiles, bar, i_s, row, step, C: gl.constexpr):
    for c in gl.static_range(C):
        tma.async_copy_global_to_shared(x, [row, (step * C + c) * _BK], bar, x_tiles.index(i_s * C + c))


@gluon.jit
def loader(
    x, w, x_tiles, w_tiles, full, free, units, tiles_w, tiles_t, steps, length, G,
    MODE: gl.constexpr, ROWS: gl.constexpr, BT: gl.constexpr, S: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = 2 * _BK * C * (ROWS + BT)
    i_p, P = gl.program_id(0), gl.num_programs(0)
    i_w, i_t, begin, end = unit_at(i_p, tiles_w, tiles_t, steps, length, MODE, G)
    ahead = gl.minimum(end - begin, S)
    for i in range(ahead):
        load_w(w, w_tiles, full.index(i), i, i_w * ROWS, begin + i, BYTES, C)
    cuda.gdc_wait()
    for i in range(ahead):
        load_x(x, x_tiles, full.index(i), i, i_t * BT, begin + i, C)
    i = ahead
    for u in range(i_p, units, P):
        i_w, i_t, begin, end = unit_at(u, tiles_w, tiles_t, steps, length, MODE, G)
        for step in range(begin + gl.where(u == i_p, ahead, 0), end):
            i_s = i % S
            mbarrier.wait(free.index(i_s), ((i // S) & 1) ^ 1)
            load_w(w, w_tiles, full.index(i_s), i_s, i_w * ROWS, step, BYTES, C)
            load_x(x, x_tiles, full.index(i_s), i_s, i_t * BT, step, C)
            i += 1
    cuda.gdc_launch_dependents()


@gluon.jit
def multiply(
    x_tiles, w_tiles, full, free, begin, count,
    W: gl.constexpr, ROWS: gl.constexpr, BT: gl.constexpr, S: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The sums [64, BT] over `count` steps of the ring from the `begin`-th on."""
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    b_y = gl.zeros([_M, BT], gl.float32, layout=A)
    for i in range(begin, begin + count):
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
    mbarrier.arrive(free.index((begin + count - 1) % S), count=1)
    return b_y + 0.0  # never -0: the columns past the end, zeros, may be more or fewer


@gluon.jit
def write(b_y, y, row, end, i_t, T, N):
    """b_y [64, rows of x from i_t on] to y [T, N], in pieces of CHUNK rows of x."""
    BT: gl.constexpr = b_y.shape[1]
    if BT > _CHUNK:
        b_0, b_1 = gl.split(gl.permute(gl.reshape(b_y, [_M, 2, BT // 2]), (0, 2, 1)))
        write(b_0, y, row, end, i_t, T, N)
        write(b_1, y, row, end, i_t + BT // 2, T, N)
    else:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        b_out = gl.convert_layout(gl.permute(b_y.to(y.dtype.element_ty), (1, 0)), L)
        o_t = i_t + gl.arange(0, BT, layout=gl.SliceLayout(1, L))
        o_n = row + gl.arange(0, _M, layout=gl.SliceLayout(0, L))
        p_y = y + o_t.to(gl.int64)[:, None] * N + o_n[None, :]
        gl.store(p_y, b_out, mask=(o_t < T)[:, None] & (o_n < gl.minimum(N, end))[None, :])


@gluon.jit
def worker(
    y, bias, parts, arrivals, x_tiles, w_tiles, full, free, units, tiles_w, tiles_t, steps, length, G, T, N,
    MODE: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, BT: gl.constexpr, S: gl.constexpr, C: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    HALVES: gl.constexpr = 2 if ROWS > _M else 1
    i_p, P = gl.program_id(0), gl.num_programs(0)
    o_m, o_c = gl.arange(0, _M, layout=gl.SliceLayout(1, A)), gl.arange(0, BT, layout=gl.SliceLayout(0, A))
    o_part = o_m[:, None] * BT + o_c[None, :]
    cuda.gdc_wait()  # before this, nothing is written
    i = 0
    for u in range(i_p, units, P):
        i_w, i_t, begin, end = unit_at(u, tiles_w, tiles_t, steps, length, MODE, G)
        row, mine = i_w * ROWS + W * _M, True
        if (MODE == _WHOLE) | (MODE == _SHARED):
            b_y = multiply(x_tiles, w_tiles, full, free, i, end - begin, W, ROWS, BT, S, C)
            i += end - begin
        elif MODE == _REGISTERS:
            b_y = gl.zeros([_M, BT], gl.float32, layout=A)
            for first in range(0, steps, length):
                count = gl.minimum(length, steps - first)
                b_y += multiply(x_tiles, w_tiles, full, free, i, count, W, ROWS, BT, S, C)
                i += count
        else:
            p_part = parts + (i_p * HALVES + W) * (_M * BT) + o_part
            b_y = gl.zeros([_M, BT], gl.float32, layout=A)
            for first in range(0, steps, length):
                count = gl.minimum(length, steps - first)
                b_y = multiply(x_tiles, w_tiles, full, free, i, count, W, ROWS, BT, S, C)
                if first > 0:
                    b_y += gl.load(p_part)
                if first + length < steps:
                    gl.store(p_part, b_y)
                i += count
        if MODE == _SHARED:
            tile = u // G
            p_part = parts + ((tile * G) * HALVES + W) * (_M * BT) + o_part
            gl.store(p_part + u % G * (HALVES * _M * BT), b_y)
            gl.thread_barrier()
            word = arrivals + tile * HALVES + W
            mine = gl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == G - 1
            gl.thread_barrier()
            if mine:
                gl.atomic_xchg(word, 0, sem="relaxed", scope="gpu")
                b_y = gl.zeros([_M, BT], gl.float32, layout=A)
                for g in range(G):
                    b_y += gl.load(p_part + g * (HALVES * _M * BT), cache_modifier=".cg")
        if mine:
            if BIAS:
                o_n = row + o_m
                b_y += gl.load(bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
            write(b_y, y, row, (i_w + 1) * ROWS, i_t * BT, T, N)


INTEGERS = ("T", "units", "tiles_w", "tiles_t", "steps", "length", "G")


@gluon.jit(do_not_specialize=INTEGERS)
def linear_exact_hopper_kernel(
    x,  # [T, K], in boxes [BT, 64]
    w,  # [N, K], in boxes [ROWS, 64]
    bias,
    y,  # [T, N]
    parts,  # f32; SCRATCH: [P, ROWS, BT], SHARED: [units, ROWS, BT]
    arrivals,  # SHARED: [units / G * halves] int32, zeros before and after
    T,
    N,
    units,
    tiles_w,
    tiles_t,
    steps,  # of 64 C columns
    length,  # steps of a segment
    G,  # segments
    MODE: gl.constexpr,
    BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    BT: gl.constexpr,
    S: gl.constexpr,
    C: gl.constexpr,
    REGS: gl.constexpr,  # of a thread of the second four workers
):
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [S * C, BT, _BK], x.layout)
    # one more where an instruction reads past a tile
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [S * C + (1 if ROWS < _M else 0), ROWS, _BK], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2 if ROWS > _M else 1)
    fence_async_shared()
    gl.thread_barrier()
    if ROWS > _M:
        gl.warp_specialize(
            [
                (worker, (
                    y, bias, parts, arrivals, x_tiles, w_tiles, full, free, units, tiles_w, tiles_t, steps, length, G,
                    T, N, MODE, BIAS, ROWS, BT, S, C, 0,
                )),
                (worker, (
                    y, bias, parts, arrivals, x_tiles, w_tiles, full, free, units, tiles_w, tiles_t, steps, length, G,
                    T, N, MODE, BIAS, ROWS, BT, S, C, 1,
                )),
                (loader, (
                    x, w, x_tiles, w_tiles, full, free, units, tiles_w, tiles_t, steps, length, G,
                    MODE, ROWS, BT, S, C,
                )),
            ],
            [4, 1],
            [REGS, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (worker, (
                    y, bias, parts, arrivals, x_tiles, w_tiles, full, free, units, tiles_w, tiles_t, steps, length, G,
                    T, N, MODE, BIAS, ROWS, BT, S, C, 0,
                )),
                (loader, (
                    x, w, x_tiles, w_tiles, full, free, units, tiles_w, tiles_t, steps, length, G,
                    MODE, ROWS, BT, S, C,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
