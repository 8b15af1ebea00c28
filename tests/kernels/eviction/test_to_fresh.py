"""Survivors are copied into fresh pages: any dtype, any lists, and the pages that others read stay as they are."""

import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.eviction import compact as moving
from hybridkv.kernels.eviction.to_fresh import end_to_end, most_pages, to_fresh
from kernels.eviction.test_compact import ENTRIES as KINDS
from kernels.eviction.test_compact import poison
from kernels.eviction.test_to_front import lists_of, pages_of

pytest.importorskip("triton")
FORMS = ("torch", "triton")


def check(
    form: str, patch: pytest.MonkeyPatch, kinds: list[str], P: int, lengths: list[int], counts: list[int],
    flags: list[int], more: int = 0,
) -> None:  # fmt: skip
    """`more`: entries beyond all counts that there is room for, as where the host knows a bound alone."""
    patch.setattr(moving, "use_triton", lambda pool: form == "triton")
    device = DEVICE if form == "triton" else "cpu"
    R, F, most = len(counts), len(flags), sum(counts) + more
    table, used = pages_of(lengths, P)
    n = most_pages(most, R, P)
    fresh = used + torch.randperm(n)
    pools, entries = [poison(kind, used + n, P) for kind in kinds], lists_of(lengths, counts)
    got, report = [pool.clone().to(device) for pool in pools], torch.full((R + F + most,), -7, dtype=torch.int32)
    report, sizes, marks = report.to(device), torch.tensor(counts), torch.tensor(flags, dtype=torch.int32)
    to_fresh(got, *(x.to(device) for x in (table, entries, sizes, marks, fresh)), report)
    kept = [row[:count].long() for row, count in zip(entries, counts, strict=True)]
    told = torch.cat((sizes.int(), marks, *(keep.int() for keep in kept)))
    assert_same_bytes(told, report[: len(told)])
    for pool, moved in zip(pools, got, strict=True):
        expected, begin = pool.clone(), 0
        for row, keep in zip(table.long(), kept, strict=True):
            to, filled = torch.arange(len(keep)), -(-len(keep) // P)
            if not any(flags):
                expected[fresh[begin + to // P], to % P] = pool[row[keep // P], keep % P]
            begin += filled
        assert begin <= n
        assert_same_bytes(expected, moved)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("P", (1, 16, 53))
def test_survivors_of_all_streams_are_copied_byte_for_byte(
    kind: str, P: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(form, monkeypatch, [kind], P, [119, 1, 70, 64, 40], [41, 1, 70, 1, 39], [0, 0, 0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", (1, 16, 300))
def test_there_may_be_room_for_more_than_stays(more: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["codes x 100", "codes x 100", "f32 scale", "f32 scale", "bf16 x 37"]
    check(form, monkeypatch, kinds, 8, [50, 33, 9], [20, 33, 1], [0], more)


@pytest.mark.parametrize("form", FORMS)
def test_a_flag_leaves_everything_as_it_is(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(form, monkeypatch, ["bf16 x 256"], 16, [90, 30], [20, 10], [0, 1])


@pytest.mark.parametrize("P", (1, 2, 16, 64))
def test_as_many_pages_as_the_worst_lists_fill(P: int) -> None:
    for streams in (1, 3, 64):
        for most in range(streams, streams + 3 * P + 2):
            worst = max(0, (most - streams) // P) + streams  # all but one entry of each stream fill pages to their end
            assert worst <= most_pages(most, streams, P) <= most // P + streams


@pytest.mark.parametrize("counts", ([3, 0, 2], [0, 0, 0], [4, 4, 4], [1], [0, 4]))
@pytest.mark.parametrize("more", (0, 1, 5))
def test_rows_end_to_end(counts: list[int], more: int) -> None:
    """However many places there are beyond the last."""
    rows: Tensor = torch.arange(4 * len(counts), dtype=torch.int32).view(-1, 4)
    found, row, place = end_to_end(rows, torch.tensor(counts), sum(counts) + more)
    want = [(x, i, j) for i, n in enumerate(counts) for j, x in enumerate(rows[i, :n].tolist())]
    assert len(found) == len(want) + more and found.dtype == torch.int32
    assert list(zip(found.tolist(), row.tolist(), place.tolist(), strict=True))[: len(want)] == want
