"""The router of Qwen3.5's experts: the k largest of a softmax, divided by their sum if the model says so, in f32."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton


def route_softmax_ref(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
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


def route_softmax(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights [T, k] f32, experts [T, k] int32, the best first."""
    op = route_softmax_triton if use_triton(logits) else route_softmax_ref
    return op(logits, k, renormalise)
