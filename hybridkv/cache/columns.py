"""Columns: a trie of prompts that were read, one node for every q tokens, with the page ids of all streams for them.

    q = 64      root ── tokens 0..63 ── tokens 64..127 ── tokens 128..191        one node: a column
                                    └── tokens 64..127 ── ...                    another prompt with the same beginning

A column is found by its tokens, which are compared whole, below the column before it. So nothing is ever split or
merged, and a lookup takes as long as the prompt is, whatever else is cached. Each salt has a root of its own. A leaf
may have fewer than q tokens: a tail (tails.py), which no lookup of columns finds. A column whose pages have gone to the
host (host_columns.py) stays where it is, without page ids; all below it have gone there before.

Here are names and numbers alone: no tensor, no page is counted. Who owns pages is the manager's business, what a
column's end is worth `checkpoints.py`'s. Order comes from a counter, never from a clock, so that two machines that are
asked the same drop the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

KEY_DTYPE = np.dtype(np.int32)  # of tokens, where they are compared
TRIAL = 1 << 60  # taken from the stamp of a tail until it is used: it goes before all others
LATER = 1 << 61  # added to the stamp of columns that a state on the host needs: they go after all others


class Column:
    """q tokens of a prompt, below those before them. `end`: tokens up to and including its own."""

    __slots__ = (
        "checkpoint", "children", "covers", "end", "gone", "host", "kept", "key", "live", "lost", "pages", "parent",
        "queued", "resident", "stamp", "stored", "tails", "warm",
    )  # fmt: skip

    def __init__(self, parent: Column | None, key: bytes, pages: np.ndarray | None, end: int, stamp: int) -> None:
        self.parent, self.key, self.pages, self.end, self.stamp = parent, key, pages, end, stamp
        self.children: dict[bytes, Column] = {}
        self.tails = 0  # how many of these have fewer tokens than a column
        self.resident = 0  # how many of these have pages on the device
        self.host: object | None = None  # a copy of its pages on the host (host_columns.py)
        self.stored: object | None = None  # a copy there of a state at its end
        self.kept = 0  # such states at its end or below it
        self.checkpoint: object | None = None  # a state at its end (checkpoints.py)
        self.covers = 0  # checkpoints at its end or below it
        self.live = 0  # requests that hold a place at it or below it
        self.lost = False  # a checkpoint was here and was dropped
        self.gone = False  # it is no longer part of the trie
        self.queued = False  # it stands in the queue of those that can be dropped
        self.warm = False  # it was read before anybody asked for it, and nobody has used it yet (warm.py)

    @property
    def droppable(self) -> bool:
        """Whether nobody would miss its pages: none are below it, no request lives there, no state is at its end."""
        return not (self.resident or self.live or self.covers or self.gone) and self.pages is not None

    @property
    def order(self) -> int:
        """The pages of the least go first."""
        return self.stamp + (LATER if self.kept else 0)

    def path(self) -> list[Column]:
        """From the first column down to this one."""
        found, column = [], self
        while column.parent is not None:
            found.append(column)
            column = column.parent
        return found[::-1]


class Columns:
    """The trie. q: tokens of a column; `width`: page ids that each has."""

    def __init__(self, q: int, width: int) -> None:
        self.q, self.width = q, width
        self.roots: dict[bytes, Column] = {}
        self.count = 0
        self.away = 0  # columns whose pages are on the host alone
        self.uncovered = 0  # columns at or below which no checkpoint is: they go first
        self.clock = 0
        self._queue: list[tuple[int, int, Column]] = []  # (order, number, column) that could be dropped, oldest first
        self._numbers = 0

    def tick(self) -> int:
        """A stamp later than all before."""
        self.clock += 1
        return self.clock

    @staticmethod
    def keys(tokens: np.ndarray) -> bytes:
        """What columns are compared by: `match` and `extend` cut it into keys."""
        return np.ascontiguousarray(tokens, KEY_DTYPE).tobytes()

    # ---- lookup

    def match(self, salt: bytes, keys: bytes, tokens: int) -> list[Column]:
        """The columns, from the first on, that are those of a prompt's first `tokens` tokens."""
        column, found = self.roots.get(salt), []
        size = self.q * KEY_DTYPE.itemsize
        for at in range(0, tokens // self.q * size, size):
            column = column.children.get(keys[at : at + size]) if column is not None else None
            if column is None:
                break
            found.append(column)
        return found

    def agrees(self, column: Column, keys: bytes) -> int:
        """How many more tokens of a prompt that left the trie at `column` agree with one of the columns below it."""
        size, item = self.q * KEY_DTYPE.itemsize, KEY_DTYPE.itemsize
        rest = np.frombuffer(keys[column.end * item : column.end * item + size], KEY_DTYPE)
        most = 0
        for key in column.children:
            other = np.frombuffer(key, KEY_DTYPE)[: len(rest)]
            differs = np.flatnonzero(other != rest[: len(other)])
            most = max(most, int(differs[0]) if len(differs) else len(other))
        return most

    # ---- growth

    def root(self, salt: bytes) -> Column:
        """Where the prompts of a salt begin."""
        if salt not in self.roots:
            self.roots[salt] = Column(None, salt, None, 0, 0)
        return self.roots[salt]

    def insert(self, parent: Column, key: bytes, pages: np.ndarray) -> tuple[Column, bool]:
        """The column of these tokens below `parent`, and whether it is new. One that is there stays as it is. Fewer
        tokens than q: a tail.
        """
        found = parent.children.get(key)
        if found is not None:
            return found, False
        assert not self.is_tail(parent), "nothing stands below a tail"
        column = Column(parent, key, pages, parent.end + len(key) // KEY_DTYPE.itemsize, self.tick())
        if self.is_tail(column):
            column.stamp -= TRIAL
            parent.tails += 1
        parent.children[key] = column
        parent.resident += 1
        self.count += 1
        self.uncovered += 1
        self._offer(column)
        return column, True

    def is_tail(self, column: Column) -> bool:
        """Whether it has fewer tokens than a column."""
        return column.end % self.q > 0

    def touch(self, path: list[Column]) -> None:
        """These columns were used now."""
        stamp = self.tick()
        for column in path:
            column.stamp = stamp

    # ---- who needs what

    def occupy(self, column: Column, before: Column | None = None) -> None:
        """A request lives at `column`; `before`: where it lived until now, above it or nowhere."""
        while column is not before and column.parent is not None:
            column.live += 1
            column = column.parent

    def leave(self, column: Column) -> None:
        """The request that lived there is gone."""
        while column.parent is not None:
            column.live -= 1
            self._offer(column)
            column = column.parent

    def cover(self, column: Column, checkpoint: object) -> None:
        """A state is at the column's end from here on."""
        assert column.checkpoint is None
        column.checkpoint, column.lost = checkpoint, False
        at: Column | None = column
        while at is not None and at.parent is not None:
            at.covers += 1
            self.uncovered -= at.covers == 1
            at = at.parent

    def uncover(self, column: Column) -> None:
        """The state at its end is gone."""
        assert column.checkpoint is not None
        column.checkpoint, column.lost = None, True
        at: Column | None = column
        while at is not None and at.parent is not None:
            at.covers -= 1
            self.uncovered += at.covers == 0
            self._offer(at)
            at = at.parent

    # ---- pages and states on the host

    def leave_device(self, column: Column) -> np.ndarray:
        """Its pages go, which are returned, and it stays."""
        assert column.pages is not None and column.parent is not None and not column.resident
        pages, column.pages = column.pages, None
        column.parent.resident -= 1
        self.away += 1
        self._offer(column.parent)
        return pages

    def come_back(self, column: Column, pages: np.ndarray) -> None:
        """It has pages again."""
        parent = column.parent
        assert column.pages is None and parent is not None and (parent.pages is not None or parent.parent is None)
        column.pages = pages
        parent.resident += 1
        self.away -= 1
        self._offer(column)

    def keep(self, column: Column, stored: object | None) -> None:
        """A copy of the state at its end is on the host from here on; None: no longer."""
        more = (stored is not None) - (column.stored is not None)
        column.stored = stored
        at: Column | None = column
        while more and at is not None and at.parent is not None:
            at.kept += more
            if not at.kept and at.queued:  # it goes sooner from here on; its old place in the queue is passed over
                at.queued = False
                self._offer(at)
            at = at.parent

    # ---- dropping

    def oldest(self) -> Column | None:
        """The column whose pages go first, of those that nobody would miss; None: there is none. It leaves the queue,
        so its pages must go.
        """
        while self._queue:
            order, _, column = heapq.heappop(self._queue)
            column.queued = False
            if not column.droppable:
                continue  # it is offered again when that changes
            if column.order != order:
                self._offer(column)
                continue
            return column
        return None

    def drop_oldest(self) -> Column | None:
        """Take out the column that was used longest ago, of those that nobody would miss; None: there is none."""
        column = self.oldest()
        if column is not None:
            self.cut(column)
        return column

    def cut(self, column: Column) -> list[Column]:
        """Take out a column with all below it, deepest first: a branch that must not be used again. Requests that live
        there leave it without being told (`gone`). Checkpoints must have been dropped.
        """
        found = [column]
        for each in found:
            found += each.children.values()
        assert not any(each.checkpoint is not None for each in found), "a branch is cut while it has checkpoints"
        lived, at = column.live, column.parent
        while lived and at is not None and at.parent is not None:
            at.live -= lived
            self._offer(at)
            at = at.parent
        for each in reversed(found):
            self._remove(each)
        return found[::-1]

    def _remove(self, column: Column) -> None:
        parent = column.parent
        assert parent is not None and not column.children and not column.gone
        self.keep(column, None)
        del parent.children[column.key]
        parent.tails -= self.is_tail(column)
        parent.resident -= column.pages is not None
        self.away -= column.pages is None
        column.gone = True
        self.count -= 1
        self.uncovered -= 1
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            self.roots.pop(parent.key, None)

    def _offer(self, column: Column) -> None:
        """It may be one that can be dropped now."""
        if not column.queued and column.droppable:
            column.queued = True
            self._numbers += 1
            heapq.heappush(self._queue, (column.order, self._numbers, column))

    def prune(self, states: bool) -> None:
        """Take out columns that have pages nowhere, as after an interrupt on their way to the host, and those there
        that no state needs, where there are `states`. Nothing is counted: `rebuild` does that.
        """
        for column in list(self):
            if column.parent is not None and column.pages is None and column.host is None:
                column.parent.children.pop(column.key)
        needed: set[Column | None] = set()
        for column in reversed(list(self)):
            if column.stored is not None or column in needed:
                needed.add(column.parent)
            elif states and column.parent is not None and column.pages is None:
                column.parent.children.pop(column.key)

    def rebuild(self, lives: list[Column]) -> None:
        """Count everything anew from the columns that are there, and from where requests live: the way back after an
        interrupt. May be repeated.
        """
        every = list(self)
        self.count, self._queue = len(every), []
        self.away = sum(column.pages is None for column in every)
        for column in [*self.roots.values(), *every]:
            column.tails = sum(map(self.is_tail, column.children.values()))
            column.resident = sum(child.pages is not None for child in column.children.values())
        for column in every:
            column.covers = column.live = column.kept = 0
            column.gone = column.queued = False
        for column in lives:
            self.occupy(column)
        for column in every:
            state, stored = column.checkpoint is not None, column.stored is not None
            at = column if state or stored else None
            while at is not None and at.parent is not None:
                at.covers += state
                at.kept += stored
                at = at.parent
        self.uncovered = sum(not column.covers for column in every)
        for column in every:
            self._offer(column)

    def holds(self, column: Column) -> bool:
        """Whether it is part of the trie, found out from the trie alone."""
        at = column
        while at.parent is not None:
            if at.parent.children.get(at.key) is not at:
                return False
            at = at.parent
        return self.roots.get(at.key) is at

    # ---- all of them

    def __iter__(self) -> Iterator[Column]:
        """Every column, each after those above it."""
        rest = list(self.roots.values())
        for column in rest:
            rest += column.children.values()
            if column.parent is not None:
                yield column

    def check(self) -> None:
        """All counts are what the trie says, or AssertionError."""
        every = list(self)
        covers = {id(c): int(c.checkpoint is not None) for c in every}
        kept = {id(c): int(c.stored is not None) for c in every}
        for column in reversed(every):
            if column.parent is not None and column.parent.parent is not None:
                covers[id(column.parent)] += covers[id(column)]
                kept[id(column.parent)] += kept[id(column)]
        assert self.away == sum(c.pages is None for c in every), "columns on the host are miscounted"
        assert self.count == len(every), f"{self.count} columns are counted, {len(every)} are there"
        assert self.uncovered == sum(not n for n in covers.values()), "columns without a checkpoint are miscounted"
        for column in every:
            assert column.covers == covers[id(column)], "checkpoints below a column are miscounted"
            assert column.kept == kept[id(column)], "states on the host below a column are miscounted"
            assert column.resident == sum(c.pages is not None for c in column.children.values())
            assert column.pages is not None or not (column.resident or column.covers), "what is needed has no pages"
            assert column.live >= sum(c.live for c in column.children.values()) >= 0, "requests are miscounted"
            assert not column.gone and column.parent is not None
            assert column.end == column.parent.end + len(column.key) // KEY_DTYPE.itemsize <= column.parent.end + self.q
            assert column.tails == sum(map(self.is_tail, column.children.values())), "tails are miscounted"
            assert not (column.children and self.is_tail(column)), "something stands below a tail"
            assert column.parent.children[column.key] is column
            assert column.queued or not column.droppable, "a column that can be dropped is not offered"


def on_device(path: list[Column]) -> list[Column]:
    """The columns of a path, from the first on, that have pages: those behind them are on the host."""
    return path[: next((i for i, column in enumerate(path) if column.pages is None), len(path))]
