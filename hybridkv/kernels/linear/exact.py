"""linear_exact: x W^T + b whose rows do not depend on the other rows, for exact mode.

A BLAS library picks its blocking, and so the order of its sums, by the number of rows. On a CPU it is therefore always
called with 16 rows; the last call pads what is missing with zeros. It picks by the rows of W, too: W of an expert, of
which a rank may have some rows, is multiplied in blocks of one size (`linear_exact_blocks`).

On a GPU an element is one sum over the inputs in ascending order, from a kernel with tiles of one size for any number
of rows. Hopper GPUs have a kernel of their own for bf16 (exact_hopper.py), with the same order in tiles that suit the
number of rows.

Which of the kernels runs depends on the dtype and the weight's shape, never on the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import has_gluon, sm_count, tl, triton, use_triton
from hybridkv.kernels.linear.skinny import HALF, STEP, boxes

linear_ref = F.linear
EXACT_ROWS = 16
EXACT_BLOCK = 128  # rows of an expert's W
MIN_WIDTH = 64  # rows of W: fewer are left to the plain kernel


class Tiles(NamedTuple):
    """How a product is divided over programs. Only speed depends on it."""

    rows: int  # of W: 32 (then not gated), 64 or 128
    BT: int  # rows of x
    stages: int  # of the ring
    C: int  # tiles of 64 columns in a stage
    per_sm: int = 1  # programs beside each other on a multiprocessor; 0: one for each tile
    registers: int = 64  # of a thread, as they are launched


# Measured on an H200 at the widths of a 27B model.
# A decode step's few rows: for a wide W, and for one with fewer blocks of 64 rows than there are multiprocessors.
FEW = {
    8: (Tiles(64, 8, 12, 2, per_sm=0), Tiles(32, 8, 7, 2, per_sm=0)),
    16: (Tiles(64, 16, 3, 2, per_sm=0), Tiles(32, 16, 6, 2, per_sm=0)),
    32: (Tiles(64, 32, 5, 1, per_sm=0, registers=72), Tiles(32, 32, 6, 2, per_sm=0)),
    64: (Tiles(64, 64, 6, 2, per_sm=0, registers=96),) * 2,
}
# More rows: tiles, how fast they are against each other, and the rows up to which they are.
MANY = {
    Tiles(128, 256, 4, 1, registers=168): (1.0, math.inf),
    Tiles(128, 128, 6, 1, registers=168): (0.96, math.inf),
    Tiles(64, 128, 8, 1, registers=128): (0.85, 512),
}


def tiles_for(T: int, N: int, gated: bool, sms: int) -> Tiles:
    """The fastest for T rows of x and N of W: a choice without an effect on the bits."""
    for BT, (wide, narrow) in FEW.items():
        if T <= BT:
            return wide if gated or triton.cdiv(N, wide.rows) >= sms else narrow

    def time(tiles: Tiles) -> float:
        turns = triton.cdiv(triton.cdiv(N, tiles.rows) * triton.cdiv(T, tiles.BT), sms)
        return turns * tiles.rows * tiles.BT / MANY[tiles][0]

    return min((tiles for tiles, (_, most) in MANY.items() if most >= T), key=time)


def in_tiles(x: Tensor, product: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """`product` of x [T, K], EXACT_ROWS rows at a time -> [T, width]."""
    T = len(x)
    out = x.new_empty(T + -T % EXACT_ROWS, width)
    x = F.pad(x, (0, 0, 0, -T % EXACT_ROWS))
    for a in range(0, T, EXACT_ROWS):
        out[a : a + EXACT_ROWS] = product(x[a : a + EXACT_ROWS])
    return out[:T]


def linear_exact_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """linear_exact on a CPU, where an output does not depend on the other rows of the weight either."""
    N = len(weight)
    if N < EXACT_BLOCK:
        weight = F.pad(weight, (0, 0, 0, EXACT_BLOCK - N))

    def product(rows: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), len(weight))
        for a in range(0, len(weight), EXACT_BLOCK):
            block = slice(min(a, len(weight) - EXACT_BLOCK), a + EXACT_BLOCK)  # the last one may begin in another
            out[:, block] = linear_ref(rows, weight[block])
        return out

    return in_tiles(x, product, len(weight))[:, :N]


@triton.jit(do_not_specialize=["T"])
def linear_kernel(
    x,  # [T, K]
    w,  # [N, K]
    bias,  # [N]
    y,  # [T, N]
    T,
    N,
    K,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_m = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    b_y = tl.zeros([BM, BN], tl.float32)
    for i_k in tl.range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_x = tl.load(x + o_m[:, None] * K + o_k[None, :], mask=(o_m[:, None] < T) & (o_k[None, :] < K), other=0.0)
        b_w = tl.load(w + o_n[None, :] * K + o_k[:, None], mask=(o_n[None, :] < N) & (o_k[:, None] < K), other=0.0)
        b_y = tl.dot(b_x, b_w, b_y, input_precision="ieee")
    if BIAS:
        b_y += tl.load(bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    m_y = (o_m[:, None] < T) & (o_n[None, :] < N)
    tl.store(y + o_m[:, None] * N + o_n[None, :], b_y.to(y.dtype.element_ty), mask=m_y)


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    (T, K), N = x.shape, weight.shape[0]
    y = torch.empty((T, N), dtype=x.dtype, device=x.device)
    # fixed for each dtype: the size of a tile decides which instruction multiplies it
    BM, BN, BK = (32, 64, 32) if x.dtype == torch.float32 else (64, 64, 64)
    if T:
        linear_kernel[triton.cdiv(N, BN), triton.cdiv(T, BM)](
            x.contiguous(), weight.contiguous(), y if bias is None else bias, y, T, N, K,
            BIAS=bias is not None, BM=BM, BN=BN, BK=BK, num_warps=4, num_stages=3,
        )  # fmt: skip
    return y


def suits_hopper(x: Tensor, weight: Tensor) -> bool:
    """Whether exact_hopper.py multiplies with this weight."""
    N, K = weight.shape
    if not has_gluon(weight.device) or not x.dtype == weight.dtype == torch.bfloat16:
        return False
    return N >= MIN_WIDTH and K > 0 and K % 8 == 0  # rows of 16 bytes


def at_16_bytes(x: Tensor) -> Tensor:
    """x [T, K], copied if its rows do not begin at every 16 bytes, as the copy engine needs."""
    fits = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def linear_hopper(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False, tiles: Tiles | None = None
) -> Tensor:
    """`gated`: weight [2 N, K], silu(first half) * second half -> [T, N]. `tiles`: other ones than for these shapes."""
    from hybridkv.kernels.linear.exact_hopper import linear_exact_hopper_kernel

    (T, K), N = x.shape, len(weight) // (1 + gated)
    y = torch.empty((T, N), dtype=x.dtype, device=x.device)
    if not T:
        return y
    rows, BT, stages, C, per_sm, registers = tiles or tiles_for(T, len(weight), gated, sm_count(x.device))
    across, along = triton.cdiv(len(weight), rows), triton.cdiv(T, BT)
    programs = min(across * along, per_sm * sm_count(x.device) or across * along)
    matrix = at_16_bytes(weight)
    linear_exact_hopper_kernel[(programs,)](
        boxes(at_16_bytes(x), BT), boxes(matrix, HALF // 2 if gated else rows), y if bias is None else bias, y, T, N,
        across, along, triton.cdiv(K, C * STEP), GATED=gated, BIAS=bias is not None, ROWS=rows, BT=BT, S=stages, C=C,
        REGISTERS=(3 * registers - 40) // 16 * 8, num_warps=4, maxnreg=registers,
        launch_pdl=matrix is weight,  # a copy is not constant: the kernel before has written it
    )  # fmt: skip
    return y


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N]; a row's result does not depend on T or on the row's place."""
    if suits_hopper(x, weight):
        return linear_hopper(x, weight, bias)
    if use_triton(x):
        return linear_triton(x, weight, bias)
    return in_tiles(x, lambda rows: linear_ref(rows, weight, bias), weight.shape[0])
