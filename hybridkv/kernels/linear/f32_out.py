"""linear_wide: x W^T with f32 results, from x and W in bf16, whose products f32 holds exactly.

Gates and scores are added up, exponentiated and compared, and must not be rounded to bf16 first. A GPU's tensor cores
sum in f32 anyway and write that. A CPU has W in f32 (`wide_dtype`); with a W in bf16 the result is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.linear.block_linear import BlockLinear, linear_blocks
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.kernels.linear.linear import Linear


def wide_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which W is stored on this device."""
    return dtype if device.type == "cuda" else torch.float32


def linear_wide(x: Tensor, linear: Linear) -> Tensor:
    """x [T, K] -> [T, N] f32."""
    if isinstance(linear, BlockLinear):
        f32 = torch.float32
        parts = [
            linear_blocks(x, p, dtype=f32) if isinstance(p, BlockScaled) else linear_wide(x, p) for p in linear.parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if x.is_cuda and linear.weight.dtype != torch.float32:
        return torch.mm(x, linear.weight.t(), out_dtype=torch.float32)
    return linear(x.to(linear.weight.dtype)).float()
