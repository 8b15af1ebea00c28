"""Publishing: what a step has written waits until the step is known to have ended well; then it is there for all.

    stage | hold_back -> publish | settle_late | drop

Columns enter the trie here, and states their rows. Which prompts they are for is lookup.py's, when they go reuse.py's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.cache.checkpoints import Mark
from hybridkv.cache.column_pages import ColumnPages
from hybridkv.cache.columns import KEY_DTYPE, Column, Columns

if TYPE_CHECKING:
    from hybridkv.cache.reuse import Reuse
    from hybridkv.cache.tails import Ended


@dataclass(eq=False)
class Reading:
    """A request that runs on, or adds to, what is kept."""

    salt: bytes
    keys: bytes  # of the tokens that were known at first
    writes: bool
    reach: int  # tokens that it can bring at the most: its first eviction
    column: Column  # the last of its columns that all can see
    stops: list[Mark] = field(default_factory=list)  # where its chunks end and checkpoints are taken, ascending
    own: Column | None = None  # the first one that it brought
    written: int = 0  # position of the deepest checkpoint that it took
    tail: Column | None = None  # that it began with, below its columns (tails.py)


@dataclass(eq=False)
class Staged:
    """What one step of a request wrote, until that is known to have ended well."""

    request: Hashable
    reading: Reading
    below: Column  # the last one that was there
    keys: list[bytes]
    pages: np.ndarray  # [columns, width]
    mark: Mark | None
    row: int  # of the state at the mark; -1: none


class Publishing:
    """What waits.

    Args:
        reuse: what it is published in.
        pages: of its columns.
    """

    def __init__(self, reuse: Reuse, pages: ColumnPages) -> None:
        self.reuse, self.pages = reuse, pages
        self.staged: list[Staged] = []
        self.late: list[tuple[Staged, Ended]] = []  # what a step wrote that was launched and not waited for

    def stage(self, request: Hashable, tokens: Sequence[int]) -> None:
        """The request's step is committed, and what comes next is not launched: its new columns and a copy of its state
        wait to be published. `tokens`: all that are known of it.
        """
        reading = self.reuse.readings.get(request)
        if reading is None or not reading.writes:
            return
        manager, q = self.reuse.manager, self.reuse.q
        slot = manager.slot_of[request]
        position = int(manager.positions[slot])
        stop = reading.stops[0] if reading.stops else None
        if position // q * q <= reading.column.end and (stop is None or position < stop.position):
            return
        if slot in manager.compactions or slot in manager.compacting:
            reading.writes = False
            return
        column = last_column(self.reuse.columns, reading)
        last = position // q
        first = column.end // q
        keys = [_key(reading, tokens, q, j) for j in range(first, last)]
        while keys and (child := column.children.get(keys[0])) is not None and child.pages is not None:
            # another request was quicker
            self.reuse.columns.occupy(child, column)
            column = reading.column = child
            keys.pop(0)
            first += 1
        pages = self.pages.of_slot(slot, first, max(first, last))
        mark, row = None, -1
        while reading.stops and reading.stops[0].position <= position:
            mark = reading.stops.pop(0)
        if mark is not None and (mark.position < position or (not keys and column_at(column, position).checkpoint)):
            mark = None
        if mark is not None:
            taken = self.reuse.checkpoints.reserve()
            row = -1 if taken is None else taken
        self.pages.own(pages)
        self.staged.append(Staged(request, reading, column, keys, pages, mark if row >= 0 else None, row))
        if row >= 0:
            manager.state.copy(slot, row)
            self.reuse.counts["cuts"] += 1

    def hold_back(
        self, request: Hashable, reading: Reading, below: Column, keys: list[bytes], pages: np.ndarray,
        mark: Mark | None, row: int, ended: Ended | None,
    ) -> None:  # fmt: skip
        """What was written below a column waits until its step has `ended` well; None: it has."""
        self.pages.own(pages)
        staged = Staged(request, reading, below, keys, pages, mark, row)
        if ended is not None:
            self.late.append((staged, ended))
            return
        self.staged.append(staged)
        self.publish()

    def settle_late(self) -> None:
        """Wait for steps that were launched, if there are any, and publish what they wrote where they ended well."""
        while self.late:
            staged, ended = self.late[-1]
            well = ended()
            self.late.pop()
            self._publish(staged, well)  # no others: what the step in hand has written is not known to be sound

    def publish(self, failed: Iterable[Hashable] = ()) -> None:
        """The step has ended well, but for requests that have failed: from here on its columns are for all to see."""
        bad = set(failed)
        while self.staged:
            staged = self.staged.pop()
            self._publish(staged, staged.request not in bad)

    def _publish(self, staged: Staged, well: bool) -> None:
        reading, column = staged.reading, staged.below
        away = column.pages is None and column.parent is not None  # it is on the host
        if not well or column.gone or away:  # its branch was cut since
            self._abandon(staged)
            return
        # or it was evicted since, and goes on elsewhere, or has ended
        lives = reading.column is column and self.reuse.readings.get(staged.request) is reading
        if column.parent is None:
            column = self.reuse.columns.root(reading.salt)
        for i, key in enumerate(staged.keys):
            child, new = self.reuse.columns.insert(column, key, staged.pages[i])
            if child.pages is None:  # it was on the host alone, and was read again
                self.reuse.host.renew(child)
                self.reuse.columns.come_back(child, staged.pages[i])
                new = True
            if lives and not self.reuse.columns.is_tail(child):
                self.reuse.columns.occupy(child, column)
                reading.column = child
            column = child
            if not new:
                self.pages.disown(staged.pages[i])
            elif reading.own is None and not self.reuse.columns.is_tail(child):
                reading.own = child
        if staged.mark is not None and (at := column_at(column, staged.mark.position)).end == staged.mark.position:
            made = self.reuse.checkpoints.add(at, staged.row, staged.mark.kind)
            reading.written = made.position
            if made.row == staged.row:
                self.reuse.host.forget_state(at)  # it may have other bits
        elif staged.row >= 0:
            self.reuse.checkpoints.give_back(staged.row)

    def drop(self, request: Hashable) -> None:
        """What the request has staged is not published."""
        for staged in [each for each in self.staged if each.request == request]:
            self.staged.remove(staged)
            self._abandon(staged)

    def waiting(self) -> list[np.ndarray]:
        """Rows of page ids of all that waits."""
        return [row for staged in (*self.staged, *(staged for staged, _ in self.late)) for row in staged.pages]

    def clear(self) -> None:
        """After an interrupt: nothing waits any more, and all pages are counted anew."""
        self.staged, self.late = [], []

    def _abandon(self, staged: Staged) -> None:
        for pages in staged.pages:
            self.pages.disown(pages)
        if staged.row >= 0:
            self.reuse.checkpoints.give_back(staged.row)


def last_column(columns: Columns, reading: Reading) -> Column:
    """The last of the request's columns; it begins anew where its branch was cut."""
    column = reading.column
    if column.gone or (column.parent is None and columns.roots.get(reading.salt) is not column):
        column = reading.column = columns.root(reading.salt)
    return column


def column_at(column: Column, position: int) -> Column:
    """The column on the path that ends at a position, or the last one where it ends before that."""
    while column.end > position and column.parent is not None:
        column = column.parent
    return column


def _key(reading: Reading, tokens: Sequence[int], q: int, j: int) -> bytes:
    """Of the request's column j, of q tokens."""
    size = KEY_DTYPE.itemsize * q
    if (j + 1) * size <= len(reading.keys):
        return reading.keys[j * size : (j + 1) * size]
    return Columns.keys(np.array(tokens[j * q : (j + 1) * q]))
