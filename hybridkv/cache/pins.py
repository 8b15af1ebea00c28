"""Pins: columns that stay, with the state at their end, however short pages and rows are.

A pin is one more owner of its columns' pages, one that does not give them up: they do not count as pages that can be
had. So it may have half of each pool and half of the rows at the most; the other half is what requests run on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.cache.bookkeeping import bookkeeping
from hybridkv.cache.columns import Column, Columns
from hybridkv.cache.schema import CacheSchema
from hybridkv.errors import HybridKVError

if TYPE_CHECKING:
    from hybridkv.cache.manager import KVCacheManager
    from hybridkv.cache.reuse import Reuse

PINNED_SHARE = 0.5  # of a tier, at the most: what is pinned cannot make room


def may_pin(pinned: int, more: int, capacity: int) -> bool:
    """Whether `more` bytes (or rows, or pages) may be pinned beside those that are."""
    return pinned + more <= capacity * PINNED_SHARE


@dataclass(eq=False, frozen=True)
class Pin:
    """A text that stays: its columns, down to this one."""

    column: Column

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self.column.end

    def pages(self, reuse: Reuse, name: str) -> np.ndarray:
        """Page ids of one pool that it owns."""
        return reuse.column_pages.ids(self.column.path(), name).ravel()


def reuse_of(manager: KVCacheManager) -> Reuse:
    """What requests leave for others, or HybridKVError."""
    if manager.reuse is None:
        raise HybridKVError("nothing is reused in this model, so nothing can be pinned; open it without reuse=None")
    return manager.reuse


def check_pin(manager: KVCacheManager, salt: bytes, tokens: np.ndarray) -> None:
    """Whether a text of whole columns may be pinned beside what is, or HybridKVError: before it is read."""
    reuse = reuse_of(manager)
    pinned = _pinned(reuse)
    path = reuse.columns.match(salt, Columns.keys(tokens), len(tokens))
    more = len(tokens) // reuse.q - sum(id(column) in pinned for column in path)
    for name, (_, streams, per) in reuse.parts.items():
        total, size = manager.tables[name].allocator.total, manager.tables[name].schema.page_bytes
        if not may_pin(len(pinned) * streams * per, more * streams * per, total):
            raise HybridKVError(
                f"a pinned prefix of {len(tokens)} tokens needs {more * streams * per * size} bytes of pages of pool "
                f"'{name}'; {len(pinned) * streams * per * size} of {total * size} are pinned, and half may be. Drop "
                "another prefix, shorten this one, or give more memory"
            )
    if reuse.has_state:
        rows, row_bytes = reuse.checkpoints.rows, reuse.checkpoints.row_bytes
        held = {id(pin.column) for pin in reuse.pins}
        again = bool(path) and path[-1].end == len(tokens) and id(path[-1]) in held
        if not may_pin(len(held), int(not again), rows):
            raise HybridKVError(
                f"a pinned prefix needs a checkpoint of {row_bytes} bytes; {len(held)} of {rows} are pinned, and half "
                f"may be. Drop another prefix, or open the model with ReuseConfig(checkpoints={2 * (len(held) + 1)} * "
                f"{row_bytes}) or more"
            )


@bookkeeping
def pin(manager: KVCacheManager, salt: bytes, tokens: np.ndarray) -> Pin | None:
    """A text of whole columns stays from here on, if all of it is there; None: it is not. HybridKVError where that is
    more than may be pinned.
    """
    reuse = reuse_of(manager)
    check_pin(manager, salt, tokens)
    path = reuse.columns.match(salt, Columns.keys(tokens), len(tokens))
    column = path[-1] if path else None
    if column is None or column.end < len(tokens) or column.pages is None:
        return None
    if reuse.has_state and column.checkpoint is None:
        return None
    made = Pin(column)
    for name in reuse.parts:
        manager.tables[name].allocator.share_distinct(made.pages(reuse, name))
    reuse.pins.append(made)  # from here on they are its own
    _count(reuse, column, 1)
    reuse.columns.occupy(column)
    return made


@bookkeeping
def unpin(manager: KVCacheManager, pin: Pin) -> None:
    """What was pinned may go like anything else. Nothing happens where it is gone already."""
    reuse = reuse_of(manager)
    if pin not in reuse.pins:
        return
    reuse.pins.remove(pin)
    for name in reuse.parts:
        manager.tables[name].allocator.release_distinct(pin.pages(reuse, name))
    _count(reuse, pin.column, -1)
    reuse.columns.leave(pin.column)


def pin_bytes(manager: KVCacheManager, tokens: int, schema: CacheSchema) -> int:
    """Bytes of the pages of a text of whole columns, and of the state at its end; `schema`: of all ranks' caches."""
    reuse = reuse_of(manager)
    return tokens // reuse.q * schema.kv_bytes(reuse.q) + (schema.checkpoint_bytes if reuse.has_state else 0)


def pinned_pages(reuse: Reuse, name: str) -> np.ndarray:
    """Page ids of a pool that pins own, as often as they do."""
    return np.concatenate([np.zeros(0, np.int32), *(each.pages(reuse, name) for each in reuse.pins)])


def drop_pins(reuse: Reuse, gone: Column) -> None:
    """What is pinned at or below a column goes, because that column does: all was forgotten."""
    for each in [each for each in reuse.pins if gone in each.column.path()]:
        reuse.pins.remove(each)
        for name in reuse.parts:
            reuse.manager.tables[name].allocator.release_distinct(each.pages(reuse, name))
        _count(reuse, each.column, -1)
        reuse.columns.leave(each.column)


def first_unpinned(reuse: Reuse, path: list[Column]) -> Column | None:
    """The first column of a path that is not pinned."""
    pinned = _pinned(reuse)
    return next((column for column in path if id(column) not in pinned), None)


def _pinned(reuse: Reuse) -> set[int]:
    """Every column that a pin keeps."""
    return {id(column) for each in reuse.pins for column in each.column.path()}


def _count(reuse: Reuse, column: Column, by: int) -> None:
    checkpoint = column.checkpoint
    if checkpoint is not None:
        checkpoint.pins += by  # type: ignore[attr-defined]
