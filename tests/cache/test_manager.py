"""KVCacheManager case by case: steps, sharing, refusals. Random use of the same object is in `test_machine.py`."""

import numpy as np
import pytest
import torch

from cache.machine import HEADS, LANES, TAIL, snapshot
from hybridkv.cache import CacheSchema, KVCacheManager, OutOfPages, PagedPool, StreamSchema, TensorSpec
from hybridkv.errors import HybridKVError, RequestError

PLAIN = CacheSchema((HEADS, LANES))
HYBRID = CacheSchema((HEADS, LANES), (TAIL,))


def manager(
    schema: CacheSchema = PLAIN, kv: int = 64, compressed: int = 16, slots: int = 3, longest: int = 40
) -> KVCacheManager:
    return KVCacheManager(schema, {"kv": kv, "compressed": compressed}, slots, longest)


def write(m: KVCacheManager, plan: list[tuple[str, int]], value: float, commit: bool = True) -> None:
    """Give every new entry of the step this value, in all streams and lanes."""
    step = m.prepare_forward(plan)
    handles = m.acquire(step)
    total = sum(n for _, n in plan)
    for layer in HEADS.layers:
        handles[layer].append(torch.full((total, 2, 2), value), torch.full((total, 2, 2), -value))
    view = step.streams["compressed"]
    for row, (name, _) in enumerate(plan):
        for entry in range(int(m.lengths(name)["compressed"][0]), int(view.lengths[row, 0])):
            for t in m.tables["compressed"].pool.tensors.values():
                t[:, int(view.table[step.slots[row], 0, entry // 2]), entry % 2] = value
    if commit:
        m.commit(plan)


def stored(m: KVCacheManager, name: str) -> list[bytes]:
    """Bytes of all that the request has stored, in order."""
    slot, out = m.slot_of[name], []
    for t in m.tables.values():
        entry = np.arange(int(t.lengths[slot, 0]))
        pages = t.pages[slot][:, entry // t.schema.entries_per_page]
        out += [
            x.view(torch.uint8).numpy()[:, pages, entry % t.schema.entries_per_page].tobytes()
            for x in t.pool.tensors.values()
        ]
    return out


def keys(m: KVCacheManager, name: str) -> list[float]:
    """First component of the keys of stream 0."""
    t = m.tables["kv"]
    rows = t.pages[m.slot_of[name], 0]
    n = int(t.lengths[m.slot_of[name], 0])
    return t.pool.tensors["k"][0, rows[rows >= 0].astype(np.int64)].reshape(-1, 2)[:n, 0].tolist()


def refused(m: KVCacheManager, error: type[Exception], match: str, call) -> None:
    before = snapshot(m)
    with pytest.raises(error, match=match):
        call()
    assert snapshot(m) == before


# ---- sizes


@pytest.mark.parametrize("kv", [0, 1, 3])
def test_a_pool_with_less_than_a_page_for_each_stream_is_refused_at_the_start(kv: int) -> None:
    with pytest.raises(HybridKVError, match=rf"'kv' of {kv} pages .* its 4 streams"):
        manager(kv=kv)
    with pytest.raises(HybridKVError, match="'compressed' of 0 pages"):
        manager(compressed=0)


def test_the_smallest_pool_serves_one_page_of_tokens() -> None:
    m = manager(kv=4, compressed=1)
    m.admit_request("a")
    write(m, [("a", 4)], 1.0)
    refused(m, OutOfPages, "need 4 pages, 0 of 4 are free in pool 'kv'", lambda: m.prepare_forward([("a", 1)]))


def test_no_pages_are_needed_where_no_request_ever_fills_an_entry() -> None:
    """A context of 100 tokens and one entry per 128."""
    spec = (TensorSpec("x", (1,), torch.float32),)
    schema = CacheSchema((StreamSchema("kv", (0,), spec, 4), StreamSchema("rare", (1,), spec, 1, tokens_per_entry=128)))
    m = KVCacheManager(schema, schema.pool_pages(1, 100), slots=1, max_tokens=100)
    m.admit_request("a")
    step = m.prepare_forward([("a", 100)])
    assert step.streams["rare"].lengths.tolist() == [[0]] and step.streams["rare"].table.numel() == 0
    m.commit([("a", 100)])
    m.check_integrity()
    m.truncate_request("a", 3)
    m.release_request("a")
    m.check_integrity()


def test_a_context_exactly_at_the_maximum_fits_and_one_more_is_refused_before_any_page_is_taken() -> None:
    m = manager(longest=21)
    m.admit_request("a")
    refused(m, RequestError, r"0 \+ 22 tokens do not fit a context of 21", lambda: m.prepare_forward([("a", 22)]))
    refused(m, RequestError, "do not fit", lambda: m.prepare_forward([("a", 10**12)]))
    write(m, [("a", 20)], 1.0)
    write(m, [("a", 1)], 2.0)
    m.admit_request("b")
    refused(m, RequestError, r"21 \+ 1 tokens", lambda: m.prepare_forward([("a", 1), ("b", 1)]))
    assert m.held_pages("b") == {"kv": 0, "compressed": 0}


def test_a_short_request_beside_a_full_one_may_use_the_last_table_column() -> None:
    m = manager(longest=8)
    for name in "ab":
        m.admit_request(name)
        write(m, [(name, 8)], 1.0)
    m.fork_request("b", "c")
    m.truncate_request("c", 7)
    write(m, [("c", 1)], 3.0)
    assert keys(m, "c") == [1.0] * 7 + [3.0] and keys(m, "b") == [1.0] * 8


# ---- one step


def test_two_requests_in_one_step_keep_apart() -> None:
    m = manager()
    for name in "abc":
        m.admit_request(name)
    write(m, [("b", 6)], 5.0)
    step = m.prepare_forward([("b", 1), ("a", 1), ("c", 9)])
    assert step.singles == 2 and step.starts == [0, 1, 2, 11] and step.slots == [m.slot_of[x] for x in "bac"]
    kv, compressed = step.streams["kv"], step.streams["compressed"]
    assert kv.lengths.tolist() == [[7] * 4, [1] * 4, [9] * 4] and compressed.lengths.tolist() == [[1], [0], [2]]
    tables = kv.table[step.index.slots]
    assert kv.table.shape == (3, 4, 10) and (tables[1, :, 1:] == -1).all() and (tables[0, :, 2:] == -1).all()
    assert compressed.entry_index is None and (compressed.table[step.slots[1]] == -1).all()
    index = kv.entry_index
    assert index is not None and index.shape == (4, 11) and len(index.unique()) == 44
    for row, begin, end, old in ((0, 0, 1, 6), (1, 1, 2, 0), (2, 2, 11, 0)):
        for t in range(begin, end):
            entry = old + t - begin
            assert torch.equal(index[:, t], tables[row, :, entry // 4].long() * 4 + entry % 4)
    assert m.position("a") == 0, "nothing moves before the commit"
    m.commit([("b", 1), ("a", 1), ("c", 9)])
    assert [m.position(x) for x in "abc"] == [1, 7, 9]


@pytest.mark.parametrize(
    ("plan", "error", "match"),
    [
        ([], ValueError, "at least one"),
        ([("a", 0)], ValueError, "at least one new token"),
        ([("a", -1)], ValueError, "at least one new token"),
        ([("a", 1), ("a", 2)], ValueError, "different requests"),
        ([("a", 2), ("b", 1)], ValueError, "one token come first"),
        ([("a", 1), ("b", 3), ("c", 1)], ValueError, "one token come first"),
        ([("a", 1), ("nobody", 1)], RequestError, "'nobody' is not resident"),
    ],
)
def test_a_wrong_step_is_refused_and_changes_nothing(plan: list, error: type[Exception], match: str) -> None:
    m = manager()
    for name in "abc":
        m.admit_request(name)
    refused(m, error, match, lambda: m.prepare_forward(plan))


def test_a_step_prepared_twice_has_the_same_pages() -> None:
    m = manager()
    m.admit_request("a")
    write(m, [("a", 3)], 1.0)
    first = m.prepare_forward([("a", 10)])
    before = snapshot(m)
    again = m.prepare_forward([("a", 10)])
    assert snapshot(m) == before
    for name in first.streams:
        assert torch.equal(first.streams[name].table, again.streams[name].table)
        assert np.array_equal(first.streams[name].lengths, again.streams[name].lengths)
    assert torch.equal(first.streams["kv"].entry_index, again.streams["kv"].entry_index)
    assert m.held_pages("a") == {"kv": 4 * 4, "compressed": 2}


def test_a_smaller_retry_takes_nothing_and_the_spare_pages_are_used_later() -> None:
    m = manager()
    m.admit_request("a")
    m.prepare_forward([("a", 13)])
    before = snapshot(m)
    write(m, [("a", 1)], 1.0, commit=False)
    for what in ("kv.pages", "kv.held", "kv.refs", "compressed.pages"):
        assert snapshot(m)[what] == before[what]
    m.commit([("a", 1)])
    m.check_integrity()
    write(m, [("a", 12)], 2.0)
    assert m.held_pages("a") == {"kv": 16, "compressed": 2} and keys(m, "a") == [1.0] + [2.0] * 12


def test_handles_take_no_pages_and_show_each_layer_its_own() -> None:
    m = manager(HYBRID)
    m.admit_request("a")
    step = m.prepare_forward([("a", 8)])
    before = snapshot(m)
    handles = m.acquire(step)
    assert snapshot(m) == before and set(handles) == {0, 1, 2, 3, 4, 5}
    assert handles[0].rows == slice(0, 2) and handles[2].rows == slice(2, 4)
    handles[3].paged["main"][0, 0] = 9.0
    assert (m.tables["compressed"].pool.tensors["main"][1, 0, 0] == 9).all()
    assert set(handles[1].state) == {"z", "n"} and set(handles[1].paged) == {"main", "index"} and not handles[5].paged


def test_a_step_that_one_pool_cannot_serve_takes_nothing_from_the_other_however_often_it_is_tried() -> None:
    m = manager(kv=64, compressed=1, slots=2)
    for name in "ab":
        m.admit_request(name)
    write(m, [("a", 8)], 1.0)
    for _ in range(3):
        refused(
            m,
            OutOfPages,
            "need 2 pages, 0 of 1 are free in pool 'compressed'",
            lambda: m.prepare_forward([("a", 5), ("b", 9)]),
        )
    m.release_request("a")
    write(m, [("b", 9)], 2.0)
    assert m.held_pages("b") == {"kv": 4 * 3, "compressed": 1}


def test_commit_of_an_unknown_request_moves_nobody() -> None:
    m = manager()
    m.admit_request("a")
    m.prepare_forward([("a", 2)])
    refused(m, RequestError, "'ghost' is not resident", lambda: m.commit([("a", 2), ("ghost", 1)]))


@pytest.mark.parametrize(("pools", "fits"), [({"kv": 8, "compressed": 4}, 8), ({"kv": 64, "compressed": 1}, 11)])
def test_pages_needed_and_returnable_are_exact(pools: dict[str, int], fits: int) -> None:
    m = manager(**pools)
    assert m.tokens_alone() == fits
    for tokens, enough in ((fits, True), (fits + 1, False)):
        need, free = m.pages_needed(None, tokens), m.free_pages()
        assert all(need[name] <= free[name] for name in need) == enough
    m.admit_request("a")
    need = m.pages_needed("a", fits)
    write(m, [("a", fits)], 1.0)
    assert need == m.held_pages("a") == m.returnable_pages("a")
    m.fork_request("a", "b")
    assert set(m.returnable_pages("a").values()) == {0}  # the fork still needs them


# ---- admission and release


def test_names_and_slots_are_checked() -> None:
    m = manager(slots=2)
    m.admit_request("a")
    refused(m, RequestError, "'a' is resident already", lambda: m.admit_request("a"))
    refused(m, RequestError, "'a' is resident already", lambda: m.fork_request("a", "a"))
    refused(m, RequestError, "'x' is not resident", lambda: m.fork_request("x", "b"))
    m.admit_request("b")
    refused(m, HybridKVError, "all 2 request slots are taken", lambda: m.admit_request("c"))
    refused(m, HybridKVError, "all 2 request slots are taken", lambda: m.fork_request("a", "c"))
    for call in (m.release_request, m.position, m.lengths, m.held_pages, m.held_bytes):
        refused(
            m,
            RequestError,
            "'ghost' is not resident; it was released or never admitted",
            lambda call=call: call("ghost"),
        )


def test_a_second_release_is_refused_and_frees_nothing() -> None:
    m = manager()
    for name in "ab":
        m.admit_request(name)
        write(m, [(name, 7)], 1.0)
    m.release_request("a")
    refused(m, RequestError, "'a' is not resident", lambda: m.release_request("a"))
    assert keys(m, "b") == [1.0] * 7


def test_a_released_row_names_no_page() -> None:
    m = manager()
    slot = m.admit_request("a")
    write(m, [("a", 17)], 1.0)
    m.prepare_forward([("a", 9)])  # and pages reserved for a step that never ran
    m.release_request("a")
    for t in m.tables.values():
        assert (t.pages[slot] == -1).all() and not t.held[slot].any() and not t.lengths[slot].any()
        assert t.allocator.free == t.allocator.total
        assert sorted(t.allocator._stack.tolist()) == list(range(t.allocator.total))
    assert m.positions[slot] == 0


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 9])
def test_a_reused_slot_with_poisoned_pages_answers_as_a_fresh_one(prompt: int) -> None:
    g = torch.Generator().manual_seed(prompt)
    k, v, q = (torch.randn(prompt, 2, 2, generator=g) for _ in range(3))

    def answer(m: KVCacheManager) -> torch.Tensor:
        m.admit_request("b")
        outputs = []
        for n in [prompt - 1, 1] if prompt > 1 else [1]:
            at = m.position("b")
            handle = m.acquire(m.prepare_forward([("b", n)]))[2]
            handle.append(k[at : at + n], v[at : at + n])
            outputs.append(handle.attend(q[at : at + n], 0.7))
            m.commit([("b", n)])
        return torch.cat(outputs)

    cold = answer(manager(slots=1))
    used = manager(slots=1, kv=16, compressed=4)
    used.admit_request("a")
    write(used, [("a", 16)], 1.0)
    for t in used.tables.values():
        for x in t.pool.tensors.values():
            x.fill_(float("nan") if x.is_floating_point() else -1)
    used.release_request("a")
    assert torch.equal(answer(used), cold) and cold.isfinite().all()


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
