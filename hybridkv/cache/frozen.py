"""Frozen caches: what a request holds, without a slot. Any number of conversations rest this way between their turns.

    freeze   pages change their owner, state goes to the host (tiers.py), slot and query buffer are given back
    thaw     the way back, into any free slot. Nothing is computed, and no page is copied
    fork     pages and state have one more owner. Whoever writes to a shared page copies it first, as ever
    export   pages go to the host, too, whole and as they are; import: back into any free pages

Owners of a page are page tables, and frozen caches (`PageTable.other_owners`); owners of blocks on the host are frozen
caches alone. A frozen cache has the name of the request that it is of, in `KVCacheManager.frozen`. If a name is there
and in `slot_of`, as after an interrupt, the frozen one is whole: it is written first and removed last.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.bookkeeping import bookkeeping
from hybridkv.cache.compacting import settle_slot
from hybridkv.cache.facts import Compaction
from hybridkv.cache.page_table import PageTable, places_of
from hybridkv.cache.schema import ceil_div
from hybridkv.cache.step import upload
from hybridkv.cache.tiers import NOTHING, STAGING, HostBlocks, chunks_of
from hybridkv.errors import HybridKVError, RequestError

if TYPE_CHECKING:
    from hybridkv.cache.manager import KVCacheManager


@dataclass(frozen=True)
class Frozen:
    """All that a request holds, without a slot. Who owns what it names is the manager's business."""

    position: int
    reached: int  # the furthest position that its state has seen
    pages: dict[str, np.ndarray]  # stream schema -> [streams, N] page ids, -1 where there is none; exported: all -1
    lengths: dict[str, np.ndarray]  # stream schema -> [streams] entries
    state: HostBlocks
    since: int  # the position from which on its query buffer has every query; -1: it has none
    compaction: Compaction | None
    exported: HostBlocks | None = None  # its pages, where they are on the host

    def page_ids(self, name: str) -> np.ndarray:
        """The pages that it owns of one pool."""
        rows = self.pages[name]
        return rows[rows >= 0]

    @property
    def blocks(self) -> list[HostBlocks]:
        """What it owns on the host."""
        return [self.state] if self.exported is None else [self.state, self.exported]

    @property
    def host_bytes(self) -> int:
        """Bytes of it on the host; what forks share counts for each."""
        return sum(each.nbytes for each in self.blocks)


def frozen_of(manager: KVCacheManager, request: Hashable) -> Frozen:
    """The frozen cache of this name, or RequestError."""
    found = manager.frozen.get(request)
    if found is None:
        raise RequestError(f"request {request!r} is not frozen; it is resident, was released or never admitted")
    return found


def state_bytes(manager: KVCacheManager, request: Hashable) -> int:
    """Bytes that freezing the request puts on the host."""
    buffer = int(manager.query_buffers.of[manager._slot(request)])
    return manager.schema.slot_bytes + (manager.schema.query_buffer_bytes if buffer >= 0 else 0)


@bookkeeping
def freeze_request(manager: KVCacheManager, request: Hashable) -> Frozen:
    """Give the request's slot back; its cache stays under its name. HybridKVError where the host has no room for its
    state, or its state is not that of its position.
    """
    slot = manager._slot(request)
    settle_slot(manager, slot)
    manager.check_committed(slot)
    buffer = int(manager.query_buffers.of[slot])
    state = manager.host.put(state_chunks(manager, slot, buffer))
    if state is None:
        raise HybridKVError(
            f"{manager.host.used} of {manager.host.limit} bytes on the host are taken, and the request's state does "
            "not fit beside them"
        )
    try:
        frozen = Frozen(
            int(manager.positions[slot]),
            int(manager.reached[slot]),
            {name: _used_rows(table, slot) for name, table in manager.tables.items()},
            {name: table.lengths[slot].copy() for name, table in manager.tables.items()},
            state,
            int(manager.query_buffers.since[slot]) if buffer >= 0 else -1,
            manager.compactions.get(slot),
        )
    except BaseException:
        manager.host.drop(state)
        raise
    manager.frozen[request] = frozen  # from here on the pages are its own
    for table in manager.tables.values():
        table.detach(slot)
    manager._release(request)
    return frozen


@bookkeeping
def thaw_request(manager: KVCacheManager, request: Hashable) -> int:
    """Bring a frozen cache into a slot, which is returned. One that was exported has to be imported first.
    HybridKVError where no slot, or query buffer, is free, or its state cannot be copied: it stays frozen then.
    """
    frozen = frozen_of(manager, request)
    if frozen.exported is not None:
        raise RequestError(f"the pages of request {request!r} are on the host; import them first")
    if frozen.since >= 0 and not manager.query_buffers.free:
        raise HybridKVError(f"all {manager.query_buffers.count} query buffers are taken, and the request needs one")
    slot = manager._take_slot(request)
    if frozen.since >= 0:
        manager.query_buffers.require(slot, frozen.since)
    try:
        restore_state(manager, slot, frozen.state)
    except HybridKVError:
        manager._release(request)
        raise
    for name, table in manager.tables.items():
        table.attach(slot, frozen.pages[name], frozen.lengths[name])
    manager.positions[slot], manager.reached[slot] = frozen.position, frozen.reached
    if frozen.compaction is not None:
        manager.compactions[slot] = frozen.compaction
    del manager.frozen[request]  # from here on the pages are the slot's
    manager.host.drop(frozen.state)
    return slot


@bookkeeping
def fork_frozen(manager: KVCacheManager, source: Hashable, request: Hashable) -> Frozen:
    """A second frozen cache with the same past: pages and state are shared, nothing is copied."""
    frozen = frozen_of(manager, source)
    manager.check_shareable(frozen.position)
    if request in manager.frozen or request in manager.slot_of:
        raise RequestError(f"request {request!r} is there already")
    for name, table in manager.tables.items():
        table.allocator.share(frozen.page_ids(name))
    for blocks in frozen.blocks:
        manager.host.share(blocks)
    manager.frozen[request] = frozen
    return frozen


def drop_frozen(manager: KVCacheManager, request: Hashable) -> None:
    """Everything that it owns goes back. Called by the manager's own methods."""
    frozen = manager.frozen.pop(request)
    for name, table in manager.tables.items():
        table.allocator.release(frozen.page_ids(name))
    for blocks in frozen.blocks:
        manager.host.drop(blocks)


# ---- pages on the host


def page_bytes(manager: KVCacheManager, frozen: Frozen) -> int:
    """Bytes of its pages."""
    return sum(int((frozen.pages[name] >= 0).sum()) * t.schema.page_bytes for name, t in manager.tables.items())


@bookkeeping
def export_frozen(manager: KVCacheManager, request: Hashable) -> bool:
    """Whether the pages of a frozen cache are on the host now, and free on the device."""
    frozen = frozen_of(manager, request)
    if frozen.exported is not None:
        return True
    if not manager.host.pages or not manager.host.room_for(page_bytes(manager, frozen)):
        return False
    blocks = manager.host.put(_page_chunks(manager, frozen))
    if blocks is None:
        return False
    empty = {name: np.full_like(rows, -1) for name, rows in frozen.pages.items()}
    manager.frozen[request] = replace(frozen, pages=empty, exported=blocks)
    for name, table in manager.tables.items():
        table.allocator.release(frozen.page_ids(name))
    return True


@bookkeeping
def import_frozen(manager: KVCacheManager, request: Hashable) -> None:
    """The pages of an exported cache come back to the device; OutOfPages where they do not fit, HybridKVError where a
    copy fails, and nothing changes.
    """
    frozen = frozen_of(manager, request)
    if frozen.exported is None:
        return
    counts = pages_to_import(manager, frozen)
    for name, table in manager.tables.items():
        table.allocator.require(int(counts[name].sum()))
    pages: dict[str, np.ndarray] = {}
    try:
        for name, table in manager.tables.items():
            pages[name] = take_rows(table, counts[name])
        whole = replace(frozen, pages=pages, exported=None)
        back = manager.host.get(frozen.exported)
        for (pool, ids), chunk in zip(_page_places(manager, whole), back, strict=True):
            pool[:, ids] = chunk
    except BaseException:
        for name, rows in pages.items():
            manager.tables[name].allocator.release(rows[rows >= 0])
        raise
    manager.frozen[request] = whole
    manager.host.drop(frozen.exported)


def pages_to_import(manager: KVCacheManager, frozen: Frozen) -> dict[str, np.ndarray]:
    """[streams] pages of each schema that the entries take on the device."""
    return {name: ceil_div(frozen.lengths[name], t.schema.entries_per_page) for name, t in manager.tables.items()}


def take_rows(table: PageTable, counts: np.ndarray) -> np.ndarray:
    """Fresh pages [streams, N] for `counts` pages of each stream, page by page over the streams."""
    rows = np.full((len(counts), int(counts.max(initial=0))), -1, np.int32)
    taken = np.arange(rows.shape[1])[:, None] < counts
    rows.T[taken] = table.allocator.acquire(int(counts.sum()))
    return rows


def _page_places(manager: KVCacheManager, frozen: Frozen) -> Iterator[tuple[Tensor, Tensor]]:
    """(pool tensor [lanes, pages, ...], page ids) of each chunk, in the order in which they lie on the host."""
    for name, table in manager.tables.items():
        ids = upload([frozen.page_ids(name).astype(np.int64)], manager.device)
        for pool in table.pool.tensors.values():
            each = max(1, STAGING // (pool[:, :1].nbytes or 1))
            for part in ids.split(each):
                if len(part):
                    yield pool, part


def _page_chunks(manager: KVCacheManager, frozen: Frozen) -> Iterator[Tensor]:
    for pool, ids in _page_places(manager, frozen):
        yield pool[:, ids]


def exported_pages(
    manager: KVCacheManager, frozen: Frozen
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Tensor]]]:
    """Pages of an exported cache as tensors [lanes, pages, entries, ...] on the host, and which of them are whose."""
    assert frozen.exported is not None
    chunks = manager.host.read(frozen.exported)
    rows, pools = {}, {}
    for name, counts in pages_to_import(manager, frozen).items():
        taken = np.arange(int(counts.max(initial=0))) < counts[:, None]
        rows[name] = np.full(taken.shape, -1, np.int32)
        rows[name][taken] = np.arange(int(counts.sum()))
        pools[name] = {}
        for key, pool in manager.tables[name].pool.tensors.items():
            whole = torch.empty((pool.shape[0], int(counts.sum()), *pool.shape[2:]), dtype=pool.dtype)
            at = 0
            while at < whole.shape[1]:
                chunk = next(chunks)
                whole[:, at : at + chunk.shape[1]] = chunk
                at += chunk.shape[1]
            pools[name][key] = whole
    return rows, pools


# ---- made anew: begun with fresh pages, filled, finished. Until its end whoever makes it drops it if that fails


@bookkeeping
def begin_frozen(
    manager: KVCacheManager,
    request: Hashable,
    position: int,
    lengths: dict[str, np.ndarray],
    compaction: Compaction | None = None,
) -> Frozen:
    """A frozen cache of these lengths with fresh pages, whose entries and state are still to come. OutOfPages, and
    nothing is taken, where they do not fit.
    """
    if request in manager.frozen or request in manager.slot_of:
        raise RequestError(f"request {request!r} is resident already")
    tables, pages = manager.tables, {}
    counts = {name: ceil_div(lengths[name], table.schema.entries_per_page) for name, table in tables.items()}
    for name, table in tables.items():
        table.allocator.require(int(counts[name].sum()))
    for name, table in tables.items():
        pages[name] = take_rows(table, counts[name])
    # what lies before its position cannot come back
    frozen = Frozen(position, position + manager.schema.rewind, pages, lengths, NOTHING, -1, compaction)
    manager.frozen[request] = frozen
    return frozen


def fill_frozen(
    manager: KVCacheManager,
    request: Hashable,
    name: str,
    begin: np.ndarray,
    count: np.ndarray,
    entries: dict[str, Tensor],
) -> None:
    """Put `count` [streams] entries [lanes, all, ...] of each stream of one schema to their places from `begin` on."""
    table = manager.tables[name]
    at = places_of(table.schema, frozen_of(manager, request).pages[name], begin, count).to(manager.device)
    for key, pool in table.pool.tensors.items():
        flat = pool.view(pool.shape[0], -1, *pool.shape[3:])
        flat[:, at] = entries[key].to(manager.device)


@bookkeeping
def finish_frozen(manager: KVCacheManager, request: Hashable, states: dict[tuple[str, str], Tensor]) -> Frozen:
    """Give a frozen cache that was filled its state; HybridKVError where the host has no room for that."""
    frozen, blocks = frozen_of(manager, request), put_state(manager, states)
    if blocks is None:
        raise HybridKVError(
            f"its state does not fit on the host: {manager.host.used} of {manager.host.limit} bytes are taken"
        )
    lent = any((s.name, t.name) in states for s in manager.schema.states if s.lent for t in s.tensors)
    since = max(0, frozen.position - (manager.schema.query_window or 0)) if lent else -1
    manager.frozen[request] = replace(frozen, state=blocks, since=since)
    return manager.frozen[request]


@bookkeeping
def lend_pages(manager: KVCacheManager, request: Hashable, name: Hashable) -> None:
    """A second owner of the request's pages, frozen or not, without its state, so that they can be read at leisure.

    Nothing may be written to the request meanwhile, unless pages can be shared at its position.
    """
    frozen = manager.frozen.get(request)
    if frozen is None:
        slot = manager._slot(request)
        settle_slot(manager, slot)
        pages = {key: _used_rows(table, slot) for key, table in manager.tables.items()}
        lengths = {key: table.lengths[slot].copy() for key, table in manager.tables.items()}
        position, past = int(manager.positions[slot]), manager.compactions.get(slot)
        frozen = Frozen(position, position, pages, lengths, NOTHING, -1, past)
    else:
        frozen = replace(frozen, state=NOTHING, since=-1)
    for key, table in manager.tables.items():
        table.allocator.share(frozen.page_ids(key))
    if frozen.exported is not None:
        manager.host.share(frozen.exported)
    manager.frozen[name] = frozen


# ---- inside


def _used_rows(table: PageTable, slot: int) -> np.ndarray:
    used = ceil_div(table.lengths[slot], table.schema.entries_per_page)
    rows = table.pages[slot, :, : int(used.max(initial=0))]
    return np.where(np.arange(rows.shape[1]) < used[:, None], rows, -1)


def state_chunks(manager: KVCacheManager, slot: int, buffer: int) -> Iterator[Tensor]:
    """The rows of a slot and of a query buffer (-1: none), in parts that can be copied to the host."""
    for row in manager.state.rows(slot, buffer).values():
        yield from chunks_of(row)


def restore_state(manager: KVCacheManager, slot: int, state: HostBlocks) -> None:
    """The rows of a slot, and of its query buffer if it has one, become what `state_chunks` gave."""
    places = state_chunks(manager, slot, int(manager.query_buffers.of[slot]))
    for place, chunk in zip(places, manager.host.get(state), strict=True):
        place.copy_(chunk)


def state_of(manager: KVCacheManager, frozen: Frozen) -> dict[tuple[str, str], Tensor]:
    """Its state as tensors [layers, *shape] on the host."""
    found = {}
    chunks = manager.host.read(frozen.state)
    for schema in manager.schema.states:
        if schema.lent and frozen.since < 0:
            continue
        for t in schema.tensors:
            whole = torch.empty((len(schema.layers), *t.shape), dtype=t.torch_dtype)
            for place in chunks_of(whole):
                place.copy_(next(chunks))
            found[schema.name, t.name] = whole
    return found


def put_state(manager: KVCacheManager, states: dict[tuple[str, str], Tensor]) -> HostBlocks | None:
    """State tensors [layers, *shape], as `state_of` gives them, on the host; None: there is no room."""
    ordered = [states[s.name, t.name] for s in manager.schema.states for t in s.tensors if (s.name, t.name) in states]
    return manager.host.put(chunk for tensor in ordered for chunk in chunks_of(tensor))
