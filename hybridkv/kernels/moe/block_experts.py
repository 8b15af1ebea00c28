"""run_block_experts: experts of a mixture (grouped.py) whose matrices stay in codes with a scale for each block.

Experts come in stacks, one after the other: DeepSeek-V4's routed experts are FP4, and the one that every token takes is
FP8. A stack is codes, or plain matrices. All stacks share one order of the pairs (token, choice) by expert, and each is
launched on its own part of the experts' offsets:

    chosen    0 .. E - 1: the first stack     E: the second
    offsets   [o_0 ... o_E | o_{E + 1}]       the second stack sees o_E and o_{E + 1} as the offsets of one expert

Few rows, as in a decode step: an expert's bytes are read once, in codes (block_experts_few.py). Many: a program
dequantises tiles of its expert's matrices in registers, each for BM rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.backend import has_pdl, tl, triton, use_triton
from hybridkv.kernels.linear.block_linear import linear_blocks_ref
from hybridkv.kernels.linear.block_rows import as_pairs, rows_form
from hybridkv.kernels.linear.block_scaled import BlockScaled, block_tile
from hybridkv.kernels.moe.block_experts_few import few_down_kernel, few_up_kernel
from hybridkv.kernels.moe.block_experts_one import run_one
from hybridkv.kernels.moe.grouped import (
    clamped_silu_mul,
    combine_kernel,
    expert_down_kernel,
    expert_up_kernel,
    find_tile,
    sort_pairs_triton,
    tile_config,
)

Stack = Tensor | BlockScaled


class ExpertStack(NamedTuple):
    """Experts of one format."""

    gate_up: Stack  # [E, 2 I, D], the gates first
    down: Stack  # [E, D, I]


def multiply(x: Tensor, stack: Stack, expert: int) -> Tensor:
    """x [n, K] times one matrix of a stack, in plain torch -> [n, N]."""
    return linear_blocks_ref(x, stack[expert]) if isinstance(stack, BlockScaled) else F.linear(x, stack[expert])


def run_block_experts_ref(
    x: Tensor, weights: Tensor, chosen: Tensor, stacks: Sequence[ExpertStack], limit: float, others: bool = False
) -> Tensor:
    k, flat = chosen.shape[1], chosen.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=sum(len(stack.down) for stack in stacks)).tolist()
    y, at = (x.new_zeros if others else x.new_empty)(len(flat), x.shape[1]), 0
    for stack in stacks:
        for expert in range(len(stack.down)):
            pairs = order[at : at + counts[0]]
            at += counts.pop(0)
            if len(pairs):
                gate, up = multiply(x[pairs // k], stack.gate_up, expert).chunk(2, -1)
                y[pairs] = multiply(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), stack.down, expert)
    y = y.view(*chosen.shape, x.shape[1])
    out = weights[:, :1] * y[:, 0].float()
    for i in range(1, k):
        out = out + weights[:, i : i + 1] * y[:, i].float()
    return out.to(x.dtype)


@triton.jit
def block_up_kernel(
    x,  # [T, D]
    codes,  # of [E, 2 I, D]
    scales,
    order,  # [M]
    offsets,  # [E + 1]
    y,  # [M, I] in order of the experts
    E,
    D,
    I,
    K,  # pairs of a token
    limit,
    blocks_of_rows,  # rows of scales that an expert has
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWERS: tl.constexpr,
    WHOLE: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
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
        o_gate = tl.minimum(o_n, I - 1)  # rows past the end are read again: no mask
        o_up = o_gate + I
        row, scale = expert.to(tl.int64) * 2 * I, expert.to(tl.int64) * blocks_of_rows
        b_gate = tl.zeros([BN, BM], tl.float32)
        b_up = tl.zeros([BN, BM], tl.float32)
        for i_k in tl.range(0, D, BK, num_stages=STAGES):
            o_k = i_k + tl.arange(0, BK)
            b_x = tl.load(x + o_t[None, :] * D + o_k[:, None], mask=m_m[None, :] & (o_k < D)[:, None], other=0.0)
            b_w = block_tile(
                codes, scales, row + o_gate, scale + o_gate // ROWS, i_k, D,
                BITS, COLUMNS, POWERS, WHOLE, FAST, x.dtype.element_ty, BN, BK,
            )  # fmt: skip
            b_gate = tl.dot(b_w, b_x, b_gate, input_precision="ieee")
            b_w = block_tile(
                codes, scales, row + o_up, scale + o_up // ROWS, i_k, D,
                BITS, COLUMNS, POWERS, WHOLE, FAST, x.dtype.element_ty, BN, BK,
            )  # fmt: skip
            b_up = tl.dot(b_w, b_x, b_up, input_precision="ieee")
        b_y = clamped_silu_mul(b_gate, b_up, limit)
        o_y = o_m.to(tl.int64)[None, :] * I + o_n[:, None]
        tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_m[None, :] & m_n[:, None])


@triton.jit
def block_down_kernel(
    x,  # [M, I] in order of the experts
    codes,  # of [E, D, I]
    scales,
    order,
    offsets,
    y,  # [M, D] in order of the pairs
    E,
    D,
    I,
    blocks_of_rows,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWERS: tl.constexpr,
    WHOLE: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
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
        o_row = tl.minimum(o_n, D - 1)
        row, scale = expert.to(tl.int64) * D, expert.to(tl.int64) * blocks_of_rows
        p_x = x + o_m.to(tl.int64)[None, :] * I
        b_y = tl.zeros([BN, BM], tl.float32)
        for i_k in tl.range(0, I, BK, num_stages=STAGES):
            o_k = i_k + tl.arange(0, BK)
            b_x = tl.load(p_x + o_k[:, None], mask=m_m[None, :] & (o_k < I)[:, None], other=0.0)
            b_w = block_tile(
                codes, scales, row + o_row, scale + o_row // ROWS, i_k, I,
                BITS, COLUMNS, POWERS, WHOLE, FAST, x.dtype.element_ty, BN, BK,
            )  # fmt: skip
            b_y = tl.dot(b_w, b_x, b_y, input_precision="ieee")
        o_pair = tl.load(order + o_m, mask=m_m, other=0).to(tl.int64)
        o_y = o_pair[None, :] * D + o_n[:, None]
        tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_m[None, :] & m_n[:, None])


class Tiles(NamedTuple):
    """How the products of a stack are cut."""

    columns: int | None  # that a step of the kernels of few rows takes; None: by those of many rows
    config: dict[str, int]


def tiles_of(x: Tensor, stack: Stack, rows: int, T: int) -> Tiles:
    """For so many rows of T tokens, over all experts of a stack: the fastest on an H200 at V4-Flash's widths."""
    if isinstance(stack, Tensor):
        return Tiles(None, tile_config(x.dtype, rows, len(stack)))
    if x.dtype == torch.float32:
        return Tiles(None, dict(BM=16, BN=32, BK=32, STAGES=2, num_warps=4))
    BM = next((size for size in (16, 32, 64) if rows <= size * len(stack)), 128)
    if BM > 16 or x.dtype != torch.bfloat16:
        return Tiles(None, dict(BM=BM, BN=64, BK=64, STAGES=3, num_warps=4))
    BM = 8 if T <= 8 else 16
    if stack.form.bits == 4:
        return Tiles(128, dict(BM=BM, BN=32, STAGES=3, num_warps=2))
    return Tiles(512, dict(BM=BM, BN=16, STAGES=3, num_warps=4))


def _launch(
    kernels: tuple[Any, Any, Any], x: Tensor, stack: Stack, pairs: tuple[Tensor, Tensor], y: Tensor,
    sizes: tuple[float, ...], N: int, T: int,
) -> None:  # fmt: skip
    """One product of a stack: `kernels` are those for matrices that are not codes, for few rows, and for many."""
    (order, offsets), E, M = pairs, len(stack), len(pairs[0])
    columns, config = tiles_of(x, stack, min(M, T * E), T)  # a token takes an expert once, as a rule
    tiles = M // config["BM"] + min(E, M)  # at most: every expert may end in a tile that is not full
    grid, BE = (triton.cdiv(N, config["BN"]) * tiles,), triton.next_power_of_2(E)
    plain, few, many = kernels
    if isinstance(stack, Tensor):
        plain[grid](x, stack, order, offsets, y, *sizes, BE=BE, **config)
        return
    form, fast = stack.form, has_pdl(x.device)
    if columns is not None:
        few[grid](
            as_pairs(x) if form.bits == 4 else x, stack.codes, stack.scales, order, offsets, y, *sizes,
            stack.scales.shape[1], FORM=rows_form(stack, columns), FAST=fast, BE=BE, launch_pdl=fast, **config,
        )  # fmt: skip
        return
    many[grid](
        x, stack.codes, stack.scales, order, offsets, y, *sizes, stack.scales.shape[1], ROWS=form.rows, BITS=form.bits,
        COLUMNS=form.columns, POWERS=form.scale_bytes == 1, WHOLE=stack.shape[-1] % config["BK"] == 0, FAST=fast,
        BE=BE, **config,
    )  # fmt: skip


UP, DOWN = (expert_up_kernel, few_up_kernel, block_up_kernel), (expert_down_kernel, few_down_kernel, block_down_kernel)


def run_block_experts_triton(
    x: Tensor, weights: Tensor, chosen: Tensor, stacks: Sequence[ExpertStack], limit: float, others: bool = False
) -> Tensor:
    (T, D), K = x.shape, chosen.shape[1]
    out = torch.empty((T, D), dtype=x.dtype, device=x.device)
    if T == 0:
        return out
    make = torch.zeros if others else torch.empty  # rows of experts that are not here are not written
    parts, x = make((T * K, D), dtype=x.dtype, device=x.device), x.contiguous()
    up, down = (coded(part) for part in zip(*stacks, strict=True))
    alike = up and down and up[0].shape[1:] == up[-1].shape[1:]  # a part of the shared expert may be narrower
    if T == 1 and alike and x.dtype == torch.bfloat16:
        run_one(x, chosen, up, down, limit, parts)
    else:
        run_sorted(x, chosen, stacks, limit, parts)
    BD = min(1024, triton.next_power_of_2(D))
    combine_kernel[T, triton.cdiv(D, BD)](parts, weights, out, D, K=K, BD=BD)
    return out


def coded(stacks: Sequence[Stack]) -> list[BlockScaled] | None:
    """Where there are one or two, and all are codes."""
    found = [stack for stack in stacks if isinstance(stack, BlockScaled)]
    return found if len(found) == len(stacks) <= 2 else None


def run_sorted(x: Tensor, chosen: Tensor, stacks: Sequence[ExpertStack], limit: float, parts: Tensor) -> None:
    """What the experts give for each pair, into parts [T K, D]."""
    (T, D), K, at = x.shape, chosen.shape[1], 0
    order, offsets = sort_pairs_triton(chosen, sum(len(stack.down) for stack in stacks))
    for gate_up, down in stacks:
        (E, _, I), mine = down.shape, (order, offsets[at:])
        inner = torch.empty((T * K, I), dtype=x.dtype, device=x.device)
        _launch(UP, x, gate_up, mine, inner, (E, D, I, K, limit), I, T)
        _launch(DOWN, inner, down, mine, parts, (E, D, I), D, T)
        del inner  # the next stack's takes its place
        at += E


def run_block_experts(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, k] f32
    chosen: Tensor,  # [T, k] int32: numbers of experts, counted through all stacks
    stacks: Sequence[ExpertStack],
    limit: float,  # of what goes into silu and of its factor; inf: none
    others: bool = False,
) -> Tensor:  # [T, D]
    """The weighted sum of each token's experts. `others`: a choice may be of the number after the last expert's, of one
    that is not here, with a weight of zero: no tile runs for it.
    """
    op = run_block_experts_triton if use_triton(x) else run_block_experts_ref
    return op(x, weights, chosen, stacks, limit, others)
