"""append, compact, window_scores and FP8 on the GPU: the public functions run the kernels, at real sizes and past 2^31
elements. The small cases are in tests/kernels/test_triton_*, which run here too, compiled.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from hybridkv.kernels.attention import append as append_file
from hybridkv.kernels.attention.append import append, append_ref
from hybridkv.kernels.eviction import compact as compact_file
from hybridkv.kernels.eviction import score as score_file
from hybridkv.kernels.eviction.compact import compact, compact_ref, compact_triton
from hybridkv.kernels.eviction.score import CONFIGS, TENSOR_CORES, ScoreBlocks, window_scores, window_scores_triton
from hybridkv.kernels.formats import fp8 as quant_file
from hybridkv.kernels.formats.fp8 import Fp8Pages, fp8_decode, fp8_encode, fp8_encode_ref
from hybridkv.kernels.formats.kv_format import Pages

pytestmark = pytest.mark.gpu
KINDS = ("f32", "bf16", "fp8")
G, D, P = 4, 256, 64  # Qwen3.5-27B
BOUND = 1e-5  # f32 sums of exact products: errors of a few 2^-24 in a score, which a weight takes over


@pytest.fixture(autouse=True)
def on_the_gpu() -> Any:
    with torch.device("cuda"):
        yield


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], list[str]]:
    """`count(file, name)`: a list that grows with every call of that function."""

    def watch(file: ModuleType, name: str) -> list[str]:
        calls, kernel = [], getattr(file, name)

        def counted(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return kernel(*args, **more)

        monkeypatch.setattr(file, name, counted)
        return calls

    return watch


def pool(kind: str, N: int) -> Pages:
    if kind == "fp8":
        return Fp8Pages(torch.randint(0, 256, (N, P, D), dtype=torch.uint8), torch.randn(N, P))
    return torch.randn(N, P, D).to(torch.float32 if kind == "f32" else torch.bfloat16)


def copy(pages: Pages) -> Any:
    return Fp8Pages(*(t.clone() for t in pages)) if isinstance(pages, Fp8Pages) else pages.clone()


def same(a: Pages, b: Pages) -> None:
    for x, y in zip(a, b) if isinstance(a, Fp8Pages) and isinstance(b, Fp8Pages) else ((a, b),):
        assert isinstance(x, Tensor) and isinstance(y, Tensor)
        assert_same_bytes(x, y)


def wide_kv(T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and v as slices of one projection."""
    qkv = torch.randn(T, 24 + 2 * G, D).to(dtype)
    return qkv[:, 24 : 24 + G], qkv[:, 24 + G :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32-in", "bf16-in"))
@pytest.mark.parametrize("T", (1, 64, 4099))
def test_append_stores_the_reference_bytes(
    kind: str, dtype: torch.dtype, T: int, count: Callable[[ModuleType, str], list[str]]
) -> None:
    N = -(-T * G // P) + 3
    k, v = wide_kv(T, dtype)
    index = torch.randperm(N * P)[: T * G].view(G, T)
    index[:, ::7] = -1
    k[::7], v[::7] = torch.nan, torch.inf
    before = pool(kind, N), pool(kind, N)
    want = copy(before[0]), copy(before[1])
    append_ref(*want, k, v, index)
    calls, got = count(append_file, "append_triton"), (copy(before[0]), copy(before[1]))
    append(*got, k, v, index)
    assert calls == ["append_triton"]
    same(want[0], got[0])
    same(want[1], got[1])


def test_fp8_codes_of_the_gpu_are_those_of_the_cpu(count: Callable[[ModuleType, str], list[str]]) -> None:
    x = torch.randn(4096, D) * torch.logspace(-40, 37, 4096)[:, None]
    calls = [count(quant_file, "fp8_encode_triton"), count(quant_file, "fp8_decode_triton")]
    codes, scale = fp8_encode(x)
    back = fp8_decode(codes, scale)
    assert [len(c) for c in calls] == [1, 1]
    for device in ("cpu", "cuda"):
        for a, b in zip(fp8_encode_ref(x.to(device)), (codes, scale)):
            assert_same_bytes(a, b)
    bound = torch.maximum(x.double().abs() / 16, scale.double()[:, None] * 2.0**-10) * (1 + 1e-6)
    assert ((back.double() - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_compaction_of_a_long_prompt_moves_the_reference_bytes(
    kind: str, count: Callable[[ModuleType, str], list[str]]
) -> None:
    L, keep = 16384, 2048
    order = torch.randperm(G * L // P).view(G, -1)
    source, target = [], []
    for g in range(G):
        entry = torch.randperm(L)[:keep].sort().values
        source.append(order[g][entry // P] * P + entry % P)
        target.append(order[g][torch.arange(keep) // P] * P + torch.arange(keep) % P)
    calls, pages = count(compact_file, "compact_triton"), pool(kind, G * L // P)
    tensors = list(pages) if isinstance(pages, Fp8Pages) else [pages]
    wanted = [t.clone() for t in tensors]
    compact(tensors, torch.cat(source), torch.cat(target))
    for want, t in zip(wanted, tensors):
        compact_ref(want, torch.cat(source), torch.cat(target))
        assert_same_bytes(want, t)
    assert len(calls) == 1


def layer(kind: str, L: int, W: int, R: int = 6) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of window_scores for unequal streams, and the scores by definition in float64."""
    lengths = [L, L - 1, L // 2 + 3, 1]
    pages, order = torch.full((G * (-(-L // P)) + 1, P, D), torch.nan), torch.randperm(G * (-(-L // P))).view(G, -1)
    positions = torch.full((G, L), -1, dtype=torch.int64)
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    q, when = torch.randn(W, G * R, D).to(dtype), torch.arange(L - W, L)
    table = torch.full(order.shape, -1, dtype=torch.int32)
    want = torch.zeros(G * R, L, dtype=torch.float64)
    flat = pages.view(-1, D)
    stored: Pages = pages
    for g, n in enumerate(lengths):
        e = torch.arange(n)
        table[g, : -(-n // P)] = order[g, : -(-n // P)].int()
        positions[g, :n] = e * 0 + (L - n) + e if g % 2 else torch.randperm(L)[:n].sort().values
        flat[order[g][e // P] * P + e % P] = torch.randn(n, D)
    if kind == "fp8":
        codes, scale = fp8_encode_ref(pages)
        hidden = pages.isnan().any(-1)
        codes[hidden], scale[hidden] = 0x7F, torch.nan
        stored, pages = Fp8Pages(codes, scale), codes.view(torch.float8_e4m3fn).double() * scale.double()[..., None]
    else:
        stored = pages = pages.to(dtype)
    for g, n in enumerate(lengths):
        e = torch.arange(n)
        k = pages.view(-1, D)[order[g][e // P] * P + e % P].double()
        s = torch.einsum("whd,ld->hwl", q[:, g * R : (g + 1) * R].double(), k) * D**-0.5
        unseen = positions[g, :n] > when[:, None]
        s = s.masked_fill(unseen, -torch.inf).softmax(-1).nan_to_num(0)  # a query that sees nothing
        want[g * R : (g + 1) * R, :n] = s.sum(1)
    return (q, when, stored, table, positions, D**-0.5), want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("L", "W"), ((4096, 64), (1003, 33), (300, 128), (70, 1)))
def test_scores_of_real_heads_equal_their_definition(
    kind: str, L: int, W: int, count: Callable[[ModuleType, str], list[str]]
) -> None:
    args, want = layer(kind, L, W)
    calls = count(score_file, "window_scores_triton")
    got = window_scores(*args)
    assert calls == ["window_scores_triton"]
    assert_close_rms("scores", want, got, BOUND)
    for _ in range(20):
        assert_same_bytes(got, window_scores(*args))


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.dims == TENSOR_CORES.dims], ids=str)
@pytest.mark.parametrize("W", (16, 64, 128))
def test_every_launch_configuration_on_real_heads(kind: str, config: ScoreBlocks, W: int) -> None:
    args, want = layer(kind, 700, W)
    assert_close_rms(str(config), want, window_scores_triton(*args, config=config), BOUND)


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
def test_pools_past_two_to_the_31_elements(kind: str) -> None:
    """Entries near both ends of a pool of 2.3e9 elements: stored, moved, scored."""
    N = 140_000
    assert N * P * D > 2**31
    if kind == "fp8":
        pages: Any = Fp8Pages(torch.zeros(N, P, D, dtype=torch.uint8), torch.zeros(N, P))
    else:
        pages = torch.zeros(N, P, D, dtype=torch.bfloat16)
    values = pages.values if kind == "fp8" else pages
    order = torch.tensor([N - 1, 2, N - 3, 131072, 131071, 7, N - 9, 3])  # 8 pages, two streams
    table, L, T = order.view(2, 4).int(), 4 * P, 4 * P
    e = torch.arange(L)
    index = table.long()[:, e // P] * P + e % P
    k = torch.randn(T, 2, D).to(torch.bfloat16)
    append(pages, copy_like(pages), k, k, index)
    flat = values.view(-1, D)
    if kind == "fp8":
        codes, scale = fp8_encode_ref(k.transpose(0, 1))
        assert_same_bytes(flat[index], codes)
        assert_same_bytes(pages.scale.view(-1)[index], scale)
    else:
        assert_same_bytes(flat[index], k.transpose(0, 1).contiguous())
    assert int((values.view(N, -1) != 0).any(-1).sum()) == 8  # no other page was touched

    q, when = torch.randn(16, 4, D).to(torch.bfloat16), torch.arange(L - 16, L)
    small_table = torch.arange(8).view(2, 4).int()
    pick = order.long()
    small = Fp8Pages(pages.values[pick], pages.scale[pick]) if kind == "fp8" else pages[pick]
    positions = e.repeat(2, 1)
    want = window_scores_triton(q, when, small, small_table, positions, D**-0.5)
    assert_same_bytes(want, window_scores_triton(q, when, pages, table, positions, D**-0.5))

    source, target = index[:, ::3].reshape(-1), index[:, : -(-L // 3)].reshape(-1)
    for t in list(pages) if kind == "fp8" else [pages]:
        entries = t.view(-1, *t.shape[2:])
        moved = entries[source].clone()
        compact_triton([t], source, target)
        assert_same_bytes(entries[target], moved)
    assert int((values.view(N, -1) != 0).any(-1).sum()) == 8


def copy_like(pages: Pages) -> Any:
    return Fp8Pages(*(torch.zeros_like(t) for t in pages)) if isinstance(pages, Fp8Pages) else torch.zeros_like(pages)


def test_a_captured_append_skips_the_rows_that_are_padding_at_replay() -> None:
    T, N = 8, 4
    k, v = wide_kv(T, torch.bfloat16)
    pools = pool("fp8", N), pool("fp8", N)
    index = torch.full((G, T), -1)
    before = copy(pools[0])
    append(*pools, k, v, index)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(*pools, k, v, index)
    same(before, pools[0])
    index[:, :3] = torch.randperm(N * P)[: G * 3].view(G, 3)
    want = copy(pools[0]), copy(pools[1])
    append_ref(*want, k, v, index)
    graph.replay()
    same(want[0], pools[0])
    same(want[1], pools[1])
