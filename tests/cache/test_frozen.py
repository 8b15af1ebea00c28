"""Caches without a slot: what they hold and own, bit for bit and page for page, also when a call is interrupted."""

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from interrupting import interrupted_at

from cache import machine
from cache.frozen_machine import FrozenMachine
from cache.manager_rig import HYBRID, manager, refused, stored, write
from hybridkv.cache import CacheSchema, KVCacheManager, StateSchema, StreamSchema, TensorSpec
from hybridkv.cache import frozen as module
from hybridkv.cache.frozen import (
    Frozen,
    export_frozen,
    fork_frozen,
    freeze_request,
    import_frozen,
    thaw_request,
)
from hybridkv.cache.tier_sizes import BLOCK, conversations_held, staging_bytes
from hybridkv.cache.tiers import HostTier, chunks_of
from hybridkv.errors import HybridKVError, RequestError

CPU = torch.device("cpu")


def with_state(length: int, **sizes: int) -> KVCacheManager:
    """A request "a" of so many tokens, with state of its own."""
    m = manager(HYBRID, **sizes)
    m.host.pages = True
    m.admit_request("a")
    if length:
        write(m, [("a", length)], 1.5)
    for t in m.state.tensors.values():
        t.copy_(torch.randint(0, 100, t.shape).to(t.dtype))
    return m


def held(m: KVCacheManager, name: str) -> list[bytes]:
    """Bytes of pages and state."""
    rows = m.state.rows(m.slot_of[name]).values()
    return [*stored(m, name), *(row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows)]


def poison(m: KVCacheManager) -> None:
    """What nobody owns holds garbage."""
    for t in m.tables.values():
        free = torch.from_numpy(np.flatnonzero(t.allocator.refs == 0))
        for pool in t.pool.tensors.values():
            pool[:, free] = float("nan") if pool.is_floating_point() else -7
    for slot in m._free_slots:
        for t in m.state.tensors.values():
            t[:, slot] = -7


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 11])
def test_what_is_thawed_has_the_bits_of_what_was_frozen(length: int, exported: bool) -> None:
    m = with_state(length)
    before, lengths = held(m, "a"), m.lengths("a")
    free = m.free_pages()
    freeze_request(m, "a")
    assert m.free_slots == 3 and m.position("a") == length and m.free_pages() == free
    m.check_integrity()
    if exported:
        assert export_frozen(m, "a") and m.free_pages() == {"kv": 64, "compressed": 16}
        m.check_integrity()
    for name in "xyz":  # others use slots and pages meanwhile
        m.admit_request(name)
        write(m, [(name, 7)], 9.0)
    for name in "xyz":
        m.release_request(name)
    poison(m)
    import_frozen(m, "a")
    thaw_request(m, "a")
    m.check_integrity()
    assert held(m, "a") == before and m.host.used == 0
    assert all((m.lengths("a")[name] == n).all() for name, n in lengths.items())
    write(m, [("a", 3)], 2.0)  # and it goes on


def test_kept_positions_survive_and_a_compaction_after_it_shares_nothing() -> None:
    m = with_state(11)
    keep = [np.array([0, 2, 3, 9, 10]), np.array([1, 10])]
    m.compact_request("a", {0: keep, 2: keep})
    where = [at.tolist() for at in m.entry_positions("a", "kv")]
    before = held(m, "a")
    freeze_request(m, "a")
    fork_frozen(m, "a", "b")
    for name in "ab":
        thaw_request(m, name)
        assert held(m, name) == before and [at.tolist() for at in m.entry_positions(name, "kv")] == where
    write(m, [("b", 5)], 3.0)
    m.compact_request("b", {0: [np.array([0]), np.array([0])], 2: [np.array([0]), np.array([0])]})
    assert held(m, "a") == before
    m.check_integrity()


@pytest.mark.parametrize("writer", ["a", "b"])
@pytest.mark.parametrize("length", [1, 4, 7, 8, 11])
def test_a_fork_of_a_frozen_cache_copies_no_page_until_one_writes(length: int, writer: str) -> None:
    m = with_state(length)
    before = held(m, "a")
    freeze_request(m, "a")
    free, used = m.free_pages(), m.host.used
    fork_frozen(m, "a", "b")
    assert m.free_pages() == free and m.host.used == used
    m.check_integrity()
    other = "b" if writer == "a" else "a"
    thaw_request(m, writer)
    write(m, [(writer, 6)], 7.0)
    thaw_request(m, other)
    assert held(m, other) == before and held(m, writer) != before
    m.check_integrity()


def test_what_cannot_be_done_is_refused_and_changes_nothing() -> None:
    m = with_state(5)
    refused(m, RequestError, "not frozen", lambda: thaw_request(m, "a"))
    refused(m, RequestError, "not frozen", lambda: fork_frozen(m, "a", "b"))
    refused(m, RequestError, "not resident", lambda: freeze_request(m, "nobody"))
    m.host = HostTier(0, CPU)
    refused(m, HybridKVError, "does not fit beside", lambda: freeze_request(m, "a"))
    m.host = HostTier(4 * BLOCK, CPU, pages=True)
    freeze_request(m, "a")
    for name in "xyz":
        m.admit_request(name)
    refused(m, HybridKVError, "slots are taken", lambda: thaw_request(m, "a"))
    export_frozen(m, "a")
    m.release_request("x")
    refused(m, RequestError, "import them first", lambda: thaw_request(m, "a"))
    m.release_request("a")
    m.check_integrity()
    assert m.host.used == 0


def test_a_step_that_was_not_committed_cannot_be_frozen() -> None:
    m = with_state(5)
    m.begin(m.prepare_forward([("a", 2)]))
    refused(m, RequestError, "not committed", lambda: freeze_request(m, "a"))


@pytest.mark.parametrize("nbytes", [1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_blocks_on_the_host_hold_what_was_put_there(nbytes: int) -> None:
    """Over blocks that are no neighbours, beside others, shared and dropped in any order."""
    tier = HostTier(32 * BLOCK, CPU)
    filler = [tier.put([torch.zeros(BLOCK, dtype=torch.uint8)]) for _ in range(9)]
    for each in filler[::2]:
        tier.drop(each)  # every second block is free
    chunks = [
        torch.randint(0, 255, (nbytes,), dtype=torch.uint8),
        torch.randn(3, 5),
        torch.randn(2, 0),
        torch.arange(9),
    ]
    found = tier.put(iter(chunks))
    assert found is not None and found.nbytes == sum(c.nbytes for c in chunks)
    for read in (tier.get, tier.read):
        assert all(torch.equal(a, b) for a, b in zip(read(found), chunks, strict=True))
    tier.share(found)
    tier.drop(found)
    tier.check([found, *filler[1::2]])
    tier.drop(found)
    tier.check(filler[1::2])
    assert tier.put([torch.zeros(33 * BLOCK, dtype=torch.uint8)]) is None and tier.used == 4 * BLOCK


@pytest.mark.parametrize("shape", [(4, 8), (1, 1, 32), (3, 5, 2), (7,), ()])
def test_chunks_are_the_tensor_in_order(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    parts = list(chunks_of(tensor, 16))
    assert torch.equal(torch.cat([p.reshape(-1) for p in parts]), tensor.reshape(-1))
    assert all(p.nbytes <= 16 or p.dim() == 0 for p in parts)


# ---- random use, and faults that it must find


def random_use(most: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        FrozenMachine,
        settings=settings(max_examples=most, stateful_step_count=30, derandomize=True, deadline=None, phases=phases),
    )


def test_random_use_agrees_with_the_model() -> None:
    machine.counts.clear()
    random_use(25)
    least = {"frozen": 9, "thawed": 6, "forks of frozen": 4, "exported": 4, "imported": 2, "dropped": 1}
    rare = {what: machine.counts[what] for what, n in least.items() if machine.counts[what] < n}
    assert not rare, f"rules that hardly ran: {rare}"


def planted(what: str) -> tuple[object, str, Callable]:
    real_attach = module.PageTable.attach

    def forgetful(self: module.PageTable, slot: int) -> None:
        self.pages[slot], self.held[slot], self.lengths[slot] = -1, 0, 0

    faults: dict[str, tuple[object, str, Callable]] = {
        "a fork counts no owner": (
            module,
            "fork_frozen",
            lambda m, source, name: m.frozen.__setitem__(name, m.frozen[source]),
        ),
        "state is not brought back": (module, "restore_state", lambda m, slot, frozen: None),
        "pages are exported and not freed": (Frozen, "page_ids", lambda self, name: np.zeros(0, np.int32)),
        "reserved pages are lost": (
            module.PageTable,
            "detach",
            forgetful,
        ),
        "lengths are those of whole pages": (
            module.PageTable,
            "attach",
            lambda self, slot, rows, lengths: real_attach(self, slot, rows, (rows >= 0).sum(1) * 4),
        ),
    }
    return faults[what]


@pytest.mark.parametrize(
    "what",
    [
        "a fork counts no owner",
        "state is not brought back",
        "pages are exported and not freed",
        "reserved pages are lost",
        "lengths are those of whole pages",
    ],
)
def test_a_planted_fault_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, fault = planted(what)
    monkeypatch.setattr(where, name, fault)
    if name == "fork_frozen":
        monkeypatch.setattr("cache.frozen_machine.fork_frozen", fault)
    with pytest.raises(BaseException):  # noqa: B017  # an assertion, or what follows from the fault
        random_use(15, (Phase.generate,))


# ---- interrupts


CALLS = {
    "freeze": freeze_request,
    "thaw": thaw_request,
    "fork": fork_frozen,
    "export": export_frozen,
    "import": import_frozen,
}


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_line_loses_nothing(call: str) -> None:
    line, rng = 0, random.Random(3)
    while True:
        line += rng.randint(1, 5)
        m = with_state(7, kv=64, slots=2)
        before = held(m, "a")
        if call != "freeze":
            freeze_request(m, "a")
        if call == "import":
            export_frozen(m, "a")
        if not interrupted_at(line, partial(CALLS[call], m, *("ab" if call == "fork" else "a"))):
            break
        m.admit_request("other")  # whatever comes next finds it consistent
        m.check_integrity()
        m.release_request("other")
        if "b" in m.frozen:
            m.release_request("b")
        if "a" in m.frozen:
            import_frozen(m, "a")
            thaw_request(m, "a")
        if "a" in m.slot_of:  # a slot that was being filled, or emptied, may have been given up
            assert held(m, "a") == before
            m.release_request("a")
        m.check_integrity()
        assert m.host.used == 0 and m.free_pages() == {"kv": 64, "compressed": 16}
    assert line > 10


@pytest.mark.parametrize("pages", [True, False])
def test_the_host_holds_as_many_conversations_as_the_plan_says(pages: bool) -> None:
    """And not one more. State and pages of odd sizes, each in blocks of its own."""
    f32 = torch.float32
    schema = CacheSchema(
        (StreamSchema("kv", (0,), (TensorSpec("k", (1000,), f32),), 16),),
        (StateSchema("s", (0,), (TensorSpec("t", (700, 501), f32),)),),
    )
    limit, tokens = 92 * BLOCK, 480
    many = conversations_held(schema, tokens, limit, pages)
    assert many == (91 // (6 + 8) if pages else 91 // 6)  # 1.40 MB of state, 1.92 MB of pages
    m = KVCacheManager(schema, schema.pool_pages(many + 1, tokens), 2, 512)
    m.host = HostTier(limit, CPU, pages=pages)
    for number in range(many + 1):
        m.admit_request(number)
        m.begin(m.prepare_forward([(number, tokens)]))
        m.commit([(number, tokens)])
        if pages and number == many:
            freeze_request(m, number)
            assert not export_frozen(m, number)
        elif number < many:
            freeze_request(m, number)
            assert export_frozen(m, number) == pages
    assert m.host.staging == 0 == staging_bytes(False, limit) and staging_bytes(True, 0) == 0
    m.check_integrity()
