"""KVCacheManager case by case: forks, which share pages until one writes, truncation, and the manager's own alarm."""

import pytest
import torch

from cache.manager_rig import HYBRID, keys, manager, refused, stored, write
from hybridkv.cache import CacheSchema, KVCacheManager, OutOfPages, PagedPool, StreamSchema, TensorSpec
from hybridkv.errors import RequestError

# ---- forks


def test_a_fork_takes_no_pages_and_holds_the_same_bytes() -> None:
    m = manager(HYBRID)
    m.admit_request("a")
    write(m, [("a", 11)], 1.5)
    free = [t.allocator.free for t in m.tables.values()]
    m.fork_request("a", "b")
    assert [t.allocator.free for t in m.tables.values()] == free
    assert stored(m, "b") == stored(m, "a") and m.position("b") == 11
    assert m.lengths("b")["kv"].tolist() == [11] * 4 and m.held_bytes("b") == m.held_bytes("a")
    m.check_integrity()


@pytest.mark.parametrize("writer", ["a", "b"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_a_write_by_one_sharer_leaves_the_other_bit_identical(length: int, writer: str) -> None:
    m = manager()
    m.admit_request("a")
    write(m, [("a", length)], 1.0)
    m.fork_request("a", "b")
    other = "b" if writer == "a" else "a"
    before = stored(m, other)
    write(m, [(writer, 6)], 7.0)
    assert stored(m, other) == before
    assert keys(m, writer) == [1.0] * length + [7.0] * 6 and keys(m, other) == [1.0] * length
    write(m, [(other, 6)], 8.0)
    assert keys(m, writer) == [1.0] * length + [7.0] * 6 and keys(m, other) == [1.0] * length + [8.0] * 6
    m.check_integrity()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_sharer_may_leave_first_or_last_but_not_twice(order: str) -> None:
    m = manager()
    m.admit_request("a")
    write(m, [("a", 10)], 1.0)
    m.fork_request("a", "b")
    first, last = order
    before = stored(m, last)
    held = m.tables["kv"].allocator.held
    m.release_request(first)
    assert m.tables["kv"].allocator.held == held and stored(m, last) == before
    refused(m, RequestError, "not resident", lambda: m.release_request(first))
    write(m, [(last, 1)], 2.0)
    assert m.tables["kv"].allocator.held == held, "the last owner writes in place"
    m.release_request(last)
    refused(m, RequestError, "not resident", lambda: m.release_request(last))
    assert all(t.allocator.held == 0 for t in m.tables.values())


def test_forks_that_write_in_one_step_need_a_copy_less_than_they_are() -> None:
    """Three owners of an open page: two copy, the last keeps it. The pool has exactly that many pages."""
    m = manager(kv=4 * 3, compressed=1)
    m.admit_request("a")
    write(m, [("a", 2)], 1.0)
    m.fork_request("a", "b")
    m.fork_request("b", "c")
    write(m, [("a", 1), ("b", 1), ("c", 1)], 2.0)
    assert m.tables["kv"].allocator.free == 0
    assert [keys(m, x) for x in "abc"] == [[1.0, 1.0, 2.0]] * 3
    m.check_integrity()


def test_forks_that_cannot_all_copy_are_refused_together() -> None:
    m = manager(kv=4 * 3 - 1, compressed=1)
    m.admit_request("a")
    write(m, [("a", 2)], 1.0)
    m.fork_request("a", "b")
    m.fork_request("b", "c")
    plan = [("a", 1), ("b", 1), ("c", 1)]
    refused(m, OutOfPages, "need 8 pages, 7 of 11", lambda: m.prepare_forward(plan))
    m.release_request("c")
    write(m, plan[:2], 2.0)
    assert keys(m, "a") == keys(m, "b") == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("length", [0, 2, 4])
def test_pages_reserved_for_a_step_that_never_ran_are_not_shared(length: int) -> None:
    m = manager()
    m.admit_request("a")
    if length:
        write(m, [("a", length)], 1.0)
    m.prepare_forward([("a", 9)])  # reserves pages; the step fails
    m.fork_request("a", "b")
    m.check_integrity()
    write(m, [("a", 9)], 2.0)
    write(m, [("b", 9)], 3.0)
    assert keys(m, "a") == [1.0] * length + [2.0] * 9 and keys(m, "b") == [1.0] * length + [3.0] * 9


def test_a_copy_that_fails_loses_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    m = manager()
    m.admit_request("a")
    write(m, [("a", 5)], 1.0)
    m.fork_request("a", "b")

    def no_memory(self: PagedPool, source: torch.Tensor, target: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(PagedPool, "copy_pages", no_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            m.prepare_forward([("b", 1)])
    m.check_integrity()
    write(m, [("b", 1)], 2.0)
    assert keys(m, "a") == [1.0] * 5 and keys(m, "b") == [1.0] * 5 + [2.0]
    m.release_request("a")
    m.release_request("b")
    assert all(t.allocator.held == 0 for t in m.tables.values())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint8, torch.float32])
def test_a_page_is_copied_byte_for_byte_in_any_dtype(dtype: torch.dtype) -> None:
    s = StreamSchema("x", (0, 1), (TensorSpec("x", (8,), dtype),), 4, shared=True)
    m = KVCacheManager(CacheSchema((s,)), {"x": 4}, slots=2, max_tokens=16)
    m.admit_request("a")
    m.prepare_forward([("a", 3)])
    m.commit([("a", 3)])
    raw = m.tables["x"].pool.tensors["x"].view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))  # NaN patterns and all
    before = raw.clone()
    m.fork_request("a", "b")
    m.prepare_forward([("b", 1)])
    old, new = (int(m.tables["x"].pages[m.slot_of[name], 0, 0]) for name in "ab")
    assert old != new and torch.equal(raw[:, new], before[:, old]) and torch.equal(raw[:, old], before[:, old])


def test_the_state_of_a_fork_goes_its_own_way() -> None:
    m = manager(HYBRID)
    a = m.admit_request("a")
    m.state.tensors["tail", "z"][:, a] = 4.0
    b = m.fork_request("a", "b")
    m.state.tensors["tail", "z"][:, b] = 5.0
    assert (m.state.tensors["tail", "z"][:, a] == 4).all()


# ---- truncation


@pytest.mark.parametrize("to", [0, 1, 3, 4, 5, 7, 8, 9, 12, 13])
def test_truncation_keeps_the_past_and_returns_whole_pages(to: int) -> None:
    m = manager()
    m.admit_request("a")
    write(m, [("a", 13)], 1.0)
    m.truncate_request("a", to)
    assert m.position("a") == to and m.held_pages("a") == {"kv": 4 * -(-to // 4), "compressed": -(-(to // 4) // 2)}
    assert keys(m, "a") == [1.0] * to
    m.check_integrity()
    write(m, [("a", 5)], 2.0)
    assert keys(m, "a") == [1.0] * to + [2.0] * 5


def test_truncation_of_a_fork_leaves_the_other_alone() -> None:
    m = manager()
    m.admit_request("a")
    write(m, [("a", 13)], 1.0)
    m.fork_request("a", "b")
    before = stored(m, "a")
    m.truncate_request("b", 6)
    write(m, [("b", 7)], 2.0)
    assert stored(m, "a") == before and keys(m, "b") == [1.0] * 6 + [2.0] * 7


@pytest.mark.parametrize("to", [-1, 6, 10**9])
def test_truncation_outside_the_past_is_refused(to: int) -> None:
    m = manager()
    m.admit_request("a")
    write(m, [("a", 5)], 1.0)
    refused(
        m, RequestError, f"cannot truncate to {to}: the request is at position 5", lambda: m.truncate_request("a", to)
    )


def test_recurrent_state_is_not_rewound_and_the_request_stays_usable() -> None:
    m = manager(HYBRID)
    m.admit_request("a")
    write(m, [("a", 5)], 1.0)
    refused(m, RequestError, "recurrent state cannot be rewound", lambda: m.truncate_request("a", 4))
    m.truncate_request("a", 5)
    write(m, [("a", 2)], 2.0)
    assert keys(m, "a") == [1.0] * 5 + [2.0] * 2


# ---- the manager's own alarm


@pytest.mark.parametrize("spoil", ["page owned twice", "lost page", "held", "too long", "free slot", "lost slot"])
def test_check_integrity_notices(spoil: str) -> None:
    m = manager()
    a, b = m.admit_request("a"), m.admit_request("b")
    write(m, [("a", 5), ("b", 6)], 1.0)
    m.check_integrity()
    t = m.tables["kv"]
    if spoil == "page owned twice":
        t.pages[b, 0, 0] = t.pages[a, 0, 0]
    elif spoil == "lost page":
        t.pages[a, 0, 1] = -1
        t.held[a, 0] = 1
    elif spoil == "held":
        t.held[a, 2] += 1
    elif spoil == "too long":
        t.lengths[a, 1] = 9
    elif spoil == "free slot":
        t.lengths[m._free_slots[0]] = 1
        t.held[m._free_slots[0]] = 0
    else:
        m._free_slots.pop()
    with pytest.raises(AssertionError):
        m.check_integrity()
