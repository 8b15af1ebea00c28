"""linear_rows' kernel for Hopper GPUs, in Gluon. A program has a multiprocessor to itself:

    1 loader    brings W and x of a step of 64 columns into a ring in shared memory with the copy engine
    4 workers   multiply them: the rows of W are one side of the tensor cores' products, those of x the other

A tile is two halves of 64 rows of W: neighbours, or GATED, gates and the ups that belong to them.

A tile that several programs share is taken first. Each writes its sums to `parts` and is counted in the tile's word.
Before its last whole tile, so that it seldom has to wait, each adds up the parts for its share of the rows of x, always
in the order of the columns, so the bits do not depend on which program does it.

No program waits for another one for ever, as the others may not run before this one ends: another process or stream
may have their multiprocessors. A program looks a limited number of times, then decides with one atomic operation on the
word. If all parts are there, it adds up its share. If not, it has given up its share, and the last program to arrive,
whose own atomic operation comes after that one and returns what was decided before it, adds it up instead:

    bits 0 to 7    programs whose parts are there
    bits 8 to 15   programs that have decided, of those that have a share: one bit each

The operation that completes the word is the last one on it in this launch; its program sets the word back to zero.

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
from hybridkv.kernels.linear.skinny import HALF, STEP

_HALF, _BK = gl.constexpr(HALF), gl.constexpr(STEP)
_CHUNK = gl.constexpr(8)  # rows of x that are added up at once
_ARRIVED = gl.constexpr(255)  # the bits of a tile's word that count the programs whose parts are there
_DECIDED = gl.constexpr(8)  # the first of the bits that say which programs have decided: one for each chunk at most


@gluon.jit
def load_w(w, w_tiles, full, i, i_s, shared, begin, tile, i_p, P, steps, second, ROWS: gl.constexpr, BT: gl.constexpr):
    """Both halves of the program's i-th step, for which x comes to the same barrier; -> its column."""
    j = i - shared
    row = gl.where(i < shared, tile, j // steps * P + i_p) * ROWS
    o_k = gl.where(i < shared, begin + i, j % steps) * _BK
    bar = full.index(i_s)
    mbarrier.expect(bar, 2 * _BK * (2 * _HALF + BT))
    tma.async_copy_global_to_shared(w, [row, o_k], bar, w_tiles.index(2 * i_s))
    tma.async_copy_global_to_shared(w, [row + second, o_k], bar, w_tiles.index(2 * i_s + 1))
    return o_k


@gluon.jit
def loader(
    x, w, x_tiles, w_tiles, full, free, shared, begin, tile, n, i_p, P, steps, second,
    ROWS: gl.constexpr, BT: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    for i in range(gl.minimum(n, S)):
        load_w(w, w_tiles, full, i, i, shared, begin, tile, i_p, P, steps, second, ROWS, BT)
    cuda.gdc_wait()
    for i in range(gl.minimum(n, S)):
        o_k = gl.where(i < shared, begin + i, (i - shared) % steps) * _BK
        tma.async_copy_global_to_shared(x, [0, o_k], full.index(i), x_tiles.index(i))
    for i in range(S, n):
        i_s = i % S
        mbarrier.wait(free.index(i_s), ((i // S) & 1) ^ 1)
        o_k = load_w(w, w_tiles, full, i, i_s, shared, begin, tile, i_p, P, steps, second, ROWS, BT)
        tma.async_copy_global_to_shared(x, [0, o_k], full.index(i_s), x_tiles.index(i_s))
    cuda.gdc_launch_dependents()


@gluon.jit
def multiply(x_tiles, w_tiles, full, free, begin, count, BT: gl.constexpr, S: gl.constexpr):
    """The sums [HALF, BT] of both halves over `count` steps."""
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    b_0 = gl.zeros([_HALF, BT], gl.float32, layout=A)
    b_1 = gl.zeros([_HALF, BT], gl.float32, layout=A)
    for i in range(begin, begin + count):
        i_s = i % S
        mbarrier.wait(full.index(i_s), (i // S) & 1)
        x_tile = x_tiles.index(i_s).permute((1, 0))
        done_0 = warpgroup_mma(w_tiles.index(2 * i_s), x_tile, b_0, is_async=True)
        done_1 = warpgroup_mma(w_tiles.index(2 * i_s + 1), x_tile, b_1, is_async=True)
        b_0, b_1 = warpgroup_mma_wait(0, deps=[done_0, done_1])
        gl.thread_barrier()
        mbarrier.arrive(free.index(i_s), count=1)
    return b_0, b_1


@gluon.jit
def write(b_y, y, row, i_t, T, N, L: gl.constexpr):
    """b_y [HALF, rows of x from i_t on] to y [T, N]."""
    b_out = gl.convert_layout(gl.permute(b_y.to(gl.bfloat16), (1, 0)), L)
    o_t = i_t + gl.arange(0, b_out.shape[0], layout=gl.SliceLayout(1, L))
    o_n = row + gl.arange(0, _HALF, layout=gl.SliceLayout(0, L))
    p_y = y + o_t.to(gl.int64)[:, None] * N + o_n[None, :]
    gl.store(p_y, b_out, mask=(o_t < T)[:, None] & (o_n < N)[None, :])


@gluon.jit
def finish(b_0, b_1, y, bias, row, i_t, T, N, GATED: gl.constexpr, BIAS: gl.constexpr, L: gl.constexpr):
    """Add the bias, apply the gate and write the results of the rows of W from `row` on."""
    if BIAS:
        o_n = row + gl.arange(0, _HALF, layout=gl.SliceLayout(1, b_0.type.layout))
        o_2 = o_n + (N if GATED else _HALF)
        b_0 += gl.load(bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
        b_1 += gl.load(bias + o_2, mask=o_2 < (2 * N if GATED else N), other=0.0).to(gl.float32)[:, None]
    if GATED:
        write(b_0 / (1.0 + gl.exp(-b_0)) * b_1, y, row, i_t, T, N, L)
    else:
        write(b_0, y, row, i_t, T, N, L)
        write(b_1, y, row + _HALF, i_t, T, N, L)


@gluon.jit
def count(word, added, full):
    """Add to the word of a tile, which the program that completes it sets back to zero; -> the word before."""
    before = gl.atomic_add(word, added, sem="acq_rel", scope="gpu")
    if before + added == full:
        gl.atomic_xchg(word, 0, sem="relaxed", scope="gpu")
    return before


@gluon.jit
def leave_part(b_0, b_1, parts, word, full, i_p, sharers, BT: gl.constexpr):
    """Write the program's sums of a shared tile; -> the shares of rows that it has to add up for others."""
    o_r = gl.arange(0, _HALF, layout=gl.SliceLayout(1, b_0.type.layout))
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(0, b_0.type.layout))
    p_part = parts + i_p * (2 * _HALF * BT) + o_r[:, None] * BT + o_t[None, :]
    gl.store(p_part, b_0)
    gl.store(p_part + _HALF * BT, b_1)
    gl.thread_barrier()
    before = count(word, 1, full)
    return gl.where((before & _ARRIVED) == sharers - 1, before >> _DECIDED, 0)  # the last to arrive


@gluon.jit
def decide(word, full, i_m, sharers, shares, CHUNKS: gl.constexpr, LOOKS: gl.constexpr):
    """Wait for the other programs of the tile for a limited time, and say for good whether they were all there.

    -> the shares that this program adds up: those it has, and its own unless it gave that up.
    """
    if i_m < CHUNKS:
        seen = gl.atomic_add(word, 0, sem="acquire", scope="gpu")
        looks = 1
        while ((seen & _ARRIVED) < sharers) & (looks < LOOKS):
            seen = gl.atomic_add(word, 0, sem="acquire", scope="gpu")
            looks += 1
        before = count(word, 1 << (i_m + _DECIDED), full)
        shares = shares | gl.where((before & _ARRIVED) == sharers, 1 << i_m, 0)
    return shares


@gluon.jit
def add_parts(
    y, bias, parts, word, full, shares, i_p, sharers, row, T, N,
    GATED: gl.constexpr, BIAS: gl.constexpr, BT: gl.constexpr, AT_ONCE: gl.constexpr, LOOKS: gl.constexpr,
):  # fmt: skip
    """Add up the rows of x of the shares of a tile that are this program's: the chunks i_m, i_m + sharers, ..."""
    C: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [gl.num_warps(), 1], [1, 0])  # of sums [HALF, CHUNK]
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    CHUNKS: gl.constexpr = BT // _CHUNK
    o_r, o_t = gl.arange(0, _HALF, layout=gl.SliceLayout(1, C)), gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, C))
    i_m = i_p % sharers
    shares = decide(word, full, i_m, sharers, shares, CHUNKS, LOOKS)
    gl.thread_barrier()
    for i_c in range(CHUNKS):
        if (shares >> (i_c % sharers)) & 1 != 0:
            b_0 = gl.zeros([_HALF, _CHUNK], gl.float32, layout=C)
            b_1 = gl.zeros([_HALF, _CHUNK], gl.float32, layout=C)
            p_part = parts + (i_p - i_m) * (2 * _HALF * BT) + i_c * _CHUNK + o_r[:, None] * BT + o_t[None, :]
            for i in range(0, sharers, AT_ONCE):
                some_0, some_1 = (), ()
                for u in gl.static_range(AT_ONCE):
                    p, more = p_part + (i + u) * (2 * _HALF * BT), i + u < sharers
                    some_0 = some_0 + (gl.load(p, mask=more, other=0.0, cache_modifier=".cg"),)
                    some_1 = some_1 + (gl.load(p + _HALF * BT, mask=more, other=0.0, cache_modifier=".cg"),)
                for u in gl.static_range(AT_ONCE):
                    b_0 += some_0[u]
                    b_1 += some_1[u]
            finish(b_0, b_1, y, bias, row, i_c * _CHUNK, T, N, GATED, BIAS, L)


@gluon.jit
def worker(
    y, bias, parts, arrivals, x_tiles, w_tiles, full_bars, free_bars, shared, tile, sharers, i_p, P, steps, whole, T, N,
    GATED: gl.constexpr, BIAS: gl.constexpr, ROWS: gl.constexpr, BT: gl.constexpr, S: gl.constexpr,
    AT_ONCE: gl.constexpr, LOOKS: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    word = arrivals + i_p // sharers
    full = sharers + (((1 << gl.minimum(sharers, BT // _CHUNK)) - 1) << _DECIDED)  # all arrived, all decided
    shares = gl.to_tensor(0)
    cuda.gdc_wait()  # before this, nothing is written
    if AT_ONCE > 0:  # noqa: SIM102, known to the compiler
        if shared > 0:
            b_0, b_1 = multiply(x_tiles, w_tiles, full_bars, free_bars, 0, shared, BT, S)
            shares = leave_part(b_0, b_1, parts, word, full, i_p, sharers, BT)
            if whole == 0:
                add_parts(
                    y, bias, parts, word, full, shares, i_p, sharers, tile * ROWS, T, N,
                    GATED, BIAS, BT, AT_ONCE, LOOKS,
                )  # fmt: skip
    for i in range(whole):
        if AT_ONCE > 0:  # noqa: SIM102
            if (shared > 0) & (i == whole - 1):
                add_parts(
                    y, bias, parts, word, full, shares, i_p, sharers, tile * ROWS, T, N,
                    GATED, BIAS, BT, AT_ONCE, LOOKS,
                )  # fmt: skip
        b_0, b_1 = multiply(x_tiles, w_tiles, full_bars, free_bars, shared + i * steps, steps, BT, S)
        finish(b_0, b_1, y, bias, (i * P + i_p) * ROWS, 0, T, N, GATED, BIAS, L)


@gluon.jit(do_not_specialize=["T", "steps", "whole", "tiles", "sharers"])
def linear_rows_hopper_kernel(
    x,  # [T, K], in boxes [BT, BK]
    w,  # [N, K], GATED: [2 N, K], in boxes [HALF, BK]
    bias,
    y,  # [T, N]
    parts,  # [P, 2 HALF, BT] f32
    arrivals,  # [P] int32, a word for each shared tile; zeros before and after
    T,
    N,
    steps,  # of BK columns
    whole,  # tiles of each program
    tiles,  # that are shared
    sharers,  # of each
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    BT: gl.constexpr,
    S: gl.constexpr,
    AT_ONCE: gl.constexpr,  # parts that are loaded together; 0: no tile is shared
    LOOKS: gl.constexpr,  # how often a program looks for the parts of others
):
    ROWS: gl.constexpr = _HALF if GATED else 2 * _HALF
    i_p, P = gl.program_id(0), gl.num_programs(0)
    second = N if GATED else _HALF
    i_shared, i_m = i_p // sharers, i_p % sharers
    begin = i_m * steps // sharers
    shared = gl.where(i_shared < tiles, (i_m + 1) * steps // sharers - begin, 0)  # steps
    tile = whole * P + i_shared
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [S, BT, _BK], x.layout)
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * S, _HALF, _BK], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (worker, (
                y, bias, parts, arrivals, x_tiles, w_tiles, full, free, shared, tile, sharers, i_p, P, steps, whole,
                T, N, GATED, BIAS, ROWS, BT, S, AT_ONCE, LOOKS,
            )),
            (loader, (
                x, w, x_tiles, w_tiles, full, free, shared, begin, tile, shared + whole * steps, i_p, P, steps, second,
                ROWS, BT, S,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip
