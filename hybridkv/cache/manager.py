"""KVCacheManager: who holds which pages and slots.

    admit_request -> ( prepare_forward -> acquire -> ... -> commit )* -> release_request

Pages are reserved in one place, `prepare_forward`, for all requests and pools of a step or for none of them. It names
the target and subtracts what is there, so a step that is retried, after a failure or an OutOfPages, takes nothing
twice. Tables change there; positions and lengths move only in `commit`, once the step has run.

Every fact has one home: slots in `slot_of`, pages in the page tables, query buffers in `query_buffers.of`. Free lists
and counts follow from these. A method that is interrupted in the middle (Ctrl-C, no memory) sets a flag, and the next
one makes the counts anew (`rebuild`): nothing is lost or owned twice. Entries of a request that was being compacted may
be gone then, so its owner releases it, as the engine does.

A compaction may also be left to the device (`start_compaction`). Until it is settled, tables and lengths are those from
before it. Whatever would read or change the request's entries settles it first, and waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.away import Away, drop_away
from hybridkv.cache.bookkeeping import bookkeeping
from hybridkv.cache.compacting import (
    Compacting,
    compact_request,
    room_to_compact,
    settle,
    settle_slot,
    start_compaction,
    stop_compacting,
)
from hybridkv.cache.compressed_handle import CompressedHandle
from hybridkv.cache.facts import Compaction
from hybridkv.cache.frozen import Frozen, drop_frozen
from hybridkv.cache.handle import LayerHandle
from hybridkv.cache.page_table import PageTable
from hybridkv.cache.query_buffers import QueryBuffers
from hybridkv.cache.schema import CacheSchema, ceil_div
from hybridkv.cache.specification import SpecificationNames
from hybridkv.cache.state import StatePool
from hybridkv.cache.step import ForwardStep, build_step
from hybridkv.cache.tiers import Arrival, HostTier, default_limit
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.kernels.step_index import HostIndex, StepShape

if TYPE_CHECKING:
    from hybridkv.cache.reuse import Reuse

Plan = Sequence[tuple[Hashable, int]]  # (request, new tokens)


class KVCacheManager(SpecificationNames):
    """Pools, state and bookkeeping of all resident requests. What they hold is answered in `facts.py`."""

    def __init__(
        self,
        schema: CacheSchema,
        pages: Mapping[str, int],  # of each stream schema's pool
        slots: int,  # requests resident at the same time
        max_tokens: int,  # longest request
        device: torch.device | str = "cpu",
        exact: bool = False,  # steps run in exact mode
        query_buffers: int | None = None,  # requests whose last queries are kept at the same time; None: all
        *,
        rings: int | None = None,  # the name of query_buffers before 0.2
        host: HostTier | None = None,  # where frozen caches' state goes, and their pages; None: as the device has it
        checkpoints: int | None = None,  # rows of state for them; None: no request begins with what others have read
    ) -> None:
        query_buffers = rings if query_buffers is None else query_buffers
        self.exact = exact
        self.model_fingerprint: Callable[[], str] = lambda: ""  # names the model whose entries these are
        self.model_files: Callable[[], str] = lambda: ""  # names it by its files, over any number of ranks; "": unknown
        self.schema, self.slots, self.max_tokens, self.device = schema, slots, max_tokens, torch.device(device)
        self.tables = {s.name: PageTable(s, pages[s.name], slots, max_tokens, self.device) for s in schema.streams}
        usable = slots if schema.query_window is not None else 0
        self.query_buffers = QueryBuffers(slots, usable if query_buffers is None else min(query_buffers, usable))
        self.state = StatePool(schema.states, slots, self.device, self.query_buffers.count, checkpoints or 0)
        self.checkpoints = checkpoints
        self.reuse: Reuse | None = None  # who keeps what requests have read for others (reuse.py)
        self.fresh = np.zeros(slots, np.int64)  # tokens up to which a slot's entries lie on pages that others own
        for table in self.tables.values():
            table.fresh = self.fresh
        self.positions = np.zeros(slots, np.int64)
        self.reached = np.zeros(slots, np.int64)  # the furthest position that state has seen
        self.compactions: dict[int, Compaction] = {}  # of slots that were compacted
        self.compacting: dict[int, Compacting] = {}  # slots whose compaction the device carries out
        self.slot_of: dict[Hashable, int] = {}
        self.host = HostTier(default_limit(self.device), self.device) if host is None else host
        self.frozen: dict[Hashable, Frozen] = {}  # caches without a slot (frozen.py)
        self.away: dict[Hashable, Away] = {}  # of requests that had to make room and come back (away.py)
        self.arriving: dict[int, Arrival] = {}  # slots to which something is still being copied from the host
        for name, table in self.tables.items():
            table.other_owners += [partial(self._frozen_pages, name), partial(self._fresh_pages, name)]
        self.interrupted = False  # whether a bookkeeping method did not come to its end
        self._free_slots = list(range(slots - 1, -1, -1))
        # state that a step advances: unlike pages, it cannot take the same token twice
        self._has_running_state = any(not s.lent for s in schema.states)

    # ---- requests

    @property
    def free_slots(self) -> int:
        """How many more requests could be admitted, as far as slots go."""
        return len(self._free_slots)

    @bookkeeping
    def admit_request(self, request: Hashable) -> int:
        """A slot with fresh state at position 0. Takes no pages, and a query buffer only if every slot has one."""
        slot = self._take_slot(request, fresh=True)
        if self.query_buffers.count == self.slots:
            self.query_buffers.take(slot, 0)
        return slot

    @bookkeeping
    def attach_request(
        self, request: Hashable, pages: Mapping[str, np.ndarray], tokens: int, position: int, row: int = -1
    ) -> int:
        """A slot that goes on from `position` of a text whose first `tokens` tokens others have read.

        Args:
            request: who is to have it.
            pages: [streams, n] page ids of each pool that hold these tokens' entries, and no others'.
            tokens: up to these nothing is stored again, and no page is taken: state alone sees them.
            position: where it stands, at most `tokens`.
            row: of the state pool, whose state is that of the position; -1: fresh state, or there is none.
        """
        if not 0 <= position <= tokens or (row < 0 and position and self._has_running_state):
            raise ValueError(f"no state for position {position} of {tokens} tokens")
        slot = self._take_slot(request, fresh=True)  # an interrupt may leave it at position 0
        try:
            for name, table in self.tables.items():
                table.begin_with(slot, pages[name], table.schema.entries(position))
            if row >= 0:
                self.state.copy(row, slot)
            if self.query_buffers.count == self.slots:
                self.query_buffers.take(slot, position)
            self.positions[slot], self.reached[slot], self.fresh[slot] = position, position, tokens
        except BaseException:
            self._release(request)
            raise
        return slot

    @bookkeeping
    def fork_request(self, source: Hashable, request: Hashable) -> int:
        """A second request with the same past: pages shared, state copied. Neither sees what the other then writes."""
        origin = self._slot(source)
        settle_slot(self, origin)
        self.check_committed(origin)
        self.check_shareable(int(self.positions[origin]))
        slot = self._take_slot(request)
        try:
            if self.query_buffers.of[origin] >= 0:
                self.query_buffers.require(slot, int(self.query_buffers.since[origin]))
            for table in self.tables.values():
                table.share(origin, slot)
            self.positions[slot], self.reached[slot] = self.positions[origin], self.reached[origin]
            self.fresh[slot] = min(self.fresh[origin], self.positions[origin])  # later pages are the origin's alone
            if origin in self.compactions:
                self.compactions[slot] = self.compactions[origin]
            self.state.copy(origin, slot, (int(self.query_buffers.of[origin]), int(self.query_buffers.of[slot])))
            if self.reuse is not None:
                self.reuse.fork(source, request)
        except BaseException:
            self._release(request)
            raise
        return slot

    @bookkeeping
    def release_request(self, request: Hashable) -> None:
        """Everything the request held goes back, frozen, away or neither."""
        if request in self.frozen:
            drop_frozen(self, request)
        elif request in self.away:
            drop_away(self, request)
        else:
            self._release(request)

    @bookkeeping
    def take_query_buffer(self, request: Hashable) -> bool:
        """Whether the request has a buffer, which keeps its last queries from here on; False: all are taken."""
        slot = self._slot(request)
        return self.query_buffers.take(slot, int(self.positions[slot]))

    @bookkeeping
    def drop_query_buffer(self, request: Hashable) -> None:
        """No eviction will ask for the request's last queries any more."""
        self.query_buffers.drop(self._slot(request))

    take_ring, drop_ring = take_query_buffer, drop_query_buffer  # their names before 0.2

    @property
    def rings(self) -> QueryBuffers:
        """The name of `query_buffers` before 0.2."""
        return self.query_buffers

    @bookkeeping
    def truncate_request(self, request: Hashable, position: int) -> None:
        """Forget all tokens from `position` on. Refused where the past cannot be brought back."""
        slot = self._slot(request)
        settle_slot(self, slot)
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
        self.positions[slot] = position
        self._drop_after(slot)
        if self.reuse is not None:
            self.reuse.part(request)

    def _drop_after(self, slot: int) -> None:
        """Give back the slot's pages behind its position: what comes next is written, not shared."""
        for table in self.tables.values():
            entries = table.schema.entries(int(self.positions[slot]))
            table.drop(slot, ceil_div(entries, table.schema.entries_per_page))
            table.lengths[slot] = entries
        self.fresh[slot] = min(self.fresh[slot], self.positions[slot])

    def compact_request(self, request: Hashable, keep: Mapping[int, Sequence[np.ndarray]]) -> int:
        """Keep only the entries named for each layer's streams, ascending; returns how many pages went back."""
        return compact_request(self, request, keep)

    def room_to_compact(self, request: Hashable, name: str, counts: np.ndarray) -> None:
        """OutOfPages unless the streams of a schema can be compacted to `counts` [streams] entries."""
        room_to_compact(self, request, name, counts)

    def start_compaction(
        self, request: Hashable, name: str, entries: Tensor, counts: Tensor, flags: Tensor, most: int
    ) -> Compacting:
        """Keep only the entries that lists on the device name. The device does it, and nothing waits for it."""
        return start_compaction(self, request, name, entries, counts, flags, most)

    def _fresh_pages(self, name: str) -> np.ndarray:
        """Page ids of a pool that compactions under way own."""
        under_way = [(slot, found.fresh) for slot, found in self.compacting.items() if found.name == name]
        owned = [ids for slot, ids in under_way if ids is not None and not self.tables[name].is_on(slot, ids)]
        return np.concatenate([np.zeros(0, np.int32), *owned])

    @bookkeeping
    def own_what_follows(self, request: Hashable) -> None:
        """The tokens that come next are stored, also where others have read them: its text may go on otherwise."""
        self._own_what_follows(request)

    def _own_what_follows(self, request: Hashable) -> None:
        slot = self._slot(request)
        self._land(slot)
        if self.fresh[slot] > self.positions[slot]:
            self._drop_after(slot)
            if self.reuse is not None:
                self.reuse.part(request)

    def settle(self, request: Hashable) -> int:
        """Pages and lengths become those that a compaction leaves which was started; returns how many went back."""
        return settle(self, request)

    def has_arrived(self, request: Hashable) -> bool:
        """Whether a step of the request waits for nothing that is still being copied from the host."""
        arrival = self.arriving.get(self._slot(request))
        return arrival is None or arrival.ready()

    def await_arrivals(self) -> bool:
        """Whether something is being copied from the host: what the device is given from here on comes after it."""
        slots = list(self.arriving)
        for slot in slots:
            self._land(slot)
        return bool(slots)

    def _land(self, slot: int) -> None:
        """What the device is given from here on comes after the copies from the host to a slot, if there are any."""
        arrival = self.arriving.get(slot)
        if arrival is not None:
            arrival.wait()
            del self.arriving[slot]

    # ---- one step

    @bookkeeping
    def prepare_forward(self, plan: Plan, rows: int | None = None, shape: StepShape | None = None) -> ForwardStep:
        """Reserve every page that the step writes, for all requests in all pools or, with OutOfPages, for none.

        Args:
            plan: requests and their new tokens, those with one token first.
            rows: make it a step of `rows` one-token requests, the missing ones padding.
            shape: make it a step of this shape, what is missing padding.
        """
        slots = [self._slot(request) for request, _ in plan]
        for slot in [slot for slot in slots if slot in self.compacting or slot in self.arriving]:
            settle_slot(self, slot)
        counts = [tokens for _, tokens in plan]
        if not plan or len(set(slots)) != len(slots) or min(counts) < 1:
            raise ValueError(f"a step needs different requests with at least one new token each: {list(plan)}")
        at = np.array(slots)
        step = HostIndex(at, self.positions[at], np.array(counts))
        if max(counts[: step.num_decodes], default=1) > 1:
            raise ValueError("requests with one token come first in a step")
        if rows is not None and (rows < len(plan) or step.num_decodes < len(plan)):
            raise ValueError(
                f"{len(plan)} requests, {step.num_decodes} of them with one token, do not make a step of {rows} rows"
            )
        shaped = step if shape is None else step.shaped(shape)  # before anything is reserved
        self._restart(step)
        self.check_reach(step)
        self._take_pages(step)
        return self._build_step(shaped if rows is None else step.padded(rows), shape=shape)

    def _restart(self, step: HostIndex) -> None:
        """Fresh state for requests at position 0 whose first step ran and was not committed."""
        if self._has_running_state:
            for slot in step.slots[(step.num_computed == 0) & (self.reached[step.slots] > 0)].tolist():
                self.state.reset(slot)
                self.reached[slot] = 0

    def _take_pages(self, step: HostIndex) -> None:
        """Pages for all new entries, in all pools or in none."""
        grown = [
            (table, *table.grow(step.slots, step.num_computed, step.num_scheduled)) for table in self.tables.values()
        ]
        for table, add, copy in grown:
            table.allocator.require(int(add.sum()) + table.copies(step.slots, copy))
        for table, add, copy in grown:
            for i in np.flatnonzero((add.max(1) > 0) | copy.any(1)).tolist():
                # two forks may both have asked for a copy of one page: the second no longer needs it
                still_shared = table.shared(step.slots[i : i + 1], copy[i : i + 1])[0]
                table.take(int(step.slots[i]), add[i], still_shared)

    def check_reach(self, step: HostIndex) -> None:
        """Whether each request of a step can go on from where it stands, or RequestError."""
        for i in np.flatnonzero(step.num_computed + step.num_scheduled > self.max_tokens)[:1]:
            raise RequestError(
                f"{step.num_computed[i]} + {step.num_scheduled[i]} tokens do not fit a context of {self.max_tokens} "
                "tokens"
            )
        overrun = self._has_running_state and (self._overrun(step.slots) > self.schema.rewind) & (step.slots >= 0)
        for i in np.flatnonzero(overrun)[:1]:
            raise RequestError(
                f"a step ran to position {self.reached[step.slots[i]]} and was not committed: the state of position "
                f"{step.num_computed[i]} is gone; release the request and compute it again"
            )

    def padding_step(self, rows: int, reach: int | None = None) -> ForwardStep:
        """A decode step of nothing but padding, for requests of up to `reach` tokens (None: of any length): what a
        captured graph is made from.
        """
        return self._build_step(HostIndex.padding(rows), self.max_tokens if reach is None else reach)

    def padding_of_shape(self, shape: StepShape) -> ForwardStep:
        """A step of this shape with nothing but padding, for requests of any length: what a graph is made from."""
        return self._build_step(HostIndex.padding(0).shaped(shape), self.max_tokens, shape)

    def _build_step(self, step: HostIndex, reach: int | None = None, shape: StepShape | None = None) -> ForwardStep:
        plans = [table.stream_plan(step, reach) for table in self.tables.values()]
        query_rows, window = None, self.schema.query_window
        # what a captured graph reads is always there; elsewhere queries are left out where nobody keeps them
        graph = step.decodes is not None or (self.device.type == "cuda" and step.num_decodes == len(step.slots))
        if window is not None and (graph or (self.query_buffers.of[step.slots] >= 0).any()):
            query_rows = step.query_rows(window, self.query_buffers.of)
        compressed, fresh = bool(self.schema.compressed), None
        if self.checkpoints is not None and any(plan.entry_index is None for plan in plans):
            fresh = self.fresh[step.slots]
        captured = reach is not None
        return build_step(step, plans, query_rows, compressed, self.device, self.exact, captured, shape, fresh)

    def begin(self, step: ForwardStep) -> None:
        """The step runs: state will have seen its tokens, committed or not."""
        host = step.host
        real = host.slots >= 0
        slots, first = host.slots[real], host.num_computed[real]
        before = np.where(first > 0, self.reached[slots], 0)  # a step from 0 makes all state anew
        self.reached[slots] = np.maximum(before, first + host.num_scheduled[real])

    def acquire(self, step: ForwardStep) -> dict[int, Any]:
        """A handle for every layer that stores anything: LayerHandle, or CompressedHandle. Allocates nothing."""
        handles: dict[int, Any] = {}
        for layer, declared in enumerate(self.schema.compressed):
            table = self.tables.get(declared.kind)
            pages = table.pool.lane(table.schema.place(layer)[0]) if table is not None else {}
            handles[layer] = CompressedHandle(step, declared, pages, self.state.layer(layer), partial(self.begin, step))
        if handles:
            return handles
        for table in self.tables.values():
            for layer in table.schema.layers:
                lane, rows = table.schema.place(layer)
                view = step.streams[table.schema.name]
                handles[layer] = LayerHandle(step, view, rows, table.pool.lane(lane), self.state.layer(layer))
        for layer in {layer for s in self.schema.states for layer in s.layers} - handles.keys():
            handles[layer] = LayerHandle(step, None, slice(0), {}, self.state.layer(layer))
        return handles

    @bookkeeping
    def commit(self, plan: Plan) -> None:
        """The step has run: its tokens are now part of the past."""
        slots = np.array([self._slot(request) for request, _ in plan], np.int64)  # all are known, or nothing moves
        tokens = np.array([n for _, n in plan], np.int64)
        before = self.positions[slots]
        longer = [table.schema.new_entries(before, tokens)[:, None] for table in self.tables.values()]
        for table, new in zip(self.tables.values(), longer, strict=True):
            table.lengths[slots] += new
        self.positions[slots] = before + tokens
        self.reached[slots] = np.maximum(self.reached[slots], before + tokens)

    @contextmanager
    def trial(self, request: Hashable) -> Iterator[None]:
        """Inside, steps of the request run that are not committed. Afterwards its state, and its query buffer if it has
        one, are what they were before; pages that were taken for the steps stay reserved.
        """
        slot = self._slot(request)
        buffer, reached = int(self.query_buffers.of[slot]), self.reached[slot]
        before = self.state.snapshot(slot, buffer)
        try:
            yield
        finally:
            self.state.restore(slot, before, buffer)
            self.reached[slot] = reached

    # ---- inside

    def rebuild(self) -> None:
        """Make all free lists and counts anew from who holds what: the way back after an interrupt. May be repeated."""
        # what is frozen or away is whole, the slot may not be
        for request in (self.frozen.keys() | self.away.keys()) & self.slot_of.keys():
            del self.slot_of[request]
        owned = set(self.slot_of.values())
        free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in owned]
        for slot in free:  # before pages are counted: a compaction may own some
            self._land(slot)
            self.compactions.pop(slot, None)
            self.compacting.pop(slot, None)
        if self.reuse is not None:
            self.reuse.rebuild()
        for name, table in self.tables.items():
            table.rebuild(free, self.spare_pages(name))
        self.positions[free] = 0
        self.reached[free] = 0
        self.fresh[free] = 0
        self.query_buffers.rebuild(free)
        self.host.rebuild(self._frozen_blocks(), self._spare_blocks())
        self._free_slots = free
        self.interrupted = False

    def _take_slot(self, request: Hashable, fresh: bool = False) -> int:
        if request in self.slot_of:
            raise RequestError(f"request {request!r} is resident already")
        if not self._free_slots:
            raise HybridKVError(f"all {self.slots} request slots are taken; raise max_requests or wait")
        slot = self._free_slots[-1]
        if fresh:
            self.state.reset(slot)
        self._free_slots.pop()
        self.slot_of[request] = slot  # last: an interrupt before this leaves a free slot
        return slot

    def _release(self, request: Hashable) -> None:
        slot = self._slot(request)
        del self.slot_of[request]  # from here on the slot has no owner, whatever is still in it
        self._land(slot)
        stop_compacting(self, slot)
        for table in self.tables.values():
            table.drop(slot)
            table.lengths[slot] = 0
        self.positions[slot] = 0
        self.reached[slot] = 0
        self.fresh[slot] = 0
        if self.reuse is not None:
            self.reuse.leave(request)
        self.compactions.pop(slot, None)
        self.query_buffers.drop(slot)
        self._free_slots.append(slot)
