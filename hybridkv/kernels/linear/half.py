"""HalfLinear: a layer like `Linear` on a CPU, with W in f16 and x, the sums and y in f32 (FBGEMM's product, in torch).

A product of few rows is bound by reading W, here half the bytes of f32. With many rows it takes about as long as f32.
Rounding a weight to f16 (2^-11) is little beside what a file of 4 to 8 bits has lost already, and nothing for bf16
weights above 6e-5 (docs/facts.md).

Where torch has no such product, or computes something else, `has_half` is False and weights stay in f32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hybridkv.kernels.activation import silu_mul
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed_planes import half_bytes, suits_half

F16_MAX = 65504.0


def linear_half_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] f32, weight [N, K] in any dtype, rounded to f16 -> [T, N] f32."""
    return torch.nn.functional.linear(x, weight.half().float(), bias)


def pack_half(weight: Tensor, bias: Tensor | None = None) -> Any:
    """[N, K] and [N] f32 -> an object that holds both, the matrix in FBGEMM's layout, for linear_half."""
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)


def linear_half(x: Tensor, packed: Any) -> Tensor:
    """x [T, K] f32, what pack_half made -> [T, N] f32."""
    return torch.ops.quantized.linear_dynamic_fp16(x, packed)


@cache
def has_half() -> bool:
    """Whether torch on this machine has the product, seen on a small one."""
    weight, x = torch.arange(-24.0, 24.0).view(3, 16) / 7, torch.arange(-16.0, 16.0).view(2, 16) / 3
    try:
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
        self.handle = pack_half(weight.contiguous(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear_half(x, self.handle)

    def columns(self) -> Tensor:
        """A few columns of W [N] as they are kept, f16: what the matrix is known by."""
        K = self.shape[1]
        chosen = torch.arange(0, K, -(-K // 4))
        one_hot = torch.zeros(len(chosen), K).scatter_(1, chosen[:, None], 1.0)
        found = linear_half(one_hot, self.handle)
        return (found if self.bias is None else found - self.bias).half()

    def gated(self, x: Tensor) -> Tensor:
        return silu_mul(self(x))

    def add_to(self, h: Tensor | None, x: Tensor) -> Tensor | None:
        return self(x)

    def adds_in_place(self, h: Tensor, x: Tensor) -> bool:
        return False
