"""Checkpoints: where they are taken, which one a prompt is taken up at, and which goes first."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cache.test_columns import Q, put
from hybridkv.cache.checkpoints import KINDS, NEAR, Checkpoint, Checkpoints, Kind, Mark, grid_marks, spaced
from hybridkv.cache.columns import Column, Columns


@pytest.fixture
def columns() -> Columns:
    return Columns(Q, 0)


def take(checkpoints: Checkpoints, column: Column, kind: Kind = "branch") -> Checkpoint:
    row = checkpoints.reserve()
    assert row is not None
    return checkpoints.add(column, row, kind)


def test_the_deepest_one_within_reach_is_found(columns: Columns) -> None:
    checkpoints, path = Checkpoints(columns, 4, 100, first=8), put(columns, list(range(20)))
    made = [take(checkpoints, path[i]) for i in (0, 2, 3)]
    assert [c.row for c in made] == [8, 9, 10] and checkpoints.nbytes == 300
    for most in range(21):
        found = checkpoints.deepest(path, most)
        assert (found.position if found else 0) == max(p for p in (0, 4, 12, 16) if p <= most)
    assert [c.gain for c in made] == [4, 8, 4] and [c.own_columns() for c in made] == [0, 0, 1]
    checkpoints.check()


def test_nobody_sees_a_row_that_is_only_reserved(columns: Columns) -> None:
    checkpoints, path = Checkpoints(columns, 1, 100), put(columns, list(range(8)))
    row = checkpoints.reserve()
    assert row == 0 and checkpoints.reserve() is None and checkpoints.deepest(path, 8) is None
    checkpoints.give_back(row)
    assert take(checkpoints, path[1]).row == 0
    checkpoints.check()


def test_a_second_state_at_one_place_gives_its_row_back(columns: Columns) -> None:
    checkpoints, path = Checkpoints(columns, 2, 100), put(columns, list(range(8)))
    first = take(checkpoints, path[1])
    assert take(checkpoints, path[1]) is first and len(checkpoints.all) == 1
    checkpoints.check()


def test_only_the_one_that_was_used_is_refreshed(columns: Columns) -> None:
    checkpoints, path = Checkpoints(columns, 3, 100), put(columns, list(range(12)))
    shallow, middle, deep = (take(checkpoints, column) for column in path)
    checkpoints.use(deep)
    checkpoints.use(shallow)
    take(checkpoints, put(columns, [7] * 4)[0])
    assert middle not in checkpoints.all.values() and path[1].lost
    take(checkpoints, put(columns, [8] * 4)[0])
    assert deep not in checkpoints.all.values() and checkpoints.dropped["rows"] == 2
    checkpoints.check()


def test_one_on_trial_goes_first_until_it_was_used(columns: Columns) -> None:
    """Once half of the others are later: a next turn takes a while."""
    checkpoints, path = Checkpoints(columns, 3, 100), put(columns, list(range(20)))
    old, trial, last = take(checkpoints, path[0]), take(checkpoints, path[1], "turn"), take(checkpoints, path[2])
    checkpoints.use(old)
    take(checkpoints, path[3])
    assert trial not in checkpoints.all.values() and last in checkpoints.all.values()
    checkpoints.drop(old)
    trial = take(checkpoints, path[1], "turn")
    checkpoints.use(trial)
    take(checkpoints, path[0])
    assert trial in checkpoints.all.values() and last not in checkpoints.all.values()
    take(checkpoints, path[2], "turn")
    assert [c.kind for c in checkpoints.all.values()].count("turn") == 2, "the new one is the last to go"


def test_pinned_ones_stay_and_those_of_running_requests_go_for_rows_alone(columns: Columns) -> None:
    checkpoints, path = Checkpoints(columns, 3, 100), put(columns, list(range(12)))
    pinned, lived = take(checkpoints, path[0]), take(checkpoints, path[1])
    other = take(checkpoints, put(columns, [7] * 4)[0])
    pinned.pins += 1
    columns.occupy(path[1])
    fresh = take(checkpoints, put(columns, [8] * 4)[0])
    assert set(checkpoints.all.values()) == {pinned, other, fresh} and lived.column.lost, "it was the oldest"
    columns.occupy(other.column)
    columns.occupy(fresh.column)
    assert not checkpoints.give_way() and not checkpoints.give_way(rows=True)
    other.pins, fresh.pins = 1, 1
    assert checkpoints.reserve() is None


def test_for_pages_one_goes_that_frees_some(columns: Columns) -> None:
    checkpoints, path = Checkpoints(columns, 4, 100), put(columns, list(range(12)))
    shallow, deep = take(checkpoints, path[0]), take(checkpoints, path[2])
    assert columns.drop_oldest() is None
    assert checkpoints.give_way() and set(checkpoints.all.values()) == {shallow}, "the other one's columns are needed"
    assert [columns.drop_oldest(), columns.drop_oldest(), columns.drop_oldest()] == [path[2], path[1], None]
    assert checkpoints.give_way() and not checkpoints.give_way()
    assert deep.column.gone
    checkpoints.check()


def test_rows_are_found_anew_after_an_interrupt(columns: Columns) -> None:
    checkpoints, path = Checkpoints(columns, 3, 100), put(columns, list(range(12)))
    take(checkpoints, path[0])
    checkpoints.reserve()
    checkpoints.rebuild()
    checkpoints.check()
    assert not checkpoints.reserved and len(checkpoints.all) == 1


def test_marks_are_rounded_down_and_none_is_near_another_but_a_clients() -> None:
    marks = [Mark(130, "message"), Mark(700, "reply"), Mark(1000, "branch"), Mark(1300, "grid"), Mark(2100, "reply")]
    found = spaced(marks, [], 64, 0, 2100)
    assert found == [(640, "reply"), (1280, "grid"), (2048, "reply")]
    assert all(b.position - a.position >= NEAR for a, b in pairwise(found))
    assert (128, "client") in spaced([*marks, Mark(129, "client"), Mark(130, "client")], [], 64, 0, 2100)
    assert spaced(marks, [640, 1984], 64, 640, 2100) == [(1280, "grid")]
    assert spaced(marks, [], 64, 640, 1999) == [(960, "branch")]
    assert spaced([Mark(5, "client"), Mark(64, "client")], [64], 64, 0, 2100) == []


def test_one_of_the_grid_gives_way_to_one_that_is_wished() -> None:
    marks = [Mark(512, "grid"), Mark(1024, "grid"), Mark(1300, "branch"), Mark(1536, "grid"), Mark(2048, "grid")]
    assert spaced(marks, [], 64, 0, 4000) == [(512, "grid"), (1280, "branch"), (2048, "grid")]


def test_at_one_place_the_more_important_kind_counts() -> None:
    for kind in (kind for kind in KINDS if kind != "begin"):  # where a message begins; no checkpoint is taken there
        assert spaced([Mark(640, "turn"), Mark(650, kind)], [], 64, 0, 700) == [(640, kind)]


def test_the_grid_widens_with_depth() -> None:
    found = [mark.position for mark in grid_marks(131072, [], 2349, 1, 64)]
    assert found[:3] == [4096, 8192, 12288] and 14 <= len(found) <= 18
    steps = [b - a for a, b in pairwise(found)]
    assert steps == sorted(steps) and set(steps) <= {4096, 8192, 16384}
    assert grid_marks(4096, [], 2349, 1, 64) == [] and grid_marks(10**6, [], 0, 1, 64) == []


def test_the_grid_is_only_inside_what_is_longer_than_its_step() -> None:
    found = [mark.position for mark in grid_marks(20000, [3000, 6000, 9000, 18000], 2349, 1, 64)]
    assert found == [12288, 16384]
    assert [mark.position for mark in grid_marks(300, [], 2349, 1, 64, every=100)] == [64, 128, 192, 256]
