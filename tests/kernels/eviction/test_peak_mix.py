"""raise_strongest, mix_peaks and raise_kept: reference against plain loops, kernel against reference."""

import math
from collections.abc import Callable

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from own_process import compile_alone
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.eviction import peak_mix, raise_kept

pytest.importorskip("triton")

NAN = math.nan
Found = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_mix, "BLOCK", 16)
    monkeypatch.setattr(peak_mix, "STREAMS", 2)
    monkeypatch.setattr(raise_kept, "BLOCK", 16)


def streams(lengths: list[int], same: bool) -> tuple[Tensor, Tensor]:
    """Peaks [G, L] and positions [G, L]; past a stream's length NaN and -1."""
    L, G = max(lengths), len(lengths)
    peaks = torch.rand(G, L)
    if same:
        return peaks, torch.arange(L).expand(G, -1)
    positions = torch.full((G, L), -1)
    for g, n in enumerate(lengths):
        positions[g, :n] = torch.randperm(2 * L)[:n].sort().values
        peaks[g, n:] = NAN
    return peaks, positions


def both(name: str, *args: object) -> list[Tensor]:
    """The result of the reference and of the kernel."""
    ref, kernel = (getattr(peak_mix, f"{name}_{form}") for form in ("ref", "triton"))
    there = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in args]
    return [ref(*args), kernel(*there).cpu()]


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize(
    ("lengths", "same"), (([40] * 5, True), ([1, 1], True), ([40, 9, 33], False), ([17], False), ([16] * 4, True))
)
def test_the_strongest_peak_of_each_position(lengths: list[int], same: bool, weighted: bool) -> None:
    peaks, positions = streams(lengths, same)
    weights = torch.rand(len(lengths)) + 0.1 if weighted else None
    peaks[0, 0] = NAN  # speaks for itself alone
    want = torch.zeros(2 * max(lengths))
    want[3 % len(want)] = 0.9
    got = [want.clone(), want.clone().to(DEVICE)]
    for g in range(len(lengths)):
        for j in range(lengths[g]):
            value = float(peaks[g, j] * (1 if weights is None else weights[g]))
            if not math.isnan(value):
                want[positions[g, j]] = max(float(want[positions[g, j]]), value)
    peak_mix.raise_strongest_ref(got[0], peaks, positions, weights)
    at = positions.to(DEVICE)
    peak_mix.raise_strongest_triton(got[1], peaks.to(DEVICE), at, None if weights is None else weights.to(DEVICE))
    for each in got:
        assert_same_bytes(want, each.cpu())


@pytest.mark.parametrize("norms", (False, True))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("same", (False, True))
def test_one_score_of_peaks_standing_and_norms(same: bool, shared: bool, weighted: bool, norms: bool) -> None:
    lengths = [40, 40, 40] if same else [40, 9, 33]
    peaks, positions = streams(lengths, same)
    looked_at = torch.rand(80) if shared else None
    standing, size, sizes = torch.rand(3, 40), torch.rand(3, 40), torch.tensor(lengths)
    for g, n in enumerate(lengths):
        size[g, n:] = 0
    plain = torch.tensor([True, False, False]) if weighted and norms else None
    factors = torch.rand(3) if weighted else None
    length = size if norms else None
    args = (peaks, positions, looked_at, standing, 5.0, length, sizes, plain, factors)
    got = both("mix_peaks", *args)
    for g, n in enumerate(lengths):
        own = peaks[g, :n].double()
        if looked_at is not None:
            own = torch.maximum(own, looked_at[positions[g, :n]].double())
        want = 5 * own + standing[g, :n]
        if norms and not (plain is not None and plain[g]):
            want = want * size[g, :n] / (size[g, :n].double().sum() / n)
        want = want if factors is None else want * factors[g]
        for each in got:
            assert_close_rms("scores", want.float(), each[g, :n], 1e-6)  # a few roundings in f32


def test_a_nan_stays_in_its_own_stream() -> None:
    peaks, positions = streams([20, 20, 20], True)
    standing, norms, sizes = torch.rand(3, 20), torch.rand(3, 20), torch.tensor([20, 20, 20])
    peaks[0, 3], norms[1, 4], plain = NAN, NAN, torch.tensor([True, True, True])
    for got in both("mix_peaks", peaks, positions, torch.rand(20), standing, 5.0, norms, sizes, plain, None):
        broken = got.isnan()
        assert broken[0].nonzero().flatten().tolist() == [3]
        assert broken[1].all() and not broken[2].any()  # its mean norm is none: every entry of the stream says so


@pytest.mark.parametrize("lengths", ([0], [1]))
def test_no_entry_and_one(lengths: list[int]) -> None:
    x, n = torch.rand(1, lengths[0]), torch.tensor(lengths)
    at = torch.arange(lengths[0]).expand(1, -1)
    for got in both("mix_peaks", x, at, None, x, 1.0, x, n, None, None):
        assert got.shape == x.shape
    found = torch.zeros(3, device=DEVICE)
    peak_mix.raise_strongest_triton(found, x.to(DEVICE), at.to(DEVICE), None)
    assert found.cpu().tolist() == [*x[0].tolist(), 0.0, 0.0, 0.0][:3]


@pytest.mark.parametrize("form", ("ref", "triton"))
@pytest.mark.parametrize("at_once", (1, 1 << 24))
def test_kept_entries_are_above_all_others(form: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raise_kept, "BYTES", at_once)  # a row at a time, or all of them
    R, L = 4, 50
    scores, counts = torch.rand(R, L), torch.tensor([0, 1, 37, 50])
    scores[2, 7] = NAN
    entries, want = torch.full((R, L), 1 << 30, dtype=torch.int32), scores.clone()
    for r, n in enumerate(counts.tolist()):
        kept = torch.randperm(L)[:n].sort().values
        entries[r, :n] = kept.int()
        want[r, kept] = torch.where(want[r, kept].isnan(), want[r, kept], torch.inf)
    got = scores.to(DEVICE)
    getattr(raise_kept, f"raise_kept_{form}")(got, entries.to(DEVICE), counts.to(DEVICE))
    assert torch.equal(want.nan_to_num(-1), got.cpu().nan_to_num(-1)) and got[2, 7].isnan()
    assert (got[0].cpu() == scores[0]).all() and got[3].isinf().all()


COMPILE = """
from no_device import built
import torch
from hybridkv.kernels.eviction.key_difference import key_differences_triton
from hybridkv.kernels.eviction.peak_mix import mix_peaks_triton, raise_strongest_triton
from hybridkv.kernels.eviction.raise_kept import raise_kept_triton
from hybridkv.kernels.eviction.standing import standings_triton
from hybridkv.kernels.eviction.value_norms import value_norms_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages

x, n, w = torch.zeros(64, 96), torch.zeros(64, dtype=torch.int64), torch.zeros(64)
table = torch.zeros(64, 9, dtype=torch.int32)
codes = Fp8Pages(torch.zeros(4, 64, 256, dtype=torch.uint8), torch.zeros(4, 64))
for pages in (torch.zeros(4, 64, 256, dtype=torch.bfloat16), codes):
    key_differences_triton(pages, table, n, 96)
    value_norms_triton(pages, table, n, 96)
for at in (torch.arange(96).expand(64, -1), torch.zeros(64, 96, dtype=torch.int64)):
    raise_strongest_triton(torch.zeros(100), x, at, w)
    mix_peaks_triton(x, at, torch.zeros(100), x, 5.0, x, n, w < 1, w)
mix_peaks_triton(x, at, None, x, 5.0, None, n, None, None)
raise_kept_triton(x, x.int(), n)
standings_triton(x, n)
print(*sorted({name for name, _ in built}))
"""
BUILT = """count_bins_kernel key_differences_kernel key_sums_kernel mean_direction_kernel mix_peaks_kernel
raise_kept_kernel raise_strongest_kernel standings_kernel value_norms_kernel"""


def test_they_compile_for_a_hopper_gpu() -> None:
    pytest.importorskip("triton", minversion="3.6")
    assert compile_alone(COMPILE).split() == BUILT.split()
