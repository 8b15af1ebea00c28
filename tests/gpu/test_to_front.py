"""to_front, raise_strongest, mix_peaks and raise_kept on the GPU, at the sizes of a long prompt of the 27B model."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from gpu.page_pools import KINDS, G, P, pool
from hybridkv.kernels.eviction import peak_mix, raise_kept
from hybridkv.kernels.eviction import to_front as to_front_file
from hybridkv.kernels.eviction.to_front import to_front, to_front_ref
from hybridkv.kernels.formats.fp8 import Fp8Pages

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]


def lists_of(length: int, counts: list[int]) -> Tensor:
    found = torch.full((len(counts), max(counts)), 1 << 30, dtype=torch.int32)
    for row, n in zip(found, counts, strict=True):
        row[:n] = torch.randperm(length)[:n].sort().values.int()
    return found


@pytest.mark.parametrize("stop", (False, True))
@pytest.mark.parametrize("L", (16384, 1000, 65))
@pytest.mark.parametrize("kind", KINDS)
def test_survivors_of_long_streams_move_as_in_the_reference(
    kind: str, L: int, stop: bool, count: Callable[[ModuleType, str], list[str]]
) -> None:
    pages = -(-L // P)
    table = torch.randperm(G * pages)[: G * pages].view(G, -1).int()
    counts = [min(L, n) for n in (L - 1, 2048, 1, L)] + [L // 2] * (G - 4)
    counts = counts[:G]
    calls, keys = count(to_front_file, "to_front_triton"), pool(kind, G * pages)
    tensors = list(keys) if isinstance(keys, Fp8Pages) else [keys]
    wanted = [t.clone() for t in tensors]
    args = table, lists_of(L, counts), torch.tensor(counts), torch.tensor([0, int(stop)], dtype=torch.int32)
    reports = [torch.full((G + 2 + sum(counts) + 1,), -7, dtype=torch.int32) for _ in range(2)]
    for _ in range(3 if stop else 1):
        to_front(tensors, *args, reports[0])
    to_front_ref(wanted, *args, reports[1])
    assert len(calls) == (3 if stop else 1)
    assert_same_bytes(*reports)
    for want, got in zip(wanted, tensors, strict=True):
        assert_same_bytes(want, got)


def test_many_streams_in_one_launch_do_not_meet() -> None:
    """64 streams whose pages lie between each other's, moved by one place each: every byte is read and written."""
    R, L, D = 64, 4096, 256
    table = torch.randperm(R * L // P).view(R, -1).int()
    keys = torch.randint(0, 0x7F80, (R * L // P, P, D), dtype=torch.int16).view(torch.bfloat16)
    values = keys.flip(0).clone()
    entries = torch.arange(1, L, dtype=torch.int32).repeat(R, 1)
    flat = table.long().repeat_interleave(P, 1) * P + torch.arange(P).repeat(L // P)  # [R, L] place of each entry
    wanted = [t.view(-1, D)[flat[:, 1:]].clone() for t in (keys, values)]
    report = torch.empty(R + 1 + R * (L - 1), dtype=torch.int32)
    to_front([keys, values], table, entries, torch.full((R,), L - 1), torch.zeros(1, dtype=torch.int32), report)
    for want, got in zip(wanted, (keys, values), strict=True):
        assert_same_bytes(want, got.view(-1, D)[flat[:, :-1]])


@pytest.mark.parametrize("same", (True, False))
def test_peaks_of_all_streams_in_one_score(same: bool) -> None:
    R, L = 64, 16384
    peaks, standing, norms = torch.rand(R, L) ** 4, torch.rand(R, L), torch.rand(R, L)
    positions = torch.arange(L).expand(R, -1)
    lengths = torch.full((R,), L)
    if not same:
        lengths[::3] = L - 777
        positions = torch.where(torch.arange(L) < lengths[:, None], positions + torch.arange(R)[:, None], -1)
        norms.masked_fill_(positions < 0, 0)
    weights, peaks[5, 99] = torch.rand(R) + 1e-3, torch.nan
    found = [torch.zeros(L + R) for _ in range(2)]
    peak_mix.raise_strongest(found[0], peaks, positions, weights)
    peak_mix.raise_strongest_ref(found[1], peaks, positions, weights)
    assert_same_bytes(*found)
    args = (peaks, positions, found[0], standing, 5.0, norms, lengths, weights < 0.05, weights**0.5)
    got, want = peak_mix.mix_peaks(*args), peak_mix.mix_peaks_ref(*args)
    there = positions >= 0
    assert torch.equal(got.isnan() & there, want.isnan() & there) and int((got.isnan() & there).sum()) == 1
    there[5, 99] = False
    assert_close_rms("scores", want[there], got[there], 1e-6)  # divisions to two last bits


def test_kept_entries_are_raised() -> None:
    R, L = 64, 16384
    scores, counts = torch.rand(R, L), torch.randint(0, L, (R,))
    entries, want = lists_of(L, counts.tolist()), scores.clone()
    raise_kept.raise_kept_ref(want, entries, counts)
    raise_kept.raise_kept(scores, entries, counts)
    assert torch.equal(scores, want)
