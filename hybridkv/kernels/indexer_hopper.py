"""decode_logits on Hopper GPUs: FP8 index keys of 128 channels in pages, up to 64 heads, queries in bf16.

Written in Gluon, so that keys go from memory straight into the registers that the tensor cores read: neither shared
memory nor a barrier lies on their way. A row of 128 codes lies in four neighbouring threads, 32 bytes each. For that
the channels of the products are taken in another order, which the queries are given once:

    channel 32 t + 4 s + 2 e + f  (t: thread of the four, s: step of 16 channels)  ->  place 16 s + 8 e + 2 t + f

As decode_logits_kernel: products in f16, which E4M3 is widened to exactly, sums in f32; relu, weights and the key's own
scale after them. The next tile's keys are on their way, and the pages of the one after it, while one is multiplied.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# kernels are a language of their own, which a Python type checker does not know
gluon: Any = import_module("triton.experimental.gluon")
gl: Any = import_module("triton.experimental.gluon.language")
hopper: Any = import_module("triton.experimental.gluon.language.nvidia.hopper")
fence_async_shared, warpgroup_mma = hopper.fence_async_shared, hopper.warpgroup_mma

D, HEADS = 128, 64
KEYS, WARPS = 64, 4  # of a tile, whose rows are dealt out to four warps
_D, _H, _N = gl.constexpr(D), gl.constexpr(HEADS), gl.constexpr(KEYS)
_NAN_STAYS = gl.constexpr(import_module("triton.language").PropagateNan.ALL)

WIDEN = """
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
_WIDEN = gl.constexpr(WIDEN)


@gluon.jit
def widen_keys(b_word, A: gl.constexpr):
    """Words of four codes [KEYS, 32] -> f16 [KEYS, 128] in the products' order, without leaving their threads."""
    b_0, b_1, b_2, b_3 = gl.inline_asm_elementwise(
        _WIDEN, "=h,=h,=h,=h,r", [b_word], (gl.int16, gl.int16, gl.int16, gl.int16), True, 1
    )
    b_x = gl.join(gl.join(b_0, b_1), gl.join(b_2, b_3))  # [KEYS, 32, f, e]
    b_x = gl.permute(gl.reshape(b_x, [_N, 4, 8, 2, 2]), (0, 2, 4, 1, 3))  # [KEYS, s, e, t, f]
    b_x = gl.reshape(b_x, [_N, _D]).to(gl.float16, bitcast=True)
    return gl.convert_layout(b_x, A, assert_trivial=True)


@gluon.jit
def find_rows(p_table, begin, n, P: gl.constexpr, L: gl.constexpr):
    """Page of each key from begin on, -1 from n on, [KEYS] int32; and its row there."""
    o_n = begin + gl.arange(0, _N, layout=gl.SliceLayout(1, L))
    b_page = gl.load(p_table + o_n // P, mask=o_n < n, other=-1)
    return b_page, o_n % P


@gluon.jit
def load_codes(keys, b_page, b_row, P: gl.constexpr, L: gl.constexpr):
    """Words [KEYS, 32] and scales [KEYS]; zeros where there is no key."""
    p_page = keys + b_page.to(gl.int64) * (P * (_D + 4))
    o_w = gl.arange(0, _D // 4, layout=gl.SliceLayout(0, L))
    p_row = (p_page + b_row * _D).to(gl.pointer_type(gl.int32))
    b_word = gl.load(p_row[:, None] + o_w[None, :], mask=(b_page >= 0)[:, None], other=0)
    p_scale = (p_page + (P * _D + b_row * 4)).to(gl.pointer_type(gl.float32))
    return b_word, gl.load(p_scale, mask=b_page >= 0, other=0.0)


@gluon.jit(do_not_specialize=["width", "skip", "stride_table", "H"])
def decode_logits_hopper_kernel(
    q, weights, keys, table, slots, owner, positions, out, width, skip, stride_qt, stride_qh, stride_w, stride_table, H,
    RATIO: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    i_t, i_s = gl.program_id(0).to(gl.int64), gl.program_id(1)
    slot = gl.load(slots + gl.load(owner + i_t))
    n = gl.minimum((gl.load(positions + i_t) + 1) // RATIO, width).to(gl.int32)
    n = gl.where((slot < 0) | (n <= skip), 0, n)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _H, 16])  # of products [KEYS, heads]
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    L: gl.constexpr = gl.DistributedLinearLayout(  # of words [KEYS, 32]: the rows of S, 8 words of each
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [_N, 32]
    )
    if i_s * _N < n:
        p_table = table + slot * stride_table
        step = gl.num_programs(1) * _N
        b_page, b_row = find_rows(p_table, i_s * _N, n, P, L)
        b_word, b_scale = load_codes(keys, b_page, b_row, P, L)
        b_page, b_row = find_rows(p_table, i_s * _N + step, n, P, L)

        # queries, each head times a power of two that its weight gives back: the largest is near 2^15
        Q: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        o_h = gl.arange(0, _H, layout=gl.SliceLayout(1, Q))
        o_k = gl.arange(0, _D, layout=gl.SliceLayout(0, Q))
        p_q = q + i_t * stride_qt + o_h[:, None] * stride_qh + o_k[None, :]
        b_q = gl.load(p_q, mask=(o_h < H)[:, None], other=0.0).to(gl.float32)
        b_size = gl.abs(b_q)
        b_most = gl.max(gl.where(b_size < float("inf"), b_size, 0.0), 1)
        b_up = 142 - (b_most.to(gl.int32, bitcast=True) >> 23)
        b_up = gl.minimum(gl.maximum(b_up, -126), 126)
        b_q = b_q * ((b_up + 127) << 23).to(gl.float32, bitcast=True)[:, None]
        b_w = gl.load(weights + i_t * stride_w + o_h, mask=o_h < H, other=0.0)
        b_w = gl.convert_layout(b_w * ((127 - b_up) << 23).to(gl.float32, bitcast=True), gl.SliceLayout(0, S))
        q_tile = gl.allocate_shared_memory(gl.float16, [_H, _D], gl.NVMMASharedLayout(128, 16, 2))
        b_q = gl.permute(gl.reshape(b_q.to(gl.float16), [_H, 4, 8, 2, 2]), (0, 2, 3, 1, 4))  # [H, s, e, t, f]
        q_tile.store(gl.reshape(b_q, [_H, _D]))
        fence_async_shared()
        gl.thread_barrier()

        o_n = gl.arange(0, _N, layout=gl.SliceLayout(1, S))
        b_0 = gl.zeros([_N, _H], gl.float32, layout=S)
        for begin in range(i_s * _N, n, step):
            b_k = widen_keys(b_word, A)
            b_factor = gl.convert_layout(b_scale, gl.SliceLayout(1, S))
            b_word, b_scale = load_codes(keys, b_page, b_row, P, L)
            b_page, b_row = find_rows(p_table, begin + 2 * step, n, P, L)
            b_s = warpgroup_mma(b_k, q_tile.permute((1, 0)), b_0, use_acc=False)
            b_s = gl.maximum(b_s, 0.0, propagate_nan=_NAN_STAYS) * b_w[None, :]
            b_logit = gl.sum(b_s, 1) * b_factor
            gl.store(out + i_t * width + begin + o_n, b_logit, mask=begin + o_n < n)
