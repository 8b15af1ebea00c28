"""Experts of a mixture in plain torch, one after the other; exact mode has its own products and sums in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

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
    down: Tensor,  # [E, N, I]; N is D, or a rank's part of it
    linear: Callable[[Tensor, Tensor], Tensor] = linear_ref,
    silu_mul: Callable[[Tensor], Tensor] = silu_mul_ref,
    add: Callable[[Tensor, Tensor], Tensor] = weighted_sum,
    gather: Callable[[Tensor], Tensor] = lambda inner: inner,  # a rank's columns -> all that `down` multiplies
) -> Tensor:  # [T, N]
    """(token, choice) pairs sorted by expert: each expert runs once over its own tokens. A choice of number E, of an
    expert that is not here, adds nothing.
    """
    flat, k = chosen.flatten(), chosen.shape[1]
    order = flat.argsort(stable=True)
    pairs, parts = x[order // k], list(_parts(flat, len(gate_up)))
    inner = x.new_empty(len(pairs), gate_up.shape[1] // 2)
    for expert, part in parts:
        inner[part] = silu_mul(linear(pairs[part], gate_up[expert]))
    inner = gather(inner)
    done, at = x.new_empty(len(pairs), down.shape[1]), 0
    for expert, part in parts:
        done[part] = linear(inner[part], down[expert])
        at = part.stop
    done[at:] = 0
    by_token = torch.empty_like(done)
    by_token[order] = done
    return add(by_token.view(*chosen.shape, down.shape[1]), weights).to(x.dtype)


def _parts(flat: Tensor, experts: int) -> Iterator[tuple[int, slice]]:
    """Every expert that was chosen, and its place among the sorted pairs."""
    at = 0
    for expert, n in enumerate(torch.bincount(flat, minlength=experts).tolist()[:experts]):
        if n:
            yield expert, slice(at, at + n)
            at += n


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
