"""The cache's state machine with caches that have no slot: frozen, thawed, forked, exported, imported, dropped."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cache.machine import CacheMachine
from cache.machine_model import HEADS, LANES, MAX_TOKENS, SLOTS, TAIL, Sequence, counts
from hybridkv.cache import CacheSchema, KVCacheManager, OutOfPages
from hybridkv.cache.frozen import export_frozen, fork_frozen, freeze_request, import_frozen, thaw_request
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier
from hybridkv.errors import HybridKVError

BLOCKS = 24  # on the host
THEN = st.sampled_from(("stay", "back", "fork", "fork, back", "export", "export, back", "fork, export, back"))


class FrozenMachine(CacheMachine):
    @initialize(
        kv_pages=st.sampled_from((40, 29, 24, 18, 56, 8)),
        compressed_pages=st.sampled_from((6, 4, 12, 3)),
        stateful=st.booleans(),
    )
    def build(self, kv_pages: int, compressed_pages: int, stateful: bool) -> None:
        self.schema = CacheSchema((HEADS, LANES), (TAIL,) if stateful else ())
        self.sizes = {"kv": kv_pages, "compressed": compressed_pages}
        cpu = torch.device("cpu")
        self.m = KVCacheManager(
            self.schema, self.sizes, SLOTS, MAX_TOKENS, host=HostTier(BLOCKS * BLOCK, cpu, pages=True)
        )
        self.live: dict[int, Sequence] = {}
        self.frozen: dict[int, Sequence] = {}
        self.gone: list[int] = []
        self.names = self.numbers = self.turns = 0

    def some_frozen(self) -> bool:
        return bool(self.frozen)

    def pick_frozen(self, i: int) -> int:
        return list(self.frozen)[i % len(self.frozen)]

    def used_pages(self, request: Sequence) -> dict[str, list[list[list[int]]]]:
        """Without those that were reserved for a step that has not run; these go back."""
        found = {}
        for s in self.schema.streams:
            rows = request.pages[s.name]
            for row, n in zip(rows, request.lengths(s)):
                for page in row[-(-n // s.entries_per_page) :]:
                    page[0] -= 1
                del row[-(-n // s.entries_per_page) :]
            found[s.name] = rows
        return found

    @precondition(CacheMachine.some_live)
    @rule(i=st.integers(0, SLOTS - 1), reserved=st.integers(0, 6), then=THEN)
    def rest(self, i: int, reserved: int, then: str) -> None:
        """Frozen, perhaps after a step that never ran, and back in some way."""
        if reserved:
            self.run([(self.pick(i), reserved)], {}, "abandon")
        self.freeze(i)
        if "fork" in then and self.frozen:
            self.fork_of_frozen(len(self.frozen) - 1)
        if "export" in then and self.frozen:
            self.export(len(self.frozen) - 1)
        if "back" in then and self.frozen:
            self.thaw(len(self.frozen) - 1)

    def freeze(self, i: int) -> None:
        name = self.pick(i)
        if self.schema.states and not self.m.host.blocks.free:
            self.refused(HybridKVError, lambda: freeze_request(self.m, name), "the host is full")
            return
        free = self.m.free_slots
        freeze_request(self.m, name)
        assert self.m.free_slots == free + 1 and self.m.position(name) == len(self.live[name].tokens)
        self.frozen[name] = self.live.pop(name)
        self.used_pages(self.frozen[name])
        for t in self.m.state.tensors.values():
            t[:, self.m._free_slots] = -7  # whoever gets the slot must bring its own
        counts["frozen"] += 1

    @precondition(some_frozen)
    @rule(i=st.integers(0, 9))
    def thaw(self, i: int) -> None:
        name = self.pick_frozen(i)
        if self.m.frozen[name].exported is not None and not self.brought_back(name):
            return
        if len(self.live) == SLOTS:
            self.refused(HybridKVError, lambda: thaw_request(self.m, name), "slots are full")
            return
        thaw_request(self.m, name)
        self.live[name] = self.frozen.pop(name)
        counts["thawed"] += 1

    def brought_back(self, name: int) -> bool:
        request = self.frozen[name]
        need = {s.name: sum(-(-n // s.entries_per_page) for n in request.lengths(s)) for s in self.schema.streams}
        if any(need[s] > t.allocator.free for s, t in self.m.tables.items()):
            self.refused(OutOfPages, lambda: import_frozen(self.m, name), "no pages to import into")
            return False
        self.poison_free_pages()
        import_frozen(self.m, name)
        for s in self.schema.streams:
            rows = [[[1] for _ in range(-(-n // s.entries_per_page))] for n in request.lengths(s)]
            request.pages[s.name] = rows
        counts["imported"] += 1
        return True

    @precondition(some_frozen)
    @rule(i=st.integers(0, 9))
    def fork_of_frozen(self, i: int) -> None:
        source = self.pick_frozen(i)
        if len(self.frozen) > 6:
            return
        self.names += 1
        free = {s: t.allocator.free for s, t in self.m.tables.items()}, self.m.host.blocks.free
        fork_frozen(self.m, source, self.names)
        now = {s: t.allocator.free for s, t in self.m.tables.items()}, self.m.host.blocks.free
        assert now == free, "a fork takes nothing"
        child = self.frozen[self.names] = Sequence()
        self.inherit(child, self.frozen[source])
        for s in self.schema.streams:
            child.pages[s.name] = [list(row) for row in self.frozen[source].pages[s.name]]
            for row in child.pages[s.name]:
                for page in row:
                    page[0] += 1
        counts["forks of frozen"] += 1

    @precondition(some_frozen)
    @rule(i=st.integers(0, 9))
    def export(self, i: int) -> None:
        name = self.pick_frozen(i)
        done = self.m.frozen[name].exported is not None
        if export_frozen(self.m, name) and not done:
            for rows in self.frozen[name].pages.values():
                for row in rows:
                    for page in row:
                        page[0] -= 1
                    row.clear()
            counts["exported"] += 1

    @precondition(some_frozen)
    @rule(i=st.integers(0, 9))
    def drop(self, i: int) -> None:
        name = self.pick_frozen(i)
        self.m.release_request(name)
        self.forget(self.frozen.pop(name))
        counts["dropped"] += 1

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if not hasattr(self, "frozen"):
            return
        self.m.check_integrity()
        assert self.m.frozen.keys() == self.frozen.keys()
        for s in self.schema.streams:
            t, real, owners = self.m.tables[s.name], {}, Counter()
            tables = {name: t.pages[self.m.slot_of[name]] for name in self.live}
            tables |= {name: self.m.frozen[name].pages[s.name] for name in self.frozen}
            for name, request in {**self.live, **self.frozen}.items():
                for row, pages in zip(tables[name], request.pages[s.name]):
                    assert (row[len(pages) :] == -1).all(), "table entries past the end are not -1"
                    for i, page in zip(row.tolist(), pages):
                        assert real.setdefault(id(page), i) == i, "a shared page is two pages"
                        owners[i] += 1
            assert len(set(real.values())) == len(real), "a page has two owners that do not share it"
            assert [owners[i] for i in range(t.allocator.total)] == t.allocator.refs.tolist(), "owners are miscounted"

    @invariant()
    def frozen_caches_keep_their_past(self) -> None:
        for name, request in getattr(self, "frozen", {}).items():
            found = self.m.frozen[name]
            for s in self.schema.streams:
                assert found.lengths[s.name].tolist() == request.lengths(s)
                if found.exported is None:
                    self.read_frozen(s, name, request, found.pages[s.name])

    def read_frozen(self, s, name: int, request: Sequence, table: np.ndarray) -> None:
        """As `read`, which asks for a live one."""
        self.live[name] = request
        try:
            self.read(s, name, table, np.array(request.lengths(s)))
        finally:
            del self.live[name]

    def teardown(self) -> None:
        for name in list(getattr(self, "frozen", ())):
            self.m.release_request(name)
            del self.frozen[name]
        if hasattr(self, "m"):
            assert self.m.host.used == 0, "blocks on the host have no owner"
        super().teardown()
