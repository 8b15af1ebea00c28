"""The loaders of sparse_hopper.py: they find a tile's rows, read them, and leave them in shared memory as bf16.

The kernel over FP8 is as fast as they dequantise. So there are eight warps, they use few instructions and no
conversions, and what a tile is found by is read before it is needed: the entries chosen for it three tiles ahead, its
pages two, its codes one.
"""

from __future__ import annotations

from hybridkv.kernels.gluon import async_copy, fence_async_shared, gl, gluon, mbarrier

D, ROPE = 512, 64
LOADERS = 8  # warps
_KEPT, _HALF, _ROPE = gl.constexpr(D - ROPE), gl.constexpr(D // 2), gl.constexpr(ROPE)
_GROUP = gl.constexpr(64)  # channels of a power-of-two scale
_BN, _TILES = gl.constexpr(64), gl.constexpr(2)
_LOADERS = gl.constexpr(LOADERS)


@gluon.jit
def find_entries(i_n, first, count_e, p_chosen, L: gl.constexpr, ENTRIES: gl.constexpr, CHOSEN: gl.constexpr):
    """The entries that a tile's keys are, [BN] int32; -1: none."""
    b_e = i_n - first + gl.arange(0, _BN, layout=gl.SliceLayout(1, L))
    if ENTRIES:
        m_e = (b_e >= 0) & (b_e < count_e)
        if CHOSEN:
            b_e = gl.load(p_chosen + b_e, mask=m_e, other=-1)
        else:
            b_e = gl.where(m_e, b_e, -1)
    return b_e


@gluon.jit
def find_rows(
    i_n, b_e, first, count_w, visible, newest, p_table, L: gl.constexpr,
    R: gl.constexpr, P: gl.constexpr, ENTRIES: gl.constexpr,
):  # fmt: skip
    """Page (0: the ring's; -1: no key) and row in it of a tile's keys, each [BN] int32."""
    o_n = i_n + gl.arange(0, _BN, layout=gl.SliceLayout(1, L))
    b_row = newest - o_n
    b_row = gl.where(b_row < 0, b_row + R, b_row)
    b_page = gl.where(o_n < count_w, 0, -1)
    if ENTRIES:
        b_e = b_e.to(gl.uint32)  # what is negative is past all that is visible
        m_e = (i_n >= first) & (b_e < visible.to(gl.uint32))
        b_held = gl.load(p_table + b_e // P, mask=m_e, other=-1)
        b_page = gl.where(i_n < first, b_page, b_held)
        b_row = gl.where(i_n < first, b_row, (b_e % P).to(gl.int32))
    return b_page, b_row


@gluon.jit
def load_words(p_row, m_k, FIRST: gl.constexpr, COUNT: gl.constexpr, L: gl.constexpr):
    """Words of four bytes: what is carried round the loop stays in as many registers."""
    o_w = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, L))
    return gl.load(p_row.to(gl.pointer_type(gl.int32))[:, None] + o_w[None, :], mask=m_k[:, None], other=0)


# Four codes -> two words of two bf16. $3: the scale, twice in bf16.
# Each code, its sign copied upwards, goes where bf16 has its bits, which is 2^-120 of the value; then two products,
# both exact. No conversion instructions, of which a multiprocessor does few at a time. A NaN among the four makes NaN
# of all four: one key that is NaN anywhere makes the whole token NaN either way.
UPCAST_BITS = """
{
.reg .b32 a, b, c, d, k, m;
.reg .pred p;
prmt.b32 a, $2, 0, 0x9180;
prmt.b32 b, $2, 0, 0xB3A2;
shl.b32 a, a, 4;
shl.b32 b, b, 4;
and.b32 a, a, 0x87F087F0;
and.b32 b, b, 0x87F087F0;
add.u32 c, a, 0x00100010;
add.u32 d, b, 0x00100010;
or.b32 c, c, d;
and.b32 c, c, 0x08000800;
setp.ne.u32 p, c, 0;
selp.b32 m, 0x7FFF7FFF, $3, p;
mov.b32 k, 0x7B807B80;
mul.bf16x2 a, a, k;
mul.bf16x2 b, b, k;
mul.bf16x2 $0, a, m;
mul.bf16x2 $1, b, m;
}
"""
# The same by conversions, where the scale is no power of two. $3: it, in f32.
UPCAST_CONVERT = """
{
.reg .b16 a, b, c, d;
.reg .b32 x, y;
.reg .f32 e, f, g, h, s;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 x, a;
cvt.rn.f16x2.e4m3x2 y, b;
mov.b32 s, $3;
mov.b32 {a, b}, x;
mov.b32 {c, d}, y;
cvt.f32.f16 e, a;
cvt.f32.f16 f, b;
cvt.f32.f16 g, c;
cvt.f32.f16 h, d;
mul.f32 e, e, s;
mul.f32 f, f, s;
mul.f32 g, g, s;
mul.f32 h, h, s;
cvt.rn.bf16x2.f32 $0, f, e;
cvt.rn.bf16x2.f32 $1, h, g;
}
"""
_UPCAST_BITS, _UPCAST_CONVERT = gl.constexpr(UPCAST_BITS), gl.constexpr(UPCAST_CONVERT)


@gluon.jit
def upcast_words(b_word, b_scale, FIRST: gl.constexpr, E8M0: gl.constexpr):
    """Words b_word [BN, COUNT] of four codes, from word FIRST on -> [BN, 2 COUNT] words of two bf16.

    b_scale [BN]: one f32, or a byte for each group.
    """
    COUNT: gl.constexpr = b_word.shape[1]
    GROUP: gl.constexpr = _GROUP // 4
    b_word = gl.reshape(b_word, [_BN, COUNT // GROUP, GROUP])
    G: gl.constexpr = gl.SliceLayout(2, b_word.type.layout)
    b_scale = gl.convert_layout(b_scale, gl.SliceLayout(1, G))[:, None]
    if E8M0:
        o_g = FIRST // GROUP + gl.arange(0, COUNT // GROUP, layout=gl.SliceLayout(0, G))
        b_byte = (b_scale >> (8 * o_g)[None, :].to(gl.int64)).to(gl.int32) & 255
        b_bits = gl.where(b_byte == 0, 0x0040, b_byte << 7)  # 2^-127 has no exponent bits
        b_bits = gl.where(b_byte == 255, 0x7FC0, b_bits)
        b_bits = b_bits | (b_bits << 16)
    else:
        b_bits = b_scale.to(gl.int32, bitcast=True)
    b_word, b_bits = gl.broadcast(b_word, b_bits[:, :, None])
    b_low, b_high = gl.inline_asm_elementwise(
        _UPCAST_BITS if E8M0 else _UPCAST_CONVERT, "=r,=r,r,r", [b_word, b_bits], (gl.int32, gl.int32), True, 1
    )
    return gl.reshape(gl.join(b_low, b_high), [_BN, 2 * COUNT])


@gluon.jit
def places(
    i_n, first, p_ring, pages, b_page, b_row,
    R: gl.constexpr, P: gl.constexpr, VALUE: gl.constexpr, SCALE: gl.constexpr, ENTRIES: gl.constexpr,
):  # fmt: skip
    """Where a tile's values and scales begin, each [BN]."""
    in_ring = i_n < first
    p_held = p_ring
    if ENTRIES:
        p_held = gl.where(in_ring, p_ring, pages)
    o_page = b_page.to(gl.int64) * (P * (VALUE + SCALE))
    p_value = p_held + (o_page + b_row * VALUE)
    p_scale = p_held + (o_page + gl.where(in_ring, R * VALUE, P * VALUE) + b_row * SCALE)
    return p_value, p_scale


@gluon.jit
def load_scale(p_scale, m_k, E8M0: gl.constexpr):
    return gl.load(p_scale.to(gl.pointer_type(gl.int64 if E8M0 else gl.float32)), mask=m_k, other=0)


@gluon.jit
def upcast_and_load(k_words, b_word, b_scale, p_next, m_next, FIRST: gl.constexpr, E8M0: gl.constexpr, L: gl.constexpr):
    """Codes into their half of the tile, as bf16; the next tile's in their place."""
    COUNT: gl.constexpr = b_word.shape[1]
    k_words.slice(2 * FIRST % 128, 2 * COUNT, dim=1).store(upcast_words(b_word, b_scale, FIRST, E8M0))
    return load_words(p_next, m_next, FIRST, COUNT, L)


@gluon.jit
def loaders(
    p_ring, pages, p_table, p_chosen, k_tiles, k_words, biases, full, empty,
    begin, end, first, count_w, count_e, visible, newest,
    R: gl.constexpr, P: gl.constexpr, VALUE: gl.constexpr, SCALE: gl.constexpr,
    QUANTISED: gl.constexpr, E8M0: gl.constexpr, ENTRIES: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    # 64 channels of a row lie in 4 (words of codes) or 8 (bf16) threads, 16 bytes each
    L: gl.constexpr = gl.BlockedLayout(
        [1, 4 if QUANTISED else 8], [8, 4] if QUANTISED else [4, 8], [_LOADERS, 1], [1, 0]
    )
    b_e = find_entries(begin, first, count_e, p_chosen, L, ENTRIES, CHOSEN)
    b_then = find_entries(begin + _BN, first, count_e, p_chosen, L, ENTRIES, CHOSEN)
    b_page, b_row = find_rows(begin, b_e, first, count_w, visible, newest, p_table, L, R, P, ENTRIES)
    i_tile, phase = 0, 1
    if QUANTISED:
        # a part of the next tile is on its way, in the same registers, as soon as that of this one has been dequantised
        m_k = (b_page >= 0) & (begin < end)
        p_value, p_scale = places(begin, first, p_ring, pages, b_page, b_row, R, P, VALUE, SCALE, ENTRIES)
        b_scale = load_scale(p_scale, m_k, E8M0)
        b_0 = load_words(p_value, m_k, 0, 32, L)
        b_1 = load_words(p_value, m_k, 32, 32, L)
        b_2 = load_words(p_value, m_k, 64, 32, L)
        b_3 = load_words(p_value, m_k, 96, 16, L)
        b_tail = load_words(p_value, m_k, _KEPT // 4, _ROPE // 2, L)
        b_page, b_row = find_rows(begin + _BN, b_then, first, count_w, visible, newest, p_table, L, R, P, ENTRIES)
        b_then = find_entries(begin + 2 * _BN, first, count_e, p_chosen, L, ENTRIES, CHOSEN)
        for i_n in range(begin, end, _BN):
            left, right = k_words.index(2 * i_tile), k_words.index(2 * i_tile + 1)
            m_next = (b_page >= 0) & (i_n + _BN < end)
            p_value, p_scale = places(i_n + _BN, first, p_ring, pages, b_page, b_row, R, P, VALUE, SCALE, ENTRIES)
            b_next = load_scale(p_scale, m_next, E8M0)
            b_page, b_row = find_rows(i_n + 2 * _BN, b_then, first, count_w, visible, newest, p_table, L, R, P, ENTRIES)
            b_then = find_entries(i_n + 3 * _BN, first, count_e, p_chosen, L, ENTRIES, CHOSEN)
            mbarrier.wait(empty.index(i_tile), phase)
            b_0 = upcast_and_load(left, b_0, b_scale, p_value, m_next, 0, E8M0, L)
            b_1 = upcast_and_load(left, b_1, b_scale, p_value, m_next, 32, E8M0, L)
            b_2 = upcast_and_load(right, b_2, b_scale, p_value, m_next, 64, E8M0, L)
            b_3 = upcast_and_load(right, b_3, b_scale, p_value, m_next, 96, E8M0, L)
            right.slice(96, 32, dim=1).store(b_tail)
            b_tail = load_words(p_value, m_next, _KEPT // 4, _ROPE // 2, L)
            biases.index(i_tile).store(gl.where(m_k, 0.0, float("-inf")))
            fence_async_shared()  # the tensor cores read what these threads wrote
            gl.thread_barrier()
            mbarrier.arrive(full.index(i_tile), count=1)
            m_k, b_scale = m_next, b_next
            i_tile += 1
            if i_tile == _TILES:
                i_tile, phase = 0, phase ^ 1
    else:
        for i_n in range(begin, end, _BN):
            m_k = b_page >= 0
            p_value, p_scale = places(i_n, first, p_ring, pages, b_page, b_row, R, P, VALUE, SCALE, ENTRIES)
            mbarrier.wait(empty.index(i_tile), phase)
            o_d = gl.arange(0, _HALF, layout=gl.SliceLayout(0, L))
            p_x = p_value[:, None] + o_d[None, :]
            # zeros where there is no key
            async_copy.async_copy_global_to_shared(k_tiles.index(2 * i_tile), p_x, mask=m_k[:, None])
            async_copy.async_copy_global_to_shared(k_tiles.index(2 * i_tile + 1), p_x + _HALF, mask=m_k[:, None])
            async_copy.commit_group()
            # the next tile's keys are found while the loads of this one are on their way
            b_page, b_row = find_rows(i_n + _BN, b_then, first, count_w, visible, newest, p_table, L, R, P, ENTRIES)
            b_then = find_entries(i_n + 2 * _BN, first, count_e, p_chosen, L, ENTRIES, CHOSEN)
            async_copy.wait_group(0)
            biases.index(i_tile).store(gl.where(m_k, 0.0, float("-inf")))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(i_tile), count=1)
            i_tile += 1
            if i_tile == _TILES:
                i_tile, phase = 0, phase ^ 1
