"""Peak scores and their pooling, value norms, key differences, places and shared selection on the GPU, at real sizes
and in every configuration.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from gpu.page_pools import KINDS
from gpu.scored_pages import definition, keys
from hybridkv.kernels.backend import has_gluon
from hybridkv.kernels.eviction import key_difference, peak, peak_pool, select_shared, standing, value_norms
from hybridkv.kernels.eviction.score import CONFIGS, ScoreBlocks, hopper_tiles
from hybridkv.kernels.formats.fp8 import Fp8Pages

pytestmark = pytest.mark.gpu
BOUND = 1e-5  # f32 sums of exact products: errors of a few 2^-24 in a score, which a weight takes over
SHAPES = {  # lengths, query heads of a KV head, D, P, W
    "27B": ([4096, 4095, 70, 1], 6, 256, 64, 64),
    "27B, read again": ([1500, 1499], 6, 256, 64, 333),
    "8B, short window": ([2049, 900, 63], 4, 128, 64, 33),
    "one head, odd pages": ([517, 130, 5], 1, 128, 53, 64),
    "SmolLM2": ([1803, 1800, 64], 3, 64, 16, 64),
    "another width": ([300, 2], 2, 96, 16, 130),
    "one entry": ([1], 2, 128, 64, 1),
}


@pytest.fixture(autouse=True)
def on_the_gpu() -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


def arguments(kind: str, shape: str) -> tuple[tuple[Any, ...], Tensor, Tensor]:
    """Of peak_scores; the peaks by definition; the log-sum-exps."""
    lengths, R, D, P, W = SHAPES[shape]
    q = torch.randn(W, len(lengths) * R, D).to(torch.float32 if kind == "f32" else torch.bfloat16)
    args = (q, torch.arange(max(lengths) - W, max(lengths)), *keys(kind, lengths, P, D), D**-0.5)
    weights, lse = definition(*args)
    return args, weights.amax(0).view(len(lengths), R, -1).amax(1), lse.float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_peaks_equal_their_definition(shape: str, kind: str, count: Callable[[ModuleType, str], list[str]]) -> None:
    args, want, lse = arguments(kind, shape)
    calls = count(peak, "peak_scores_triton")
    strided = torch.full((len(lse), lse.shape[1] + 5), torch.nan)
    strided[:, 2:-3] = lse
    for sums in (None, lse, strided[:, 2:-3]):
        got = peak.peak_scores(*args, sums)
        assert_close_rms("peaks", want, got, BOUND)
        assert (got[args[4] < 0] == 0).all()
        for _ in range(5):
            assert_same_bytes(got, peak.peak_scores(*args, sums))
    assert set(calls) == {"peak_scores_triton"}
    assert_close_rms("reference", want, peak.peak_scores_ref(*args, lse), BOUND)


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
@pytest.mark.parametrize("known", (False, True))
def test_a_text_that_comes_in_parts_only_raises(kind: str, known: bool) -> None:
    args, want, lse = arguments(kind, "27B, read again")
    whole = peak.peak_scores(*args, lse if known else None)
    out = torch.zeros_like(whole)
    for rows in (slice(0, 64), slice(64, 256), slice(256, 333)):
        given = peak.peak_scores(args[0][rows], args[1][rows], *args[2:], lse[rows] if known else None, out)
        assert given is out
    assert_same_bytes(whole, out)
    high = torch.full_like(out, 2.0)
    high[0, 7] = torch.nan
    raised = peak.peak_scores(*args, lse if known else None, high)
    assert raised[0, 7].isnan() and int((raised == 2).sum()) == raised.numel() - 1


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_launch_configuration(kind: str, config: ScoreBlocks) -> None:
    args, want, lse = arguments(kind, "27B, read again" if config.dims == 256 else "SmolLM2")
    assert_close_rms(str(config), want, peak.peak_scores_triton(*args, None, config=config), BOUND)


def test_windows_of_64_run_the_hopper_kernel() -> None:
    """So the tests above test it."""
    for shape, runs in (("27B", True), ("8B, short window", True), ("SmolLM2", False)):
        lengths, R, D, P, W = SHAPES[shape]
        q = torch.empty(W, len(lengths) * R, D, dtype=torch.bfloat16)
        assert (hopper_tiles(q, q, len(lengths)) > 0) == (runs and has_gluon(q.device))


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
@pytest.mark.parametrize("known", (False, True))
def test_a_nan_key_is_not_hidden(kind: str, known: bool) -> None:
    pages, table, positions = keys(kind, [300, 300], 64, 256)
    if isinstance(pages, Fp8Pages):
        pages.scale[table[1, 2], 3] = torch.nan
    else:
        pages[table[1, 2], 3, 7] = torch.nan
    q, when = torch.randn(64, 12, 256).bfloat16(), torch.arange(236, 300)
    sums = torch.zeros(64, 12) if known else None
    bad = peak.peak_scores(q, when, pages, table, positions, 0.0625, sums).isnan()
    assert bad[1, 131] and not bad[0].any()
    assert int(bad.sum()) == 1 if known else bad[1].all()  # unknown sums are NaN with it


@pytest.mark.parametrize("kernel", (1, 3, 15, 63, 127))
@pytest.mark.parametrize("floor", (False, True))
def test_pooling_of_long_prompts(kernel: int, floor: bool) -> None:
    lengths = torch.tensor([16384, 16383, 70, 64, 40, 1, 0])
    x, norms = torch.rand(7, 16384) ** 8, torch.rand(7, 16384)
    past = torch.arange(16384) >= lengths[:, None]
    x.masked_fill_(past, torch.nan)
    for weights in (None, norms.masked_fill(past, torch.nan)):
        got = peak_pool.pool_peaks(x, lengths, 64, kernel, floor, weights).masked_fill(past, 0)
        want = peak_pool.pool_peaks_ref(x, lengths, 64, kernel, floor, weights).masked_fill(past, 0)
        assert_close_rms("pooled", want, got, 1e-6)
        if not floor:
            assert_same_bytes(want, got)
    again = [peak_pool.pool_peaks(x[:, :n], lengths.clamp(max=n), 64, kernel, floor) for n in (16384, 5000)]
    assert_same_bytes(again[0][2, :70], again[1][2, :70])  # whatever stands beside it


@pytest.mark.parametrize(("kernel", "ahead", "decay"), ((71, 63, 0.97), (8, 0, 0.5), (127, 126, 1.0), (126, 125, 0.99)))
def test_peaks_of_long_prompts_spread_ahead_and_fade(kernel: int, ahead: int, decay: float) -> None:
    lengths = torch.tensor([16384, 16383, 70, 64, 1, 0])
    x = torch.rand(6, 16384) ** 12
    past = torch.arange(16384) >= lengths[:, None]
    x.masked_fill_(past, torch.nan)
    got = peak_pool.pool_peaks(x, lengths, 64, kernel, False, None, ahead, decay).masked_fill(past, 0)
    want = peak_pool.pool_peaks_ref(x, lengths, 64, kernel, False, None, ahead, decay).masked_fill(past, 0)
    assert_same_bytes(want, got)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lengths", "P", "D"), (([4096, 4095, 70, 1], 64, 256), ([517, 130, 5], 53, 64), ([3], 2, 37)))
def test_norms_of_values(kind: str, lengths: list[int], P: int, D: int) -> None:
    pages, table, _ = keys(kind, lengths, P, D)
    args = (pages, table, torch.tensor(lengths), max(lengths))
    got = value_norms.value_norms(*args)
    assert_close_rms("norms", value_norms.value_norms_ref(*args), got, 1e-6)
    assert_same_bytes(got, value_norms.value_norms(*args))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lengths", "P", "D"),
    (([16384, 4095, 1025, 1], 64, 256), ([1803, 1800], 16, 64), ([517, 130, 5], 53, 128), ([3], 2, 37), ([1], 1, 1)),
)
def test_differences_of_keys(
    kind: str, lengths: list[int], P: int, D: int, count: Callable[[ModuleType, str], list[str]]
) -> None:
    pages, table, _ = keys(kind, lengths, P, D)
    args, calls = (pages, table, torch.tensor(lengths), max(lengths)), count(key_difference, "key_differences_triton")
    got, want = key_difference.key_differences(*args), key_difference.key_differences_ref(*args)
    assert calls == ["key_differences_triton"]
    for g, n in enumerate(lengths):
        assert_close_rms("differences", want[g, :n], got[g, :n], 2e-5)  # f32 sums of n keys in another order
        alone = pages, table[g : g + 1], args[2][g : g + 1], max(lengths)
        assert_same_bytes(got[g], key_difference.key_differences(*alone)[0])  # whatever stands beside it
    for _ in range(3):
        assert_same_bytes(got, key_difference.key_differences(*args))


@pytest.mark.parametrize("spread", (2.0, 1e-3, 0.0))
@pytest.mark.parametrize("lengths", ([16384, 16383, 70, 1, 0], [3], [1023, 1025]))
def test_places_by_difference(lengths: list[int], spread: float) -> None:
    """Whole numbers are counted: equal to the bit, however many share a bin."""
    x, ends = torch.rand(len(lengths), max(lengths)) * spread - 1, torch.tensor(lengths)
    there = torch.arange(max(lengths)) < ends[:, None]
    x[:, ::97] = torch.nan
    args = x.masked_fill(~there, torch.inf), ends
    got, want = standing.standings(*args), standing.standings_ref(*args)
    assert_same_bytes(want.masked_fill(~there, 0).nan_to_num(7), got.masked_fill(~there, 0).nan_to_num(7))
    assert bool((got.isnan() == args[0].isnan()).all())


def rows(R: int, L: int, groups: int, values: str) -> tuple[Any, ...]:
    """Arguments of select_shared; what no row shows is NaN."""
    lengths = torch.full((R,), L)
    lengths[::5] = L - 1 - L // 3
    lengths[1::7] = torch.randint(0, L, ())
    visible = (lengths - torch.randint(0, 65, (R,))).clamp(min=0)
    x = torch.rand(R, L) ** 8 * torch.rand(R, 1)
    if values == "ties":
        x = torch.randint(0, 50, (R, L)).float()
    elif values == "equal":
        x = torch.full((R, L), 0.25)
    elif values == "extreme":
        for value in (torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-45, -1.0):
            x.masked_fill_(torch.rand(R, L) < 0.1, value)
    x.masked_fill_(torch.arange(L) >= visible[:, None], torch.nan)
    least = torch.randint(0, L // 16 + 2, (R,))
    return x, visible, least, lengths, groups, torch.randint(0, R // groups * L // 8 + 2, (groups,))


@pytest.mark.parametrize("values", ("random", "ties", "equal", "extreme"))
@pytest.mark.parametrize(
    ("R", "L", "groups"),
    (
        (64, 16384, 1), (64, 16384, 16), (90, 1803, 30), (90, 1803, 1), (640, 700, 1), (4, 131072, 1), (1, 1, 1),
        (3, 7, 3),
    ),
)  # fmt: skip
def test_streams_share_a_budget(R: int, L: int, groups: int, values: str) -> None:
    args = rows(R, L, groups, values)
    want = select_shared.select_shared_ref(*args)
    for _ in range(3):
        for a, b in zip(want, select_shared.select_shared(*args)):
            assert_same_bytes(a, b)


def test_budgets_of_nothing_and_of_everything() -> None:
    x, visible, least, lengths, groups, room = rows(64, 3000, 4, "ties")
    for args in (
        (x, visible, least * 0, lengths, groups, room * 0), (x, visible, least, lengths, groups, room * 0),
        (x, visible, least, lengths, groups, room * 0 + 10**6), (x, visible, least + 10**6, lengths, groups, room),
    ):  # fmt: skip
        for a, b in zip(select_shared.select_shared_ref(*args), select_shared.select_shared(*args)):
            assert_same_bytes(a, b)


def test_shared_selection_waits_for_nothing_and_is_captured() -> None:
    """A graph's replay and launches on several streams at once, each with its own counter."""
    args = rows(64, 4096, 1, "random")
    want = select_shared.select_shared(*args)
    streams = [torch.cuda.Stream() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = []
        for stream in streams * 10:
            with torch.cuda.stream(stream):
                found.append(select_shared.select_shared(*args))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found.append(select_shared.select_shared(*args))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for each in found:
        for a, b in zip(want, each):
            assert_same_bytes(a, b)
