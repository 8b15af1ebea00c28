"""index_logits and top_entries on the GPU: real widths in every format, past 2^31 elements, and in a captured graph.
The small cases are in tests/kernels/test_indexer.py and test_topk.py, which run here too, compiled.
"""

from typing import Any

import pytest
import torch
from numerics import assert_close_rms
from torch import Tensor

from hybridkv.kernels.backend import has_gluon
from hybridkv.kernels.formats.page_format import store_entries_ref
from hybridkv.kernels.formats.page_layout import index_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.topk import top_entries, top_entries_ref
from hybridkv.kernels.v4.indexer import (
    DECODE,
    SHAPES,
    IndexerShape,
    index_logits,
    index_logits_ref,
    index_logits_triton,
    suits_hopper,
)

pytestmark = pytest.mark.gpu
H, D, P, RATIO = 64, 128, 32, 4  # DeepSeek-V4-Flash
BOUND = 2e-6  # exact products, f32 sums in another order: a few 2^-24
NAMES = ("f32", "bf16", "fp8", "mxfp4", "nvfp4")
HOPPER = torch.cuda.is_available() and has_gluon(torch.device("cuda"))


@pytest.fixture(autouse=True)
def on_the_gpu() -> Any:
    with torch.device("cuda"):
        yield


def logits_of(kind: str, T: int, width: int) -> Tensor:
    match kind:
        case "constant":
            return torch.full((T, width), 0.25)
        case "few values":
            return torch.randint(0, 4, (T, width)).float()
        case "rising":
            return torch.arange(width).float().expand(T, -1).contiguous()
        case "falling":
            return -torch.arange(width).float().expand(T, -1).contiguous()
        case "one block stands out":
            x = torch.randn(T, width)
            x[:, width // 3 : width // 3 + 2000] += 100
            return x
        case "infinities and NaN":
            x = torch.randn(T, width)
            x[:, 7::100], x[:, 9::50], x[:, 11::1000] = torch.inf, -torch.inf, torch.nan
            return x
    return torch.randn(T, width) * 3


KINDS = ("random", "constant", "few values", "rising", "falling", "one block stands out", "infinities and NaN")


@pytest.mark.parametrize("k", (1, 8, 512, 1024))
@pytest.mark.parametrize("width", (600, 4096, 4097, 8193, 32768, 32769, 65536, 262143, 262144))
def test_top_entries_of_every_width(width: int, k: int) -> None:
    for kind in KINDS:
        x = logits_of(kind, 6, width)
        visible = torch.tensor([width, width - 1, width // 2 + 1, 513, min(k, width), 0])
        got, want = top_entries(x, visible, k), top_entries_ref(x, visible, k)
        assert torch.equal(got, want), kind


@pytest.mark.parametrize("T, width", ((64, 65536), (4096, 16384), (300, 40000)))
def test_top_entries_of_many_rows(T: int, width: int) -> None:
    x = torch.randn(T, width)
    visible = torch.randint(0, width + 1, (T,))
    visible[0] = width
    assert torch.equal(top_entries(x, visible, 512), top_entries_ref(x, visible, 512))


def test_top_entries_past_two_billion_logits() -> None:
    T, width = 8200, 262144
    x, visible = torch.empty(T, width), torch.zeros(T, dtype=torch.int64)
    x[-1], visible[-1] = torch.randn(width), width
    got = top_entries(x, visible, 512)
    assert torch.equal(got[-1:], top_entries_ref(x[-1:], visible[-1:], 512))
    assert (got[:-1] == -1).all()


class Cache:
    """Requests of `entries` keys each, in random pages among hostile ones."""

    def __init__(self, name: str, entries: list[int], P: int = P) -> None:
        self.fmt = index_format(name, D)
        held = [-(-n // P) for n in entries]
        shape = (sum(held) + 3, P, self.fmt.width)
        self.pages = torch.full(shape, torch.nan if self.fmt.plain else 255, dtype=self.fmt.dtype)
        self.table = torch.full((len(entries) + 2, max(held) + 1), -1, dtype=torch.int32)
        free = torch.randperm(len(self.pages))
        for b, (n, count) in enumerate(zip(entries, held)):
            own, free = free[:count], free[count:]
            self.table[b + 1, :count] = own.int()
            store_entries_ref(
                self.pages, self.fmt, (own[:, None] * P + torch.arange(P)).view(-1)[:n], torch.randn(n, D)
            )


def check(name: str, entries: list[int], counts: list[int], dtype: torch.dtype, shape: Any = None) -> None:
    """Each request's last `counts` tokens; slots are 1, 2, ..."""
    cache = Cache(name, entries)
    begins = [n * RATIO + 2 - count for n, count in zip(entries, counts)]
    index = StepIndex.make(list(range(1, len(entries) + 1)), begins, counts, "cuda")
    T, width = len(index.token_to_req), max(entries)
    q, weights = torch.randn(T, H, D).to(dtype), torch.randn(T, H) * 0.01
    args = (q, weights, cache.pages, cache.fmt, cache.table, index, RATIO, width, 0)
    got = index_logits_triton(*args, shape=shape) if shape else index_logits(*args)
    seen = torch.arange(width) < ((index.positions + 1) // RATIO)[:, None]
    want = index_logits_ref(*args)
    assert_close_rms(name, want.where(seen, 0.0), got.where(seen, 0.0), BOUND)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(
    "entries, counts",
    (([65536], [1]), ([5000] * 9 + [1, 20001], [1] * 11), ([2100], [700]), ([900, 40, 3333], [300, 1, 130])),
)
def test_index_logits(entries: list[int], counts: list[int], dtype: torch.dtype, name: str) -> None:
    check(name, entries, counts, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES[1:])
def test_every_launch_configuration(name: str, shape: IndexerShape) -> None:
    check(name, [3000, 77, 1111], [130, 1, 65], torch.bfloat16, shape)


@pytest.mark.skipif(not HOPPER, reason="the kernel is for Hopper GPUs")
@pytest.mark.parametrize("page, heads", ((32, 64), (96, 40), (64, 1)))
@pytest.mark.parametrize("name", ("fp8", "mxfp4"))
def test_hopper_gives_what_other_cards_give(name: str, page: int, heads: int) -> None:
    """One token a request, among padding; strided queries; the same bits again; a NaN of one key is its alone."""
    entries = [3000, 63, 64, 129, 20001]
    cache = Cache(name, entries, page)
    index = StepIndex.make([1, 2, -1, 3, 4, 5], [12001, 252, 2**40, 256, 516, 80007], [1] * 6, "cuda")
    q = torch.randn(6, heads + 3, D).bfloat16()[:, :heads]
    q[2] = torch.nan
    q[4] *= 2.0**-80  # f16 alone would not hold it
    weights = torch.randn(6, heads) * 0.01
    args = (q, weights, cache.pages, cache.fmt, cache.table, index, RATIO, max(entries), 0)
    assert suits_hopper(q, cache.pages, cache.fmt)
    seen = (torch.arange(max(entries)) < ((index.positions + 1) // RATIO)[:, None]) & (index.token_slots >= 0)[:, None]
    want, plain = index_logits_triton(*args, shape=DECODE), index_logits_ref(*args)
    got = index_logits(*args)
    for t in (0, 1, 3, 4, 5):
        assert_close_rms(f"other cards, row {t}", want[t, seen[t]], got[t, seen[t]], BOUND)
        assert_close_rms(f"reference, row {t}", plain[t, seen[t]], got[t, seen[t]], BOUND)
    for _ in range(20):
        assert torch.equal(index_logits(*args)[seen], got[seen])
    at = cache.table[5, 777 // page].item()
    byte = 777 % page * D + 5 if name == "fp8" else page * D // 2 + 777 % page * 4 + 1  # a code; a scale
    cache.pages.view(len(cache.pages), -1)[at, byte] = 0x7F if name == "fp8" else 0xFF
    assert (index_logits(*args).isnan() & seen).nonzero().tolist() == [[5, 777]]


@pytest.mark.skipif(not HOPPER, reason="the kernel is for Hopper GPUs")
@pytest.mark.parametrize("name", ("fp8", "mxfp4"))
def test_hopper_leaves_other_layouts_to_other_kernels(name: str) -> None:
    q = torch.randn(2, 65, D).bfloat16()
    pages = Cache(name, [100], 32).pages
    fmt = index_format(name, D)
    assert suits_hopper(q[:, :64], pages, fmt)
    assert not suits_hopper(q, pages, fmt) and not suits_hopper(q[:, :64].float(), pages, fmt)
    assert not suits_hopper(q[:, :64], Cache(name, [100], 16).pages, fmt) and not suits_hopper(
        q[:, :64], pages[:0], fmt
    )
    odd = torch.randn(2 * 64 * D + 1).bfloat16()[1:].view(2, 64, D)
    assert not suits_hopper(odd, pages, fmt)


def test_index_logits_past_two_billion() -> None:
    T, width = 8200, 262144
    cache = Cache("fp8", [300])
    index = StepIndex.make([-1] * (T - 1) + [1], [2**40] * (T - 1) + [1200], [1] * T, "cuda")
    q, weights = torch.randn(T, H, D).bfloat16(), torch.randn(T, H)
    got = index_logits(q, weights, cache.pages, cache.fmt, cache.table, index, RATIO, width, 0)[-1:, :300]
    one = StepIndex.make([1], [1200], [1], "cuda")
    args = (cache.pages, cache.fmt, cache.table, one, RATIO, 300, 0)
    assert_close_rms("last row", index_logits_ref(q[-1:], weights[-1:], *args), got, BOUND)


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_serves_every_position(name: str) -> None:
    """Captured with hostile padding; replayed at other positions, with other slots."""
    entries, k = [40000, 900, 20], 512
    cache = Cache(name, entries)
    index = StepIndex.make([-1] * 4, [2**40] * 4, [1] * 4, "cuda")
    q, weights = torch.randn(4, H, D).bfloat16(), torch.randn(4, H)
    args = (q, weights, cache.pages, cache.fmt, cache.table, index, RATIO, max(entries), k)
    visible = torch.zeros(4, dtype=torch.int64)

    def step() -> Tensor:
        return top_entries(index_logits(*args), visible, k)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for slots, seen in (([1, 2, 3, -1], entries), ([3, -1, 1, 2], [11, 0, 39999, 513]), ([2, 1, -1, -1], [512, 8193])):
        index.slots.copy_(torch.tensor(slots))
        n = torch.tensor([*seen, 0, 0][:4])
        visible.copy_(n)
        index.positions.copy_(torch.where(index.slots < 0, 2**40, n * RATIO))
        held = torch.cuda.memory_allocated()
        graph.replay()
        assert torch.cuda.memory_allocated() == held
        # on the kernel's own logits: against the reference's, a near tie may fall either way
        assert torch.equal(out, top_entries_ref(index_logits(*args), visible, k))
        ref = top_entries_ref(index_logits_ref(*args), visible, k)
        for got, want in zip(out.tolist(), ref.tolist()):
            assert len(set(got) & set(want)) >= len(set(want)) - 2
