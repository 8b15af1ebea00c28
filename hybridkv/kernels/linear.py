"""linear: x W^T + b, with W kept in the layout that the device multiplies fastest.

On a CPU the plain layout is re-ordered inside every call; oneDNN's own blocked layout, made once at load, halves the
time of a one-row product (measured in docs/facts.md). Elsewhere W stays as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

linear_ref = F.linear


class Linear:
    """A weight [rows, inputs] and an optional bias. The plain weight is not kept once it is packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape, self.bias = tuple(weight.shape), bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.packed = _can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
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
