"""linear_exact: x W^T + b whose rows do not depend on the other rows, for exact mode.

A BLAS library picks its blocking, and so the order of its sums, by the number of rows. On a CPU it is therefore always
called with 16 rows; the last call pads what is missing with zeros. On a GPU there is a kernel with tiles of one size
for any number of rows: an element is one sum over the inputs in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

linear_ref = F.linear
EXACT_ROWS = 16


def in_tiles(x: Tensor, product: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """`product` of x [T, K], EXACT_ROWS rows at a time -> [T, width]."""
    T = len(x)
    out = x.new_empty(T + -T % EXACT_ROWS, width)
    x = F.pad(x, (0, 0, 0, -T % EXACT_ROWS))
    for a in range(0, T, EXACT_ROWS):
        out[a : a + EXACT_ROWS] = product(x[a : a + EXACT_ROWS])
    return out[:T]


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


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N]; a row's result does not depend on T or on the row's place."""
    if use_triton(x):
        return linear_triton(x, weight, bias)
    return in_tiles(x, lambda rows: linear_ref(rows, weight, bias), weight.shape[0])
