"""Compacting: a request keeps some of its entries, and the pages of the others go back.

    compact_request              at once, by lists on the host
    start_compaction -> settle   the device carries it out while the host goes on

In the second way survivors move to the front of their stream's own pages, by lists that are on the device
(kernels/eviction/to_front.py), or, where others own those pages too, into fresh ones (to_fresh.py), which belong to the
compaction until it is settled. The lists follow to the host in a copy that nothing waits for. Until they have come, the
host's tables say what they said before: the request holds all its pages, and no step may run it. The manager settles it
then, or when somebody asks for what it holds: pages that emptied are free, and lengths and positions are those of the
survivors.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.bookkeeping import bookkeeping
from hybridkv.cache.facts import Compaction
from hybridkv.cache.page_table import PageTable
from hybridkv.cache.step import upload
from hybridkv.errors import OutOfPages
from hybridkv.kernels.eviction.to_fresh import most_pages, to_fresh
from hybridkv.kernels.eviction.to_front import to_front

if TYPE_CHECKING:
    from hybridkv.cache.manager import KVCacheManager


@dataclass(frozen=True)
class Survivors:
    """What the device chose."""

    counts: np.ndarray  # [streams]
    flags: np.ndarray  # any that is not 0: nothing was moved
    lists: list[np.ndarray]  # of each stream its entries, ascending


@dataclass(eq=False)
class Compacting:
    """One request's streams of one schema, being compacted. `settled`: the manager's tables follow it."""

    name: str  # of the schema
    position: int  # of the request
    lengths: np.ndarray  # [streams] entries before
    before: Compaction | None  # what was dropped earlier
    flags: int  # how many there are
    report: Tensor  # on the device, as to_front writes it
    fresh: np.ndarray | None = None  # pages that the survivors go to, stream after stream; None: their own
    settled: bool = False
    _host: Tensor = field(init=False)
    _ready: torch.cuda.Event | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._host = self.report
        if self.report.is_cuda:
            self._host = torch.empty(self.report.shape, dtype=self.report.dtype, device="cpu", pin_memory=True)
            self._host.copy_(self.report, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def ready(self) -> bool:
        """Whether the lists have come."""
        return self._ready is None or self._ready.query()

    @cached_property
    def survivors(self) -> Survivors:
        """What was chosen. The host waits until it is there."""
        if self._ready is not None:
            self._ready.synchronize()
        host, streams = self._host.numpy(), len(self.lengths)
        counts, flags = host[:streams].astype(np.int64), host[streams : streams + self.flags].copy()
        ends = [0, *np.cumsum(counts).tolist()]
        entries = host[streams + self.flags :][: ends[-1]].astype(np.int64)
        return Survivors(counts, flags, [entries[a:b] for a, b in pairwise(ends)])

    def compaction(self) -> Compaction:
        """What the request holds of its past then."""
        kept, before = self.survivors.lists, self.before  # entries that were never moved are numbered by positions
        if before is None:
            return Compaction(self.position, {self.name: kept})
        where = {name: before.positions(name, self.position) for name in before.kept}
        if self.name in where:
            kept = [at[entries] for at, entries in zip(where[self.name], kept, strict=True)]
        return Compaction(self.position, where | {self.name: kept})


# ---- a manager's requests


@bookkeeping
def compact_request(manager: KVCacheManager, request: Hashable, keep: Mapping[int, Sequence[np.ndarray]]) -> int:
    """Keep only the entries named for each layer's streams, in ascending order; returns how many pages went back.

    The survivors do not change by a bit. All lists are checked before anything moves. A table stays whole if none
    of its layers is named.
    """
    slot = manager._slot(request)
    settle_slot(manager, slot)
    before = manager.held_pages(request)
    lists: dict[str, list[np.ndarray]] = {}  # of each table, one for each stream
    for name, table in manager.tables.items():
        if keep.keys() & set(table.schema.layers):
            lists[name] = table.checked(slot, keep)
    tables = [(manager.tables[name], kept, np.array([len(e) for e in kept])) for name, kept in lists.items()]
    if all((counts == t.lengths[slot]).all() for t, _, counts in tables):
        return 0
    for table, _, counts in tables:
        _require_room(manager, request, table, counts)
    earlier = manager.compactions[slot].kept if slot in manager.compactions else {}
    where = {name: manager.entry_positions(request, name) for name in earlier}
    for name, kept in lists.items():  # entries that were never moved are numbered by their positions
        where[name] = [at[e] for at, e in zip(where[name], kept, strict=True)] if name in earlier else kept
    for table, kept, _ in tables:
        table.compact(slot, kept)
    manager.compactions[slot] = Compaction(int(manager.positions[slot]), where)
    if manager.reuse is not None:
        manager.reuse.part(request)
    return sum(before.values()) - sum(manager.held_pages(request).values())


@bookkeeping
def room_to_compact(manager: KVCacheManager, request: Hashable, name: str, counts: np.ndarray) -> None:
    """OutOfPages unless the streams of a schema can be compacted to `counts` [streams] entries."""
    settle_slot(manager, manager._slot(request))
    _require_room(manager, request, manager.tables[name], counts)


def _require_room(manager: KVCacheManager, request: Hashable, table: PageTable, counts: np.ndarray) -> None:
    slot = manager._slot(request)
    manager._own_what_follows(request)
    need = int(table.compaction_pages(slot, counts).sum())
    try:
        table.allocator.require(need)
    except OutOfPages:
        if manager.reuse is None:
            raise
        manager.reuse.let_go(request)  # then it is alone with its pages, unless another request runs on them
        table.allocator.require(int(table.compaction_pages(slot, counts).sum()))


@bookkeeping
def start_compaction(
    manager: KVCacheManager,
    request: Hashable,
    name: str,  # of the stream schema
    entries: Tensor,  # [streams, K] int32 on the device: those that stay, ascending; past `counts` anything
    counts: Tensor,  # [streams] int64 on the device, at least 1 each
    flags: Tensor,  # [F] int32 on the device; any that is not 0: nothing moves
    most: int,  # that all counts together are at the most
) -> Compacting:
    """Keep only these entries. The device does it after all that it was given before, and nothing waits for it.

    The lists are not checked: they come from a selection that makes no others. They move within the request's own
    pages. Where others own some of these too, survivors go into fresh ones: OutOfPages, and nothing has changed,
    where there are too few.
    """
    slot, table = manager._slot(request), manager.tables[name]
    settle_slot(manager, slot)
    manager._own_what_follows(request)
    R, P, allocator = table.schema.streams, table.schema.entries_per_page, table.allocator
    own = table.owns_pages(slot)
    fresh = None if own else allocator.acquire(most_pages(most, R, P))
    try:
        report = torch.empty(R + len(flags) + most, dtype=torch.int32, device=manager.device)
        pools, lists = list(table.pool.lane(0).values()), (table.rows(slot), entries, counts, flags)
        if fresh is None:
            to_front(pools, *lists, report)
        else:
            to_fresh(pools, *lists, upload([fresh.astype(np.int64)], manager.device), report)
        past, lengths = manager.compactions.get(slot), table.lengths[slot].copy()
        found = Compacting(name, int(manager.positions[slot]), lengths, past, len(flags), report, fresh)
    except BaseException:  # no memory, or interrupted: the fresh pages have no owner
        if fresh is not None:
            allocator.release(fresh)
        raise
    manager.compacting[slot] = found
    if manager.reuse is not None and fresh is not None:
        manager.reuse.part(request)
    return found


@bookkeeping
def settle(manager: KVCacheManager, request: Hashable) -> int:
    """Pages and lengths become those that a compaction leaves which was started; the host waits for the device.

    Returns how many pages went back. Nothing happens if there is none.
    """
    slot, before = manager._slot(request), manager.held_pages(request)
    settle_slot(manager, slot)
    return sum(before.values()) - sum(manager.held_pages(request).values())


def settle_slot(manager: KVCacheManager, slot: int) -> None:
    """The slot's tables follow what is under way. May be repeated: an interrupt leaves it to be done, from what is
    known of it alone.
    """
    manager._land(slot)
    found = manager.compacting.get(slot)
    if found is None:
        return
    survivors, table = found.survivors, manager.tables[found.name]
    if not survivors.flags.any() and (survivors.counts < found.lengths).any():
        compaction = found.compaction()
        if found.fresh is None:
            table.shrink(slot, survivors.counts)
        else:
            table.replace(slot, survivors.counts, found.fresh)
        manager.compactions[slot] = compaction
        found.settled = True
        del manager.compacting[slot]
        return
    found.settled = True
    stop_compacting(manager, slot)


def stop_compacting(manager: KVCacheManager, slot: int) -> None:
    """A compaction that is under way leaves nothing behind. What moves on the device comes before all that is
    launched from here on.
    """
    found = manager.compacting.pop(slot, None)
    if found is not None and found.fresh is not None and not manager.tables[found.name].is_on(slot, found.fresh):
        manager.tables[found.name].allocator.release(found.fresh)
