"""gather: entries of pages as dense rows, and where the entries of a request lie.

`flat_entries` turns entry numbers of requests into flat numbers of pages: entry j of a slot is row j % P of the page
that the slot's table names for j // P. `gather_entries` reads such entries, whatever their format, as rows of one
dtype. What names no entry (-1, past the table or the pages, a page not there, a row of padding) becomes -1, then zeros;
nothing is read for it.

FP8 values times powers of two are BF16 numbers, so `fp8` entries lose nothing in BF16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.page_format import load_entries_ref, load_tile
from hybridkv.kernels.formats.page_layout import PageFormat

BLOCK_VALUES = 4096  # of a tile at most
BLOCK_INDICES = 512


def flat_entries_ref(table: Tensor, slots: Tensor, entries: Tensor, P: int) -> Tensor:
    S, N = table.shape
    entries = entries.long()
    page = entries // P
    valid = (slots >= 0) & (slots < S) & (entries >= 0) & (page < N)
    if not table.numel():
        return torch.full_like(valid, -1, dtype=torch.int64)
    page_id = table[torch.where(valid, slots, 0), torch.where(valid, page, 0)].long()
    return torch.where(valid & (page_id >= 0), page_id * P + entries % P, -1)


@triton.jit(do_not_specialize=["M", "S", "N", "K"])
def flat_entries_kernel(
    table, slots, entries, flat, M, K, S, N, P, stride_ts, stride_sm, stride_sk, stride_em, stride_ek,
    BM: tl.constexpr,
):  # fmt: skip
    o_i = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_m, o_k = o_i // K, o_i % K
    m_i = o_i < M
    o_s = tl.load(slots + o_m * stride_sm + o_k * stride_sk, mask=m_i, other=-1).to(tl.int64)
    o_e = tl.load(entries + o_m * stride_em + o_k * stride_ek, mask=m_i, other=-1).to(tl.int64)
    o_page = o_e // P
    m_e = (o_s >= 0) & (o_s < S) & (o_e >= 0) & (o_page < N)
    b_page = tl.load(table + o_s * stride_ts + o_page, mask=m_e, other=-1).to(tl.int64)
    tl.store(flat + o_i, tl.where(b_page >= 0, b_page * P + (o_e - o_page * P), -1), mask=m_i)


def flat_entries_triton(table: Tensor, slots: Tensor, entries: Tensor, P: int) -> Tensor:
    flat = torch.empty(entries.shape, dtype=torch.int64, device=entries.device)
    if not flat.numel():
        return flat
    assert table.stride(1) == 1 or table.shape[1] <= 1
    K = entries.shape[-1] if entries.dim() else 1
    slots, entries = (x.expand(flat.shape).reshape(-1, K) for x in (slots, entries))
    flat_entries_kernel[(triton.cdiv(flat.numel(), BLOCK_INDICES),)](
        table, slots, entries, flat, flat.numel(), K, *table.shape, P,
        table.stride(0), *slots.stride(), *entries.stride(), BM=BLOCK_INDICES,
    )  # fmt: skip
    return flat


def flat_entries(
    table: Tensor,  # [S, N] int32, pages of each slot; -1: none
    slots: Tensor,  # as entries, or with dimensions of 1; -1: padding
    entries: Tensor,  # [...], entry numbers of the slots' requests
    P: int,
) -> Tensor:
    """Flat numbers, int64, in the shape of `entries`; -1 where there is no entry."""
    form = flat_entries_triton if use_triton(entries) else flat_entries_ref
    return form(table, slots, entries, P)


def gather_entries_ref(pages: Tensor, fmt: PageFormat, flat: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return load_entries_ref(pages, fmt, flat).to(dtype)


@triton.jit(do_not_specialize=["M"])
def gather_kernel(
    pages, flat, out, M, entries,
    P: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    m_m = o_m < M
    o_e = tl.load(flat + o_m, mask=m_m, other=-1).to(tl.int64)
    b_x = load_tile(pages, o_e, (o_e >= 0) & (o_e < entries), o_d, P, D, ROPE, FORMAT)
    tl.store(out + o_m[:, None] * D + o_d, b_x.to(out.dtype.element_ty), mask=m_m[:, None] & (o_d < D))


def gather_entries_triton(pages: Tensor, fmt: PageFormat, flat: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    N, P, width = pages.shape
    assert pages.dtype == fmt.dtype and width == fmt.width and pages.is_contiguous()
    out = torch.empty(*flat.shape, fmt.dim, dtype=dtype, device=pages.device)
    columns = triton.next_power_of_2(fmt.dim)
    rows = max(1, min(32, BLOCK_VALUES // columns))
    if M := flat.numel():
        gather_kernel[(triton.cdiv(M, rows),)](
            pages, flat.contiguous(), out, M, N * P,
            P=P, D=fmt.dim, ROPE=fmt.rope, FORMAT=fmt.code, BM=rows, BD=columns, num_warps=4,
        )  # fmt: skip
    return out


def gather_entries(
    pages: Tensor,  # [N, P, width]
    fmt: PageFormat,
    flat: Tensor,  # [..., K]
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[..., K, D] rows of `dtype`; zeros where `flat` is no entry."""
    form = gather_entries_triton if use_triton(pages) else gather_entries_ref
    return form(pages, fmt, flat, dtype)
