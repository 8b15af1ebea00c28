"""Survivors move to the front of their own pages, in place: any dtype, any lists, and what the host is told."""

import pytest
import torch
from numerics import assert_same_bytes
from own_process import compile_alone
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.eviction import to_front as file
from hybridkv.kernels.eviction.compact import compact_ref
from hybridkv.kernels.eviction.to_front import ENTRIES, TILE_WORDS, to_front, to_front_ref, to_front_triton
from kernels.eviction.test_compact import ENTRIES as KINDS
from kernels.eviction.test_compact import poison

pytest.importorskip("triton")


def lists_of(lengths: list[int], counts: list[int]) -> Tensor:
    """[R, K] ascending choices; past the counts numbers that must never be looked at."""
    found = torch.full((len(lengths), max(max(counts), 1)), 1 << 30, dtype=torch.int32)
    for row, n, count in zip(found, lengths, counts, strict=True):
        row[:count] = torch.randperm(n)[:count].sort().values.int()
    return found


def pages_of(lengths: list[int], P: int) -> tuple[Tensor, int]:
    """[R, N] page ids in any order, -1 past the end, and how many pages there are."""
    need = [-(-n // P) for n in lengths]
    order = torch.randperm(sum(need) + 2)
    table = torch.full((len(lengths), max(*need, 1) + 1), -1, dtype=torch.int32)
    for row, ids in zip(table, order[: sum(need)].split(need), strict=True):
        row[: len(ids)] = ids.int()
    return table, sum(need) + 2


def check(pools: list[Tensor], table: Tensor, entries: Tensor, counts: list[int], flags: list[int]) -> None:
    R, F = len(counts), len(flags)
    sizes, marks = torch.tensor(counts), torch.tensor(flags, dtype=torch.int32)
    for form in (to_front_ref, to_front_triton):
        device = "cpu" if form is to_front_ref else DEVICE
        got = [pool.clone().to(device) for pool in pools]
        report = torch.full((R + F + sum(counts) + 3,), -7, dtype=torch.int32, device=device)
        form(got, *(x.to(device) for x in (table, entries, sizes, marks)), report)
        kept = [row[:n] for row, n in zip(entries, counts, strict=True)]
        want = torch.cat((sizes.int(), marks, *kept, torch.full((3,), -7, dtype=torch.int32)))
        assert_same_bytes(want, report)
        for pool, moved in zip(pools, got, strict=True):
            P = pool.shape[1]
            expected = pool.clone()
            for row, keep in zip(table.long(), kept, strict=True):
                e, to = keep.long(), torch.arange(len(keep))
                if not any(flags):
                    compact_ref(expected, row[e // P] * P + e % P, row[to // P] * P + to % P)
            assert_same_bytes(expected, moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("P", (1, 2, 16, 53))
def test_survivors_of_all_streams_move_byte_for_byte(kind: str, P: int) -> None:
    lengths, counts = [119, 1, 70, 64, 40], [41, 1, 70, 1, 39]
    table, N = pages_of(lengths, P)
    check([poison(kind, N, P)], table, lists_of(lengths, counts), counts, [0, 0, 0])


def test_keys_values_and_scales_go_together() -> None:
    kinds = ("codes x 100", "codes x 100", "f32 scale", "f32 scale", "bf16 x 37")
    lengths, counts = [50, 33], [20, 33]
    table, N = pages_of(lengths, 8)
    check([poison(kind, N, 8) for kind in kinds], table, lists_of(lengths, counts), counts, [0])


@pytest.mark.parametrize("kind", ("f32 scale", "bf16 x 37"))
def test_lists_longer_than_a_tile_overlap_their_own_targets(kind: str) -> None:
    """What one tile reads lies where the next one writes."""
    length = 3 * ENTRIES if kind == "f32 scale" else 3 * TILE_WORDS // 16
    counts = [length - 1, length // 2 + 1]
    table, N = pages_of([length, length], 64)
    entries = lists_of([length] * 2, counts)
    entries[0, : length - 1] = torch.arange(1, length)  # each by one place
    check([poison(kind, N, 64)], table, entries, counts, [0] * 70)


def test_a_flag_leaves_everything_in_place() -> None:
    table, N = pages_of([90, 30], 16)
    check([poison("bf16 x 256", N, 16)], table, lists_of([90, 30], [20, 10]), [20, 10], [0, 1])


def test_more_streams_than_are_added_at_once() -> None:
    lengths, counts = [9] * 150, [i % 9 + 1 for i in range(150)]
    table, N = pages_of(lengths, 4)
    check([poison("codes x 7", N, 4)], table, lists_of(lengths, counts), counts, [0])


def test_streams_that_keep_nothing_and_no_streams_at_all() -> None:
    table, N = pages_of([9, 9], 4)
    check([poison("codes x 7", N, 4)], table, lists_of([9, 9], [0, 4]), [0, 4], [0])
    none = torch.zeros(0, 3, dtype=torch.int32)
    to_front([poison("codes x 7", N, 4)], none, none, torch.zeros(0, dtype=torch.int64), none[0:0, 0], none[0:0, 0])


def test_rows_of_a_page_table_of_many_slots_are_read_where_they_lie() -> None:
    table, N = pages_of([40, 25], 8)
    whole = torch.full((3, 2, table.shape[1] + 5), 1 << 20, dtype=torch.int32)
    whole[1, :, : table.shape[1]] = table
    check([poison("f32 x 2 x 5", N, 8)], whole[1], lists_of([40, 25], [13, 25]), [13, 25], [0])


def test_one_list_for_all_streams_may_be_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `expand` makes it, with a stride of 0: the kernel reads numbers one after the other."""
    lengths, counts, K = [40, 40, 40], [13, 13, 13], 13
    table, N = pages_of(lengths, 8)
    one = lists_of([40], [13])
    pool, report = poison("f32 x 2 x 5", N, 8), torch.zeros(3 + 1 + 3 * K, dtype=torch.int32)
    want, told = pool.clone(), report.clone()
    flags = torch.zeros(1, dtype=torch.int32)
    to_front_ref([want], table, one.repeat(3, 1), torch.tensor(counts), flags, told)
    monkeypatch.setattr(file, "use_triton", lambda x: True)
    got, report = pool.to(DEVICE), report.to(DEVICE)
    few, sizes = one.to(DEVICE).expand(3, -1), torch.tensor([K], device=DEVICE).expand(3)
    assert few.stride(0) == sizes.stride(0) == 0
    to_front([got], table.to(DEVICE), few, sizes, flags.to(DEVICE), report)
    assert_same_bytes(told, report)
    assert_same_bytes(want, got)


COMPILE = """
from no_device import built
import torch
from hybridkv.kernels.eviction.to_front import to_front_triton

def zeros(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)

lists = zeros(64, 300), zeros(64, 2048), zeros(64, dtype=torch.int64), zeros(16), zeros(64 + 16 + 64 * 2048)
to_front_triton([zeros(4, 64, 256, dtype=torch.bfloat16)] * 2, *lists)
codes, scales = zeros(4, 64, 256, dtype=torch.uint8), zeros(4, 64, dtype=torch.float32)
to_front_triton([codes, codes, scales, scales], *lists)
for name, kernel in built:
    assert "bar.sync" in kernel.asm["ptx"], "reads and writes of a tile are not apart"
    print(name)
"""


def test_it_compiles_for_a_hopper_gpu() -> None:
    pytest.importorskip("triton", minversion="3.6")
    assert compile_alone(COMPILE).split() == ["to_front_kernel"] * 3
