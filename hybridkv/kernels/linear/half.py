"""HalfLinear: a layer like `Linear` on a CPU, with W in f16 and x, the sums and y in f32 (FBGEMM's product, in torch).

A product of few rows is bound by reading W: half the bytes of f32, and a call that costs 2 us where oneDNN's costs 14.
With many rows it is about as fast as f32. Rounding a weight to f16 (2^-11) is little beside what a file of 4 to 8 bits
has lost already, and nothing for bf16 weights above 6e-5 (docs/facts.md).

torch marks the two functions as deprecated. Where they are missing, or compute something else, `has_half` is False and
weights stay in f32.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from hybridkv.kernels.activation import silu_mul
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed_planes import half_bytes, suits_half

F16_MAX = 65504.0


def linear_half_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] f32, weight [N, K] in any dtype, rounded to f16 -> [T, N] f32."""
    return torch.nn.functional.linear(x, weight.half().float(), bias)


def pack_half(weight: Tensor) -> Tensor:
    """[N, K] f32 -> a handle of the matrix in FBGEMM's layout, for linear_half."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fbgemm_.* is deprecated")
        return torch.fbgemm_pack_gemm_matrix_fp16(weight)  # type: ignore[attr-defined]


def linear_half(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] f32, a matrix [N, K] of pack_half -> [T, N] f32."""
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, bias)  # type: ignore[attr-defined]


@cache
def has_half() -> bool:
    """Whether torch on this machine has the product, seen on a small one."""
    weight, x = torch.arange(-24.0, 24.0).view(3, 16) / 7, torch.arange(-16.0, 16.0).view(2, 16) / 3
    try:
        with warnings.catch_warnings():  # of the first call
            warnings.filterwarnings("ignore", "fbgemm_.* is deprecated")
            found = linear_half(x, pack_half(weight))
        return bool(torch.allclose(found, linear_half_ref(x, weight), rtol=1e-5, atol=1e-5))
    except (AttributeError, RuntimeError, TypeError):
        return False


def keeps_half(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices of a model of this dtype there can be f16."""
    return device.type == "cpu" and dtype == torch.float32 and has_half()


def fits_half(weight: Tensor) -> bool:
    """Whether a matrix suits the layout, and f16 holds all of its values."""
    if weight.dtype != torch.float32 or not suits_half(*weight.shape):
        return False
    low, high = torch.aminmax(weight)
    return max(-float(low), float(high)) <= F16_MAX


class HalfLinear(Linear):
    """A weight [N, K] for which fits_half holds, and an optional bias [N]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        self.bias = bias
        self.exact = False
        self.packed = True
        self.nbytes = half_bytes(*self.shape) + (0 if bias is None else bias.nbytes)
        self.handle = pack_half(weight.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        return linear_half(x, self.handle, self.bias)

    def columns(self) -> Tensor:
        """A few columns of W [N] as they are kept, f16: what the matrix is known by."""
        K = self.shape[1]
        return linear_half(torch.eye(K)[:: -(-K // 4)], self.handle).half()

    def gated(self, x: Tensor) -> Tensor:
        return silu_mul(self(x))

    def add_to(self, h: Tensor | None, x: Tensor) -> Tensor | None:
        return self(x)

    def adds_in_place(self, h: Tensor, x: Tensor) -> bool:
        return False
