"""attention_sparse on Hopper GPUs, at the released width: 512 channels, the last 64 rotary, products in bf16.

In Gluon. As in attention_sparse_kernel a program has one token, 64 heads and a part of the token's keys, in tiles of 64
keys of the window or of the entries. Its warps share the work:

    8 loaders   find a tile's rows, read them, and leave them in shared memory as bf16
    4 scorers   S = q K^T, softmax, and O += P K for the left half of the channels
    4 others    O += P K for the right half

Few tokens: a program has fewer heads, the rest of its 64 rows are zeros, so that it writes less of what is joined.

Two tiles lie in shared memory. `full` tells the scorers that a tile has come, `empty` the loaders that both halves have
been read, so the loads of one tile run beside the products of the other. `ready` tells the others that weights have
come, `taken` the scorers that they have been read.
"""

from __future__ import annotations

from hybridkv.kernels.attention.tile import LOG2_E
from hybridkv.kernels.gluon import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma
from hybridkv.kernels.v4.sparse_loaders import LOADERS, ROPE, D, loaders

SCORERS = 4  # warps; the others are as many
LOADER_REGISTERS, OTHER_REGISTERS = 80, 160  # of a thread; the scorers get what is left, 192
_D, _ROPE, _KEPT, _HALF = gl.constexpr(D), gl.constexpr(ROPE), gl.constexpr(D - ROPE), gl.constexpr(D // 2)
_BH, _BN, _TILES = gl.constexpr(64), gl.constexpr(64), gl.constexpr(2)
_WIDE = gl.constexpr(128)  # channels of one product: with more, threads have too few registers
_SCORERS, _LOADERS = gl.constexpr(SCORERS), gl.constexpr(LOADERS)
_LOADER_REGISTERS, _OTHER_REGISTERS = gl.constexpr(LOADER_REGISTERS), gl.constexpr(OTHER_REGISTERS)
_LOG2_E = gl.constexpr(LOG2_E)


@gluon.jit
def derotate_tile(b_o, p_cos, p_sin):
    """b_o [BH, D / 2] f32, the right half, rotated back by the angles of one token."""
    b_even, b_odd = gl.split(gl.reshape(b_o, [_BH, _HALF // 2, 2]))
    o_p = gl.arange(0, _HALF // 2, layout=gl.SliceLayout(0, b_even.type.layout)) - (_KEPT - _HALF) // 2
    b_cos = gl.load(p_cos + o_p, mask=o_p >= 0, other=1.0)[None, :]
    b_sin = gl.load(p_sin + o_p, mask=o_p >= 0, other=0.0)[None, :]
    return gl.reshape(gl.join(b_even * b_cos + b_odd * b_sin, b_odd * b_cos - b_even * b_sin), [_BH, _HALF])


@gluon.jit
def write_part(b_o, part, i_t, i_s, i_h, stop, begin, end, H, splits, FIRST: gl.constexpr):
    V: gl.constexpr = b_o.type.layout
    o_row = i_h + gl.arange(0, _BH, layout=gl.SliceLayout(1, V))
    o_d = FIRST + gl.arange(0, _HALF, layout=gl.SliceLayout(0, V))
    p_part = part + ((i_t * H + o_row) * splits + i_s)[:, None] * _D + o_d[None, :]
    gl.store(p_part, b_o, mask=(o_row < stop)[:, None] & (begin < end))


@gluon.jit
def write_out(b_o, q_tile, out, i_t, i_h, stop, real, H, FIRST: gl.constexpr):
    """By whole rows, through the queries' place."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_SCORERS, 1], [1, 0])
    q_tile.store(gl.where(real, b_o, 0.0).to(gl.bfloat16))
    o_row = i_h + gl.arange(0, _BH, layout=gl.SliceLayout(1, L))
    o_d = FIRST + gl.arange(0, _HALF, layout=gl.SliceLayout(0, L))
    gl.thread_barrier()
    gl.store(out + (i_t * H + o_row)[:, None] * _D + o_d[None, :], q_tile.load(L), mask=(o_row < stop)[:, None])


@gluon.jit
def scorers(
    q_tiles, k_tiles, p_tile, keeps, biases, full, empty, ready, taken, p_q, stride_q_h,
    sink, out, part, lse, scale, i_t, i_s, i_h, stop, real, begin, end, H, splits, SPLIT: gl.constexpr,
    HELD: gl.constexpr,  # the weights of the left half stay in registers
):  # fmt: skip
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_SCORERS, 1], [1, 0])
    o_q = i_h + gl.arange(0, _BH, layout=gl.SliceLayout(1, Q))
    o_c = gl.arange(0, _HALF, layout=gl.SliceLayout(0, Q))
    p_q = p_q + o_q[:, None] * stride_q_h + o_c[None, :]
    b_left = gl.load(p_q, mask=(o_q < stop)[:, None], other=0.0)
    b_right = gl.load(p_q + _HALF, mask=(o_q < stop)[:, None], other=0.0)
    q_tiles.index(0).store(b_left)  # while the loaders find the first keys
    q_tiles.index(1).store(b_right)
    fence_async_shared()
    gl.thread_barrier()
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_SCORERS, 1], [16, _BN, 16])  # of scores [BH, BN]
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_SCORERS, 1], [16, _WIDE, 16])  # of sums [BH, D / 2]
    b_0 = gl.zeros([_BH, _BN], gl.float32, layout=S)
    b_m = gl.full([_BH], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
    b_z = gl.zeros([_BH], gl.float32, layout=gl.SliceLayout(1, S))
    b_o = gl.zeros([_BH, _HALF], gl.float32, layout=V)
    i_tile, phase, phase_w = 0, 0, 1
    for _ in range(begin, end, _BN):
        k_left, k_right = k_tiles.index(2 * i_tile), k_tiles.index(2 * i_tile + 1)
        mbarrier.wait(full.index(i_tile), phase)
        b_s = warpgroup_mma(q_tiles.index(0), k_left.permute((1, 0)), b_0, use_acc=False, is_async=True)
        b_s = warpgroup_mma(q_tiles.index(1), k_right.permute((1, 0)), b_s)
        b_s = b_s * scale + biases.index(i_tile).load(gl.SliceLayout(0, S))[None, :]
        b_top = gl.maximum(b_m, gl.max(b_s, 1))
        b_base = gl.where(b_top == float("-inf"), 0.0, b_top)  # nothing seen yet: weights 0, not NaN
        b_p = gl.exp2(b_s - b_base[:, None])
        b_keep = gl.exp2(b_m - b_base)
        b_m = b_top
        b_weight = b_p.to(gl.bfloat16)
        mbarrier.wait(taken, phase_w)  # the others have read the last weights
        p_tile.store(b_weight)
        keeps.store(b_keep)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready, count=1)
        b_z = b_z * b_keep + gl.sum(b_p, 1)
        b_o = b_o * gl.convert_layout(b_keep, gl.SliceLayout(1, V))[:, None]
        if HELD:
            b_o = warpgroup_mma(gl.convert_layout(b_weight, gl.DotOperandLayout(0, V, 2)), k_left, b_o)
        else:
            b_o = warpgroup_mma(p_tile, k_left, b_o)
        gl.thread_barrier()  # all four have read the tile
        mbarrier.arrive(empty.index(i_tile), count=1)
        phase_w = phase_w ^ 1
        i_tile += 1
        if i_tile == _TILES:
            i_tile, phase = 0, phase ^ 1

    o_h = i_h + gl.arange(0, _BH, layout=gl.SliceLayout(1, S))
    if SPLIT:
        b_z = gl.where(b_z == 0, 1.0, b_z)  # no key in these tiles: zeros, of weight 2^-inf
        gl.store(lse + (i_t * H + o_h) * splits + i_s, b_m + gl.log2(b_z), mask=o_h < stop)
        b_w = 1 / b_z
    else:
        b_sink = gl.load(sink + o_h, mask=o_h < stop, other=0.0).to(gl.float32) * _LOG2_E
        b_top = gl.maximum(b_m, b_sink)
        b_keep = gl.exp2(b_m - b_top)
        b_w = b_keep / (b_z * b_keep + gl.exp2(b_sink - b_top))
    mbarrier.wait(taken, phase_w)
    keeps.store(b_w)
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)
    b_o = b_o * gl.convert_layout(b_w, gl.SliceLayout(1, V))[:, None]
    if SPLIT:
        write_part(b_o, part, i_t, i_s, i_h, stop, begin, end, H, splits, 0)
    else:
        write_out(b_o, q_tiles.index(0), out, i_t, i_h, stop, real, H, 0)


@gluon.jit
def others(
    q_tiles, k_tiles, p_tile, keeps, empty, ready, taken, p_cos, p_sin, out, part,
    i_t, i_s, i_h, stop, real, begin, end, H, splits, SPLIT: gl.constexpr,
):  # fmt: skip
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_SCORERS, 1], [16, _WIDE, 16])
    b_o = gl.zeros([_BH, _HALF], gl.float32, layout=V)
    i_tile, phase_w = 0, 0
    for _ in range(begin, end, _BN):
        mbarrier.wait(ready, phase_w)
        b_o = b_o * keeps.load(gl.SliceLayout(1, V))[:, None]
        b_o = warpgroup_mma(p_tile, k_tiles.index(2 * i_tile + 1), b_o)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(i_tile), count=1)
        mbarrier.arrive(taken, count=1)
        phase_w = phase_w ^ 1
        i_tile += 1
        if i_tile == _TILES:
            i_tile = 0
    mbarrier.wait(ready, phase_w)
    b_o = b_o * keeps.load(gl.SliceLayout(1, V))[:, None]
    if SPLIT:
        write_part(b_o, part, i_t, i_s, i_h, stop, begin, end, H, splits, _HALF)
    else:
        write_out(derotate_tile(b_o, p_cos, p_sin), q_tiles.index(1), out, i_t, i_h, stop, real, H, _HALF)


@gluon.jit(do_not_specialize=["H", "K", "N", "splits"])
def attention_hopper_kernel(
    q,  # [T, H, D] bf16
    ring,  # [S, R, width]
    pages,  # [N, P, width]
    table,  # [slots, N]
    chosen,  # [T, K]
    rows,  # [B]
    slots,  # [B]
    owner,  # [T]
    positions,  # [T]
    sink,  # [H]
    cos,  # [T, ROPE / 2]
    sin,
    out,  # [T, H, D] where there is one split
    part,  # [T, H, splits, D] f32, else
    lse,  # [T, H, splits] f32, in powers of two
    scale,  # times log2(e)
    stride_q_t,
    stride_q_h,
    stride_table,
    stride_chosen,
    H,
    K,
    N,
    splits,
    WINDOW: gl.constexpr,
    RATIO: gl.constexpr,
    R: gl.constexpr,
    P: gl.constexpr,
    VALUE: gl.constexpr,  # of a row of values, and
    SCALE: gl.constexpr,  # of a row of scales: elements of ring and pages
    QUANTISED: gl.constexpr,
    E8M0: gl.constexpr,  # else one f32 scale
    ENTRIES: gl.constexpr,
    CHOSEN: gl.constexpr,
    SPLIT: gl.constexpr,
    OVERLAP: gl.constexpr,  # join_sparse_kernel may come at once, and wait
    EARLY: gl.constexpr,  # as this one does for the kernel before it
    HEADS: gl.constexpr,  # of a program: 64, or fewer, so that more programs share what few tokens need
):
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], gl.int32, False, 1)
    if OVERLAP:  # not before: the join reads what was there before this kernel, without a wait
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], gl.int32, False, 1)
    blocks = (H + HEADS - 1) // HEADS
    i_t = (gl.program_id(0) // blocks).to(gl.int64)
    i_h = (gl.program_id(0) % blocks) * HEADS
    stop = gl.minimum(i_h + HEADS, H)
    i_s = gl.program_id(1)
    position = gl.load(positions + i_t).to(gl.int32)
    i_b = gl.load(owner + i_t)
    i_slot, i_ring = gl.load(slots + i_b), gl.load(rows + i_b)
    real = (i_slot >= 0) & (i_ring >= 0)  # else padding, which has no keys
    newest = (position.to(gl.uint32) % R).to(gl.int32)
    count_w = gl.where(real, gl.minimum(position + 1, WINDOW), 0)
    first = (count_w + _BN - 1) // _BN * _BN  # where the entries' tiles begin
    visible, count_e = 0, 0
    p_table, p_chosen = owner, owner  # not read
    if ENTRIES:
        visible = gl.where(real, gl.minimum((position + 1) // RATIO, N * P), 0)
        count_e = visible
        p_table = table + i_slot * stride_table
    if CHOSEN:
        count_e = gl.where(real, K, 0)
        p_chosen = chosen + i_t * stride_chosen
    count = first + count_e
    each = ((count + _BN - 1) // _BN + splits - 1) // splits * _BN
    begin = i_s * each
    end = gl.minimum(begin + each, count)

    M: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, _BH, _HALF], M)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * _TILES, _BN, _HALF], M)
    k_words = k_tiles  # the same, of two channels a word; for codes
    if QUANTISED:
        k_words = k_tiles._reinterpret(gl.int32, [2 * _TILES, _BN, _HALF // 2], gl.NVMMASharedLayout(128, 32, 2))
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [_BH, _BN], M)
    W: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keeps = gl.allocate_shared_memory(gl.float32, [_BH], W)
    biases = gl.allocate_shared_memory(gl.float32, [_TILES, _BN], W)
    full = gl.allocate_shared_memory(gl.int64, [_TILES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_TILES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_TILES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(ready, count=1)
    mbarrier.init(taken, count=1)
    p_cos, p_sin = cos + i_t * (_ROPE // 2), sin + i_t * (_ROPE // 2)
    HELD: gl.constexpr = HEADS < _BH
    gl.warp_specialize(
        [
            (scorers, (
                q_tiles, k_tiles, p_tile, keeps, biases, full, empty, ready, taken, q + i_t * stride_q_t, stride_q_h,
                sink, out, part, lse, scale, i_t, i_s, i_h, stop, real, begin, end, H, splits, SPLIT, HELD,
            )),
            (others, (
                q_tiles, k_tiles, p_tile, keeps, empty, ready, taken, p_cos, p_sin, out, part,
                i_t, i_s, i_h, stop, real, begin, end, H, splits, SPLIT,
            )),
            (loaders, (
                ring + i_ring * (R * (VALUE + SCALE)), pages, p_table, p_chosen, k_tiles, k_words, biases, full, empty,
                begin, end, first, count_w, count_e, visible, newest,
                R, P, VALUE, SCALE, QUANTISED, E8M0, ENTRIES, CHOSEN,
            )),
        ],
        [_SCORERS, _LOADERS],
        [_OTHER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
