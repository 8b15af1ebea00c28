"""Linear: x W^T + b as a layer of a model, with W kept in the layout that the device multiplies fastest.

On a CPU a plain layout would be reordered in every call. oneDNN's own blocked layout, made once at load, halves the
time of a one-row product (docs/facts.md). Elsewhere W stays as it is: cuBLAS multiplies, and on a Hopper GPU
a kernel of our own where x has few rows (linear_vector, linear_rows). W may also be FP8 (linear_fp8). In exact mode
products take the forms of exact.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.activation import silu_mul, silu_mul_exact
from hybridkv.kernels.linear.exact import in_tiles, linear_exact, linear_hopper, linear_ref, suits_hopper
from hybridkv.kernels.linear.fp8 import linear_fp8
from hybridkv.kernels.linear.gemv import MAX_ROWS, linear_vector, suits_vector
from hybridkv.kernels.linear.skinny import linear_rows, suits_rows

MANY_ROWS = 1024  # of x: from here on cuBLAS adds its product to h for less than a second pass


class Linear:
    """A weight [N, K] and an optional bias [N]. The plain weight is not kept once it is packed. With a scale [N] the
    weight is E4M3 values as uint8 (linear_fp8).
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, exact: bool = False, scale: Tensor | None = None
    ) -> None:
        self.shape = tuple(weight.shape)
        self.bias = bias
        self.exact = exact
        self.scale = scale
        self.nbytes = sum(part.nbytes for part in (weight, bias, scale) if part is not None)
        self.packed = _can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        if not self.exact:
            return self._product(x)
        if self.packed:
            return in_tiles(x, self._product, self.shape[0])
        return linear_exact(x, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up [T, N / 2], where the first half of the rows of W are gates and the second ups."""
        if self.exact:
            if suits_hopper(x, self.weight):
                return linear_hopper(x, self.weight, self.bias, gated=True)
            return silu_mul_exact(self(x))
        if self.scale is None and suits_rows(x, self.weight):
            return linear_rows(x, self.weight, self.bias, gated=True)
        few_fp8 = self.scale is not None and len(x) <= MAX_ROWS
        if few_fp8 or suits_vector(x, self.weight, gated=True):
            return linear_vector(x, self.weight, self.scale, self.bias, gated=True)
        return silu_mul(self(x))

    def add_to(self, h: Tensor | None, x: Tensor) -> Tensor | None:
        """x W^T [T, N], which the caller adds to h [T, N]; or None: then h is the sum already."""
        if h is None or not self.adds_in_place(h, x):
            return self(x)
        h.addmm_(x, self.weight.t())  # rounded once
        return None

    def adds_in_place(self, h: Tensor, x: Tensor) -> bool:
        """Whether add_to adds to h itself, where cuBLAS does that for less than a second pass.

        A subclass says False if its weight is no plain matrix, or if its product is only a part of the sum that belongs
        in h (inputs split over several devices): that part must be summed over the devices before it is added.
        """
        plain = not self.exact and self.scale is None and self.bias is None
        return plain and x.is_cuda and len(x) >= MANY_ROWS and h.is_contiguous()

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
