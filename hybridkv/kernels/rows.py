"""RowOps: the operations on rows that a model's layers use, in one set for each numerical mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.exact import sigmoid_exact, silu_exact, softmax_exact, softplus_exact, tree_sum
from hybridkv.kernels.linear import linear_exact, linear_ref
from hybridkv.kernels.norm import gated_rms_norm, gated_rms_norm_exact, l2_norm, l2_norm_exact, rms_norm, rms_norm_exact
from hybridkv.kernels.rope import rope, rope_exact

RowOp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RowOps:
    exact: bool
    linear: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    l2_norm: RowOp
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    sigmoid: RowOp
    silu: RowOp
    softplus: RowOp
    best_experts: Callable[[Tensor, int], tuple[Tensor, Tensor]]  # scores [T, E], k -> (weights, experts) [T, k]
    total: RowOp  # [T, k] -> [T, 1]
    weighted_sum: Callable[[Tensor, Tensor], Tensor]  # x [T, k, C], weights [T, k] -> [T, C] f32


def best_experts(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = scores.float().softmax(-1).topk(k)
    return weights, chosen


def best_experts_exact(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Equal scores: the expert with the lower number first."""
    weights, chosen = softmax_exact(scores.float()).sort(dim=-1, descending=True, stable=True)
    return weights[:, :k], chosen[:, :k]


def total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    return (x.float() * weights.unsqueeze(-1)).sum(1)


def weighted_sum_exact(x: Tensor, weights: Tensor) -> Tensor:
    parts = x.float() * weights.unsqueeze(-1)
    total = parts[:, 0]
    for i in range(1, x.shape[1]):
        total = total + parts[:, i]
    return total


FAST = RowOps(
    exact=False,
    linear=linear_ref,
    rms_norm=rms_norm,
    gated_rms_norm=gated_rms_norm,
    l2_norm=l2_norm,
    rope=rope,
    sigmoid=torch.sigmoid,
    silu=F.silu,
    softplus=F.softplus,
    best_experts=best_experts,
    total=total,
    weighted_sum=weighted_sum,
)
EXACT = RowOps(
    exact=True,
    linear=linear_exact,
    rms_norm=rms_norm_exact,
    gated_rms_norm=gated_rms_norm_exact,
    l2_norm=l2_norm_exact,
    rope=rope_exact,
    sigmoid=sigmoid_exact,
    silu=silu_exact,
    softplus=softplus_exact,
    best_experts=best_experts_exact,
    total=tree_sum,
    weighted_sum=weighted_sum_exact,
)
