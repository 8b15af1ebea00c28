"""linear_vector: x W^T + b for the few rows of a decode step, at the speed at which W can be read.

A program takes 16 rows of W and all of its columns: some hundred small programs fill the card, and no second kernel has
to add parts up. Its warps share the columns: of each S BK columns a warp multiplies BK, and at the end the S sums are
added in one order. W passes through shared memory into tensor cores; x [rows, K], padded to 8 or 16 rows, is the other
side, so bytes alone decide the time.

W is BF16, or E4M3 with an f32 scale for each row (linear_fp8), upcast in registers: every product is exact.
GATED: the rows of W are N gates, then N ups, and the result is silu(gate) * up.

The kernel is launched while the one before ends (PDL), and releases the next one when its own sums are done. Not
earlier: programs that come while others run would gather on the SMs that are free first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import (
    COMPILED,
    LARGE_SHARED_MEMORY,
    has_pdl,
    shared_memory,
    tl,
    triton,
    use_triton,
)

MAX_ROWS = 16
FASTER_ROWS = 8  # of x: up to this many, faster than cuBLAS; where cuBLAS needs two kernels, up to MAX_ROWS
LONG = 4096  # columns of W: with shorter sums the tiles of long ones were up to 5 % slower (2,560 columns, a 4B)
PADDED_ROWS = 8  # of x: up to this many are padded to 8, more to 16
# Four E4M3 to four BF16. The seven low bits, put at exponent and mantissa, are 2^120 times too small.
E4M3_TO_BF16 = tl.constexpr("""{
.reg .b32 a, b, c;
mov.b32 c, 0x7b807b80;
prmt.b32 a, $2, 0, 0x9180;
prmt.b32 b, $2, 0, 0xb3a2;
shl.b32 a, a, 4;
shl.b32 b, b, 4;
and.b32 a, a, 0x87f087f0;
and.b32 b, b, 0x87f087f0;
mul.bf16x2 $0, a, c;
mul.bf16x2 $1, b, c;
}""")


def linear_vector_ref(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    y = F.linear(x.float(), (weight if scale is None else weight.view(torch.float8_e4m3fn)).float())
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias.float()
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y.to(x.dtype)


@triton.jit
def upcast(b_w, COMPILED: tl.constexpr):
    """E4M3 as uint8 -> bf16; bf16 stays as it is. NaN becomes 480: its row has NaN for its scale."""
    if b_w.dtype != tl.uint8:
        return b_w
    elif COMPILED:
        return tl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [b_w], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return b_w.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=["T"])
def linear_vector_kernel(
    x,  # [T, K], rows stride_x apart
    w,  # [N, K], GATED: [2 N, K]
    scale,  # of the rows of w
    bias,
    y,  # [T, N]
    T,
    N,
    K,
    stride_x,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    COMPILED: tl.constexpr,
    WHOLE: tl.constexpr,  # K is a multiple of S BK
    STAGES: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    o_t, o_n = tl.arange(0, BT), tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, S)[:, None] * BK + tl.arange(0, BK)[None, :]
    o_row = tl.minimum(o_n, N - 1).to(tl.int64)  # rows past the end are read again: no mask
    p_w = w + o_row[None, :, None] * K + o_k[:, None, :]  # [S, BN, BK]
    p_up = p_w + N.to(tl.int64) * K
    p_x = x + o_t[None, None, :].to(tl.int64) * stride_x + o_k[:, :, None]  # [S, BK, BT]
    m_t = (o_t < T)[None, None, :]
    b_y, b_up = tl.zeros([S, BN, BT], tl.float32), tl.zeros([S, BN, BT], tl.float32)
    if COMPILED:
        tl.extra.cuda.gdc_wait()
    for i_k in tl.range(0, K, S * BK, num_stages=STAGES):
        m_k = i_k + o_k < K
        if WHOLE:
            b_x = tl.load(p_x + i_k, mask=m_t, other=0.0)
            b_w = tl.load(p_w + i_k)
        else:
            b_x = tl.load(p_x + i_k, mask=m_t & m_k[:, :, None], other=0.0)
            b_w = tl.load(p_w + i_k, mask=m_k[:, None, :], other=0)
        b_y = tl.dot(upcast(b_w, COMPILED), b_x, b_y)
        if GATED:
            if WHOLE:
                b_w = tl.load(p_up + i_k)
            else:
                b_w = tl.load(p_up + i_k, mask=m_k[:, None, :], other=0)
            b_up = tl.dot(upcast(b_w, COMPILED), b_x, b_up)
    if COMPILED:
        tl.extra.cuda.gdc_launch_dependents()
    b_out = row_sums(b_y, scale, bias, o_row, SCALE, BIAS)
    if GATED:
        b_out *= row_sums(b_up, scale, bias, o_row + N, SCALE, BIAS) / (1.0 + tl.exp(-b_out))
    p_y = y + o_t[None, :].to(tl.int64) * N + o_n[:, None]
    tl.store(p_y, b_out.to(y.dtype.element_ty), mask=(o_n < N)[:, None] & (o_t < T)[None, :])


@triton.jit
def row_sums(b_parts, scale, bias, o_row, SCALE: tl.constexpr, BIAS: tl.constexpr):
    """[S, BN, BT] -> [BN, BT], scaled, with the bias."""
    b_y = tl.sum(b_parts, 0)
    if SCALE:
        b_y *= tl.load(scale + o_row)[:, None]
    if BIAS:
        b_y += tl.load(bias + o_row).to(tl.float32)[:, None]
    return b_y


def tile(N: int, K: int, codes: bool, gated: bool, many: bool, room: bool) -> tuple[int, int, int, int]:
    """BN, BK, S (and warps), STAGES: the fastest on an H200 at the widths of a 27B model, whole and as 2, 4 and 8 ranks
    have them. `many`: x is padded to 16 rows, not to 8. `room`: the card has much shared memory.
    """
    if codes:
        return gated_tile_of_codes(N, many) if gated else tile_of_codes(N, K, many, room)
    if gated:
        return (16, 128, 2, 3) if 4096 <= N < (8192 if many or K >= LONG else 16384) else (16, 128, 2, 4)
    if N >= 5120 and N * K < 3 << 23:  # short sums: programs of one warp, which need not wait for others
        return (16, 128, 1, 6) if many or N >= 6144 else (16, 128, 1, 8)
    if not many and K >= LONG:
        return tile_of_long_sums(N, room)
    wave = 2128 if many else 4096  # 128 KiB with 16 rows of x, so a multiprocessor holds one program
    if wave > N and room:
        return 16, 128, 4, 5
    return (16, 128, 2, 3) if 8192 <= N < 12288 else (16, 128, 4, 3)


def tile_of_long_sums(N: int, room: bool) -> tuple[int, int, int, int]:
    """Of at most 8 rows of x."""
    if 6144 <= N < 12288:
        return 32, 128, 2, 4
    if 3072 <= N < 4608:
        return 16, 64, 4, 5
    if N < 3072 and room:
        return (16, 128, 4, 6) if N < 2128 else (16, 128, 4, 5)
    return 16, 128, 4, 3


def gated_tile_of_codes(N: int, many: bool) -> tuple[int, int, int, int]:
    """Of N gates and as many ups."""
    if 8192 <= N < 12288:
        return 16, 128, 2, 3
    if many or 3072 <= N < 8192:
        return 16, 128, 4, 3
    return (16, 128, 2, 4) if N < 3072 else (16, 128, 2, 2)


def tile_of_codes(N: int, K: int, many: bool, room: bool) -> tuple[int, int, int, int]:
    """A code is half a value's bytes, so wide tiles and deep rings pay where a multiprocessor holds few programs."""
    if K < 2560:
        return (16, 128, 2, 3) if many else (16, 128, 2, 4)
    if N >= 12288:
        return (32, 128, 2, 4) if many else (16, 128, 2, 3)
    if N >= 6144:
        return (16, 256, 2, 3) if many and room else (16, 128, 2, 4)
    if N < 4608 and room:
        if N < 3072:
            return (16, 256, 4, 4) if many else (16, 256, 4, 6)
        return (16, 256, 4, 3) if many else (16, 256, 2, 6)
    return (16, 128, 4, 3) if many else (16, 128, 4, 4)


def linear_vector_triton(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    (T, K), N = x.shape, len(weight) // (1 + gated)
    if N == 1:  # the compiler would treat N as a constant
        return linear_vector_ref(x, weight, scale, bias, gated)
    y = torch.empty((T, N), dtype=x.dtype, device=x.device)
    if x.stride(-1) != 1:
        x = x.contiguous()
    room = shared_memory(x.device) >= LARGE_SHARED_MEMORY
    many = T > PADDED_ROWS
    BN, BK, S, stages = tile(N, K, scale is not None, gated, many, room)
    if y.numel():
        linear_vector_kernel[(triton.cdiv(N, BN),)](
            x, weight, y if scale is None else scale, y if bias is None else bias, y, T, N, K, x.stride(0),
            SCALE=scale is not None, BIAS=bias is not None, GATED=gated, COMPILED=COMPILED, WHOLE=K % (S * BK) == 0,
            STAGES=stages, S=S, BT=16 if many else 8, BN=BN, BK=BK, num_warps=S, launch_pdl=COMPILED,
        )  # fmt: skip
    return y


def linear_vector(
    x: Tensor,  # [T, K], T <= MAX_ROWS
    weight: Tensor,  # [N, K] in x's dtype, or E4M3 as uint8
    scale: Tensor | None = None,  # [N] f32, of an E4M3 weight
    bias: Tensor | None = None,  # [N]
    gated: bool = False,  # weight [2 N, K]: silu(first half) * second half
) -> Tensor:  # [T, N]
    taken = use_triton(x) and (not x.is_cuda or has_kernel(x.device))
    return (linear_vector_triton if taken else linear_vector_ref)(x, weight, scale, bias, gated)


def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs there. It is launched with PDL, and converts E4M3 with instructions as new as that."""
    return has_pdl(device)


def suits_vector(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether this kernel is faster than cuBLAS for these shapes, as measured on an H200."""
    N, K = weight.shape
    two = gated or K > N  # cuBLAS needs a second kernel, for silu or to add up parts of long sums
    few = 0 < len(x) <= (MAX_ROWS if two else FASTER_ROWS) and K % 8 == 0  # rows of 16 bytes
    return few and x.dtype == torch.bfloat16 and weight.is_contiguous() and has_kernel(x.device)
