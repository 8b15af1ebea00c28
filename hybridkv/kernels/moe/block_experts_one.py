"""Both products of experts in codes (block_experts.py) for one token: the step of a single request. Each choice is an
expert of its own, so nothing is sorted, and experts of two formats are one launch: their bytes are read side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridkv.kernels.backend import has_pdl, tl, triton
from hybridkv.kernels.linear.block_rows import as_pairs, few_rows_tile, rows_form
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.kernels.moe.grouped import clamped_silu_mul

# the fastest on an H200 at V4-Flash's widths
COLUMNS = 256  # of a step
ROWS = 32  # of codes that a program multiplies
CONFIG = dict(BT=8, STAGES=3, num_warps=2)


@triton.jit
def rows_of_choice(
    expert, x, pairs, p_x, m_x, o_own, codes, scales, others, other_scales, E, N, K, blocks_of_rows, other_blocks,
    FIRST: tl.constexpr, SECOND: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Rows of one expert's matrix [N, K] times x, [BN, BT] f32: of the first stack, or of the second."""
    if expert < E:
        o_scale = expert * blocks_of_rows + o_own // FIRST[0]
        b_y = few_rows_tile(
            pairs if FIRST[1] == 4 else x, p_x * FIRST[1] // 8, m_x, codes, scales, expert * N + o_own, o_scale, K,
            FIRST, FAST, STAGES, BN, BT,
        )  # fmt: skip
    else:
        o_scale = (expert - E) * other_blocks + o_own // SECOND[0]
        b_y = few_rows_tile(
            pairs if SECOND[1] == 4 else x, p_x * SECOND[1] // 8, m_x, others, other_scales, (expert - E) * N + o_own,
            o_scale, K, SECOND, FAST, STAGES, BN, BT,
        )  # fmt: skip
    return b_y


@triton.jit
def one_up_kernel(
    x,  # [D]
    pairs,  # the same, two in an int32
    codes,  # of [E, 2 I, D]
    scales,
    others,  # of [E', 2 I, D]
    other_scales,
    chosen,  # [K]
    y,  # [K, I]
    E,
    EXPERTS,  # of both stacks
    D,
    I,
    limit,
    blocks_of_rows,  # rows of scales that an expert has
    other_blocks,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    """A program has BN / 2 gates, and their ups."""
    if FAST:
        tl.extra.cuda.gdc_wait()
    HALF: tl.constexpr = BN // 2
    blocks, o_t = tl.cdiv(I, HALF), tl.arange(0, BT)
    i_k, i_n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * HALF
    expert = tl.load(chosen + i_k).to(tl.int64)
    if expert < EXPERTS:
        o_r = tl.arange(0, BN)
        o_own = tl.minimum(i_n + o_r % HALF, I - 1) + o_r // HALF * I  # rows past the end are read again: no mask
        b_both = rows_of_choice(
            expert, x, pairs, (o_t * 0).to(tl.int64), o_t == 0, o_own, codes, scales, others, other_scales, E, 2 * I, D,
            blocks_of_rows, other_blocks, FIRST, SECOND, FAST, STAGES, BN, BT,
        )  # fmt: skip
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_both, [2, HALF, BT]), (1, 2, 0)))
        b_y = clamped_silu_mul(b_gate, b_up, limit)
        o_n = i_n + tl.arange(0, HALF)
        p_y = y + i_k * I + o_n[:, None] + o_t[None, :]
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=(o_n < I)[:, None] & (o_t == 0)[None, :])
    if FAST:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def one_down_kernel(
    x,  # [K, I]
    pairs,  # the same, two in an int32
    codes,  # of [E, D, I]
    scales,
    others,  # of [E', D, I]
    other_scales,
    chosen,  # [K]
    y,  # [K, D]
    E,
    EXPERTS,
    D,
    I,
    blocks_of_rows,
    other_blocks,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    if FAST:
        tl.extra.cuda.gdc_wait()
    blocks, o_t = tl.cdiv(D, BN), tl.arange(0, BT)
    i_k, o_n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    expert = tl.load(chosen + i_k).to(tl.int64)
    if expert < EXPERTS:
        b_y = rows_of_choice(
            expert, x, pairs, (o_t * 0).to(tl.int64) + i_k * I, o_t == 0, tl.minimum(o_n, D - 1), codes, scales, others,
            other_scales, E, D, I, blocks_of_rows, other_blocks, FIRST, SECOND, FAST, STAGES, BN, BT,
        )  # fmt: skip
        p_y = y + i_k * D + o_n[:, None] + o_t[None, :]
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=(o_n < D)[:, None] & (o_t == 0)[None, :])
    if FAST:
        tl.extra.cuda.gdc_launch_dependents()


def launch_one(
    kernel: Any, x: Tensor, stacks: list[BlockScaled], chosen: Tensor, y: Tensor, sizes: tuple[float, ...], tiles: int
) -> None:
    """One product of all choices: of one stack, or of two."""
    first, second = stacks[0], stacks[-1]
    forms = [rows_form(each, COLUMNS) for each in (first, second)]
    fast, E = has_pdl(x.device), len(first)
    pairs = as_pairs(x) if any(form.bits == 4 for form in forms) else x
    kernel[(chosen.numel() * tiles,)](
        x, pairs, first.codes, first.scales, second.codes, second.scales, chosen, y, E,
        sum(len(each) for each in stacks), *sizes, first.scales.shape[1], second.scales.shape[1], FIRST=forms[0],
        SECOND=forms[1], FAST=fast, BN=ROWS, launch_pdl=fast, **CONFIG,
    )  # fmt: skip


def run_one(x: Tensor, chosen: Tensor, up: list[BlockScaled], down: list[BlockScaled], limit: float, y: Tensor) -> None:
    """x [1, D] through the experts of its choices, into y [K, D]."""
    (_, D), I = x.shape, down[0].shape[2]
    inner = torch.empty((chosen.numel(), I), dtype=x.dtype, device=x.device)
    launch_one(one_up_kernel, x, up, chosen, inner, (D, I, limit), triton.cdiv(I, ROWS // 2))
    launch_one(one_down_kernel, inner, down, chosen, y, (D, I), triton.cdiv(D, ROWS))
