"""Experts of exact mode as ranks compute them, one rank after the other in one process; nothing is sent."""

import torch
from torch import Tensor

from hybridkv.kernels.row_ops import run_experts_exact


def columns_of(gate_up: Tensor, down: Tensor, inner: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Both matrices of each rank's part of the experts' width."""
    gates, ups = (half.split(inner, 1) for half in gate_up.chunk(2, 1))
    parts = [torch.cat(pair, 1) for pair in zip(gates, ups, strict=True)]
    return [(part, some.contiguous()) for part, some in zip(parts, down.split(inner, 2), strict=True)]


def in_parts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, inner: list[int], outputs: list[int]
) -> Tensor:
    """Each rank has some columns of what goes into `down`, which are gathered, and some rows of `down`."""
    found: list[Tensor] = []

    def gathered(part: Tensor) -> Tensor:
        found.append(part)
        return part.new_zeros(len(part), sum(inner))

    for some, _ in columns_of(gate_up, down, inner):
        run_experts_exact(x, weights, chosen, some, down, gathered)
    whole = torch.cat(found, 1)
    rows = [some.contiguous() for some in down.split(outputs, 1)]
    return torch.cat([run_experts_exact(x, weights, chosen, gate_up, some, lambda _: whole) for some in rows], 1)


def summed_parts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, inner: list[int]) -> Tensor:
    """The same number with other bits: each rank has columns of `down`, and the results are added."""
    parts = [run_experts_exact(x, weights, chosen, *part) for part in columns_of(gate_up, down, inner)]
    return torch.stack(parts).sum(0)
