"""flush_csa: entries that overlap, one for every m tokens (compressed sparse attention), and rows for the next step.

A token gives a content row p and a gate row z of two streams of c channels each, side by side:

    channels     [ next stream 0:c | own stream c:2c ]
    entry j      own stream of its own window, positions mj .. mj+m-1, and next stream of the window before it
    weights      softmax of z over those 2m rows, for each channel alone; rows before position 0 have weight 0
    z            has bias[position % m] added

The softmax-weighted sum of p is normed, rotated and stored (`flush_entry`). Between steps a ring keeps the last R >= 2m
rows of a request, position u at u % R, z with its bias. A step flushes first and saves after. Rows of this step are
read where the projection left them, and never from the ring: nothing that an earlier request left there is ever read.

The kernels have one program a token. An entry reads the ring from 2m - 1 positions before the step on, so up to
R + 1 - 2m tokens of a request overwrite nothing that is read: one launch does both, as in every step that decodes.
Longer steps take two. A token that completes no entry (entry_index -1) is only saved, and padding (slot -1) ends there:
every step has the same launches. Launches use PDL where the GPU has it (overlap.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.overlap import can_overlap, wait_for_inputs
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.flush_entry import store_pooled, store_pooled_ref, warps
from hybridkv.kernels.v4.norm_rope import load_angles


def flush_csa_ref(
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
    longest: int,
) -> None:
    R, c = row_p.shape[1], fmt.dim
    slots = index.token_slots
    last = ((entry_index >= 0) & (slots >= 0)).nonzero().squeeze(-1)  # [M] tokens that complete an entry
    back = torch.arange(2 * ratio - 1, -1, -1, device=p.device)  # previous window, then own
    at = index.positions[last, None] - back  # [M, 2m] positions
    fresh = (at >= index.num_computed[index.token_to_req[last], None]).unsqueeze(-1)
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
    save_rows_ref(row_p, row_z, p, z, bias, index, ratio)


def save_rows_ref(
    row_p: Tensor,  # [slots, R, 2c] f32
    row_z: Tensor,  # [slots, R, 2c] f32
    p: Tensor,  # [T, 2c] f32
    z: Tensor,  # [T, 2c] f32, without bias
    bias: Tensor,  # [m, 2c] f32
    index: StepIndex,
    ratio: int,
) -> None:
    R, ends = row_p.shape[1], index.num_computed + index.query_start_loc.diff()
    slots = index.token_slots
    token = ((slots >= 0) & (index.positions >= ends[index.token_to_req] - R)).nonzero().squeeze(-1)
    at = index.positions[token]
    row_p[slots[token], at % R] = p[token]
    row_z[slots[token], at % R] = z[token] + bias[at % ratio]


@triton.jit(do_not_specialize=["E"])
def flush_csa_kernel(
    pages, entry_index, p, z, row_p, row_z, bias, weight, cos, sin, slots, begins, owner, positions,
    E, P, eps, stride_p, stride_z, stride_cos, stride_sin,
    R: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, ROTATED: tl.constexpr,
    ROPE: tl.constexpr, FORMAT: tl.constexpr, SAVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    i_b, i_e, end = tl.load(owner + i_t), tl.load(entry_index + i_t), tl.load(positions + i_t)
    i_s, begin = tl.load(slots + i_b), tl.load(begins + i_b)
    i_page = i_e // P
    o_r, o_c, o_w = tl.arange(0, BR), tl.arange(0, BC), tl.arange(0, 2 * BC)
    m_c, m_w = o_c < C, (o_w < 2 * C) & (i_s >= 0) & SAVE
    o_x = tl.where(o_r < M, 0, C)[:, None] + o_c
    b_weight = tl.load(weight + o_c, mask=m_c, other=0.0)
    b_bias = tl.load(bias + (o_r % M * (2 * C))[:, None] + o_x, mask=(o_r < 2 * M)[:, None] & m_c, other=0.0)
    b_bias_own = tl.load(bias + end % M * (2 * C) + o_w, mask=m_w)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # the index, like the weights, was there before the step
    if i_s < 0:
        return
    b_p_own = tl.load(p + i_t * stride_p + o_w, mask=m_w)
    b_z_own = tl.load(z + i_t * stride_z + o_w, mask=m_w)
    if (i_e >= 0) & (i_e < E):
        o_u = end + 1 - 2 * M + o_r  # previous window, then own; rows past 2M are not there
        m_u = (o_u >= 0) & (o_r < 2 * M)
        m_new = o_u >= begin
        i_row, i_kept = i_t + 1 - 2 * M + o_r, i_s * R + o_u % R
        m_x = m_u[:, None] & m_c
        p_p = tl.where(m_new, p + i_row * stride_p, row_p + i_kept * (2 * C))
        p_z = tl.where(m_new, z + i_row * stride_z, row_z + i_kept * (2 * C))
        b_p = tl.load(p_p[:, None] + o_x, mask=m_x, other=0.0)
        b_z = tl.load(p_z[:, None] + o_x, mask=m_x, other=0.0)
        o_t = i_t + tl.zeros([1, 1], tl.int64)
        angles = load_angles(cos + o_t * stride_cos, sin + o_t * stride_sin, o_t >= 0, C, ROTATED // 2, BC // 2)
        b_z = tl.where(m_u[:, None], b_z + tl.where(m_new[:, None], b_bias, 0.0), float("-inf"))
        b_share = tl.exp(b_z - tl.max(b_z, 0)[None, :])
        b_x = tl.sum(b_share * b_p, 0) / tl.sum(b_share, 0)
        store_pooled(pages, i_page, i_e - i_page * P, b_x, b_weight, angles, eps, P, C, ROPE, FORMAT)
    o_own = (i_s * R + end % R) * (2 * C) + o_w
    tl.store(row_p + o_own, b_p_own, mask=m_w)
    tl.store(row_z + o_own, b_z_own + b_bias_own, mask=m_w)


@triton.jit
def save_rows_kernel(
    row_p, row_z, p, z, bias, slots, begins, starts, owner, positions, stride_p, stride_z,
    R: tl.constexpr, M: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
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
    longest: int,
) -> None:
    T, (N, P, _), R, C = len(p), pages.shape, row_p.shape[1], fmt.dim
    assert p.shape == z.shape == (T, 2 * C) and p.stride(1) == z.stride(1) == cos.stride(1) == sin.stride(1) == 1
    assert row_p.shape == row_z.shape and row_p.shape[2] == 2 * C and 2 * ratio <= R and bias.shape == (ratio, 2 * C)
    assert all(x.is_contiguous() for x in (pages, entry_index, row_p, row_z, bias, weight))
    if not T:
        return
    rows, columns = triton.next_power_of_2(2 * ratio), triton.next_power_of_2(C)
    save, overlap = longest <= R + 1 - 2 * ratio, can_overlap(p, None)
    flush_csa_kernel[(T,)](
        pages, entry_index, p, z, row_p, row_z, bias, weight, cos, sin,
        index.slots, index.num_computed, index.token_to_req, index.positions, N * P, P, eps,
        p.stride(0), z.stride(0), cos.stride(0), sin.stride(0),
        R=R, M=ratio, C=C, BR=rows, BC=columns, ROTATED=2 * cos.shape[1], ROPE=fmt.rope, FORMAT=fmt.code,
        SAVE=save, OVERLAP=overlap, num_warps=max(1, min(8, rows * columns // 1024)), launch_pdl=overlap,
    )  # fmt: skip
    if not save:
        save_rows_kernel[(T,)](
            row_p, row_z, p, z, bias,
            index.slots, index.num_computed, index.query_start_loc, index.token_to_req, index.positions,
            p.stride(0), z.stride(0), R=R, M=ratio, W=2 * C, BW=2 * columns, OVERLAP=overlap,
            num_warps=warps(2 * columns), launch_pdl=overlap,
        )  # fmt: skip


def flush_csa(
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
    longest: int,  # new tokens of a request, at most
) -> None:
    """Store the entries that tokens of this step complete, and then the last R rows of each request in its ring."""
    form = flush_csa_triton if use_triton(p) else flush_csa_ref
    form(pages, fmt, entry_index, p, z, row_p, row_z, bias, weight, eps, cos, sin, index, ratio, longest)
