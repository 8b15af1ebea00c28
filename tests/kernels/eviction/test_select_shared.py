"""select_shared against sorted lists: reference and kernel, entry by entry. And what its launch takes."""

import pytest
import torch
from own_process import compile_alone
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.errors import HybridKVError
from hybridkv.kernels.eviction import select_shared as file
from hybridkv.kernels.eviction.select_shared import select_shared, select_shared_ref, select_shared_triton

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of NaN

INF = torch.inf
SELECT = {"reference": select_shared_ref, "kernel": select_shared_triton}
Sizes = list[int]


def survivors(
    scores: Tensor, visible: Sizes, least: Sizes, lengths: Sizes, groups: int, room: Sizes
) -> list[list[int]]:
    """The definition, in Python."""
    rows = len(scores) // groups
    rank = [[(x == x, -x if x == x else 0) for x in row] for row in scores.tolist()]  # the best first, NaN before all
    kept = []
    for g in range(groups):
        left = []
        for r in range(g * rows, (g + 1) * rows):
            order = sorted(range(visible[r]), key=lambda i: (rank[r][i], i))
            kept.append(order[: max(0, least[r])])
            left += [(rank[r][i], r, i) for i in order[max(0, least[r]) :]]
        for _, r, i in sorted(left)[: max(0, room[g])]:
            kept[r].append(i)
    return [sorted(kept[r]) + list(range(visible[r], lengths[r])) for r in range(len(scores))]


def check(
    form: str, scores: Tensor, visible: Sizes, least: Sizes, lengths: Sizes, groups: int, room: Sizes
) -> list[list[int]]:
    """Rows of a wider tensor whose other columns are NaN, as is what stands past what a row shows."""
    want, L = survivors(scores, visible, least, lengths, groups, room), scores.shape[1]
    wide = torch.full((len(scores), L + 3), torch.nan)
    for row, x, n in zip(wide, scores, visible):
        row[:n] = x[:n]
    sizes = [torch.tensor(x, dtype=torch.int64, device=DEVICE) for x in (visible, least, lengths, room)]
    got, counts = (t.cpu() for t in SELECT[form](wide.to(DEVICE)[:, :L], *sizes[:3], groups, sizes[3]))
    assert got.dtype == torch.int32 and got.shape == (len(scores), L) and counts.dtype == torch.int64
    assert counts.tolist() == [len(row) for row in want]
    for r, row in enumerate(want):
        assert got[r].tolist() == row + [-1] * (L - len(row)), f"row {r}"
    return want


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a row, several blocks of rows a group, and programs that begin in the middle of a row."""
    if DEVICE == "cpu":
        monkeypatch.setattr(file, "TILE", 64)
        monkeypatch.setattr(file, "ROWS", 2)
        monkeypatch.setattr(file, "sm_count", lambda device: 5)


VISIBLE = [150, 97, 0, 64, 130, 1]
LENGTHS = [150, 99, 5, 64, 137, 2]
LEAST = [10, 0, 0, 64, 3, 1]


@pytest.mark.parametrize("form", SELECT)
@pytest.mark.parametrize("values", ("random", "ties", "equal", "extreme", "zeros of both signs", "one strong row"))
def test_rows_share_what_a_group_has(form: str, values: str) -> None:
    x = torch.randn(6, 150)
    match values:
        case "ties":
            x = torch.randint(-2, 3, (6, 150)).float()
        case "equal":
            x = torch.full((6, 150), 2.5)
        case "extreme":
            for value in (INF, -INF, torch.nan, -torch.nan, 1e-45, -3e38):
                x[torch.rand(6, 150) < 0.15] = value
        case "zeros of both signs":
            x = torch.randint(0, 2, (6, 150)) * -0.0
        case "one strong row":
            x[4] += 10
    for groups, room in ((1, [120]), (2, [31, 77]), (6, [5, 0, 0, 9, 100, 3])):
        check(form, x, VISIBLE, LEAST, LENGTHS, groups, room)


@pytest.mark.parametrize("form", SELECT)
def test_room_for_nothing_and_for_more_than_there_is(form: str) -> None:
    x = torch.randint(0, 4, (4, 100)).float()
    visible, lengths = [100, 60, 90, 3], [100, 70, 90, 3]
    assert sum(map(len, check(form, x, visible, [7, 7, 7, 7], lengths, 1, [0]))) == 24 + 10
    assert check(form, x, visible, [7, 0, 300, 7], lengths, 2, [10_000, 10_000]) == [list(range(n)) for n in lengths]
    assert sum(map(len, check(form, x, visible, [0] * 4, lengths, 1, [0]))) == 10


@pytest.mark.parametrize("form", SELECT)
def test_nothing_to_choose(form: str) -> None:
    check(form, torch.randn(2, 5), [0, 0], [3, 0], [0, 0], 1, [4])
    check(form, torch.randn(1, 1), [1], [0], [1], 1, [1])
    check(form, torch.randn(0, 5), [], [], [], 1, [0])
    check(form, torch.randn(2, 0), [0, 0], [1, 1], [0, 0], 2, [1, 1])


def test_groups_of_unequal_sizes_are_refused() -> None:
    sizes = torch.zeros(5, dtype=torch.int64)
    for groups in (0, 2):
        with pytest.raises(HybridKVError, match=f"5 streams cannot share budgets in {groups} equal groups"):
            select_shared(torch.zeros(5, 3), sizes, sizes, sizes, groups, sizes[:1])


COMPILE = """
import no_device
import torch

from hybridkv.kernels.eviction import select_shared as file

file.sm_count = lambda device: 132
sizes = torch.zeros(64, dtype=torch.int64)
file.select_shared_triton(torch.zeros(64, 16384), sizes, sizes, sizes, 1, sizes[:1], at_once=True)
for name, kernel in no_device.built:
    print(name, kernel.metadata.shared, kernel.metadata.launch_cooperative_grid)
"""


def test_it_is_one_cooperative_launch() -> None:
    [(name, shared, cooperative)] = [line.split() for line in compile_alone(COMPILE).splitlines()]
    assert name == "select_shared_kernel" and int(shared) <= 100 * 1024 and cooperative == "True"
