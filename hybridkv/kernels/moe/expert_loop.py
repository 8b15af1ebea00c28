"""Experts of a mixture in plain torch, one after the other; exact mode has its own products and sums in it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hybridkv.kernels.activation import silu_mul_ref
from hybridkv.kernels.backend import use_triton
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.kernels.linear.exact import linear_ref
from hybridkv.kernels.moe.block_experts import ExpertStack, Stack, run_block_experts
from hybridkv.kernels.moe.grouped import run_experts_triton


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """x [T, k, D], weights [T, k] -> [T, D] f32."""
    return (x.float() * weights.unsqueeze(-1)).sum(1)


def weighted_sum_exact(x: Tensor, weights: Tensor) -> Tensor:
    parts = x.float() * weights.unsqueeze(-1)
    total = parts[:, 0]
    for i in range(1, x.shape[1]):
        total = total + parts[:, i]
    return total


def loop_experts(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, k] f32
    chosen: Tensor,  # [T, k]
    gate_up: Tensor,  # [E, 2 I, D]
    down: Tensor,  # [E, D, I]
    linear: Callable[[Tensor, Tensor], Tensor] = linear_ref,
    silu_mul: Callable[[Tensor], Tensor] = silu_mul_ref,
    add: Callable[[Tensor, Tensor], Tensor] = weighted_sum,
) -> Tensor:  # [T, D]
    """(token, choice) pairs sorted by expert: each expert runs once over its own tokens. A choice of number E, of an
    expert that is not here, adds nothing.
    """
    flat, k = chosen.flatten(), chosen.shape[1]
    order = flat.argsort(stable=True)
    pairs = x[order // k]
    done = torch.empty_like(pairs)
    at = 0
    for expert, n in enumerate(torch.bincount(flat, minlength=len(gate_up)).tolist()[: len(gate_up)]):
        if n:
            part = slice(at, at + n)
            done[part] = linear(silu_mul(linear(pairs[part], gate_up[expert])), down[expert])
            at += n
    if at < len(done):
        done[at:] = 0
    by_token = torch.empty_like(done)
    by_token[order] = done
    return add(by_token.view(*chosen.shape, x.shape[1]), weights).to(x.dtype)


def run_softmax_experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Stack, down: Stack, others: bool = False
) -> Tensor:
    """The weighted sum [T, D] of each token's experts; arguments as run_experts', without a limit. `others`: a choice
    may be of number E, of an expert that is not here, with a weight of zero.
    """
    if isinstance(gate_up, BlockScaled) or isinstance(down, BlockScaled):
        return run_block_experts(x, weights, chosen, [ExpertStack(gate_up, down)], math.inf, others)
    if use_triton(x):
        return run_experts_triton(x, weights, chosen, gate_up, down, math.inf, others=others)
    return loop_experts(x, weights, chosen, gate_up, down)
