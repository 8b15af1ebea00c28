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
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from hybridkv.cache.checkpoints import Checkpoint, Checkpoints, Mark, Policy, grid_marks, spaced
from hybridkv.cache.columns import KEY_DTYPE, Column, Columns, on_device
from hybridkv.cache.host_columns import HostColumns, Load
from hybridkv.cache.manager import KVCacheManager
from hybridkv.cache.pins import Pin, drop_pins, first_unpinned, pinned_pages
from hybridkv.cache.schema import check_column, column_tokens
from hybridkv.cache.tails import Ended, find_tail, full_pages, tail_rows, tails_below
from hybridkv.cache.tiers import Timer
from hybridkv.cache.warm import COUNTS as WARM
from hybridkv.cache.warm import count_hit, drop_unused

# why not more of a prompt was reused
Reason = Literal[
    "cold", "diverged", "no_checkpoint", "dropped", "window", "bounded", "loading_slower", "too_short", "off", "full"
]


@dataclass(frozen=True)
class Asked:
    """What a prompt may take up."""

    salt: bytes  # prompts of other salts are never seen
    tokens: np.ndarray  # [T] int32
    most: int  # tokens that need not be computed at the most
    reach: int  # tokens whose pages may be shared at the most: its first eviction
    limit: Reason = "full"  # what sets `most`
    marks: Sequence[tuple[int, str]] = ()  # positions at which a checkpoint is wished, with a Kind
    reads: bool = True
    writes: bool = True


@dataclass(frozen=True)
class Hit:
    """What a prompt takes up."""

    path: list[Column]  # whose pages are shared
    checkpoint: Checkpoint | None
    cached: int  # tokens that are not computed
    matched: int  # tokens whose pages are shared: those behind `cached` are read for the state alone
    reason: Reason  # why not more
    diverged_at: int | None = None  # the first token that is in no column
    keys: bytes = b""
    tail: Column | None = None  # whose pages are shared, too, behind those of the path
    load: Load | None = None  # what more there is on the host, if copying it is quicker than reading
    loaded: int = 0  # of the cached tokens those that came from the host just now
    timer: Timer | None = None  # how long that took

    @property
    def reaches(self) -> int:
        """Tokens that need not be computed, those included that are still on the host."""
        return self.cached if self.load is None else self.load.cached


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
        self.parts: dict[str, tuple[int, int, int]] = {}  # of each pool: where its ids begin, streams, pages of each
        width = 0
        for s in schema.streams:
            per = self.q // (s.entries_per_page * s.tokens_per_entry)
            self.parts[s.name] = width, s.streams, per
            width += s.streams * per
        self.columns = Columns(self.q, width)
        self.checkpoints = Checkpoints(self.columns, manager.checkpoints, schema.slot_bytes, manager.slots, policy)
        self.readings: dict[Hashable, Reading] = {}
        self.staged: list[Staged] = []
        self.pins: list[Pin] = []  # columns that are not given up
        self.tails = True  # whether the ends of turns are kept
        self.late: list[tuple[Staged, Ended]] = []  # what a step wrote that was launched and not waited for
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
        length, q = len(asked.tokens), self.q
        keys = Columns.keys(asked.tokens)
        if not asked.reads:
            return Hit([], None, 0, 0, "off", keys=keys)
        whole = self.columns.match(asked.salt, keys, min(length, asked.reach))
        path = on_device(whole)
        matched = path[-1].end if path else 0
        checkpoint = Checkpoints.deepest(path, asked.most) if self.has_state else None
        if self.has_state:
            cached = checkpoint.position if checkpoint is not None else 0
        else:
            cached = min(matched, asked.most)
        tail = find_tail(self, asked.salt, path, keys, min(asked.most, asked.reach), cached)
        if tail is not None:
            cached = tail.end
            checkpoint = tail.checkpoint if isinstance(tail.checkpoint, Checkpoint) else None
            tail = tail if tail.end > matched else None  # else the columns behind it have its tokens
        usable, limit = min(matched, asked.most // q * q), asked.most // q * q
        root = self.columns.roots.get(asked.salt)
        at = None
        if root is not None and len(whole) < length // q:
            at = len(whole) * q + self.columns.agrees(whole[-1] if whole else root, keys)
        load = self.host.offer(whole, asked.most, cached) if whole else None
        reason: Reason
        if load is not None and not self.host.pays(load, cached):
            load, reason = None, "loading_slower"
        elif limit < q:
            if cached:  # of the end of a turn
                reason = "full" if cached >= asked.most else "diverged"
            else:
                reason = "too_short" if length - 1 < q else asked.limit
        elif not matched and not cached:
            reason = "cold"
        elif cached < usable:
            lost = any(column.lost for column in path if cached < column.end <= usable)
            reason = "dropped" if lost else "no_checkpoint"
        elif usable == limit:
            reason = asked.limit if matched > usable and limit < (length - 1) // q * q else "full"
        else:
            reason = "diverged"
        return Hit(path, checkpoint, cached, max(matched, cached), reason, at, keys, tail, load)

    def load(self, asked: Asked) -> Hit:
        """What there is of a prompt once what lies on the host has been copied, or failed to be. The copies come before
        all that is launched from here on.
        """
        self.settle_late()  # else it might bring the same columns while they are copied
        hit = self.lookup(asked)  # what was found may have made room for others since
        timer = self.host.load(hit.load) if hit.load is not None else None
        found = replace(self.lookup(asked), load=None)
        if timer is None:
            return found
        loaded = max(0, found.cached - hit.cached)
        self.host.counts["tokens loaded"] += loaded
        return replace(found, loaded=loaded, timer=timer)

    def pages_of(self, hit: Hit) -> dict[str, int]:
        """Pages of each pool that a hit saves its request."""
        whole = {name: len(hit.path) * streams * per for name, (_, streams, per) in self.parts.items()}
        return {name: pages + full_pages(self, hit.tail, name) for name, pages in whole.items()}

    def pages_to_load(self, hit: Hit) -> dict[str, int]:
        """Pages of each pool that what is copied from the host takes: they are the request's, too."""
        columns = 0 if hit.load is None else len(hit.load.columns)
        return {name: columns * streams * per for name, (_, streams, per) in self.parts.items()}

    def would_keep(self, hit: Hit) -> dict[str, int]:
        """Pages of each pool that count as to be had, and no longer do once the hit is attached."""
        found = {}
        for name in self.parts:
            ids, allocator = self._ids(hit.path, name).ravel(), self.manager.tables[name].allocator
            ids = np.concatenate((ids, tail_rows(self, hit.tail, name).ravel()))
            found[name] = int(np.count_nonzero(allocator.refs[ids] == allocator.spare[ids]))
        return found

    def attach(self, request: Hashable, hit: Hit, asked: Asked, counted: bool = True) -> int:
        """A slot that begins with a hit, before anything is dropped for it. Returns the slot. What nobody has asked for
        is not `counted`, nor is what it begins with used by it.
        """
        whole = {name: self.rows_of(hit.path, name) for name in self.parts}
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
            marks += grid_marks(length, parts, schema.slot_bytes, token_bytes, self.q, self.every)
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
        reading = self.readings.get(request)
        if reading is None or not reading.writes:
            return
        manager, q = self.manager, self.q
        slot = manager.slot_of[request]
        position = int(manager.positions[slot])
        stop = reading.stops[0] if reading.stops else None
        if position // q * q <= reading.column.end and (stop is None or position < stop.position):
            return
        if slot in manager.compactions or slot in manager.compacting:
            reading.writes = False
            return
        column = self._where(reading)
        last = position // q
        first = column.end // q
        keys = [self._key(reading, tokens, j) for j in range(first, last)]
        while keys and (child := column.children.get(keys[0])) is not None and child.pages is not None:
            # another request was quicker
            self.columns.occupy(child, column)
            column = reading.column = child
            keys.pop(0)
            first += 1
        pages = self._table_rows(slot, first, max(first, last))
        mark, row = None, -1
        while reading.stops and reading.stops[0].position <= position:
            mark = reading.stops.pop(0)
        if mark is not None and (mark.position < position or (not keys and self._at(column, position).checkpoint)):
            mark = None
        if mark is not None:
            taken = self.checkpoints.reserve()
            row = -1 if taken is None else taken
        self._own(pages)
        self.staged.append(Staged(request, reading, column, keys, pages, mark if row >= 0 else None, row))
        if row >= 0:
            manager.state.copy(slot, row)
            self.counts["cuts"] += 1

    def hold_back(
        self, request: Hashable, reading: Reading, below: Column, keys: list[bytes], pages: np.ndarray,
        mark: Mark | None, row: int, ended: Ended | None,
    ) -> None:  # fmt: skip
        """What was written below a column waits until its step has `ended` well; None: it has."""
        self._own(pages)
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
        lives = reading.column is column and self.readings.get(staged.request) is reading
        if column.parent is None:
            column = self.columns.root(reading.salt)
        for i, key in enumerate(staged.keys):
            child, new = self.columns.insert(column, key, staged.pages[i])
            if child.pages is None:  # it was on the host alone, and was read again
                self.host.renew(child)
                self.columns.come_back(child, staged.pages[i])
                new = True
            if lives and not self.columns.is_tail(child):
                self.columns.occupy(child, column)
                reading.column = child
            column = child
            if not new:
                self._disown(staged.pages[i])
            elif reading.own is None and not self.columns.is_tail(child):
                reading.own = child
        if staged.mark is not None and (at := self._at(column, staged.mark.position)).end == staged.mark.position:
            made = self.checkpoints.add(at, staged.row, staged.mark.kind)
            reading.written = made.position
            if made.row == staged.row:
                self.host.forget_state(at)  # it may have other bits
        elif staged.row >= 0:
            self.checkpoints.give_back(staged.row)

    @staticmethod
    def _at(column: Column, position: int) -> Column:
        """The column on the path that ends at a position, or the last one where it ends before that."""
        while column.end > position and column.parent is not None:
            column = column.parent
        return column

    def _abandon(self, staged: Staged) -> None:
        for pages in staged.pages:
            self._disown(pages)
        if staged.row >= 0:
            self.checkpoints.give_back(staged.row)

    def _where(self, reading: Reading) -> Column:
        """The last of the request's columns; it begins anew where its branch was cut."""
        column = reading.column
        if column.gone or (column.parent is None and self.columns.roots.get(reading.salt) is not column):
            column = reading.column = self.columns.root(reading.salt)
        return column

    def _key(self, reading: Reading, tokens: Sequence[int], j: int) -> bytes:
        size = KEY_DTYPE.itemsize * self.q
        if (j + 1) * size <= len(reading.keys):
            return reading.keys[j * size : (j + 1) * size]
        return Columns.keys(np.array(tokens[j * self.q : (j + 1) * self.q]))

    # ---- a request ends

    def written(self, request: Hashable) -> int:
        """Up to which position others can take up what the request has read; 0: it has added nothing."""
        reading = self.readings.get(request)
        if reading is None or reading.own is None:
            return 0 if reading is None else reading.written
        return reading.written if self.has_state else reading.column.end

    def leave(self, request: Hashable) -> None:
        """The request is gone, or goes on as another one; what it has published stays."""
        for staged in [s for s in self.staged if s.request == request]:
            self.staged.remove(staged)
            self._abandon(staged)
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
        for staged in [each for each in self.staged if each.request == request]:
            self.staged.remove(staged)
            self._abandon(staged)
        reading = self.readings.get(request)
        if reading is None or reading.column.gone:
            return
        top, column = None, reading.column
        while column.parent is not None and column.live == 1:
            top, column = column, column.parent
        reading.writes = False
        if top is not None:
            self._cut(top)

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
            self._cut(first)
        if reading.tail is not None and not reading.tail.gone:
            self._cut(reading.tail)

    def forget(self, salt: bytes | None = None) -> None:
        """Drop all that was kept under a salt, or all there is, pinned or not. Requests that run go on."""
        self.settle_late()
        for each in [salt] if salt is not None else list(self.columns.roots):
            root = self.columns.roots.get(each)
            for column in list(root.children.values()) if root is not None else []:
                drop_pins(self, column)
                self._cut(column)

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
                self._cut(tail)
        drop_unused(self, [root, *path] if root is not None else [])
        free = first_unpinned(self, path)
        for column in reversed(path[path.index(free) :] if free is not None else []):
            if column.children or column.live:
                return
            self._cut(column)

    def _cut(self, column: Column) -> None:
        below = [column]
        for each in below:
            below += each.children.values()
            if isinstance(each.checkpoint, Checkpoint):
                self.checkpoints.drop(each.checkpoint)
        for each in self.columns.cut(column):
            self.host.forget(each)
            if each.pages is not None:
                self._disown(each.pages)

    def drop(self, column: Column) -> None:
        """Take out a column that nobody would miss, with what is below it on the host."""
        assert not (column.covers or column.live or column.resident), "a column is dropped that somebody needs"
        before = self.columns.count
        self._cut(column)
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
                elif self.late:  # last, since the host waits for a step in flight
                    self.settle_late()
                elif not self.checkpoints.give_way():
                    return

    def pages(self, name: str) -> np.ndarray:
        """Page ids of a pool that columns, and what is staged, name, as often as they do."""
        begin, streams, per = self.parts[name]
        waiting = [*self.staged, *(staged for staged, _ in self.late)]
        kept = [column.pages for column in self.columns if column.pages is not None]
        rows = kept + [row for staged in waiting for row in staged.pages]
        found = np.concatenate([r[begin : begin + streams * per] for r in rows] or [np.zeros(0, np.int32)])
        return found[found >= 0]

    def _own(self, pages: np.ndarray) -> None:
        for name, (begin, streams, per) in self.parts.items():
            ids = pages[..., begin : begin + streams * per].ravel()
            self.manager.tables[name].allocator.share_distinct(ids[ids >= 0], spare=True)

    def _disown(self, pages: np.ndarray) -> None:
        """[width] page ids that a column no longer names."""
        for name, (begin, streams, per) in self.parts.items():
            ids = pages[begin : begin + streams * per]
            self.manager.tables[name].allocator.release_distinct(ids[ids >= 0], spare=True)

    def _ids(self, path: list[Column], name: str) -> np.ndarray:
        begin, streams, per = self.parts[name]
        rows = [column.pages for column in path]
        joined = np.concatenate(rows).reshape(len(rows), -1) if rows else np.zeros((0, self.columns.width), np.int32)  # type: ignore[arg-type]
        return joined[:, begin : begin + streams * per]

    def rows_of(self, path: list[Column], name: str) -> np.ndarray:
        """[streams, pages] of a path, as page tables have them."""
        _, streams, per = self.parts[name]
        ids = self._ids(path, name).reshape(len(path), streams, per)
        return ids.transpose(1, 0, 2).reshape(streams, len(path) * per)

    def _table_rows(self, slot: int, first: int, last: int) -> np.ndarray:
        """[columns, width] page ids of a slot's columns first .. last - 1."""
        found = [np.zeros((last - first, 0), np.int32)]
        for name, (_, streams, per) in self.parts.items():
            ids = self.manager.tables[name].pages[slot, :, first * per : last * per]
            found.append(
                ids.reshape(streams, last - first, per).transpose(1, 0, 2).reshape(last - first, streams * per)
            )
        return np.concatenate(found, axis=1)

    # ---- the way back, and checks

    def rebuild(self) -> None:
        """Count everything anew from columns and resident requests, after an interrupt. May be repeated."""
        self.staged, self.late = [], []
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
