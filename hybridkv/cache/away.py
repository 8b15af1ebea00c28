"""Away: the cache of a running request that had to make room, whole on the host until there is room again.

    send_away    its pages and state are copied to the host, as they are, and slot, pages and query buffer given back
    bring_back   a slot and pages are taken, and filled on the side stream; it goes on where it was, nothing is computed

What is away has the name of its request, in `KVCacheManager.away`, and owns blocks on the host alone. Pages of columns
that others run on stay with these: they are not sent, and shared again when the request comes back. So are, then, all
columns of its tokens that are on the device, since their pages hold the same. If a name is there and in `slot_of`, as
after an interrupt, what is away is whole: it is written first and removed last.

A request that is on its way back has its slot and pages (`KVCacheManager.arriving`). Whoever reads or changes them, or
gives them away, has the device wait for the copies; nobody else does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from hybridkv.cache.bookkeeping import bookkeeping
from hybridkv.cache.checkpoints import Checkpoint
from hybridkv.cache.columns import Column, Columns, on_device
from hybridkv.cache.compacting import settle_slot
from hybridkv.cache.facts import Compaction
from hybridkv.cache.frozen import restore_state, state_bytes, state_chunks, take_rows
from hybridkv.cache.schema import ceil_div
from hybridkv.cache.step import upload
from hybridkv.cache.tier_sizes import BLOCK, STAGING
from hybridkv.cache.tiers import HostBlocks
from hybridkv.errors import HybridKVError

if TYPE_CHECKING:
    from hybridkv.cache.lookup import Asked
    from hybridkv.cache.manager import KVCacheManager
    from hybridkv.cache.reuse import Reuse


@dataclass(frozen=True)
class Away:
    """All that a request holds, on the host."""

    position: int
    reached: int  # the furthest position that its state has seen
    begin: int  # its tokens before this one are those of `column`: their pages were not sent
    lengths: dict[str, np.ndarray]  # stream schema -> [streams] entries, those of the column included
    since: int  # the position from which on its query buffer has every query; -1: it has none
    compaction: Compaction | None
    state: HostBlocks
    pages: HostBlocks
    column: Column | None  # the last one of what others ran on, where it lives meanwhile

    @property
    def blocks(self) -> list[HostBlocks]:
        """What it owns."""
        return [self.state, self.pages]

    @property
    def host_bytes(self) -> int:
        """Bytes of it on the host."""
        return sum(each.nbytes for each in self.blocks)


# ---- down


def shared_column(reuse: Reuse | None, request: Hashable) -> Column | None:
    """The last column that the request and others run on: it stays, whoever of them goes. None: there is none."""
    reading = None if reuse is None else reuse.readings.get(request)
    column = None if reading is None or reading.column.gone else reading.column
    while column is not None and column.live < 2:
        column = column.parent
    return column if column is not None and column.parent is not None else None


def tokens_to_read(manager: KVCacheManager, request: Hashable, shared: Column | None) -> int:
    """Tokens that would be computed if the request were read again, with what others run on."""
    has_state = manager.reuse is not None and manager.reuse.has_state
    while shared is not None and has_state and not isinstance(shared.checkpoint, Checkpoint):
        shared = shared.parent
    return manager.position(request) - (shared.end if shared is not None else 0)


def bytes_away(manager: KVCacheManager, request: Hashable, shared: Column | None) -> int:
    """Bytes that the request takes on the host, its state in whole blocks of its own."""
    sent = _sent(manager, manager.slot_of[request], shared.end if shared is not None else 0)
    pages = sum(len(ids) * table.schema.page_bytes for table, ids in zip(manager.tables.values(), sent, strict=True))
    return pages + ceil_div(state_bytes(manager, request), BLOCK) * BLOCK


@bookkeeping
def send_away(manager: KVCacheManager, request: Hashable, shared: Column | None = None) -> bool:
    """Whether the request is on the host now, and all that it held on the device free or its other owners'. Else
    nothing has changed: there is no room, or a copy failed. RequestError where its state is not that of its position.

    `shared`: of `shared_column`.
    """
    slot = manager._slot(request)
    settle_slot(manager, slot)
    manager.check_committed(slot)
    begin, buffer = shared.end if shared is not None else 0, int(manager.query_buffers.of[slot])
    state = manager.host.put(state_chunks(manager, slot, buffer))
    if state is None:
        return False
    pages = None
    try:
        pages = manager.host.put(_gathered(manager, _sent(manager, slot, begin)))
    finally:
        if pages is None:
            manager.host.drop(state)
    if pages is None:
        return False
    manager.away[request] = Away(
        int(manager.positions[slot]),
        int(manager.reached[slot]),
        begin,
        {name: table.lengths[slot].copy() for name, table in manager.tables.items()},
        int(manager.query_buffers.since[slot]) if buffer >= 0 else -1,
        manager.compactions.get(slot),
        state,
        pages,
        shared,
    )
    if shared is not None and manager.reuse is not None:
        manager.reuse.columns.occupy(shared)
    manager._release(request)
    return True


# ---- up


def columns_there(reuse: Reuse | None, away: Away, asked: Asked | None) -> list[Column]:
    """The columns of its tokens that are on the device, as far as it has read."""
    if reuse is None or asked is None or not asked.reads or away.compaction is not None:
        return []
    most = min(away.position, asked.reach)
    return on_device(reuse.columns.match(asked.salt, Columns.keys(asked.tokens), most))


def is_whole(away: Away, path: Sequence[Column]) -> bool:
    """Whether the pages that were not sent are still there, in these columns."""
    return (path[-1].end if path else 0) >= away.begin


def pages_to_take(manager: KVCacheManager, away: Away, path: Sequence[Column], tokens: int) -> dict[str, int]:
    """Pages of each pool that can be had and no longer can, once the request is back and reads `tokens` tokens."""
    found = {}
    for name, table in manager.tables.items():
        longer = away.lengths[name] + table.schema.new_entries(away.position, tokens)
        rows = _shared_rows(manager, path, name)
        shared, refs = rows.ravel(), table.allocator
        kept = int(np.count_nonzero(refs.refs[shared] == refs.spare[shared]))  # until now given up when needed
        found[name] = int((ceil_div(longer, table.schema.entries_per_page) - rows.shape[1]).sum()) + kept
    return found


@bookkeeping
def bring_back(manager: KVCacheManager, request: Hashable, path: Sequence[Column]) -> int:
    """A slot that goes on where the request was; `path`: of `columns_there`. Copies are launched, and not waited for.

    OutOfPages, or HybridKVError where no slot or query buffer is free, columns are gone or a copy fails: then it is
    still away.
    """
    away, reuse = manager.away[request], manager.reuse
    if not is_whole(away, path):
        raise HybridKVError(f"the pages of the first {away.begin} tokens were not sent, and are gone")
    slot = manager._take_slot(request)
    if path and reuse is not None:
        reuse.columns.occupy(path[-1])  # so that they do not make room for the rest
    try:
        if away.since >= 0:
            manager.query_buffers.require(slot, away.since)
        _fill(manager, slot, away, _take_pages(manager, slot, away, path))
    except (RuntimeError, MemoryError) as problem:  # of torch: no memory to copy with
        manager._release(request)
        manager.host.failed += 1
        raise HybridKVError(f"what lies on the host could not be copied back: {problem}") from problem
    except BaseException:
        manager._release(request)
        raise
    finally:
        if path and reuse is not None:
            reuse.columns.leave(path[-1])
    manager.positions[slot], manager.reached[slot] = away.position, away.reached
    if away.compaction is not None:
        manager.compactions[slot] = away.compaction
    drop_away(manager, request)  # from here on all of it is the slot's
    return slot


def drop_away(manager: KVCacheManager, request: Hashable) -> None:
    """Everything that it owns goes back. Called by the manager's own methods."""
    away = manager.away.pop(request)
    for blocks in away.blocks:
        manager.host.drop(blocks)
    if away.column is not None and not away.column.gone and manager.reuse is not None:
        manager.reuse.columns.leave(away.column)


@bookkeeping
def leave_columns(manager: KVCacheManager) -> bool:
    """What is away no longer keeps columns from making room for others; whether some did. It can come back as long as
    they are there all the same.
    """
    found = False
    for request, away in list(manager.away.items()):
        if away.column is not None:
            manager.away[request] = replace(away, column=None)
            if not away.column.gone and manager.reuse is not None:
                manager.reuse.columns.leave(away.column)
                found = True
    return found


# ---- inside


def _sent(manager: KVCacheManager, slot: int, begin: int) -> list[np.ndarray]:
    """Of each pool, the ids of the slot's pages behind its first `begin` tokens, a stream after the other."""
    found = []
    for table in manager.tables.values():
        first = table.schema.entries(begin) // table.schema.entries_per_page
        used = ceil_div(table.lengths[slot], table.schema.entries_per_page)
        at = np.arange(int(used.max(initial=0)))
        rows = table.pages[slot, :, : len(at)]
        found.append(rows[(at >= first) & (at < used[:, None])])
    return found


def _parts(manager: KVCacheManager, ids: Sequence[np.ndarray]) -> Iterator[tuple[Tensor, np.ndarray]]:
    """(a pool's tensor [lanes, pages, ...], ids of a part of the pages) of each chunk, in their order on the host."""
    for table, pages in zip(manager.tables.values(), ids, strict=True):
        for pool in table.pool.tensors.values():
            each = max(1, STAGING // (pool[:, :1].nbytes or 1))
            for i in range(0, len(pages), each):
                yield pool, pages[i : i + each]


def _gathered(manager: KVCacheManager, ids: Sequence[np.ndarray]) -> Iterator[Tensor]:
    for pool, part in _parts(manager, ids):
        yield pool[:, upload([part.astype(np.int64)], manager.device)]


def _shared_rows(manager: KVCacheManager, path: Sequence[Column], name: str) -> np.ndarray:
    """[streams, pages] of columns."""
    if not path or manager.reuse is None:
        return np.zeros((manager.tables[name].schema.streams, 0), np.int32)
    return manager.reuse.column_pages.rows_of(list(path), name)


def _take_pages(manager: KVCacheManager, slot: int, away: Away, path: Sequence[Column]) -> list[np.ndarray]:
    """The slot shares the pages of columns and takes fresh ones for the rest. Returns, of each pool, the ids of the
    pages that were sent, in their order; -1: a column has it.
    """
    need = {}
    for name, table in manager.tables.items():  # first, so that none of them makes room for the rest
        shared = _shared_rows(manager, path, name)
        table.begin_with(slot, shared, 0)
        need[name] = ceil_div(away.lengths[name], table.schema.entries_per_page) - shared.shape[1]
    for name, table in manager.tables.items():
        table.allocator.require(int(need[name].sum()))
    for name, table in manager.tables.items():
        shared = table.pages[slot, :, : int(table.held[slot].max(initial=0))]
        table.attach(slot, np.concatenate((shared, take_rows(table, need[name])), 1), away.lengths[name])
    found = _sent(manager, slot, away.begin)
    for name, ids in zip(manager.tables, found, strict=True):
        ids[np.isin(ids, _shared_rows(manager, path, name))] = -1
    return found


def _fill(manager: KVCacheManager, slot: int, away: Away, places: Sequence[np.ndarray]) -> None:
    host, device = manager.host, manager.device
    with host.aside() as arrival:
        if arrival is not None:
            manager.arriving[slot] = arrival
        for (pool, ids), chunk in zip(_parts(manager, places), host.get(away.pages), strict=True):
            wanted = np.flatnonzero(ids >= 0)
            if len(wanted) < len(ids):
                chunk = chunk[:, upload([wanted], device)]
            if len(wanted):
                pool[:, upload([ids[wanted].astype(np.int64)], device)] = chunk
        restore_state(manager, slot, away.state)
