"""Norms over the last dimension, arithmetic in f32, result in the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.exact import silu_exact, tree_sum


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. `weight` is f32; models with zero-centred weights add their 1 when they
    load.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return rms_norm_ref(x, weight, eps)


def gated_rms_norm_ref(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate), gate in f32."""
    return rms_norm_ref(x.float(), weight, eps) * F.silu(gate.float())


gated_rms_norm = gated_rms_norm_ref


def rms_norm_exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(tree_sum(wide * wide) / x.shape[-1] + eps) * weight).to(x.dtype)


def gated_rms_norm_exact(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_exact(x.float(), weight, eps) * silu_exact(gate.float())


def l2_norm_ref(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps), in f32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


l2_norm = l2_norm_ref


def l2_norm_exact(x: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(tree_sum(wide * wide) + eps)
