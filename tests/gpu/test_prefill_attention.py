"""Prompt attention on the GPU against the definition: the Hopper kernel over pages and over dequantised keys, in pieces
and in splits, beside the Triton kernel. Unused rows and places hold NaN, or lead far outside the pool.
"""

import numpy as np
import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_cases import BF16, BOUND, F32, FP8, Streams, dense, log_sums, queries, streams

from hybridkv.kernels.attention import prefill as file
from hybridkv.kernels.attention.exact import attention_exact_triton
from hybridkv.kernels.attention.prefill import (
    attention_prefill,
    attention_prefill_hopper,
    attention_prefill_triton,
    suits_hopper,
)
from hybridkv.kernels.attention.prefill_plan import DevicePlan
from hybridkv.kernels.backend import has_gluon

pytestmark = pytest.mark.gpu

HOPPER = torch.cuda.is_available() and has_gluon(torch.device("cuda"))
hopper = pytest.mark.skipif(not HOPPER, reason="the kernel is for Hopper GPUs")
LENGTHS = [[300] * 4, [1000, 900, 77, 500], [1] * 4, [129, 130, 2000, 64], [64, 65, 63, 0]]
STARTS = [0, 300, 377, 378, 442, 443]
# dequantised FP8 keys and values are rounded to bf16 once more, 1.1e-3 RMS each; scores of some 1.6 move by as much of
# themselves, and with them the weights of outputs that are averages near zero (seen 7.2e-3 over 5000 keys)
BOUNDS = {BF16: BOUND[BF16, BF16], FP8: 1e-2}


def check(held: Streams, H: int, D: int, bound: float, starts: list[int] = STARTS, query: str = BF16, **how) -> None:
    """Through a larger table, with log-sum-exps of two queries in three."""
    B, G, N = held.table.shape
    q = queries(starts[-1], H, D, query, "cuda")
    rows = torch.randperm(B + 2, device="cuda")[:B]
    table = torch.full((B + 2, G + 1, N), 2**30, dtype=torch.int32, device="cuda")
    table[rows, 1:] = held.table
    index = torch.randperm(len(q) + 5, device="cuda")[: len(q)]
    index[::3] = -1
    kept = torch.full((len(q) + 5, H), 7.0, device="cuda")
    args = (held.k_pool, held.v_pool, table[:, 1:], held.lengths, starts, 1.5 * D**-0.5, held.on_device)
    form = how.pop("form", attention_prefill)
    got = form(q, *args, rows=rows, lse=(kept, index), **how)
    assert_close_rms("output", dense(q, held, starts, 1.5 * D**-0.5), got, bound)
    want, got = log_sums(q, held, starts, 1.5 * D**-0.5)[index >= 0], kept[index[index >= 0]]
    assert torch.equal(want.isneginf(), got.isneginf())
    assert_close_rms("sums", want.masked_fill(want.isneginf(), 0), got.masked_fill(got.isneginf(), 0), bound)
    free = torch.ones(len(kept), dtype=torch.bool, device="cuda")
    free[index[index >= 0]] = False
    assert (kept[free] == 7).all()


@hopper
@pytest.mark.parametrize(("P", "splits"), ((64, 1), (64, 3), (128, 1)))
def test_over_pages(P: int, splits: int) -> None:
    held = streams(LENGTHS, P, 256, BF16, "cuda")
    check(held, 24, 256, BOUNDS[BF16], form=attention_prefill_hopper, splits=splits)


@hopper
@pytest.mark.parametrize(("pages", "P", "piece"), ((FP8, 53, 128), (FP8, 64, 32768), (BF16, 16, 32768)))
def test_over_dequantised_keys(pages: str, P: int, piece: int) -> None:
    held = streams(LENGTHS, P, 256, pages, "cuda")
    check(held, 24, 256, BOUNDS[pages], form=attention_prefill_hopper, piece=piece, splits=1)


@hopper
def test_other_heads() -> None:
    check(streams(LENGTHS, 64, 128, BF16, "cuda"), 32, 128, BOUNDS[BF16], form=attention_prefill_hopper, splits=1)


@pytest.mark.parametrize(("query", "pages"), ((F32, F32), (BF16, FP8)))
def test_the_triton_kernel(query: str, pages: str) -> None:
    bound = 4e-6 if query == F32 else BOUNDS[pages]  # sums of thousands of f32 products
    check(streams(LENGTHS, 64, 256, pages, "cuda"), 24, 256, bound, query=query, form=attention_prefill_triton)


@pytest.mark.parametrize("pages", (BF16, FP8))
@pytest.mark.parametrize(("new", "length"), ((1, 5000), (2500, 2500)))
def test_what_is_picked(new: int, length: int, pages: str) -> None:
    """Long streams and short ones, through the public function."""
    held = streams([[length] * 4], 64, 256, pages, "cuda")
    check(held, 24, 256, BOUNDS[pages], [0, new])


def test_other_dtypes_go_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    held = streams([[200] * 4], 64, 256, F32, "cuda")
    q = queries(200, 24, 256, F32, "cuda")
    assert not suits_hopper(q, held.k_pool)
    ran: list[int] = []
    monkeypatch.setattr(
        file, "attention_prefill_triton", lambda *a, **k: ran.append(1) or attention_prefill_triton(*a, **k)
    )
    attention_prefill(q, *held.args, [0, 200], 0.1)
    assert ran


@hopper
def test_a_prompt_in_chunks_has_the_bits_of_the_whole() -> None:
    """Where the keys are not split: a row's numbers come from that row and from tiles counted from entry 0."""
    T = 4300
    held = streams([[T, T]], 64, 256, FP8, "cuda")
    q = queries(T, 12, 256, BF16, "cuda")

    def part(a: int, b: int) -> Tensor:
        pools, until = (held.k_pool, held.v_pool, held.table), np.full_like(held.lengths, b)
        return attention_prefill_hopper(q[a:b], *pools, until, [0, b - a], 0.1, splits=1)

    whole = part(0, T)
    for a, b in ((0, 1), (0, 1000), (1000, 4099), (4099, T), (37, 38), (4095, 4096), (4096, 4097), (T - 1, T)):
        assert_same_bytes(whole[a:b], part(a, b))


@pytest.mark.parametrize("page", (64, 16))
@pytest.mark.parametrize("pages", (BF16, FP8))
def test_exact_rows_have_the_same_bits_whole_in_chunks_and_alone(pages: str, page: int) -> None:
    """One prompt beside others and alone, by programs that join their splits and by such that leave them apart, in
    chunks and token by token, planned on the host and on the device.
    """
    lengths, starts = [[4300] * 4, [70, 2050, 9, 64], [5000] * 4], [0, 4300, 4309, 4310]
    held = streams(lengths, page, 256, pages, "cuda")
    q = queries(4310, 24, 256, BF16, "cuda")
    pools, rows = (held.k_pool, held.v_pool, held.table), torch.arange(3, device="cuda")

    def run(q: Tensor, ends: Tensor, starts: list[int] | DevicePlan, rows: Tensor, by_split: bool | None) -> Tensor:
        out = torch.full_like(q, torch.nan).contiguous()
        return attention_exact_triton(q, *pools, ends, starts, 0.1, rows, 5000, out, by_split=by_split)

    together = run(q, held.on_device, starts, rows, False)
    assert_close_rms("output", dense(q, held, starts, 0.1), together, BOUNDS[pages])
    assert_same_bytes(together, run(q, held.on_device, starts, rows, None))
    plan = DevicePlan(torch.tensor([*starts, 4310], device="cuda"), 4310, held.on_device.amax(1))
    padded = torch.cat((held.on_device, held.on_device[:1])), torch.cat((rows, rows[:1] - 1))
    assert_same_bytes(together, run(q, padded[0], plan, padded[1], None))
    for b, first, last in ((0, 0, 4300), (0, 0, 1), (0, 1023, 1024), (0, 1024, 1025), (0, 1000, 4099), (0, 4299, 4300),
                           (0, 37, 38), (1, 0, 9), (1, 8, 9), (2, 0, 1)):  # fmt: skip
        part, end = slice(starts[b] + first, starts[b] + last), starts[b + 1] - starts[b]
        until = held.on_device[b : b + 1] - (end - last)
        for by_split in (False, True) if last - first < 4000 else (False,):
            alone = run(q[part], until, [0, last - first], rows[b : b + 1], by_split)
            assert_same_bytes(together[part], alone)
