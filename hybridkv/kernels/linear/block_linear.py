"""linear_blocks: x W^T with W in codes that have a scale for each block (block_scaled.py). W is never written out.

    y[t, g N + n] = sum_k x[t, g K + k] * value[g N + n, k]        groups g, each with inputs of its own; mostly one

A program dequantises tiles of W in registers and multiplies them with tensor cores; W is the left side, so that a tile
of few rows of x is no wider than it has to be. Few rows: small tiles of W, many programs, and the time is that of
reading the codes. Many rows: a tile of W is dequantised for each BT rows of x.

The reference dequantises a few rows of W at a time (TILE) and multiplies in x's dtype.

The sizes of the tiles are not measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.activation import silu_mul
from hybridkv.kernels.backend import has_pdl, tl, triton, use_triton
from hybridkv.kernels.linear.block_scaled import BlockScaled, block_tile, dequantise_rows, tile_rows
from hybridkv.kernels.linear.linear import Linear

FEW_ROWS = 16  # of x: up to this many, small tiles


def linear_blocks_ref(x: Tensor, weight: BlockScaled, groups: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    (N, K), T = weight.shape, len(x)
    out, each, step = x.new_empty((T, N), dtype=dtype or x.dtype), N // groups, tile_rows(K)
    given, x = x.dtype, x.to(out.dtype)
    for g in range(groups):
        for a in range(g * each, (g + 1) * each, step):
            b = min(a + step, (g + 1) * each)
            out[:, a:b] = F.linear(x[:, g * K : (g + 1) * K], dequantise_rows(weight, a, b, given).to(x.dtype))
    return out


@triton.jit(do_not_specialize=["T"])
def linear_blocks_kernel(
    x,  # [T, G K], rows stride_x apart
    codes,  # of [G N, K]
    scales,
    y,  # [T, G N], rows stride_y apart
    T,
    N,
    K,
    stride_x,
    stride_y,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWERS: tl.constexpr,
    WHOLE: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    n_t = tl.cdiv(T, BT)
    o_t = tl.program_id(0) % n_t * BT + tl.arange(0, BT)
    o_n = tl.program_id(0) // n_t * BN + tl.arange(0, BN)
    i_g = tl.program_id(1).to(tl.int64)
    o_row = i_g * N + tl.minimum(o_n, N - 1)  # rows past the end are read again: no mask
    m_t = o_t < T
    p_x = x + i_g * K + o_t.to(tl.int64)[None, :] * stride_x
    b_y = tl.zeros([BN, BT], tl.float32)
    for i_k in tl.range(0, K, BK, num_stages=STAGES):
        o_k = i_k + tl.arange(0, BK)
        b_x = tl.load(p_x + o_k[:, None], mask=m_t[None, :] & (o_k < K)[:, None], other=0.0)
        b_w = block_tile(
            codes, scales, o_row, o_row // ROWS, i_k, K, BITS, COLUMNS, POWERS, WHOLE, FAST, x.dtype.element_ty, BN, BK
        )
        b_y = tl.dot(b_w, b_x, b_y, input_precision="ieee")
    p_y = y + i_g * N + o_t.to(tl.int64)[None, :] * stride_y + o_n[:, None]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=(o_n < N)[:, None] & m_t[None, :])


def tile(dtype: torch.dtype, T: int, N: int) -> dict[str, int]:
    """Small tiles while there are few rows, where reading W takes most of the time. Not measured."""
    if dtype == torch.float32:
        return dict(BN=32, BT=16, BK=32, STAGES=2, num_warps=4)
    if T <= FEW_ROWS:
        return dict(BN=64 if N > 8192 else 32, BT=16, BK=128, STAGES=4, num_warps=4)
    return dict(BN=128, BT=64, BK=64, STAGES=3, num_warps=8)


def linear_blocks_triton(x: Tensor, weight: BlockScaled, groups: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    (T, _), (rows, K), form = x.shape, weight.shape, weight.form
    y = torch.empty((T, rows), dtype=dtype or x.dtype, device=x.device)
    if x.stride(-1) != 1:
        x = x.contiguous()
    N = rows // groups
    sizes = tile(x.dtype, T, N)
    if y.numel():
        linear_blocks_kernel[triton.cdiv(N, sizes["BN"]) * triton.cdiv(T, sizes["BT"]), groups](
            x, weight.codes, weight.scales, y, T, N, K, x.stride(0), y.stride(0), ROWS=form.rows, BITS=form.bits,
            COLUMNS=form.columns, POWERS=form.scale_bytes == 1, WHOLE=K % sizes["BK"] == 0, FAST=has_pdl(x.device),
            **sizes,
        )  # fmt: skip
    return y


def linear_blocks(
    x: Tensor,  # [T, groups K]
    weight: BlockScaled,  # [groups N, K]
    groups: int = 1,
    dtype: torch.dtype | None = None,  # of the result; None: x's
) -> Tensor:  # [T, groups N]
    op = linear_blocks_triton if use_triton(x) else linear_blocks_ref
    return op(x, weight, groups, dtype)


class BlockLinear(Linear):
    """A layer like `Linear` of several projections of the same inputs, each in codes or in a plain dtype."""

    def __init__(self, parts: Sequence[BlockScaled | Linear], bias: Tensor | None = None) -> None:
        self.parts = tuple(parts)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.bias = bias
        self.exact = False
        self.packed = True
        self.nbytes = sum(part.nbytes for part in parts) + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        done = [linear_blocks(x, part) if isinstance(part, BlockScaled) else part(x) for part in self.parts]
        y = done[0] if len(done) == 1 else torch.cat(done, 1)
        return y if self.bias is None else y.add_(self.bias)

    def gated(self, x: Tensor) -> Tensor:
        return silu_mul(self(x))

    def adds_in_place(self, h: Tensor, x: Tensor) -> bool:
        return False
