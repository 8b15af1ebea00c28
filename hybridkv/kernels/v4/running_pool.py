"""save_running: the running pool of a request's open window (heavily compressed attention), kept between steps.

A pool is a softmax-weighted sum of rows, taken row by row:

    pool       top = max z      total = sum exp(z - top)      mixed = sum exp(z - top) * p
    pooled     mixed / total

One exponential a row: either the old sums shrink, or the new row is the smaller one. Rows are taken in the order of
their positions, so a pool has the same bits however they were split into steps.

Between steps a request keeps only the pool of its open window: 3c numbers in place of up to 2mc. K banks hold the pool
after each of the last K tokens, the one after token u in bank u % K, so that up to K - 1 tokens can be taken back. A
window that is closed leaves an empty pool (-inf, 0, 0); the first token of a window reads no bank, so nothing that an
earlier request left in a slot is ever read.

One program a request and block of channels, which walks the rows of this step in order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.overlap import can_overlap
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.flush_entry import warps

BLOCK_CHANNELS = 128  # of a program of save_running
EMPTY = (-math.inf, 0.0, 0.0)  # a pool of no rows
STAGES = 6  # rows that are being loaded while one is taken
Pool = tuple[Tensor, Tensor, Tensor]  # top, total, mixed


def pool_row_ref(pool: Pool, p: Tensor, z: Tensor) -> Pool:
    """The pool after one more row."""
    top, total, mixed = pool
    step = z - top
    grows, small = step > 0, torch.exp(-step.abs())
    old, new = torch.where(grows, small, 1.0), torch.where(grows, 1.0, small)
    return torch.where(grows, z, top), total * old + new, mixed * old + new * p


def where_pool(chosen: Tensor, a: Pool, b: Pool | tuple[float, float, float]) -> Pool:
    top, total, mixed = (torch.where(chosen, x, y) for x, y in zip(a, b))
    return top, total, mixed


def open_pool_ref(banks: Pool, slots: Tensor, begins: Tensor, first: Tensor) -> Pool:
    """Pools [M, c] of windows that begin at `first` [M]: from the banks [slots, K, c] if the step began later."""
    at = (slots, (begins - 1) % banks[0].shape[1])
    top, total, mixed = (x[at] for x in banks)
    return where_pool((begins > first).unsqueeze(-1), (top, total, mixed), EMPTY)


def save_running_ref(
    top: Tensor, total: Tensor, mixed: Tensor, p: Tensor, z: Tensor, bias: Tensor, index: StepIndex, ratio: int
) -> None:
    banks, K = (top, total, mixed), top.shape[1]
    counts = index.query_start_loc.diff()
    live = ((index.slots >= 0) & (counts > 0)).nonzero().squeeze(-1)
    if not len(live):
        return
    slots, begins, starts = index.slots[live], index.num_computed[live], index.query_start_loc[live]
    ends = begins + counts[live]
    saved = torch.maximum(begins, ends - K)  # the first position whose pool is kept
    first = saved // ratio * ratio
    now = open_pool_ref(banks, slots, begins, first)
    walk = torch.maximum(begins, first)
    for i in range(int((ends - walk).max())):
        at = walk + i
        here = at < ends
        token = (starts + at - begins).clamp(max=len(p) - 1)
        then = pool_row_ref(now, p[token], z[token] + bias[at % ratio])
        now = where_pool(((at + 1) % ratio > 0).unsqueeze(-1), then, EMPTY)
        kept = here & (at >= saved)
        for bank, x in zip(banks, now):
            bank[slots[kept], at[kept] % K] = x[kept]


@triton.jit
def pool_row(b_top, b_total, b_mixed, b_p, b_z):
    b_step = b_z - b_top
    b_small = tl.exp(-tl.abs(b_step))
    b_old = tl.where(b_step > 0, b_small, 1.0)
    b_new = tl.where(b_step > 0, 1.0, b_small)
    # fma: what is rounded is said here, not chosen by the compiler of each kernel
    return tl.where(b_step > 0, b_z, b_top), tl.fma(b_total, b_old, b_new), tl.fma(b_mixed, b_old, b_new * b_p)


@triton.jit
def empty_pool(C: tl.constexpr):
    return tl.full([C], float("-inf"), tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)


@triton.jit
def load_pool(top, total, mixed, o_pool, m_c, from_bank):
    """The pool at o_pool, or an empty one."""
    b_top = tl.load(top + o_pool, mask=m_c & from_bank, other=float("-inf"))
    b_total = tl.load(total + o_pool, mask=m_c & from_bank, other=0.0)
    b_mixed = tl.load(mixed + o_pool, mask=m_c & from_bank, other=0.0)
    return b_top, b_total, b_mixed


@triton.jit
def save_running_kernel(
    top, total, mixed, p, z, bias, slots, begins, starts, stride_p, stride_z,
    K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    i_b = tl.program_id(0).to(tl.int64)
    i_s, begin, start = tl.load(slots + i_b), tl.load(begins + i_b), tl.load(starts + i_b)
    end = begin + tl.load(starts + i_b + 1) - start
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if (i_s < 0) | (end == begin):
        return
    saved = tl.maximum(begin, end - K)  # the first position whose pool is kept
    first = saved // M * M
    walk = tl.maximum(begin, first)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    o_pool = (i_s * K + (begin - 1) % K) * C + o_c
    b_top, b_total, b_mixed = load_pool(top, total, mixed, o_pool, m_c, begin > first)
    tl.debug_barrier()  # the bank that was read may be written below
    for i in tl.range(0, (end - walk).to(tl.int32), num_stages=STAGES):
        u = walk + i
        i_row = start + u - begin
        b_p = tl.load(p + i_row * stride_p + o_c, mask=m_c, other=0.0)
        b_z = tl.load(z + i_row * stride_z + o_c, mask=m_c, other=0.0)
        b_z += tl.load(bias + u % M * C + o_c, mask=m_c, other=0.0)
        b_top, b_total, b_mixed = pool_row(b_top, b_total, b_mixed, b_p, b_z)
        if (u + 1) % M == 0:
            b_top, b_total, b_mixed = empty_pool(BC)
        o_pool = (i_s * K + u % K) * C + o_c
        m_kept = m_c & (u >= saved)
        tl.store(top + o_pool, b_top, mask=m_kept)
        tl.store(total + o_pool, b_total, mask=m_kept)
        tl.store(mixed + o_pool, b_mixed, mask=m_kept)


def save_running_triton(
    top: Tensor, total: Tensor, mixed: Tensor, p: Tensor, z: Tensor, bias: Tensor, index: StepIndex, ratio: int
) -> None:
    (_, K, C), T, B = top.shape, len(p), len(index.slots)
    assert p.shape == z.shape == (T, C) and p.stride(1) == z.stride(1) == 1
    assert top.shape == total.shape == mixed.shape and bias.shape == (ratio, C)
    assert all(x.is_contiguous() for x in (top, total, mixed, bias))
    if not T:
        return
    columns, overlap = min(BLOCK_CHANNELS, triton.next_power_of_2(C)), can_overlap(p, None)
    save_running_kernel[(B, triton.cdiv(C, columns))](
        top, total, mixed, p, z, bias, index.slots, index.num_computed, index.query_start_loc, p.stride(0), z.stride(0),
        K=K, M=ratio, C=C, BC=columns, STAGES=STAGES, OVERLAP=overlap, num_warps=warps(columns), launch_pdl=overlap,
    )  # fmt: skip


def save_running(
    top: Tensor,  # [slots, K, c] f32
    total: Tensor,  # [slots, K, c] f32
    mixed: Tensor,  # [slots, K, c] f32
    p: Tensor,  # [T, c] f32
    z: Tensor,  # [T, c] f32, without bias
    bias: Tensor,  # [m, c] f32
    index: StepIndex,
    ratio: int,  # m
) -> None:
    """Save the pool after each of the last K tokens of every request in its banks; after the step's flush."""
    form = save_running_triton if use_triton(p) else save_running_ref
    form(top, total, mixed, p, z, bias, index, ratio)
