"""dequantise: the entries of streams as dense bf16 tiles; and how a step's keys are cut into parts."""

import numpy as np
import pytest
import torch
from numerics import assert_same_bytes
from triton_cases import BF16, FP8, streams
from triton_interpreter import DEVICE

from hybridkv.kernels.attention.dequantise import KEYS, dequantise_ref, dequantise_triton
from hybridkv.kernels.attention.prefill_plan import dequantised_parts

pytest.importorskip("triton")

LENGTHS = [[130, 70], [1, 0], [64, 65]]


def tiles_of(lengths: np.ndarray) -> torch.Tensor:
    tiles = [(b, first) for b, length in enumerate(lengths.max(1)) for first in range(0, length, KEYS)]
    return torch.tensor(tiles, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("pages", (BF16, FP8))
@pytest.mark.parametrize(("P", "D"), ((16, 40), (53, 64), (64, 256)))
def test_entries_come_in_order_and_zeros_past_the_end(P: int, D: int, pages: str) -> None:
    held = streams(LENGTHS, P, D, pages, DEVICE)
    tiles = tiles_of(held.lengths)
    got = dequantise_triton(held.k_pool, held.v_pool, held.table, held.on_device, tiles)
    for i in range(2):  # keys, values
        for t, (b, first) in enumerate(tiles.tolist()):
            for g in range(2):
                count = max(0, min(KEYS, int(held.lengths[b, g]) - first))
                if count:
                    stored = held.entries(b, g, first + count)[i][first:]
                    # the product with the scale is taken in f32, then rounded once
                    assert_same_bytes(stored.float().bfloat16(), got[i][g, t, :count])
                assert not got[i][g, t, count:].any()
    for a, b in zip(got, dequantise_ref(held.k_pool, held.v_pool, held.table, held.on_device, tiles)):
        assert_same_bytes(b, a)


def test_rows_of_a_larger_table_and_padding() -> None:
    held = streams(LENGTHS, 16, 32, BF16, DEVICE)
    tiles = tiles_of(held.lengths)
    want = dequantise_triton(held.k_pool, held.v_pool, held.table, held.on_device, tiles)
    rows = torch.tensor([4, -1, 1], device=DEVICE)
    table = torch.full((6, *held.table.shape[1:]), 2**30, dtype=torch.int32, device=DEVICE)  # far outside the pool
    table[4], table[1] = held.table[0], held.table[2]
    got = dequantise_triton(held.k_pool, held.v_pool, table, held.on_device, tiles, rows)
    real = tiles[:, 0] != 1
    for a, b in zip(want, got):
        assert_same_bytes(a[:, real], b[:, real])
        assert not b[:, ~real].any()


@pytest.mark.parametrize("piece", (64, 128, 1024))
def test_parts_hold_every_key_once_and_no_more_than_a_piece(piece: int) -> None:
    lengths, G = (1, 64, 65, 0, 700, 3, 128, 129), 3
    seen = []
    for part in dequantised_parts(lengths, G, piece, torch.device("cpu")):
        b = range(*part.requests)
        assert len(part.tiles) * KEYS <= piece and part.table.shape[:2] == (len(b), G)
        for i, request in enumerate(b):
            stop = min(part.last, lengths[request])
            for g in range(G):
                for j, first in enumerate(range(part.first, stop, KEYS)):
                    at = int(part.table[i, g, j]) - g * len(part.tiles)  # tile of the part
                    assert part.tiles[at].tolist() == [request, first]
            seen += [(request, first) for first in range(part.first, stop, KEYS)]
    assert seen == [(b, first) for b, n in enumerate(lengths) for first in range(0, n, KEYS)]
