"""Both products of experts in codes (block_experts.py) for one token: the step of a single request. Each choice is an
expert of its own, so nothing is sorted, and experts of two formats are one launch: their bytes are read side by side.
On Hopper GPUs the kernel is that of block_experts_one_hopper.py, for codes as they are released; elsewhere, and for
blocks of other sizes, the ones below.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.backend import has_gluon, has_pdl, tl, triton
from hybridkv.kernels.linear.block_rows import as_pairs, few_rows_tile, rows_form
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.kernels.moe.grouped import clamped_silu_mul

# the fastest on an H200 at V4-Flash's widths
COLUMNS = 256  # of a step
ROWS = 32  # of codes that a program multiplies
CONFIG = dict(BT=8, STAGES=3, num_warps=2)
# of the Hopper kernel, the same
STAGE = 512  # columns of FP4 that a warp takes at a time
STEP = 128  # of which these are multiplied at once; FP8: the columns of a block
WARPS = (1, 2)  # of a program: as many as have a stage each
PARTS = 2  # of a stage of FP4, which are waited for one by one


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


class LanesForm(NamedTuple):
    """What the Hopper kernel has to know of codes. A constant of it."""

    bits: int  # of a code
    rows: int  # of a block
    powers: bool  # scales are E8M0
    even: bool  # columns are a whole number of stages of all warps


def suits_hopper(stacks: list[BlockScaled]) -> bool:
    """Whether the kernel reads these codes: blocks as they are released, and columns a whole number of steps, so that
    both products' rows are a whole number of tiles, too.
    """
    forms = [each.form for each in stacks]
    known = all(
        (form.rows, form.columns, form.scale_bytes) == (1, 32, 1) if form.bits == 4 else form.columns == STEP
        for form in forms
    )
    return known and stacks[0].shape[-1] % STEP == 0


def launch_one_hopper(
    x: Tensor, stacks: list[BlockScaled], chosen: Tensor, y: Tensor, limit: float, gated: bool
) -> None:
    """One product of all choices: x [1, K] or [choices, K] -> y [choices, N]."""
    from hybridkv.kernels.moe.block_experts_one_hopper import one_row_kernel

    (_, N, K), (first, second), k = stacks[0].shape, (stacks[0], stacks[-1]), chosen.numel()
    N = N // 2 if gated else N
    warps = max(n for n in WARPS if n == WARPS[0] or n * STAGE <= K)
    columns = {4: STAGE * warps, 8: STAGE * warps // 2}  # of a stage
    forms = [
        LanesForm(e.form.bits, e.form.rows, e.form.scale_bytes == 1, K % columns[e.form.bits] == 0)
        for e in (first, second)
    ]
    words = [e.codes.view(torch.int32) for e in (first, second)]
    scales = [e.scales.view(torch.int32) if e.form.bits == 4 else e.scales for e in (first, second)]
    rows = 8 if gated else 16
    assert N % rows == 0, f"{N} rows are no whole number of tiles of {rows}"
    one_row_kernel[(k * (N // rows),)](
        as_pairs(x), words[0], scales[0], words[1], scales[1], chosen, y, k, len(first),
        sum(len(each) for each in stacks), N, K, limit, 0 if len(x) == 1 < k else K // 2, words[0].shape[-1],
        scales[0].shape[-1], words[1].shape[-1], scales[1].shape[-1], scales[0].shape[1], scales[1].shape[1],
        FIRST=forms[0], SECOND=forms[1], TWO=len(stacks) == 2, GATED=gated, S=warps, PARTS=PARTS, num_warps=warps,
        launch_pdl=True,
    )  # fmt: skip


def run_one(x: Tensor, chosen: Tensor, up: list[BlockScaled], down: list[BlockScaled], limit: float, y: Tensor) -> None:
    """x [1, D] through the experts of its choices, into y [K, D]."""
    (_, D), I = x.shape, down[0].shape[2]
    inner = torch.empty((chosen.numel(), I), dtype=x.dtype, device=x.device)
    if has_gluon(x.device) and suits_hopper(up) and suits_hopper(down):
        launch_one_hopper(x, up, chosen, inner, limit, gated=True)
        launch_one_hopper(inner, down, chosen, y, limit, gated=False)
        return
    launch_one(one_up_kernel, x, up, chosen, inner, (D, I, limit), triton.cdiv(I, ROWS // 2))
    launch_one(one_down_kernel, inner, down, chosen, y, (D, I), triton.cdiv(D, ROWS))
