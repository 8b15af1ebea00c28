"""linear_packed: x W^T + b with W in a GGUF format, as planes (packed_weights).

Few rows of x: a program takes 16 rows of W and all of its columns, S pairs of groups at a time, which its warps share.
Codes become BF16 integers in registers, which is exact, and tensor cores multiply each group of 32; the sum is then
scaled in f32. A group's minimum is subtracted by way of the sum of the group's x, which rows of ones give. So only sums
are rounded. GATED: the rows of W are N gates, then N ups, and the result is silu(gate) * up.

More rows: W is written out in BF16, a part of its rows at a time, and cuBLAS multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.activation import silu_mul
from hybridkv.kernels.backend import (
    COMPILED,
    HAS_TRITON,
    capability,
    has_gluon,
    has_pdl,
    shared_memory,
    sm_count,
    tl,
    triton,
    use_triton,
)
from hybridkv.kernels.gluon import TensorDescriptor, gl
from hybridkv.kernels.linear.packed_dequantise import (
    dequantise_ref,
    dequantise_triton,
    f16_at,
    i8_at,
    pair_codes,
    place,
    u8_at,
)
from hybridkv.kernels.linear.packed_planes import BLOCK, WORKSPACE
from hybridkv.kernels.linear.packed_weights import Packed

BESIDE = 16  # rows of W that are interleaved where a kernel takes them in tiles
# of x, by format: that packed_hopper.py multiplies on an H200. Q8_0 has not been timed there, so it is left to Triton;
# in Q6_K more rows need more registers than there are
HOPPER_ROWS = {4: 16, 5: 16, 6: 8, 8: 0}
FEW_ROWS = {8: 48, 4: 48, 5: 16, 6: 16}  # of x, by format: more are multiplied faster by W written out
ALIGNED = 256  # rows of W: cuBLAS is fastest with multiples


def keeps_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model of this dtype computes with packed weights on this device."""
    return dtype == torch.bfloat16 and HAS_TRITON and capability(device) >= (8, 0)


def linear_packed_ref(x: Tensor, weight: Packed, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    y = F.linear(x.float(), dequantise_ref(weight), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y.to(x.dtype)


@triton.constexpr_function
def upcast_nibbles(bits, c):
    """PTX: four bytes, and for 5 and 6 bits four of the high plane, to 2 x 4 BF16: 128 + code, which is the code in the
    mantissa of 128, or for 6 bits code - 32; and to four ones.
    """
    more, width = "", bits - 4
    for name, at in (("a", 2 * c * width % 8), ("b", (2 * c * width + width) % 8)) if width else ():
        way = f"shl.b32 h, $7, {4 - at}" if at <= 4 else f"shr.u32 h, $7, {at - 4}"
        more += f"{way}; and.b32 h, h, {0x10101010 if width == 1 else 0x30303030}; or.b32 {name}, {name}, h;\n"
    more += "mov.b32 h, 0xc320c320;\n"  # -160
    for i in range(4):
        more += f"prmt.b32 ${i}, {'aabb'[i]}, 0x43434343, {'0x4342' if i % 2 else '0x4140'};\n"
        more += f"fma.rn.bf16x2 ${i}, ${i}, one, h;\n" if bits == 6 else ""
    return f"""{{
.reg .b32 a, b, h, one;
and.b32 a, $6, 0x0f0f0f0f;
shr.u32 b, $6, 4;
and.b32 b, b, 0x0f0f0f0f;
mov.b32 one, 0x3f803f80;
{more}mov.b32 $4, one;
mov.b32 $5, one;
}}"""


# Four int8 to four BF16. Seven bits in the mantissa of 128 are 128 + bits; the sign bit beside them makes 128 256.
UPCAST_BYTES = tl.constexpr("""{
.reg .b32 a, b, h, less;
mov.b32 less, 0xbf80bf80;
mov.b32 h, 0x43434343;
prmt.b32 a, $2, h, 0x4140;
prmt.b32 b, $2, h, 0x4342;
and.b32 h, a, 0xff80ff80;
and.b32 a, a, 0xff7fff7f;
fma.rn.bf16x2 $0, h, less, a;
and.b32 h, b, 0xff80ff80;
and.b32 b, b, 0xff7fff7f;
fma.rn.bf16x2 $1, h, less, b;
}""")


@triton.jit
def fetch(p, mask, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(p)
    else:
        return tl.load(p, mask=mask, other=0)


@triton.jit
def pair_tiles(
    codes, high, o_row, o_q, m_lo, m_hi, K, BITS: tl.constexpr, R: tl.constexpr, c: tl.constexpr,
    WHOLE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Both groups of the pairs o_q [S], as BF16 [S, BN, 32]."""
    o_j, o_q = tl.arange(0, 32)[None, None, :], o_q[:, None, None]
    m_lo, m_hi = m_lo[:, None, None], m_hi[:, None, None]
    if BITS == 8:
        p_q = codes + place(o_row, K, 32, R)[None, :, None] + o_q * (64 * R) + o_j
        b_lo, b_hi = fetch(p_q, m_lo, WHOLE), fetch(p_q + 32 * R, m_hi, WHOLE)
        if COMPILED:
            lo = tl.inline_asm_elementwise(UPCAST_BYTES, "=r,=r,r", [b_lo], dtype=tl.bfloat16, is_pure=True, pack=4)
            hi = tl.inline_asm_elementwise(UPCAST_BYTES, "=r,=r,r", [b_hi], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            lo = b_lo.to(tl.int8, bitcast=True).to(tl.float32).to(tl.bfloat16)
            hi = b_hi.to(tl.int8, bitcast=True).to(tl.float32).to(tl.bfloat16)
        ones = lo  # not used
    else:
        p_q = codes + place(o_row, K // 2, 32, R)[None, :, None] + o_q * (32 * R) + o_j
        b_q = fetch(p_q, m_lo, WHOLE)
        b_h = b_q
        if BITS == 5:
            p_h = high + place(o_row, K // 8, 32, R)[None, :, None] + o_q // 4 * (32 * R) + o_j
            b_h = fetch(p_h, m_lo, WHOLE)
        elif BITS == 6:
            p_h = high + place(o_row, K // 4, 32, R)[None, :, None] + o_q // 2 * (32 * R) + o_j
            b_h = fetch(p_h, m_lo, WHOLE)
        if COMPILED:  # ones as a third result have the layout of the others, so x has one layout too
            kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16)
            asm: tl.constexpr = upcast_nibbles(BITS, c)
            if BITS == 4:
                lo, hi, ones = tl.inline_asm_elementwise(
                    asm, "=r,=r,=r,=r,=r,=r,r", [b_q], dtype=kinds, is_pure=True, pack=4
                )
            else:
                lo, hi, ones = tl.inline_asm_elementwise(
                    asm, "=r,=r,=r,=r,=r,=r,r,r", [b_q, b_h], dtype=kinds, is_pure=True, pack=4
                )
        else:
            lo, hi = pair_codes(b_q, b_h, BITS, c)
            more: tl.constexpr = 0.0 if BITS == 6 else 128.0
            lo, hi = (lo + more).to(tl.bfloat16), (hi + more).to(tl.bfloat16)
            ones = tl.full(lo.shape, 1.0, tl.bfloat16)
    return lo, hi, ones


@triton.jit
def add_pair(
    b_y,  # [S, BN, BT]
    b_x,  # [S, 32, BT]: of group 2c
    b_x2,  # of group 2c + 1
    codes,
    high,
    scales,
    d,
    o_row,
    o_q,
    m_lo,
    m_hi,
    K,
    BITS: tl.constexpr,
    EACH: tl.constexpr,
    R: tl.constexpr,
    c: tl.constexpr,
    WHOLE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    lo, hi, ones = pair_tiles(codes, high, o_row, o_q, m_lo, m_hi, K, BITS, R, c, WHOLE, COMPILED)
    p_s = scales + place(o_row, (K + 63) // 64, 1, R)[None, :] + (o_q * R)[:, None]
    b_s = fetch(p_s, m_lo[:, None], WHOLE)[:, :, None]  # [S, BN, 1]
    if BITS == 8:
        b_y += f16_at(b_s, 0) * tl.dot(lo, b_x)
        b_y += f16_at(b_s, 16) * tl.dot(hi, b_x2)
    else:
        p_d = d + place(o_row, K // EACH, 1, R)[None, :] + (o_q // (EACH // 64) * R)[:, None]
        b_d = fetch(p_d, m_lo[:, None], WHOLE)[:, :, None]
        if BITS == 6:
            a, first = f16_at(b_d, 0), (tl.arange(0, 32) < 16)[None, :, None]
            a_lo, a_hi = a * i8_at(b_s, 0), a * i8_at(b_s, 16)
            b_y += a_lo * tl.dot(lo, b_x)  # as if the second half had the first one's scale
            b_y += a_hi * tl.dot(hi, b_x2)
            b_y += (a * i8_at(b_s, 8) - a_lo) * tl.dot(lo, tl.where(first, 0.0, b_x))
            b_y += (a * i8_at(b_s, 24) - a_hi) * tl.dot(hi, tl.where(first, 0.0, b_x2))
        else:
            a, b = f16_at(b_d, 0), f16_at(b_d, 16)
            a_lo, a_hi = a * u8_at(b_s, 0), a * u8_at(b_s, 16)
            b_y += a_lo * tl.dot(lo, b_x)
            b_y += a_hi * tl.dot(hi, b_x2)
            b_y -= (b * u8_at(b_s, 8) + 128.0 * a_lo) * tl.dot(ones, b_x)
            b_y -= (b * u8_at(b_s, 24) + 128.0 * a_hi) * tl.dot(ones, b_x2)
    return b_y


@triton.jit(do_not_specialize=["T", "stride_y"])
def linear_packed_kernel(
    x,  # [T, K], rows stride_x apart
    codes,  # planes of [N, K], GATED: [2 N, K]
    high,
    scales,
    d,
    bias,
    y,  # [T, N], rows stride_y apart
    T,
    N,
    K,
    stride_x,
    stride_y,
    BITS: tl.constexpr,
    EACH: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    COMPILED: tl.constexpr,
    EARLY: tl.constexpr,  # launched while the kernel before ends
    WHOLE: tl.constexpr,  # K is a multiple of 64 U S
    STAGES: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,  # pairs of groups one after the other
    S: tl.constexpr,  # and side by side
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    n_t = (T + BT - 1) // BT
    o_t, o_n = tl.program_id(0) % n_t * BT + tl.arange(0, BT), tl.program_id(0) // n_t * BN + tl.arange(0, BN)
    o_row = tl.minimum(o_n, N - 1).to(tl.int64)  # rows past the end are read again: no mask
    o_up = o_row + N
    m_t = (o_t < T)[None, None, :]
    p_x = x + o_t[None, None, :].to(tl.int64) * stride_x + tl.arange(0, 32)[None, :, None]
    b_y, b_up = tl.zeros([S, BN, BT], tl.float32), tl.zeros([S, BN, BT], tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for i_b in tl.range(0, (K + 64 * U - 1) // (64 * U), S, num_stages=STAGES):
        for c in tl.static_range(U):
            o_q = (i_b + tl.arange(0, S)) * U + c
            m_lo, m_hi = o_q * 2 < K // 32, o_q * 2 + 1 < K // 32
            o_k = (o_q * 64)[:, None, None]
            if WHOLE:
                b_x = tl.load(p_x + o_k, mask=m_t, other=0.0)
                b_x2 = tl.load(p_x + o_k + 32, mask=m_t, other=0.0)
            else:
                b_x = tl.load(p_x + o_k, mask=m_t & m_lo[:, None, None], other=0.0)
                b_x2 = tl.load(p_x + o_k + 32, mask=m_t & m_hi[:, None, None], other=0.0)
            b_y = add_pair(
                b_y, b_x, b_x2, codes, high, scales, d, o_row, o_q, m_lo, m_hi, K,
                BITS, EACH, R, c, WHOLE, COMPILED,
            )  # fmt: skip
            if GATED:
                b_up = add_pair(
                    b_up, b_x, b_x2, codes, high, scales, d, o_up, o_q, m_lo, m_hi, K,
                    BITS, EACH, R, c, WHOLE, COMPILED,
                )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    b_out = tl.sum(b_y, 0)
    if BIAS:
        b_out += tl.load(bias + o_row).to(tl.float32)[:, None]
    if GATED:
        b_sum = tl.sum(b_up, 0)
        if BIAS:
            b_sum += tl.load(bias + o_up).to(tl.float32)[:, None]
        b_out *= b_sum / (1.0 + tl.exp(-b_out))
    p_y = y + o_t[None, :].to(tl.int64) * stride_y + o_n[:, None]
    tl.store(p_y, b_out.to(y.dtype.element_ty), mask=(o_n < N)[:, None] & (o_t < T)[None, :])


def tile(bits: int, T: int, N: int, gated: bool) -> tuple[int, int, int, int, int, int | None]:
    """BN, S, U, warps, STAGES and the register limit: the fastest on an H200 at the widths of a 27B model."""
    if bits in (5, 6):  # a byte of the high plane is for pairs one after the other
        return 16, 2, 4, 2, 3, None
    if gated:
        return 16, 4, 1, 2, 4, 128 if T <= 8 else None
    return (32, 4, 1, 2, 4, 128) if N > 8192 and T <= 8 else (16, 8, 1, 4, 3, 128)


def linear_packed_triton(
    x: Tensor, weight: Packed, bias: Tensor | None = None, gated: bool = False, out: Tensor | None = None
) -> Tensor:
    (T, K), N = x.shape, weight.shape[0] // (1 + gated)
    y = torch.empty((T, N), dtype=x.dtype, device=x.device) if out is None else out
    if x.stride(-1) != 1:
        x = x.contiguous()
    BN, S, U, warps, stages, registers = tile(weight.bits, T, N, gated)
    BT = 8 if T <= 8 else 16
    early = has_pdl(x.device)
    if y.numel():
        linear_packed_kernel[(triton.cdiv(N, BN) * triton.cdiv(T, BT),)](
            x, *weight.planes, y if bias is None else bias, y, T, N, K, x.stride(0), y.stride(0),
            BITS=weight.bits, EACH=weight.each, BIAS=bias is not None, GATED=gated, COMPILED=COMPILED, EARLY=early,
            WHOLE=K % (64 * U * S) == 0, STAGES=stages, R=weight.beside, U=U, S=S, BT=BT, BN=BN, num_warps=warps,
            launch_pdl=early, **({} if registers is None else {"maxnreg": registers}),
        )  # fmt: skip
    return y


def suits_hopper(x: Tensor, weight: Packed, gated: bool = False) -> bool:
    """Whether the kernel in packed_hopper.py takes these shapes."""
    N, K = weight.shape
    whole = weight.beside == BESIDE and N % (BESIDE * (1 + gated)) == 0 and K % (128 if weight.bits == 8 else 256) == 0
    return whole and 0 < len(x) <= HOPPER_ROWS[weight.bits] and x.dtype == torch.bfloat16 and has_gluon(x.device)


def hopper_tile(T: int, N: int, K: int, gated: bool) -> tuple[int, int, int, int]:
    """S (workers' warps), DEPTH, programs a multiprocessor, registers: the fastest on an H200 at a 27B's widths."""
    if gated:
        return (4, 3, 3, 80) if T == 1 else (4, 3, 2, 128)
    few = T == 1 or (N <= 8192 and (T <= 8 or K <= 2 * N))
    return (4, 5, 3, 80) if few else (4, 5, 2, 128)


def step_bytes(bits: int, each: int) -> int:
    """What a warp takes of a tile in a step: codes, scales, and what the format has of d and of the high plane."""
    high = {5: 512, 6: 1024}.get(bits, 0)
    return 2048 + (128 if bits == 8 else 256 + 64 * (BLOCK // each)) + high


def boxes(plane: Tensor, width: int, rows: int) -> Any:
    """A plane as rows of `width` words, which the copy engine takes `rows` at a time."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], gl.int32)
    return TensorDescriptor.from_tensor(plane.view(-1).view(torch.int32).view(-1, width), [rows, width], layout)


def linear_packed_hopper(
    x: Tensor, weight: Packed, bias: Tensor | None = None, gated: bool = False, out: Tensor | None = None
) -> Tensor:
    """Arguments as linear_packed's, where suits_hopper."""
    from hybridkv.kernels.linear.packed_hopper import linear_packed_hopper_kernel

    (T, K), N, bits, each = x.shape, weight.shape[0] // (1 + gated), weight.bits, weight.each
    y = torch.empty((T, N), dtype=x.dtype, device=x.device) if out is None else out
    if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    S, depth, per_sm, registers = hopper_tile(T, N, K, gated)
    codes, scales = boxes(weight.codes, 32, 16 * S), boxes(weight.scales, 16, (2 if bits == 8 else 4) * S)
    high = boxes(weight.high, 32, (8 if bits == 6 else 4) * S) if bits in (5, 6) else codes
    d = scales if bits == 8 else boxes(weight.d, 16, S * BLOCK // each)
    ring = (1 + gated) * depth * S * step_bytes(bits, each)
    per_sm = max(1, min(per_sm, shared_memory(x.device) // (ring + 4096)))  # barriers, sums of the warps
    words, tiles = x.view(torch.int32), N // BESIDE
    blocks = 0 if T == 1 else triton.cdiv(T, 4 if bits == 6 else 8)
    linear_packed_hopper_kernel[(min(tiles, per_sm * sm_count(x.device)),)](
        words, codes, high, scales, d, y if bias is None else bias, y, T, N, K, words.stride(0), y.stride(0), tiles,
        BITS=bits, EACH=each, BIAS=bias is not None, GATED=gated, BLOCKS=blocks,
        EVEN=K % ((128 if bits == 8 else 256) * S) == 0, S=S, DEPTH=depth, num_warps=S, maxnreg=registers,
        launch_pdl=True,
    )  # fmt: skip
    return y


def linear_written_out(x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor) -> Tensor:
    """Through W in x's dtype, as many rows at a time as WORKSPACE has room for."""
    N, K = weight.shape
    step = min(N, max(ALIGNED, WORKSPACE // K // ALIGNED * ALIGNED))
    space = torch.empty(step, K, dtype=x.dtype, device=x.device)
    for a in range(0, N, step):
        part = weight.rows(slice(a, a + step))
        dequantised = dequantise_triton(part, space[: part.shape[0]])
        torch.mm(x, dequantised.T, out=out[:, a : a + step])
    return out if bias is None else out.add_(bias)


def linear_packed(
    x: Tensor,  # [T, K]
    weight: Packed,
    bias: Tensor | None = None,  # [N]
    gated: bool = False,  # weight [2 N, K]: silu(first half) * second half
    out: Tensor | None = None,  # [T, N], rows of which may lie apart
) -> Tensor:  # [T, N]
    if not use_triton(x):
        y = linear_packed_ref(x, weight, bias, gated)
        return y if out is None else out.copy_(y)
    if suits_hopper(x, weight, gated):
        return linear_packed_hopper(x, weight, bias, gated, out)
    if len(x) <= FEW_ROWS[weight.bits]:
        return linear_packed_triton(x, weight, bias, gated, out)
    y = out
    if gated or y is None:
        y = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    linear_written_out(x, weight, bias, y)
    return silu_mul(y) if gated else y
