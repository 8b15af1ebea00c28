"""linear_wide: x W^T with f32 results, from x and W in bf16, whose products f32 holds exactly.

Gates and scores are added up, exponentiated and compared, and must not be rounded to bf16 first. A GPU's tensor cores
sum in f32 anyway and write that. A CPU has W in f32 (`wide_dtype`); with a W in bf16 the result is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.linear.linear import Linear


def wide_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which W is stored on this device."""
    return dtype if device.type == "cuda" else torch.float32


def linear_wide(x: Tensor, linear: Linear) -> Tensor:
    """x [T, K] -> [T, N] f32."""
    if x.is_cuda and linear.weight.dtype != torch.float32:
        return torch.mm(x, linear.weight.t(), out_dtype=torch.float32)
    return linear(x.to(linear.weight.dtype)).float()
