"""The cache of compressed attention: pages and slots, what steps reserve, and where the window lies."""

from typing import Any

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from cache.compressed_rig import KINDS, REAL, Rig, facts, numbers, refused
from hybridkv.cache import KVCacheManager, OutOfPages
from hybridkv.errors import HybridKVError, RequestError

WINDOW, CSA, HCA = 0, 1, 2  # layers of the rig
F32 = 2e-6  # sums of a few dozen terms in f32 against float64


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


# ---- requests, slots, pages


def test_slots_and_pages_come_back(rig: Rig) -> None:
    m = rig.manager(64, requests=2)
    free = m.free_pages()
    assert free == {"csa": 8, "hca": 8}
    for turn in range(3):  # all slots and pages are used again and again
        for name in ("a", "b"):
            slot = m.admit_request((name, turn))
            for layer in range(len(KINDS)):
                for key, t in m.state.layer(layer).items():
                    assert (t[slot] == (-torch.inf if key in ("main_z", "index_z", "top") else 0)).all()
            rig.run(m, {(name, turn): numbers(64, turn)}, attend=False)
        assert set(m.free_pages().values()) == {0}
        refused(m, HybridKVError, lambda: m.admit_request("one more"), "2 request slots are taken")
        m.check_integrity()
        for name in ("a", "b"):
            m.release_request((name, turn))
        assert m.free_pages() == free and m.free_slots == 2


def test_requests_that_are_not_there(rig: Rig) -> None:
    m = rig.manager(64)
    m.admit_request("a")
    rig.run(m, {"a": numbers(20)}, attend=False)
    m.release_request("a")
    m.admit_request("b")
    for name in ("a", "never"):
        for call in (
            m.release_request,
            m.position,
            lambda r: m.prepare_forward([(r, 1)]),
            lambda r: m.prepare_forward([("b", 1), (r, 1)]),
            lambda r: m.commit([("b", 1), (r, 1)]),
            lambda r: m.allocate_block(r, "csa"),
            lambda r: m.fork_request(r, "child"),
            lambda r: m.truncate_request(r, 0),
        ):
            refused(m, RequestError, lambda call=call, name=name: call(name), "not resident")
    refused(m, RequestError, lambda: m.admit_request("b"), "resident already")
    refused(m, RequestError, lambda: m.allocate_block("b", "nope"), "no pool 'nope'; there are csa, hca")


@pytest.mark.parametrize(
    "plan", [[], [("a", 0)], [("a", -1)], [("a", 1), ("b", 0)], [("a", 1), ("a", 1)], [("a", 4), ("b", 1)]]
)
def test_steps_of_nothing_are_refused(rig: Rig, plan: list[tuple[str, int]]) -> None:
    m = rig.manager(64)
    m.admit_request("a"), m.admit_request("b")
    refused(m, ValueError, lambda: m.prepare_forward(plan))


def test_padding_needs_one_token_a_request_and_rows_for_all(rig: Rig) -> None:
    m = rig.manager(64)
    m.admit_request("a"), m.admit_request("b")
    refused(m, ValueError, lambda: m.prepare_forward([("a", 1), ("b", 1)], rows=1), "2 requests")
    refused(m, ValueError, lambda: m.prepare_forward([("a", 20)], rows=3), "3 rows")  # and no page is taken for it


@pytest.mark.parametrize("pool", ["csa", "hca"])
def test_an_exhausted_pool_changes_nothing(rig: Rig, pool: str) -> None:
    """Whichever of the two pools it is: what the other could give is not taken."""
    m = rig.manager(64, requests=3, pages={pool: 3})
    for name in "abc":
        m.admit_request(name)
    rig.run(m, {"a": numbers(32), "b": numbers(17)}, attend=False)
    wanted = [("c", 1), ("a", 16), ("b", 16)]
    for _ in range(2):
        refused(m, OutOfPages, lambda: m.prepare_forward(wanted), f"pool '{pool}'")
    m.check_integrity()
    m.release_request("b")
    rig.run(m, {"c": numbers(1), "a": numbers(16)}, attend=False)
    assert m.position("a") == 48


def test_a_request_longer_than_the_context_is_refused(rig: Rig) -> None:
    m = rig.manager(30)
    m.admit_request("a")
    refused(m, RequestError, lambda: m.prepare_forward([("a", 31)]), "30 tokens")
    rig.run(m, {"a": numbers(30)}, attend=False)
    refused(m, RequestError, lambda: m.prepare_forward([("a", 1)]), "30 tokens")


def test_a_context_too_short_for_any_entry(rig: Rig) -> None:
    m = rig.manager(3)
    assert m.free_pages() == {"csa": 0, "hca": 0}
    m.admit_request("a")
    tokens = numbers(3)
    out = torch.cat((rig.feed(m, "a", tokens[:2]), rig.feed(m, "a", tokens[2:])), 1)
    for layer in range(len(KINDS)):
        want = torch.stack([rig.attention(layer, tokens, t) for t in range(3)])
        assert_close_rms(f"layer {layer}", want, out[layer], F32)


# ---- what a step reserves


@pytest.mark.parametrize(
    ("pool", "a", "b", "pages"),
    [
        ("csa", 0, 3, 0), ("csa", 0, 4, 1), ("csa", 0, 127, 1), ("csa", 127, 128, 0), ("csa", 128, 131, 0),
        ("csa", 131, 132, 1), ("csa", 132, 256, 0), ("csa", 0, 132, 2), ("csa", 3, 516, 5),
        ("hca", 0, 127, 0), ("hca", 127, 128, 1), ("hca", 128, 255, 0), ("hca", 255, 256, 1), ("hca", 0, 512, 4),
    ],
)  # fmt: skip
def test_pages_at_the_known_transitions(pool: str, a: int, b: int, pages: int) -> None:
    m = Rig(REAL).manager(600, requests=1)
    m.admit_request("a")
    if a:
        m.prepare_forward([("a", a)])
        m.commit([("a", a)])
    before = m.held_pages("a")[pool]
    assert m.pages_needed("a", b - a)[pool] == pages
    for _ in range(2):  # asked twice, taken once
        m.prepare_forward([("a", b - a)])
        assert m.held_pages("a")[pool] - before == pages
    m.commit([("a", b - a)])
    assert m.lengths("a")[pool].tolist() == [b // {"csa": 4, "hca": 128}[pool]]
    m.check_integrity()


def test_pages_taken_ahead_are_used(rig: Rig) -> None:
    m = rig.manager(64, requests=1)
    m.admit_request("a")
    ids = [m.allocate_block("a", "csa") for _ in range(2)] + [m.allocate_block("a", "hca")]
    assert ids == [0, 1, 0] and m.held_pages("a") == {"csa": 2, "hca": 1}
    rig.run(m, {"a": numbers(31)}, attend=False)  # 7 entries of 4 a page; 1 of 1
    assert m.held_pages("a") == {"csa": 2, "hca": 1}
    rig.run(m, {"a": numbers(5)}, attend=False)
    assert m.held_pages("a") == {"csa": 3, "hca": 2}
    m.allocate_block("a", "csa")
    refused(m, RequestError, lambda: m.allocate_block("a", "csa"), "64 tokens")
    m.check_integrity()
    tight = rig.manager(64, requests=1, pages={"csa": 1})
    tight.admit_request("a")
    tight.allocate_block("a", "csa")
    refused(tight, OutOfPages, lambda: tight.allocate_block("a", "csa"), "pool 'csa'")


def test_a_step_that_is_prepared_again_is_the_same(rig: Rig) -> None:
    """After a failure on the way, and after tokens were taken back, pages are neither lost nor taken twice."""
    m = rig.manager(64, requests=2, pages={"csa": 4}, drafts=2)
    m.admit_request("a"), m.admit_request("b")
    rig.run(m, {"a": numbers(30), "b": numbers(3)}, attend=False)
    first = m.prepare_forward([("b", 1), ("a", 3)])
    before = facts(m)
    again = m.prepare_forward([("b", 1), ("a", 3)])
    assert facts(m) == before and torch.equal(first.packed, again.packed)
    rig.run(m, {"b": numbers(1), "a": numbers(3)}, attend=False)
    assert m.held_pages("a") == {"csa": 2, "hca": 2} and m.position("a") == 33
    rig.run(m, {"a": numbers(1)}, attend=False)
    m.truncate_request("a", 32)
    assert m.held_pages("a") == {"csa": 2, "hca": 2} and m.lengths("a")["csa"].tolist() == [8]
    rig.run(m, {"a": numbers(4)}, attend=False)
    assert m.held_pages("a") == {"csa": 3, "hca": 2}
    refused(m, OutOfPages, lambda: m.prepare_forward([("a", 28)]))
    rig.run(m, {"a": numbers(12)}, attend=False)
    assert m.held_pages("a") == {"csa": 3, "hca": 3}
    m.check_integrity()


def table_is_right(m: KVCacheManager, handles: dict[int, Any]) -> bool:
    """The device's table names the host's pages for every slot of the step."""
    for layer in (CSA, HCA):
        h = handles[layer]
        pages = torch.from_numpy(m.tables[h.schema.kind].pages[:, 0])
        if not all(torch.equal(h.table[slot], pages[slot]) for slot in h.step.slots if slot >= 0):
            return False
    return True


def test_the_device_knows_the_pages_of_every_request_of_a_step(rig: Rig) -> None:
    """Through growth, preemption, reuse of a slot by another request, forks and rewinds."""
    m = rig.manager(64, requests=3, drafts=2)
    for name in "abc":
        m.admit_request(name)
    assert table_is_right(m, rig.run(m, {"a": numbers(30), "b": numbers(32), "c": numbers(7)}).handles)
    m.release_request("a")  # preempted: its pages go to c, and others to it when it is back
    rig.run(m, {"c": numbers(20)})
    m.admit_request("a")
    assert table_is_right(m, rig.run(m, {"a": numbers(60), "c": numbers(2)}).handles)
    m.release_request("c")
    m.fork_request("b", "d")  # in c's slot
    assert table_is_right(m, rig.run(m, {"b": numbers(1), "d": numbers(1)}).handles)
    m.truncate_request("d", 31)  # its last page is shared
    assert table_is_right(m, rig.run(m, {"b": numbers(3), "d": numbers(5)}).handles)
    m.check_integrity()


class OnlyViews(TorchDispatchMode):
    """Counts operations that make a tensor which is no view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            self.made.append(str(func))
        return func(*args, **(kwargs or {}))


def test_acquire_allocates_nothing(rig: Rig) -> None:
    m = rig.manager(64)
    m.admit_request("a"), m.admit_request("b")
    rig.run(m, {"a": numbers(20), "b": numbers(3)})
    step = m.prepare_forward([("a", 1), ("b", 1)])
    with OnlyViews() as seen:
        handles, again = m.acquire(step), m.acquire(step)
    assert not seen.made
    with OnlyViews() as seen:
        torch.zeros(1)
    assert seen.made
    own = {t.untyped_storage().data_ptr() for table in m.tables.values() for t in table.pool.tensors.values()}
    own |= {t.untyped_storage().data_ptr() for t in m.state.tensors.values()}
    for layer, h in handles.items():
        twin = again[layer]
        assert h.index is twin.index is step.index and h.chunk_index is step.chunk_index and h.view is twin.view
        for held, other in ((h.paged, twin.paged), (h.state, twin.state)):
            for key, t in held.items():
                assert t.data_ptr() == other[key].data_ptr() and t.untyped_storage().data_ptr() in own
    later = m.acquire(m.prepare_forward([("a", 1)]))  # another step: the same memory
    assert all(t.data_ptr() == later[i].state[key].data_ptr() for i, h in handles.items() for key, t in h.state.items())
    assert all(t.data_ptr() == later[i].paged[key].data_ptr() for i, h in handles.items() for key, t in h.paged.items())


# ---- the window


@pytest.mark.parametrize(("drafts", "ring"), [(0, None), (3, None), (0, 13)])
@pytest.mark.parametrize("chunks", [(1,) * 21, (3, 1, 6, 1, 1, 9), (21,), (8, 8, 5), (7, 1, 13)])
def test_positions_in_the_ring(rig: Rig, chunks: tuple[int, ...], drafts: int, ring: int | None) -> None:
    """Position u lies in row u mod ring, whatever the chunks were; no request touches another's rows."""
    more = {} if ring is None else {"ring": ring}
    m = rig.manager(64, drafts=drafts, **more)
    m.admit_request("other")
    rig.run(m, {"other": numbers(11, 5)}, attend=False)
    other = m.state.layer(WINDOW)["window"][m.slot_of["other"]].clone()
    slot, R, tokens, at = m.admit_request("a"), ring or 8 + drafts, numbers(21), 0
    for n in chunks:
        ran = rig.run(m, {"a": tokens[at : at + n]}, attend=False)
        at += n
        for layer in range(len(KINDS)):
            view = ran.handles[layer].read_swa_view()
            want = [next((u for u in range(max(0, at - 8), at) if u % R == row), -1) for row in range(R)]
            assert view.positions.tolist() == [want]
            rows = rig.window_rows(layer, tokens[:at])
            for row, u in enumerate(want):
                if u >= 0:
                    assert_close_rms("row", rows[u], view.ring[slot, row], F32)
                elif at <= row:  # nothing was written there
                    assert not view.ring[slot, row].any()
            last = ran.handles[layer].gather_swa_kv(torch.float32)
            assert last.shape == (1, 8, 16) and not last[0, : max(0, 8 - at)].any()
            assert_close_rms("window", rows[-8:], last[0, max(0, 8 - at) :], F32)
    assert_same_bytes(m.state.layer(WINDOW)["window"][m.slot_of["other"]], other)


def test_a_slot_is_reset_alone(rig: Rig) -> None:
    m = rig.manager(64)
    slots = [m.admit_request("a"), m.admit_request("b")]
    fresh = {key: t.clone() for key, t in m.state.tensors.items()}
    rig.run(m, {"a": numbers(23), "b": numbers(14, 1)}, attend=False)
    used = {key: t.clone() for key, t in m.state.tensors.items()}
    m.reset_slot(slots[0])
    for key, t in m.state.tensors.items():
        assert not torch.equal(used[key][:, slots[0]], fresh[key][:, slots[0]])
        assert_same_bytes(t[:, slots[0]], fresh[key][:, slots[0]])
        assert_same_bytes(t[:, slots[1]], used[key][:, slots[1]])
    for slot in (-1, 2):
        refused(m, RequestError, lambda slot=slot: m.reset_slot(slot), f"no slot {slot}")
