"""attention_sparse: attention of DeepSeek-V4, over a window of raw rows and compressed entries at once.

    keys of token t:   | rows of positions max(0, t - window + 1) .. t | entries j < (t + 1) // ratio, all or chosen |
    they lie in          a ring                                          pages

A row is key and value at once, for all heads. Both parts share one softmax, whose denominator has one term more, exp of
the head's sink. Values carry the rotation of their own position, so the sum is rotated back by the token's.

The Triton form gives a program one token, a block of heads and a part of the token's keys; a tile of keys is
dequantised once and serves both products. Few tokens: each token's keys are split over as many programs as fill the
GPU, and a second kernel joins them. How many splits there are follows from shapes alone, and which keys each takes from
what the device holds: a captured launch serves any position.

There are two such kernels. attention_sparse_kernel takes any width and dtype; sparse_hopper.py's is for the
released width in bf16 on Hopper GPUs, and three times as fast there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.kernels.attention.tile import LOG2_E, TRITON_DTYPE, TileShape
from hybridkv.kernels.backend import has_gluon, sm_count, triton, use_triton
from hybridkv.kernels.formats.page_format import load_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.overlap import can_overlap
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.gather import flat_entries
from hybridkv.kernels.v4.sparse_kernel import attention_sparse_kernel, join_sparse_kernel

BLOCK_VALUES = 2**23  # of the keys that the reference gathers at once


@dataclass(frozen=True)
class Entries:
    """The compressed part of the keys, in the window's format."""

    pages: Tensor  # [N, P, width]
    table: Tensor  # [slots, pages a request] int32 page of each P entries; -1: none
    ratio: int  # tokens of an entry: token t sees entries j < (t + 1) // ratio
    # [T, K] int32 entries of each token, of which those it does not see are skipped; None: all that it sees
    chosen: Tensor | None = None


def window_flat(rows: Tensor, R: int, window: int, index: StepIndex) -> Tensor:
    """Flat numbers [T, window] of the rows each token sees, newest first; -1: none."""
    page = rows[index.token_to_req].unsqueeze(1)
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
    """x [T, H, D]: pairs (2i, 2i + 1) of the last channels, rotated back by the angles [T, r/2] of their token."""
    kept = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., kept::2], x[..., kept + 1 :: 2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    return torch.cat((x[..., :kept], rotated), -1)


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
        real = (index.token_slots[part] >= 0) & (rows[index.token_to_req[part]] >= 0)
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


HOPPER_SHAPE = TileShape(64, 64, 4, 2)  # sparse_hopper.py's kernel; it adds warps of its own
FEW = 0.7  # share of the multiprocessors: with more of them busy, an early join crowds onto the first that is free
MAX_SPLITS = 44  # with more, the join costs what shorter parts save


def suits_hopper(q: Tensor, fmt: PageFormat, *pages: Tensor) -> bool:
    """Whether sparse_hopper.py's kernel computes this. Its copies take 16 bytes at a time."""
    if not has_gluon(q.device) or any(x.data_ptr() % 16 for x in pages):
        return False
    return (fmt.dim, fmt.rope) == (512, 64) and q.dtype == torch.bfloat16 and fmt.dtype != torch.float32


def hopper_heads(T: int, H: int, tiles: int, max_programs: float) -> int:
    """Heads of a program: fewer, so that each writes less, as long as every tile of keys can have its own program."""
    for heads in (16, 32):
        if T * triton.cdiv(H, heads) * tiles <= max_programs:
            return heads
    return HOPPER_SHAPE.rows


def sparse_shape(H: int, D: int, dot: torch.dtype) -> TileShape:
    """At the released width 64 heads share a tile of 64 keys, and 8 warps hold their sums in all their registers."""
    if dot == torch.float32:
        return TileShape(16, 16, 8 if D > 64 else 4, 1)
    if D > 128:
        return TileShape(64, 64, 8, 1)
    return TileShape(min(max(16, triton.next_power_of_2(H)), 64), 32, 4, 1)  # the tensor cores take 16 rows or more


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
    shape: TileShape | None = None,  # of attention_sparse_kernel; None: the best there is
    splits: int | None = None,
) -> Tensor:
    T, H, D = q.shape
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    # every E4M3 value times its power of two is a bf16 number
    dot = torch.float32 if fmt.dtype == torch.float32 else q.dtype
    held = ring if entries is None else entries.pages
    hopper = shape is None and suits_hopper(q, fmt, ring, held)
    shape = HOPPER_SHAPE if hopper else shape or sparse_shape(H, D, dot)
    chosen = None if entries is None else entries.chosen
    table = None if entries is None else entries.table
    K = 0 if chosen is None else chosen.shape[1]
    N = 0 if table is None else table.shape[1]
    longest = triton.cdiv(window, shape.keys) + triton.cdiv(N * held.shape[1] if chosen is None else K, shape.keys)
    few = FEW * sm_count(q.device)
    heads = hopper_heads(T, H, min(longest, MAX_SPLITS), few) if hopper else shape.rows
    blocks = triton.cdiv(H, heads)
    if splits is None:
        splits = max(1, min(sm_count(q.device) // (T * blocks), longest, MAX_SPLITS))
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
        owner=index.token_to_req,
        sink=sink,
        cos=cos,
        sin=sin,
        out=out,
        part=part,
        lse=lse,
        H=H,
        splits=splits,
    )
    width = dict(D=D, BD=max(16, triton.next_power_of_2(D)), ROPE=fmt.rope)
    each = dict(
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
        VALUE=fmt.width if fmt.plain else fmt.value_bytes,
        SCALE=fmt.scale_bytes,
        ENTRIES=entries is not None,
        CHOSEN=chosen is not None,
        SPLIT=splits > 1,
        num_warps=shape.warps,
    )
    programs = T * blocks
    early = hopper and can_overlap(q)
    join_early = hopper and splits > 1 and programs * splits <= few
    if hopper:
        from hybridkv.kernels.v4.sparse_hopper import attention_hopper_kernel

        attention_hopper_kernel[programs, splits](
            HEADS=heads,
            QUANTISED=not fmt.plain,
            E8M0=fmt.codec.scale_bytes == 1,
            OVERLAP=join_early,
            EARLY=early,
            launch_pdl=early,
            **each,
            **whole,
        )
    else:
        attention_sparse_kernel[programs, splits](
            FORMAT=fmt.code,
            BH=shape.rows,
            BN=shape.keys,
            DOT=TRITON_DTYPE[dot],
            num_stages=shape.stages,
            **each,
            **whole,
            **width,
        )
    if splits > 1:
        join_sparse_kernel[(T * H,)](
            BS=min(16, triton.next_power_of_2(splits)),
            OVERLAP=join_early,
            EARLY=early,
            num_warps=4,
            launch_pdl=join_early,
            **whole,
            **width,
        )
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
