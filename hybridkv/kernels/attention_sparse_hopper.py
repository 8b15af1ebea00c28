"""attention_sparse on Hopper GPUs, at the released width: 512 channels, the last 64 rotary, products in bf16.

Written in Gluon, the language below Triton: here layouts, shared memory and the work of each warp are explicit. As in
attention_sparse_kernel a program has one token, 64 heads and a part of the token's keys, in tiles of 64 keys of the
window or of the entries. Its warps share the work:

    4 loaders   find a tile's rows, read them, and leave them in shared memory as bf16
    8 workers   S = q K^T, softmax, O += P K: half of S's keys, then half of O's channels, for each four of them

Two tiles lie in shared memory. `full` tells the workers that a tile has come, `empty` the loaders that it has been
read, so the loads of one tile run beside the products of the other.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hybridkv.kernels import small_floats
from hybridkv.kernels.attention_tile import LOG2_E

# kernels are a language of their own, which a Python type checker does not know
gluon: Any = import_module("triton.experimental.gluon")
gl: Any = import_module("triton.experimental.gluon.language")
hopper: Any = import_module("triton.experimental.gluon.language.nvidia.hopper")
async_copy, mbarrier = hopper.async_copy, hopper.mbarrier
fence_async_shared, warpgroup_mma = hopper.fence_async_shared, hopper.warpgroup_mma

D, ROPE = 512, 64
WORKERS, LOADERS = 8, 4  # warps
LOADER_REGISTERS = 96  # of a thread; the workers get what is left, 200
_D, _ROPE, _KEPT = gl.constexpr(D), gl.constexpr(ROPE), gl.constexpr(D - ROPE)
_GROUP = gl.constexpr(64)  # channels of a power-of-two scale
_BH, _BN, _TILES = gl.constexpr(64), gl.constexpr(64), gl.constexpr(2)
_WORKERS, _LOADERS, _LOADER_REGISTERS = gl.constexpr(WORKERS), gl.constexpr(LOADERS), gl.constexpr(LOADER_REGISTERS)
_LOG2_E = gl.constexpr(LOG2_E)

e4m3_value_tile = gluon.jit(small_floats.e4m3_value_tile.fn)
e8m0_value_tile = gluon.jit(small_floats.e8m0_value_tile.fn)


@gluon.jit
def derotate_tile(b_o, p_cos, p_sin):
    """b_o [BH, D] f32, turned back by the angles of one token."""
    b_even, b_odd = gl.split(gl.reshape(b_o, [_BH, _D // 2, 2]))
    o_p = gl.arange(0, _D // 2, layout=gl.SliceLayout(0, b_even.type.layout)) - _KEPT // 2
    b_cos = gl.load(p_cos + o_p, mask=o_p >= 0, other=1.0)[None, :]
    b_sin = gl.load(p_sin + o_p, mask=o_p >= 0, other=0.0)[None, :]
    return gl.reshape(gl.join(b_even * b_cos + b_odd * b_sin, b_odd * b_cos - b_even * b_sin), [_BH, _D])


@gluon.jit
def find_keys(
    i_n, first, count_w, count_e, visible, turn, p_table, p_chosen, L: gl.constexpr,
    R: gl.constexpr, P: gl.constexpr, ENTRIES: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    """Page (0: the ring's; -1: no key) and row in it of a tile's keys, each [BN] int32."""
    o_n = i_n + gl.arange(0, _BN, layout=gl.SliceLayout(1, L))
    b_row = turn - o_n
    b_row = gl.where(b_row < 0, b_row + R, b_row)
    b_page = gl.where(o_n < count_w, 0, -1)
    if ENTRIES:
        b_e = o_n - first
        m_e = (b_e >= 0) & (b_e < count_e)
        if CHOSEN:
            b_e = gl.load(p_chosen + b_e, mask=m_e, other=-1)
        b_e = b_e.to(gl.uint32)  # what is negative is past all that is visible
        m_e = m_e & (b_e < visible.to(gl.uint32))
        b_held = gl.load(p_table + b_e // P, mask=m_e, other=-1)
        b_page = gl.where(i_n < first, b_page, b_held)
        b_row = gl.where(i_n < first, b_row, (b_e % P).to(gl.int32))
    return b_page, b_row


@gluon.jit
def load_part(p_row, m_k, FIRST: gl.constexpr, COUNT: gl.constexpr, L: gl.constexpr):
    o_d = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, L))
    return gl.load(p_row[:, None] + o_d[None, :], mask=m_k[:, None], other=0)


@gluon.jit
def store_part(k_tile, b_code, b_scale, FIRST: gl.constexpr, E8M0: gl.constexpr):
    """Codes b_code [BN, COUNT] of channels from FIRST on, as bf16; b_scale [BN]: one f32, or a byte for each group."""
    COUNT: gl.constexpr = b_code.shape[1]
    b_x = e4m3_value_tile(b_code)
    if E8M0:
        b_x = gl.reshape(b_x, [_BN, COUNT // _GROUP, _GROUP])
        G: gl.constexpr = gl.SliceLayout(2, b_x.type.layout)
        o_g = FIRST // _GROUP + gl.arange(0, COUNT // _GROUP, layout=gl.SliceLayout(0, G))
        b_bytes = gl.convert_layout(b_scale, gl.SliceLayout(1, G))[:, None]
        b_byte = (b_bytes >> (8 * o_g)[None, :].to(gl.int64)).to(gl.int32) & 255
        b_x = gl.reshape(b_x * e8m0_value_tile(b_byte)[:, :, None], [_BN, COUNT])
    else:
        b_x = b_x * b_scale[:, None]
    k_tile.slice(FIRST, COUNT, dim=1).store(gl.convert_layout(b_x.to(gl.bfloat16), b_code.type.layout))


@gluon.jit
def loaders(
    ring, pages, p_table, p_chosen, k_tiles, biases, full, empty,
    i_ring, begin, end, first, count_w, count_e, visible, turn,
    R: gl.constexpr, P: gl.constexpr, VALUE: gl.constexpr, SCALE: gl.constexpr,
    QUANTISED: gl.constexpr, E8M0: gl.constexpr, ENTRIES: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    # 64 channels of a row lie in 4 (bytes) or 8 (bf16) threads, 16 bytes each
    L: gl.constexpr = gl.BlockedLayout(
        [1, 16 if QUANTISED else 8], [8, 4] if QUANTISED else [4, 8], [_LOADERS, 1], [1, 0]
    )
    p_ring = ring + i_ring * (R * (VALUE + SCALE))
    b_page, b_row = find_keys(
        begin, first, count_w, count_e, visible, turn, p_table, p_chosen, L, R, P, ENTRIES, CHOSEN
    )
    i_tile, phase = 0, 1
    for i_n in range(begin, end, _BN):
        m_k = b_page >= 0
        in_ring = i_n < first
        p_held = p_ring
        if ENTRIES:
            p_held = gl.where(in_ring, p_ring, pages)
        o_page = b_page.to(gl.int64) * (P * (VALUE + SCALE))
        p_value = p_held + (o_page + b_row * VALUE)
        p_scale = p_held + (o_page + gl.where(in_ring, R * VALUE, P * VALUE) + b_row * SCALE)
        k_tile, bias = k_tiles.index(i_tile), biases.index(i_tile)
        # the next tile's keys are found while the loads of this one are on their way
        if QUANTISED:
            b_scale = gl.load(p_scale.to(gl.pointer_type(gl.int64 if E8M0 else gl.float32)), mask=m_k, other=0)
            b_0 = load_part(p_value, m_k, 0, 256, L)  # 448 in powers of two
            b_1 = load_part(p_value, m_k, 256, 128, L)
            b_2 = load_part(p_value, m_k, 384, 64, L)
            b_tail = load_part((p_value + _KEPT).to(gl.pointer_type(gl.bfloat16)), m_k, 0, _ROPE, L)
            b_page, b_row = find_keys(
                i_n + _BN, first, count_w, count_e, visible, turn, p_table, p_chosen, L, R, P, ENTRIES, CHOSEN
            )
            mbarrier.wait(empty.index(i_tile), phase)
            store_part(k_tile, b_0, b_scale, 0, E8M0)
            store_part(k_tile, b_1, b_scale, 256, E8M0)
            store_part(k_tile, b_2, b_scale, 384, E8M0)
            k_tile.slice(_KEPT, _ROPE, dim=1).store(b_tail)
        else:
            mbarrier.wait(empty.index(i_tile), phase)
            o_d = gl.arange(0, _D, layout=gl.SliceLayout(0, L))
            p_x = p_value[:, None] + o_d[None, :]
            async_copy.async_copy_global_to_shared(k_tile, p_x, mask=m_k[:, None])  # zeros where there is no key
            async_copy.commit_group()
            b_page, b_row = find_keys(
                i_n + _BN, first, count_w, count_e, visible, turn, p_table, p_chosen, L, R, P, ENTRIES, CHOSEN
            )
            async_copy.wait_group(0)
        bias.store(gl.where(m_k, 0.0, float("-inf")))
        fence_async_shared()  # the tensor cores read what these threads wrote
        gl.thread_barrier()
        mbarrier.arrive(full.index(i_tile), count=1)
        i_tile += 1
        if i_tile == _TILES:
            i_tile, phase = 0, phase ^ 1


@gluon.jit
def workers(
    q_tile, k_tiles, p_tile, biases, full, empty,
    sink, p_cos, p_sin, out, part, lse, scale, i_t, i_s, i_h, real, begin, end, H, splits, SPLIT: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, _BN // 2, 16])  # of scores [BH, BN]
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, _D // 2, 16])  # of sums [BH, D]
    b_0 = gl.zeros([_BH, _BN], gl.float32, layout=S)
    b_m = gl.full([_BH], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
    b_z = gl.zeros([_BH, _BN], gl.float32, layout=S)  # of every 64th key: their sum is taken once
    b_o = gl.zeros([_BH, _D], gl.float32, layout=V)
    i_tile, phase = 0, 0
    for _ in range(begin, end, _BN):
        k_tile = k_tiles.index(i_tile)
        mbarrier.wait(full.index(i_tile), phase)
        b_s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), b_0, use_acc=False)
        b_s = b_s * scale + biases.index(i_tile).load(gl.SliceLayout(0, S))[None, :]
        b_top = gl.maximum(b_m, gl.max(b_s, 1))
        b_base = gl.where(b_top == float("-inf"), 0.0, b_top)  # nothing seen yet: weights 0, not NaN
        b_p = gl.exp2(b_s - b_base[:, None])
        b_keep = gl.exp2(b_m - b_base)
        b_m = b_top
        b_z = b_z * b_keep[:, None] + b_p
        p_tile.store(b_p.to(gl.bfloat16))
        b_o = b_o * gl.convert_layout(b_keep, gl.SliceLayout(1, V))[:, None]
        fence_async_shared()
        gl.thread_barrier()
        b_o = warpgroup_mma(p_tile, k_tile, b_o)
        gl.thread_barrier()  # all eight have read the tile, and p_tile
        mbarrier.arrive(empty.index(i_tile), count=1)
        i_tile += 1
        if i_tile == _TILES:
            i_tile, phase = 0, phase ^ 1

    b_z = gl.sum(b_z, 1)
    o_h = i_h + gl.arange(0, _BH, layout=gl.SliceLayout(1, S))
    if SPLIT:
        o_part = (i_t * H + o_h) * splits + i_s
        b_z = gl.where(b_z == 0, 1.0, b_z)  # no key in these tiles: zeros, of weight 2^-inf
        gl.store(lse + o_part, b_m + gl.log2(b_z), mask=o_h < H)
        b_o = b_o * gl.convert_layout(1 / b_z, gl.SliceLayout(1, V))[:, None]
        o_row = i_h + gl.arange(0, _BH, layout=gl.SliceLayout(1, V))
        o_d = gl.arange(0, _D, layout=gl.SliceLayout(0, V))
        p_part = part + ((i_t * H + o_row) * splits + i_s)[:, None] * _D + o_d[None, :]
        gl.store(p_part, b_o, mask=(o_row < H)[:, None] & (begin < end))
    else:
        b_sink = gl.load(sink + o_h, mask=o_h < H, other=0.0).to(gl.float32) * _LOG2_E
        b_top = gl.maximum(b_m, b_sink)
        b_keep = gl.exp2(b_m - b_top)
        b_w = b_keep / (b_z * b_keep + gl.exp2(b_sink - b_top))
        b_o = derotate_tile(b_o * gl.convert_layout(b_w, gl.SliceLayout(1, V))[:, None], p_cos, p_sin)
        q_tile.store(gl.where(real, b_o, 0.0).to(gl.bfloat16))  # to be written by whole rows
        L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_WORKERS // 2, 2], [1, 0])
        o_row = i_h + gl.arange(0, _BH, layout=gl.SliceLayout(1, L))
        o_d = gl.arange(0, _D, layout=gl.SliceLayout(0, L))
        gl.thread_barrier()
        gl.store(out + (i_t * H + o_row)[:, None] * _D + o_d[None, :], q_tile.load(L), mask=(o_row < H)[:, None])


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
):
    blocks = (H + _BH - 1) // _BH
    i_t = (gl.program_id(0) // blocks).to(gl.int64)
    i_h = (gl.program_id(0) % blocks) * _BH
    i_s = gl.program_id(1)
    i_b = gl.load(owner + i_t)
    i_slot, i_ring = gl.load(slots + i_b), gl.load(rows + i_b)
    real = (i_slot >= 0) & (i_ring >= 0)  # else padding, which has no keys
    position = gl.load(positions + i_t).to(gl.int32)
    turn = (position.to(gl.uint32) % R).to(gl.int32)
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
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [_BH, _D], M)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [_TILES, _BN, _D], M)
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [_BH, _BN], M)
    biases = gl.allocate_shared_memory(gl.float32, [_TILES, _BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [_TILES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_TILES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_WORKERS // 2, 2], [1, 0])
    o_h = i_h + gl.arange(0, _BH, layout=gl.SliceLayout(1, L))
    o_d = gl.arange(0, _D, layout=gl.SliceLayout(0, L))
    p_q = q + i_t * stride_q_t + o_h[:, None] * stride_q_h + o_d[None, :]
    q_tile.store(gl.load(p_q, mask=(o_h < H)[:, None], other=0.0))
    fence_async_shared()
    p_cos, p_sin = cos + i_t * (_ROPE // 2), sin + i_t * (_ROPE // 2)
    gl.warp_specialize(
        [
            (workers, (
                q_tile, k_tiles, p_tile, biases, full, empty,
                sink, p_cos, p_sin, out, part, lse, scale, i_t, i_s, i_h, real, begin, end, H, splits, SPLIT,
            )),
            (loaders, (
                ring, pages, p_table, p_chosen, k_tiles, biases, full, empty,
                i_ring, begin, end, first, count_w, count_e, visible, turn,
                R, P, VALUE, SCALE, QUANTISED, E8M0, ENTRIES, CHOSEN,
            )),
        ],
        [_LOADERS],
        [_LOADER_REGISTERS],
    )  # fmt: skip
