"""RowOps: the operations on rows that a model's layers use, in one set for each numerical mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.activation import silu_mul, silu_mul_exact
from hybridkv.kernels.exact import sigmoid_exact, softmax_exact, softplus_exact, tree_sum
from hybridkv.kernels.linear.exact import linear_exact, linear_ref
from hybridkv.kernels.moe.expert_loop import loop_experts, run_softmax_experts, weighted_sum_exact
from hybridkv.kernels.moe.shared_expert import add_shared
from hybridkv.kernels.moe.softmax_router import route_softmax
from hybridkv.kernels.norm import (
    add_rms_norm,
    add_rms_norm_exact,
    gated_rms_norm,
    gated_rms_norm_exact,
    l2_norm,
    l2_norm_exact,
    rms_norm,
    rms_norm_exact,
)
from hybridkv.kernels.rope import rope, rope_exact

RowOp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RowOps:
    exact: bool
    linear: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]  # (x + delta, its norm)
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    l2_norm: RowOp
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    sigmoid: RowOp
    silu_mul: RowOp  # (gate | up) [T, 2 I] -> silu(gate) * up
    softplus: RowOp
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]  # experts.route_softmax
    run_experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # experts.run_softmax_experts
    add_shared: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # experts.add_shared


def route_exact(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Equal scores: the expert with the lower number first."""
    weights, chosen = softmax_exact(logits.float()).sort(dim=-1, descending=True, stable=True)
    weights = weights[:, :k]
    return weights / tree_sum(weights) if renormalise else weights, chosen[:, :k]


def run_experts_exact(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return loop_experts(x, weights, chosen, gate_up, down, linear_exact, silu_mul_exact, weighted_sum_exact)


def add_shared_exact(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    return routed + shared * sigmoid_exact(linear_exact(x, gate))


FAST = RowOps(
    exact=False,
    linear=linear_ref,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    gated_rms_norm=gated_rms_norm,
    l2_norm=l2_norm,
    rope=rope,
    sigmoid=torch.sigmoid,
    silu_mul=silu_mul,
    softplus=F.softplus,
    route=route_softmax,
    run_experts=run_softmax_experts,
    add_shared=add_shared,
)
EXACT = RowOps(
    exact=True,
    linear=linear_exact,
    rms_norm=rms_norm_exact,
    add_rms_norm=add_rms_norm_exact,
    gated_rms_norm=gated_rms_norm_exact,
    l2_norm=l2_norm_exact,
    rope=rope_exact,
    sigmoid=sigmoid_exact,
    silu_mul=silu_mul_exact,
    softplus=softplus_exact,
    route=route_exact,
    run_experts=run_experts_exact,
    add_shared=add_shared_exact,
)
