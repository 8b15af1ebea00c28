"""RowOps: the operations on rows that a model's layers choose by numerical mode.

Where a layer differs by more than these, each mode has a mixer of its own (models/attention.py, models/deltanet.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hybridkv.kernels.activation import silu_mul_exact
from hybridkv.kernels.backend import use_triton
from hybridkv.kernels.exact import sigmoid_exact, softmax_exact, tree_sum
from hybridkv.kernels.linear.exact import linear_exact, linear_exact_blocks, linear_ref
from hybridkv.kernels.moe.block_experts import Stack
from hybridkv.kernels.moe.expert_loop import loop_experts, run_softmax_experts, weighted_sum_exact
from hybridkv.kernels.moe.grouped import run_experts_triton
from hybridkv.kernels.moe.shared_expert import add_shared, add_shared_triton
from hybridkv.kernels.moe.softmax_router import route_softmax, route_softmax_triton
from hybridkv.kernels.norm import add_rms_norm, add_rms_norm_exact


@dataclass(frozen=True)
class RowOps:
    linear: Callable[[Tensor, Tensor], Tensor]  # x [T, K], weight [N, K] -> [T, N]
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]  # (x + delta, its norm)
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]  # moe.softmax_router.route_softmax
    run_experts: Callable[[Tensor, Tensor, Tensor, Stack, Stack], Tensor]  # moe.expert_loop.run_softmax_experts
    add_shared: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # moe.shared_expert.add_shared


# on a GPU the forms of fast mode have a program for each row, or tiles whose size exact mode fixes


def route_exact(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Equal scores: the expert with the lower number first."""
    if use_triton(logits):
        return route_softmax_triton(logits, k, renormalise)
    weights, chosen = softmax_exact(logits.float()).sort(dim=-1, descending=True, stable=True)
    weights = weights[:, :k]
    return weights / tree_sum(weights) if renormalise else weights, chosen[:, :k]


def run_experts_exact(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Stack,
    down: Stack,
    gather: Callable[[Tensor], Tensor] = lambda inner: inner,
) -> Tensor:
    """`gather`: of a rank that has a part of every expert, as in `loop_experts`."""
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "exact mode computes with plain weights"
    if use_triton(x):
        return run_experts_triton(x, weights, chosen, gate_up, down, math.inf, exact=True, gather=gather)
    return loop_experts(
        x, weights, chosen, gate_up, down, linear_exact_blocks, silu_mul_exact, weighted_sum_exact, gather
    )


def add_shared_exact(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    if use_triton(x):
        return add_shared_triton(routed, shared, x, gate)
    return routed + shared * sigmoid_exact(linear_exact(x, gate))


FAST = RowOps(
    linear=linear_ref,
    add_rms_norm=add_rms_norm,
    route=route_softmax,
    run_experts=run_softmax_experts,
    add_shared=add_shared,
)
EXACT = RowOps(
    linear=linear_exact,
    add_rms_norm=add_rms_norm_exact,
    route=route_exact,
    run_experts=run_experts_exact,
    add_shared=add_shared_exact,
)
