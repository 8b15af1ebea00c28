"""Mixture of experts as Qwen3.5 has it: the k best of a softmax, and one expert that all tokens share behind a gate.

    weight = softmax(router x), its k largest, divided by their sum if the model says so     f32
    y = sum of weight * expert(x), in f32; + shared(x) * sigmoid(gate . x)

On a GPU nothing goes through the host: the experts run in the grouped kernels of moe.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hybridkv.kernels.activation import silu_mul_ref
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.linear.linear import linear_ref
from hybridkv.kernels.moe.v4 import run_experts_triton


def route_softmax_ref(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights [T, k] f32, experts [T, k] int32, the best first."""
    weights, chosen = logits.float().softmax(-1).topk(k)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), chosen.int()


@triton.jit
def route_softmax_kernel(
    logits,  # [T, E]
    weights,  # [T, K]
    experts,  # [T, K]
    E,
    stride_t,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_e, o_k = tl.arange(0, BE), tl.arange(0, BK)
    b_x = tl.load(logits + i_t * stride_t + o_e, mask=o_e < E, other=float("-inf")).to(tl.float32)
    b_p = tl.exp(b_x - tl.max(b_x, 0))
    b_p = b_p / tl.sum(b_p, 0)
    b_rank = tl.where((o_e < E) & (b_p == b_p), b_p, -1.0)  # NaN is chosen last
    b_w = tl.zeros([BK], tl.float32)
    b_expert = tl.zeros([BK], tl.int32)
    for k in tl.static_range(K):
        best = tl.argmax(b_rank, 0)
        b_w = tl.where(o_k == k, tl.sum(tl.where(o_e == best, b_p, 0.0), 0), b_w)
        b_expert = tl.where(o_k == k, best, b_expert)
        b_rank = tl.where(o_e == best, -2.0, b_rank)
    if RENORMALISE:
        b_w = b_w / tl.sum(b_w, 0)
    tl.store(weights + i_t * K + o_k, b_w, mask=o_k < K)
    tl.store(experts + i_t * K + o_k, b_expert, mask=o_k < K)


def route_softmax_triton(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    weights = torch.empty((T, k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((T, k), dtype=torch.int32, device=logits.device)
    if T:
        route_softmax_kernel[(T,)](
            logits, weights, experts, E, logits.stride(0), K=k, RENORMALISE=renormalise,
            BE=triton.next_power_of_2(E), BK=triton.next_power_of_2(k), num_warps=1 if E <= 256 else 4,
        )  # fmt: skip
    return weights, experts


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
    """(token, choice) pairs sorted by expert: each expert runs once over its own tokens."""
    flat, k = chosen.flatten(), chosen.shape[1]
    order = flat.argsort(stable=True)
    pairs = x[order // k]
    done = torch.empty_like(pairs)
    at = 0
    for expert, n in enumerate(torch.bincount(flat, minlength=len(gate_up)).tolist()):
        if n:
            part = slice(at, at + n)
            done[part] = linear(silu_mul(linear(pairs[part], gate_up[expert])), down[expert])
            at += n
    by_token = torch.empty_like(done)
    by_token[order] = done
    return add(by_token.view(*chosen.shape, x.shape[1]), weights).to(x.dtype)


def add_shared_ref(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """routed + shared * sigmoid(gate . x), all [T, D], gate [1, D]."""
    return routed + shared * torch.sigmoid(linear_ref(x, gate))


@triton.jit
def add_shared_kernel(routed, shared, x, gate, y, D, BD: tl.constexpr):
    """As torch rounds: the product, the sigmoid, the gated row and the sum."""
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_x = i_t * D + o_d
    b_gate = tl.load(gate + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_shared = tl.load(shared + o_x, mask=m_d, other=0.0).to(tl.float32)
    b_routed = tl.load(routed + o_x, mask=m_d, other=0.0).to(tl.float32)
    dot = tl.sum(tl.load(x + o_x, mask=m_d, other=0.0).to(tl.float32) * b_gate, 0)
    dtype = y.dtype.element_ty
    weight = (1.0 / (1.0 + tl.exp(-dot.to(dtype).to(tl.float32)))).to(dtype)
    b_shared = (b_shared * weight.to(tl.float32)).to(dtype)
    tl.store(y + o_x, (b_routed + b_shared.to(tl.float32)).to(dtype), mask=m_d)


def add_shared_triton(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    T, D = x.shape
    y = torch.empty((T, D), dtype=x.dtype, device=x.device)
    routed, shared, x = (t.contiguous() for t in (routed, shared, x))
    if y.numel():
        BD = triton.next_power_of_2(D)
        add_shared_kernel[(T,)](
            routed, shared, x, gate.contiguous(), y, D, BD=BD, num_warps=min(16, max(4, BD // 1024))
        )
    return y


def route_softmax(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights [T, k] f32, experts [T, k], the best first."""
    op = route_softmax_triton if use_triton(logits) else route_softmax_ref
    return op(logits, k, renormalise)


def run_softmax_experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum [T, D] of each token's experts."""
    if use_triton(x):
        return run_experts_triton(x, weights, chosen, gate_up, down, math.inf)
    return loop_experts(x, weights, chosen, gate_up, down)


def add_shared(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """routed + shared * sigmoid(gate . x)."""
    op = add_shared_triton if use_triton(x) else add_shared_ref
    return op(routed, shared, x, gate)
