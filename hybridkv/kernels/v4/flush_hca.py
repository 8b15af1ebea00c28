"""flush_hca: entries of m tokens each that do not overlap (heavily compressed attention).

Entry j is the softmax-weighted sum of the content rows p of positions mj .. mj+m-1, with weights from the gate rows z
plus bias[position % m], for each channel alone; then normed, rotated and stored (flush_entry.py). The sum is a running
pool (running_pool.py): the rows of earlier steps come from a bank, those of this step one after the other.

One program a token, which ends at once where the token completes no entry (entry_index -1) or is padding (slot -1). A
step flushes first and saves the pools after.
"""

from __future__ import annotations

from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.overlap import can_overlap
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.flush_entry import store_pooled, store_pooled_ref, warps
from hybridkv.kernels.v4.norm_rope import load_angles
from hybridkv.kernels.v4.running_pool import STAGES, Pool, load_pool, open_pool_ref, pool_row, pool_row_ref, where_pool


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
    last = ((entry_index >= 0) & (index.token_slots >= 0)).nonzero().squeeze(-1)
    pooled = pooled_hca_ref(last, p, z, (top, total, mixed), bias, index, ratio)
    store_pooled_ref(pages, fmt, entry_index[last], pooled, weight, eps, cos[last], sin[last])


@triton.jit(do_not_specialize=["E"])
def flush_hca_kernel(
    pages, entry_index, p, z, top, total, mixed, bias, weight, cos, sin, slots, begins, owner, positions,
    E, P, eps, stride_p, stride_z, stride_cos, stride_sin,
    K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, ROTATED: tl.constexpr, ROPE: tl.constexpr,
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
    angles = load_angles(cos + o_t * stride_cos, sin + o_t * stride_sin, o_t >= 0, C, ROTATED // 2, BC // 2)
    for i in tl.range(held, M, num_stages=STAGES):
        i_row = i_t + 1 - M + i
        b_p = tl.load(p + i_row * stride_p + o_c, mask=m_c, other=0.0)
        b_z = tl.load(z + i_row * stride_z + o_c, mask=m_c, other=0.0)
        b_z += tl.load(bias + i * C + o_c, mask=m_c, other=0.0)
        b_top, b_total, b_mixed = pool_row(b_top, b_total, b_mixed, b_p, b_z)
    b_x = tl.where(m_c, b_mixed / b_total, 0.0)
    store_pooled(pages, i_page, i_e - i_page * P, b_x, b_weight, angles, eps, P, C, ROPE, FORMAT)


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
        K=K, M=ratio, C=C, BC=columns, ROTATED=2 * cos.shape[1], ROPE=fmt.rope, FORMAT=fmt.code,
        STAGES=STAGES, OVERLAP=overlap, num_warps=warps(columns), launch_pdl=overlap,
    )  # fmt: skip


def flush_hca(
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
    """Store the entries that tokens of this step complete at their flat places entry_index [T]."""
    form = flush_hca_triton if use_triton(p) else flush_hca_ref
    form(pages, fmt, entry_index, p, z, top, total, mixed, bias, weight, eps, cos, sin, index, ratio)
