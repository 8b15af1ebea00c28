"""What a step carries to the device: page tables that follow the manager's, places of new entries, rows of padding."""

import numpy as np
import torch

from hybridkv.cache import CacheSchema, ForwardStep, KVCacheManager, StateSchema, StreamSchema, TensorSpec

WINDOW, P = 3, 4
KV = StreamSchema(
    "kv", (0, 1), (TensorSpec("k", (2,), torch.float32), TensorSpec("v", (2,), torch.float32)), P, heads=2
)
RING = StateSchema("queries", (0, 1), (TensorSpec("queries", (WINDOW, 2, 2), torch.float32),), lent=True)


def manager(pages: int = 64) -> KVCacheManager:
    m = KVCacheManager(CacheSchema((KV,), (RING,)), {"kv": pages}, slots=4, max_tokens=40)
    for name in "abcd":
        m.admit_request(name)
    return m


def run(m: KVCacheManager, plan: list[tuple[str, int]], rows: int | None = None) -> ForwardStep:
    step = m.prepare_forward(plan, rows)
    m.commit(plan)
    return step


def assert_mirrored(m: KVCacheManager, names: str) -> None:
    """After a step of these requests the device has their pages."""
    table = m.tables["kv"]
    for name in names:
        slot = m.slot_of[name]
        assert np.array_equal(table.device_table[slot].numpy(), table.pages[slot]), name


def test_page_ids_on_the_device_follow_every_change() -> None:
    m = manager()
    run(m, [("a", 9), ("b", 3)])
    assert_mirrored(m, "ab")
    m.compact_request("a", {0: [np.arange(2), np.arange(3)], 1: [np.arange(9), np.array([1, 8])]})
    run(m, [("a", 1)])
    assert_mirrored(m, "a")
    m.release_request("d")
    m.fork_request("a", "e")  # the open pages are copied when one of them writes
    run(m, [("a", 1), ("e", 1)])
    assert_mirrored(m, "ae")
    m.release_request("b")
    m.admit_request("f")
    run(m, [("f", 6)])
    assert_mirrored(m, "f")
    m.truncate_request("f", 6)
    m.release_request("f")
    m.admit_request("g")
    run(m, [("g", 1)])
    assert_mirrored(m, "g")


def test_only_what_has_changed_is_sent() -> None:
    m = manager()
    run(m, [("a", 1)])
    table = m.tables["kv"]
    table.device_table[m.slot_of["b"]] = 77  # nobody's business in a step of others
    run(m, [("a", 2)])
    assert (table.device_table[m.slot_of["b"]] == 77).all() and not table.changed & {m.slot_of["a"]}
    table.device_table[m.slot_of["a"]] = 77
    run(m, [("a", 1)])  # the open page has room: no id changes
    assert (table.device_table[m.slot_of["a"]] == 77).all()
    run(m, [("a", 1)])
    assert (table.device_table[m.slot_of["a"], :, 1] == torch.from_numpy(table.pages[m.slot_of["a"], :, 1])).all()


def test_rows_of_padding_have_no_place_anywhere() -> None:
    m = manager()
    run(m, [("a", 5), ("c", 2)])
    step = run(m, [("a", 1), ("c", 1)], rows=4)
    a, c = (m.slot_of[x] for x in "ac")
    view, table = step.streams["kv"], m.tables["kv"]
    assert step.slots == [a, c, -1, -1] and step.num_decodes == 4 and step.query_start_loc == [0, 1, 2, 3, 4]
    assert step.index.slots.tolist() == step.slots and step.index.positions.tolist() == [5, 2, 0, 0]
    assert view.lengths is not None and view.lengths.tolist() == [[6] * 4, [3] * 4, [0] * 4, [0] * 4]
    assert torch.equal(view.device_lengths, torch.from_numpy(view.lengths))
    assert view.max_entries == step.max_entries == 6
    assert view.entry_index is not None and (view.entry_index[:, 2:] == -1).all()
    pages = torch.from_numpy(np.stack([table.pages[a, :, 1], table.pages[c, :, 0]], 1)).long()
    assert torch.equal(view.entry_index[:, :2], pages * P + torch.tensor([1, 2]))
    assert step.query_rows is not None and step.query_rows.tolist() == [a * WINDOW + 5 % WINDOW, c * WINDOW + 2, -1, -1]


def test_a_padding_step_is_all_padding_and_knows_no_length() -> None:
    m = manager()
    run(m, [("a", 5)])
    before = m.tables["kv"].pages.copy(), m.positions.copy()
    step = m.padding_step(3)
    view = step.streams["kv"]
    assert step.slots == [-1] * 3 and view.lengths is None and not view.device_lengths.any()
    assert step.max_entries == view.max_entries == m.max_tokens and m.padding_step(3, reach=8).max_entries == 8
    assert view.entry_index is not None and (view.entry_index == -1).all() and (step.query_rows == -1).all()
    assert np.array_equal(before[0], m.tables["kv"].pages) and np.array_equal(before[1], m.positions)
    real = m.prepare_forward([("a", 1)], rows=3)
    assert real.packed.shape == step.packed.shape  # a graph's buffer takes what a step brings


def test_the_last_queries_of_each_request_have_rows_in_the_ring() -> None:
    m = manager()
    step = m.prepare_forward([("b", 1), ("a", 2), ("c", 8)])
    b, a, c = (m.slot_of[x] * WINDOW for x in "bac")
    assert step.query_rows is not None
    assert step.query_rows.tolist() == [b, a, a + 1, *[-1] * 5, c + 5 % 3, c + 6 % 3, c + 7 % 3]


def test_what_is_sent_is_aligned_whatever_the_number_of_requests() -> None:
    """To 16 bytes each: kernels would be compiled once more for what is not."""
    m = manager()
    for plan in ([("a", 1)], [("a", 1), ("b", 3)], [("a", 1), ("b", 1), ("c", 5)], [("a", 1), ("b", 1), ("c", 1)]):
        step = run(m, plan)
        view = step.streams["kv"]
        index = step.index
        sent = (index.slots, index.num_computed, index.query_start_loc, index.token_to_req, index.positions)
        for part in filter(lambda part: part is not None, (*sent, view.device_lengths, view.places, step.query_rows)):
            assert (part.data_ptr() - step.packed.data_ptr()) % 16 == 0
        assert step.index.slots.tolist() == [m.slot_of[name] for name, _ in plan]
        assert view.device_lengths.tolist() == [m.tables["kv"].lengths[m.slot_of[name]].tolist() for name, _ in plan]


def test_on_a_cpu_the_pages_of_a_stream_follow_one_another() -> None:
    """However its request grows, and beside others, as long as there is room behind its last page."""
    m = manager(pages=4 * 4 * 10)
    for plan in ([("a", 9), ("b", 3)], [("a", 1), ("b", 2), ("c", 17)], [("b", 14)], [("c", 1), ("a", 20)]):
        run(m, plan)
    table = m.tables["kv"]
    for name, pages in (("a", 8), ("b", 5), ("c", 5)):
        rows = table.pages[m.slot_of[name], :, :pages]
        assert (np.diff(rows, axis=1) == 1).all() and (np.diff(rows[:, 0]) == 10).all(), name
    # in a pool with room for one request, a second one has what is left, in any order
    m = manager(pages=4 * 10)
    run(m, [("a", 9), ("b", 9)])
    run(m, [("a", 16), ("b", 3)])
    table = m.tables["kv"]
    given = np.concatenate([table.pages[m.slot_of[name]].ravel() for name in "ab"])
    assert len(np.unique(given[given >= 0])) == (given >= 0).sum() == 4 * (7 + 3)
    table.allocator.check()


def test_one_request_with_equally_long_streams_has_its_pages_found_once() -> None:
    m = manager()
    view = run(m, [("a", 6)]).streams["kv"]
    assert view.even_pages is not None and view.even_pages.length == 6 and view.stores_all
    assert np.array_equal(view.even_pages.ids.numpy(), m.tables["kv"].pages[m.slot_of["a"], :, :2])
    assert view.even_pages is view.even_pages
    assert run(m, [("a", 1), ("b", 1)]).streams["kv"].even_pages is None
    padded = run(m, [("b", 1)], rows=2).streams["kv"]
    assert padded.even_pages is None and not padded.stores_all
    assert m.padding_step(1).streams["kv"].even_pages is None
    m.compact_request("a", {0: [np.arange(2), np.arange(3)], 1: [np.arange(2), np.arange(2)]})
    assert run(m, [("a", 1)]).streams["kv"].even_pages is None  # one stream holds more than the others
    m.compact_request("a", {0: [np.arange(2)] * 2, 1: [np.arange(2)] * 2})
    after = run(m, [("a", 1)]).streams["kv"].even_pages
    assert after is not None and after.length == 3
