"""The attention kernels as they are launched on the GPU: every head width and dtype at its own launch shape, streams of
many splits, pools past 2^31 elements, the same bits however the work is cut.
"""

import numpy as np
import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_cases import BF16, BOUND, F32, FP8, Streams, dense, queries, store, streams

from hybridkv.kernels.attention import decode as decode_file
from hybridkv.kernels.attention import prefill as prefill_file
from hybridkv.kernels.attention.decode import attention_decode, attention_decode_triton
from hybridkv.kernels.attention.exact import attention_exact
from hybridkv.kernels.attention.prefill import attention_prefill, attention_prefill_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages
from hybridkv.kernels.formats.kv_format import Pages

pytestmark = pytest.mark.gpu

KINDS = ((F32, F32), (F32, BF16), (F32, FP8), (BF16, F32), (BF16, BF16), (BF16, FP8))
LONG = [[0, 1, 127, 128], [129, 2048, 2049, 63], [9000, 1, 500, 0], [8192, 8193, 17, 4000], [1, 1, 1, 1]]
# sums of thousands of f32 products
WIDER = {kinds: bound if BF16 in kinds[:1] else 4e-6 for kinds, bound in BOUND.items()}


@pytest.mark.parametrize(("query", "pages"), KINDS)
@pytest.mark.parametrize(
    ("D", "P", "H"),
    ((16, 64, 24), (32, 53, 4), (60, 128, 80), (64, 16, 24), (128, 53, 4), (192, 128, 80), (256, 64, 24), (256, 53, 4)),
)
def test_decode(D: int, P: int, H: int, query: str, pages: str) -> None:
    held = streams(LONG, P, D, pages, "cuda")
    q = queries(len(LONG), H, D, query, "cuda")
    got = attention_decode(q, *held.args, 1.5 * D**-0.5, held.on_device)
    assert got.dtype == q.dtype
    assert_close_rms("float64", dense(q, held, list(range(6)), 1.5 * D**-0.5), got, WIDER[query, pages])


@pytest.mark.parametrize(("query", "pages"), KINDS)
@pytest.mark.parametrize("D", (16, 32, 60, 64, 96, 128, 192, 256))
def test_prefill(D: int, query: str, pages: str) -> None:
    lengths = [[300, 300, 300, 300], [1000, 900, 77, 500], [1, 1, 1, 1], [129, 130, 2000, 64]]
    starts = [0, 300, 377, 378, 442]
    for P, H in ((16, 24), (53, 4), (64, 24), (128, 80)):
        held = streams(lengths, P, D, pages, "cuda")
        q = queries(442, H, D, query, "cuda")
        got = attention_prefill_triton(q, *held.args, starts, 1.5 * D**-0.5, held.on_device)
        assert got.dtype == q.dtype
        assert_close_rms(f"P={P}", dense(q, held, starts, 1.5 * D**-0.5), got, WIDER[query, pages])


@pytest.mark.parametrize("D", (64, 256))
@pytest.mark.parametrize(("query", "pages"), KINDS)
def test_a_row_of_the_exact_form_has_the_same_bits_in_any_batch(query: str, pages: str, D: int) -> None:
    held = streams(LONG, 64, D, pages, "cuda")
    q = queries(5, 24, D, query, "cuda")
    pools, ends, rows = (held.k_pool, held.v_pool), held.on_device, torch.arange(5, device="cuda")
    together = attention_exact(q, *pools, held.table, ends, [*range(6)], 0.1, rows, int(held.lengths.max()))
    # where FP8 is widened, to bf16, that is one rounding more
    bound = 6e-3 if (query, pages) == (BF16, FP8) else WIDER[query, pages]
    assert_close_rms("float64", dense(q, held, list(range(6)), 0.1), together, bound)
    for b in range(5):
        part, longest = slice(b, b + 1), int(held.lengths[b].max())
        for keys in (longest, 4 * longest):
            alone = attention_exact(q[part], *pools, held.table, ends[part], [0, 1], 0.1, rows[part], keys)
            assert_same_bytes(alone, together[part])


@pytest.mark.parametrize("D", (64, 128, 256))
@pytest.mark.parametrize(("query", "pages"), KINDS)
def test_a_prompt_in_chunks_has_the_bits_of_the_whole(query: str, pages: str, D: int) -> None:
    """In one chunk, in unequal ones, and one token at a time; above and below 4096 tokens."""
    T = 4300
    held = streams([[T, T]], 64, D, pages, "cuda")
    q = queries(T, 6, D, query, "cuda")
    whole = attention_prefill_triton(q, *held.args, [0, T], 0.1)

    def part(a: int, b: int) -> Tensor:
        until = np.full_like(held.lengths, b)
        return attention_prefill_triton(q[a:b], held.k_pool, held.v_pool, held.table, until, [0, b - a], 0.1)

    for a, b in ((0, 1), (0, 1000), (1000, 4099), (4099, T), (37, 38), (4095, 4096), (4096, 4097), (T - 1, T)):
        assert_same_bytes(whole[a:b], part(a, b))
    for i in range(0, T, 97):
        assert_same_bytes(whole[i : i + 1], part(i, i + 1))


def test_the_same_call_gives_the_same_bits() -> None:
    held = streams(LONG, 64, 256, BF16, "cuda")
    q = queries(5, 24, 256, BF16, "cuda")
    first = attention_decode(q, *held.args, 0.1)
    assert all(torch.equal(first, attention_decode(q, *held.args, 0.1)) for _ in range(50))


@pytest.mark.parametrize("pages", (F32, BF16, FP8))
def test_decode_is_prefill_of_one_token(pages: str) -> None:
    query = F32 if pages == F32 else BF16
    held = streams([[700, 1], [9000, 128]], 64, 256, pages, "cuda")
    q = queries(2, 12, 256, query, "cuda")
    one = attention_prefill_triton(q, *held.args, [0, 1, 2], 0.0625)
    assert_close_rms("decode", one, attention_decode(q, *held.args, 0.0625), WIDER[query, pages])


def high_pool(shape: tuple[int, int, int], kind: str, used: Tensor, values: Tensor) -> Pages:
    """A pool of which only `used` pages were ever written; the others keep what memory held."""
    new = store(values, kind)
    if isinstance(new, Fp8Pages):
        codes = torch.empty(shape, dtype=torch.uint8, device="cuda")
        scale = torch.empty(shape[:2], device="cuda")
        codes[used], scale[used] = new
        return Fp8Pages(codes, scale)
    pool = torch.empty(shape, dtype=new.dtype, device="cuda")
    pool[used] = new
    return pool


@pytest.mark.parametrize("kind", (F32, BF16, FP8))
def test_pages_past_two_to_the_31_elements(kind: str) -> None:
    """Every page of these streams begins past element 2^31 (2^32 for FP8: past 4 GB in bytes too)."""
    P, D = 64, 256
    first = (2**32 if kind == FP8 else 2**31) // (P * D)
    used = first + 1 + torch.randperm(300, device="cuda")[:40]
    shape = (first + 302, P, D)
    k_pool, v_pool = (high_pool(shape, kind, used, torch.randn(40, P, D, device="cuda")) for _ in range(2))
    table = used.view(2, 2, 10).to(torch.int32)
    held = Streams(k_pool, v_pool, table, np.array([[640, 631], [1, 200]]))
    query = F32 if kind == F32 else BF16
    q = queries(2, 12, D, query, "cuda")
    want = dense(q, held, [0, 1, 2], 0.0625)
    assert_close_rms("decode", want, attention_decode(q, *held.args, 0.0625), WIDER[query, kind])
    prefill = attention_prefill_triton(q, *held.args, [0, 1, 2], 0.0625)
    assert_close_rms("prefill", want, prefill, WIDER[query, kind])
    # where FP8 is widened, to bf16, that is one rounding more
    picked = attention_prefill(q, *held.args, [0, 1, 2], 0.0625)
    assert_close_rms("picked", want, picked, 6e-3 if kind == FP8 else WIDER[query, kind])


def test_the_public_functions_pick_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(
        decode_file,
        "attention_decode_triton",
        lambda *a, **more: ran.append("decode") or attention_decode_triton(*a, **more),
    )
    monkeypatch.setattr(
        prefill_file,
        "attention_prefill_triton",
        lambda *a, **more: ran.append("prefill") or attention_prefill_triton(*a, **more),
    )
    held = streams([[20, 20]], 16, 32, F32, "cuda")
    q = queries(1, 4, 32, F32, "cuda")
    attention_decode(q, *held.args, 0.2)
    attention_prefill(q, *held.args, [0, 1], 0.2)
    assert ran == ["decode", "prefill"]
