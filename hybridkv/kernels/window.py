"""append_window: this step's window rows, normed, rotated and stored. copy_window: rows of one ring into another.

A ring is pages: one page of R rows for each slot, the row of position u at u % R. Where a row lies follows from its
position alone, so storing it again changes nothing, and no counter needs to be kept.

    row = Rot(x / sqrt(mean(x^2) + eps) * weight, position)      pairs (2i, 2i+1) of the last channels, all in f32
    stored by the ring's format, which rounds

One launch stores every token of the step that stays: of a request with more than R new tokens only the last R, so that
no row is written twice. A row of padding (slot -1) is not stored, whatever it holds.

A chunk whose first queries still need what its last tokens would overwrite is put in a longer ring of its own: `rows`
names it for each request, and `copy_window` brings the past that the chunk sees, byte for byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.norm_rope import load_turns, norm_rope_ref, turn_pairs
from hybridkv.kernels.overlap import can_overlap, wait_for_inputs
from hybridkv.kernels.page_format import store_entries_ref, store_rows
from hybridkv.kernels.page_layout import PageFormat
from hybridkv.kernels.step_index import StepIndex

BLOCK_VALUES = 1024  # of a tile of new rows at most: what one warp holds, whose sums need no barrier
FEW_TOKENS = 512  # up to here a program for each token: more of them than the GPU runs at once are not to be had
BLOCK_COPIED = 8  # rows a program copies


def append_window_ref(
    ring: Tensor,
    fmt: PageFormat,
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    index: StepIndex,
    rows: Tensor | None = None,
) -> None:
    S, R, _ = ring.shape
    y = norm_rope_ref(x[:, None], torch.float32, eps, weight, (cos, sin))[:, 0]
    page = (index.slots if rows is None else rows)[index.owner]
    token = torch.arange(x.shape[0], device=x.device)
    stored = (page >= 0) & (page < S) & (token >= index.starts[index.owner + 1] - R)
    flat = torch.where(stored, page * R + index.positions % R, -1)
    store_entries_ref(ring, fmt, flat, y)


@triton.jit(do_not_specialize=["T", "S"])
def append_window_kernel(
    ring, x, weight, cos, sin, owner, positions, starts, rows, T, S, R, eps, stride_xt, stride_ct, stride_st,
    D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_t = o_t < T
    b_weight = tl.load(weight + o_d, mask=o_d < D, other=0.0)
    wait_for_inputs(OVERLAP)
    # all loads before the first sum, whose barriers they would wait for
    b_owner = tl.load(owner + o_t, mask=m_t, other=0)
    o_row = tl.load(positions + o_t, mask=m_t, other=0).to(tl.int32) % R  # 32 bits: a 64-bit remainder is slow
    b_x = tl.load(x + o_t[:, None] * stride_xt + o_d, mask=m_t[:, None] & (o_d < D), other=0.0).to(tl.float32)
    p_cos, p_sin = cos + o_t[:, None] * stride_ct, sin + o_t[:, None] * stride_st
    b_cos, b_sin, m_r = load_turns(p_cos, p_sin, m_t[:, None], D, ROPE // 2, BD // 2)
    o_page = tl.load(rows + b_owner, mask=m_t, other=-1)
    b_end = tl.load(starts + b_owner + 1, mask=m_t, other=0)
    m_e = (o_page >= 0) & (o_page < S) & (o_t >= b_end - R)
    b_norm = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(b_x * b_x, 1), D + 0.0) + eps))
    b_x = turn_pairs(b_x * b_norm[:, None] * b_weight, b_cos, b_sin, m_r)
    store_rows(ring, o_page, o_row, m_e, o_d, b_x, R, D, ROPE, FORMAT)


def append_window_triton(
    ring: Tensor,
    fmt: PageFormat,
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    index: StepIndex,
    rows: Tensor | None = None,
) -> None:
    (S, R, width), (T, D) = ring.shape, x.shape
    assert ring.dtype == fmt.dtype and width == fmt.width and fmt.dim == D and ring.is_contiguous()
    assert x.stride(1) == cos.stride(1) == sin.stride(1) == 1 and weight.is_contiguous()
    assert cos.shape == sin.shape == (T, fmt.rope // 2) and (D - fmt.rope) % 2 == 0
    if not T:
        return
    columns = max(2, triton.next_power_of_2(D))
    tokens = 1 if T <= FEW_TOKENS else max(1, min(8, BLOCK_VALUES // columns))
    overlap = can_overlap(x, None)  # one writes its last rows while the next begins
    append_window_kernel[(triton.cdiv(T, tokens),)](
        ring, x, weight, cos, sin, index.owner, index.positions, index.starts,
        index.slots if rows is None else rows, T, S, R, eps, x.stride(0), cos.stride(0), sin.stride(0),
        D=D, ROPE=fmt.rope, FORMAT=fmt.code, BT=tokens, BD=columns, num_warps=4 if tokens == 1 else 1, OVERLAP=overlap,
        launch_pdl=overlap,
    )  # fmt: skip


def append_window(
    ring: Tensor,  # [S, R, width]
    fmt: PageFormat,
    x: Tensor,  # [T, D], before the norm
    weight: Tensor,  # [D] f32
    eps: float,
    cos: Tensor,  # [T, rope / 2] f32
    sin: Tensor,  # [T, rope / 2] f32
    index: StepIndex,
    rows: Tensor | None = None,  # [B] int64, ring page of each request where it is not its slot; -1: not stored
) -> None:
    form = append_window_triton if use_triton(x) else append_window_ref
    form(ring, fmt, x, weight, eps, cos, sin, index, rows)


def _words(ring: Tensor, fmt: PageFormat) -> tuple[Tensor, int, int]:
    """The ring as whole numbers that hold its bits, and how many a value row and a scale row have."""
    unit = torch.int16 if fmt.dtype == torch.bfloat16 else torch.int32
    return ring.view(-1).view(unit), fmt.value_bytes // unit.itemsize, fmt.scale_bytes // unit.itemsize


def copy_window_ref(
    source: Tensor, target: Tensor, fmt: PageFormat, index: StepIndex, rows: Tensor, count: int
) -> None:
    (S, R), (S_to, R_to) = source.shape[:2], target.shape[:2]
    position = index.begins[:, None] - count + torch.arange(count, device=source.device)  # [B, count]
    page, page_to = index.slots[:, None], rows[:, None]
    moved = (position >= 0) & (page >= 0) & (page < S) & (page_to >= 0) & (page_to < S_to)
    page, page_to = (x.expand_as(moved)[moved] for x in (page, page_to))
    position = position[moved]
    (from_words, value, scale), (to_words, _, _) = _words(source, fmt), _words(target, fmt)
    from_pages, to_pages = from_words.view(S, -1), to_words.view(S_to, -1)
    for begin, begin_to, length in ((0, 0, value), (R * value, R_to * value, scale)):
        o_w = torch.arange(length, device=source.device)
        at = begin + (position % R * length)[:, None] + o_w
        to_pages[page_to[:, None], begin_to + (position % R_to * length)[:, None] + o_w] = from_pages[page[:, None], at]


@triton.jit(do_not_specialize=["S", "S_to", "count"])
def copy_window_kernel(
    source, target, slots, rows, begins, S, S_to, R, R_to, count,
    VALUE: tl.constexpr, SCALE: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0)
    i_page, i_page_to = tl.load(slots + i_b), tl.load(rows + i_b)
    o_t = tl.program_id(1) * BT + tl.arange(0, BT)
    o_p = tl.load(begins + i_b) - count + o_t
    m_p = (o_t < count) & (o_p >= 0) & (i_page >= 0) & (i_page < S) & (i_page_to >= 0) & (i_page_to < S_to)
    source += i_page * R * (VALUE + SCALE)
    target += i_page_to * R_to * (VALUE + SCALE)
    o_from, o_to = (o_p % R)[:, None], (o_p % R_to)[:, None]
    o_v = tl.arange(0, BV)
    m_v = m_p[:, None] & (o_v < VALUE)
    tl.store(target + o_to * VALUE + o_v, tl.load(source + o_from * VALUE + o_v, mask=m_v), mask=m_v)
    if SCALE > 0:
        o_s = tl.arange(0, BS)
        m_s = m_p[:, None] & (o_s < SCALE)
        b_scale = tl.load(source + R * VALUE + o_from * SCALE + o_s, mask=m_s)
        tl.store(target + R_to * VALUE + o_to * SCALE + o_s, b_scale, mask=m_s)


def copy_window_triton(
    source: Tensor, target: Tensor, fmt: PageFormat, index: StepIndex, rows: Tensor, count: int
) -> None:
    B, (S, R), (S_to, R_to) = index.slots.shape[0], source.shape[:2], target.shape[:2]
    (from_words, value, scale), (to_words, _, _) = _words(source, fmt), _words(target, fmt)
    if B and count:
        copy_window_kernel[(B, triton.cdiv(count, BLOCK_COPIED))](
            from_words, to_words, index.slots, rows, index.begins, S, S_to, R, R_to, count,
            VALUE=value, SCALE=scale, BT=BLOCK_COPIED, BV=triton.next_power_of_2(value),
            BS=triton.next_power_of_2(max(1, scale)), num_warps=4,
        )  # fmt: skip


def copy_window(
    source: Tensor,  # [S, R, width]
    target: Tensor,  # [S', R', width], another tensor
    fmt: PageFormat,
    index: StepIndex,
    rows: Tensor,  # [B] int64, target page of each request; -1: nothing is copied
    count: int,  # at most R and R'
) -> None:
    """Rows of positions [max(0, begin - count), begin) of every request from source[slot] to target[rows[b]]."""
    assert count <= min(source.shape[1], target.shape[1]) and source.shape[2] == target.shape[2] == fmt.width
    form = copy_window_triton if use_triton(source) else copy_window_ref
    form(source, target, fmt, index, rows, count)
