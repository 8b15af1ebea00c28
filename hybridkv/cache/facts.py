"""Facts: what requests hold and what is free, read off the manager's bookkeeping. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.cache.page_table import PageTable
from hybridkv.cache.query_buffers import QueryBuffers
from hybridkv.cache.schema import CacheSchema, ceil_div
from hybridkv.cache.state import StatePool
from hybridkv.errors import RequestError

if TYPE_CHECKING:
    from hybridkv.cache.away import Away
    from hybridkv.cache.frozen import Frozen
    from hybridkv.cache.reuse import Reuse
    from hybridkv.cache.tiers import HostBlocks, HostTier


@dataclass(frozen=True)
class Compaction:
    """What a compacted request still holds of its past: entries of later tokens follow without gaps."""

    position: int  # when it happened last
    kept: dict[str, list[np.ndarray]]  # absolute positions of each stream's surviving entries

    def positions(self, name: str, position: int) -> list[np.ndarray]:
        """Absolute positions of all entries of a request that is at `position` now."""
        return [np.concatenate((kept, np.arange(self.position, position))) for kept in self.kept[name]]


class Facts:
    """The part of KVCacheManager that answers questions."""

    schema: CacheSchema
    slots: int
    max_tokens: int
    tables: dict[str, PageTable]
    state: StatePool
    query_buffers: QueryBuffers
    positions: np.ndarray  # [slots]
    reached: np.ndarray  # [slots] the furthest position that state has seen
    compactions: dict[int, Compaction]  # of slots that were compacted
    _has_running_state: bool
    slot_of: dict[Hashable, int]
    frozen: dict[Hashable, Frozen]  # caches without a slot
    away: dict[Hashable, Away]  # of requests that had to make room and come back
    host: HostTier
    reuse: Reuse | None
    _free_slots: list[int]

    def position(self, request: Hashable) -> int:
        """Tokens that the request has seen, frozen or not."""
        if request in self.frozen:
            return self.frozen[request].position
        return int(self.positions[self._slot(request)])

    def _frozen_pages(self, name: str) -> np.ndarray:
        """Pages of one pool that frozen caches own, each as often as one does."""
        return np.concatenate([np.zeros(0, np.int32), *(each.page_ids(name) for each in self.frozen.values())])

    def _frozen_blocks(self) -> list[HostBlocks]:
        """What frozen caches, and those that are away, own on the host."""
        return [blocks for each in (*self.frozen.values(), *self.away.values()) for blocks in each.blocks]

    def _spare_blocks(self) -> list[HostBlocks]:
        """What prefixes that are kept for others own on the host."""
        return [] if self.reuse is None else self.reuse.host.blocks()

    def lengths(self, request: Hashable) -> dict[str, np.ndarray]:
        """Entries that each stream of the request holds, frozen or not."""
        if request in self.frozen:
            return {name: lengths.copy() for name, lengths in self.frozen[request].lengths.items()}
        return {name: t.lengths[self._slot(request)].copy() for name, t in self.tables.items()}

    def longest(self, request: Hashable) -> int:
        """Entries of its longest stream."""
        slot = self._slot(request)
        return max((int(table.lengths[slot].max()) for table in self.tables.values()), default=0)

    def kept_tokens(self, request: Hashable) -> float:
        """Tokens whose entries the request still has, on average over its streams."""
        slot, position = self._slot(request), self.position(request)
        lengths = [t.lengths[slot] for t in self.tables.values() if t.schema.tokens_per_entry == 1]
        return float(np.concatenate(lengths).mean()) if lengths else position  # compressed streams never evict

    def held_pages(self, request: Hashable) -> dict[str, int]:
        """Pages that the request holds, by stream name; shared ones count too."""
        return {name: int(t.held[self._slot(request)].sum()) for name, t in self.tables.items()}

    def held_bytes(self, request: Hashable) -> int:
        """Page bytes of the request, shared pages counted in full."""
        return sum(n * self.tables[name].schema.page_bytes for name, n in self.held_pages(request).items())

    def used_bytes(self, request: Hashable) -> int:
        """Bytes of the pages that its entries are in; one that was taken ahead for the next token is none of them."""
        slot = self._slot(request)
        return sum(
            int(ceil_div(t.lengths[slot], t.schema.entries_per_page).sum()) * t.schema.page_bytes
            for t in self.tables.values()
        )

    def step_bytes(self, requests: Sequence[Hashable]) -> int:
        """Bytes that a decode step of these requests reads and writes: their entries, and their state twice."""
        at = [self._slot(request) for request in requests]
        entries = sum(
            int(t.lengths[at].sum()) * (t.schema.page_bytes // t.schema.entries_per_page) for t in self.tables.values()
        )
        return entries + 2 * len(at) * self.schema.slot_bytes

    def pages_needed(self, request: Hashable | None, tokens: int) -> dict[str, int]:
        """Pages to be taken so that `tokens` more tokens fit, copies of shared open pages included; None: for a request
        that is not resident yet.
        """
        if request is None:
            return {name: t.schema.pages(tokens) for name, t in self.tables.items()}
        return self.pages_needed_together([(request, tokens)])

    def pages_needed_together(self, plan: Sequence[tuple[Hashable, int]]) -> dict[str, int]:
        """The same for several resident requests, each with its own number of tokens."""
        slots = np.array([self._slot(request) for request, _ in plan], np.int64)
        tokens, found = np.array([n for _, n in plan], np.int64), {}
        for name, table in self.tables.items():
            add, copy = table.grow(slots, self.positions[slots], tokens)
            found[name] = int(add.sum() + copy.sum())
        return found

    def returnable_pages(self, *requests: Hashable) -> dict[str, int]:
        """Pages that could be had if these requests, frozen or not, were released: those that no other shares."""
        slots, found = [self._slot(request) for request in requests if request not in self.frozen], {}
        frozen = [self.frozen[request] for request in requests if request in self.frozen]
        for name, table in self.tables.items():
            rows = table.pages[slots]
            named = [rows[rows >= 0], *(each.page_ids(name) for each in frozen)]
            pages, owners = np.unique(np.concatenate(named), return_counts=True)
            found[name] = int((table.allocator.refs[pages] - table.allocator.spare[pages] == owners).sum())
        return found

    def free_pages(self) -> dict[str, int]:
        """Pages that nobody holds, by stream name."""
        return {name: t.allocator.free for name, t in self.tables.items()}

    def pages_to_be_had(self) -> dict[str, int]:
        """Pages that nobody holds, or that are kept only as long as nobody needs them."""
        return {name: t.allocator.free + t.allocator.reclaimable for name, t in self.tables.items()}

    def spare_pages(self, name: str) -> np.ndarray:
        """Pages of a pool that are kept for requests to come, as often as they are named."""
        return np.zeros(0, np.int64) if self.reuse is None else self.reuse.pages(name)

    def tokens_alone(self) -> int:
        """Tokens of the longest request that the empty pools hold, if nothing is evicted."""
        found = [self.max_tokens]
        for t in self.tables.values():
            entries = t.allocator.total // t.schema.streams * t.schema.entries_per_page
            found.append((entries + 1) * t.schema.tokens_per_entry - 1)
        return min(found)

    def memory_bytes(self) -> int:
        """Bytes that pools, state and page tables occupy on the device."""
        return sum(t.pool.nbytes + t.device_table.nbytes for t in self.tables.values()) + self.state.nbytes

    def check_counts(self) -> None:
        """The cheap part of check_integrity: no page is lost, and none has an owner that no table names."""
        for table in self.tables.values():
            allocator = table.allocator
            owners = int(allocator.refs.sum() - allocator.spare.sum())
            named = int(table.held.sum()) + sum(len(owned()) for owned in table.other_owners)
            if owners != named or int((allocator.refs > 0).sum()) != allocator.held:
                raise AssertionError(f"pool '{table.schema.name}': pages held and pages named in tables differ")

    def check_integrity(self) -> None:
        """Every page is free or owned exactly as often as tables, frozen caches and columns name it; free slots are
        empty.
        """
        for name, table in self.tables.items():
            table.check(self._free_slots, self.spare_pages(name))
        self.host.check(self._frozen_blocks(), self._spare_blocks())
        if sorted([*self._free_slots, *self.slot_of.values()]) != list(range(self.slots)):
            raise AssertionError(f"slots are lost or owned twice: {self._free_slots} free, {self.slot_of} owned")
        self.query_buffers.check(self._free_slots)

    def entry_positions(self, request: Hashable, name: str) -> list[np.ndarray]:
        """Absolute position of every entry of every stream of one schema (one token an entry)."""
        slot = self._slot(request)
        position, lengths = int(self.positions[slot]), self.tables[name].lengths[slot]
        past = self.compactions.get(slot)
        if past is None or name not in past.kept:
            return [np.arange(n) for n in lengths]
        return past.positions(name, position)

    def can_rewind(self, request: Hashable, position: int) -> bool:
        """Whether the request's state can go back to a position."""
        slot = self._slot(request)
        return not self._has_state(slot) or bool(self.reached[slot] - position <= self.schema.rewind)

    def _has_state(self, slot: int) -> bool:
        """Whether steps advance state of the slot: recurrent state, or its last queries."""
        return self._has_running_state or bool(self.query_buffers.of[slot] >= 0)

    def _overrun(self, slots: np.ndarray) -> np.ndarray:
        """[B] tokens that state has seen beyond each slot's position. A step from 0 makes all state anew."""
        position = self.positions[slots]
        return np.where(position > 0, self.reached[slots] - position, 0)

    def can_continue(self, request: Hashable) -> bool:
        """Whether the request's state is that of its position, or can be rewound to it."""
        overrun = self._overrun(np.array([self._slot(request)]))[0] if self._has_running_state else 0
        return bool(overrun <= self.schema.rewind)

    def check_committed(self, slot: int) -> None:
        """Whether the slot's state is that of its position, or RequestError."""
        if self._has_state(slot) and self.reached[slot] - self.positions[slot] > self.schema.rewind:
            raise RequestError(
                f"a step that is not committed has taken this request's state to position {self.reached[slot]}, and it "
                f"counts as being at {self.positions[slot]}: fork or save it after the commit (an engine on a GPU "
                "launches steps ahead: call engine.drain() first)"
            )

    def check_shareable(self, position: int) -> None:
        """Whether a request at this position can be forked or saved, or RequestError."""
        every = self.schema.share_every
        if position % every:
            before = position - position % every
            raise RequestError(
                f"a request can be forked or saved only at a multiple of {every} tokens, where no page is half full; "
                f"this one is at {position}: do it at {before} or at {before + every}"
            )

    def _slot(self, request: Hashable) -> int:
        if request not in self.slot_of:
            raise RequestError(f"request {request!r} is not resident; it was released or never admitted")
        return self.slot_of[request]
