"""Row arithmetic of exact mode: an element's result depends on its own inputs, never on where in a tensor it lies.

torch's CPU loops run a vector body and a scalar tail. An operation that IEEE defines (+, -, *, /, sqrt) gives the same
bits in both, and so do exp, log1p, cos and sin, which pad their tail; sigmoid, silu, softplus and logaddexp do not.
Sums run over a fixed tree of additions, so the order is a function of the width alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over one dimension, kept with size 1: halves are added to each other until one element is left."""
    n = x.shape[dim]
    while n > 1:
        half = n // 2
        added = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat((added, x.narrow(dim, n - 1, 1)), dim) if n % 2 else added
        n -= half
    return x


def sigmoid_exact(x: Tensor) -> Tensor:
    return (1 / (1 + torch.exp(-x.float()))).to(x.dtype)


def silu_exact(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def softplus_exact(x: Tensor) -> Tensor:
    """log(1 + exp(x)), written so that nothing overflows."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def softmax_exact(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    return powers / tree_sum(powers)
