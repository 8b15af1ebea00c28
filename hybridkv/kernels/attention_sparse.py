"""attention_sparse: attention of DeepSeek-V4, over a window of raw rows and compressed entries at once.

    keys of token t   | rows of positions max(0, t - window + 1) .. t, in a ring | entries j < (t + 1) // ratio, in pages |
                                                                                  all of them, or those that are chosen

A row is key and value at once, for all heads. Both parts share one softmax, whose denominator has one term more, exp of
the head's sink. Values carry the rotation of their own position, so the sum is rotated back by the token's.

The Triton form gives a program one token, a block of heads and a part of the token's keys, in tiles of one kind each:
a tile is dequantised once and serves both products. Few tokens: each token's tiles are split over programs, as many as
fill the GPU, and a second kernel joins them. How many splits there are follows from shapes alone, and which tiles each
takes from what the device holds, so a captured launch serves any position. The last step (sink, division, rotation) is
the same in both forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hybridkv.kernels.attention_tile import LOG2_E, TRITON_DTYPE, TileShape
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.gather import flat_entries
from hybridkv.kernels.page_format import PageFormat, load_entries_ref, load_tile
from hybridkv.kernels.step_index import StepIndex

BLOCK_VALUES = 2**23  # of the keys that the reference gathers at once
_LOG2_E = tl.constexpr(LOG2_E)


@dataclass(frozen=True)
class Entries:
    """The compressed part of the keys, in the window's format."""

    pages: Tensor  # [N, P, width]
    table: Tensor  # [slots, N] int32 page of each P entries of a request; -1: none
    ratio: int  # tokens of an entry: token t sees entries j < (t + 1) // ratio
    chosen: Tensor | None = None  # [T, K] int32 entries of each token, what is not visible is skipped; None: all visible


def window_flat(rows: Tensor, R: int, window: int, index: StepIndex) -> Tensor:
    """Flat numbers [T, window] of the rows each token sees, newest first; -1: none."""
    page = rows[index.owner].unsqueeze(1)
    positions = index.positions.unsqueeze(1) - torch.arange(window, device=rows.device)
    return torch.where((page >= 0) & (positions >= 0), page * R + positions % R, -1)


def entries_flat(entries: Entries, index: StepIndex, part: slice) -> Tensor:
    """Flat numbers [tokens, K] of the entries that the tokens of a part see; -1: none."""
    held = entries.table.shape[1] * entries.pages.shape[1]
    visible = ((index.positions[part] + 1) // entries.ratio).clamp(max=held).unsqueeze(1)
    if entries.chosen is None:
        numbers = torch.arange(int(visible.max()), device=visible.device).expand(len(visible), -1)
    else:
        numbers = entries.chosen[part].long()
    numbers = torch.where(numbers < visible, numbers, -1)
    slots = index.token_slots[part].unsqueeze(1).expand_as(numbers)
    return flat_entries(entries.table, slots, numbers, entries.pages.shape[1])


def derotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]: pairs (2i, 2i + 1) of the last channels, turned back by the angles [T, r/2] of their token."""
    kept = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., kept::2], x[..., kept + 1 :: 2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    return torch.cat((x[..., :kept], turned), -1)


def attention_sparse_ref(
    q: Tensor,
    ring: Tensor,
    fmt: PageFormat,
    rows: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    index: StepIndex,
    entries: Entries | None,
) -> Tensor:
    T, H, D = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    seen = window_flat(rows, ring.shape[1], window, index)
    width = window
    if entries is not None:
        last = entries.table.shape[1] * entries.pages.shape[1]
        width += last if entries.chosen is None else entries.chosen.shape[1]
    block = max(1, BLOCK_VALUES // (width * D))
    for part in (slice(begin, begin + block) for begin in range(0, T, block)):
        real = (index.token_slots[part] >= 0) & (rows[index.owner[part]] >= 0)
        flat = seen[part]
        keys = load_entries_ref(ring, fmt, flat)
        if entries is not None:
            more = entries_flat(entries, index, part)
            keys = torch.cat((keys, load_entries_ref(entries.pages, fmt, more)), 1)
            flat = torch.cat((flat, more), 1)
        scores = q[part].float() @ keys.transpose(1, 2) * scale  # [tokens, H, keys]
        scores = scores.masked_fill((flat < 0).unsqueeze(1), -torch.inf)
        with_sink = torch.cat((scores, sink.float().expand(len(scores), H).unsqueeze(2)), 2)
        o = derotate(with_sink.softmax(2)[..., :-1] @ keys, cos[part], sin[part])
        out[part] = torch.where(real[:, None, None], o, 0).to(q.dtype)
    return out


@triton.jit
def tile_numbers(
    i_tile,
    tiles_w,  # tiles of the window
    count_w,  # rows of the window
    count_e,  # entries to look at: columns of chosen, or what is visible
    visible,
    position,
    i_ring,  # ring page
    p_table,  # the request's row of the table
    p_chosen,  # the token's row
    R: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Flat numbers [BN] of a tile's keys, and which of them there are."""
    o_n = tl.arange(0, BN)
    o_w = i_tile * BN + o_n
    m_k = o_w < count_w  # false in every tile of entries
    o_k = i_ring * R + tl.where(m_k, position - o_w, 0) % R
    if ENTRIES:
        o_e = (i_tile - tiles_w) * BN + o_n
        m_e = (o_e >= 0) & (o_e < count_e)
        b_e = tl.load(p_chosen + o_e, mask=m_e, other=-1) if CHOSEN else o_e
        m_e = m_e & (b_e >= 0) & (b_e < visible)
        b_page = tl.load(p_table + b_e // P, mask=m_e, other=-1).to(tl.int64)
        m_e = m_e & (b_page >= 0)
        o_k = tl.where(m_e, b_page * P + b_e % P, o_k)
        m_k = m_k | m_e
    return o_k, m_k


@triton.jit
def derotate_tile(b_o, p_cos, p_sin, D: tl.constexpr, ROPE: tl.constexpr):
    """b_o [rows, BD] f32, turned back by the angles of one token."""
    PAIRS: tl.constexpr = b_o.shape[1] // 2
    o_p = tl.arange(0, PAIRS) - (D - ROPE) // 2
    m_p = (o_p >= 0) & (o_p < ROPE // 2)
    b_cos = tl.load(p_cos + o_p, mask=m_p, other=1.0)
    b_sin = tl.load(p_sin + o_p, mask=m_p, other=0.0)
    b_even, b_odd = tl.split(tl.reshape(b_o, [b_o.shape[0], PAIRS, 2]))
    return tl.reshape(tl.join(b_even * b_cos + b_odd * b_sin, b_odd * b_cos - b_even * b_sin), b_o.shape)


@triton.jit(do_not_specialize=["H", "K", "N", "splits"])
def attention_sparse_kernel(
    q,  # [T, H, D]
    ring,  # [S, R, width]
    pages,  # [N, P, width]
    table,  # [slots, N]
    chosen,  # [T, K]
    rows,  # [B]
    slots,  # [B]
    owner,  # [T]
    positions,  # [T]
    sink,  # [H]
    cos,  # [T, ROPE / 2]
    sin,
    out,  # [T, H, D] where there is one split
    part,  # [T, H, splits, D] f32, else
    lse,  # [T, H, splits] f32, in powers of two
    scale,  # times log2(e)
    stride_q_t,
    stride_q_h,
    stride_table,
    stride_chosen,
    H,
    K,
    N,
    splits,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROPE: tl.constexpr,
    FORMAT: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHOSEN: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
):
    blocks = tl.cdiv(H, BH)
    i_t = (tl.program_id(0) // blocks).to(tl.int64)
    i_s = tl.program_id(1)
    o_h = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    o_d = tl.arange(0, BD)
    m_o = (o_h < H)[:, None] & (o_d < D)[None, :]
    i_b = tl.load(owner + i_t)
    i_slot, i_ring = tl.load(slots + i_b), tl.load(rows + i_b)
    p_out = out + (i_t * H + o_h)[:, None] * D + o_d[None, :]
    if (i_slot < 0) | (i_ring < 0):
        if not SPLIT:
            tl.store(p_out, tl.zeros([BH, BD], out.dtype.element_ty), mask=m_o)
        return
    position = tl.load(positions + i_t).to(tl.int32)
    count_w = tl.minimum(position + 1, WINDOW)
    tiles_w = tl.cdiv(count_w, BN)
    visible, count_e = 0, 0
    if ENTRIES:
        visible = tl.minimum((position + 1) // RATIO, N * P)
        count_e = K if CHOSEN else visible
    tiles = tiles_w + tl.cdiv(count_e, BN)
    each = tl.cdiv(tiles, splits)
    begin = i_s * each
    end = tl.minimum(begin + each, tiles)
    if SPLIT:
        if begin >= end:
            tl.store(lse + (i_t * H + o_h) * splits + i_s, tl.full([BH], float("-inf"), tl.float32), mask=o_h < H)
            return
    p_table = table + i_slot * stride_table if ENTRIES else table
    p_chosen = chosen + i_t * stride_chosen if CHOSEN else chosen

    b_q = tl.load(q + i_t * stride_q_t + o_h[:, None] * stride_q_h + o_d[None, :], mask=m_o, other=0).to(DOT)
    b_m = tl.full([BH], float("-inf"), tl.float32)
    b_z = tl.zeros([BH], tl.float32)
    b_o = tl.zeros([BH, BD], tl.float32)
    o_k, m_k = tile_numbers(
        begin, tiles_w, count_w, count_e, visible, position, i_ring, p_table, p_chosen, R, P, BN, ENTRIES, CHOSEN
    )
    for i_tile in tl.range(begin, end):
        if ENTRIES:
            if i_tile < tiles_w:
                b_k = load_tile(ring, o_k, m_k, o_d, R, D, ROPE, FORMAT).to(DOT)
            else:
                b_k = load_tile(pages, o_k, m_k, o_d, P, D, ROPE, FORMAT).to(DOT)
        else:
            b_k = load_tile(ring, o_k, m_k, o_d, R, D, ROPE, FORMAT).to(DOT)
        # the next tile's numbers come while this one is worked on
        o_next, m_next = tile_numbers(
            i_tile + 1, tiles_w, count_w, count_e, visible, position, i_ring, p_table, p_chosen,
            R, P, BN, ENTRIES, CHOSEN,
        )  # fmt: skip
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [BH, BN]
        b_s = tl.where(m_k[None, :], b_s, float("-inf"))
        b_top = tl.maximum(b_m, tl.max(b_s, 1))
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)  # nothing seen yet: weights 0, not NaN
        b_p = tl.exp2(b_s - b_base[:, None])
        b_keep = tl.exp2(b_m - b_base)
        b_z = b_z * b_keep + tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(DOT), b_k, b_o * b_keep[:, None], input_precision="ieee")
        b_m, o_k, m_k = b_top, o_next, m_next

    if SPLIT:
        o_part = (i_t * H + o_h) * splits + i_s
        b_z = tl.where(b_z == 0, 1.0, b_z)  # no key in these tiles: zeros, of weight 2^-inf
        tl.store(part + o_part[:, None] * D + o_d[None, :], b_o / b_z[:, None], mask=m_o)
        tl.store(lse + o_part, b_m + tl.log2(b_z), mask=o_h < H)
    else:
        b_sink = tl.load(sink + o_h, mask=o_h < H, other=0.0).to(tl.float32) * _LOG2_E
        b_top = tl.maximum(b_m, b_sink)
        b_keep = tl.exp2(b_m - b_top)
        b_o = b_o * (b_keep / (b_z * b_keep + tl.exp2(b_sink - b_top)))[:, None]
        b_o = derotate_tile(b_o, cos + i_t * (ROPE // 2), sin + i_t * (ROPE // 2), D, ROPE)
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=m_o)


@triton.jit(do_not_specialize=["H", "splits"])
def join_sparse_kernel(
    part,  # [T, H, splits, D] f32
    lse,  # [T, H, splits] f32
    rows,  # [B]
    slots,  # [B]
    owner,  # [T]
    sink,  # [H]
    cos,  # [T, ROPE / 2]
    sin,
    out,  # [T, H, D]
    H,
    splits,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROPE: tl.constexpr,
    BS: tl.constexpr,  # splits read at once
):
    i_row = tl.program_id(0).to(tl.int64)
    i_t, i_h = i_row // H, i_row % H
    o_d = tl.arange(0, BD)
    p_out = out + i_row * D + o_d[None, :]
    i_b = tl.load(owner + i_t)
    if (tl.load(slots + i_b) < 0) | (tl.load(rows + i_b) < 0):
        tl.store(p_out, tl.zeros([1, BD], out.dtype.element_ty), mask=(o_d < D)[None, :])
        return
    b_m = tl.load(sink + i_h).to(tl.float32) * _LOG2_E
    b_z = tl.full([], 1.0, tl.float32)  # the sink, which has no value
    b_o = tl.zeros([BD], tl.float32)
    for i_s in tl.range(0, splits, BS):
        o_s = i_row * splits + i_s + tl.arange(0, BS)
        b_lse = tl.load(lse + o_s, mask=i_s + tl.arange(0, BS) < splits, other=float("-inf"))
        b_top = tl.maximum(b_m, tl.max(b_lse, 0))
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)  # a sink of -inf, and no split yet
        b_keep = tl.exp2(b_m - b_base)
        b_w = tl.exp2(b_lse - b_base)
        m_s = (b_lse != float("-inf"))[:, None] & (o_d < D)[None, :]
        b_part = tl.load(part + o_s[:, None] * D + o_d[None, :], mask=m_s, other=0.0)
        b_z = b_z * b_keep + tl.sum(b_w, 0)
        b_o = b_o * b_keep + tl.sum(b_w[:, None] * b_part, 0)
        b_m = b_top
    b_o = derotate_tile((b_o / b_z)[None, :], cos + i_t * (ROPE // 2), sin + i_t * (ROPE // 2), D, ROPE)
    tl.store(p_out, b_o.to(out.dtype.element_ty), mask=(o_d < D)[None, :])


@cache
def processors(device: torch.device) -> int:
    """How many programs of the kernel run at once; the interpreter runs one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def sparse_shape(H: int, D: int, dot: torch.dtype) -> TileShape:
    heads = min(max(16, triton.next_power_of_2(H)), 64)  # the tensor cores take 16 rows or more
    if dot == torch.float32:
        return TileShape(16, 32 if D <= 256 else 16, 8 if D > 64 else 4, 1)
    return TileShape(heads, 64 if heads == 64 else 32, 8 if heads > 16 else 4, 1)


def attention_sparse_triton(
    q: Tensor,
    ring: Tensor,
    fmt: PageFormat,
    rows: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    index: StepIndex,
    entries: Entries | None,
    shape: TileShape | None = None,
    splits: int | None = None,
) -> Tensor:
    T, H, D = q.shape
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    # every E4M3 value times its power of two is a bf16 number
    dot = torch.float32 if fmt.dtype == torch.float32 else q.dtype
    shape = shape or sparse_shape(H, D, dot)
    blocks = triton.cdiv(H, shape.rows)
    held = ring if entries is None else entries.pages
    chosen = None if entries is None else entries.chosen
    table = None if entries is None else entries.table
    K = 0 if chosen is None else chosen.shape[1]
    N = 0 if table is None else table.shape[1]
    longest = triton.cdiv(window, shape.keys) + triton.cdiv(N * held.shape[1] if chosen is None else K, shape.keys)
    if splits is None:
        splits = max(1, min(processors(q.device) // (T * blocks), longest))
    assert q.stride(2) == 1 and ring.is_contiguous() and held.is_contiguous() and held.dtype == ring.dtype == fmt.dtype
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape == (T, fmt.rope // 2)
    assert (table is None or table.stride(1) == 1) and (chosen is None or chosen.stride(1) == 1)
    part = lse = None
    if splits > 1:
        part = torch.empty((T, H, splits, D), dtype=torch.float32, device=q.device)
        lse = torch.empty((T, H, splits), dtype=torch.float32, device=q.device)
    whole = dict(
        rows=rows,
        slots=index.slots,
        owner=index.owner,
        sink=sink,
        cos=cos,
        sin=sin,
        out=out,
        part=part,
        lse=lse,
        H=H,
        splits=splits,
        D=D,
        BD=max(16, triton.next_power_of_2(D)),
        ROPE=fmt.rope,
    )
    attention_sparse_kernel[T * blocks, splits](
        q=q,
        ring=ring,
        pages=held,
        table=table,
        chosen=chosen,
        positions=index.positions,
        scale=scale * LOG2_E,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_table=0 if table is None else table.stride(0),
        stride_chosen=0 if chosen is None else chosen.stride(0),
        K=K,
        N=N,
        WINDOW=window,
        RATIO=1 if entries is None else entries.ratio,
        R=ring.shape[1],
        P=held.shape[1],
        FORMAT=fmt.code,
        BH=shape.rows,
        BN=shape.keys,
        ENTRIES=entries is not None,
        CHOSEN=chosen is not None,
        SPLIT=splits > 1,
        DOT=TRITON_DTYPE[dot],
        num_warps=shape.warps,
        num_stages=shape.stages,
        **whole,
    )
    if splits > 1:
        join_sparse_kernel[(T * H,)](BS=min(16, triton.next_power_of_2(splits)), num_warps=4, **whole)
    return out


def attention_sparse(
    q: Tensor,  # [T, H, D] rotated
    ring: Tensor,  # [S, R, width]: the row of position u at u % R
    fmt: PageFormat,
    rows: Tensor,  # [B] int64 ring page of each request; -1: none
    window: int,  # rows seen, the token's own included; R or fewer
    sink: Tensor,  # [H] f32
    scale: float,
    cos: Tensor,  # [T, r/2] f32, at the tokens' positions
    sin: Tensor,
    index: StepIndex,
    entries: Entries | None,
) -> Tensor:
    """[T, H, D] in q's dtype; zeros for rows of padding."""
    form = attention_sparse_triton if use_triton(q) else attention_sparse_ref
    return form(q, ring, fmt, rows, window, sink, scale, cos, sin, index, entries)
