"""linear_blocks: x W^T with W in codes that have a scale for each block (block_scaled.py).

    y[t, g N + n] = sum_k x[t, g K + k] * value[g N + n, k]        groups g, each with inputs of its own; mostly one

Few rows: codes become numbers in registers (block_rows.py), and the time is that of reading the codes. Many rows:
rows of W are dequantised, so many at a time that they are not much memory (WRITTEN), and multiplied by the library.
That is what the reference does for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.activation import silu_mul
from hybridkv.kernels.backend import HAS_TRITON, capability, has_pdl, tl, triton, use_triton
from hybridkv.kernels.linear.block_dequantise import dequantise_triton
from hybridkv.kernels.linear.block_form import WRITTEN
from hybridkv.kernels.linear.block_rows import as_pairs, few_rows_tile, rows_form
from hybridkv.kernels.linear.block_scaled import BlockScaled, dequantise_rows, tile_rows
from hybridkv.kernels.linear.linear import Linear

FEW_ROWS = 32  # of x: up to this many, products read the codes themselves
EVEN = 16  # parts of W begin at a multiple of so many rows, and so of 32 bytes of a row of the result


def linear_blocks_ref(x: Tensor, weight: BlockScaled, groups: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    return _by_dequantised(x, weight, groups, dtype, dequantise_rows, tile_rows(weight.shape[1]))


def _by_dequantised(
    x: Tensor, weight: BlockScaled, groups: int, dtype: torch.dtype | None, dequantise: Callable[..., Tensor], step: int
) -> Tensor:
    """`step` rows of W at a time. Results are in x's dtype, or in f32."""
    assert dtype in (None, x.dtype, torch.float32)
    (N, K), T = weight.shape, len(x)
    each = N // groups
    wide = dtype not in (None, x.dtype)
    if groups == 1 and 0 < each <= step and not wide:
        return F.linear(x, dequantise(weight, 0, N, x.dtype))
    out = x.new_empty((T, N), dtype=dtype or x.dtype)
    given = x if x.is_cuda else x.to(out.dtype)
    for g in range(groups):
        mine = given[:, g * K : (g + 1) * K]
        for a in range(g * each, (g + 1) * each, step):
            b = min(a + step, (g + 1) * each)
            w = dequantise(weight, a, b, x.dtype)
            if wide and x.is_cuda:
                torch.mm(mine, w.t(), out_dtype=out.dtype, out=out[:, a:b])
            else:
                torch.mm(mine, w.to(out.dtype).t(), out=out[:, a:b])
            del w  # the next one takes its place
    return out


@triton.jit(do_not_specialize=["T"])
def few_rows_kernel(
    x,  # [T, G K], rows stride_x apart; of two codes in a byte pairs of numbers
    codes,  # of [G N, K]
    scales,
    y,  # [T, G N], rows stride_y apart
    T,
    N,
    K,
    stride_x,
    stride_y,
    FORM: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    o_t, o_n = tl.arange(0, BT), tl.program_id(0) * BN + tl.arange(0, BN)
    i_g, m_t = tl.program_id(1).to(tl.int64), o_t < T
    o_row = i_g * N + tl.minimum(o_n, N - 1)  # rows past the end are read again: no mask
    p_x = i_g * (K * FORM[1] // 8) + o_t.to(tl.int64) * stride_x
    if FAST:
        tl.extra.cuda.gdc_wait()
    b_y = few_rows_tile(x, p_x, m_t, codes, scales, o_row, o_row // FORM[0], K, FORM, FAST, STAGES, BN, BT)
    if FAST:
        tl.extra.cuda.gdc_launch_dependents()
    p_y = y + i_g * N + o_t.to(tl.int64)[None, :] * stride_y + o_n[:, None]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=(o_n < N)[:, None] & m_t[None, :])


def tile(T: int, N: int, columns: int) -> tuple[int, dict[str, int]]:
    """(columns of a step, the rest) for T rows of x and N rows of codes in blocks of so many columns: the fastest on an
    H200 at V4-Flash's widths.
    """
    BT = max(8, triton.next_power_of_2(T))
    if T > 16:
        return 4 * columns, dict(BT=BT, BN=32, STAGES=2, num_warps=4)
    if N >= 8192:
        return 256, dict(BT=BT, BN=16, STAGES=4, num_warps=2)
    return 512, dict(BT=BT, BN=16, STAGES=4, num_warps=4)


def linear_blocks_triton(x: Tensor, weight: BlockScaled, groups: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    (T, _), (rows, K) = x.shape, weight.shape
    N = rows // groups
    if T > FEW_ROWS or x.dtype != torch.bfloat16:
        step = max(EVEN, WRITTEN // max(K, 1) // EVEN * EVEN)
        return _by_dequantised(x, weight, groups, dtype, dequantise_triton, step)
    y = torch.empty((T, rows), dtype=dtype or x.dtype, device=x.device)
    (columns, sizes), fast = tile(T, rows, weight.form.columns), has_pdl(x.device)
    if y.numel():
        given = as_pairs(x) if weight.form.bits == 4 else x if x.stride(-1) == 1 else x.contiguous()
        few_rows_kernel[triton.cdiv(N, sizes["BN"]), groups](
            given, weight.codes, weight.scales, y, T, N, K, given.stride(0), y.stride(0),
            FORM=rows_form(weight, columns), FAST=fast, launch_pdl=fast, **sizes,
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


def keeps_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model of this dtype is better kept in codes on this device, where nobody has asked: half the bytes or a
    quarter, and faster steps. In f32, and on a CPU, codes are dequantised in every step.
    """
    return dtype == torch.bfloat16 and HAS_TRITON and capability(device) >= (8, 0)


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
