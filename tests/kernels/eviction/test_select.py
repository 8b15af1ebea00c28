"""pool_heads against loops, select_entries against a stable sort: reference and kernel, index by index."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels import topk_levels
from hybridkv.kernels.eviction.select import (
    pool_heads_ref,
    pool_heads_triton,
    select_entries_ref,
    select_entries_triton,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of infinities that meet zeros

INF = torch.inf
SELECT = {"reference": select_entries_ref, "kernel": select_entries_triton}
POOL = {"reference": pool_heads_ref, "kernel": pool_heads_triton}


def survivors(scores: Tensor, visible: list[int], count: list[int], lengths: list[int], width: int) -> Tensor:
    """The definition, in Python."""
    out = torch.full((len(scores), width), -1, dtype=torch.int32)
    for row, x, n, k, end in zip(out, scores.tolist(), visible, count, lengths):
        kept = sorted(sorted(range(n), key=lambda i: (-x[i], i))[:k]) + list(range(n, end))
        row[: len(kept)] = torch.tensor(kept, dtype=torch.int32)
    return out


def check(form: str, scores: Tensor, visible: list[int], count: list[int], lengths: list[int]) -> None:
    """Rows of a wider tensor whose other columns are NaN, as is what stands past a row's length."""
    kept = [min(k, n) + end - n for n, k, end in zip(visible, count, lengths)]
    width = max(kept, default=0)
    want = survivors(scores, visible, count, lengths, width)
    wide = torch.full((len(scores), scores.shape[1] + 3), torch.nan)
    for row, x, n in zip(wide, scores, visible):
        row[:n] = x[:n]
    sizes = [torch.tensor(x, device=DEVICE) for x in (visible, count, lengths)]
    got = SELECT[form](wide.to(DEVICE)[:, : scores.shape[1]], *sizes, width).cpu()
    assert got.dtype == torch.int32 and got.shape == want.shape
    wrong = (got != want).any(-1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong}: {got[wrong[0]].tolist()} instead of {want[wrong[0]].tolist()}"


# (visible, count, length) of rows that share a launch
ROWS = ((299, 40, 300), (250, 1, 300), (7, 3, 9), (0, 0, 300), (300, 299, 300), (200, 0, 211), (1, 0, 1), (64, 64, 64))


@pytest.mark.parametrize("form", SELECT)
@pytest.mark.parametrize("values", ("random", "ties", "equal", "infinite", "zeros of both signs"))
def test_rows_with_budgets_of_their_own(form: str, values: str) -> None:
    x = {
        "random": torch.randn(len(ROWS), 300),
        "ties": torch.randint(-2, 3, (len(ROWS), 300)).float(),
        "equal": torch.full((len(ROWS), 300), 2.5),
        "infinite": torch.randn(len(ROWS), 300).sign() * INF,
        "zeros of both signs": torch.randint(0, 2, (len(ROWS), 300)) * -0.0,
    }[values]
    check(form, x, *(list(column) for column in zip(*ROWS)))


@pytest.mark.parametrize("form", SELECT)
def test_nothing_to_choose(form: str) -> None:
    check(form, torch.randn(2, 5), [0, 0], [0, 0], [0, 0])
    check(form, torch.randn(0, 5), [], [], [])
    check(form, torch.randn(1, 1), [1], [1], [1])


@pytest.mark.parametrize(("k", "levels"), ((1, 3), (20, 1), (100, 2)))
def test_rows_of_several_levels(k: int, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, size in (
        (topk_levels, "KEPT", 4),
        (topk_levels, "LOOSE", 32),
        (topk_levels, "MAX_CHOICES", 256),
        (topk_levels, "TILE", 128),
    ):
        monkeypatch.setattr(module, name, size)
    L = 1000
    visible, lengths = [997, 768, 385, 257, 120, 0], [999, 768, 390, 257, 121, 3]
    most = max(0, k - 6)
    count = [most, k, most, k, most // 2, 0]
    assert topk_levels.plan_levels(L, k)[2] == levels
    for x in (torch.randn(6, L), torch.randint(0, 3, (6, L)).float()):
        check("kernel", x, visible, count, lengths)


@pytest.mark.parametrize("form", POOL)
@pytest.mark.parametrize("kernel", (1, 5, 7))
@pytest.mark.parametrize("pooling", ("none", "avg", "max"))
def test_pooling_equals_loops(form: str, pooling: str, kernel: int) -> None:
    G, R, L, W, lengths = 4, 3, 600, 8, [600, 517, 8, 3]
    x = torch.randn(G * R, L)
    want = torch.zeros(G, L, dtype=torch.float64)
    for g, n in enumerate(lengths):
        for row in x[g * R : (g + 1) * R].double():
            old, half = max(0, n - W), kernel // 2
            for j in range(n):
                near = row[max(0, j - half) : min(old, j + half + 1)]
                if j < old and pooling == "avg":
                    want[g, j] += near.sum() / kernel
                else:
                    want[g, j] += near.max() if j < old and pooling == "max" else row[j]
    got = POOL[form](x.to(DEVICE), torch.tensor(lengths, device=DEVICE), W, pooling, kernel).cpu()
    for g, n in enumerate(lengths):
        assert torch.allclose(got[g, :n].double(), want[g, :n], atol=1e-5)


@pytest.mark.parametrize("form", POOL)
@pytest.mark.parametrize("pooling", ("avg", "max"))
def test_a_nan_is_not_smoothed_away(form: str, pooling: str) -> None:
    x = torch.randn(2, 40)
    x[1, 20] = torch.nan
    got: Callable = POOL[form]
    assert got(x.to(DEVICE), torch.tensor([40], device=DEVICE), 8, pooling, 5).isnan().cpu()[0].nonzero().tolist() == [
        [18], [19], [20], [21], [22],
    ]  # fmt: skip
