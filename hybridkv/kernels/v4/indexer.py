"""index_logits: how much every token wants each compressed entry that it sees.

    logit[t, j] = sum over heads h of weight[t, h] * relu(q[t, h] . key[j]),    j < (position of t + 1) // ratio

Keys come straight from their pages; a format that transforms its keys (mxfp4) does the same to the queries, which are
then rounded as keys are. Products of bf16 queries with what bf16, FP8 and FP4 pages hold are exact on tensor cores,
sums are f32; f32 queries or pages are multiplied in f32. A key's own scale is taken out of the products and given to
its logit. The reference gives -inf for what a token does not see, the kernels leave it as it is. Rows that see `skip`
entries or fewer are left out: there is nothing to choose.

`decode_logits`: one token a program, its queries stay, its keys are dealt out in tiles over the programs of the token.
On Hopper GPUs, where keys are FP8 or MXFP4, it is indexer_hopper.py's.
`prefill_logits`: a tile of keys stays, and the tokens of a group that see it pass by, a few at a time.
`plain_logits`: f32, one token and one tile of keys a program.
Every grid follows from the shapes alone; the ends come from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.backend import has_gluon, sm_count, tl, triton, use_triton
from hybridkv.kernels.formats.page_format import (
    FP8_INDEX,
    MXFP4,
    fake_quantise,
    geometry,
    in_groups,
    load_entries_ref,
    load_rows,
    mxfp4_round_tile,
    scale_at,
    value_at,
)
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.kernels.formats.small_floats import (
    e2m1_pairs_tile,
    e8m0_value_tile,
    largest_finite_tile,
    power_of_two_tile,
)
from hybridkv.kernels.gluon import TensorDescriptor, gl
from hybridkv.kernels.overlap import can_overlap, wait_for_inputs
from hybridkv.kernels.step_index import StepIndex

REF_PRODUCTS = 1 << 22  # of the reference at once
MAX_TILES = 32  # of a decoding program, so that one long request among short ones gets its share of them
HOPPER_MAX_TILES = 64  # the same for indexer_hopper.py
ROUND_ROWS = 4  # one a warp


class IndexerShape(NamedTuple):
    """A launch configuration of `prefill_logits`, or of `decode_logits` (group 0)."""

    keys: int  # of a tile
    tokens: int  # at a time
    group: int  # tokens that share a program
    warps: int
    stages: int


DECODE = IndexerShape(128, 1, 0, 4, 5)
DECODE_BF16 = IndexerShape(128, 1, 0, 4, 3)  # keys of twice the bytes and more: two programs still fit
PREFILL = IndexerShape(256, 1, 64, 8, 3)
SHAPES = (DECODE, DECODE_BF16, PREFILL, IndexerShape(64, 2, 16, 4, 2))
PLAIN_KEYS, PLAIN_DIMS = 64, 16  # of a tile, and at once


def suits_hopper(q: Tensor, keys: Tensor, fmt: PageFormat) -> bool:
    """Whether indexer_hopper.py computes this. It copies 32 keys of a page at a time, and reads two channels of q."""
    if not has_gluon(q.device) or fmt.code not in (FP8_INDEX, MXFP4) or fmt.dim != 128:
        return False
    pages = len(keys) > 0 and keys.shape[1] % 32 == 0 and keys.data_ptr() % 16 == 0
    aligned = q.data_ptr() % 4 == 0 and q.stride(0) % 2 == 0 and q.stride(1) % 2 == 0
    return pages and aligned and q.shape[1] <= 64 and q.dtype == torch.bfloat16


def index_logits_ref(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    fmt: PageFormat,
    table: Tensor,
    index: StepIndex,
    ratio: int,
    width: int,
    skip: int,
) -> Tensor:
    (T, H, _), P = q.shape, keys.shape[1]
    q = fake_quantise(fmt, q.float()) if fmt.hadamard else q.float()
    out = torch.full((T, width), -torch.inf, device=q.device)
    visible = ((index.positions + 1) // ratio).clamp(max=width)
    starts = index.query_start_loc.tolist()
    for slot, start, stop in zip(index.slots.tolist(), starts, starts[1:]):
        n = int(visible[stop - 1]) if stop > start else 0
        if slot < 0 or n <= skip:
            continue
        entries = torch.arange(n, device=q.device)
        pages = table[slot][entries // P].long()
        k = load_entries_ref(keys, fmt, torch.where(pages < 0, -1, pages * P + entries % P)).T  # [D, n]
        step = max(1, REF_PRODUCTS // (H * n))
        for at in range(start, stop, step):
            part = slice(at, min(at + step, stop))
            logits = ((q[part] @ k).relu() * weights[part].float().unsqueeze(-1)).sum(1)  # [step, n]
            out[part, :n] = logits.masked_fill(entries >= visible[part, None], -torch.inf)
    return out


@triton.jit
def round_queries_kernel(
    q, out, rows, stride_t, stride_h, H, D: tl.constexpr, BM: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """q [T, H, D] -> out [T * H, D] bf16: transformed and rounded to MXFP4, which bf16 holds exactly."""
    wait_for_inputs(OVERLAP)
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, D)
    m_q = (o_m < rows)[:, None] & (o_d < D)
    o_q = (o_m // H * stride_t + o_m % H * stride_h)[:, None] + o_d
    b_q = mxfp4_round_tile(tl.load(q + o_q, mask=m_q, other=0.0).to(tl.float32))
    tl.store(out + o_m[:, None] * D + o_d, b_q.to(tl.bfloat16), mask=m_q)


@triton.jit
def find_keys(p_table, begin, n, BN: tl.constexpr, P: tl.constexpr):
    """Entries begin, begin + 1, ... of a request -> their page, row in it, and whether there is one; none from n on."""
    o_n = begin + tl.arange(0, BN)
    b_page = tl.load(p_table + o_n // P, mask=o_n < n, other=-1)
    o_row = (tl.arange(0, BN) if BN % P == 0 else o_n) % P  # begin is a multiple of BN
    return b_page.to(tl.int64), o_row, b_page >= 0


@triton.jit
def load_keys(
    keys, p_table, begin, n,
    BN: tl.constexpr, P: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BN entries of a request from `begin` on -> [BN, BD] and a factor of each [BN] f32, not negative,
    which its logits get: after relu it is the same, and much less to multiply. Zeros from n on."""
    o_page, o_row, m_n = find_keys(p_table, begin, n, BN, P)
    o_d = tl.arange(0, BD)
    if FORMAT == FP8_INDEX:
        o_value = value_at(o_page, o_row, P, D, 4)
        b_code = tl.load(keys + o_value[:, None] + o_d, mask=m_n[:, None] & (o_d < D), other=0)
        b_k = b_code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(DOT)
        o_scale = scale_at(o_page, o_row, P, D // 4, 1)
        b_factor = tl.load(keys.to(tl.pointer_type(tl.float32)) + o_scale, mask=m_n, other=0.0)
    elif FORMAT == MXFP4:
        SCALE: tl.constexpr = geometry(FORMAT, D, 0)[1]
        o_b = tl.arange(0, BD // 2)
        o_value = value_at(o_page, o_row, P, D // 2, SCALE)
        b_x = e2m1_pairs_tile(tl.load(keys + o_value[:, None] + o_b, mask=m_n[:, None] & (o_b < D // 2), other=0))
        b_groups = in_groups(b_x, 32)
        o_g = tl.arange(0, b_groups.shape[1])
        o_scale = scale_at(o_page, o_row, P, D // 2, SCALE)
        b_scale = tl.load(keys + o_scale[:, None] + o_g, mask=m_n[:, None] & (o_g < SCALE), other=0).to(tl.int32)
        b_most = tl.max(b_scale, 1)  # of a key: its factor
        b_part = tl.maximum(b_scale - b_most[:, None] + 253, 0) << 23  # 2^126 and less, as bits of f32
        b_part = b_part.to(tl.float32, bitcast=True).to(tl.bfloat16)
        b_k = tl.reshape(b_groups * b_part[:, :, None], b_x.shape)
        b_factor = e8m0_value_tile(b_most)
    else:
        b_k = load_rows(keys, o_page, o_row, m_n, o_d, P, D, 0, FORMAT).to(DOT)
        b_factor = tl.full([BN], 1.0, tl.float32)
    return b_k, b_factor


@triton.jit
def queries_in_f16(b_q, b_w):
    """Queries [BH, BD] bf16 -> f16, each head times a power of two that its weight gives back.

    The largest is near 2^15, so nothing of a head is lost but what is 2^-39 of it: far less than f32 sums lose.
    """
    b_q = b_q.to(tl.float32)
    b_k = 142 - (largest_finite_tile(b_q, 1).to(tl.int32, bitcast=True) >> 23)
    b_k = tl.minimum(tl.maximum(b_k, -126), 126)
    return (b_q * power_of_two_tile(b_k)[:, None]).to(tl.float16), b_w * power_of_two_tile(-b_k)


@triton.jit
def load_queries(
    q, i_t, stop, o_d, stride_t, stride_h,
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Queries [BT * BH, BD] of the tokens from i_t on; zeros from `stop` on."""
    o_m = tl.arange(0, BT * BH)
    o_t, o_h = (i_t + o_m // BH).to(tl.int64), o_m % BH
    m_q = ((o_t < stop) & (o_h < H))[:, None] & (o_d < D)
    return tl.load(q + (o_t * stride_t + o_h * stride_h)[:, None] + o_d, mask=m_q, other=0.0)


@triton.jit
def load_weights(weights, i_t, stop, stride_w, H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr):
    """[BT * BH] of the tokens from i_t on."""
    o_m = tl.arange(0, BT * BH)
    o_t, o_h = (i_t + o_m // BH).to(tl.int64), o_m % BH
    return tl.load(weights + o_t * stride_w + o_h, mask=(o_t < stop) & (o_h < H), other=0.0)


@triton.jit
def weigh(b_s, b_w, b_factor, BT: tl.constexpr, BH: tl.constexpr):
    """Products [BN, BT * BH] -> logits [BN, BT]. The heads lie along a thread, so their sum is local."""
    b_s = tl.maximum(b_s, 0.0, propagate_nan=tl.PropagateNan.ALL) * b_w[None, :]
    b_logit = tl.sum(tl.reshape(b_s, [b_s.shape[0], BT, BH]), 2)
    return b_logit * b_factor[:, None]


@triton.jit
def token_ends(slots, owner, positions, i_t, width, skip, RATIO: tl.constexpr):
    """A token's slot, and how many entries it sees; 0 where nothing is to be done."""
    slot = tl.load(slots + tl.load(owner + i_t))
    n = tl.minimum((tl.load(positions + i_t) + 1) // RATIO, width).to(tl.int32)
    return slot, tl.where((slot < 0) | (n <= skip), 0, n)


@triton.jit(do_not_specialize=["width", "skip", "stride_table"])
def decode_logits_kernel(
    q, weights, keys, table, slots, owner, positions, out, width, skip, stride_qt, stride_qh, stride_w, stride_table,
    RATIO: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, FORMAT: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i_t, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, n = token_ends(slots, owner, positions, i_t, width, skip, RATIO)
    if i_s * BN >= n:
        return
    o_d = tl.arange(0, BD)
    b_q = load_queries(q, i_t, i_t + 1, o_d, stride_qt, stride_qh, H, D, 1, BH)
    b_w = load_weights(weights, i_t, i_t + 1, stride_w, H, 1, BH)
    # one instruction converts E4M3 to f16
    DOT: tl.constexpr = tl.float16 if FORMAT == FP8_INDEX else tl.bfloat16
    if FORMAT == FP8_INDEX:
        b_q, b_w = queries_in_f16(b_q, b_w)
    for begin in tl.range(i_s * BN, n, tl.num_programs(1) * BN):
        o_n = begin + tl.arange(0, BN)
        b_k, b_factor = load_keys(keys, table + slot * stride_table, begin, n, BN, P, D, FORMAT, BD, DOT)
        b_logit = weigh(tl.dot(b_k, tl.trans(b_q)), b_w, b_factor, 1, BH)
        tl.store(out + i_t * width + o_n, tl.reshape(b_logit, [BN]), mask=o_n < n)


@triton.jit(do_not_specialize=["width", "skip", "stride_table"])
def plain_logits_kernel(
    q, weights, keys, table, slots, owner, positions, out, width, skip, stride_qt, stride_qh, stride_w, stride_table,
    RATIO: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, FORMAT: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    i_t, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, n = token_ends(slots, owner, positions, i_t, width, skip, RATIO)
    if i_n * BN >= n:
        return
    o_n = i_n * BN + tl.arange(0, BN)
    o_page, o_row, m_n = find_keys(table + slot * stride_table, i_n * BN, n, BN, P)
    b_s = tl.zeros([BN, BH], tl.float32)
    for begin in tl.range(0, BD, BK):
        o_d = begin + tl.arange(0, BK)
        b_k = load_rows(keys, o_page, o_row, m_n, o_d, P, D, 0, FORMAT)
        b_q = load_queries(q, i_t, i_t + 1, o_d, stride_qt, stride_qh, H, D, 1, BH).to(tl.float32)
        b_s = tl.dot(b_k, tl.trans(b_q), b_s, input_precision="ieee")
    b_w = load_weights(weights, i_t, i_t + 1, stride_w, H, 1, BH)
    b_logit = weigh(b_s, b_w, tl.full([BN], 1.0, tl.float32), 1, BH)
    tl.store(out + i_t * width + o_n, tl.reshape(b_logit, [BN]), mask=o_n < n)


@triton.jit(do_not_specialize=["width", "skip", "stride_table", "T"])
def prefill_logits_kernel(
    q, weights, keys, table, slots, owner, starts, positions, out, width, skip, T,
    stride_qt, stride_qh, stride_w, stride_table,
    RATIO: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, FORMAT: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    i_n, i_g = tl.program_id(0), tl.program_id(1)
    o_n = i_n * BN + tl.arange(0, BN)
    i_t, end = i_g * GROUP, tl.minimum(i_g * GROUP + GROUP, T)
    while i_t < end:  # over the requests of the group
        i_b = tl.load(owner + i_t)
        slot = tl.load(slots + i_b)
        stop = tl.minimum(tl.load(starts + i_b + 1), end).to(tl.int32)
        position = tl.load(positions + i_t)
        n = tl.minimum((position + stop - i_t) // RATIO, width).to(tl.int32)  # what the last of its tokens sees
        least = tl.maximum(i_n * BN, skip) + 1  # what a token must see to matter here
        first = i_t + tl.maximum(least.to(tl.int64) * RATIO - 1 - position, 0)
        if (slot >= 0) & (n >= least):
            o_d = tl.arange(0, BD)
            b_k, b_factor = load_keys(keys, table + slot * stride_table, i_n * BN, n, BN, P, D, FORMAT, BD, tl.bfloat16)
            for i_u in tl.range(first.to(tl.int32), stop, BT):
                b_q = load_queries(q, i_u, stop, o_d, stride_qt, stride_qh, H, D, BT, BH)
                b_w = load_weights(weights, i_u, stop, stride_w, H, BT, BH)
                b_logit = weigh(tl.dot(b_k, tl.trans(b_q)), b_w, b_factor, BT, BH)
                o_t = i_u + tl.arange(0, BT)
                b_seen = tl.where(o_t < stop, (position + o_t - i_t + 1) // RATIO, 0)
                m_out = (o_n[:, None] < b_seen[None, :]) & (o_n[:, None] < n)
                p_out = out + o_t.to(tl.int64)[None, :] * width + o_n[:, None]
                tl.store(p_out, b_logit, mask=m_out)
        i_t = tl.maximum(stop, i_t + 1)


def token_programs(T: int, tiles: int, max_tiles: int, device: torch.device) -> int:
    """Programs that a token's tiles are dealt out to: two for each multiprocessor in all, or more for long requests."""
    return min(tiles, max(2 * sm_count(device) // T, triton.cdiv(tiles, max_tiles)))


def decode_logits_hopper(
    q: Tensor,  # [T, H, 128] bf16
    weights: Tensor,
    keys: Tensor,  # [N, P, w] bytes
    table: Tensor,
    index: StepIndex,
    out: Tensor,  # [T, width]
    ratio: int,
    skip: int,
) -> None:
    from hybridkv.kernels.v4.indexer_hopper import KEYS, PAGE, REGISTERS, WARPS, decode_logits_hopper_kernel

    (T, H, _), (P, nbytes), width = q.shape, keys.shape[1:], out.shape[1]
    W = nbytes // 4 - 1  # words of a key's codes; one more holds its scale
    rows = keys.view(torch.int32).view(-1, 32)
    codes = TensorDescriptor.from_tensor(rows.view(-1, W), [PAGE, W], gl.NVMMASharedLayout(4 * W, 32, 2))
    factors = TensorDescriptor.from_tensor(rows, [1, 32], gl.NVMMASharedLayout(0, 32, 2))
    programs = token_programs(T, triton.cdiv(width, KEYS), HOPPER_MAX_TILES, q.device)
    decode_logits_hopper_kernel[T, programs](
        q, weights, codes, factors, table, index.slots, index.token_to_req, index.positions, out, width, skip,
        q.stride(0), q.stride(1), weights.stride(0), table.stride(0), H,
        RATIO=ratio, P=P, W=W, num_warps=WARPS, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip


def index_logits_triton(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    fmt: PageFormat,
    table: Tensor,
    index: StepIndex,
    ratio: int,
    width: int,
    skip: int,
    shape: IndexerShape | None = None,
) -> Tensor:
    (T, H, D), P = q.shape, keys.shape[1]
    assert q.stride(2) == 1 and weights.stride(1) == 1 and table.stride(1) == 1 and keys.is_contiguous()
    assert weights.dtype == torch.float32 and fmt.dim == D and keys.dtype == fmt.dtype
    out = torch.empty((T, width), dtype=torch.float32, device=q.device)
    if not T or not width:
        return out
    if fmt.hadamard:
        rounded = torch.empty((T, H, D), dtype=torch.bfloat16, device=q.device)
        overlap = can_overlap(q, None)
        round_queries_kernel[(triton.cdiv(T * H, ROUND_ROWS),)](
            q, rounded, T * H, q.stride(0), q.stride(1), H, D=D, BM=ROUND_ROWS, OVERLAP=overlap, launch_pdl=overlap
        )
        q = rounded
    if shape is None and 2 * len(index.slots) >= T and suits_hopper(q, keys, fmt):
        decode_logits_hopper(q, weights, keys, table, index, out, ratio, skip)
        return out
    f32 = q.dtype != torch.bfloat16 or fmt.dtype == torch.float32
    decode = DECODE_BF16 if fmt.plain else DECODE
    shape = shape or (PREFILL if 2 * len(index.slots) < T else decode)
    read = (q, weights, keys, table, index.slots, index.token_to_req)
    strides = (q.stride(0), q.stride(1), weights.stride(0), table.stride(0))
    dims = dict(
        RATIO=ratio, H=H, D=D, P=P, FORMAT=fmt.code,
        BH=max(16, triton.next_power_of_2(H)), BD=max(16, triton.next_power_of_2(D)),
    )  # fmt: skip
    if f32:
        plain_logits_kernel[T, triton.cdiv(width, PLAIN_KEYS)](
            *read, index.positions, out, width, skip, *strides, BN=PLAIN_KEYS, BK=min(PLAIN_DIMS, dims["BD"]), **dims
        )
        return out
    tiles = triton.cdiv(width, shape.keys)
    dims |= dict(BN=shape.keys, num_warps=shape.warps, num_stages=shape.stages)
    if shape.group:
        prefill_logits_kernel[tiles, triton.cdiv(T, shape.group)](
            *read, index.query_start_loc, index.positions, out, width, skip, T, *strides,
            BT=shape.tokens, GROUP=shape.group, **dims,
        )  # fmt: skip
    else:
        decode_logits_kernel[T, token_programs(T, tiles, MAX_TILES, q.device)](
            *read, index.positions, out, width, skip, *strides, **dims
        )
    return out


def index_logits(
    q: Tensor,  # [T, H, D] rotated
    weights: Tensor,  # [T, H] f32, signed, scaled
    keys: Tensor,  # [N, P, w] pages of index keys
    fmt: PageFormat,
    table: Tensor,  # [slots, N] int32 page ids, -1 past the end
    index: StepIndex,
    ratio: int,  # tokens of an entry
    width: int,  # entries that any token may see
    skip: int,  # rows that see no more may be left out
) -> Tensor:  # [T, width] f32
    form = index_logits_triton if use_triton(q) else index_logits_ref
    return form(q, weights, keys, fmt, table, index, ratio, width, skip)
