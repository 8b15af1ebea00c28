"""PageAllocator: what it hands out, what it refuses, and that a refusal changes nothing."""

import random
from collections import Counter

import numpy as np
import pytest

from hybridkv.cache import OutOfPages, PageAllocator
from hybridkv.errors import HybridKVError


def contents(a: PageAllocator) -> tuple[int, list[int], list[int]]:
    return a.free, a.refs.tolist(), a._stack[: a.free].tolist()


def test_acquire_none_gives_an_empty_array_and_changes_nothing() -> None:
    a = PageAllocator(3)
    before = contents(a)
    assert a.acquire(0).tolist() == [] and a.acquire(0).dtype == np.int32
    assert contents(a) == before


@pytest.mark.parametrize(
    ("n", "error"), [(-1, ValueError), (5, OutOfPages), (2**40, OutOfPages), (1.5, TypeError), ("2", TypeError)]
)
def test_a_bad_acquire_is_refused_and_changes_nothing(n: object, error: type[Exception]) -> None:
    a = PageAllocator(5, "kv")
    a.acquire(1)
    before = contents(a)
    with pytest.raises(error):
        a.acquire(n)  # type: ignore[arg-type]
    assert contents(a) == before
    assert a.acquire(4).tolist() == [1, 2, 3, 4]


def test_out_of_pages_names_pool_need_and_room() -> None:
    a = PageAllocator(5, "kv")
    a.acquire(2)
    with pytest.raises(OutOfPages, match=r"need 4 pages, 3 of 5 are free in pool 'kv'") as caught:
        a.acquire(4)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (4, 3, 5)
    assert isinstance(caught.value, HybridKVError)


def test_all_pages_go_out_once_lowest_first() -> None:
    a = PageAllocator(6)
    assert [*a.acquire(2), *a.acquire(3), *a.acquire(1)] == [0, 1, 2, 3, 4, 5]
    assert (a.free, a.held) == (0, 6)
    a.check()


def test_a_freed_page_is_used_again_first() -> None:
    a = PageAllocator(8)
    a.acquire(6)
    assert a.release([4, 1]) == 2
    assert a.acquire(3).tolist() == [1, 4, 6]


def test_what_acquire_returns_is_not_a_window_into_the_stack() -> None:
    a = PageAllocator(4)
    ids = a.acquire(2)
    ids[:] = 99
    a.check()
    assert a.acquire(2).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([7], r"\[7\]"),  # beyond the pool
        ([2**31 - 1], "2147483647"),
        ([2**40], str(2**40)),  # not folded into 32 bits
        ([-1], r"\[-1\]"),  # the mark of an unused table entry
        ([0, 5], r"\[5\]"),  # one held, one that was never given out
        ([3], r"\[3\]"),  # given back before
        ([0, 1, 1], r"\[1\]"),  # twice in one call
    ],
)
def test_a_wrong_release_names_the_page_and_changes_nothing(ids: list[int], message: str) -> None:
    a = PageAllocator(7)
    a.acquire(4)
    a.release([3])
    before = contents(a)
    with pytest.raises(ValueError, match=message):
        a.release(ids)
    assert contents(a) == before
    a.check()


def test_a_double_release_is_refused() -> None:
    a = PageAllocator(4)
    ids = a.acquire(3)
    assert a.release(ids) == 3
    with pytest.raises(ValueError, match=r"\[0, 1, 2\] are free and have no owner"):
        a.release(ids)
    assert a.free == 4


def test_a_shared_page_is_free_only_when_its_last_owner_lets_go() -> None:
    a = PageAllocator(4)
    ids = a.acquire(2)
    a.share(ids)
    a.share([1])
    assert a.refs.tolist() == [2, 3, 0, 0] and a.held == 2
    assert [a.release(ids), a.release(ids), a.release([1])] == [0, 1, 1]
    assert contents(a)[0] == 4
    a.check()


def test_one_call_may_give_up_several_shares_of_a_page() -> None:
    a = PageAllocator(2)
    a.acquire(1)
    a.share([0, 0])
    assert a.refs[0] == 3
    assert a.release([0, 0]) == 0 and a.release([0]) == 1


@pytest.mark.parametrize("page", [1, 4, -1])
def test_a_page_without_owner_cannot_be_shared(page: int) -> None:
    a = PageAllocator(4)
    a.acquire(1)
    before = contents(a)
    with pytest.raises(ValueError, match=str(page)):
        a.share([0, page])
    assert contents(a) == before


def test_empty_share_and_release_do_nothing() -> None:
    a = PageAllocator(2)
    a.share([])
    assert a.release([]) == 0 and a.release(np.zeros(0, np.int32)) == 0 and a.free == 2


def test_a_pool_without_pages_has_nothing_to_give() -> None:
    a = PageAllocator(0)
    assert a.acquire(0).tolist() == []
    with pytest.raises(OutOfPages, match="need 1 pages, 0 of 0 are free"):
        a.acquire(1)
    a.check()


def test_a_pool_of_one_page_can_be_used_again_and_again() -> None:
    a = PageAllocator(1)
    for _ in range(3):
        assert a.acquire(1).tolist() == [0]
        with pytest.raises(OutOfPages):
            a.acquire(1)
        assert a.release([0]) == 1


@pytest.mark.parametrize("total", [-1, 2**31])
def test_an_impossible_pool_size_is_refused(total: int) -> None:
    with pytest.raises(ValueError, match=str(total)):
        PageAllocator(total)


@pytest.mark.parametrize("spoil", ["duplicate", "owned page on the stack", "lost page", "negative count"])
def test_check_finds_a_corrupt_pool(spoil: str) -> None:
    a = PageAllocator(6)
    a.acquire(2)
    a.check()
    if spoil == "duplicate":
        a._stack[0] = a._stack[1]
    elif spoil == "owned page on the stack":
        a.refs[4] = 1
    elif spoil == "lost page":
        a._top -= 1
    else:
        a.refs[0] = -1
    with pytest.raises(AssertionError):
        a.check()


def test_wanted_pages_are_given_where_they_are_free() -> None:
    a = PageAllocator(10)
    assert a.acquire(3, np.array([7, 2, 9])).tolist() == [7, 2, 9]
    a.check()
    # 7 has an owner, 4 is named twice, -1 and 10 are no pages: any others are given for these
    got = a.acquire(5, np.array([7, 4, 4, -1, 10])).tolist()
    assert got[1] == 4 and len(set(got)) == 5 and not {7, 2, 9} & set(got)
    a.check()
    left = np.flatnonzero(a.refs == 0)
    assert a.free == len(left) == 2
    before = contents(a)
    with pytest.raises(OutOfPages):
        a.acquire(3, np.append(left, 0))
    assert contents(a) == before
    assert a.acquire(2, left).tolist() == left.tolist()
    a.check()
    assert a.release(list(range(10))) == 10
    a.check()


def test_50000_random_operations_agree_with_a_dictionary() -> None:
    total, rng = 24, random.Random(20)
    a = PageAllocator(total)
    owners: dict[int, int] = {}
    handed: list[int] = []  # one item for each ownership
    seen: Counter[str] = Counter()
    for turn in range(50_000):
        what = rng.random()
        if what < 0.4:
            n = rng.randrange(0, 6)
            if n > total - len(owners):
                with pytest.raises(OutOfPages):
                    a.acquire(n)
                seen["out of pages"] += 1
            else:
                wanted = np.array([rng.randrange(-1, total + 1) for _ in range(n)]) if turn % 2 else None
                got = a.acquire(n, wanted).tolist()
                if wanted is not None:
                    free = {p for p in wanted.tolist() if 0 <= p < total and p not in owners}
                    assert free <= set(got), f"turn {turn}"
                for page in got:
                    assert 0 <= page < total and page not in owners, f"turn {turn}: page {page} was given out twice"
                    owners[page] = 1
                    handed.append(page)
        elif what < 0.5 and handed:
            page = rng.choice(handed)
            a.share([page])
            owners[page] += 1
            handed.append(page)
            seen["share"] += 1
        elif what < 0.97 and handed:
            picked = [handed.pop(rng.randrange(len(handed))) for _ in range(min(rng.randrange(1, 6), len(handed)))]
            freed = 0
            for page in picked:
                owners[page] -= 1
                if not owners[page]:
                    del owners[page]
                    freed += 1
            assert a.release(picked) == freed, f"turn {turn}"
            seen["release"] += 1
        elif len(owners) < total:
            page = rng.choice([p for p in range(total) if p not in owners])
            with pytest.raises(ValueError, match=str(page)):
                a.release([*handed[:2], page])
            seen["refused"] += 1
        assert a.held == len(owners) and a.free == total - len(owners), f"turn {turn}"
        if turn % 500 == 0:
            a.check()
            assert a.refs.tolist() == [owners.get(p, 0) for p in range(total)], f"turn {turn}"
    assert min(seen[k] for k in ("out of pages", "share", "release", "refused")) > 300, seen
    a.release(handed)
    a.check()
    assert sorted(a._stack.tolist()) == list(range(total)) and not a.refs.any()
