"""More rules for the state machine of `turns_machine.py`: columns and states that go to the host and come back, by
copies that are late or fail.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cache.late_tier import LateTier
from cache.machine_model import TAIL
from cache.reuse_machine import PROMPTS, Q, counts, states
from cache.turns_machine import TurnsMachine
from hybridkv.cache import OutOfPages
from hybridkv.cache.columns import Column
from hybridkv.cache.host_columns import Stored
from hybridkv.cache.lookup import Asked, Hit
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostBlocks, HostTier


class HostMachine(TurnsMachine):
    @initialize(
        pages=st.sampled_from((28, 48, 80)), stateful=st.sampled_from((True, True, False)),
        blocks=st.sampled_from((40, 12, 5)), every=st.sampled_from((1000, 5, 2)),
    )  # fmt: skip
    def build_with_host(self, pages: int, stateful: bool, blocks: int, every: int) -> None:
        self.room, self.looks = (blocks, every), 0
        self.taken: list[int] = []
        self.set_up(pages, stateful)

    def build(self) -> None:
        """It is `build_with_host` here."""

    def tier(self) -> HostTier:
        return LateTier(self.room[0] * BLOCK, self.room[1])

    # ---- prompts that go on from what is there

    def look_up(self, asked: Asked) -> Hit:
        hit = super().look_up(asked)
        best, host = self.best(asked), self.r.host
        assert hit.reaches == max(best, hit.cached), "what is on the host is not the deepest there is"
        if hit.load is None:
            return hit
        if self.looks % 4 == 0:  # somebody else needs room there first
            self.need_host(1 + self.looks % 3)
            hit, best = self.r.lookup(asked), self.best(asked)
            if hit.load is None:
                counts["gone before it was loaded"] += 1
                assert self.r.load(asked).cached == hit.cached
                return hit
        failed = host.counts["loads failed"]
        there = len(self.r.columns.match(asked.salt, hit.keys, len(asked.tokens)))
        found = self.r.load(asked)
        self.check_hit(found.path, found.cached, found.checkpoint, asked.tokens.tolist(), asked.salt, asked.most)
        if found.timer is not None:
            assert found.cached == best == hit.cached + found.loaded
            counts["loads"] += 1
            counts["states loaded"] += hit.load.stored is not None
            counts["columns loaded"] += len(hit.load.columns)
            assert all(column.pages is not None for column in hit.load.columns)
        elif host.counts["loads failed"] > failed:
            counts["loads that failed"] += 1
            now = len(self.r.columns.match(asked.salt, hit.keys, len(asked.tokens)))
            assert now < there or not hit.load.columns, "what could not be copied is still there"
        else:
            counts["loads without room"] += 1
        return found

    def best(self, asked: Asked) -> int:
        """Tokens that need not be computed if all that is on the host is used, found the slow way."""
        tokens = asked.tokens.tolist()
        there = {prefix: column for prefix, column, salt in self.columns() if salt == asked.salt}
        deep = 0
        while deep + Q <= len(tokens) and tuple(tokens[: deep + Q]) in there:
            deep += Q
        if not self.stateful:
            return min(deep, asked.most)
        ends = [there[tuple(tokens[:n])] for n in range(Q, min(deep, asked.most) + 1, Q)]
        return max([0, *(c.end for c in ends if c.checkpoint is not None or c.stored is not None)])

    # ---- what goes

    @rule(name=st.sampled_from(("kv", "compressed")), left=st.integers(0, 2))
    def starve(self, name: str, left: int) -> None:
        """All pages are needed but for a few, and given back."""
        self.r.settle_late()
        allocator = self.m.tables[name].allocator
        before, kept = self.r.columns.away, dict(self.r.host.counts)
        try:
            allocator.release(allocator.acquire(max(0, allocator.free + allocator.reclaimable - left)))
        except OutOfPages:  # a request lives beside columns of its tokens, with pages of its own
            assert all(column.live for column in self.r.columns if column.pages is not None and not column.resident)
        counts["went to the host"] += self.r.columns.away > before
        counts["dropped instead"] += self.r.host.counts["columns dropped"] > kept.get("columns dropped", 0)

    @rule(choices=PROMPTS, marks=st.sampled_from((31, 0, 18)), ends=st.booleans(), more=st.sampled_from((0, 1)))
    def away_and_back(self, choices: list[int], marks: int, ends: bool, more: int) -> None:
        """A prompt is read and ends, its pages and rows are needed, and another one begins like it."""
        for _ in range(2):
            self.read([*choices, 0][:5], more, b"", marks, 1, 40, "stays")
            if self.names in self.live and ends:
                self.finish(list(self.live).index(self.names), "no")
            elif self.names in self.live:
                self.release(list(self.live).index(self.names))
            while self.stateful and (row := self.r.checkpoints.reserve()) is not None:
                self.taken.append(row)
            while self.taken:
                self.r.checkpoints.give_back(self.taken.pop())
            self.starve("kv", 0)

    @precondition(lambda self: self.r.host.states or self.r.host.alone)
    @rule(blocks=st.integers(1, 6))
    def need_host(self, blocks: int) -> None:
        """Somebody needs room on the host, as a frozen cache does."""
        before = self.m.host.blocks.free + self.m.host.blocks.reclaimable
        taken = self.m.host.put([torch.zeros(blocks * BLOCK, dtype=torch.uint8)])
        if taken is not None:
            self.m.host.drop(taken)
            counts["room on the host"] += 1
        else:
            assert blocks > before or self.m.host.trouble["fails"]  # type: ignore[attr-defined]

    # ---- what must hold

    @invariant()
    def what_is_on_the_host_is_what_its_tokens_give(self) -> None:
        if not hasattr(self, "m"):
            return
        tier = self.m.host
        assert isinstance(tier, LateTier)
        self.looks += 1
        if tier.late and self.looks % 5:
            return  # it stays late for a while
        tier.arrive()
        for tokens, column, _ in self.columns():
            known = states(list(tokens))
            if column.host is not None:
                self.check_copy(column, known)
                counts["copies seen"] += 1
            if isinstance(column.stored, Stored):
                assert column.end % Q == 0 and (column.stored.kind != "turn" or column.stored.uses)
                self.check_stored(column.stored, column.end, known)
                counts["states seen"] += 1
            assert column.pages is not None or column.host is not None
        tier.poison()

    def check_copy(self, column: Column, known: list[int]) -> None:
        assert isinstance(column.host, HostBlocks)
        host, tier = self.r.host, self.m.host
        shape = (1, host.each * BLOCK)
        [chunk] = tier.read(HostBlocks(column.host.ids, ((shape, torch.uint8),), shape[1]))
        pools: dict[str, dict[str, torch.Tensor]] = {}
        for name, pool, at, nbytes in host.layout:
            key = next(k for k, t in self.m.tables[name].pool.tensors.items() if t is pool)
            whole = chunk[0, at : at + nbytes].view(pool.dtype)
            pools.setdefault(name, {})[key] = whole.view(pool.shape[0], -1, *pool.shape[2:])
        for s in self.schema.streams:
            _, streams, per = self.r.parts[s.name]
            first, last = s.entries(column.end - Q), s.entries(column.end)
            for row in range(s.streams):
                table = np.full(first // s.entries_per_page + per, -1)
                table[first // s.entries_per_page :] = np.arange(row * per, (row + 1) * per)
                self.check_entries(s, row, table, np.arange(last), known, first, pools[s.name])

    def check_stored(self, stored: Stored, position: int, known: list[int]) -> None:
        parts = list(self.m.host.read(stored.blocks))
        assert len(parts) == len(TAIL.tensors)
        assert parts[0].dtype == (torch.bfloat16 if self.rounds else torch.float32)
        for lane, layer in enumerate(TAIL.layers):
            self.check_layer([part[lane] for part in parts], layer, position, known)
