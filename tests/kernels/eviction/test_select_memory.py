"""What a selection takes beside its scores: bounded whatever the number of streams and layers, and as it is counted."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from triton_interpreter import DEVICE

from hybridkv.eviction.spread import Ada
from hybridkv.kernels import topk, topk_levels
from hybridkv.kernels.eviction import select as file
from hybridkv.kernels.eviction import select_shared as shared_file
from hybridkv.kernels.eviction import select_sizes
from hybridkv.kernels.eviction.select import select_entries, select_entries_ref
from hybridkv.kernels.eviction.select_shared import select_shared_ref
from hybridkv.kernels.eviction.select_sizes import select_bytes, shared_bytes

pytest.importorskip("triton")


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that torch holds at once on the CPU during `run`, beside what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    held = peak = 0
    found = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(found, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 0, "the profiler saw no memory"
    return peak


def arguments(rows: int, L: int, budget: int) -> tuple:
    sizes = (torch.full((rows,), n) for n in (L, budget, L))
    return torch.randn(rows, L), *sizes, budget


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """A bound that small tensors can reach."""
    monkeypatch.setattr(select_sizes, "TEMPORARY_BYTES", 1 << 20)
    return 1 << 20


@pytest.mark.parametrize("budget", (10, 900))
def test_temporaries_do_not_grow_with_the_streams(budget: int, small: int) -> None:
    """The bound holds at once for all streams. Without blocks 256 streams take 16 times what 16 take."""
    for rows in (16, 64, 256):
        given = arguments(rows, 1000, budget)
        assert peak_bytes(lambda given=given: select_entries(*given)) <= small + 4 * rows * budget


@pytest.mark.parametrize(("rows", "L", "budget"), ((1, 5000, 4000), (7, 1000, 1000), (300, 1000, 20), (40, 3000, 2999)))
def test_the_count_covers_what_is_taken(rows: int, L: int, budget: int, small: int) -> None:
    """And is not far above it: a plan that counts it wastes little. A CPU's sort takes less than a GPU's."""
    given = arguments(rows, L, budget)
    taken, counted = peak_bytes(lambda: select_entries(*given)), select_bytes(rows, L, budget, gpu=False)
    assert taken <= counted <= 4 * taken


def test_blocks_change_no_result_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_levels, "KEPT", 4)
    monkeypatch.setattr(topk_levels, "TILE", 128)
    scores = torch.randint(-3, 4, (7, 600), device=DEVICE).float()
    visible = torch.tensor([600, 599, 20, 0, 400, 600, 300], device=DEVICE)
    count, lengths = torch.minimum(visible, torch.full_like(visible, 9)), torch.minimum(visible + 3, visible * 0 + 600)
    want = select_entries_ref(scores, visible, count, lengths, 12)
    for rows in (1, 3, 7):
        monkeypatch.setattr(select_sizes, "TEMPORARY_BYTES", topk_levels.scratch_bytes(rows, 600, 12))
        assert select_sizes.kernel_rows(600, 12) == rows and topk_levels.plan_levels(600, 12)[2] > 0
        assert torch.equal(file.select_entries_triton(scores, visible, count, lengths, 12), want)


@pytest.mark.parametrize("rows", (1, 2, 5, 32))
def test_blocks_change_no_result(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    L, width = 300, 120
    scores = torch.randint(-3, 4, (17, L)).float()  # many ties
    scores[3, 5:9], scores[4] = torch.nan, -torch.inf
    visible = torch.randint(0, L + 1, (17,))
    count = torch.minimum(torch.randint(0, width, (17,)), visible)
    lengths = torch.minimum(visible + width - count, torch.tensor(L))
    given = (scores, visible, count, lengths, width)
    want = select_entries_ref(*given)
    monkeypatch.setattr(select_sizes, "TEMPORARY_BYTES", rows * L * select_sizes.SORT_BYTES_PER_SCORE)
    assert select_sizes.rows_at_once(L) == rows
    assert torch.equal(select_entries_ref(*given), want)


def test_the_kernels_scratch_is_what_its_launcher_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launch:
        def __getitem__(self, grid: object) -> Callable:
            return lambda *args, **more: None

    for name in ("top_entries_kernel", "group_largest_kernel"):
        monkeypatch.setattr(topk, name, Launch())
    for bound in (1 << 20, 64 << 20):
        monkeypatch.setattr(select_sizes, "TEMPORARY_BYTES", bound)
        for rows, L, k in ((64, 50_000, 512), (5, 20_000, 8192), (40, 20_000, 2000), (3, 700, 100), (9, 300, 0)):
            scores, sizes = torch.zeros(rows, L), torch.zeros(rows, dtype=torch.int64)
            taken = peak_bytes(lambda s=scores, n=sizes, k=k: file.select_entries_triton(s, n, n, n, k)) if k else 0
            assert taken <= select_bytes(rows, L, k) <= max(bound, 4 * rows * k) + 4 * rows * k
            if select_sizes.kernel_rows(L, k) >= rows:
                assert taken == select_bytes(rows, L, k)


@pytest.mark.parametrize("budget", (512, topk_levels.MAX_CHOICES // 2, topk.MAX_CHOICES // 2 + 1, 20_000))
def test_a_long_context_of_many_streams_takes_a_block_and_its_results(budget: int) -> None:
    """Not 41 bytes for each of 640 x 131072 scores, which were 3.4 GB."""
    assert select_bytes(640, 131072, budget) <= max(select_sizes.TEMPORARY_BYTES, 4 * 640 * budget) + 4 * 640 * budget


@pytest.mark.parametrize("layers", (4, 32))
def test_ada_takes_what_is_counted(layers: int, small: int) -> None:
    G, L, budget = 4, 1000, 100
    scores = [torch.rand(G, L) for _ in range(layers)]
    lengths = np.full((layers, G), L)
    taken = peak_bytes(lambda: Ada().budgets(scores, lengths, budget, 8))
    # the scores as rows, the selection, and a few numbers for each layer
    assert taken <= 4 * layers * G * L + shared_bytes(layers * G, L, layers, gpu=False) + layers * 4096


def test_ada_gives_the_same_budgets_a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where layers have different lengths and scores are -inf."""
    lengths = np.array([[90, 70, 40], [300, 300, 300], [9, 8, 7], [120, 260, 30]])
    scores = [torch.rand(3, n) * torch.tensor([1.0, 2, 4])[:, None] for n in lengths.max(1).tolist()]
    scores[1][0, 20:] = scores[3][1] = -torch.inf
    want = Ada().budgets(scores, lengths, 50, 4)
    for rows in (1, 3, 6, 9):
        monkeypatch.setattr(select_sizes, "TEMPORARY_BYTES", rows * 300 * select_sizes.SORT_BYTES_PER_SCORE)
        assert (Ada().budgets(scores, lengths, 50, 4) == want).all()


@pytest.mark.parametrize(("rows", "L"), ((64, 1000), (8, 40_000), (400, 1000)))
@pytest.mark.parametrize("groups", (1, 2))
def test_shared_selection_takes_what_is_counted(rows: int, L: int, groups: int, small: int) -> None:
    scores, lengths, room = torch.rand(rows, L), torch.full((rows,), L), torch.full((groups,), L)
    taken = peak_bytes(lambda: select_shared_ref(scores, lengths, lengths // 9, lengths, groups, room))
    assert taken <= shared_bytes(rows, L, groups, gpu=False) <= 4 * taken


def test_the_shared_kernels_scratch_is_what_its_launcher_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launch:
        def __getitem__(self, grid: object) -> Callable:
            return lambda *args, **more: None

    monkeypatch.setattr(shared_file, "select_shared_kernel", Launch())
    for rows, L, groups in ((64, 5000, 16), (5, 300, 1)):
        scores, sizes = torch.zeros(rows, L), torch.zeros(rows, dtype=torch.int64)
        taken = peak_bytes(lambda s=scores, n=sizes, g=groups: shared_file.select_shared_triton(s, n, n, n, g, n[:g]))
        assert taken - 4 == shared_bytes(rows, L, groups)  # and the counter by which programs meet
