"""The router of DeepSeek-V4's experts: k of them for a token, and a last one that every token takes.

score = sqrt(softplus(router x))                    f32
experts = the k best of score + bias                the bias only selects; or table[token id], in hash layers
weight = score / (sum of the k + 1e-20) * scaling   the last expert: 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton


@dataclass(frozen=True)
class Router:
    per_token: int  # k
    scaling: float
    renormalise: bool
    bias: Tensor | None  # [E] f32
    table: Tensor | None  # [vocab, k] int64: experts by token id


def route_ref(logits: Tensor, tokens: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    E = logits.shape[1]
    score = F.softplus(logits).sqrt()
    if router.table is not None:
        chosen = router.table[tokens].long()
    else:
        ranked = score if router.bias is None else score + router.bias
        chosen = ranked.topk(router.per_token, -1).indices
    weights = score.gather(1, chosen)
    if router.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights, chosen = F.pad(weights * router.scaling, (0, 1), value=1.0), F.pad(chosen, (0, 1), value=E)
    return weights, chosen.int()


@triton.jit
def score_tile(b_l):
    """sqrt(log(1 + exp(l))), digits kept for very negative l: log(1 + e) = 2 artanh(e / (2 + e)) as a series."""
    b_e = tl.exp(-tl.abs(b_l))
    b_s = b_e / (2.0 + b_e)  # at most 1/3
    b_q = b_s * b_s
    b_p = 1 / 9 + b_q * (1 / 11 + b_q * (1 / 13 + b_q * (1 / 15)))
    b_p = 1 + b_q * (1 / 3 + b_q * (1 / 5 + b_q * (1 / 7 + b_q * b_p)))
    return tl.sqrt_rn(tl.where(b_l > 0, b_l, b_l - b_l) + 2.0 * b_s * b_p)  # l - l: 0, but NaN of NaN


@triton.jit
def route_kernel(
    logits,  # [T, E]
    tokens,  # [T]
    bias,  # [E]
    table,  # [vocab, K]
    weights,  # [T, K + 1]
    experts,  # [T, K + 1]
    E,
    scaling,
    stride_table,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    HASH: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    if HASH:
        b_expert = tl.load(table + tl.load(tokens + i_t) * stride_table + o_k, mask=m_k, other=0).to(tl.int32)
    else:
        o_e = tl.arange(0, BE)
        m_e = o_e < E
        b_rank = score_tile(tl.load(logits + i_t * E + o_e, mask=m_e, other=0.0))
        if BIAS:
            b_rank += tl.load(bias + o_e, mask=m_e, other=0.0)
        b_rank = tl.where(m_e & (b_rank == b_rank), b_rank, float("-inf"))  # NaN is chosen last
        b_expert = tl.zeros([BK], tl.int32)
        for k in tl.static_range(K):
            b_best = tl.argmax(b_rank, 0)
            b_expert = tl.where(o_k == k, b_best, b_expert)
            b_rank = tl.where(o_e == b_best, float("-inf"), b_rank)
    b_w = tl.where(m_k, score_tile(tl.load(logits + i_t * E + b_expert, mask=m_k, other=0.0)), 0.0)
    if RENORMALISE:
        b_w = b_w / (tl.sum(b_w) + 1e-20)
    m_all = o_k < K + 1
    tl.store(weights + i_t * (K + 1) + o_k, tl.where(m_k, b_w * scaling, 1.0), mask=m_all)
    tl.store(experts + i_t * (K + 1) + o_k, tl.where(m_k, b_expert, E), mask=m_all)


def route_triton(logits: Tensor, tokens: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    (T, E), K = logits.shape, router.per_token
    weights = torch.empty((T, K + 1), dtype=torch.float32, device=logits.device)
    experts = torch.empty((T, K + 1), dtype=torch.int32, device=logits.device)
    if T:
        route_kernel[(T,)](
            logits.contiguous(), tokens, logits if router.bias is None else router.bias,
            tokens if router.table is None else router.table, weights, experts, E, router.scaling,
            0 if router.table is None else router.table.stride(0),
            K=K, BIAS=router.bias is not None, HASH=router.table is not None, RENORMALISE=router.renormalise,
            BE=triton.next_power_of_2(E), BK=triton.next_power_of_2(K + 1), num_warps=4,
        )  # fmt: skip
    return weights, experts


def route(logits: Tensor, tokens: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """logits [T, E] f32, tokens [T] -> weights [T, k + 1] f32, experts [T, k + 1] int32."""
    op = route_triton if use_triton(logits) else route_ref
    return op(logits, tokens, router)
