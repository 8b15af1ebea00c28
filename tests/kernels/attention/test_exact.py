"""attention_exact: softmax attention whose rows have the same bits in any company, in any chunks and by any division of
the work. Splits and tiles are small here, so that short streams already have many. tests/gpu runs the real ones.
"""

import numpy as np
import pytest
import torch
from long_form import LONG, few
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_cases import BF16, BOUND, F32, FP8, Streams, dense, queries, streams
from triton_interpreter import DEVICE

from hybridkv.kernels.attention.exact import apart, attention_exact_torch, attention_exact_triton, owners, token_owners
from hybridkv.kernels.attention.prefill_plan import DevicePlan, query_blocks, token_blocks
from hybridkv.kernels.attention.tile import TileShape

pytest.importorskip("triton")
SMALL, SPLIT = TileShape(16, 16, 4, 1), 32
KINDS = ((F32, F32), (F32, BF16), (F32, FP8), (BF16, F32), (BF16, BF16), (BF16, FP8))
LENGTHS, STARTS = [[33, 40], [100, 45], [12, 5], [9, 70], [1, 1]], [0, 1, 41, 45, 46, 47]


def triton_form(q: Tensor, held: Streams, starts: list[int] | DevicePlan, by_split: bool, keys: int = 128) -> Tensor:
    rows, out = torch.arange(len(held.table), device=DEVICE), torch.full_like(q, torch.nan).contiguous()
    return attention_exact_triton(
        q, held.k_pool, held.v_pool, held.table, held.on_device, starts, 0.2, rows, keys, out, SMALL, SPLIT, by_split
    )


def torch_form(q: Tensor, held: Streams, starts: list[int], by_split: bool, keys: int = 128) -> Tensor:
    return attention_exact_torch(q, *held.args, starts, 0.2, torch.full_like(q, torch.nan).contiguous())


def cut(held: Streams, b: int, to_end: int) -> Streams:
    """Request b alone, `to_end` tokens before its end."""
    return Streams(held.k_pool, held.v_pool, held.table[b : b + 1], held.lengths[b : b + 1] - to_end)


@pytest.mark.long
@few("kind, by_split", KINDS, (False, True, True, False))
def test_it_is_softmax_attention(kind: tuple[str, str], by_split: bool) -> None:
    """Every kind in one division of the work: the test below says that the other has the same bits."""
    query, pages = kind
    held, q = streams(LENGTHS, 16, 40, pages, DEVICE), queries(47, 6, 40, query, DEVICE)
    got, want = triton_form(q, held, STARTS, by_split), dense(q, held, STARTS, 0.2)
    assert got.dtype == q.dtype
    assert_close_rms("float64", want, got, BOUND[query, pages])
    assert_close_rms("torch form", want, torch_form(q, held, STARTS, by_split), 2 * BOUND[query, pages])


@pytest.mark.long
@pytest.mark.parametrize("form", (triton_form, torch_form))
@pytest.mark.parametrize("pages", (F32, BF16, FP8))
def test_a_row_has_the_same_bits_in_any_company_and_division(pages: str, form: object) -> None:
    """Each cut in one division, in turn; in the long form in all three."""
    held = streams(LENGTHS, 16, 32, pages, DEVICE)
    q = queries(47, 6, 32, F32 if pages == F32 else BF16, DEVICE)
    assert callable(form)
    whole = form(q, held, STARTS, False)
    assert_same_bytes(form(q, held, STARTS, True), whole)
    divisions, number = ((False, 128), (True, 128), (True, 500)), 0
    for b in range(len(LENGTHS)):
        begin, end = STARTS[b], STARTS[b + 1]
        for first, last in sorted({(begin, end), (begin, begin + 1), (end - 1, end), ((begin + end) // 2, end)}):
            one, number = cut(held, b, end - last), number + 1
            for by_split, keys in divisions if LONG else (divisions[number % 3],):
                assert_same_bytes(form(q[first:last], one, [0, last - first], by_split, keys), whole[first:last])


def test_a_plan_on_the_device_gives_the_same_bits() -> None:
    """With a prompt of padding at the end; queries before the first prompt stay as they are."""
    held, q = streams(LENGTHS, 16, 32, BF16, DEVICE), queries(50, 6, 32, BF16, DEVICE)
    want = triton_form(q[:47], held, STARTS, False)
    first = 2  # requests that are no prompts
    plan = DevicePlan(torch.tensor([*STARTS[first:], 50], device=DEVICE), 50, held.on_device[first:].amax(1))
    rows = torch.tensor([2, 3, 4, -1], device=DEVICE)
    ends = torch.cat((held.on_device[first:], torch.full((1, 2), 77, device=DEVICE)))
    out = torch.full_like(q, 9).contiguous()
    attention_exact_triton(
        q, held.k_pool, held.v_pool, held.table, ends, plan, 0.2, rows, 128, out, SMALL, SPLIT
    )  # fmt: skip
    assert_same_bytes(out[STARTS[first] : 47], want[STARTS[first] :])
    assert (out[: STARTS[first]] == 9).all() and not out[47:].any()


def test_padding_gives_zeros_and_reads_nothing() -> None:
    held, q = streams([[40, 33], [100, 17]], 16, 32, F32, DEVICE), queries(2, 6, 32, F32, DEVICE)
    held.table[1] = 2**30  # a page far outside the pool
    out = torch.full_like(q, torch.nan).contiguous()
    rows = torch.tensor([0, -1], device=DEVICE)
    for by_split in (False, True):
        args = q, held.k_pool, held.v_pool, held.table, held.on_device, [0, 1, 2], 0.2, rows, 128, out, SMALL, SPLIT
        attention_exact_triton(*args, by_split)
        assert not out[1].any()
        assert_close_rms("the other", dense(q[:1], cut(held, 0, 0), [0, 1], 0.2), out[:1], BOUND[F32, F32])
    lengths, held.table[1] = np.array([[40, 33], [0, 0]]), 0
    mixed = attention_exact_torch(q, held.k_pool, held.v_pool, held.table, lengths, [0, 1, 2], 0.2, out)
    assert not mixed[1].any() and mixed[0].isfinite().all()


def test_a_split_that_is_left_out_shows() -> None:
    """A control: one key fewer, or splits at other places, and the bits are others."""
    held, q = streams([[100, 100]], 16, 32, F32, DEVICE), queries(1, 6, 32, F32, DEVICE)
    whole = triton_form(q, held, [0, 1], False)
    assert not torch.equal(triton_form(q, cut(held, 0, 1), [0, 1], False), whole)
    rows, out = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.empty_like(q).contiguous()
    args = (q, held.k_pool, held.v_pool, held.table, held.on_device, [0, 1], 0.2, rows, 128, out, SMALL)
    assert not torch.equal(attention_exact_triton(*args, 16, False), whole)


def test_who_owns_a_query_and_when_splits_are_apart() -> None:
    assert owners((0, 1, 1, 4), torch.device("cpu")).tolist() == [[0, 1], [2, 3], [2, 2], [2, 1]]
    assert apart(4, 16, 6144, 132) and not apart(4, 1, 6144, 132) and not apart(264, 16, 6144, 132)
    assert not apart(4, 128, 2_000_000, 132), "what is gathered would not fit the workspace"


def test_tables_of_single_tokens_live_on() -> None:
    """A captured step has their addresses: they are not among those that make room for others."""
    token_blocks.cache_clear()
    held, q = streams([[40, 70], [33, 9]], 16, 32, F32, DEVICE), queries(2, 6, 32, F32, DEVICE)
    first = triton_form(q, held, [0, 1, 2], True)
    blocks, whose = token_blocks(2, SMALL.rows, 3, q.device), token_owners(2, q.device)
    assert token_blocks.cache_info().hits == 1, "attention did not take this table"
    for n in range(2, 60):
        query_blocks((0, n), SMALL.rows, 3, q.device)
        owners((0, n), q.device)
    assert token_blocks(2, SMALL.rows, 3, q.device) is blocks and token_owners(2, q.device) is whose
    assert_same_bytes(first, triton_form(q, held, [0, 1, 2], True))
