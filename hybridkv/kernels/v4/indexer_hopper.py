"""decode_logits' kernel for Hopper GPUs, in Gluon: FP8 or MXFP4 index keys of 128 channels, up to 64 heads.

Pages hold a multiple of 32 keys. A warp fills a ring of tiles in shared memory through the copy engine, four others
compute: loads never hold up the products. From the ring a key's codes go to the registers that the tensor cores read,
a quarter of a row to each of four neighbouring threads, and are upcast there. For that the channels of the products
are taken in another order, which the queries are given once (t: thread of the four; e, f, o: 0 or 1):

    FP8    channel 32 t + 4 s + 2 e + f        ->  place 16 s + 8 e + 2 t + f
    MXFP4  channel 32 t + 8 v + 4 e + 2 f + o  ->  place 16 (2 v + o) + 8 e + 2 t + f

A tile is two halves: one is upcast or weighed while the other is multiplied. As in decode_logits_kernel sums are f32;
relu, weights and the key's own scale come after them. Products are f16, which holds E4M3 exactly. An MXFP4 group, which
is one thread's, is brought there to its key's largest scale: of one that is 2^-32 of it or less, what is below 2^-36 of
the key is lost, far less than f32 sums lose.
"""

from __future__ import annotations

from hybridkv.kernels.gluon import (
    PropagateNan,
    cuda,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

D, HEADS = 128, 64
KEYS, WARPS = 128, 4  # of a tile, whose rows are dealt out to four warps
PAGE = 32  # keys that are copied at once: pages hold a multiple
STAGES = 3  # tiles of the ring: with more of them on their way the memory is slower
REGISTERS, LOADER_REGISTERS = 128, 24  # of a thread at first, so that two programs fit; later of the one that copies
_D, _H, _N, _PAGE, _STAGES = (gl.constexpr(x) for x in (D, HEADS, KEYS // 2, PAGE, STAGES))
_FP8 = gl.constexpr(32)  # words of a key's codes; MXFP4 has 16
_NAN_STAYS = gl.constexpr(PropagateNan.ALL)

UPCAST_FP8 = """
{
.reg .b16 a, b;
.reg .b32 x, y;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 x, a;
cvt.rn.f16x2.e4m3x2 y, b;
mov.b32 {$0, $1}, x;
mov.b32 {$2, $3}, y;
}
"""
# E2M1 in the low bits of E4M3's exponent and the high one of its fraction is 2^-6 of its value: first the even codes
UPCAST_FP4 = """
{
.reg .b16 a, b, c, d;
.reg .b32 s, x, y, e, o, u, v;
shl.b32 x, $8, 2;
shl.b32 y, $8, 4;
and.b32 y, y, 0x80808080;
lop3.b32 e, x, 0x1C1C1C1C, y, 0xEA;
shr.u32 x, $8, 2;
and.b32 y, $8, 0x80808080;
lop3.b32 o, x, 0x1C1C1C1C, y, 0xEA;
mov.b32 {a, b}, e;
mov.b32 {c, d}, o;
mov.b32 s, {$9, $9};
cvt.rn.f16x2.e4m3x2 u, a;
cvt.rn.f16x2.e4m3x2 v, b;
cvt.rn.f16x2.e4m3x2 x, c;
cvt.rn.f16x2.e4m3x2 y, d;
mul.rn.f16x2 u, u, s;
mul.rn.f16x2 v, v, s;
mul.rn.f16x2 x, x, s;
mul.rn.f16x2 y, y, s;
mov.b32 {$0, $1}, u;
mov.b32 {$2, $3}, v;
mov.b32 {$4, $5}, x;
mov.b32 {$6, $7}, y;
}
"""
NARROW = """
{
.reg .b32 x, y;
shl.b32 x, $2, 16;
and.b32 y, $2, 0xFFFF0000;
mul.f32 x, x, $3;
mul.f32 y, y, $3;
cvt.rn.f16x2.f32 x, y, x;
mov.b32 {$0, $1}, x;
}
"""
_NARROW, _LOADER_REGISTERS = gl.constexpr(NARROW), gl.constexpr(LOADER_REGISTERS)
_UPCAST_FP8, _UPCAST_FP4 = gl.constexpr(UPCAST_FP8), gl.constexpr(UPCAST_FP4)


@gluon.jit
def upcast_fp8(b_word, A: gl.constexpr):
    """Words of four codes [KEYS, 32] -> f16 [KEYS, 128] in the products' order, without leaving their threads."""
    b_0, b_1, b_2, b_3 = gl.inline_asm_elementwise(
        _UPCAST_FP8, "=h,=h,=h,=h,r", [b_word], (gl.int16, gl.int16, gl.int16, gl.int16), True, 1
    )
    b_x = gl.join(gl.join(b_0, b_1), gl.join(b_2, b_3))  # [KEYS, 32, f, e]
    b_x = gl.permute(gl.reshape(b_x, [_N, 4, 8, 2, 2]), (0, 2, 4, 1, 3))  # [KEYS, s, e, t, f]
    b_x = gl.reshape(b_x, [_N, _D]).to(gl.float16, bitcast=True)
    return gl.convert_layout(b_x, A, assert_trivial=True)


@gluon.jit
def upcast_fp4(b_word, b_scale, L: gl.constexpr, A: gl.constexpr):
    """Words of eight codes [KEYS, 16], four scales in a word [KEYS] -> f16 [KEYS, 128], 2^9 times what they are under
    their key's largest scale; and that scale [KEYS] f32."""
    b_most = gl.maximum(
        gl.maximum(b_scale & 255, b_scale >> 8 & 255), gl.maximum(b_scale >> 16 & 255, b_scale >> 24 & 255)
    )
    o_w = gl.arange(0, _D // 8, layout=gl.SliceLayout(0, L))
    b_own = b_scale[:, None] >> (o_w // 4 * 8)[None, :] & 255
    b_up = gl.maximum(b_own - b_most[:, None] + 142, 0) << 23  # 2^15 and less, as bits of f32
    b_up = b_up.to(gl.float32, bitcast=True).to(gl.float16).to(gl.int16, bitcast=True)
    b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = gl.inline_asm_elementwise(
        _UPCAST_FP4, "=h,=h,=h,=h,=h,=h,=h,=h,r,h", [b_word, b_up],
        (gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16), True, 1,
    )  # fmt: skip
    b_even = gl.join(gl.join(b_0, b_1), gl.join(b_2, b_3))  # [KEYS, 16, f, e]
    b_odd = gl.join(gl.join(b_4, b_5), gl.join(b_6, b_7))
    b_x = gl.reshape(gl.join(b_even, b_odd), [_N, 4, 4, 2, 2, 2])  # [KEYS, t, v, f, e, o]
    b_x = gl.reshape(gl.permute(b_x, (0, 2, 5, 4, 1, 3)), [_N, _D]).to(gl.float16, bitcast=True)
    b_bits = gl.where(b_most == 0, 0x00400000, b_most << 23)  # 2^-127 has no exponent bits
    b_factor = gl.where(b_most == 255, 0x7FC00000, b_bits).to(gl.float32, bitcast=True)
    return gl.convert_layout(b_x, A, assert_trivial=True), b_factor


@gluon.jit
def upcast(b_word, b_scale, L: gl.constexpr, A: gl.constexpr, W: gl.constexpr):
    """Codes and scales of 64 keys as they lie in a page -> f16 [64, 128], a factor of each key [64] f32."""
    if W == _FP8:
        b_k, b_factor = upcast_fp8(b_word, A), b_scale.to(gl.float32, bitcast=True)
    else:
        b_k, b_factor = upcast_fp4(b_word, b_scale, L, A)
    return b_k, b_factor


@gluon.jit
def larger(x, y):
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.int32, True, 1)


@gluon.jit
def take_queries(q, weights, q_tile, stride_qh, H, S: gl.constexpr, W: gl.constexpr):
    """Queries [H, 128] bf16 -> q_tile [64, 128] f16, each head times a power of two that its weight gives back: its
    largest is near 2^15. Returns the weights [64] of the products' layout."""
    Q: gl.constexpr = gl.DistributedLinearLayout(  # of words: eight channels of each 32, so that stores are wide
        [[0, 1], [0, 2], [0, 16], [0, 32], [32, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [],
        [_H, _D // 2],
    )  # fmt: skip
    o_h, o_w = gl.arange(0, _H, gl.SliceLayout(1, Q)), gl.arange(0, _D // 2, gl.SliceLayout(0, Q))
    p_q = q.to(gl.pointer_type(gl.int32)) + o_h[:, None] * (stride_qh // 2) + o_w[None, :]
    b_q = gl.load(p_q, mask=(o_h < H)[:, None], other=0)
    b_w = gl.load(weights + o_h, mask=o_h < H, other=0.0)
    b_most = gl.reduce(b_q & 0x7FFF7FFF, 1, larger)
    b_most = gl.maximum(b_most & 0xFFFF, b_most >> 16)
    ONE: gl.constexpr = 127 if W == _FP8 else 118  # keys of FP4 are 2^9 times too large
    b_up = gl.minimum(gl.maximum(142 - (b_most >> 7), -126), ONE - 1)
    b_factor, b_q = gl.broadcast(((b_up + 127) << 23).to(gl.float32, bitcast=True)[:, None], b_q)
    b_0, b_1 = gl.inline_asm_elementwise(_NARROW, "=h,=h,r,f", [b_q, b_factor], (gl.int16, gl.int16), True, 1)
    b_q = gl.join(b_0, b_1).to(gl.float16, bitcast=True)
    if W == _FP8:
        b_q = gl.permute(gl.reshape(b_q, [_H, 4, 8, 2, 2]), (0, 2, 3, 1, 4))  # [H, s, e, t, f]
    else:
        b_q = gl.permute(gl.reshape(b_q, [_H, 4, 4, 2, 2, 2]), (0, 2, 5, 3, 1, 4))  # [H, v, o, e, t, f]
    q_tile.store(gl.reshape(b_q, [_H, _D]))
    return gl.convert_layout(b_w * ((ONE - b_up) << 23).to(gl.float32, bitcast=True), gl.SliceLayout(0, S))


@gluon.jit
def find_pages(p_table, i_half, n, G: gl.constexpr):
    """Pages of 64 keys, 32 in each; -1 from n on, which the copy engine fills with zeros. G: boxes of a page."""
    page = gl.load(p_table + 2 * i_half // G, mask=i_half * _N < n, other=-1)
    return page, gl.load(p_table + (2 * i_half + 1) // G, mask=i_half * _N + _PAGE < n, other=-1)


@gluon.jit
def fetch(codes, factors, page, i_box, bar, words, scales, i_to, G: gl.constexpr, W: gl.constexpr):
    """32 keys: rows of codes, and the row of their scales. A page is G x 32 rows of codes, then G rows of 32 scales."""
    ROWS: gl.constexpr = _PAGE * (W + 1) // W
    tma.async_copy_global_to_shared(codes, [page * (G * ROWS) + i_box % G * _PAGE, 0], bar, words.index(i_to))
    tma.async_copy_global_to_shared(factors, [page * (G * (W + 1)) + (G * W + i_box % G), 0], bar, scales.index(i_to))


@gluon.jit
def loader(
    codes, factors, p_table, words, scales, full, empty, first, count, n, G: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    for i in range(count):
        i_half, s = (first + i) * 2, i % _STAGES
        page_0, page_1 = find_pages(p_table, i_half, n, G)  # before the wait, which hides how long this takes
        page_2, page_3 = find_pages(p_table, i_half + 1, n, G)
        bar, i_box, i_to = full.index(s), 2 * i_half, 4 * s
        mbarrier.wait(empty.index(s), (i // _STAGES + 1) & 1)
        mbarrier.expect(bar, 2 * _N * (W + 1) * 4)
        fetch(codes, factors, page_0, i_box, bar, words, scales, i_to, G, W)
        fetch(codes, factors, page_1, i_box + 1, bar, words, scales, i_to + 1, G, W)
        fetch(codes, factors, page_2, i_box + 2, bar, words, scales, i_to + 2, G, W)
        fetch(codes, factors, page_3, i_box + 3, bar, words, scales, i_to + 3, G, W)


@gluon.jit
def weigh(p_out, begin, n, b_s, b_w, b_factor, S: gl.constexpr):
    """Products of 64 keys -> their logits, stored. The heads lie along a thread and its three neighbours."""
    o_n = begin + gl.arange(0, _N, layout=gl.SliceLayout(1, S))
    b_s = gl.maximum(b_s, 0.0, propagate_nan=_NAN_STAYS) * b_w[None, :]
    b_logit = gl.sum(b_s, 1) * gl.convert_layout(b_factor, gl.SliceLayout(1, S), assert_trivial=True)
    gl.store(p_out + o_n, b_logit, mask=o_n < n)


@gluon.jit
def worker(
    q, weights, p_out, q_tile, words, scales, full, empty, first, count, n, stride_qh, H, W: gl.constexpr
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _H, 16])  # of products [64 keys, heads]
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    OWN: gl.constexpr = [[0, 1], [0, 2], [0, 4], [8, 0]] if W == _FP8 else [[0, 1], [0, 2], [8, 0]]
    L: gl.constexpr = gl.DistributedLinearLayout(  # of words [64 keys, W]: the rows of S, a quarter of each
        OWN, [[0, W // 4], [0, W // 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [_N, W]
    )
    K: gl.constexpr = gl.SliceLayout(1, L)
    words = words._reinterpret(gl.int32, [2 * _STAGES, _N, W], gl.NVMMASharedLayout(4 * W, 32, 2))
    scales = scales._reinterpret(gl.int32, [2 * _STAGES, _N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    b_w = take_queries(q, weights, q_tile, stride_qh, H, S, W)
    fence_async_shared()  # the tensor cores read what these threads wrote
    gl.thread_barrier()
    q_tile = q_tile.permute((1, 0))
    b_z = gl.zeros([_N, _H], gl.float32, layout=S)
    for i in range(count):
        s = i % _STAGES
        begin = (first + i) * (2 * _N)
        mbarrier.wait(full.index(s), (i // _STAGES) & 1)
        b_word_0, b_scale_0 = words.index(2 * s).load(L), scales.index(2 * s).load(K)
        b_word_1, b_scale_1 = words.index(2 * s + 1).load(L), scales.index(2 * s + 1).load(K)
        b_k_0, b_factor_0 = upcast(b_word_0, b_scale_0, L, A, W)
        b_s_0 = warpgroup_mma(b_k_0, q_tile, b_z, use_acc=False, is_async=True)
        b_k_1, b_factor_1 = upcast(b_word_1, b_scale_1, L, A, W)
        b_s_1 = warpgroup_mma(b_k_1, q_tile, b_z, use_acc=False, is_async=True)
        mbarrier.arrive(empty.index(s), count=1)  # here, where all that was read has been used
        b_s_0, b_k_0 = warpgroup_mma_wait(1, [b_s_0, b_k_0])
        weigh(p_out, begin, n, b_s_0, b_w, b_factor_0, S)
        gl.thread_barrier()  # or the assembler lets the first half wait for the second
        b_s_1, b_k_1 = warpgroup_mma_wait(0, [b_s_1, b_k_1])
        weigh(p_out, begin + _N, n, b_s_1, b_w, b_factor_1, S)
    cuda.gdc_launch_dependents()


@gluon.jit(do_not_specialize=["width", "skip", "stride_table", "H"])
def decode_logits_hopper_kernel(
    q, weights, codes, factors, table, slots, owner, positions, out, width, skip,
    stride_qt, stride_qh, stride_w, stride_table, H,
    RATIO: gl.constexpr, P: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """codes, factors: all pages, as rows of W words and as rows of 32 words. W: words of a key's codes."""
    cuda.gdc_wait()
    i_t, i_s = gl.program_id(0).to(gl.int64), gl.program_id(1)
    slot = gl.load(slots + gl.load(owner + i_t))
    n = gl.minimum((gl.load(positions + i_t) + 1) // RATIO, width).to(gl.int32)
    n = gl.where((slot < 0) | (n <= skip), 0, n)
    tiles = (n + 2 * _N - 1) // (2 * _N)
    share, rest = tiles // gl.num_programs(1), tiles % gl.num_programs(1)
    first = i_s * share + gl.minimum(i_s, rest)
    count = share + (i_s < rest).to(gl.int32)
    if count > 0:
        q_tile = gl.allocate_shared_memory(gl.float16, [_H, _D], gl.NVMMASharedLayout(128, 16, 2))
        words = gl.allocate_shared_memory(gl.int32, [4 * _STAGES, _PAGE, W], gl.NVMMASharedLayout(4 * W, 32, 2))
        scales = gl.allocate_shared_memory(gl.int32, [4 * _STAGES, 1, 32], gl.NVMMASharedLayout(0, 32, 2))
        full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(_STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        fence_async_shared()  # the copy engine sees the barriers
        gl.warp_specialize(
            [
                (worker, (
                    q + i_t * stride_qt, weights + i_t * stride_w, out + i_t * width, q_tile, words, scales,
                    full, empty, first, count, n, stride_qh, H, W,
                )),
                (loader, (
                    codes, factors, table + slot * stride_table, words, scales, full, empty, first, count, n,
                    P // _PAGE, W,
                )),
            ],
            [1],
            [_LOADER_REGISTERS],
        )  # fmt: skip
