"""Plans of attention_prefill that are made on the device, for graphs: what the host's plans say, with room for more."""

import numpy as np
import pytest
import torch
from numerics import assert_same_bytes
from triton_cases import F32, queries, streams
from triton_interpreter import DEVICE

from hybridkv.kernels.attention.dequantise import KEYS, dequantise_triton
from hybridkv.kernels.attention.prefill import attention_prefill_torch, attention_prefill_triton
from hybridkv.kernels.attention.prefill_plan import (
    PIECE,
    DevicePlan,
    fits_graph,
    graph_splits,
    query_blocks,
)
from hybridkv.kernels.attention.tile import TileShape

pytest.importorskip("triton")

# three decoding rows, prompts of 17, 0, 1 and 30 queries, and one of padding with 9
STARTS, LENGTHS = [3, 20, 20, 21, 51, 60], [[17, 40], [5, 5], [1, 1], [30, 50], [0, 0]]


def plan_of() -> DevicePlan:
    longest = torch.tensor(LENGTHS, device=DEVICE).amax(1)
    return DevicePlan(torch.tensor(STARTS, device=DEVICE), STARTS[-1], longest)


@pytest.mark.parametrize(("rows", "group"), ((16, 3), (128, 6), (16, 1)))
def test_blocks_are_those_of_the_host_and_empty_ones(rows: int, group: int) -> None:
    want = query_blocks(tuple(STARTS), rows, group, torch.device("cpu")).tolist()
    found = plan_of().blocks(rows, group)
    assert found.dtype == torch.int32
    there = [block for block in found.tolist() if block[2]]
    assert there == want and len(found) >= len(want)
    assert all(block == [4, STARTS[4], 0, 0] for block in found.tolist() if not block[2])  # padding, and no queries


def test_rows_before_the_first_prompt_are_not_touched_and_padding_gives_zeros() -> None:
    held = streams(LENGTHS[:4], 16, 32, F32, DEVICE)
    q = queries(STARTS[-1], 6, 32, F32, DEVICE)
    q[STARTS[-2] :] = torch.nan
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    table = torch.cat((held.table, held.table[:1] * 0 + 2**30))
    rows = torch.tensor([0, 1, 2, 3, -1], device=DEVICE)
    kept, index = torch.full((80, 6), 7.0, device=DEVICE), torch.arange(STARTS[-1], device=DEVICE)
    index[STARTS[-2] :] = -1
    shape, found = TileShape(16, 16, 4, 1), {}
    for name, starts, ends in (("plan", plan_of(), None), ("host", STARTS, lengths.cpu().numpy())):
        out = torch.full_like(q, 5.0)
        lse = kept.clone(), index
        attention_prefill_triton(
            q, held.k_pool, held.v_pool, table, ends, starts, 0.2, lengths, shape, rows, lse, out  # type: ignore[arg-type]
        )  # fmt: skip
        found[name] = out, lse[0]
        assert (out[: STARTS[0]] == 5).all() and not out[STARTS[-2] :].any() and (lse[0][: STARTS[0]] == 7).all()
    for a, b in zip(found["plan"], found["host"], strict=True):
        assert_same_bytes(a, b)
    own = torch.full_like(q, 5.0)
    attention_prefill_torch(
        q, held.k_pool, held.v_pool, table, lengths.cpu().numpy(), STARTS, 0.2, 32, rows, (kept, index), own
    )
    torch.testing.assert_close(own, found["plan"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept, found["plan"][1], rtol=1e-4, atol=1e-5)


def test_tiles_hold_every_key_once_and_are_found_again() -> None:
    held, plan, G = streams(LENGTHS[:4], 16, 32, F32, DEVICE), plan_of(), 2
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    rows = torch.tensor([0, 1, 2, 3, -1], device=DEVICE)
    k, v = dequantise_triton(held.k_pool, held.v_pool, held.table, lengths, plan.tiles, rows)
    flat = {name: x.view(-1, KEYS, 32) for name, x in (("k", k), ("v", v))}
    for b, ends in enumerate(LENGTHS[:4]):
        for g in range(G):
            for first in range(0, ends[g], KEYS):
                at = int(plan.table(G)[b, g, first // KEYS])
                n = min(KEYS, ends[g] - first)
                pages = held.table[b, g, torch.arange(first, first + n, device=DEVICE) // 16].long()
                want = held.k_pool[pages, torch.arange(first, first + n, device=DEVICE) % 16]
                assert_same_bytes(want.bfloat16(), flat["k"][at, :n])
    used = [tile for tile in plan.tiles.tolist() if tile[1] >= 0]
    longest = np.array(LENGTHS).max(1)
    assert used == [[b, first] for b, n in enumerate(longest) for first in range(0, n, KEYS)]


def test_what_a_graph_can_dequantise() -> None:
    assert fits_graph([PIECE]) and fits_graph([1] * (PIECE // KEYS)) and fits_graph([])
    assert not fits_graph([PIECE + 1]) and not fits_graph([1] * (PIECE // KEYS + 1))


def test_few_programs_share_the_keys() -> None:
    assert graph_splits(132, 132) == graph_splits(96, 132) == graph_splits(4000, 132) == 1
    assert graph_splits(24, 132) == 6 and graph_splits(1, 132) == graph_splits(0, 132) == 8
