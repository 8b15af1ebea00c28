"""gather_entries and flat_entries: the rows asked for; zeros and -1 for what is not there, from every form."""

import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.formats.page_format import fake_quantise, store_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format, index_format
from hybridkv.kernels.v4.gather import (
    flat_entries,
    flat_entries_ref,
    flat_entries_triton,
    gather_entries,
    gather_entries_ref,
    gather_entries_triton,
)

pytest.importorskip("triton")
FORMATS = [
    *(entry_format(n, 32, 8) for n in ("f32", "bf16", "fp8", "fp8_entry")),
    entry_format("fp8", 512, 64),
    *(index_format(n, 32) for n in ("f32", "bf16", "fp8", "mxfp4", "nvfp4")),
    entry_format("bf16", 7, 2),
]
WRONG = [-1, -(2**31), 2**31 - 1, 2**31, -(2**63), 2**63 - 1]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f.name}-{f.dim}-{f.rope}")


def filled(fmt: PageFormat, N: int, P: int) -> tuple[Tensor, Tensor]:
    """Pages, and the rows that were stored in them [N P, D]."""
    x = torch.randn(N * P, fmt.dim)
    pages = torch.zeros(N, P, fmt.width, dtype=fmt.dtype)
    store_entries_ref(pages, fmt, torch.arange(N * P), x)
    return pages, x


@every_format
@pytest.mark.parametrize("P", (1, 5))
def test_rows_are_what_was_stored_and_zeros_where_nothing_was(fmt: PageFormat, P: int) -> None:
    N = 12 // P + 1
    pages, x = filled(fmt, N, P)
    flat = torch.randint(0, N * P, (2, 3, 5))
    flat.view(-1)[: len(WRONG) + 1] = torch.tensor([*WRONG, N * P])
    flat = flat.view(-1)[torch.randperm(30)].view(2, 3, 5)
    there = (flat >= 0) & (flat < N * P)
    want = torch.where(there[..., None], fake_quantise(fmt, x)[flat * there], 0.0)
    for dtype in (torch.bfloat16, torch.float32):
        assert_same_bytes(want.to(dtype), gather_entries_ref(pages, fmt, flat, dtype))
        assert_same_bytes(want.to(dtype), gather_entries_triton(pages.to(DEVICE), fmt, flat.to(DEVICE), dtype))


def test_fp8_entries_lose_nothing_in_bf16() -> None:
    fmt = entry_format("fp8", 200, 12)
    pages, _ = filled(fmt, 2, 9)
    flat = torch.arange(18)
    assert torch.equal(gather_entries(pages, fmt, flat).float(), gather_entries(pages, fmt, flat, torch.float32))


@pytest.mark.parametrize("shape", ((0,), (3, 0), (1,), (1, 1)))
def test_sizes_of_nothing_and_one(shape: tuple[int, ...]) -> None:
    fmt = entry_format("fp8", 32, 8)
    pages, _ = filled(fmt, 2, 3)
    flat = torch.full(shape, 4)
    want, got = (
        f(pages.to(d), fmt, flat.to(d)) for f, d in ((gather_entries_ref, "cpu"), (gather_entries_triton, DEVICE))
    )
    assert want.shape == (*shape, 32)
    assert_same_bytes(want, got)


def test_flat_numbers_of_strided_choices() -> None:
    fmt = entry_format("bf16", 8, 2)
    pages, _ = filled(fmt, 3, 4)
    wide = torch.randint(-2, 14, (6, 8))
    assert_same_bytes(
        gather_entries_ref(pages, fmt, wide[:, ::2]),
        gather_entries_triton(pages.to(DEVICE), fmt, wide.to(DEVICE)[:, ::2]),
    )


def brute(table: Tensor, slots: Tensor, entries: Tensor, P: int) -> Tensor:
    out = []
    for slot, entry in zip(slots.expand_as(entries).flatten().tolist(), entries.flatten().tolist()):
        known = 0 <= slot < table.shape[0] and entry >= 0 and entry // P < table.shape[1]
        page = int(table[slot, entry // P]) if known else -1
        out.append(page * P + entry % P if page >= 0 else -1)
    return torch.tensor(out, dtype=torch.int64).view(entries.shape)


@pytest.mark.parametrize("P", (1, 4, 7))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_flat_entries_name_the_row_of_the_page_or_minus_one(P: int, dtype: torch.dtype) -> None:
    S, N, T, K = 4, 6, 5, 9
    table = torch.randperm(S * N).to(torch.int32).view(S, N)
    table[1, 3:], table[2] = -1, -1
    slots = torch.tensor([0, 1, 2, 3, -1])
    entries = torch.randint(0, N * P, (T, K)).to(dtype)
    entries[:, 0], entries[:, 1], entries[:, 2], entries[:, 3] = -1, -(2**31), 2**31 - 1, N * P
    cases = [
        (slots[:, None], entries),
        (slots, entries[:, 4]),
        (slots[0], entries[0]),
        (slots[:, None], entries[:, ::3]),
    ]
    for s, e in cases:
        want = brute(table, s, e, P)
        assert_same_bytes(want, flat_entries(table, s, e, P))
        assert_same_bytes(want, flat_entries_triton(table.to(DEVICE), s.to(DEVICE), e.to(DEVICE), P))
    assert (brute(table, slots[:, None], entries, P) >= 0).any()
    hostile = torch.tensor([[S], [2**31 - 1], [-(2**31)]])
    for form, d in ((flat_entries_ref, "cpu"), (flat_entries_triton, DEVICE)):
        assert (form(table.to(d), hostile.to(d), entries[:3].to(d), P) == -1).all()


def test_flat_entries_of_a_view_of_a_wider_table_and_of_no_table() -> None:
    wide = torch.randperm(40).to(torch.int32).view(4, 10)
    slots, entries = torch.tensor([[2], [0]]), torch.randint(0, 24, (2, 5))
    want = brute(wide[:, :6], slots, entries, 4)
    assert_same_bytes(want, flat_entries_ref(wide[:, :6], slots, entries, 4))
    assert_same_bytes(want, flat_entries_triton(wide.to(DEVICE)[:, :6], slots.to(DEVICE), entries.to(DEVICE), 4))
    none = torch.empty(4, 0, dtype=torch.int32)
    assert (flat_entries_ref(none, slots, entries, 4) == -1).all()
    assert (flat_entries_triton(none.to(DEVICE), slots.to(DEVICE), entries.to(DEVICE), 4) == -1).all()
    assert flat_entries_triton(wide.to(DEVICE), slots.to(DEVICE), entries.to(DEVICE)[:, :0], 4).shape == (2, 0)
