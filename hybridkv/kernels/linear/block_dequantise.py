"""Values of a matrix in codes that have a scale for each block (block_scaled.py), by a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import has_pdl, tl, triton
from hybridkv.kernels.linear.block_scaled import BlockScaled, block_tile


@triton.jit
def dequantise_blocks_kernel(
    codes,  # of [N, K]
    scales,
    out,  # [end - begin, K]
    begin,
    end,
    K,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWERS: tl.constexpr,
    WHOLE: tl.constexpr,
    FAST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    o_n = begin + tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    i_k, o_row = tl.program_id(1) * BK, tl.minimum(o_n, end - 1)
    b_w = block_tile(
        codes, scales, o_row, o_row // ROWS, i_k, K, BITS, COLUMNS, POWERS, WHOLE, FAST, out.dtype.element_ty, BN, BK
    )
    o_k = i_k + tl.arange(0, BK)
    tl.store(out + (o_n - begin)[:, None] * K + o_k[None, :], b_w, mask=(o_n < end)[:, None] & (o_k < K)[None, :])


def dequantise_triton(weight: BlockScaled, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Rows of a matrix [N, K] -> [end - begin, K]."""
    form, K, (BN, BK) = weight.form, weight.shape[1], (32, 128)
    out = torch.empty((end - begin, K), dtype=dtype, device=weight.codes.device)
    if out.numel():
        dequantise_blocks_kernel[triton.cdiv(end - begin, BN), triton.cdiv(K, BK)](
            weight.codes, weight.scales, out, begin, end, K, ROWS=form.rows, BITS=form.bits, COLUMNS=form.columns,
            POWERS=form.scale_bytes == 1, WHOLE=K % BK == 0, FAST=has_pdl(weight.codes.device), BN=BN, BK=BK,
            num_warps=4,
        )  # fmt: skip
    return out
