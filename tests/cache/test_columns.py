"""The trie of columns: what a lookup finds, what is dropped first, and counts that stay true."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hybridkv.cache.columns import Column, Columns
from hybridkv.cache.tails import tails_below

Q = 4
NONE = np.zeros(0, np.int32)


def put(columns: Columns, tokens: list[int], salt: bytes = b"") -> list[Column]:
    """All full columns of a prompt."""
    keys, at, found = columns.keys(np.array(tokens)), columns.root(salt), []
    for i in range(0, len(tokens) // Q * Q, Q):
        at, _ = columns.insert(at, keys[4 * i : 4 * (i + Q)], NONE)
        found.append(at)
    return found


def matched(columns: Columns, tokens: list[int], salt: bytes = b"") -> int:
    found = columns.match(salt, columns.keys(np.array(tokens)), len(tokens))
    return found[-1].end if found else 0


@pytest.fixture
def columns() -> Columns:
    return Columns(Q, 0)


def test_a_lookup_finds_as_many_whole_columns_as_agree(columns: Columns) -> None:
    prompt = list(range(22))
    put(columns, prompt)
    assert columns.count == 5
    for n in range(23):
        assert matched(columns, prompt[:n]) == n // Q * Q
    assert matched(columns, [*prompt[:9], 99, *prompt[10:]]) == 8
    assert matched(columns, [99, *prompt[1:]]) == 0
    columns.check()


def test_prompts_that_part_share_their_beginning_and_nothing_is_split(columns: Columns) -> None:
    first = put(columns, [0, 1, 2, 3, 4, 5, 6, 7])
    second = put(columns, [0, 1, 2, 3, 4, 5, 6, 9])
    assert first[0] is second[0] and first[1] is not second[1] and columns.count == 3
    keys = columns.keys(np.array([0, 1, 2, 3, 4, 5, 8, 9]))
    assert columns.match(b"", keys, 8) == first[:1] and columns.agrees(first[0], keys) == 2
    columns.check()


def test_a_column_that_is_there_stays_as_it_is(columns: Columns) -> None:
    key = columns.keys(np.arange(Q))
    first, new = columns.insert(columns.root(b""), key, np.array([7], np.int32))
    again, twice = columns.insert(columns.root(b""), key, np.array([8], np.int32))
    assert again is first and new and not twice and first.pages is not None and first.pages.tolist() == [7]


def test_another_salt_finds_nothing(columns: Columns) -> None:
    put(columns, list(range(8)), b"one")
    assert matched(columns, list(range(8)), b"one") == 8
    assert matched(columns, list(range(8)), b"two") == 0 and b"two" not in columns.roots


def test_the_oldest_leaf_goes_first_and_use_refreshes(columns: Columns) -> None:
    old, new = put(columns, [0, 1, 2, 3, 4, 5, 6, 7]), put(columns, [9] * 8)
    columns.touch(old)
    gone = [columns.drop_oldest() for _ in range(4)]
    assert gone == [new[1], new[0], old[1], old[0]] and columns.drop_oldest() is None
    assert not columns.count and not columns.roots
    columns.check()


def test_what_a_request_lives_on_or_a_state_needs_is_not_dropped(columns: Columns) -> None:
    path = put(columns, list(range(16)))
    columns.cover(path[1], object())
    columns.occupy(path[2])
    assert columns.uncovered == 2
    assert [columns.drop_oldest(), columns.drop_oldest()] == [path[3], None]
    columns.leave(path[2])
    assert [columns.drop_oldest(), columns.drop_oldest()] == [path[2], None]
    columns.uncover(path[1])
    assert [columns.drop_oldest(), columns.drop_oldest()] == [path[1], path[0]] and path[1].lost


def test_a_branch_that_is_cut_is_gone_with_all_below_it(columns: Columns) -> None:
    path, other = put(columns, list(range(16))), put(columns, [*range(8), 99, 99, 99, 99])
    columns.occupy(path[3])
    gone = columns.cut(path[2])
    assert gone == [path[3], path[2]] and all(c.gone for c in gone)
    assert path[0].live == 0 and matched(columns, list(range(16))) == 8 and not other[2].gone
    columns.check()


@pytest.mark.parametrize("seed", range(4))
def test_counts_stay_true_under_random_use(seed: int) -> None:
    columns, rng = Columns(Q, 0), random.Random(seed)
    lives: list[Column] = []
    for _ in range(400):
        kind = rng.choice(["put", "put", "occupy", "leave", "cover", "uncover", "drop", "touch", "move"])
        every = list(columns)
        if kind == "put":
            put(columns, [rng.randrange(2) for _ in range(rng.randrange(20))], rng.choice([b"", b"s"]))
        elif kind == "drop":
            before = {c: c.stamp for c in every if c.droppable}
            gone = columns.drop_oldest()
            assert (gone is None) == (not before) and (gone is None or before[gone] == min(before.values()))
        elif kind == "leave" and lives:
            columns.leave(lives.pop(rng.randrange(len(lives))))
        elif kind == "move" and lives:
            at = lives.pop()
            for child in list(at.children.values())[:1]:
                columns.occupy(child, at)
                at = child
            lives.append(at)
        elif every:
            column = rng.choice(every)
            if kind == "occupy":
                columns.occupy(column)
                lives.append(column)
            elif kind == "cover" and column.checkpoint is None:
                columns.cover(column, object())
            elif kind == "uncover" and column.checkpoint is not None:
                columns.uncover(column)
            elif kind == "touch":
                columns.touch(column.path())
        columns.check()
        assert sum(c.live for c in columns if c.parent is not None and c.parent.parent is None) == len(lives)


def test_a_tail_is_found_by_its_tokens_alone_and_goes_first_until_it_is_used(columns: Columns) -> None:
    old = put(columns, [1, 2, 3, 4])[0]
    put(columns, [9, 9, 9, 9])
    one, _ = columns.insert(old, columns.keys(np.array([5])), NONE)
    two, new = columns.insert(old, columns.keys(np.array([5, 6])), NONE)
    assert new and (one.end, two.end) == (5, 6) and old.tails == 2 and columns.is_tail(two)
    keys = columns.keys(np.array([1, 2, 3, 4, 5, 6, 7]))
    assert matched(columns, [1, 2, 3, 4, 5, 6, 7, 8]) == 4, "a tail is no column"
    assert list(tails_below(columns, old, keys, 7)) == [two, one]
    assert list(tails_below(columns, old, keys, 5)) == [one]
    assert columns.agrees(old, keys) == 2
    columns.check()
    with pytest.raises(AssertionError, match="below a tail"):
        columns.insert(one, columns.keys(np.array([1, 2, 3, 4])), NONE)
    columns.touch([two])  # it was used
    columns.rebuild([])
    assert old.tails == 2
    dropped = [columns.drop_oldest() for _ in range(4)]
    assert dropped[0] is one and two not in dropped[:2] and not columns.count
    assert not old.tails
