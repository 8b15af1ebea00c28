"""Experts of a mixture: every token goes through its k experts, and their results are added with its weights.

    expert(x) = down(silu(min(gate x, limit)) * clamp(up x, -limit, limit))

The results of a token's experts are added in f32 in the order in which they were chosen.

On a GPU nothing goes through the host. Pairs (token, choice) are brought into order of their expert, which gives each
expert a run of rows; a run is multiplied in tiles of BM rows. The number of tiles is known on the device alone, so the
grid has room for the largest number there can be, and a program finds its tile's expert from the runs' offsets.

    pairs    0:e2  1:e0  2:e2  3:e1        order    1 | 3 | 0 2        offsets  0 1 2 4
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import is_hopper, tl, triton, use_triton

SCAN = 1024  # pairs that are sorted at a time
LONGEST = 128  # inputs that a tile of any kind multiplies at once


def run_experts_ref(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
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
def clamped_silu_mul(b_gate, b_up, limit):
    b_gate = tl.where(b_gate > limit, limit, b_gate)  # NaN is not greater, and stays
    b_up = tl.where(b_up > limit, limit, tl.where(b_up < -limit, -limit, b_up))
    return b_gate * tl.sigmoid(b_gate) * b_up


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
        b_y = clamped_silu_mul(b_gate, b_up, limit)
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


def sort_pairs_triton(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """chosen [T, k] int32 -> order [T k] int32, offsets [experts + 1] int32."""
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    order_kernel[(experts,)](chosen, order, offsets, chosen.numel(), SCAN=SCAN, num_warps=4)
    return order, offsets


def tile_config(dtype: torch.dtype, rows: int, experts: int) -> dict[str, int]:
    """Small tiles while an expert has few rows, where reading its weights takes most of the time."""
    if dtype == torch.float32:
        return dict(BM=16, BN=32, BK=32, num_warps=4, num_stages=2)
    if rows <= 16 * experts:
        return dict(BM=16, BN=32, BK=LONGEST, num_warps=4, num_stages=4)
    return dict(BM=64, BN=128, BK=64, num_warps=8, num_stages=3)


def run_experts_triton(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float,
    exact: bool = False,
    others: bool = False,
    gather: Callable[[Tensor], Tensor] = lambda inner: inner,
) -> Tensor:
    """`exact`: a token's bits do not depend on the others. `others`: a choice may be of number E, of an expert that is
    not here, with a weight of zero: no tile runs for it. `gather`: of a rank that has some columns of what goes into
    `down`, and some rows of `down`: gives all columns.

    A sum is one chain over the inputs in ascending order. On a Hopper GPU the instructions of both kinds of tiles add
    alike (tests/gpu/test_exact_linear.py); elsewhere, or if tiles end in different numbers of zeros, one kind is taken.
    """
    (T, D), K, (E, N, I) = x.shape, chosen.shape[1], down.shape
    out = torch.empty((T, N), dtype=x.dtype, device=x.device)
    if T == 0:
        return out
    M = T * K
    order, offsets = sort_pairs_triton(chosen, E)
    alike = is_hopper(x.device) and D % LONGEST == I % LONGEST == 0
    config = tile_config(x.dtype, 0 if exact and not alike else M, E)
    tiles = M // config["BM"] + min(E, M)  # at most: every expert may end in a tile that is not full
    own = gate_up.shape[1] // 2
    inner = torch.empty((M, own), dtype=x.dtype, device=x.device)
    BE = triton.next_power_of_2(E)
    expert_up_kernel[(triton.cdiv(own, config["BN"]) * tiles,)](
        x.contiguous(), gate_up, order, offsets, inner, E, D, own, K, limit, BE=BE, **config
    )
    inner = gather(inner)
    make = torch.zeros if others else torch.empty  # rows of experts that are not here are not written
    parts = make((M, N), dtype=x.dtype, device=x.device)
    expert_down_kernel[(triton.cdiv(N, config["BN"]) * tiles,)](
        inner, down, order, offsets, parts, E, N, I, BE=BE, **config
    )
    BD = min(1024, triton.next_power_of_2(N))
    combine_kernel[T, triton.cdiv(N, BD)](parts, weights, out, N, K=K, BD=BD)
    return out


def run_experts(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, k] f32
    chosen: Tensor,  # [T, k] int32
    gate_up: Tensor,  # [E, 2 I, D], the gates first
    down: Tensor,  # [E, D, I]
    limit: float,  # of what goes into silu and of its factor; inf: none
) -> Tensor:  # [T, D]
    op = run_experts_triton if use_triton(x) else run_experts_ref
    return op(x, weights, chosen, gate_up, down, limit)
