"""Exact mode's products on a Hopper GPU: one bit pattern for any number of rows, any tile and any company."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expert_parts import in_parts, summed_parts
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from hybridkv.kernels.backend import has_gluon
from hybridkv.kernels.linear import exact
from hybridkv.kernels.linear.exact import FEW, MANY, linear_exact, linear_hopper
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.moe.expert_loop import loop_experts
from hybridkv.kernels.row_ops import route_exact, run_experts_exact
from hybridkv.parallel.shard import spans

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
EVERY = [*(tiles for pair in FEW.values() for tiles in pair), *MANY]
# (rows of W, columns): widths of a 27B model, and odd ones
SHAPES = [(5120, 17408), (14336, 5120), (5120, 6144), (304, 72), (301, 1096), (65, 4168), (64, 8), (1040, 9000)]
BOUND = 3e-3  # one rounding of the result to bf16


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not has_gluon(torch.device("cuda")):
        pytest.skip("the kernel is written for Hopper GPUs, in one Triton's Gluon")


def drawn(T: int, N: int, K: int, spread: int = 0) -> tuple[Tensor, Tensor]:
    """x [T, K] and W [N, K], NaN before and behind each; `spread`: powers of two over which factors vary."""
    wide = torch.full((T + 2, K + 16), torch.nan, device="cuda", dtype=torch.bfloat16)
    matrix = torch.full((N + 128, K), torch.nan, device="cuda", dtype=torch.bfloat16)
    x, w = wide[1:-1, 8:-8], matrix[64:-64]
    for part in (x, w):
        sizes = torch.exp2(torch.randint(-spread, spread + 1, part.shape, device="cuda").float())
        part.copy_(torch.randn(part.shape, device="cuda") * sizes / K**0.25)
    return x, w


def assert_same_among_any_rows(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """-> what each row gives alone."""
    want = torch.cat([product(row) for row in x.split(1)])
    for T in ROWS:
        for a in {0, (len(x) - T) // 2, len(x) - T}:
            assert_same_bytes(want[a : a + T], product(x[a : a + T]))
    return want


@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_among_any_rows(N: int, K: int) -> None:
    x, w = drawn(1000, N, K)
    bias = torch.randn(N, device="cuda", dtype=torch.bfloat16) if N % 2 else None
    want = assert_same_among_any_rows(lambda rows: linear_exact(rows, w, bias), x)
    exactly = x[:64].double() @ w.double().T + (0 if bias is None else bias.double())
    assert_close_rms("product", exactly, want[:64], BOUND)
    x[500] = torch.nan  # nor does what the others hold
    got = linear_exact(x, w, bias)
    assert got[500].isnan().all()
    assert_same_bytes(want[:500], got[:500])
    assert_same_bytes(want[501:], got[501:])


@pytest.mark.parametrize("wide", [False, True])
def test_columns_that_are_divided_by_the_number_of_rows_are_seen(wide: bool) -> None:
    """The comparison above with the mistake made on purpose: two sums of half the columns each for few rows."""
    x, w = drawn(1000, 1024, 4096, 20 if wide else 0)

    def product(rows: Tensor) -> Tensor:
        pieces = 2 if len(rows) <= 64 else 1
        parts = zip(rows.chunk(pieces, 1), w.chunk(pieces, 1), strict=True)
        return sum(torch.mm(a, b.t(), out_dtype=torch.float32) for a, b in parts).bfloat16()  # type: ignore

    with pytest.raises(AssertionError, match="differ"):
        assert_same_among_any_rows(product, x)


@pytest.mark.parametrize(("N", "K"), [(34816, 5120), (640, 72), (334, 1096)])
def test_gates_and_ups_have_the_same_bits_among_any_rows(N: int, K: int) -> None:
    x, w = drawn(1000, N, K)
    layer = Linear(w, torch.randn(N, device="cuda", dtype=torch.bfloat16) if N < 1000 else None, exact=True)
    want = assert_same_among_any_rows(layer.gated, x)
    gate, up = (x[:64].double() @ w.double().T + (0 if layer.bias is None else layer.bias.double())).chunk(2, -1)
    assert_close_rms("gated", F.silu(gate) * up, want[:64], BOUND)


@pytest.mark.parametrize("spread", [0, 20])
@pytest.mark.parametrize(("N", "K"), [(304, 1000), (301, 1096), (5120, 6144)])
def test_every_tile_gives_the_same_bits(N: int, K: int, spread: int) -> None:
    """Also where factors differ so much in size that every rounding of a sum shows."""
    x, w = drawn(300, N, K, spread)
    want = torch.cat([linear_hopper(row, w, tiles=EVERY[0]) for row in x.split(1)])
    for tiles in EVERY:
        for part in (slice(0, 300), slice(299, 300), slice(7, 8 + tiles.BT), slice(3, 3 + tiles.BT)):
            assert_same_bytes(want[part], linear_hopper(x[part], w, tiles=tiles))


@pytest.mark.parametrize(
    ("dtype", "D", "I"), [(torch.bfloat16, 2048, 512), (torch.bfloat16, 192, 72), (torch.float32, 128, 64)]
)
def test_experts_have_the_same_bits_among_any_tokens(dtype: torch.dtype, D: int, I: int) -> None:
    """Few rows for each expert, and many: tiles of both kinds."""
    E, k, T = 16, 4, 700
    x = torch.randn(T, D, device="cuda").to(dtype)
    gate_up, down = (torch.randn(E, *s, device="cuda").to(dtype) / s[1] ** 0.5 for s in ((2 * I, D), (D, I)))
    weights, chosen = route_exact(torch.randn(T, E, device="cuda"), k, False)
    tokens = zip(x.split(1), weights.split(1), chosen.split(1), strict=True)
    want = torch.cat([run_experts_exact(*token, gate_up, down) for token in tokens])
    looped = loop_experts(x[:50].float(), weights[:50], chosen[:50], gate_up.float(), down.float())
    assert_close_rms("experts", looped.double(), want[:50], 1e-5 if dtype == torch.float32 else 8e-3)  # rounded twice
    for n in (2, 7, 33, 64, 65, 130, 500, 700):
        for a in {0, T - n}:
            part = slice(a, a + n)
            assert_same_bytes(want[part], run_experts_exact(x[part], weights[part], chosen[part], gate_up, down))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run_experts_exact(x, weights, chosen, gate_up, down)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bytes(want, got)


@pytest.mark.parametrize(
    ("dtype", "D", "I"), [(torch.bfloat16, 2048, 512), (torch.bfloat16, 200, 104), (torch.float32, 101, 69)]
)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_experts_in_parts_have_the_bits_of_the_whole(dtype: torch.dtype, D: int, I: int, size: int) -> None:
    """As ranks compute them: parts of any width, with few rows for each expert and many."""
    E, k = 16, 4
    gate_up, down = (torch.randn(E, *s, device="cuda").to(dtype) / s[1] ** 0.5 for s in ((2 * I, D), (D, I)))
    inner, outputs = ([end - begin for begin, end in spans(width, size)] for width in (I, D))
    for T in (1, 7, 130, 700):
        x = torch.randn(T, D, device="cuda").to(dtype)
        made = x, *route_exact(torch.randn(T, E, device="cuda"), k, False), gate_up, down
        want = run_experts_exact(*made)
        assert_same_bytes(want, in_parts(*made, inner, outputs))
        assert not torch.equal(want, summed_parts(*made, inner))


def test_rows_that_begin_anywhere_and_weights_that_do() -> None:
    """The copy engine reads from every 16th byte on; what begins elsewhere is copied first, and the bits stay."""
    x, w = drawn(33, 320, 520)
    want = linear_exact(x, w)
    for offset in (1, 3, 8):
        flat = torch.empty(33 * 520 + offset, device="cuda", dtype=torch.bfloat16)[offset:].view(33, 520)
        matrix = torch.empty(320 * 520 + offset, device="cuda", dtype=torch.bfloat16)[offset:].view(320, 520)
        flat.copy_(x)
        matrix.copy_(w)
        assert_same_bytes(want, linear_exact(flat, matrix))
        assert_same_bytes(want[:1], linear_exact(flat[:1], matrix))
    assert_same_bytes(want[:1].expand(5, -1), linear_exact(x[:1].expand(5, -1), w))
    assert_same_bytes(want, linear_exact(x.T.contiguous().T, w))
    assert linear_exact(x[:0], w).shape == (0, 320)


@pytest.mark.parametrize("T", [1, 16, 64, 200])
def test_a_chain_in_graphs_on_two_streams_gives_the_bits_of_one_kernel_at_a_time(T: int) -> None:
    """Kernels start before the one before has ended."""
    up, down = drawn(T, 6144, 5120)[1], drawn(T, 5120, 6144)[1]
    start = drawn(T, 64, 5120)[0].contiguous()

    def run(x: Tensor, stop: bool) -> Tensor:
        for _ in range(6):
            for w in (up, down):
                x = linear_exact(x, w)
                x = x * (1 / x.float().norm(dim=-1, keepdim=True) * 70).bfloat16()  # kernels of torch's in between
                if stop:
                    torch.cuda.synchronize()
        return x

    want = run(start, True)
    streams, graphs, got = [torch.cuda.Stream() for _ in range(2)], [], []
    for _ in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got.append(run(start, False))
        graphs.append(graph)
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for found in got:
        assert_same_bytes(want, found)


def test_a_replay_allocates_nothing() -> None:
    x, w = drawn(300, 5120, 6144)
    linear_exact(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear_exact(x, w)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_what_the_kernel_is_not_for_keeps_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By dtype and the weight's shape alone."""
    taken: list[int] = []
    monkeypatch.setattr(exact, "linear_hopper", lambda x, *args: taken.append(len(x)) or linear_hopper(x, *args))
    for dtype, N, K in ((torch.float32, 128, 64), (torch.bfloat16, 128, 63), (torch.bfloat16, 63, 64)):
        x, w = torch.randn(9, K, device="cuda").to(dtype), torch.randn(N, K, device="cuda").to(dtype)
        assert_close_rms("product", x.double() @ w.double().T, linear_exact(x, w), BOUND)
    assert not taken
    x, w = drawn(9, 64, 64)
    linear_exact(x, w)
    assert taken == [9]
