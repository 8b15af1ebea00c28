"""linear: x W^T + b, with W kept in the layout that the device multiplies fastest.

On a CPU the plain layout is re-ordered inside every call; oneDNN's own blocked layout, made once at load, halves the
time of a one-row product (measured in docs/facts.md). Elsewhere W stays as it is: the library multiplies, and on a
Hopper GPU a kernel of our own where x has few rows (linear_vector, linear_rows). W may also be FP8 (linear_fp8).

The library picks its blocking, and so the order of its sums, by the number of rows. In exact mode it is therefore
always called with 16 rows, of which the last call pads what is missing with zeros. On a GPU exact mode has a kernel of
its own with tiles of one size for any number of rows: an element is one sum over the inputs in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.activation import silu_mul, silu_mul_exact
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.linear.fp8 import linear_fp8
from hybridkv.kernels.linear.gemv import MOST_ROWS, linear_vector, suits_vector
from hybridkv.kernels.linear.skinny import linear_rows, suits_rows

linear_ref = F.linear
EXACT_ROWS = 16
MANY_ROWS = 1024  # of x: from here on the library's product adds to what is there


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs]; a row's result does not depend on T or on the row's place."""
    if use_triton(x):
        return linear_triton(x, weight, bias)
    return in_tiles(x, lambda rows: linear_ref(rows, weight, bias), weight.shape[0])


def in_tiles(x: Tensor, product: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """`product` of x [T, inputs], 16 rows at a time -> [T, width]."""
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
    # one choice for each dtype: a tile's size decides which instruction multiplies it
    BM, BN, BK = (32, 64, 32) if x.dtype == torch.float32 else (64, 64, 64)
    if T:
        linear_kernel[triton.cdiv(N, BN), triton.cdiv(T, BM)](
            x.contiguous(), weight.contiguous(), y if bias is None else bias, y, T, N, K,
            BIAS=bias is not None, BM=BM, BN=BN, BK=BK, num_warps=4, num_stages=3,
        )  # fmt: skip
    return y


class Linear:
    """A weight [rows, inputs] and an optional bias. The plain weight is not kept once it is packed. With a scale [rows]
    the weight is E4M3 codes (linear_fp8).
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, exact: bool = False, scale: Tensor | None = None
    ) -> None:
        self.shape, self.bias, self.exact, self.scale = tuple(weight.shape), bias, exact, scale
        self.nbytes = sum(part.nbytes for part in (weight, bias, scale) if part is not None)
        self.packed = _can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.exact and self.packed:
            return in_tiles(x, self._product, self.shape[0])
        return linear_exact(x, self.weight, self.bias) if self.exact else self._product(x)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up, where the first half of the rows are gates and the second ups."""
        coded = self.scale is not None and len(x) <= MOST_ROWS
        if self.scale is None and not self.exact and suits_rows(x, self.weight):
            return linear_rows(x, self.weight, self.bias, gated=True)
        if coded or not self.exact and suits_vector(x, self.weight, gated=True):
            return linear_vector(x, self.weight, self.scale, self.bias, gated=True)
        return (silu_mul_exact if self.exact else silu_mul)(self(x))

    def add_to(self, h: Tensor | None, x: Tensor) -> Tensor | None:
        """x W^T; or, where the library adds it to h [T, rows] for less than a second pass, None and h is the sum."""
        if h is None or not x.is_cuda or self.exact or self.scale is not None or self.bias is not None:
            return self(x)
        if len(x) < MANY_ROWS or not h.is_contiguous():
            return self(x)
        h.addmm_(x, self.weight.t())  # rounded once
        return None

    def _product(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            return linear_fp8(x, self.weight, self.scale, self.bias)
        if suits_rows(x, self.weight):
            return linear_rows(x, self.weight, self.bias)
        if suits_vector(x, self.weight):
            return linear_vector(x, self.weight, bias=self.bias)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return linear_ref(x, self.weight, self.bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or weight.numel() == 0:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and fast_bf16())


def fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
