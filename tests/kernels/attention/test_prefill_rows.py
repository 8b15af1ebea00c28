"""attention_prefill with rows of a larger table, and the log-sum-exps that it leaves: both forms."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_cases import BF16, BOUND, F32, FP8, Streams, dense, log_sums, queries, streams
from triton_interpreter import DEVICE

from hybridkv.kernels.attention.prefill import attention_prefill_torch, attention_prefill_triton
from hybridkv.kernels.attention.tile import TileShape

pytest.importorskip("triton")

FORMS = (
    pytest.param(partial(attention_prefill_torch, key_tile=32), id="torch"),
    pytest.param(partial(attention_prefill_triton, shape=TileShape(16, 16, 4, 1)), id="triton"),
)
LENGTHS, STARTS = [[17, 17], [40, 33], [1, 1], [30, 50]], [0, 17, 18, 19, 30]


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_larger_table(form: Callable[..., Tensor]) -> None:
    held = streams(LENGTHS, 16, 32, F32, DEVICE)
    q = queries(STARTS[-1], 6, 32, F32, DEVICE)
    want = form(q, *held.args, STARTS, 0.2)
    rows = torch.tensor([5, 0, 3, 2], device=DEVICE)
    table = torch.full((7, 4, held.table.shape[2]), 2**30, dtype=torch.int32, device=DEVICE)  # far outside the pool
    table[rows, 1:3] = held.table
    got = form(q, held.k_pool, held.v_pool, table[:, 1:3], held.lengths, STARTS, 0.2, rows=rows)
    assert_same_bytes(want, got)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("query", "pages"), ((F32, F32), (BF16, BF16), (BF16, FP8)))
def test_log_sum_exps_of_the_queries_that_have_a_place(query: str, pages: str, form: Callable[..., Tensor]) -> None:
    held = streams(LENGTHS, 16, 32, pages, DEVICE)
    q = queries(STARTS[-1], 6, 32, query, DEVICE)
    index = torch.randperm(40, device=DEVICE)[: STARTS[-1]]
    index[::4] = -1
    kept = torch.full((40, 6), 7.0, device=DEVICE)
    got = form(q, *held.args, STARTS, 0.2, lse=(kept, index))
    assert_close_rms("output", dense(q, held, STARTS, 0.2), got, BOUND[query, pages])
    # bf16 changes products of stored numbers in the torch form alone, and there by less than the weights
    assert_close_rms("sums", log_sums(q, held, STARTS, 0.2)[index >= 0], kept[index[index >= 0]], BOUND[query, pages])
    free = torch.ones(40, dtype=torch.bool, device=DEVICE)
    free[index[index >= 0]] = False
    assert (kept[free] == 7).all()


def test_padding_reads_nothing_and_gives_zeros() -> None:
    held = streams([[20, 20], [9, 9]], 16, 32, F32, DEVICE)
    q = queries(5, 4, 32, F32, DEVICE)
    table, rows = held.table.clone(), torch.tensor([0, -1], device=DEVICE)
    table[1] = 2**30
    kept = torch.full((5, 4), 7.0, device=DEVICE)
    got = attention_prefill_triton(
        q, held.k_pool, held.v_pool, table, held.lengths, [0, 3, 5], 0.2, shape=TileShape(16, 16, 4, 1), rows=rows,
        lse=(kept, torch.tensor([0, 1, 2, -1, -1], device=DEVICE)),
    )  # fmt: skip
    one = Streams(held.k_pool, held.v_pool, held.table[:1], np.array([[20, 20]]))
    assert_close_rms("real", dense(q[:3], one, [0, 3], 0.2), got[:3], BOUND[F32, F32])
    assert not got[3:].any() and (kept[3:] == 7).all() and (kept[:3] != 7).all()
