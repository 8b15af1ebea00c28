"""Mixture of experts as DeepSeek-V4 has it: k routed experts a token, and a last one that every token takes.

    score = sqrt(softplus(router x))                    f32
    experts = the k best of score + bias                the bias only selects; or table[token id], in hash layers
    weight = score / (sum of the k + 1e-20) * scaling   the last expert: 1
    expert(x) = down(silu(min(gate x, limit)) * clamp(up x, -limit, limit))

The results of a token's experts are added in f32 in the order in which they were chosen.

On a GPU nothing goes through the host. Pairs (token, choice) are brought into order of their expert, which gives each
expert a run of rows; a run is multiplied in tiles of BM rows. How many tiles there are is known on the device alone,
so the grid has room for the most there can be, and a program finds its tile's expert from the runs' offsets.

    pairs    0:e2  1:e0  2:e2  3:e1        order    1 | 3 | 0 2        offsets  0 1 2 4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

SCAN = 1024  # pairs that are sorted at a time


@dataclass(frozen=True)
class Router:
    per_token: int  # k
    scaling: float
    renormalise: bool
    bias: Tensor | None  # [E] f32
    table: Tensor | None  # [vocab, k] int64: experts by token id


def route_ref(logits: Tensor, tokens: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """logits [T, E] f32, tokens [T] -> weights [T, k + 1] f32, experts [T, k + 1] int32."""
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


def run_experts_ref(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, k + 1] f32
    chosen: Tensor,  # [T, k + 1] int32
    gate_up: Tensor,  # [E + 1, 2 I, D]
    down: Tensor,  # [E + 1, D, I]
    limit: float,
) -> Tensor:
    k = chosen.shape[1]
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    y = x.new_empty(len(flat), x.shape[1])
    at = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=len(gate_up)).tolist()):
        if count:
            pairs = order[at : at + count]
            gate, up = F.linear(x[pairs // k], gate_up[expert]).chunk(2, -1)
            y[pairs] = F.linear(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), down[expert])
            at += count
    y = y.view(*chosen.shape, x.shape[1])
    out = weights[:, :1] * y[:, 0].float()
    for i in range(1, k):
        out = out + weights[:, i : i + 1] * y[:, i].float()
    return out.to(x.dtype)


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


@triton.jit(do_not_specialize=["M"])
def order_kernel(experts, order, offsets, M, SCAN: tl.constexpr):
    """Program e finds the pairs of expert e, which follow those of all experts before it."""
    i_e = tl.program_id(0)
    before = 0
    for i in tl.range(0, M, SCAN):
        o_m = i + tl.arange(0, SCAN)
        before += tl.sum((tl.load(experts + o_m, mask=o_m < M, other=i_e) < i_e).to(tl.int32))
    tl.store(offsets + i_e, before)
    for i in tl.range(0, M, SCAN):
        o_m = i + tl.arange(0, SCAN)
        b_mine = (tl.load(experts + o_m, mask=o_m < M, other=-1) == i_e).to(tl.int32)
        tl.store(order + before + tl.cumsum(b_mine) - 1, o_m, mask=b_mine > 0)
        before += tl.sum(b_mine)
    if i_e == tl.num_programs(0) - 1:
        tl.store(offsets + i_e + 1, before)


@triton.jit
def find_tile(offsets, i_m, E, BM: tl.constexpr, BE: tl.constexpr):
    """Tile number -> its expert (E: none), its first row and the end of the expert's rows."""
    o_e = tl.arange(0, BE)
    b_begin = tl.load(offsets + o_e, mask=o_e < E, other=0)
    b_end = tl.load(offsets + o_e + 1, mask=o_e < E, other=0)
    b_tiles = (b_end - b_begin + BM - 1) // BM
    b_last = tl.cumsum(b_tiles)
    expert = tl.sum(((b_last <= i_m) & (o_e < E)).to(tl.int32))
    first = tl.sum(tl.where(o_e == expert, b_begin + (i_m - b_last + b_tiles) * BM, 0))
    return expert, first, tl.sum(tl.where(o_e == expert, b_end, 0))


@triton.jit
def expert_up_kernel(
    x,  # [T, D]
    gate_up,  # [E, 2 I, D]
    order,  # [M]
    offsets,  # [E + 1]
    y,  # [M, I] in order of the experts
    E,
    D,
    I,
    K,  # pairs of a token
    limit,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BE: tl.constexpr,
):
    blocks = tl.cdiv(I, BN)
    expert, first, end = find_tile(offsets, tl.program_id(0) // blocks, E, BM, BE)
    if expert < E:
        o_m = first + tl.arange(0, BM)
        o_n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
        m_m, m_n = o_m < end, o_n < I
        o_t = (tl.load(order + o_m, mask=m_m, other=0) // K).to(tl.int64)
        p_gate = gate_up + expert.to(tl.int64) * 2 * I * D + o_n.to(tl.int64)[None, :] * D
        p_up = p_gate + I * D
        b_gate = tl.zeros([BM, BN], tl.float32)
        b_up = tl.zeros([BM, BN], tl.float32)
        for i_k in tl.range(0, D, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = o_k < D
            b_x = tl.load(x + o_t[:, None] * D + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
            m_w = m_n[None, :] & m_k[:, None]
            b_gate = tl.dot(b_x, tl.load(p_gate + o_k[:, None], mask=m_w, other=0.0), b_gate, input_precision="ieee")
            b_up = tl.dot(b_x, tl.load(p_up + o_k[:, None], mask=m_w, other=0.0), b_up, input_precision="ieee")
        b_gate = tl.where(b_gate > limit, limit, b_gate)  # NaN is not greater, and stays
        b_up = tl.where(b_up > limit, limit, tl.where(b_up < -limit, -limit, b_up))
        b_y = b_gate * tl.sigmoid(b_gate) * b_up
        o_y = o_m.to(tl.int64)[:, None] * I + o_n[None, :]
        tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def expert_down_kernel(
    x,  # [M, I] in order of the experts
    down,  # [E, D, I]
    order,
    offsets,
    y,  # [M, D] in order of the pairs
    E,
    D,
    I,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BE: tl.constexpr,
):
    blocks = tl.cdiv(D, BN)
    expert, first, end = find_tile(offsets, tl.program_id(0) // blocks, E, BM, BE)
    if expert < E:
        o_m = first + tl.arange(0, BM)
        o_n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
        m_m, m_n = o_m < end, o_n < D
        p_x = x + o_m.to(tl.int64)[:, None] * I
        p_w = down + expert.to(tl.int64) * D * I + o_n.to(tl.int64)[None, :] * I
        b_y = tl.zeros([BM, BN], tl.float32)
        for i_k in tl.range(0, I, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = o_k < I
            b_x = tl.load(p_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(p_w + o_k[:, None], mask=m_n[None, :] & m_k[:, None], other=0.0)
            b_y = tl.dot(b_x, b_w, b_y, input_precision="ieee")
        o_pair = tl.load(order + o_m, mask=m_m, other=0).to(tl.int64)
        o_y = o_pair[:, None] * D + o_n[None, :]
        tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def combine_kernel(x, weights, y, D, K: tl.constexpr, BD: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_y = tl.zeros([BD], tl.float32)
    for k in tl.static_range(K):
        b_x = tl.load(x + (i_t * K + k) * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y += tl.load(weights + i_t * K + k) * b_x
    tl.store(y + i_t * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


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


def sort_pairs_triton(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """chosen [T, k] int32 -> order [T k] int32, offsets [experts + 1] int32."""
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    order_kernel[(experts,)](chosen, order, offsets, chosen.numel(), SCAN=SCAN, num_warps=4)
    return order, offsets


def tile_config(dtype: torch.dtype, rows: int, experts: int) -> dict[str, int]:
    """Small tiles while an expert has few rows: it is then the reading of its weights that takes the time."""
    if dtype == torch.float32:
        return dict(BM=16, BN=32, BK=32, num_warps=4, num_stages=2)
    if rows <= 16 * experts:
        return dict(BM=16, BN=32, BK=128, num_warps=4, num_stages=4)
    return dict(BM=64, BN=128, BK=64, num_warps=8, num_stages=3)


def run_experts_triton(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, limit: float
) -> Tensor:
    (T, D), K, (E, _, I) = x.shape, chosen.shape[1], down.shape
    out = torch.empty((T, D), dtype=x.dtype, device=x.device)
    if T == 0:
        return out
    M = T * K
    order, offsets = sort_pairs_triton(chosen, E)
    config = tile_config(x.dtype, M, E)
    tiles = M // config["BM"] + min(E, M)  # the most there can be: every expert may end in a tile that is not full
    inner = torch.empty((M, I), dtype=x.dtype, device=x.device)
    BE = triton.next_power_of_2(E)
    expert_up_kernel[(triton.cdiv(I, config["BN"]) * tiles,)](
        x.contiguous(), gate_up, order, offsets, inner, E, D, I, K, limit, BE=BE, **config
    )
    parts = torch.empty((M, D), dtype=x.dtype, device=x.device)
    expert_down_kernel[(triton.cdiv(D, config["BN"]) * tiles,)](
        inner, down, order, offsets, parts, E, D, I, BE=BE, **config
    )
    BD = min(1024, triton.next_power_of_2(D))
    combine_kernel[T, triton.cdiv(D, BD)](parts, weights, out, D, K=K, BD=BD)
    return out


def route(logits: Tensor, tokens: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    op = route_triton if use_triton(logits) else route_ref
    return op(logits, tokens, router)


def run_experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    op = run_experts_triton if use_triton(x) else run_experts_ref
    return op(x, weights, chosen, gate_up, down, limit)
