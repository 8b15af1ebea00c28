"""flush_csa, save_rows: entries that overlap, one for every m tokens (compressed sparse attention).

A token gives a content row p and a gate row z of two streams of c channels each, side by side:

    channels     [ next stream 0:c | own stream c:2c ]
    entry j      own stream of its own window, positions mj .. mj+m-1, and next stream of the window before it
    weights      softmax of z over those 2m rows, for each channel alone; rows before position 0 have weight 0
    z            has bias[position % m] added

The softmax-weighted sum of p is normed, rotated and stored (`flush_entry`). Between steps a ring keeps the last R >= 2m
rows of a request, position u at u % R, z with its bias. A step flushes first and saves after: `save_rows` may overwrite
what `flush_csa` reads. Rows of this step are read where the projection left them, and never from the ring, so nothing
a slot's last owner left is ever read.

The kernels have one program a token. A token that completes no entry (entry_index -1), or that is padding (slot -1),
ends there: every step has the same launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.flush_entry import store_pooled, store_pooled_ref, warps
from hybridkv.kernels.page_layout import PageFormat
from hybridkv.kernels.step_index import StepIndex


def flush_csa_ref(
    pages: Tensor,  # [N, P, width]
    fmt: PageFormat,
    entry_index: Tensor,  # [T] int64 flat place of the entry that a token completes; -1: none
    p: Tensor,  # [T, 2c] f32
    z: Tensor,  # [T, 2c] f32, without bias
    row_p: Tensor,  # [slots, R, 2c] f32
    row_z: Tensor,  # [slots, R, 2c] f32, with bias
    bias: Tensor,  # [m, 2c] f32
    weight: Tensor,  # [c] f32
    eps: float,
    cos: Tensor,  # [T, r/2] f32, at the entry's position: t + 1 - m
    sin: Tensor,
    index: StepIndex,
    ratio: int,
) -> None:
    R, c = row_p.shape[1], fmt.dim
    slots = index.token_slots
    last = ((entry_index >= 0) & (slots >= 0)).nonzero().squeeze(-1)  # [M] tokens that complete an entry
    back = torch.arange(2 * ratio - 1, -1, -1, device=p.device)  # previous window, then own
    at = index.positions[last, None] - back  # [M, 2m] positions
    fresh = (at >= index.begins[index.owner[last], None]).unsqueeze(-1)
    row = (last[:, None] - back).clamp(min=0)
    kept = (slots[last, None], at % R)
    pooled_p = torch.where(fresh, p[row], row_p[kept])  # [M, 2m, 2c]
    pooled_z = torch.where(fresh, z[row] + bias[at % ratio], row_z[kept])
    missing = (at < 0).unsqueeze(-1)
    pooled_p, pooled_z = pooled_p.masked_fill(missing, 0), pooled_z.masked_fill(missing, -torch.inf)
    p_slots, z_slots = (
        torch.cat((x[:, :ratio, :c], x[:, ratio:, c:]), 1) for x in (pooled_p, pooled_z)
    )  # each [M, 2m, c]
    pooled = (z_slots.softmax(1) * p_slots).sum(1)
    store_pooled_ref(pages, fmt, entry_index[last], pooled, weight, eps, cos[last], sin[last])


def save_rows_ref(
    row_p: Tensor,  # [slots, R, 2c] f32
    row_z: Tensor,  # [slots, R, 2c] f32
    p: Tensor,  # [T, 2c] f32
    z: Tensor,  # [T, 2c] f32, without bias
    bias: Tensor,  # [m, 2c] f32
    index: StepIndex,
    ratio: int,
) -> None:
    R, ends = row_p.shape[1], index.begins + index.starts.diff()
    slots = index.token_slots
    token = ((slots >= 0) & (index.positions >= ends[index.owner] - R)).nonzero().squeeze(-1)
    at = index.positions[token]
    row_p[slots[token], at % R] = p[token]
    row_z[slots[token], at % R] = z[token] + bias[at % ratio]


@triton.jit(do_not_specialize=["E"])
def flush_csa_kernel(
    pages, entry_index, p, z, row_p, row_z, bias, weight, cos, sin, slots, begins, owner, positions,
    E, P, eps, stride_p, stride_z, stride_cos, stride_sin,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, TURNED: tl.constexpr,
    ROPE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    i_b = tl.load(owner + i_t)
    i_e, i_s = tl.load(entry_index + i_t), tl.load(slots + i_b)
    if (i_e < 0) | (i_e >= E) | (i_s < 0):
        return
    begin, end = tl.load(begins + i_b), tl.load(positions + i_t)
    o_r, o_c = tl.arange(0, BR), tl.arange(0, BC)
    o_u = end + 1 - 2 * M + o_r  # previous window, then own; rows past 2M are not there
    m_u = (o_u >= 0) & (o_r < 2 * M)
    m_new = o_u >= begin
    i_row, i_kept = i_t + 1 - 2 * M + o_r, i_s * R + o_u % R
    o_x = tl.where(o_r < M, 0, C)[:, None] + o_c
    m_x = m_u[:, None] & (o_c < C)
    p_p = tl.where(m_new, p + i_row * stride_p, row_p + i_kept * (2 * C))
    p_z = tl.where(m_new, z + i_row * stride_z, row_z + i_kept * (2 * C))
    b_p = tl.load(p_p[:, None] + o_x, mask=m_x, other=0.0)
    b_z = tl.load(p_z[:, None] + o_x, mask=m_x, other=0.0)
    b_bias = tl.load(bias + (o_r % M * (2 * C))[:, None] + o_x, mask=m_x & m_new[:, None], other=0.0)
    b_z = tl.where(m_u[:, None], b_z + b_bias, float("-inf"))
    b_weight = tl.exp(b_z - tl.max(b_z, 0)[None, :])
    b_x = tl.sum(b_weight * b_p, 0) / tl.sum(b_weight, 0)
    store_pooled(
        pages, i_e, b_x, weight, eps, cos, sin, i_t, P, stride_cos, stride_sin, C, BC, TURNED, ROPE, FORMAT
    )  # fmt: skip


@triton.jit
def save_rows_kernel(
    row_p, row_z, p, z, bias, slots, begins, starts, owner, positions, stride_p, stride_z,
    R: tl.constexpr, M: tl.constexpr, W: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    i_b, u = tl.load(owner + i_t), tl.load(positions + i_t)
    i_s = tl.load(slots + i_b)
    end = tl.load(begins + i_b) + tl.load(starts + i_b + 1) - tl.load(starts + i_b)
    if (i_s < 0) | (u < end - R):
        return
    o_w = tl.arange(0, BW)
    o_row = (i_s * R + u % R) * W + o_w
    b_p = tl.load(p + i_t * stride_p + o_w, mask=o_w < W)
    b_z = tl.load(z + i_t * stride_z + o_w, mask=o_w < W)
    b_bias = tl.load(bias + u % M * W + o_w, mask=o_w < W)
    tl.store(row_p + o_row, b_p, mask=o_w < W)
    tl.store(row_z + o_row, b_z + b_bias, mask=o_w < W)


def flush_csa_triton(
    pages: Tensor,
    fmt: PageFormat,
    entry_index: Tensor,
    p: Tensor,
    z: Tensor,
    row_p: Tensor,
    row_z: Tensor,
    bias: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    index: StepIndex,
    ratio: int,
) -> None:
    T, (N, P, _), R, C = len(p), pages.shape, row_p.shape[1], fmt.dim
    assert p.shape == z.shape == (T, 2 * C) and p.stride(1) == z.stride(1) == cos.stride(1) == sin.stride(1) == 1
    assert row_p.shape == row_z.shape and row_p.shape[2] == 2 * C and 2 * ratio <= R and bias.shape == (ratio, 2 * C)
    assert all(x.is_contiguous() for x in (pages, entry_index, row_p, row_z, bias, weight))
    if not T:
        return
    rows, columns = triton.next_power_of_2(2 * ratio), triton.next_power_of_2(C)
    flush_csa_kernel[(T,)](
        pages, entry_index, p, z, row_p, row_z, bias, weight, cos, sin,
        index.slots, index.begins, index.owner, index.positions, N * P, P, eps,
        p.stride(0), z.stride(0), cos.stride(0), sin.stride(0),
        R=R, M=ratio, C=C, BR=rows, BC=columns, TURNED=2 * cos.shape[1], ROPE=fmt.rope, FORMAT=fmt.code,
        num_warps=max(1, min(8, rows * columns // 1024)),
    )  # fmt: skip


def save_rows_triton(
    row_p: Tensor, row_z: Tensor, p: Tensor, z: Tensor, bias: Tensor, index: StepIndex, ratio: int
) -> None:
    (_, R, W), T = row_p.shape, len(p)
    assert row_p.shape == row_z.shape and p.shape == z.shape == (T, W) and p.stride(1) == z.stride(1) == 1
    assert all(x.is_contiguous() for x in (row_p, row_z, bias)) and bias.shape == (ratio, W)
    if not T:
        return
    columns = triton.next_power_of_2(W)
    save_rows_kernel[(T,)](
        row_p, row_z, p, z, bias, index.slots, index.begins, index.starts, index.owner, index.positions,
        p.stride(0), z.stride(0), R=R, M=ratio, W=W, BW=columns, num_warps=warps(columns),
    )  # fmt: skip


def flush_csa(
    pages: Tensor,
    fmt: PageFormat,
    entry_index: Tensor,
    p: Tensor,
    z: Tensor,
    row_p: Tensor,
    row_z: Tensor,
    bias: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    index: StepIndex,
    ratio: int,
) -> None:
    """Store the entries [M] that tokens of this step complete at their flat places entry_index [T]."""
    form = flush_csa_triton if use_triton(p) else flush_csa_ref
    form(pages, fmt, entry_index, p, z, row_p, row_z, bias, weight, eps, cos, sin, index, ratio)


def save_rows(row_p: Tensor, row_z: Tensor, p: Tensor, z: Tensor, bias: Tensor, index: StepIndex, ratio: int) -> None:
    """The last R rows [T, 2c] of each request into its ring [slots, R, 2c], after the step's entries are flushed."""
    form = save_rows_triton if use_triton(p) else save_rows_ref
    form(row_p, row_z, p, z, bias, index, ratio)
