"""linear_wide: x W^T with f32 results, from a narrower x and W whose products f32 holds exactly.

Gates and scores are added up, exponentiated and compared, and are not to be rounded to bf16 first. A GPU's matrix unit
sums in f32 anyway and writes what it has. A CPU has W in f32 (`wide_dtype`); a W that is left in bf16 rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.linear.linear import Linear


def wide_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What W is to be stored in."""
    return dtype if device.type == "cuda" else torch.float32


def linear_wide(x: Tensor, linear: Linear) -> Tensor:
    """x [T, inputs] -> [T, rows] f32."""
    if x.is_cuda and linear.weight.dtype != torch.float32:
        return torch.mm(x, linear.weight.t(), out_dtype=torch.float32)
    return linear(x.to(linear.weight.dtype)).float()
