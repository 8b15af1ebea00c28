"""flush_hca, save_running: entries of m tokens each that do not overlap (heavily compressed attention).

Entry j is the softmax-weighted sum of the content rows p of positions mj .. mj+m-1, weights from the gate rows z plus
bias[position % m], for each channel alone; then normed, rotated and stored (`flush_entry`). The sum runs row by row:

    pool       top = max z      total = sum exp(z - top)      mixed = sum exp(z - top) * p
    pooled     mixed / total

One exponential a row: either the old sums shrink, or the new row is the smaller one. Rows are taken in the order of
their positions, so a pool has the same bits however they were cut into steps.

Between steps a request keeps no rows but the running pool of its open window: 3c numbers in place of up to 2mc. K banks
hold the pool after each of the last K tokens, the one after token u in bank u % K, so that up to K - 1 tokens can be
taken back. A window that is closed leaves an empty pool (-inf, 0, 0); the first token of a window reads no bank, so
nothing a slot's last owner left is ever read. A step flushes first and saves after.

`flush_hca` has one program a token, which ends at once where the token completes no entry (entry_index -1) or is
padding (slot -1); `save_running` one a request and block of channels. Both walk the rows of this step in order, from
the bank or from an empty pool.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.overlap import can_overlap
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.flush_entry import store_pooled, store_pooled_ref, warps
from hybridkv.kernels.v4.norm_rope import load_turns

BLOCK_CHANNELS = 128  # of a program of save_running
EMPTY = (-math.inf, 0.0, 0.0)  # a pool of no rows
STAGES = 6  # rows on their way while one is taken
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


def pooled_hca_ref(
    last: Tensor,  # [M] tokens that complete an entry
    p: Tensor,  # [T, c]
    z: Tensor,
    banks: Pool,  # each [slots, K, c]
    bias: Tensor,  # [m, c]
    index: StepIndex,
    ratio: int,
) -> Tensor:  # [M, c]
    begins = index.num_computed[index.token_to_req[last]]
    first = index.positions[last] + 1 - ratio
    now = open_pool_ref(banks, index.token_slots[last], begins, first)
    held = (begins - first).clamp(min=0)  # rows that the bank stands for
    for i in range(int(held.min()) if len(last) else ratio, ratio):
        token = (last + 1 - ratio + i).clamp(min=0)
        then = pool_row_ref(now, p[token], z[token] + bias[i])
        now = where_pool((i >= held).unsqueeze(-1), then, now)
    return now[2] / now[1]


def flush_hca_ref(
    pages: Tensor,  # [N, P, width]
    fmt: PageFormat,
    entry_index: Tensor,  # [T] int64 flat place of the entry that a token completes; -1: none
    p: Tensor,  # [T, c] f32
    z: Tensor,  # [T, c] f32, without bias
    top: Tensor,  # [slots, K, c] f32
    total: Tensor,  # [slots, K, c] f32
    mixed: Tensor,  # [slots, K, c] f32
    bias: Tensor,  # [m, c] f32
    weight: Tensor,  # [c] f32
    eps: float,
    cos: Tensor,  # [T, r/2] f32, at the entry's position: t + 1 - m
    sin: Tensor,
    index: StepIndex,
    ratio: int,
) -> None:
    last = ((entry_index >= 0) & (index.token_slots >= 0)).nonzero().squeeze(-1)
    pooled = pooled_hca_ref(last, p, z, (top, total, mixed), bias, index, ratio)
    store_pooled_ref(pages, fmt, entry_index[last], pooled, weight, eps, cos[last], sin[last])


def save_running_ref(
    top: Tensor,  # [slots, K, c] f32
    total: Tensor,
    mixed: Tensor,
    p: Tensor,  # [T, c] f32
    z: Tensor,  # [T, c] f32, without bias
    bias: Tensor,  # [m, c] f32
    index: StepIndex,
    ratio: int,
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


@triton.jit(do_not_specialize=["E"])
def flush_hca_kernel(
    pages, entry_index, p, z, top, total, mixed, bias, weight, cos, sin, slots, begins, owner, positions,
    E, P, eps, stride_p, stride_z, stride_cos, stride_sin,
    K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, TURNED: tl.constexpr, ROPE: tl.constexpr,
    FORMAT: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    i_b, i_e, last = tl.load(owner + i_t), tl.load(entry_index + i_t), tl.load(positions + i_t)
    i_s, begin = tl.load(slots + i_b), tl.load(begins + i_b)
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    b_weight = tl.load(weight + o_c, mask=m_c, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # the index, like the weights, was there before the step
    if (i_e < 0) | (i_e >= E) | (i_s < 0):
        return
    first = last + 1 - M
    held = tl.maximum(begin - first, 0).to(tl.int32)  # rows that the bank stands for
    o_pool = (i_s * K + (begin - 1) % K) * C + o_c
    b_top, b_total, b_mixed = load_pool(top, total, mixed, o_pool, m_c, held > 0)
    o_t, i_page = i_t + tl.zeros([1, 1], tl.int64), i_e // P
    turns = load_turns(cos + o_t * stride_cos, sin + o_t * stride_sin, o_t >= 0, C, TURNED // 2, BC // 2)
    for i in tl.range(held, M, num_stages=STAGES):
        i_row = i_t + 1 - M + i
        b_p = tl.load(p + i_row * stride_p + o_c, mask=m_c, other=0.0)
        b_z = tl.load(z + i_row * stride_z + o_c, mask=m_c, other=0.0)
        b_z += tl.load(bias + i * C + o_c, mask=m_c, other=0.0)
        b_top, b_total, b_mixed = pool_row(b_top, b_total, b_mixed, b_p, b_z)
    b_x = tl.where(m_c, b_mixed / b_total, 0.0)
    store_pooled(pages, i_page, i_e - i_page * P, b_x, b_weight, turns, eps, P, C, ROPE, FORMAT)


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


def flush_hca_triton(
    pages: Tensor,
    fmt: PageFormat,
    entry_index: Tensor,
    p: Tensor,
    z: Tensor,
    top: Tensor,
    total: Tensor,
    mixed: Tensor,
    bias: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    index: StepIndex,
    ratio: int,
) -> None:
    T, (N, P, _), K, C = len(p), pages.shape, top.shape[1], fmt.dim
    assert p.shape == z.shape == (T, C) and p.stride(1) == z.stride(1) == cos.stride(1) == sin.stride(1) == 1
    assert top.shape == total.shape == mixed.shape and top.shape[2] == C and bias.shape == (ratio, C)
    assert all(x.is_contiguous() for x in (pages, entry_index, top, total, mixed, bias, weight))
    if not T:
        return
    columns, overlap = triton.next_power_of_2(C), can_overlap(p, None)
    flush_hca_kernel[(T,)](
        pages, entry_index, p, z, top, total, mixed, bias, weight, cos, sin,
        index.slots, index.num_computed, index.token_to_req, index.positions, N * P, P, eps,
        p.stride(0), z.stride(0), cos.stride(0), sin.stride(0),
        K=K, M=ratio, C=C, BC=columns, TURNED=2 * cos.shape[1], ROPE=fmt.rope, FORMAT=fmt.code,
        STAGES=STAGES, OVERLAP=overlap, num_warps=warps(columns), launch_pdl=overlap,
    )  # fmt: skip


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


def flush_hca(
    pages: Tensor,
    fmt: PageFormat,
    entry_index: Tensor,
    p: Tensor,
    z: Tensor,
    top: Tensor,
    total: Tensor,
    mixed: Tensor,
    bias: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    index: StepIndex,
    ratio: int,
) -> None:
    """Store the entries that tokens of this step complete at their flat places entry_index [T]."""
    form = flush_hca_triton if use_triton(p) else flush_hca_ref
    form(pages, fmt, entry_index, p, z, top, total, mixed, bias, weight, eps, cos, sin, index, ratio)


def save_running(
    top: Tensor, total: Tensor, mixed: Tensor, p: Tensor, z: Tensor, bias: Tensor, index: StepIndex, ratio: int
) -> None:
    """The pool after each of the last K tokens of every request into the banks [slots, K, c], after the flush."""
    form = save_running_triton if use_triton(p) else save_running_ref
    form(top, total, mixed, p, z, bias, index, ratio)
