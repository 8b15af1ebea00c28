"""Attention over pages against its definition in float64 and against the references in the package.

Bounds are relative RMS. f32: sums of up to 256 products and 300 weights in f32 (2^-24 each) stay below 2e-6. A bf16
result is rounded once for each tile and once at the end (2^-9, 1.2e-3 RMS); with bf16 keys torch's kernel rounds the
weights too.
"""

import numpy as np
import pytest
import torch
from long_form import few
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from paged import LAYOUTS, Paged, dense, edge_lengths, paged
from torch import Tensor

from hybridkv.kernels.attention.decode import attention_decode, attention_decode_ref
from hybridkv.kernels.attention.prefill import attention_prefill, attention_prefill_ref

F32, BF16 = torch.float32, torch.bfloat16
TILE = 16
BOUND = {(F32, F32): 2e-6, (F32, BF16): 2e-6, (BF16, F32): 3e-3, (BF16, BF16): 6e-3}  # (query, pool)


def spread(lengths: list[int], G: int) -> list[list[int]]:
    """Streams of one request that hold different numbers of entries, as after eviction by head."""
    return [[lengths[(b + g) % len(lengths)] for g in range(G)] for b in range(len(lengths))]


def queries(T: int, heads: int, D: int, dtype: torch.dtype) -> Tensor:
    """A slice of a wider row, as a fused projection gives it."""
    return torch.randn(T, heads + 4, D).to(dtype)[:, 2 : 2 + heads]


def check_decode(held: Paged, q: Tensor, bound: float, tile: int = TILE) -> None:
    scale = 1.5 * q.shape[-1] ** -0.5
    got = attention_decode(q, *held.args, scale, key_tile=tile)
    assert got.dtype == q.dtype
    assert_close_rms("float64", dense(q, held, list(range(len(q) + 1)), scale), got, bound)
    assert_close_rms("reference", attention_decode_ref(q, *held.args, scale), got, bound)


@pytest.mark.long
@few("D, P", (32, 64, 100, 256), (64, 1, 53, 2))
def test_decode_is_softmax_attention(D: int, P: int) -> None:
    for G, group in LAYOUTS:
        held = paged(spread(edge_lengths(P, TILE), G), P, D)
        check_decode(held, queries(len(held.lengths), G * group, D, F32), BOUND[F32, F32])


@pytest.mark.parametrize("pool", (F32, BF16))
@pytest.mark.parametrize("query", (F32, BF16))
def test_decode_in_every_mix_of_dtypes(query: torch.dtype, pool: torch.dtype) -> None:
    for tile in (16, 64, 2048):
        held = paged(spread(edge_lengths(53, 64), 2), 53, 64, pool)
        check_decode(held, queries(len(held.lengths), 6, 64, query), BOUND[query, pool], tile)


def chunks(lengths: list[int]) -> list[int]:
    """How many of each request's entries are new: all, one, half, all but one, ..."""
    return [max(1, (n, 1, n // 2, n - 1)[i % 4]) for i, n in enumerate(lengths)]


def prefill_case(
    lengths: list[list[int]], P: int, D: int, group: int, query: torch.dtype = F32, pool: torch.dtype = F32
) -> tuple[Paged, Tensor, list[int]]:
    held = paged(lengths, P, D, pool)
    new = chunks([min(row) for row in lengths])
    starts = [0, *np.cumsum(new).tolist()]
    return held, queries(starts[-1], len(lengths[0]) * group, D, query), starts


def check_prefill(held: Paged, q: Tensor, starts: list[int], bound: float, tile: int = TILE) -> None:
    scale = 1.5 * q.shape[-1] ** -0.5
    got = attention_prefill(q, *held.args, starts, scale, key_tile=tile)
    assert got.dtype == q.dtype
    assert_close_rms("float64", dense(q, held, starts, scale), got, bound)
    assert_close_rms("reference", attention_prefill_ref(q, *held.args, starts, scale), got, bound)


@pytest.mark.long
@few("D, P", (32, 64, 100, 256), (64, 53, 1, 2))
def test_prefill_is_causal_softmax_attention(D: int, P: int) -> None:
    layouts = LAYOUTS if D == 64 else LAYOUTS[:1] + LAYOUTS[3:4]
    for G, group in layouts:
        check_prefill(*prefill_case([[n] * G for n in edge_lengths(P, TILE)], P, D, group), BOUND[F32, F32])


@pytest.mark.parametrize("tile", (16, 64, 2048))
def test_prefill_of_more_queries_than_run_in_one_block(tile: int) -> None:
    """Blocks of queries end at 128, at pages and tiles, and between them; with history and without."""
    for lengths in ([[127, 127], [128, 128]], [[129, 129], [300, 300]], [[257, 290]]):
        check_prefill(*prefill_case(lengths, 53, 32, 3), BOUND[F32, F32], tile)
        whole = paged(lengths, 64, 32)
        n = [min(row) - 1 for row in lengths]
        starts = [0, *np.cumsum(n).tolist()]
        check_prefill(whole, queries(starts[-1], 2, 32, F32), starts, BOUND[F32, F32], tile)


@pytest.mark.parametrize("P", (2, 53))
def test_prefill_when_every_head_holds_another_number_of_entries(P: int) -> None:
    for G, group in LAYOUTS[2:]:
        case = prefill_case(spread([20, 21, 53, 54, 37], G), P, 64, group)
        check_prefill(*case, BOUND[F32, F32])


@pytest.mark.parametrize("pool", (F32, BF16))
@pytest.mark.parametrize("query", (F32, BF16))
def test_prefill_in_every_mix_of_dtypes(query: torch.dtype, pool: torch.dtype) -> None:
    for tile in (16, 2048):
        case = prefill_case(spread([17, 64, 65, 100], 2), 53, 64, 3, query, pool)
        check_prefill(*case, BOUND[query, pool], tile)


def test_decode_is_prefill_of_one_token() -> None:
    held = paged(spread([1, 15, 16, 17, 70], 2), 5, 64)
    q = queries(5, 6, 64, F32)
    one = attention_prefill(q, *held.args, list(range(6)), 0.125, key_tile=TILE)
    decode = attention_decode(q, *held.args, 0.125, key_tile=TILE)
    assert_close_rms("decode", one, decode, 1e-6)  # the same sums in other blocks


@pytest.mark.parametrize("tile", (16, 64, 2048))
def test_a_request_gets_the_same_result_alone(tile: int) -> None:
    held = paged(spread([1, 15, 16, 17, 33, 70], 2), 7, 64)
    q = queries(6, 6, 64, F32)
    together = attention_decode(q, *held.args, 0.125, key_tile=tile)
    for b in range(6):
        alone = attention_decode(q[b : b + 1], *held.only(b), 0.125, key_tile=tile)
        assert_close_rms(f"decode, request {b}", alone, together[b : b + 1], 1e-6)  # 2^-24 times a few sums
    new = chunks([int(n) for n in held.lengths.min(1)])
    starts = [0, *np.cumsum(new).tolist()]
    q = queries(starts[-1], 6, 64, F32)
    together = attention_prefill(q, *held.args, starts, 0.125, key_tile=tile)
    for b in range(6):
        part = slice(starts[b], starts[b + 1])
        alone = attention_prefill(q[part], *held.only(b), [0, new[b]], 0.125, key_tile=tile)
        assert_close_rms(f"prefill, request {b}", alone, together[part], 1e-6)


@pytest.mark.parametrize("cuts", ((1,), (16,), (5, 6, 40), (64,), (99,), tuple(range(1, 100, 7))))
def test_a_prompt_in_chunks_equals_the_whole(cuts: tuple[int, ...]) -> None:
    T, G, D, P = 100, 2, 64, 16
    held, q = paged([[T] * G], P, D), queries(T, 6, D, F32)
    whole = attention_prefill(q, *held.args, [0, T], 0.125, key_tile=TILE)
    bounds = [0, *cuts, T]
    for a, b in zip(bounds, bounds[1:]):
        future = paged_until(held, b)
        part = attention_prefill(q[a:b], *future.args, [0, b - a], 0.125, key_tile=TILE)
        assert_close_rms(f"{a}..{b}", whole[a:b], part, 2e-6)  # f32, tiles cut at other places


def paged_until(held: Paged, end: int) -> Paged:
    """The same pages while the entries from `end` on are still unwritten."""
    P = held.k_pool.shape[1]
    k_pool, v_pool = held.k_pool.clone(), held.v_pool.clone()
    for g in range(held.table.shape[1]):
        for i in range(end, int(held.lengths[0, g])):
            page = int(held.table[0, g, i // P])
            k_pool[page, i % P] = v_pool[page, i % P] = torch.nan
    return Paged(k_pool, v_pool, held.table, np.full_like(held.lengths, end), held.k, held.v)


def test_the_same_call_gives_the_same_bits() -> None:
    held = paged(spread([1, 15, 16, 17, 70], 2), 5, 64)
    q = queries(5, 6, 64, F32)
    first = attention_decode(q, *held.args, 0.125, key_tile=TILE)
    for _ in range(20):
        assert_same_bytes(first, attention_decode(q, *held.args, 0.125, key_tile=TILE))


@pytest.mark.parametrize("mistake", ({"shift": -1}, {"wrong_heads": True}))
def test_the_bounds_would_see_a_mistake(mistake: dict) -> None:
    """Guard: one key too few for each query, or query heads on the wrong KV head, is far outside every bound."""
    held, q, starts = prefill_case([[n] * 2 for n in (30, 40, 50, 97)], 16, 64, 3)
    wrong = dense(q, held, starts, 0.125, **mistake)
    wrong = torch.where(wrong.isnan(), 0.0, wrong)  # the first query of a prompt then sees nothing
    got = attention_prefill(q, *held.args, starts, 0.125, key_tile=TILE)
    assert rel_rms(wrong, got) > 10 * max(BOUND.values())


@pytest.mark.parametrize("stream", (0, 1))
def test_the_bounds_would_see_one_entry_too_few_in_one_stream(stream: int) -> None:
    held = paged([[33, 70], [70, 33]], 16, 64)
    q = queries(2, 6, 64, F32)
    short = held.lengths.copy()
    short[0, stream] -= 1
    got = attention_decode(q, held.k_pool, held.v_pool, held.table, short, 0.125, key_tile=TILE)
    assert rel_rms(dense(q, held, [0, 1, 2], 0.125), got) > 100 * BOUND[F32, F32]
