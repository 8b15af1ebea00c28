"""KVCacheManager: who holds which pages and slots.

    admit_request -> ( prepare_forward -> acquire -> ... -> commit )* -> release_request

Pages are reserved in one place, `prepare_forward`, for all requests and pools of a step or for none of them. It names
the target and subtracts what is there, so a step that is retried, after a failure or an OutOfPages, takes nothing
twice. Tables change there; positions and lengths move only in `commit`, once the step has run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hybridkv.cache.compressed_handle import CompressedHandle
from hybridkv.cache.handle import LayerHandle
from hybridkv.cache.page_table import PageTable
from hybridkv.cache.query_buffers import QueryBuffers
from hybridkv.cache.schema import CacheSchema
from hybridkv.cache.state import StatePool
from hybridkv.cache.step import CompressedStep, ForwardStep, Tokens, compressed_step, dense_step
from hybridkv.errors import HybridKVError, RequestError

Plan = Sequence[tuple[Hashable, int]]  # (request, new tokens)


@dataclass(frozen=True)
class Compaction:
    """What a compacted request still holds of its past: entries of later tokens follow without gaps."""

    position: int  # when it happened last
    kept: dict[str, list[np.ndarray]]  # absolute positions of each stream's surviving entries


class KVCacheManager:
    """Pools, state and bookkeeping of all resident requests."""

    def __init__(
        self,
        schema: CacheSchema,
        pages: Mapping[str, int],  # of each stream schema's pool
        slots: int,  # requests resident at the same time
        max_tokens: int,  # longest request
        device: torch.device | str = "cpu",
        exact: bool = False,  # steps run in exact mode
        query_buffers: int | None = None,  # requests whose last queries are kept at the same time; None: all
    ) -> None:
        self.exact = exact
        self.schema, self.slots, self.max_tokens, self.device = schema, slots, max_tokens, torch.device(device)
        self.tables = {s.name: PageTable(s, pages[s.name], slots, max_tokens, self.device) for s in schema.streams}
        most = slots if schema.query_window is not None else 0
        self.query_buffers = QueryBuffers(slots, most if query_buffers is None else min(query_buffers, most))
        self.state = StatePool(schema.states, slots, self.device, self.query_buffers.count)
        self.positions = np.zeros(slots, np.int64)
        self.reached = np.zeros(slots, np.int64)  # the furthest position that state has seen
        self.compactions: dict[int, Compaction] = {}  # of slots that were compacted
        self.slot_of: dict[Hashable, int] = {}
        self._free_slots = list(range(slots - 1, -1, -1))

    # ---- requests

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def admit_request(self, request: Hashable) -> int:
        """A slot with fresh state at position 0. Takes no pages, and a ring only where there is one for every slot."""
        slot = self._take_slot(request)
        try:
            self.state.reset(slot)
            if self.query_buffers.count == self.slots:
                self.query_buffers.take(slot, 0)
        except BaseException:
            self.release_request(request)
            raise
        return slot

    def fork_request(self, source: Hashable, request: Hashable) -> int:
        """A second request with the same past: pages shared, state copied. Neither sees what the other then writes."""
        origin = self._slot(source)
        self.check_settled(origin)
        self.check_shareable(int(self.positions[origin]))
        slot = self._take_slot(request)
        try:
            if self.query_buffers.of[origin] >= 0:
                self.query_buffers.require(slot, int(self.query_buffers.since[origin]))
            for table in self.tables.values():
                table.share(origin, slot)
            self.positions[slot], self.reached[slot] = self.positions[origin], self.reached[origin]
            if origin in self.compactions:
                self.compactions[slot] = self.compactions[origin]
            self.state.copy(origin, slot, (int(self.query_buffers.of[origin]), int(self.query_buffers.of[slot])))
        except BaseException:
            self.release_request(request)
            raise
        return slot

    def release_request(self, request: Hashable) -> None:
        """Everything the request held goes back."""
        slot = self._slot(request)
        del self.slot_of[request]
        for table in self.tables.values():
            table.drop(slot)
            table.lengths[slot] = 0
        self.positions[slot] = self.reached[slot] = 0
        self.compactions.pop(slot, None)
        self.query_buffers.drop(slot)
        self._free_slots.append(slot)

    def take_query_buffer(self, request: Hashable) -> bool:
        """Whether the request has a ring, which keeps its last queries from here on; False: all are taken."""
        slot = self._slot(request)
        return self.query_buffers.take(slot, int(self.positions[slot]))

    def drop_query_buffer(self, request: Hashable) -> None:
        """No eviction will ask for the request's last queries any more."""
        self.query_buffers.drop(self._slot(request))

    def can_rewind(self, request: Hashable, position: int) -> bool:
        """Whether the request's state can go back to a position."""
        return not self.schema.states or self.reached[self._slot(request)] - position <= self.schema.rewind

    def truncate_request(self, request: Hashable, position: int) -> None:
        """Forget all tokens from `position` on. Refused where the past cannot be brought back."""
        slot = self._slot(request)
        if not 0 <= position <= self.positions[slot]:
            raise RequestError(f"cannot truncate to {position}: the request is at position {self.positions[slot]}")
        if position == self.positions[slot]:
            return
        if not self.can_rewind(request, position):
            raise RequestError(
                f"cannot truncate to {position}: recurrent state cannot be rewound by more than {self.schema.rewind} "
                f"tokens from {self.reached[slot]}; release the request and compute it again"
            )
        if slot in self.compactions:
            raise RequestError(
                f"cannot truncate to {position}: entries were evicted at position {self.compactions[slot].position}; "
                "release the request and compute it again"
            )
        for table in self.tables.values():
            entries = table.schema.entries(position)
            table.drop(slot, -(-entries // table.schema.entries_per_page))
            table.lengths[slot] = entries
        self.positions[slot] = position

    def compact_request(self, request: Hashable, keep: Mapping[int, Sequence[np.ndarray]]) -> int:
        """Keep only the entries named for each layer's streams, in ascending order; returns how many pages went back.

        The survivors do not change by a bit. All lists are checked before anything moves. A table stays whole if none
        of its layers is named.
        """
        slot, before = self._slot(request), self.held_pages(request)
        lists: dict[str, list[np.ndarray]] = {}  # of each table, one for each stream
        for name, table in self.tables.items():
            if keep.keys() & set(table.schema.layers):
                lists[name] = table.checked(slot, keep)
        tables = [(self.tables[name], kept, np.array([len(e) for e in kept])) for name, kept in lists.items()]
        if all((counts == t.lengths[slot]).all() for t, _, counts in tables):
            return 0
        for table, _, counts in tables:
            table.allocator.require(int(table.compaction_pages(slot, counts).sum()))
        earlier = self.compactions[slot].kept if slot in self.compactions else {}
        where = {name: self.entry_positions(request, name) for name in earlier}
        for name, kept in lists.items():  # entries that were never moved are numbered by their positions
            where[name] = [at[e] for at, e in zip(where[name], kept, strict=True)] if name in earlier else kept
        for table, kept, _ in tables:
            table.compact(slot, kept)
        self.compactions[slot] = Compaction(int(self.positions[slot]), where)
        return sum(before.values()) - sum(self.held_pages(request).values())

    def entry_positions(self, request: Hashable, name: str) -> list[np.ndarray]:
        """Absolute position of every entry of every stream of one schema (one token an entry)."""
        slot = self._slot(request)
        position, lengths = int(self.positions[slot]), self.tables[name].lengths[slot]
        past = self.compactions.get(slot)
        if past is None or name not in past.kept:
            return [np.arange(n) for n in lengths]
        return [np.concatenate((kept, np.arange(past.position, position))) for kept in past.kept[name]]

    # ---- one step

    def prepare_forward(self, plan: Plan, rows: int | None = None) -> ForwardStep:
        """Reserve every page that the step writes, for all requests in all pools or, with OutOfPages, for none.

        `rows`: make it a step of so many one-token requests, the missing ones padding.
        """
        slots = [self._slot(request) for request, _ in plan]
        counts = [tokens for _, tokens in plan]
        if len(set(slots)) != len(slots) or not plan or min(counts) < 1:
            raise ValueError(f"a step needs different requests with at least one new token each: {list(plan)}")
        num_decodes = counts.count(1)
        if counts[:num_decodes] != [1] * num_decodes:
            raise ValueError("requests with one token come first in a step")
        if rows is not None and (rows < len(plan) or num_decodes < len(plan)):
            raise ValueError(
                f"{len(plan)} requests, {num_decodes} of them with one token, do not make a step of {rows} rows"
            )
        at, n = np.array(slots), np.array(counts)
        begins = self.positions[at]
        self._check_reach(at, begins, n)
        grown = [(table, *table.grow(at, begins, n)) for table in self.tables.values()]
        for table, add, copy in grown:
            table.allocator.require(int(add.sum()) + table.copies(at, copy))
        for table, add, copy in grown:
            for i in np.flatnonzero((add.max(1) > 0) | copy.any(1)).tolist():
                # two forks may both have asked for a copy of one page: the second no longer needs it
                table.take(slots[i], add[i], table.shared(at[i : i + 1], copy[i : i + 1])[0])
        tokens = Tokens(at, begins, n, num_decodes)
        return self._step(tokens if rows is None else tokens.padded(rows))

    def _check_reach(self, slots: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> None:
        """Whether each request can go on from where it stands, or RequestError."""
        for i in np.flatnonzero(begins + counts > self.max_tokens)[:1]:
            raise RequestError(f"{begins[i]} + {counts[i]} tokens do not fit a context of {self.max_tokens} tokens")
        ahead = np.where(begins > 0, self.reached[slots] - begins, 0)  # before 0 nothing is read
        for i in np.flatnonzero(ahead > self.schema.rewind)[:1] if self.schema.compressed else ():
            raise RequestError(
                f"a step ran to position {self.reached[slots[i]]} and was not committed: the state of position "
                f"{begins[i]} is gone; release the request and compute it again"
            )

    def padding_step(self, rows: int, reach: int | None = None) -> ForwardStep:
        """A decode step of nothing but padding, for requests of any length, or of up to `reach` entries a stream: what
        a captured graph is made from.
        """
        return self._step(Tokens.padding(rows), self.max_tokens if reach is None else reach)

    def _step(self, tokens: Tokens, reach: int | None = None) -> ForwardStep:
        """All that the layers read is on its way to the device, in one copy, when this returns."""
        if not self.schema.compressed:
            plans = [t.stream_plan(tokens) for t in self.tables.values()]
            window = self.schema.query_window
            kept = None if window is None else tokens.query_rows(window, self.query_buffers.of)
            return dense_step(tokens, plans, kept, self.device, self.exact, reach)
        entries = [t.entry_plan(tokens) for t in self.tables.values()]
        if reach is not None:
            most = {t.schema.name: t.schema.entries(reach) for t in self.tables.values()}
            entries = [replace(e, max_entries=most[e.name]) for e in entries]
        return compressed_step(tokens, entries, self.device)

    def begin(self, step: ForwardStep) -> None:
        """The step runs: state will have seen its tokens, committed or not."""
        slots, begins = np.array(step.slots), np.array(step.num_computed)
        real = slots >= 0
        before = np.where(begins > 0, self.reached[slots], 0)  # a step from 0 makes all state anew
        self.reached[slots[real]] = np.maximum(before, begins + np.diff(step.query_start_loc))[real]

    def acquire(self, step: ForwardStep) -> dict[int, Any]:
        """A handle for every layer that stores anything: LayerHandle, or CompressedHandle. Allocates nothing."""
        handles: dict[int, Any] = {}
        if isinstance(step, CompressedStep):
            for layer, declared in enumerate(self.schema.compressed):
                table = self.tables.get(declared.kind)
                pages = table.pool.lane(table.schema.place(layer)[0]) if table is not None else {}
                handles[layer] = CompressedHandle(
                    step, declared, pages, self.state.layer(layer), partial(self.begin, step)
                )
            return handles
        for table in self.tables.values():
            for layer in table.schema.layers:
                lane, rows = table.schema.place(layer)
                view = step.streams[table.schema.name]
                handles[layer] = LayerHandle(step, view, rows, table.pool.lane(lane), self.state.layer(layer))
        for layer in {layer for s in self.schema.states for layer in s.layers} - handles.keys():
            handles[layer] = LayerHandle(step, None, slice(0), {}, self.state.layer(layer))
        return handles

    def commit(self, plan: Plan) -> None:
        """The step has run: its tokens are now part of the past."""
        slots = np.array([self._slot(request) for request, _ in plan], np.int64)  # all are known, or nothing moves
        tokens = np.array([n for _, n in plan], np.int64)
        for table in self.tables.values():
            table.lengths[slots] += table.schema.new_entries(self.positions[slots], tokens)[:, None]
        self.positions[slots] += tokens
        self.reached[slots] = np.maximum(self.reached[slots], self.positions[slots])

    def allocate_block(self, request: Hashable, name: str) -> int:
        """One more page for each of the request's streams of a schema, ahead of need; returns the last page's id.

        `prepare_forward` counts what is held, so it takes none for what this has brought.
        """
        if name not in self.tables:
            raise RequestError(f"there is no pool '{name}'; there are {', '.join(self.tables) or 'none'}")
        slot, table = self._slot(request), self.tables[name]
        if table.held[slot].max() >= table.pages.shape[2]:
            raise RequestError(f"request {request!r} holds the pages of {self.max_tokens} tokens already")
        table.allocator.require(table.schema.streams)
        none = np.zeros(table.schema.streams, bool)
        table.take(slot, np.ones(table.schema.streams, np.int64), none)
        return int(table.pages[slot, -1, table.held[slot, -1] - 1])

    def reset_slot(self, slot: int) -> None:
        """State of a slot as if nothing had been seen. Admitting a request does it; one that goes on needs its own."""
        if not 0 <= slot < self.slots:
            raise RequestError(f"there is no slot {slot}; slots are 0 to {self.slots - 1}")
        self.state.reset(slot)

    def check_settled(self, slot: int) -> None:
        """Whether the slot's state is that of its position, or RequestError."""
        if self.schema.states and self.reached[slot] - self.positions[slot] > self.schema.rewind:
            raise RequestError(
                f"a step that is not committed has taken this request's state to position {self.reached[slot]}, and it "
                f"counts as being at {self.positions[slot]}: fork or save it after the commit (an engine on a GPU "
                "launches steps ahead: call engine.settle() first)"
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

    # ---- facts

    def position(self, request: Hashable) -> int:
        return int(self.positions[self._slot(request)])

    def lengths(self, request: Hashable) -> dict[str, np.ndarray]:
        """Entries that each stream of the request holds."""
        return {name: t.lengths[self._slot(request)].copy() for name, t in self.tables.items()}

    def held_pages(self, request: Hashable) -> dict[str, int]:
        return {name: int(t.held[self._slot(request)].sum()) for name, t in self.tables.items()}

    def held_bytes(self, request: Hashable) -> int:
        """Page bytes of the request, shared pages counted in full."""
        return sum(n * self.tables[name].schema.page_bytes for name, n in self.held_pages(request).items())

    def pages_needed(self, request: Hashable | None, tokens: int) -> dict[str, int]:
        """Pages to be taken so that `tokens` more tokens fit; None: for a request that is not resident yet."""
        if request is None:
            return {name: t.schema.pages(tokens) for name, t in self.tables.items()}
        slot = np.array([self._slot(request)])
        found = {name: t.grow(slot, self.positions[slot], np.array([tokens]))[0] for name, t in self.tables.items()}
        return {name: int(add.sum()) for name, add in found.items()}

    def returnable_pages(self, request: Hashable) -> dict[str, int]:
        """Pages that would be free if the request were released: those that no other request shares."""
        rows = {name: t.pages[self._slot(request)] for name, t in self.tables.items()}
        return {
            name: int((t.allocator.refs[rows[name][rows[name] >= 0]] == 1).sum()) for name, t in self.tables.items()
        }

    def free_pages(self) -> dict[str, int]:
        return {name: t.allocator.free for name, t in self.tables.items()}

    def longest_stream(self, request: Hashable) -> int:
        """Entries of the request's longest stream; 0 where nothing is paged."""
        slot = self._slot(request)
        return max((int(t.lengths[slot].max()) for t in self.tables.values()), default=0)

    def tokens_alone(self) -> int:
        """Tokens of the longest request that the empty pools hold, if nothing is evicted."""
        found = [self.max_tokens]
        for t in self.tables.values():
            entries = t.allocator.total // t.schema.streams * t.schema.entries_per_page
            found.append((entries + 1) * t.schema.tokens_per_entry - 1)
        return min(found)

    def memory_bytes(self) -> int:
        """Bytes that pools, state and page tables occupy on the device."""
        return sum(t.pool.nbytes + t.mirror.nbytes for t in self.tables.values()) + self.state.nbytes

    def check_counts(self) -> None:
        """The cheap part of check_integrity: no page is lost or owned by nobody."""
        for table in self.tables.values():
            if int(table.allocator.refs.sum()) != int(table.held.sum()):
                raise AssertionError(f"pool '{table.schema.name}': pages held and pages named in tables differ")

    def check_integrity(self) -> None:
        """Every page is free or owned exactly as often as tables name it; free slots are empty."""
        for table in self.tables.values():
            table.check(self._free_slots)
        if sorted([*self._free_slots, *self.slot_of.values()]) != list(range(self.slots)):
            raise AssertionError(f"slots are lost or owned twice: {self._free_slots} free, {self.slot_of} owned")
        self.query_buffers.check(self._free_slots)

    # ---- inside

    def _take_slot(self, request: Hashable) -> int:
        if request in self.slot_of:
            raise RequestError(f"request {request!r} is resident already")
        if not self._free_slots:
            raise HybridKVError(f"all {self.slots} request slots are taken; raise max_requests or wait")
        slot = self.slot_of[request] = self._free_slots.pop()
        return slot

    def _slot(self, request: Hashable) -> int:
        if request not in self.slot_of:
            raise RequestError(f"request {request!r} is not resident; it was released or never admitted")
        return self.slot_of[request]
