"""Reuse: what requests have read is kept for others that begin alike. The engine calls this, and nothing below it.

    lookup -> attach                     when a request is admitted: shared pages, a copy of the state of a checkpoint
    ( stage -> publish | abandon )*      around each step: what it wrote is seen by others once it has ended well
    leave                                when the request is gone; the manager calls it

A hit is the deepest checkpoint whose columns are all there (without recurrent state: the columns themselves), or the
end of a turn behind them (tails.py). Where columns go on behind it, they are shared as well and their tokens read again
for the state alone: nothing is stored and no page is taken. Columns are one more owner of pages, one that gives them up
when they are needed (`reclaim`), but for those that are pinned (pins.py). A state is always copied. Compacted requests
put nothing in: what they kept depends on the question. What has no room on the device may lie on the host
(host_columns.py); a prompt that goes on there has it copied back first (`load`).

What a prompt takes up is found in lookup.py; what steps wrote waits in publishing.py; column_pages.py counts pages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial

import numpy as np

from hybridkv.cache.checkpoints import Checkpoint, Checkpoints, Mark, Policy, grid_marks, spaced
from hybridkv.cache.column_pages import ColumnPages
from hybridkv.cache.columns import KEY_DTYPE, Column, Columns, on_device
from hybridkv.cache.host_columns import HostColumns
from hybridkv.cache.lookup import Asked, Hit, load, look_up
from hybridkv.cache.manager import KVCacheManager
from hybridkv.cache.pins import Pin, drop_pins, first_unpinned, pinned_pages
from hybridkv.cache.publishing import Publishing, Reading
from hybridkv.cache.schema import check_column, column_tokens
from hybridkv.cache.tails import tail_rows, tails_below
from hybridkv.cache.warm import COUNTS as WARM
from hybridkv.cache.warm import count_hit, drop_unused


class Reuse:
    """Columns and checkpoints over a manager's pools and state rows.

    Args:
        manager: made with `checkpoints`, the rows for them.
        every: tokens between checkpoints inside long texts; None: as their bytes suggest; 0: none.
        policy: which checkpoint goes first; None: the one that was used longest ago.
    """

    def __init__(self, manager: KVCacheManager, every: int | None = None, policy: Policy | None = None) -> None:
        if manager.checkpoints is None:
            raise ValueError("the manager was made without rows for checkpoints")
        schema = manager.schema
        check_column(schema)
        self.manager, self.every, self.q = manager, every, column_tokens(schema)
        self.has_state = any(not s.lent for s in schema.states)
        self.column_pages = ColumnPages(manager.tables, self.q)
        self.parts = self.column_pages.parts
        self.columns = Columns(self.q, self.column_pages.width)
        rows, each = manager.checkpoints, schema.checkpoint_bytes
        self.checkpoints = Checkpoints(self.columns, rows, each, manager.slots, policy)
        self.readings: dict[Hashable, Reading] = {}
        self.publishing = Publishing(self, self.column_pages)
        self.pins: list[Pin] = []  # columns that are not given up
        self.tails = True  # whether the ends of turns are kept
        self.host = HostColumns(self)
        tokens = f"lookup_tokens device_hit_tokens host_hit_tokens shared_tokens {WARM}"
        self.counts: dict[str, int] = dict.fromkeys(f"lookups {tokens} checkpoint_hits cuts columns_dropped".split(), 0)
        self.read_again: dict[str, int] = {}  # tokens of prompts that were computed, by reason
        manager.reuse = self
        for name, table in manager.tables.items():
            table.allocator.reclaim = partial(self.reclaim, name)
            table.other_owners.append(partial(pinned_pages, self, name))

    @property
    def column_bytes(self) -> int:
        """Bytes of the pages that one column names."""
        return self.manager.schema.kv_bytes(self.q)

    # ---- a request begins

    def lookup(self, asked: Asked) -> Hit:
        """What of a prompt is there. Nothing changes."""
        return look_up(self, asked)

    def load(self, asked: Asked) -> Hit:
        """What there is of a prompt once what lies on the host has been copied, or failed to be. The copies come before
        all that is launched from here on.
        """
        return load(self, asked)

    def attach(self, request: Hashable, hit: Hit, asked: Asked, counted: bool = True) -> int:
        """A slot that begins with a hit, before anything is dropped for it. Returns the slot. What nobody has asked for
        is not `counted`, nor is what it begins with used by it.
        """
        whole = {name: self.column_pages.rows_of(hit.path, name) for name in self.parts}
        shared = {name: np.concatenate((ids, tail_rows(self, hit.tail, name)), 1) for name, ids in whole.items()}
        row = hit.checkpoint.row if hit.checkpoint is not None else -1
        if hit.matched:
            slot = self.manager.attach_request(request, shared, hit.matched, hit.cached, row)
            self.columns.touch(hit.path if hit.tail is None else [*hit.path, hit.tail])
        else:
            slot = self.manager.admit_request(request)
        if hit.checkpoint is not None and counted:
            self.checkpoints.use(hit.checkpoint)
            self.host.use(hit.checkpoint.column)
            self.counts["checkpoint_hits"] += 1
        self._begin(request, asked, hit.keys, hit.path, hit.cached)
        self.readings[request].tail = hit.tail
        if not counted:
            return slot
        count_hit(self, hit)
        self.counts["lookups"] += 1
        self.counts["lookup_tokens"] += len(asked.tokens) if asked.reads else 0
        self.counts["device_hit_tokens"] += hit.cached - hit.loaded
        self.counts["host_hit_tokens"] += hit.loaded
        self.host.look_at_costs(self.counts["lookups"])
        self.counts["shared_tokens"] += hit.matched
        self.read_again[hit.reason] = self.read_again.get(hit.reason, 0) + len(asked.tokens) - hit.cached
        return slot

    def adopt(self, request: Hashable, asked: Asked) -> None:
        """A resident request goes on with a prompt of which it has computed a part: it adds to what is kept."""
        self.leave(request)
        slot = self.manager.slot_of[request]
        position = int(self.manager.positions[slot])
        keys = Columns.keys(asked.tokens)
        path = on_device(self.columns.match(asked.salt, keys, min(position, asked.reach)))
        self._begin(request, asked, keys, path, position)

    def _begin(self, request: Hashable, asked: Asked, keys: bytes, path: list[Column], position: int) -> None:
        column = path[-1] if path else self._nowhere(asked.salt)
        reading = Reading(asked.salt, keys, asked.writes, asked.reach, column)
        self.readings[request] = reading
        self.columns.occupy(column)
        if self.has_state and asked.writes and self.checkpoints.rows:
            reading.stops = self._stops(asked, path, position)

    def _stops(self, asked: Asked, path: list[Column], position: int) -> list[Mark]:
        """Where checkpoints of a prompt are taken that stands at `position`."""
        length, schema = len(asked.tokens), self.manager.schema
        marks = [Mark(at, kind) for at, kind in asked.marks if kind != "begin"]
        if self.every != 0:
            token_bytes = schema.kv_bytes(self.q) / self.q
            parts = sorted(at for at, _ in asked.marks)
            marks += grid_marks(length, parts, schema.checkpoint_bytes, token_bytes, self.q, self.every)
        if path and path[-1].end > position:
            marks.append(Mark(path[-1].end, "branch"))
        taken = [column.end for column in path if column.checkpoint is not None]
        return spaced(marks, taken, self.q, position, min(length, asked.reach))

    def promised(self, request: Hashable, keys: bytes, most: int) -> int:
        """How many tokens of a prompt, whole columns and `most` at the most, a resident request reads or has read."""
        reading = self.readings.get(request)
        if reading is None or not reading.writes:
            return 0
        n = min(len(keys), len(reading.keys), KEY_DTYPE.itemsize * min(most, reading.reach)) // KEY_DTYPE.itemsize
        one, other = (np.frombuffer(each, KEY_DTYPE, n) for each in (keys, reading.keys))
        differs = np.flatnonzero(one != other)
        return (int(differs[0]) if len(differs) else n) // self.q * self.q

    def ask(self, request: Hashable, position: int, kind: str) -> bool:
        """Whether a checkpoint will be taken where another prompt parts from one that is being read."""
        reading = self.readings.get(request)
        if reading is None or not reading.writes or not self.has_state or not self.checkpoints.rows:
            return False
        here, at = int(self.manager.positions[self.manager.slot_of[request]]), position // self.q * self.q
        if at <= here:
            return False
        taken = [column.end for column in reading.column.path() if column.checkpoint is not None]
        marks = [*reading.stops, Mark(at, kind)]
        reading.stops = spaced(marks, taken, self.q, here, max(mark.position for mark in marks))
        return any(mark.position == at for mark in reading.stops)

    def until_stop(self, request: Hashable, position: int, tokens: int) -> int:
        """How many of the next tokens are read before the next checkpoint is taken."""
        reading = self.readings.get(request)
        if reading is None or not reading.stops:
            return tokens
        return min([tokens, *(mark.position - position for mark in reading.stops if mark.position > position)])

    # ---- around a step

    def stage(self, request: Hashable, tokens: Sequence[int]) -> None:
        """The request's step is committed, and what comes next is not launched: its new columns and a copy of its state
        wait to be published. `tokens`: all that are known of it.
        """
        self.publishing.stage(request, tokens)

    def publish(self, failed: Iterable[Hashable] = ()) -> None:
        """The step has ended well, but for requests that have failed: from here on its columns are for all to see."""
        self.publishing.publish(failed)

    def settle_late(self) -> None:
        """Wait for steps that were launched, if there are any, and publish what they wrote where they ended well."""
        self.publishing.settle_late()

    # ---- a request ends

    def written(self, request: Hashable) -> int:
        """Up to which position others can take up what the request has read; 0: it has added nothing."""
        reading = self.readings.get(request)
        if reading is None or reading.own is None:
            return 0 if reading is None else reading.written
        return reading.written if self.has_state else reading.column.end

    def leave(self, request: Hashable) -> None:
        """The request is gone, or goes on as another one; what it has published stays."""
        self.publishing.drop(request)
        reading = self.readings.pop(request, None)
        if reading is not None and not reading.column.gone:
            self.columns.leave(reading.column)

    def fork(self, source: Hashable, request: Hashable) -> None:
        """A second request goes on from where the first is."""
        reading = self.readings.get(source)
        if reading is not None:
            column, position = reading.column, int(self.manager.positions[self.manager.slot_of[source]])
            while column.parent is not None and (column.gone or column.end > position):
                column = column.parent  # pages of tokens that were not read are not shared
            self.columns.occupy(column)
            self.readings[request] = Reading(reading.salt, reading.keys, reading.writes, reading.reach, column)

    def part(self, request: Hashable) -> None:
        """The request has dropped entries, or pages that it shared: it does not need its columns, and adds none."""
        reading = self.readings.get(request)
        if reading is not None:
            reading.writes = False
            if not reading.column.gone:
                self.columns.leave(reading.column)
            reading.column = self._nowhere(reading.salt)

    def _nowhere(self, salt: bytes) -> Column:
        """Where requests live that have no column: above all others, or beside the trie as long as there are none."""
        return self.columns.roots.get(salt) or Column(None, salt, None, 0, 0)

    def let_go(self, request: Hashable) -> None:
        """Columns on whose pages only this request lives are taken out, and those that wait to be published: the
        pages are its own then.
        """
        self.publishing.drop(request)
        reading = self.readings.get(request)
        if reading is None or reading.column.gone:
            return
        top, column = None, reading.column
        while column.parent is not None and column.live == 1:
            top, column = column, column.parent
        reading.writes = False
        if top is not None:
            self.cut(top)

    def discard(self, request: Hashable) -> None:
        """The request gave numbers that are none: whatever it has read or written may be broken, and goes. What is
        pinned stays: it gave numbers when it was read.
        """
        reading = self.readings.get(request)
        if reading is None:
            return
        reading.writes = False
        path = [] if reading.column.gone else reading.column.path()
        first = first_unpinned(self, path)
        if first is not None:
            self.cut(first)
        if reading.tail is not None and not reading.tail.gone:
            self.cut(reading.tail)

    def forget(self, salt: bytes | None = None) -> None:
        """Drop all that was kept under a salt, or all there is, pinned or not. Requests that run go on."""
        self.settle_late()
        for each in [salt] if salt is not None else list(self.columns.roots):
            root = self.columns.roots.get(each)
            for column in list(root.children.values()) if root is not None else []:
                drop_pins(self, column)
                self.cut(column)

    def stop(self) -> None:
        """Forget all of it, and keep nothing of the requests that run."""
        self.forget()
        for reading in self.readings.values():
            reading.writes = False

    def forget_text(self, salt: bytes, tokens: np.ndarray) -> None:
        """Drop the tails of a text, what was read ahead of its next turn, and its columns from the last one up to where
        another text, a request or a pin needs them.
        """
        self.settle_late()
        keys, root = Columns.keys(tokens), self.columns.roots.get(salt)
        path = self.columns.match(salt, keys, len(tokens))
        for column in [root, *path] if root is not None else []:
            for tail in list(tails_below(self.columns, column, keys, len(tokens))):
                self.cut(tail)
        drop_unused(self, [root, *path] if root is not None else [])
        free = first_unpinned(self, path)
        for column in reversed(path[path.index(free) :] if free is not None else []):
            if column.children or column.live:
                return
            self.cut(column)

    def cut(self, column: Column) -> None:
        """Take out a column with all below it. Their pages go back, but for those that requests share."""
        below = [column]
        for each in below:
            below += each.children.values()
            if isinstance(each.checkpoint, Checkpoint):
                self.checkpoints.drop(each.checkpoint)
        for each in self.columns.cut(column):
            self.host.forget(each)
            if each.pages is not None:
                self.column_pages.disown(each.pages)

    def drop(self, column: Column) -> None:
        """Take out a column that nobody would miss, with what is below it on the host."""
        assert not (column.covers or column.live or column.resident), "a column is dropped that somebody needs"
        before = self.columns.count
        self.cut(column)
        self.counts["columns_dropped"] += before - self.columns.count

    # ---- pages

    def reclaim(self, name: str, pages: int) -> None:
        """Drop columns until so many pages of a pool are free, or none is left that nobody needs."""
        allocator = self.manager.tables[name].allocator
        with self.host.one_need():
            while allocator.free < pages:
                column = self.columns.oldest()
                if column is not None and self.host.takes(column):
                    self.host.lower(column, name, pages)
                elif column is not None:
                    self.drop(column)
                elif self.publishing.late:  # last, since the host waits for a step in flight
                    self.settle_late()
                elif not self.checkpoints.give_way():
                    return

    def pages(self, name: str) -> np.ndarray:
        """Page ids of a pool that columns, and what is staged, name, as often as they do."""
        kept = [column.pages for column in self.columns if column.pages is not None]
        return self.column_pages.of(name, kept + self.publishing.waiting())

    # ---- the way back, and checks

    def rebuild(self) -> None:
        """Count everything anew from columns and resident requests, after an interrupt. May be repeated."""
        self.publishing.clear()
        self.columns.prune(self.has_state)
        resident = self.manager.slot_of
        self.readings = {key: reading for key, reading in self.readings.items() if key in resident}
        places = [reading.column for reading in self.readings.values()]
        places += [away.column for away in self.manager.away.values() if away.column is not None]
        for column in places:
            column.gone = not self.columns.holds(column)
        lives = [column for column in places if not column.gone]
        self.columns.rebuild([*lives, *(pin.column for pin in self.pins)])
        self.checkpoints.rebuild()
        self.host.rebuild()
        for checkpoint in self.checkpoints.all.values():
            checkpoint.pins = sum(pin.column is checkpoint.column for pin in self.pins)

    def check(self) -> None:
        """All counts are what columns, rows and requests say, or AssertionError."""
        self.columns.check()
        self.checkpoints.check()
        self.host.check()
        lives = [r.column for r in self.readings.values() if not r.column.gone and r.column.parent is not None]
        lives += [
            away.column for away in self.manager.away.values() if away.column is not None and not away.column.gone
        ]
        lives += [pin.column for pin in self.pins]
        assert sum(c.live for root in self.columns.roots.values() for c in root.children.values()) == len(lives)
        assert self.readings.keys() <= self.manager.slot_of.keys(), "a request is gone and still reads"
        for pin in self.pins:
            assert self.columns.holds(pin.column), "what is pinned was dropped"
            assert not self.has_state or pin.column.checkpoint is not None, "the state of what is pinned was dropped"
