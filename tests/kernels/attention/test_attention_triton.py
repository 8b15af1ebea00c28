"""The Triton attention kernels: in the interpreter on the CPU, compiled where there is a CUDA device.

Blocks, splits and shares are small here, so that short streams already have many. tests/gpu runs the real ones.
"""

import numpy as np
import pytest
import torch
from long_form import few
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from torch import Tensor
from triton_cases import BF16, BOUND, F32, FP8, Streams, dense, queries, store, streams
from triton_interpreter import DEVICE

from hybridkv.kernels.activation import sigmoid_mul_ref, sigmoid_mul_triton
from hybridkv.kernels.attention.decode import attention_decode_torch, attention_decode_triton
from hybridkv.kernels.attention.decode_tuning import FEW, SHORT, DecodeShape, decode_shape, same_shape_up_to
from hybridkv.kernels.attention.prefill import attention_prefill_torch, attention_prefill_triton
from hybridkv.kernels.attention.tile import TileShape
from hybridkv.kernels.formats.fp8 import Fp8Pages

pytest.importorskip("triton")

SMALL = TileShape(16, 16, 4, 1)
SHARES = DecodeShape(16, 4, 1, 3)  # 6 programs on the interpreter's 2 multiprocessors
KINDS = ((F32, F32), (F32, BF16), (F32, FP8), (BF16, F32), (BF16, BF16), (BF16, FP8))
LENGTHS = [[0, 1], [1, 31], [32, 33], [100, 15], [16, 0], [70, 17]]


def decode(q: Tensor, held: Streams, scale: float = 0.2, part: slice = slice(None)) -> Tensor:
    return attention_decode_triton(q[part], *held.rows(part), scale, shape=SHARES)


def prefill(q: Tensor, held: Streams, starts: list[int], scale: float = 0.2) -> Tensor:
    return attention_prefill_triton(q, *held.args, starts, scale, shape=SMALL)


@pytest.mark.parametrize(("query", "pages"), KINDS)
def test_decode_is_softmax_attention(query: str, pages: str) -> None:
    held = streams(LENGTHS, 16, 40, pages, DEVICE)
    q = queries(6, 6, 40, query, DEVICE)
    got = decode(q, held)
    assert got.dtype == q.dtype
    assert_close_rms("float64", dense(q, held, list(range(7)), 0.2), got, BOUND[query, pages])
    torch_form = attention_decode_torch(q, *held.args, 0.2)
    assert_close_rms("torch form", torch_form, got, 2 * BOUND[query, pages])  # each has its own rounding


@pytest.mark.long
@few("D, P", (16, 60, 128, 256), (1, 64, 53, 16))
def test_decode_with_any_page_and_head_width(D: int, P: int) -> None:
    for G, group in ((1, 1), (3, 5)):
        held = streams([[33] * G, [65] * G], P, D, F32, DEVICE)
        q = queries(2, G * group, D, F32, DEVICE)
        assert_close_rms("float64", dense(q, held, [0, 1, 2], 0.1), decode(q, held, 0.1), BOUND[F32, F32])


def test_decode_of_more_than_sixteen_query_heads_for_a_kv_head() -> None:
    held = streams([[40], [7]], 16, 32, F32, DEVICE)
    q = queries(2, 20, 32, F32, DEVICE)
    got = attention_decode_triton(q, *held.args, 0.2)
    assert_close_rms("float64", dense(q, held, [0, 1, 2], 0.2), got, BOUND[F32, F32])


@pytest.mark.parametrize("programs", (1, 2, 5, 16, 40))
@pytest.mark.parametrize("least", (1, 3))
def test_decode_in_any_number_of_shares(programs: int, least: int) -> None:
    """More programs than tiles, one for all, and runs that begin at a stream's first tile, inside, and at its last."""
    held = streams([[0, 0], [1, 100], [16, 0], [250, 17], [0, 33], [15, 16]], 64, 16, F32, DEVICE)
    q = queries(6, 4, 16, F32, DEVICE)
    got = attention_decode_triton(q, *held.args, 0.2, shape=DecodeShape(16, 4, 1, programs, least))
    assert_close_rms("float64", dense(q, held, list(range(7)), 0.2), got, BOUND[F32, F32])


@pytest.mark.parametrize("pages", (BF16, FP8))
def test_decode_of_rows_of_a_larger_table_and_its_log_sum_exp(pages: str) -> None:
    """Rows in any order, padding between them: it reads nothing, gives zeros and keeps no log-sum-exp."""
    held = streams([[40, 33], [100, 17], [5, 64]], 16, 32, pages, DEVICE)
    table = torch.full((9, 3, held.table.shape[2]), 2**30, dtype=torch.int32, device=DEVICE)  # far outside the pool
    rows, of = torch.tensor([7, -1, 2, 4, -1], device=DEVICE), [0, 2, 3]
    table[rows[of], 1:] = held.table
    lengths = torch.full((5, 4), 77, device=DEVICE)[:, 1:3]
    lengths[of] = held.on_device
    q, kept = queries(5, 6, 32, BF16, DEVICE), torch.full((6, 6), 9.0, device=DEVICE)
    index = torch.tensor([5, 1, -1, 0, -1], device=DEVICE)
    index[1] = -1
    got = attention_decode_triton(
        q, held.k_pool, held.v_pool, table[:, 1:], None, 0.2, lengths, rows, (kept, index), shape=SHARES
    )
    want = dense(q[of], held, [0, 1, 2, 3], 0.2)
    assert_close_rms("decode", want, got[of], BOUND[BF16, pages])
    assert not got[[1, 4]].any()
    sums = torch.stack(
        [torch.stack([(held.entries(b, h // 3, int(held.lengths[b, h // 3]))[0] @ q[i, h].double() * 0.2).logsumexp(0)
                      for h in range(6)]) for b, i in enumerate(of)]
    )  # fmt: skip
    assert_close_rms("log-sum-exp", sums[[0, 2]], kept[[5, 0]], 1e-5)  # f32 sums of f16 or bf16 products
    assert (kept[1:5] == 9).all()
    other = torch.full_like(kept, 9.0)
    torch_form = attention_decode_torch(
        q, held.k_pool, held.v_pool, table[:, 1:].clamp(max=0), None, 0.2, lengths, rows=rows, lse=(other, index)
    )
    assert not torch_form[[1, 4]].any() and (other[1:5] == 9).all()


@pytest.mark.parametrize(("query", "pages"), ((F32, F32), (BF16, BF16), (BF16, FP8)))
def test_a_gate_on_the_output_has_the_bits_of_its_own_kernel(query: str, pages: str) -> None:
    """Gates lie beside the queries. A row of padding gives zeros, whatever its gate is."""
    held = streams([[40, 33], [100, 17], [5, 0]], 16, 40, pages, DEVICE)
    both = queries(3, 6, 80, query, DEVICE)
    q, gate = both[..., :40].contiguous(), both[..., 40:]
    rows = torch.tensor([0, -1, 2], device=DEVICE)
    gate[1] = torch.nan
    args = (q, *held.args, 0.2, held.on_device)
    for decode, gated in ((attention_decode_triton, sigmoid_mul_triton), (attention_decode_torch, sigmoid_mul_ref)):
        out, got = decode(*args, rows=rows), decode(*args, rows=rows, gate=gate)
        assert got.shape == q.shape and got[0].any() and not out[1].any()
        want = gated(out[[0, 2]], gate[[0, 2]]).view_as(got[::2])
        # numpy's and torch's exp may end otherwise in blocks of another size, which bf16 does not show
        assert_close_rms("f32", want, got[::2], 1e-6) if query == F32 else assert_same_bytes(want, got[::2])
        assert decode is attention_decode_torch or not got[1].any()


@pytest.mark.parametrize("fp8", (False, True))
@pytest.mark.parametrize("B", (1, FEW, FEW + 1))
@pytest.mark.parametrize("room", (SHORT // FEW, SHORT, 8 * SHORT))
def test_streams_up_to_the_reach_of_a_launch_are_launched_alike(room: int, B: int, fp8: bool) -> None:
    """A graph that was captured for one number of keys is replayed for others: its kernels must be those of all."""
    for keys in {min(n, room) for n in (1, SHORT // B, SHORT // B + 1, room)}:
        reach = same_shape_up_to(B, keys, room, fp8)
        assert keys <= reach <= room
        assert decode_shape(B, 256, torch.bfloat16, fp8, keys) == decode_shape(B, 256, torch.bfloat16, fp8, reach)
        assert fp8 or reach == room


@pytest.mark.parametrize("size", (1e-30, 1e30))
def test_fp8_decode_of_queries_and_values_far_from_one(size: float) -> None:
    """Products run in f16: queries and weighted values must be brought into its range."""
    held = streams([[40, 33], [70, 5]], 16, 32, FP8, DEVICE)
    assert isinstance(held.k_pool, Fp8Pages) and isinstance(held.v_pool, Fp8Pages)
    held.k_pool.scale.mul_(1 / size)
    held.v_pool.scale.mul_(size)
    held.v_pool.scale.view(-1)[::3] *= 2.0**-20
    q = (queries(2, 6, 32, F32, DEVICE) * size).to(torch.bfloat16)
    got = decode(q, held).double() / size
    assert_close_rms("float64", dense(q, held, [0, 1, 2], 0.2) / size, got, BOUND[BF16, FP8])


def test_decode_with_lengths_on_the_device_alone() -> None:
    held = streams(LENGTHS, 16, 32, F32, DEVICE)
    q = queries(6, 6, 32, F32, DEVICE)
    k, v, table, lengths = held.args
    got = attention_decode_triton(q, k, v, table, None, 0.2, torch.from_numpy(lengths).to(DEVICE), shape=SHARES)
    assert_same_bytes(decode(q, held), got)


def test_streams_without_entries_give_zeros_and_read_nothing() -> None:
    held = streams([[0, 0], [0, 0]], 16, 32, F32, DEVICE)
    held.table.fill_(2**30)  # a page far outside the pool
    q = queries(2, 4, 32, F32, DEVICE)
    assert not decode(q, held).any()
    assert not prefill(q, held, [0, 1, 2]).any()
    assert decode(q[:0], held, part=slice(0, 0)).shape == (0, 4, 32)


@pytest.mark.parametrize(("query", "pages"), KINDS)
def test_prefill_is_causal_softmax_attention(query: str, pages: str) -> None:
    """History and none, one new token and many, other lengths in every stream."""
    held = streams([[17, 17], [40, 33], [70, 21], [1, 1], [30, 50]], 16, 40, pages, DEVICE)
    starts = [0, 17, 18, 38, 39, 50]
    q = queries(50, 6, 40, query, DEVICE)
    got = prefill(q, held, starts)
    assert got.dtype == q.dtype
    assert_close_rms("float64", dense(q, held, starts, 0.2), got, BOUND[query, pages])
    torch_form = attention_prefill_torch(q, *held.args, starts, 0.2)
    assert_close_rms("torch form", torch_form, got, 2 * BOUND[query, pages])


@pytest.mark.long
@few("D, P", (16, 60, 256), (1, 64, 53))
def test_prefill_with_any_page_and_head_width(D: int, P: int) -> None:
    for G, group in ((1, 1), (2, 5)):
        held = streams([[33] * G, [40] * G], P, D, F32, DEVICE)
        q = queries(12, G * group, D, F32, DEVICE)
        assert_close_rms("float64", dense(q, held, [0, 9, 12], 0.1), prefill(q, held, [0, 9, 12], 0.1), BOUND[F32, F32])


@pytest.mark.parametrize("pages", (F32, BF16, FP8))
def test_a_prompt_in_chunks_has_the_bits_of_the_whole(pages: str) -> None:
    T = 45
    held = streams([[T, T]], 16, 32, pages, DEVICE)
    q = queries(T, 6, 32, F32 if pages == F32 else BF16, DEVICE)
    whole = prefill(q, held, [0, T])
    for bounds in ([0, 19, T], [0, 1, 16, 33, T], list(range(0, T + 1, 5))):
        for a, b in zip(bounds, bounds[1:]):
            until = Streams(held.k_pool, held.v_pool, held.table, np.full_like(held.lengths, b))
            assert_same_bytes(whole[a:b], prefill(q[a:b], until, [0, b - a]))


def test_decode_is_prefill_of_one_token() -> None:
    held = streams([[1, 31], [32, 33], [100, 15]], 16, 32, F32, DEVICE)
    q = queries(3, 6, 32, F32, DEVICE)
    assert_close_rms("decode", prefill(q, held, [0, 1, 2, 3]), decode(q, held), 1e-6)  # the same sums in other blocks


def test_prefill_keeps_requests_apart() -> None:
    held = streams([[40, 40], [40, 40]], 16, 32, F32, DEVICE)
    q = queries(20, 4, 32, F32, DEVICE)
    together = prefill(q, held, [0, 13, 20])
    alone = attention_prefill_triton(q[13:], *held.rows(slice(1, 2)), [0, 7], 0.2, shape=SMALL)
    assert_same_bytes(alone, together[13:])


def test_fp8_pages_stay_near_what_was_put_in() -> None:
    """An E4M3 value is off by 1/16 at most, 2.6 % RMS over an octave; keys and values and the softmax between them."""
    true = streams([[60, 33]], 16, 64, F32, DEVICE)
    k, v = true.k_pool, true.v_pool
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    held = Streams(store(k, FP8), store(v, FP8), true.table, true.lengths)
    q = queries(1, 4, 64, F32, DEVICE)
    error = rel_rms(dense(q, true, [0, 1], 0.125), decode(q, held, 0.125))
    assert 1e-3 < error < 0.1  # and FP8 really was read


def test_a_nan_that_was_stored_is_seen() -> None:
    held = streams([[40], [40]], 16, 32, F32, DEVICE)
    assert isinstance(held.k_pool, Tensor)
    held.k_pool[int(held.table[0, 0, 1]), 3, 5] = torch.nan
    q = queries(2, 2, 32, F32, DEVICE)
    got = decode(q, held)
    assert got[0].isnan().all() and got[1].isfinite().all()


def test_the_bounds_would_see_one_entry_too_few() -> None:
    """Of many requests: a single one's last entry may weigh little."""
    held = streams([[17, 9]] * 16, 16, 32, BF16, DEVICE)
    q = queries(16, 4, 32, BF16, DEVICE)
    short = Streams(held.k_pool, held.v_pool, held.table, held.lengths - 1)
    want = dense(q, held, list(range(17)), 0.2)
    assert rel_rms(want, decode(q, short)) > 5 * BOUND[BF16, BF16] > 5 * rel_rms(want, decode(q, held))


def test_the_table_and_lengths_may_be_slices() -> None:
    """A layer's streams are some columns of the whole table."""
    held = streams([[40, 20, 33, 1], [5, 70, 16, 2]], 16, 32, F32, DEVICE)
    q = queries(2, 4, 32, F32, DEVICE)
    part, lengths = held.table[:, 1:3], held.lengths[:, 1:3]
    on_device = held.on_device[:, 1:3]
    whole = Streams(held.k_pool, held.v_pool, part.contiguous(), np.ascontiguousarray(lengths))
    want = dense(q, whole, [0, 1, 2], 0.2)
    pools = held.k_pool, held.v_pool
    got = attention_decode_triton(q, *pools, part, lengths, 0.2, on_device, shape=SHARES)
    assert_close_rms("decode", want, got, BOUND[F32, F32])
    got = attention_prefill_triton(q, *pools, part, lengths, [0, 1, 2], 0.2, on_device, SMALL)
    assert_close_rms("prefill", want, got, BOUND[F32, F32])
