"""Entries of equally long streams: a view where pages lie in a row, and the same numbers where they do not."""

import numpy as np
import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor

from hybridkv.kernels.even_pages import EvenPages

P, D = 4, 8


def expected(pool: Tensor, ids: np.ndarray, length: int) -> Tensor:
    return torch.stack([torch.cat([pool[page] for page in row])[:length] for row in ids.tolist()])[None]


def in_a_row(streams: int, n: int, first: int, apart: int) -> np.ndarray:
    return (first + apart * np.arange(streams)[:, None] + np.arange(n)).astype(np.int32)


@pytest.mark.parametrize(
    ("streams", "heads", "n", "length"), ((6, 2, 3, 10), (3, 3, 1, 4), (1, 1, 5, 20), (4, 1, 2, 5))
)
def test_pages_in_a_row_are_read_as_they_lie(streams: int, heads: int, n: int, length: int) -> None:
    ids, pool = in_a_row(streams, n, 2, 7), torch.randn(60, P, D)[3:]  # a pool need not begin where its memory does
    pages = EvenPages.of(ids, length)
    for begin in range(0, streams, heads):
        rows = slice(begin, begin + heads)
        found = pages.entries(pool, rows)
        assert_same_bytes(expected(pool, ids[rows], length), found.contiguous())
        assert found.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()


@pytest.mark.parametrize("spoil", ("a page elsewhere", "a stream elsewhere", "streams go back", "pages go back"))
def test_other_pages_are_gathered(spoil: str) -> None:
    ids, pool = in_a_row(4, 3, 20, 6), torch.randn(60, P, D)
    if spoil == "a page elsewhere":
        ids[1, 2] = 55
    elif spoil == "a stream elsewhere":
        ids[3] += 7
    elif spoil == "streams go back":
        ids = ids[::-1]
    else:
        ids = ids[:, ::-1]
    pages = EvenPages.of(ids, 10)
    for rows in (slice(0, 2), slice(2, 4)):
        assert_same_bytes(expected(pool, ids[rows], 10), pages.entries(pool, rows).contiguous())
    assert pages.first is None


def test_what_was_given_may_change_afterwards() -> None:
    """The page table on a CPU is written to while a step runs ahead."""
    ids, pool = np.array([[3, 1], [0, 2]], np.int32), torch.randn(4, P, D)
    pages, want = EvenPages.of(ids, 7), expected(pool, ids, 7)
    ids[:] = 0
    assert_same_bytes(want, pages.entries(pool, slice(0, 2)).contiguous())
