"""attention_sparse on the GPU, at the released widths: every format and launch against the torch form and float64.

On a Hopper GPU the calls without a shape run attention_sparse_hopper, those with one attention_sparse_kernel.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from hybridkv.kernels.attention.tile import TileShape
from hybridkv.kernels.backend import has_gluon
from hybridkv.kernels.formats.page_format import load_entries_ref, store_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format
from hybridkv.kernels.overlap import FEW_TOKENS
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4 import sparse as file
from hybridkv.kernels.v4.sparse import Entries, attention_sparse, attention_sparse_ref, attention_sparse_triton

pytestmark = pytest.mark.gpu
D, ROPE, WINDOW = 512, 64, 128
F32, BF16 = torch.float32, torch.bfloat16
KINDS = ("bf16", "fp8", "fp8_entry")


def bound(args: tuple[Any, ...]) -> float:
    """Relative RMS. f32: sums of a thousand products. bf16: weights and result are rounded, 2^-9 at most each; so is,
    in fp8_entry, a code times its f32 scale, which moves both scores and values.
    """
    q, fmt = args[0], args[2]
    if q.dtype == F32:
        return 5e-6
    return 6e-3 if fmt.name == "fp8_entry" else 4e-3


@pytest.fixture(autouse=True)
def on_the_gpu() -> Any:
    with torch.device("cuda"):
        yield


def filled(fmt: PageFormat, N: int, P: int) -> Tensor:
    pages = torch.full((N, P, fmt.width * fmt.dtype.itemsize), 255, dtype=torch.uint8).view(fmt.dtype)
    for flat in torch.arange(N * P).split(1 << 16):
        store_entries_ref(pages, fmt, flat, torch.randn(len(flat), D) * 1.5)
    return pages


def case(
    kind: str,
    H: int,
    requests: list[tuple[int, int]],  # positions before, new tokens
    ratio: int | None = 4,
    K: int | None = 512,
    P: int = 32,
    R: int = 128,
    dtype: torch.dtype = BF16,
) -> tuple[Any, ...]:
    fmt, B = entry_format(kind, D, ROPE), len(requests)
    index = StepIndex.make(list(range(B)), [n for n, _ in requests], [n for _, n in requests], "cuda")
    T, longest = len(index.token_to_req), max(sum(request) for request in requests)
    entries = None
    if ratio is not None:
        N = max(-(-(longest // ratio) // P), 1)
        pages = filled(fmt, B * N + 3, P)
        table = torch.randperm(len(pages), dtype=torch.int32)[: B * N].view(B, N)
        chosen = None
        if K is not None:
            visible = (index.positions + 1) // ratio
            order = torch.rand(T, max(longest // ratio, K)).masked_fill_(
                torch.arange(max(longest // ratio, K)) >= visible[:, None], -1
            )
            values, chosen = order.topk(K, dim=1)
            chosen = chosen.masked_fill(values < 0, -1).int()
        entries = Entries(pages, table, ratio, chosen)
    q = torch.randn(T, H + 1, D).to(dtype)[:, :H]
    angle = index.positions[:, None].float() * 10000.0 ** (-torch.arange(ROPE // 2) / (ROPE // 2))
    rows = torch.randperm(B + 2)[:B]
    return (
        q, filled(fmt, B + 2, R), fmt, rows, WINDOW, torch.randn(H), D**-0.5, angle.cos(), angle.sin(), index, entries,
    )  # fmt: skip


def in_float64(args: tuple[Any, ...], token: int) -> Tensor:
    """One token's result [H, D] from the formula."""
    q, ring, fmt, rows, window, sink, scale, cos, sin, index, entries = args
    b, t = int(index.token_to_req[token]), int(index.positions[token])
    seen = torch.arange(max(0, t - window + 1), t + 1)
    keys = load_entries_ref(ring, fmt, rows[b] * ring.shape[1] + seen % ring.shape[1])
    if entries is not None:
        numbers = torch.arange((t + 1) // entries.ratio)
        if entries.chosen is not None:
            numbers = entries.chosen[token].long()
            numbers = numbers[(numbers >= 0) & (numbers < (t + 1) // entries.ratio)]
        P = entries.pages.shape[1]
        flat = entries.table[index.slots[b], numbers // P].long() * P + numbers % P
        keys = torch.cat((keys, load_entries_ref(entries.pages, fmt, flat)))
    keys = keys.double()
    logits = torch.cat((q[token].double() @ keys.T * scale, sink.double()[:, None]), 1)
    o = logits.softmax(1)[:, :-1] @ keys
    kept = fmt.dim - fmt.rope
    pairs = torch.view_as_complex(o[:, kept:].reshape(len(o), -1, 2).contiguous())
    pairs = pairs * torch.complex(cos[token].double(), -sin[token].double())
    return torch.cat((o[:, :kept], torch.view_as_real(pairs).flatten(1)), 1)


def check(args: tuple[Any, ...], got: Tensor) -> None:
    for token in torch.linspace(0, len(got) - 1, min(len(got), 5)).long().tolist():
        assert_close_rms(f"token {token}", in_float64(args, token), got[token], bound(args))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("H", (64, 128))
@pytest.mark.parametrize("B", (1, 8, 64, 128))
def test_decode_over_chosen_entries(kind: str, H: int, B: int) -> None:
    args = case(kind, H, [(4000 + 7 * b, 1) for b in range(B)])
    got = attention_sparse(*args)
    check(args, got)
    assert_close_rms("torch form", attention_sparse_ref(*args), got, bound(args))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("B", (1, 16))
def test_decode_over_all_visible_entries(kind: str, B: int) -> None:
    """Up to 2048 entries, one a page; the last request has none yet."""
    args = case(kind, 128, [*((2**18 - 1 - 5000 * b, 1) for b in range(B)), (20, 1)], ratio=128, K=None, P=1)
    check(args, attention_sparse(*args))


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_a_workspace(kind: str) -> None:
    """Chunks of two requests, the first from position 0; the ring holds the chunk and the window before it."""
    args = case(kind, 64, [(0, 700), (5000, 300)], R=1024)
    got = attention_sparse(*args)
    check(args, got)
    assert_close_rms("torch form", attention_sparse_ref(*args), got, bound(args))


@pytest.mark.parametrize("H", (8, 16, 24, 65))
def test_fewer_heads_than_a_block(H: int) -> None:
    args = case("fp8", H, [(1000, 1), (2, 1), (131, 3)], R=256)
    check(args, attention_sparse(*args))


@pytest.mark.parametrize("kind", ("f32", "fp8"))
def test_f32_queries(kind: str) -> None:
    args = case(kind, 64, [(1000, 1), (300, 2)], R=256, dtype=F32)
    check(args, attention_sparse(*args))


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_layer(kind: str) -> None:
    """As many keys as the window holds, fewer, and one; a ring that has wrapped."""
    args = case(kind, 64, [(n, 1) for n in (0, 1, 62, 63, 64, 126, 127, 128, 129, 5000)], ratio=None, R=135)
    got = attention_sparse(*args)
    for token in range(10):
        assert_close_rms(f"token {token}", in_float64(args, token), got[token], bound(args))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", (1, 64))
def test_a_nan_that_was_stored_is_seen_and_one_that_was_not_is_not(kind: str, splits: int) -> None:
    args = case(kind, 64, [(400, 1), (400, 1)], K=64)
    ring, fmt, entries = args[1], args[2], args[-1]
    unused = torch.ones(len(entries.pages), dtype=torch.bool).index_fill(0, entries.table.flatten().long(), False)
    entries.pages.view(torch.uint8)[unused] = 255
    ring.view(torch.uint8)[~torch.isin(torch.arange(len(ring)), args[3])] = 255
    assert attention_sparse_triton(*args, splits=splits).isfinite().all()
    x = torch.zeros(1, D)
    x[0, 3] = torch.nan
    at = entries.table[0, entries.chosen[0, 5] // 32].long() * 32 + entries.chosen[0, 5] % 32
    store_entries_ref(entries.pages, fmt, at[None], x)
    got = attention_sparse_triton(*args, splits=splits)
    assert got[0, :, 3].isnan().all() and got[1].isfinite().all()


@pytest.mark.parametrize("splits", (1, 4, 64))
def test_every_code_under_any_scale_is_widened_exactly(splits: int) -> None:
    """A token that sees one key and no sink gives that key back."""
    q, ring, fmt, rows, window, sink, scale, cos, sin, index, _ = case("fp8", 64, [(0, 1)] * 4, ratio=None)
    for b, page in enumerate(rows.tolist()):
        raw = ring[page].view(-1)
        codes = ((torch.arange(D - ROPE) + 64 * b) % 256).to(torch.uint8)
        raw[: D - ROPE] = codes.masked_fill(codes % 128 == 127, 0)  # NaN is another test's
        scales = torch.tensor((40, 90, 120, 127, 134, 180, 240), dtype=torch.uint8).roll(b)
        raw[ring.shape[1] * fmt.value_bytes :][:7] = scales
    sink.fill_(-torch.inf)
    ones, zeros = torch.ones_like(cos), torch.zeros_like(sin)
    args = (torch.zeros_like(q), ring, fmt, rows, window, sink, scale, ones, zeros, index, None)
    want = load_entries_ref(ring, fmt, rows * ring.shape[1])
    got = attention_sparse_triton(*args, splits=splits)
    assert torch.equal(want.to(BF16)[:, None].expand_as(got), got)  # whatever sign a zero has


@pytest.mark.parametrize("splits", (1, 4))
def test_sinks_of_any_size(splits: int) -> None:
    args = case("fp8", 64, [(300, 1)])
    sink = args[5]
    sink[:4] = torch.tensor([-torch.inf, -1e30, 1e4, 20.0])
    got, want = attention_sparse_triton(*args, splits=splits), in_float64(args, 0)
    assert (got[0, 2] == 0).all()  # all the weight is the sink's
    assert_close_rms("others", want[[0, 1, 3, 4]], got[0, [0, 1, 3, 4]], bound(args))
    assert_close_rms("a great one", want[3], got[0, 3], 2 * bound(args))


def test_hopper_has_a_kernel_of_its_own() -> None:
    """What it cannot take runs the other one: f32 queries, pages that do not begin at 16 bytes."""
    for kind in KINDS:
        args = case(kind, 64, [(400, 1)], K=64)
        q, ring, fmt, *middle, entries = args
        assert file.suits_hopper(q, fmt, ring, entries.pages) == has_gluon(q.device)
        assert not file.suits_hopper(q.float(), fmt, ring, entries.pages)
        pool = torch.empty(entries.pages.numel() + 8, dtype=fmt.dtype)
        shifted = pool[8 // fmt.dtype.itemsize :][: entries.pages.numel()].view_as(entries.pages).copy_(entries.pages)
        assert not file.suits_hopper(q, fmt, ring, shifted)
        check(args, attention_sparse(q, ring, fmt, *middle, replace(entries, pages=shifted)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    (None, TileShape(64, 32, 8, 1), TileShape(64, 32, 8, 2), TileShape(64, 64, 8, 1), TileShape(16, 32, 4, 1)),
    ids=str,
)
def test_every_launch_gives_the_same(kind: str, shape: TileShape | None) -> None:
    args = case(kind, 64, [(4000, 1), (77, 1)], R=133)
    for splits in (1, 3, 64):  # 3: the join comes early; 64: it does not
        check(args, attention_sparse_triton(*args, shape=shape, splits=splits))


def test_every_launch_gives_the_same_bits_each_time() -> None:
    """Of any length, more launches in a row than fit the GPU at once."""
    args = case("fp8", 128, [(n, 1) for n in (0, 63, 64, 127, 128, 200, 500, 4000) * 8], K=300, R=133)
    want = attention_sparse_triton(*args, splits=1)
    check(args, want)
    for splits in (1, 2, 5):
        first = attention_sparse_triton(*args, splits=splits)
        for _ in range(20):
            assert_same_bytes(first, attention_sparse_triton(*args, splits=splits))
        assert_close_rms(f"{splits} splits", want, first, bound(args))


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_overlap_with_the_kernel_before(kind: str) -> None:
    args = case(kind, 64, [(4000 + b, 1) for b in range(FEW_TOKENS + 1)], R=133)
    for splits in (1, 2, 12):
        check(args, attention_sparse_triton(*args, splits=splits))


@pytest.mark.parametrize(("H", "B"), ((64, 8), (128, 64)))
def test_hostile_rows_and_choices(H: int, B: int) -> None:
    """Padding among real rows, and indices that point nowhere: the real rows see none of it."""
    args = case("fp8", H, [(4000 + b, 1) for b in range(B)])
    q, ring, fmt, rows, window, sink, scale, cos, sin, index, entries = args
    want = attention_sparse(*args)
    chosen = torch.cat((entries.chosen, torch.tensor([[-1, -(2**31), 2**31 - 1, 10**6]]).int().expand(B, 4)), 1)
    index.slots[2], index.positions[2], rows[5] = -1, 2**40, -1
    q[2], q[5], cos[2] = torch.nan, torch.nan, torch.nan
    got = attention_sparse(*args[:10], replace(entries, chosen=chosen))
    assert (got[[2, 5]] == 0).all()
    real = [b for b in range(B) if b not in (2, 5)]
    assert_close_rms("real rows", want[real], got[real], bound(args))  # other splits


def test_one_captured_launch_serves_any_position() -> None:
    args = case("fp8", 64, [(3, 1), (4, 1)], R=128)
    *front, index, entries = args
    big = case("fp8", 64, [(4090, 1), (4090, 1)])
    entries = big[-1]
    args = (*front, index, entries)
    attention_sparse(*args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention_sparse(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_sparse(*args)
    for positions in ([3, 4], [130, 700], [4090, 2]):
        index.positions.copy_(torch.tensor(positions))
        graph.replay()
        assert_same_bytes(attention_sparse(*args), out)
        check(args, out)


def test_pools_past_two_billion_bytes() -> None:
    """The last page of a pool of 2.4 GB, and the last slot of a ring as large."""
    args = case("fp8", 64, [(300, 1)])
    q, ring, fmt, rows, *middle, index, entries = args
    want = attention_sparse(*args)
    far = torch.zeros(2**17, *entries.pages.shape[1:], dtype=torch.uint8)
    far[-len(entries.pages) :] = entries.pages
    wide = torch.zeros(2**15, *ring.shape[1:], dtype=torch.uint8)
    wide[-len(ring) :] = ring
    moved = replace(entries, pages=far, table=entries.table + len(far) - len(entries.pages))
    got = attention_sparse(q, wide, fmt, rows + len(wide) - len(ring), *middle, index, moved)
    assert_same_bytes(want, got)


def test_the_public_function_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    kernel = file.attention_sparse_triton

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return kernel(*args)

    monkeypatch.setattr(file, "attention_sparse_triton", counted)
    attention_sparse(*case("bf16", 64, [(5, 1)]))
    assert calls
