"""Tails: where a turn ends between two columns. A tail is a leaf of the trie with fewer tokens than a column, its last
pages half full, and, where there is recurrent state, a copy of it in a row.

    column ── column ── tail         the next turn of a conversation begins with all of it, to the last token

Whoever goes on from a tail shares its pages and copies the open one before it writes, as after a fork. A tail is on
trial: it goes before all others until it was used once. Nothing lives on it and nothing stands below it: a request that
goes on from it brings the whole column when that is full.

A request that ends while a step launched ahead has its last token is kept at the position that its state has reached,
for state cannot go back. What that step wrote is seen by others once it has ended well (`Publishing.late`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.cache.checkpoints import NEAR, ON_TRIAL, Checkpoint, Mark
from hybridkv.cache.columns import KEY_DTYPE, Column, Columns
from hybridkv.cache.publishing import Reading, last_column
from hybridkv.cache.schema import ceil_div

if TYPE_CHECKING:
    from hybridkv.cache.reuse import Reuse

Ended = Callable[[], bool]  # waits for a step that was launched; whether it ended well


def tails_below(columns: Columns, column: Column, keys: bytes, most: int) -> Iterator[Column]:
    """Tails of a column whose tokens are the next of a prompt, the longest first; none ends behind `most` tokens."""
    item, left = KEY_DTYPE.itemsize, min(most, len(keys) // KEY_DTYPE.itemsize) - column.end
    for n in range(min(left, columns.q - 1), 0, -1):
        found = column.children.get(keys[column.end * item : (column.end + n) * item])
        if found is not None:
            yield found


def find_tail(reuse: Reuse, salt: bytes, path: Sequence[Column], keys: bytes, most: int, after: int) -> Column | None:
    """The deepest tail that a prompt can be taken up at, if that is behind `after` tokens and before `most`. With state
    it may hang from any column of the prompt's path, without from the last alone.
    """
    root = reuse.columns.roots.get(salt)
    above = [root, *path] if root is not None else []
    for column in reversed(above if reuse.has_state else above[-1:]):
        if column.end + reuse.q <= after:
            return None
        if not column.tails:
            continue
        for tail in tails_below(reuse.columns, column, keys, most):
            if tail.end <= after:
                break
            if tail.checkpoint is not None or not reuse.has_state:
                return tail
    return None


def tail_rows(reuse: Reuse, tail: Column | None, name: str) -> np.ndarray:
    """[streams, pages] of a tail, as page tables have them."""
    begin, streams, per = reuse.parts[name]
    if tail is None:
        return np.zeros((streams, 0), np.int32)
    assert tail.pages is not None
    rows = tail.pages[begin : begin + streams * per].reshape(streams, per)
    return rows[:, : int((rows[0] >= 0).sum()) if streams else 0]


def full_pages(reuse: Reuse, tail: Column | None, name: str) -> int:
    """Pages of a tail that are full: a request that goes on from it need not copy them."""
    if tail is None or tail.parent is None:
        return 0
    schema = reuse.manager.tables[name].schema
    entries = schema.entries(tail.end) - schema.entries(tail.parent.end)
    return schema.streams * (entries // schema.entries_per_page)


def keep_end(reuse: Reuse, request: Hashable, tokens: Sequence[int], ended: Ended | None = None) -> bool:
    """Whether what a request that ends has read stays for others, to the last token: `tokens` are all of it.

    Args:
        reuse: where it stays.
        request: it is still resident.
        tokens: all that are known of it.
        ended: of the step that was launched ahead for it; None: there is none.
    """
    manager, reading = reuse.manager, reuse.readings.get(request)
    if not reuse.tails or reading is None or not reading.writes:
        return False
    slot = manager.slot_of[request]
    position = int(manager.positions[slot])
    end = max(position, int(manager.reached[slot]))
    if slot in manager.compactions or slot in manager.compacting or position < manager.fresh[slot]:
        return False
    if end > len(tokens) or manager.schema.share_every > 1 or (end > position and ended is None):
        return False
    return stage_tail(reuse, request, reading, tokens, end, ended if end > position else None)


def stage_tail(
    reuse: Reuse, request: Hashable, reading: Reading, tokens: Sequence[int], end: int, ended: Ended | None
) -> bool:
    """Whether what lies between the request's last column and `end` is there for others now, or will be when a step has
    `ended`.
    """
    manager, column = reuse.manager, last_column(reuse.columns, reading)
    size = end - column.end
    if not 0 <= size <= reuse.q or (not size and not reuse.has_state):
        return False
    key = Columns.keys(np.array(tokens[column.end : end]))
    there = column.children.get(key) if size else column
    if there is not None and (there.checkpoint is not None or not reuse.has_state):
        return False
    row, mark = -1, None
    if reuse.has_state:
        taken = _row(reuse, column, end)
        if taken is None:
            return False
        row, mark = taken, Mark(end, ON_TRIAL)
        manager.state.copy(manager.slot_of[request], row)
    pages = _pages(reuse, manager.slot_of[request], column.end, end) if size else _pages(reuse, -1, 0, 0)
    reuse.publishing.hold_back(request, reading, column, [key] if size else [], pages, mark, row, ended)
    return True


def _row(reuse: Reuse, column: Column, end: int) -> int | None:
    """A row for the state at the end of a turn. So near behind another checkpoint it takes the place of ends of turns
    alone.
    """
    above, at = 0, column
    while at.parent is not None:
        if isinstance(at.checkpoint, Checkpoint):
            above = at.end
            break
        at = at.parent
    return reuse.checkpoints.reserve() if end - above >= NEAR else reuse.checkpoints.reserve_spare()


def _pages(reuse: Reuse, slot: int, begin: int, end: int) -> np.ndarray:
    """[1, width] page ids of a slot's tokens begin .. end - 1, the first of a column; [0, width]: there are none."""
    if end == begin:
        return np.zeros((0, reuse.columns.width), np.int32)
    found = np.full((1, reuse.columns.width), -1, np.int32)
    for name, (first, streams, per) in reuse.parts.items():
        table = reuse.manager.tables[name]
        schema = table.schema
        entries = schema.entries(end) - schema.entries(begin)
        used, at = ceil_div(entries, schema.entries_per_page), schema.entries(begin) // schema.entries_per_page
        rows = found[0, first : first + streams * per].reshape(streams, per)
        rows[:, :used] = table.pages[slot, :, at : at + used]
    return found
