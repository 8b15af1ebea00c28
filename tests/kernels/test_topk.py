"""top_entries: the reference and the kernel against a stable sort, index by index."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels import topk_levels
from hybridkv.kernels.topk import top_entries_ref, top_entries_triton
from hybridkv.kernels.topk_levels import plan_levels

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of a NaN in the interpreter
INF, NAN = torch.inf, torch.nan
FORMS = {"reference": top_entries_ref, "kernel": top_entries_triton}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor, int], Tensor]:
    def run(logits: Tensor, visible: Tensor, k: int) -> Tensor:
        """Rows of a wider tensor whose other columns are NaN."""
        T, width = logits.shape
        wide = torch.full((T, width + 3), NAN, device=DEVICE)
        wide[:, :width] = logits.to(DEVICE)
        return FORMS[request.param](wide[:, :width], visible.to(DEVICE), k).cpu()

    return run


def stable_sort(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    """The definition, in Python: order by (NaN first, larger first, lower index first)."""
    out = torch.full((len(logits), k), -1, dtype=torch.int32)
    for row, x, n in zip(out, logits.tolist(), visible.tolist()):
        best = sorted(range(n), key=lambda i: (x[i] == x[i], -x[i] if x[i] == x[i] else 0.0, i))
        kept = sorted(best[:k])
        row[: len(kept)] = torch.tensor(kept, dtype=torch.int32)
    return out


def check(form: Callable[[Tensor, Tensor, int], Tensor], logits: Tensor, visible: list[int], k: int) -> None:
    n = torch.tensor(visible)
    got = form(logits, n, k)
    assert got.dtype == torch.int32 and got.shape == (len(logits), k)
    want = stable_sort(logits, n, k)
    wrong = (got != want).any(-1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong}: {got[wrong[0]].tolist()} instead of {want[wrong[0]].tolist()}"


@pytest.mark.parametrize("k", (1, 8, 100, 512))
@pytest.mark.parametrize("width", (1, 2, 129, 700))
def test_random_logits_of_every_visible_length(form: Callable[..., Tensor], width: int, k: int) -> None:
    lengths = sorted({0, 1, k - 1, k, k + 1, width // 2, width - 1, width} & set(range(width + 1)))
    check(form, torch.randn(len(lengths), width), lengths, k)


@pytest.mark.parametrize("value", (0.0, -3.5, INF, -INF, NAN))
def test_all_equal_gives_the_lowest_indices(form: Callable[..., Tensor], value: float) -> None:
    check(form, torch.full((3, 300), value), [300, 257, 40], 37)


@pytest.mark.parametrize("k", (1, 7, 40, 64))
def test_few_different_values_tie_at_the_bound(form: Callable[..., Tensor], k: int) -> None:
    check(form, torch.randint(-2, 3, (6, 333)).float() * 0.25, [333, 332, 200, 65, 64, 63], k)


def test_zero_and_minus_zero_are_equal(form: Callable[..., Tensor]) -> None:
    x = torch.zeros(2, 90)
    x[:, ::3] = -0.0
    x[1, 80:] = 1e-45  # the smallest number is larger than either
    check(form, x, [90, 90], 15)


@pytest.mark.parametrize("k", (3, 12, 50))
def test_infinities_and_nan_take_their_places(form: Callable[..., Tensor], k: int) -> None:
    x = torch.randn(5, 140)
    x[:, 5::9], x[:, 2::9] = INF, -INF
    x[1, 100:105] = NAN
    x[2] = -INF
    x[2, 77:80] = -3e38
    x[3, ::2] = -NAN  # a NaN with its sign set
    x[4, :] = x[4].sign() * 3.4e38
    check(form, x, [140, 140, 139, 140, 140], k)


def test_numbers_of_every_size_are_told_apart(form: Callable[..., Tensor]) -> None:
    x = torch.randn(4, 400) * 10.0 ** torch.randint(-38, 38, (4, 400))
    x[1] = (torch.arange(400) + 0x3F800000).int().view(torch.float32)[torch.randperm(400)]  # neighbours, from 1 on
    x[2] = -x[1]
    x[3] = torch.arange(400).int().view(torch.float32)[torch.randperm(400)]  # denormals
    check(form, x, [400] * 4, 129)


def test_what_is_past_the_visible_end_is_not_looked_at(form: Callable[..., Tensor]) -> None:
    x = torch.randn(5, 260)
    visible = [0, 3, 64, 200, 259]
    for row, n, value in zip(x, visible, (NAN, INF, NAN, INF, 1e30)):
        row[n:] = value
    check(form, x, visible, 64)


@pytest.mark.parametrize("width, k", ((0, 4), (1, 4), (5, 5), (5, 9), (5, 0)))
def test_nothing_to_choose(form: Callable[..., Tensor], width: int, k: int) -> None:
    check(form, torch.randn(2, width), [width, 0], k)


def test_no_rows(form: Callable[..., Tensor]) -> None:
    assert form(torch.empty(0, 300), torch.empty(0, dtype=torch.int64), 7).shape == (0, 7)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_levels, "KEPT", 4)
    monkeypatch.setattr(topk_levels, "LOOSE", 32)
    monkeypatch.setattr(topk_levels, "MAX_CHOICES", 256)
    monkeypatch.setattr(topk_levels, "TILE", 128)


@pytest.mark.parametrize(
    "k, ratio, levels", ((1, 4, 3), (3, 4, 3), (20, 4, 1), (32, 4, 1), (33, 4, 1), (100, 2, 2), (128, 2, 2))
)
def test_rows_of_several_levels(small_groups: None, k: int, ratio: int, levels: int) -> None:
    """The ends of groups and tiles, fewer groups than k, groups that nobody sees; ties across groups."""
    width = 1000
    assert plan_levels(width, k)[1:] == (ratio, levels)
    visible = [1000, 769, 768, 385, 257, 255, k + 1, k, 0]
    check(top_entries_triton_on_device, torch.randn(len(visible), width), visible, k)
    check(top_entries_triton_on_device, torch.randint(0, 3, (len(visible), width)).float(), visible, k)
    check(top_entries_triton_on_device, torch.arange(width).float().expand(len(visible), -1), visible, k)
    falls = -torch.arange(width).float().expand(len(visible), -1)
    check(top_entries_triton_on_device, falls.where(falls % 3 == 0, NAN), visible, k)


@pytest.mark.parametrize("k", (1, 300, 513))
def test_long_rows_of_the_real_plan(k: int) -> None:
    visible = [5003, 4097, k + 1, k]
    assert plan_levels(5003, k)[2] == (1 if k < 513 else 0)
    check(top_entries_triton_on_device, torch.randn(4, 5003), visible, k)
    check(top_entries_triton_on_device, torch.randint(0, 9, (4, 5003)).float(), visible, k)


def top_entries_triton_on_device(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    return top_entries_triton(logits.contiguous().to(DEVICE), visible.to(DEVICE), k).cpu()


@pytest.mark.parametrize("k", (1, 8, 511, 512, 1024, 2048, 8192))
@pytest.mark.parametrize("width", (0, 1, 8193, 16384, 16385, 65536, 262143, 262144, 1 << 20))
def test_every_plan_fits_a_program(width: int, k: int) -> None:
    kept, ratio, levels = plan_levels(width, k)
    assert ratio >= 2 and k <= kept and -(-width // ratio**levels) <= kept * ratio <= topk_levels.MAX_CHOICES
    if k <= 1024 and width <= 262144:
        assert levels <= 3
