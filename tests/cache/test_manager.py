"""KVCacheManager case by case: sizes, steps, admission, refusals. Sharing is in `test_forks.py`, random use of the same
object in `test_machine.py`.
"""

import numpy as np
import pytest
import torch

from cache.machine_model import snapshot
from cache.manager_rig import HYBRID, keys, manager, refused, write
from hybridkv.cache import CacheSchema, KVCacheManager, OutOfPages, StreamSchema, TensorSpec
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.models.attention import attend

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
    assert (
        step.num_decodes == 2 and step.query_start_loc == [0, 1, 2, 11] and step.slots == [m.slot_of[x] for x in "bac"]
    )
    kv, compressed = step.streams["kv"], step.streams["compressed"]
    assert kv.lengths.tolist() == [[7] * 4, [1] * 4, [9] * 4] and compressed.lengths.tolist() == [[1], [0], [2]]
    tables = kv.table[step.index.slots]
    assert kv.table.shape == (3, 4, 10) and (tables[1, :, 1:] == -1).all() and (tables[0, :, 2:] == -1).all()
    place = (
        int(m.tables["compressed"].pages[step.slots[2], 0, 0]) * 2
    )  # of the entries that c completes: tokens 3 and 7
    assert compressed.entry_index.tolist() == [[-1] * 5 + [place] + [-1] * 3 + [place + 1] + [-1]]
    assert (compressed.table[step.slots[1]] == -1).all()
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
            outputs.append(attend(handle, q[at : at + n], 0.7))
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
