"""pool_peaks against loops, value_norms against float64: reference and kernel. What they must not read is NaN."""

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from score_cases import make
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.errors import HybridKVError
from hybridkv.kernels.eviction.peak_pool import pool_peaks, pool_peaks_ref, pool_peaks_triton
from hybridkv.kernels.eviction.value_norms import value_norms_ref, value_norms_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of NaN

POOL = {"reference": pool_peaks_ref, "kernel": pool_peaks_triton}
WINDOW = 8
BOUND = 1e-6  # a mean and one product of f32


def definition(x: Tensor, lengths: list[int], kernel: int, floor: bool, norms: Tensor | None) -> list[Tensor]:
    rows = []
    for g, n in enumerate(lengths):
        row, old, half = x[g, :n].double().clone(), max(0, n - WINDOW), kernel // 2
        mean = row[:old].mean() if floor and old else -torch.inf
        for j in range(old):
            new = max(x[g, max(0, j - half) : min(old, j + half + 1)].double().max().item(), mean)
            row[j] = new if norms is None else new * norms[g, j].double()
        rows.append(row)
    return rows


@pytest.mark.parametrize("form", POOL)
@pytest.mark.parametrize("floor", (False, True))
@pytest.mark.parametrize("kernel", (1, 3, 15, 31, 127))
def test_pooling_equals_loops(form: str, kernel: int, floor: bool) -> None:
    lengths, L = [1990, 905, 8, 9, 3, 1, 0], 2000
    x, norms = torch.rand(7, L) ** 4, torch.rand(7, L) + 0.5
    for g, n in enumerate(lengths):
        x[g, n:] = norms[g, n:] = torch.nan
    at = torch.tensor(lengths, device=DEVICE)
    for weights in (None, norms):
        on = None if weights is None else weights.to(DEVICE)
        got = POOL[form](x.to(DEVICE), at, WINDOW, kernel, floor, on).cpu()
        for g, want in enumerate(definition(x, lengths, kernel, floor, weights)):
            assert_close_rms(f"row {g}", want, got[g, : lengths[g]], BOUND)
        for g, n in enumerate(lengths):  # the window is as it was
            assert_same_bytes(x[g, max(0, n - WINDOW) : n], got[g, max(0, n - WINDOW) : n])


SPREADS = {
    "further ahead": (71, 63, 0.97),
    "behind alone": (8, 0, 0.5),
    "ahead alone": (126, 125, 0.99),
    "as far as may be": (127, 126, 1.0),
    "nowhere": (1, 0, 0.9),
}


@pytest.mark.parametrize("form", POOL)
@pytest.mark.parametrize("spread", SPREADS)
def test_peaks_spread_ahead_and_fade(form: str, spread: str) -> None:
    """Against loops: an entry has the largest of what `ahead` before it and the others behind it send, each times the
    decay over the distance. Lengths where a program of the kernel ends and the next begins are among them."""
    kernel, ahead, decay = SPREADS[spread]
    lengths, L = [1600, 905, 777, 9, 3, 0], 1600
    x = torch.rand(6, L) ** 12  # few high peaks, which are seen from far
    for g, n in enumerate(lengths):
        x[g, n:] = torch.nan
    at = torch.tensor(lengths, device=DEVICE)
    got = POOL[form](x.to(DEVICE), at, WINDOW, kernel, False, None, ahead, decay).cpu()
    for g, n in enumerate(lengths):
        row, old = x[g, :n].double(), max(0, n - WINDOW)
        want = row.clone()
        for j in range(old):
            near = torch.arange(max(0, j - ahead), min(old, j + kernel - ahead))
            want[j] = (row[near] * decay ** (near - j).abs()).max()
        assert_close_rms(f"row {g}", want, got[g, :n], BOUND)
        assert_same_bytes(x[g, old:n], got[g, old:n])
    same = pool_peaks_ref(x, torch.tensor(lengths), WINDOW, kernel, False, None, ahead, decay)
    for g, n in enumerate(lengths):  # the same steps, so the same bits
        assert_same_bytes(same[g, :n], got[g, :n])


@pytest.mark.parametrize("form", POOL)
def test_the_floor_and_the_norms_come_after_the_spread(form: str) -> None:
    x, norms, lengths = torch.rand(2, 60) ** 8, torch.rand(2, 60) + 0.5, torch.tensor([60, 31])
    spread = pool_peaks_ref(x, lengths, WINDOW, 12, False, None, 9, 0.8)
    got = POOL[form](x.to(DEVICE), lengths.to(DEVICE), WINDOW, 12, True, norms.to(DEVICE), 9, 0.8).cpu()
    for g, n in enumerate(lengths.tolist()):
        old = n - WINDOW
        want = spread[g, :old].double().clamp(min=x[g, :old].double().mean().item()) * norms[g, :old]
        assert_close_rms(f"row {g}", want, got[g, :old], BOUND)


@pytest.mark.parametrize("form", POOL)
def test_a_nan_spreads_as_a_peak_does(form: str) -> None:
    x, lengths = torch.rand(1, 40), torch.tensor([40], device=DEVICE)
    x[0, 20] = torch.nan
    pooled = POOL[form](x.to(DEVICE), lengths, WINDOW, 5, False, None, 3, 0.5).isnan().cpu()
    assert pooled[0].nonzero().flatten().tolist() == [19, 20, 21, 22, 23]


@pytest.mark.parametrize("form", POOL)
def test_a_nan_is_not_pooled_away(form: str) -> None:
    x, lengths = torch.rand(1, 40), torch.tensor([40], device=DEVICE)
    x[0, 20] = torch.nan
    pooled = POOL[form](x.to(DEVICE), lengths, WINDOW, 5, False).isnan().cpu()
    assert pooled[0].nonzero().flatten().tolist() == [18, 19, 20, 21, 22]
    assert POOL[form](x.to(DEVICE), lengths, WINDOW, 5, True).isnan()[0, : 40 - WINDOW].all()  # as the mean is


@pytest.mark.parametrize("form", POOL)
def test_the_mean_has_the_same_bits_beside_longer_streams(form: str) -> None:
    """A policy may get one layer or several at once, whose longest stream is another one."""
    x = torch.rand(1, 1500) ** 8
    alone = POOL[form](x.to(DEVICE), torch.tensor([1500], device=DEVICE), WINDOW, 3, True)
    both = torch.rand(2, 4000)
    both[0, :1500] = x[0]
    beside = POOL[form](both.to(DEVICE), torch.tensor([1500, 4000], device=DEVICE), WINDOW, 3, True)
    assert_same_bytes(alone[0], beside[0, :1500])


@pytest.mark.parametrize("form", POOL)
@pytest.mark.parametrize(("G", "L"), ((0, 5), (2, 0)))
def test_nothing_to_pool(form: str, G: int, L: int) -> None:
    lengths = torch.zeros(G, dtype=torch.int64, device=DEVICE)
    assert POOL[form](torch.zeros(G, L, device=DEVICE), lengths, WINDOW, 15, True).shape == (G, L)


@pytest.mark.parametrize("kernel", (-1, 0, 2, 128, 129))
def test_widths_that_have_no_middle_or_are_too_wide_are_refused(kernel: int) -> None:
    with pytest.raises(HybridKVError, match=f"odd number of entries from 1 to 127, not {kernel}"):
        pool_peaks(torch.zeros(1, 4), torch.tensor([4]), 1, kernel, True)


@pytest.mark.parametrize(
    ("kernel", "ahead", "decay", "says"),
    (
        (4, None, 1.0, "odd number of entries from 1 to 127, not 4"),
        (128, 64, 1.0, "from 1 to 127, not 128"),
        (5, 5, 1.0, "0 to 4 of 5 neighbours ahead, not to 5"),
        (5, -1, 1.0, "0 to 4 of 5 neighbours ahead, not to -1"),
        (5, 2, 0.0, "decay must be above 0 and at most 1 .* not 0.0"),
        (5, 2, 1.01, "not 1.01"),
        (5, 2, float("nan"), "not nan"),
    ),
)
def test_spreads_that_mean_nothing_are_refused(kernel: int, ahead: int | None, decay: float, says: str) -> None:
    with pytest.raises(HybridKVError, match=says):
        pool_peaks(torch.zeros(1, 4), torch.tensor([4]), 1, kernel, False, None, ahead, decay)
    pool_peaks(torch.zeros(1, 4), torch.tensor([4]), 1, 4, False, None, 2, 0.5)  # even, where it is said how


SIZES = {
    "one entry": dict(D=8, P=2, lengths=(1,)),
    "one stream is empty": dict(D=100, P=16, lengths=(0, 5)),
    "odd everything": dict(D=37, P=53, lengths=(131, 77, 1)),
    "wide heads": dict(D=256, P=64, lengths=(129, 64)),
}


@pytest.mark.parametrize("kind", ("f32", "bf16", "fp8"))
@pytest.mark.parametrize("size", SIZES)
def test_norms_equal_their_definition(size: str, kind: str) -> None:
    c = make(kind, W=1, R=1, **SIZES[size])  # type: ignore[arg-type]
    lengths, L = torch.tensor([len(k) for k in c.keys]), c.positions.shape[1]
    want = torch.zeros(len(lengths), L, dtype=torch.float64)
    for row, values in zip(want, c.keys):
        row[: len(values)] = values.norm(dim=-1)
    _, _, pages, table, _, _ = c.on(DEVICE)
    assert_close_rms("kernel", want, value_norms_triton(pages, table, lengths.to(DEVICE), L).cpu(), BOUND)
    assert_close_rms("reference", want, value_norms_ref(c.pages, c.table, lengths, L), BOUND)


@pytest.mark.parametrize("kind", ("f32", "fp8"))
def test_a_value_that_is_nan_is_not_hidden(kind: str) -> None:
    c = make(kind, W=1, R=1, D=16, P=16, lengths=(20,))
    page = int(c.table[0, 0])
    if isinstance(c.pages, Fp8Pages):
        c.pages.scale[page, 3] = torch.nan
    else:
        c.pages[page, 3, 0] = torch.nan
    lengths = torch.tensor([20])
    _, _, pages, table, _, _ = c.on(DEVICE)
    for got in (
        value_norms_triton(pages, table, lengths.to(DEVICE), 20).cpu(),
        value_norms_ref(c.pages, c.table, lengths, 20),
    ):
        assert got[0].isnan().nonzero().tolist() == [[3]]
