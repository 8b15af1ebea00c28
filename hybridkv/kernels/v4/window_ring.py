"""append_window: this step's window rows, normed, rotated and stored. copy_window: rows of one ring into another.

A ring is pages: one page of R rows for each slot, the row of position u at u % R. Where a row lies follows from its
position alone, so storing it again changes nothing, and no counter needs to be kept.

    row = Rot(x / sqrt(mean(x^2) + eps) * weight, position)      pairs (2i, 2i+1) of the last channels, all in f32
    stored by the ring's format, which rounds

One launch stores every token of the step that stays: of a request with more than R new tokens only the last R, so that
no row is written twice. A row of padding (slot -1) is not stored, whatever it holds. A few FP8 rows have a kernel of
their own, in which no warp waits for another.

A chunk whose first queries still need what its last tokens would overwrite is put in a longer ring of its own: `rows`
names it for each request, and `copy_window` brings the past that the chunk sees, byte for byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.page_format import FP8, SMALLEST_FP8, scale_at, store_entries_ref, store_rows, value_at
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.formats.small_floats import (
    ceil_exponent_tile,
    e4m3_code_tile,
    largest_finite_tile,
    power_of_two_tile,
)
from hybridkv.kernels.overlap import can_overlap, wait_for_inputs
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.norm_rope import load_angles, norm_rope_ref, rotate_pairs

BLOCK_VALUES = 1024  # of a tile of new rows, at most: one warp holds them, and its sums need no barrier
FEW_TOKENS = 512  # up to this many, one program for each token; the GPU would not run more programs at once
BLOCK_COPIED = 8  # rows a program copies
_SMALLEST_FP8 = tl.constexpr(SMALLEST_FP8)


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
    page = (index.slots if rows is None else rows)[index.token_to_req]
    token = torch.arange(x.shape[0], device=x.device)
    stored = (page >= 0) & (page < S) & (token >= index.query_start_loc[index.token_to_req + 1] - R)
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
    b_cos, b_sin, m_r = load_angles(p_cos, p_sin, m_t[:, None], D, ROPE // 2, BD // 2)
    o_page = tl.load(rows + b_owner, mask=m_t, other=-1)
    b_end = tl.load(starts + b_owner + 1, mask=m_t, other=0)
    m_e = (o_page >= 0) & (o_page < S) & (o_t >= b_end - R)
    b_norm = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(b_x * b_x, 1), D + 0.0) + eps))
    b_x = rotate_pairs(b_x * b_norm[:, None] * b_weight, b_cos, b_sin, m_r)
    store_rows(ring, o_page, o_row, m_e, o_d, b_x, R, D, ROPE, FORMAT)


@triton.jit(do_not_specialize=["S"])
def append_fp8_kernel(
    ring, x, weight, cos, sin, owner, positions, starts, rows, S, eps, stride_xt, stride_ct, stride_st,
    R: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token. A thread has four channels, 16 threads a group of 64, a warp 128. Each warp adds up all channels."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    WARPS: tl.constexpr = D // 128
    KEPT: tl.constexpr = D - ROPE
    o_l = tl.arange(0, 32)[:, None] + tl.arange(0, WARPS) * 32  # lanes first, as the compiler lays them out
    o_d = o_l[:, :, None] * 4 + tl.arange(0, 4)  # [32, WARPS, 4]
    b_weight = tl.load(weight + o_d)
    i_t = tl.program_id(0).to(tl.int64)
    i_b, i_row = tl.load(owner + i_t), tl.load(positions + i_t).to(tl.int32) % R
    i_page, end = tl.load(rows + i_b), tl.load(starts + i_b + 1)
    stored = (i_page >= 0) & (i_page < S) & (i_t >= end - R)
    p_value = ring + value_at(i_page, i_row, R, VALUE, SCALE)
    p_scale = ring + scale_at(i_page, i_row, R, VALUE, SCALE)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # the index, like the weights, was there before the step
    x += i_t * stride_xt
    b_x = tl.load(x + o_d).to(tl.float32)
    o_r = o_l[:, :, None] * 2 + tl.arange(0, 2) - KEPT // 2  # pairs that are rotated
    b_cos = tl.load(cos + i_t * stride_ct + o_r, mask=o_r >= 0, other=1.0)
    b_sin = tl.load(sin + i_t * stride_st + o_r, mask=o_r >= 0, other=0.0)
    b_sum = tl.zeros([32, WARPS, 8], tl.float32)
    for i in tl.static_range(D // 256):
        o_all = i * 256 + (tl.arange(0, 32)[:, None] * 8 + tl.zeros([1, WARPS], tl.int32))[:, :, None] + tl.arange(0, 8)
        b_all = tl.load(x + o_all).to(tl.float32)
        b_sum += b_all * b_all
    b_norm = tl.rsqrt(tl.sum(tl.sum(b_sum, 2), 0) / D + eps)[None, :]  # the same in every warp
    b_x *= b_weight
    b_largest = tl.max(tl.reshape(largest_finite_tile(b_x, 2), [2, 16, WARPS]), 1)[:, None, :]
    b_largest = tl.reshape(tl.broadcast_to(b_largest, [2, 16, WARPS]), [32, WARPS])
    b_x *= b_norm[:, :, None]
    b_largest = (b_largest * b_norm).to(tl.bfloat16).to(tl.float32)  # all of a group are rounded alike
    b_largest = tl.where(b_largest > _SMALLEST_FP8, b_largest, _SMALLEST_FP8)  # NaN is not greater
    b_k = ceil_exponent_tile(b_largest, 8, 0x600000)
    b_code = e4m3_code_tile(b_x.to(tl.bfloat16).to(tl.float32) * power_of_two_tile(-b_k)[:, :, None])
    tl.store(p_value + o_d, b_code, mask=(o_d < KEPT) & stored)
    o_g = o_l // 16
    b_scale = tl.where(o_g < KEPT // 64, b_k + 127, 0).to(tl.uint8)  # a row of scales ends in zeros
    tl.store(p_scale + o_g, b_scale, mask=(o_l % 16 == 0) & stored)
    b_a, b_b = tl.split(tl.reshape(b_x, [32, WARPS, 2, 2]))
    b_rotated = tl.join(b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin)
    p_rotated = p_value.to(tl.pointer_type(tl.bfloat16)) + (o_d - KEPT // 2)
    tl.store(p_rotated, tl.reshape(b_rotated, o_d.shape).to(tl.bfloat16), mask=(o_d >= KEPT) & stored)


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
    where = index.token_to_req, index.positions, index.query_start_loc, index.slots if rows is None else rows
    strides = x.stride(0), cos.stride(0), sin.stride(0)
    if tokens == 1 and fmt.code == FP8.value and D == columns == 64 * fmt.scale_bytes and (D - fmt.rope) % 64 == 0:
        overlap = overlap and rows is None  # the index was there before the step; the kernel before may write rows
        append_fp8_kernel[(T,)](
            ring, x, weight, cos, sin, *where, S, eps, *strides, R=R, D=D, ROPE=fmt.rope, VALUE=fmt.value_bytes,
            SCALE=fmt.scale_bytes, OVERLAP=overlap, num_warps=D // 128, launch_pdl=overlap,
        )  # fmt: skip
        return
    append_window_kernel[(triton.cdiv(T, tokens),)](
        ring, x, weight, cos, sin, *where, T, S, R, eps, *strides,
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
    position = index.num_computed[:, None] - count + torch.arange(count, device=source.device)  # [B, count]
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
            from_words, to_words, index.slots, rows, index.num_computed, S, S_to, R, R_to, count,
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
