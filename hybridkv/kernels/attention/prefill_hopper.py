"""attention_prefill on Hopper GPUs: bf16 products, pages of a multiple of 64 entries, heads of 64, 128 or 256 channels.

Written in Gluon, the language below Triton: here layouts, shared memory and the work of each warp are explicit. A
program has one KV head and 128 rows (query, head), as in attention_prefill_kernel. Its warps share the work:

    1 loader        brings tiles of 64 keys and values into shared memory with the copy engine, two of each
    2 x 4 workers   64 rows each: S = q K^T, softmax, O += P V

A worker starts the product S of a tile together with P V of the tile before, and computes the softmax of the one while
the tensor cores are busy with the other. `full` tells the workers that a tile has arrived, `empty` tells the loader
that both workers have read it.

Tiles are taken in ascending order from the first key on, and a row's numbers come from that row alone, so a query's
result has the same bits wherever it lies in a block. The keys may come in several launches, divided at tiles: what a
row has gathered so far (its largest score, the sum of its weights, its sum of values) is then kept in `state_*`.
"""

from __future__ import annotations

from hybridkv.kernels.attention.dequantise import KEYS
from hybridkv.kernels.attention.prefill_plan import ROWS
from hybridkv.kernels.gluon import (
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

WARPS = 4  # of a worker
WORKER_REGISTERS, LOADER_REGISTERS = 240, 24  # of a thread
_HALF, _BN, _TILES, _WARPS = gl.constexpr(ROWS // 2), gl.constexpr(KEYS), gl.constexpr(2), gl.constexpr(WARPS)
_WORKER_REGISTERS, _LOADER_REGISTERS = gl.constexpr(WORKER_REGISTERS), gl.constexpr(LOADER_REGISTERS)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def loader(
    k_tensor, v_tensor, v_pool, p_table, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, count, held,
    P: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    page = gl.load(p_table, mask=count > 0, other=0)
    for i in range(0, count):
        i_tile, phase = i % _TILES, (i // _TILES) & 1
        row = page * P + (i * _BN) % P
        page = gl.load(p_table + (i + 1) * _BN // P, mask=i + 1 < count, other=0)
        mbarrier.wait(k_empty.index(i_tile), phase ^ 1)
        mbarrier.expect(k_full.index(i_tile), _BN * D * 2)
        tma.async_copy_global_to_shared(k_tensor, [row, 0], k_full.index(i_tile), k_tiles.index(i_tile))
        mbarrier.wait(v_empty.index(i_tile), phase ^ 1)
        if (i + 1) * _BN <= held:
            mbarrier.expect(v_full.index(i_tile), _BN * D * 2)
            tma.async_copy_global_to_shared(v_tensor, [row, 0], v_full.index(i_tile), v_tiles.index(i_tile))
        else:  # zeros where the page holds nothing yet: the weights there are 0, and 0 x NaN is NaN
            L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
            o_d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
            for r in gl.static_range(0, _BN, 8):
                o_n = r + gl.arange(0, 8, layout=gl.SliceLayout(1, L))
                p_v = v_pool + (row + o_n).to(gl.int64)[:, None] * D + o_d[None, :]
                m_v = (i * _BN + o_n < held)[:, None]
                async_copy.async_copy_global_to_shared(v_tiles.index(i_tile).slice(r, 8), p_v, mask=m_v)
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()  # the tensor cores read what these threads wrote
            gl.thread_barrier()
            mbarrier.arrive(v_full.index(i_tile), count=1)


@gluon.jit
def weigh(b_s, b_seen, b_m, b_z, i, scale, MASK: gl.constexpr):
    """A tile's scores -> weights, what is left of the earlier sums, and the new largest score and sum of weights."""
    if MASK:
        o_n = i * _BN + gl.arange(0, _BN, layout=gl.SliceLayout(0, b_s.type.layout))
        b_s = gl.where(o_n[None, :] < b_seen[:, None], b_s, float("-inf"))
    b_top = gl.maximum(b_m, gl.max(b_s, 1) * scale)
    b_base = gl.where(b_top == float("-inf"), 0.0, b_top)  # a row that sees nothing yet: weights 0, not NaN
    b_p = gl.exp2(b_s * scale - b_base[:, None])
    b_keep = gl.exp2(b_m - b_base)
    return b_p, b_keep, b_top, b_z * b_keep + gl.sum(b_p, 1)


@gluon.jit
def join_tile(
    q_half, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, b_p, b_m, b_z, b_o, b_seen, i, scale,
    MASK: gl.constexpr,
):  # fmt: skip
    """Scores and weights of tile i, beside the weighted values of tile i - 1."""
    A: gl.constexpr = b_p.type.layout
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _BN, 16])
    i_k, i_v = i % _TILES, (i - 1) % _TILES
    b_0 = gl.zeros([_HALF, _BN], gl.float32, layout=S)
    mbarrier.wait(k_full.index(i_k), (i // _TILES) & 1)
    b_s = warpgroup_mma(q_half, k_tiles.index(i_k).permute((1, 0)), b_0, use_acc=False, is_async=True)
    b_o = warpgroup_mma(b_p, v_tiles.index(i_v), b_o, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=[b_s])
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(i_k), count=1)
    b_w, b_keep, b_m, b_z = weigh(b_s, b_seen, b_m, b_z, i, scale, MASK)
    b_p = gl.convert_layout(b_w.to(gl.bfloat16), A)
    mbarrier.wait(v_full.index(i_k), (i // _TILES) & 1)  # here, so that the assembler takes the weights before the wait
    b_o, b_p = warpgroup_mma_wait(0, deps=[b_o, b_p])
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(i_v), count=1)
    b_o = b_o * gl.convert_layout(b_keep, gl.SliceLayout(1, b_o.type.layout))[:, None]
    return b_p, b_m, b_z, b_o


@gluon.jit
def attend_range(
    q_half, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, b_m, b_z, b_o, b_seen, first, last, whole, scale,
    FIRST: gl.constexpr,
):  # fmt: skip
    """Tiles first .. last - 1, of which all rows see those before `whole`. The last values are not given back."""
    V: gl.constexpr = b_o.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, V, 2)  # of weights [64, BN]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _BN, 16])
    i_first, phase = first % _TILES, (first // _TILES) & 1
    b_0 = gl.zeros([_HALF, _BN], gl.float32, layout=S)
    mbarrier.wait(k_full.index(i_first), phase)
    b_s = warpgroup_mma(q_half, k_tiles.index(i_first).permute((1, 0)), b_0, use_acc=False)
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(i_first), count=1)
    b_w, b_keep, b_m, b_z = weigh(b_s, b_seen, b_m, b_z, first, scale, True)
    if not FIRST:
        b_o = b_o * gl.convert_layout(b_keep, gl.SliceLayout(1, V))[:, None]
    b_p = gl.convert_layout(b_w.to(gl.bfloat16), A)
    mbarrier.wait(v_full.index(i_first), phase)
    whole = gl.maximum(whole, first + 1)
    for i in range(first + 1, gl.minimum(whole, last)):
        b_p, b_m, b_z, b_o = join_tile(
            q_half, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, b_p, b_m, b_z, b_o, b_seen, i, scale, False
        )
    for i in range(whole, last):
        b_p, b_m, b_z, b_o = join_tile(
            q_half, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, b_p, b_m, b_z, b_o, b_seen, i, scale, True
        )
    return b_m, b_z, warpgroup_mma(b_p, v_tiles.index((last - 1) % _TILES), b_o)


@gluon.jit
def halves(b_o):
    """[64, D] -> its first and its last columns, without a move."""
    D: gl.constexpr = b_o.shape[1]
    return gl.split(b_o.reshape([_HALF, 2, D // 2]).permute((0, 2, 1)))


@gluon.jit
def join_split(b_o, p_state, m_v, b_old, b_new, there, stays):
    """b_o is what a split gathered -> old * what lies at p_state (if `there`) + new * b_o, which goes back there if it
    stays. Half the columns at a time: a thread has no registers for all of both.
    """
    D: gl.constexpr = b_o.shape[1]
    V: gl.constexpr = b_o.type.layout
    b_lo, b_hi = halves(b_o)
    L: gl.constexpr = b_lo.type.layout
    b_old = gl.convert_layout(b_old, gl.SliceLayout(1, L))[:, None]
    b_new = gl.convert_layout(b_new, gl.SliceLayout(1, L))[:, None]
    p_lo, p_hi = halves(p_state)
    m_row = gl.convert_layout(m_v, gl.SliceLayout(1, L))[:, None]
    b_lo = gl.fma(gl.load(p_lo, mask=m_row & there, other=0.0), b_old, b_lo * b_new)
    gl.store(p_lo, b_lo, mask=m_row & stays)
    b_hi = gl.fma(gl.load(p_hi, mask=m_row & there, other=0.0), b_old, b_hi * b_new)
    gl.store(p_hi, b_hi, mask=m_row & stays)
    b_all = gl.join(b_lo, b_hi).permute((0, 2, 1)).reshape([_HALF, D])
    return gl.convert_layout(b_all, V, assert_trivial=True)


@gluon.jit
def work(
    q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    q, out, lse, lse_index, state_o, state_m, state_z, scale, i_g, i_s, i_t, n, i_m, ahead, limit, count, T, H,
    stride_q_t, stride_q_h, GROUP: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    SPLIT: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _BN, 16])  # of scores [64, BN]
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, D, 16])  # of sums [64, D]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [_WARPS, 1], [1, 0])  # of what is read and written

    i_m += W * _HALF
    q_half = q_tile.slice(W * _HALF, _HALF)
    o_row = i_m + gl.arange(0, _HALF, layout=gl.SliceLayout(1, L))
    o_t, o_h = o_row // GROUP, i_g * GROUP + o_row % GROUP  # row = query * GROUP + head
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    p_q = q + ((i_t + o_t) * stride_q_t + o_h * stride_q_h)[:, None] + o_d[None, :]
    async_copy.async_copy_global_to_shared(q_half, p_q, mask=(o_t < n)[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()

    o_row = i_m + gl.arange(0, _HALF, layout=gl.SliceLayout(1, S))
    o_t, o_h = o_row // GROUP, i_g * GROUP + o_row % GROUP
    b_seen = gl.minimum(ahead + o_t + 1, limit)
    b_m = gl.full([_HALF], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
    b_z = gl.zeros([_HALF], gl.float32, layout=gl.SliceLayout(1, S))
    b_o = gl.zeros([_HALF, D], gl.float32, layout=V)
    o_sum = (i_s * T + i_t + o_t) * H + o_h  # [64] of state_m and state_z
    o_v = i_m + gl.arange(0, _HALF, layout=gl.SliceLayout(1, V))
    m_v = (o_v // GROUP < n)[:, None]
    o_state = (((i_s * T + i_t + o_v // GROUP) * H + i_g * GROUP + o_v % GROUP) * D)[:, None]
    o_state += gl.arange(0, D, layout=gl.SliceLayout(0, V))[None, :]
    if not FIRST:
        b_m = gl.load(state_m + o_sum, mask=o_t < n, other=float("-inf"))
        b_z = gl.load(state_z + o_sum, mask=o_t < n, other=0.0)
        b_o = gl.load(state_o + o_state, mask=m_v, other=0.0)

    whole = gl.minimum(ahead + i_m // GROUP + 1, limit) // _BN  # tiles that all rows see
    if SPLIT == 0:
        if count > 0:
            b_m, b_z, b_o = attend_range(
                q_half, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, b_m, b_z, b_o, b_seen, 0, count, whole,
                scale, FIRST,
            )  # fmt: skip
    else:
        b_no, b_0z, b_0o = b_m, b_z, b_o
        m_rows = o_v // GROUP < n
        for first in range(0, count, SPLIT // _BN):
            last = gl.minimum(first + SPLIT // _BN, count)
            s_m, s_z, b_o = attend_range(
                q_half, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, b_no, b_0z, b_0o, b_seen, first, last,
                whole, scale, True,
            )  # fmt: skip
            gl.thread_barrier()
            mbarrier.arrive(v_empty.index((last - 1) % _TILES), count=1)
            b_top = gl.maximum(b_m, s_m)
            b_base = gl.where(b_top == float("-inf"), 0.0, b_top)
            b_old, b_new = gl.exp2(b_m - b_base), gl.exp2(s_m - b_base)
            b_m, b_z = b_top, gl.fma(b_z, b_old, s_z * b_new)
            if LAST:
                b_o = join_split(b_o, state_o + o_state, m_rows, b_old, b_new, first > 0, last < count)

    if LAST:
        b_z = gl.where(b_z == 0, 1.0, b_z)  # a row that sees nothing gives zeros, and a sum of -inf
        b_o = b_o * gl.convert_layout(1 / b_z, gl.SliceLayout(1, V))[:, None]
        if SPLIT > 0:
            b_o = b_o + 0.0  # a split that a row does not see makes 0 of -0, so all do
        gl.thread_barrier()
        q_half.store(b_o.to(gl.bfloat16))  # to be written by whole rows
        gl.thread_barrier()
        o_row = i_m + gl.arange(0, _HALF, layout=gl.SliceLayout(1, L))
        o_out = ((i_t + o_row // GROUP) * H + i_g * GROUP + o_row % GROUP) * D
        gl.store(out + o_out[:, None] + o_d[None, :], q_half.load(L), mask=(o_row // GROUP < n)[:, None])
        if lse is not None:
            b_at = gl.load(lse_index + i_t + o_t, mask=o_t < n, other=-1)
            gl.store(lse + b_at * H + o_h, (b_m + gl.log2(b_z)) * _LN_2, mask=b_at >= 0)
    else:
        gl.store(state_m + o_sum, b_m, mask=o_t < n)
        gl.store(state_z + o_sum, b_z, mask=o_t < n)
        gl.store(state_o + o_state, b_o, mask=m_v)


@gluon.jit
def worker(
    q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    q, out, lse, lse_index, state_o, state_m, state_z, scale, i_g, i_s, i_t, n, i_m, ahead, limit, count, T, H,
    stride_q_t, stride_q_h, GROUP: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    SPLIT: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    has_rows = i_m + W * _HALF < n * GROUP
    if SPLIT == 0:
        has_rows = True
    if has_rows:
        work(
            q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            q, out, lse, lse_index, state_o, state_m, state_z, scale, i_g, i_s, i_t, n, i_m, ahead, limit, count, T, H,
            stride_q_t, stride_q_h, GROUP, D, FIRST, LAST, SPLIT, W,
        )  # fmt: skip
    else:  # a single token's rows are all the other worker's
        for i in range(0, count):
            i_tile, phase = i % _TILES, (i // _TILES) & 1
            mbarrier.wait(k_full.index(i_tile), phase)
            mbarrier.arrive(k_empty.index(i_tile), count=1)
            mbarrier.wait(v_full.index(i_tile), phase)
            mbarrier.arrive(v_empty.index(i_tile), count=1)


SLICED = ("table", "rows", "lengths", "lse", "lse_index", "state_m", "state_z")
UNKNOWN = ("T", "H", "key_first", "key_size", "stride_table_b", "stride_table_g", "stride_length_b", "stride_length_g")


# not compiled again for other values, or for slices
@gluon.jit(do_not_specialize=UNKNOWN, do_not_specialize_on_alignment=SLICED)
def prefill_hopper_kernel(
    q,  # [T, H, D] bf16
    k_tensor,  # [N * P, D] bf16, in boxes [64, D]
    v_tensor,
    v_pool,  # the same values
    table,  # [slots, G, N]
    rows,  # [B] each request's row of the table, -1: padding
    lengths,  # [B, G]
    blocks,  # [blocks, 4] int32: request, its first query, its queries, the block's first row
    out,  # [T, H, D]
    lse,  # [R, H] f32
    lse_index,  # [T]
    state_o,  # [splits, T, H, D] f32, where the keys come in pieces or are split over programs
    state_m,  # [splits, T, H] f32
    state_z,
    scale,  # times log2(e)
    key_first,  # the entry that lies first in the table
    key_size,  # entries that a program takes; 0: the stream's, divided evenly
    T,
    H,
    stride_q_t,
    stride_q_h,
    stride_table_b,
    stride_table_g,
    stride_length_b,
    stride_length_g,
    GROUP: gl.constexpr,  # query heads that share a KV head
    P: gl.constexpr,
    D: gl.constexpr,
    FIRST: gl.constexpr,  # piece
    LAST: gl.constexpr,
    SPLIT: gl.constexpr = 0,  # exact mode: keys after which what was gathered is joined to what was before
):
    i_g = gl.program_id(0)
    p_block = blocks + gl.program_id(1) * 4
    i_b = gl.load(p_block).to(gl.int64)
    i_t = gl.load(p_block + 1).to(gl.int64)
    n = gl.load(p_block + 2)
    i_m = gl.load(p_block + 3)
    length = gl.load(lengths + i_b * stride_length_b + i_g * stride_length_g).to(gl.int32)
    i_table = gl.load(rows + i_b)
    length = gl.where(i_table >= 0, length, 0)
    p_table = table + gl.maximum(i_table, 0) * stride_table_b + i_g * stride_table_g
    i_s = gl.program_id(2)
    own_size = (length + gl.num_programs(2) * P - 1) // (gl.num_programs(2) * P) * P
    key_size = gl.where(key_size == 0, own_size, key_size)
    p_table += i_s * key_size // P
    key_first += i_s * key_size
    held = gl.minimum(length - key_first, key_size)  # entries of the program
    ahead = length - n - key_first  # entries from its first one on to the request's first query
    end = gl.minimum(ahead + gl.minimum((i_m + 2 * _HALF - 1) // GROUP, n - 1) + 1, held)  # what the last row sees
    count = gl.maximum((end + _BN - 1) // _BN, 0)
    if SPLIT > 0 and not LAST:
        n = gl.where(count > 0, n, 0)  # nothing is written of a split without keys

    M: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [2 * _HALF, D], M)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [_TILES, _BN, D], M)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [_TILES, _BN, D], M)
    k_full = gl.allocate_shared_memory(gl.int64, [_TILES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_TILES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_TILES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [_TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_TILES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # both workers
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()  # the copy engine sees the barriers
    gl.warp_specialize(
        [
            (worker, (
                q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                q, out, lse, lse_index, state_o, state_m, state_z, scale,
                i_g, i_s, i_t, n, i_m, ahead, held, count, T, H, stride_q_t, stride_q_h,
                GROUP, D, FIRST, LAST, SPLIT, 0,
            )),
            (worker, (
                q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                q, out, lse, lse_index, state_o, state_m, state_z, scale,
                i_g, i_s, i_t, n, i_m, ahead, held, count, T, H, stride_q_t, stride_q_h,
                GROUP, D, FIRST, LAST, SPLIT, 1,
            )),
            (loader, (
                k_tensor, v_tensor, v_pool, p_table, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, count, held,
                P, D,
            )),
        ],
        [_WARPS, 1],
        [_WORKER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
