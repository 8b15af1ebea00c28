"""Columns and states on the host: what prompts begin with and the device has no room for is kept there.

    down   the row of a checkpoint is needed: its state is copied to the host, and its columns stay for its sake
           the pages of such columns are needed: many columns at a time are gathered and copied to the host
    up     a prompt goes on there: fresh pages and a row are taken, filled from the host, and become columns again

What goes down is only what a checkpoint needs that is a mark or was used, never the end of a turn on trial, nor any
tail; without recurrent state all columns but tails go. A column keeps its place in the trie, without pages, and all
below it have gone down before. Nothing is written on a page or row that was given away: it is read on the compute
stream before whatever comes next there (tiers.py).

What has come up keeps its copy on the host as long as there is room: pages and states of columns never change, so that
it can leave the device again at no cost. A column that was read again, and not loaded, loses its old copy.

Room on the host is given up in this order: copies of what is on the device, too; then the state used longest ago, with
the columns that only it needs (without state: the last columns of what was used longest ago). Frozen caches take
this room before one of them is given up, and never give way to columns.

All of a load, or nothing: where a copy fails, pages and row go back, and what could not be copied is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.checkpoints import Checkpoint
from hybridkv.cache.columns import Column
from hybridkv.cache.schema import ceil_div
from hybridkv.cache.step import upload
from hybridkv.cache.tier_sizes import BLOCK, IN_FLIGHT, STAGING
from hybridkv.cache.tiers import ALIGN, HostBlocks, Timer, chunks_of
from hybridkv.errors import HybridKVError, OutOfPages

if TYPE_CHECKING:
    from hybridkv.cache.reuse import Reuse

LOOKUPS = 1000  # after so many what copies took is compared with what they saved
GROUP = STAGING // 2  # bytes of columns that are copied together


@dataclass(eq=False, slots=True)
class Stored:
    """A state on the host, of the checkpoint that it was or is a copy of."""

    blocks: HostBlocks
    kind: str
    uses: int
    value: float


@dataclass(frozen=True)
class Load:
    """What a prompt could begin with if it were copied to the device."""

    end: Column  # the last column of it
    columns: list[Column]  # whose pages are on the host alone, from the first on
    stored: Stored | None  # a state at its end; None: there is one on the device, or none is needed
    cached: int  # tokens that need not be computed then


class HostColumns:
    """What `reuse` keeps on the host of its manager."""

    def __init__(self, reuse: Reuse) -> None:
        self.reuse, self.manager, self.tier = reuse, reuse.manager, reuse.manager.host
        self.on = True  # whether anything goes there
        self.alone: dict[Column, None] = {}  # columns whose pages are nowhere else, used longest ago first
        self.doubles: dict[Column, None] = {}  # columns with a copy there, likewise
        self.states: dict[Column, Stored] = {}  # likewise
        self.loading: Column | None = None  # the end of what is being loaded: it does not make room
        self._decided: bool | None = None  # whether what is needed now goes down; None: it is found out
        self.resting = False  # copies took longer than what they saved: nothing is stored until this is looked at again
        self.counts: Counter[str] = Counter()
        self.copied = 0  # bytes, both ways; those of conversations are not counted here
        self._looked = (0, 0, 0)  # lookups, bytes copied, tokens saved when costs were looked at last
        self.layout: list[tuple[str, Tensor, int, int]] = []  # pool's name, its tensor, where a column's begins, bytes
        at = 0
        for name, (_, streams, per) in reuse.parts.items():
            for pool in self.manager.tables[name].pool.tensors.values():
                nbytes = pool[:, :1].nbytes * streams * per
                self.layout.append((name, pool, at, nbytes))
                at = ceil_div(at + nbytes, ALIGN) * ALIGN
        self.each = ceil_div(at, BLOCK)  # blocks of a column
        self.tier.blocks.reclaim = self.make_room
        reuse.checkpoints.leaving = self.keep_state

    @property
    def is_on(self) -> bool:
        """Whether there is room for anything."""
        return self.on and self.tier.pages and self.tier.blocks.total > 0 and self.each > 0

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of what is kept, by what it is."""
        states = sum(stored.blocks.nbytes for stored in list(self.states.values()))
        return {"pages": (len(self.alone) + len(self.doubles)) * self.reuse.column_bytes, "states": states}

    def blocks(self) -> list[HostBlocks]:
        """All that it owns."""
        found = [stored.blocks for stored in self.states.values()]
        return found + [_copy_of(column) for column in (*self.alone, *self.doubles)]

    # ---- down

    def keep_state(self, checkpoint: Checkpoint) -> None:
        """The row of a checkpoint is needed: its state goes to the host, if it is worth that and there is room."""
        column = checkpoint.column
        if not self.is_on or checkpoint.on_trial or self.reuse.columns.is_tail(column):
            return
        stored = self.states.pop(column, None)
        if stored is None:
            if not self._stores():
                self.counts["states dropped"] += 1
                return
            rows = self.manager.state.rows(checkpoint.row).values()
            blocks = self.tier.put(chunk for row in rows for chunk in chunks_of(row))
            if blocks is None:
                self.counts["states dropped"] += 1
                return
            self.tier.lend(blocks)
            self.copied += blocks.nbytes
            stored = Stored(blocks, checkpoint.kind, 0, 0.0)
            self.counts["states stored"] += 1
        stored.kind, stored.uses, stored.value = checkpoint.kind, checkpoint.uses, checkpoint.value
        self.states[column] = stored
        self.reuse.columns.keep(column, stored)

    @contextmanager
    def one_need(self) -> Iterator[None]:
        """Inside, whether anything goes down is decided once, for all that one step needs: columns go deepest first,
        and if one of them were dropped half way, those below it would be lost with it.
        """
        self._decided = self._stores()
        try:
            yield
        finally:
            self._decided = None

    def _stores(self) -> bool:
        if self._decided is not None:
            return self._decided
        return not self.resting and self.tier.in_flight <= IN_FLIGHT

    def takes(self, column: Column) -> bool:
        """Whether a column goes to the host when its pages are needed."""
        if not self.is_on or self.reuse.columns.is_tail(column):
            return False
        return column.kept > 0 or not self.reuse.has_state

    def lower(self, column: Column | None, name: str, pages: int) -> None:
        """Columns leave the device, this one first, until `pages` pages of a pool are free or a group is full. Those
        that find no place on the host are dropped.
        """
        columns, allocator = self.reuse.columns, self.manager.tables[name].allocator
        begin, streams, per = self.reuse.parts[name]
        group: list[Column] = []
        ids: list[np.ndarray] = []
        freed, most = 0, max(1, GROUP // (self.each * BLOCK))
        while column is not None:
            if not self.takes(column):
                self.reuse.drop(column)
            elif column.host is not None:
                self.alone[column] = self.doubles.pop(column)
                self.reuse.column_pages.disown(columns.leave_device(column))
            else:
                group.append(column)
                ids.append(columns.leave_device(column))
                freed += int((allocator.refs[ids[-1][begin : begin + streams * per]] == 1).sum())
            if allocator.free + freed >= pages or len(group) == most:
                break
            column = columns.oldest()
        if group:
            self._put(group, np.stack(ids))

    def _put(self, group: list[Column], ids: np.ndarray) -> None:
        """Copy the pages of columns, ids [columns, width], to the host, and give them back."""
        blocks = self.tier.put(self._gathered(ids)) if self._stores() else None
        if blocks is None:
            self.counts["columns dropped"] += len(group)
            for column, pages in zip(group, ids, strict=True):
                if not column.gone:  # else it stood below one of these
                    self._tell(_branch(column))
                    self.reuse.drop(column)
                self.reuse.column_pages.disown(pages)
            return
        self.tier.lend(blocks)
        self.copied += blocks.nbytes
        self.counts["columns stored"] += len(group)
        for i, (column, pages) in enumerate(zip(group, ids, strict=True)):
            mine = blocks.ids[i * self.each : (i + 1) * self.each]
            if column.gone:  # room was made at its cost
                self.tier.take_back(HostBlocks(mine, (), 0))
            else:
                column.host = HostBlocks(mine, (), self.reuse.column_bytes)
                self.alone[column] = None
            self.reuse.column_pages.disown(pages)

    def _views(self, chunk: Tensor, ids: np.ndarray) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(a pool, page ids, where these pages are in chunk [columns, bytes]: [lanes, pages, ...]) for each tensor."""
        device = self.manager.device
        places = {}
        for name, (begin, streams, per) in self.reuse.parts.items():
            places[name] = upload([ids[:, begin : begin + streams * per].astype(np.int64).ravel()], device)
        for name, pool, at, nbytes in self.layout:
            if nbytes:
                part = chunk[:, at : at + nbytes].view(pool.dtype)
                part = part.view(len(ids), pool.shape[0], -1, *pool.shape[2:])  # [columns, lanes, pages of one, ...]
                yield pool, places[name], part.transpose(0, 1)

    def _gathered(self, ids: np.ndarray) -> Iterator[Tensor]:
        chunk = torch.empty(len(ids), self.each * BLOCK, dtype=torch.uint8, device=self.manager.device)
        for pool, places, part in self._views(chunk, ids):
            part.copy_(pool[:, places].view(part.shape))
        yield chunk

    # ---- up

    def offer(self, path: Sequence[Column], most: int, cached: int) -> Load | None:
        """What of a prompt's columns, `path`, could be brought to the device so that more than `cached` of its tokens
        need not be computed, `most` at the most; None: nothing.
        """
        if not self.is_on or not (self.alone or self.states):
            return None
        q, end = self.reuse.q, None
        if self.reuse.has_state:
            if self.reuse.checkpoints.rows:
                reach = (c for c in reversed(path) if c.end <= most)
                end = next((c for c in reach if c.checkpoint is not None or c.stored is not None), None)
            then = end.end if end is not None else 0
        else:
            then = min(path[-1].end, most) if path else 0
            end = path[ceil_div(then, q) - 1] if then else None
        if end is None or then <= cached:
            return None
        columns = [column for column in path[: end.end // q] if column.pages is None]
        stored = self.states.get(end) if end.checkpoint is None else None
        return Load(end, columns, stored, then) if columns or stored is not None else None

    def pays(self, load: Load, cached: int) -> bool:
        """Whether a load is quicker than reading the tokens that it saves."""
        nbytes = len(load.columns) * self.each * BLOCK
        nbytes += load.stored.blocks.nbytes if load.stored is not None else 0
        return self.tier.pays(nbytes, load.cached - cached)

    def load(self, load: Load) -> Timer | None:
        """Bring it to the device; what that took. None: pages, or a row, are not to be had, or a copy failed: nothing
        was taken then.
        """
        columns, timer = self.reuse.columns, Timer(self.manager.device)
        columns.occupy(load.end)  # so that nothing of it makes room for the rest
        self.loading = load.end
        done = failed = False
        try:
            done = self._load(load)
        except OutOfPages:
            pass
        except (HybridKVError, RuntimeError, MemoryError):  # of torch, too: no memory to copy with
            failed = True
        finally:
            self.loading = None
            columns.leave(load.end)
        if failed:
            self.counts["loads failed"] += 1
            self._lose(load)
        if not done:
            return None
        self.counts["loads"] += 1
        return timer.stop()

    def _load(self, load: Load) -> bool:
        reuse, tables, count = self.reuse, self.manager.tables, len(load.columns)
        widths = {name: streams * per for name, (_, streams, per) in reuse.parts.items()}
        row, pages = -1, {}
        try:
            if load.stored is not None:
                found = reuse.checkpoints.reserve()
                if found is None:
                    return False
                row = found
            for name, width in widths.items():
                tables[name].allocator.require(count * width)
            for name, width in widths.items():
                pages[name] = tables[name].allocator.acquire(count * width)
            ids = np.concatenate([pages[name].reshape(count, width) for name, width in widths.items()], 1)
            self._copy(load, ids, row)
        except BaseException:
            for name, taken in pages.items():
                tables[name].allocator.release(taken)
            if row >= 0:
                reuse.checkpoints.give_back(row)
            raise
        for name, taken in pages.items():  # from here on their owner is one that gives them up
            tables[name].allocator.share_distinct(taken, spare=True)
            tables[name].allocator.release_distinct(taken)
        for column, own in zip(load.columns, ids, strict=True):
            reuse.columns.come_back(column, own)
            self.alone.pop(column)
        for column in reversed(load.columns):  # the last ones go first
            self.doubles[column] = None
        if load.stored is not None:
            made = reuse.checkpoints.add(load.end, row, load.stored.kind)
            made.uses, made.value = load.stored.uses, max(made.value, load.stored.value)
        self.counts["columns loaded"] += len(load.columns)
        self.counts["states loaded"] += load.stored is not None
        return True

    def _copy(self, load: Load, ids: np.ndarray, row: int) -> None:
        each, most = self.each * BLOCK, max(1, GROUP // (self.each * BLOCK))
        groups = [load.columns[i : i + most] for i in range(0, len(load.columns), most)]
        layout = tuple(((len(group), each), torch.uint8) for group in groups)
        where = np.concatenate([np.zeros(0, np.int32), *(_copy_of(column).ids for column in load.columns)])
        at = 0
        for chunk in self.tier.get(HostBlocks(where, layout, sum(prod(shape) for shape, _ in layout))):
            for pool, places, part in self._views(chunk, ids[at : at + len(chunk)]):
                pool[:, places] = part.flatten(1, 2)
            at += len(chunk)
            self.copied += chunk.nbytes
        if load.stored is not None:
            rows = self.manager.state.rows(row).values()
            places = (chunk for each in rows for chunk in chunks_of(each))
            for place, chunk in zip(places, self.tier.get(load.stored.blocks), strict=True):
                place.copy_(chunk)
                self.copied += chunk.nbytes

    def _lose(self, load: Load) -> None:
        """What could not be copied is given up: it would fail the next time, too."""
        if load.columns:
            self.reuse.drop(load.columns[0])  # all below it is on the host alone
        else:
            self.forget_state(load.end)

    # ---- what is no longer true, or needed

    def renew(self, column: Column) -> None:
        """Its pages were read again: what is on the host may be other bytes."""
        self._drop_copy(column)

    def forget_state(self, column: Column) -> None:
        """The state at its end is no longer on the host; columns there that nobody else needs go with it."""
        stored = self.states.pop(column, None)
        if stored is None:
            return
        self.tier.take_back(stored.blocks)
        self.reuse.columns.keep(column, None)
        at: Column | None = column
        while at is not None and at.pages is None and at.parent is not None and not (at.children or at.kept or at.live):
            above = at.parent
            self.reuse.drop(at)
            at = above

    def forget(self, column: Column) -> None:
        """It is no longer part of the trie."""
        self._drop_copy(column)
        stored = self.states.pop(column, None)
        if stored is not None:
            self.tier.take_back(stored.blocks)

    def _drop_copy(self, column: Column) -> None:
        if column.host is not None:
            blocks = _copy_of(column)
            self.alone.pop(column, None)
            self.doubles.pop(column, None)
            column.host = None
            self.tier.take_back(blocks)

    def use(self, column: Column) -> None:
        """A prompt was taken up at the state at its end."""
        if column in self.states:
            self.states[column] = self.states.pop(column)

    def make_room(self, blocks: int) -> None:
        """Give up what is needed least until so many blocks are free, or nothing is left that can go."""
        free = self.tier.blocks
        while free.free < blocks and self._give_up():
            self.counts["given up"] += 1

    def _give_up(self) -> bool:
        double = next(iter(self.doubles), None)
        if double is not None:
            self._drop_copy(double)
            return True
        state = next((c for c in self.states if c.checkpoint is not None), None)
        if state is None:
            state = next((c for c in self.states if c is not self.loading), None)
        if state is not None:
            self._tell([state])
            self.forget_state(state)
            return True
        last = next((c for c in self.alone if not c.children and not c.live), None)
        if last is not None:
            self.reuse.drop(last)
        return last is not None

    def _tell(self, columns: Sequence[Column]) -> None:
        """States at their ends make room for others: of those that lie nowhere else the policy learns."""
        for column in columns:
            stored = self.states.get(column)
            if stored is not None and column.checkpoint is None:
                self.reuse.checkpoints.policy.dropped(stored.kind, stored.uses)

    # ---- what it is worth

    def look_at_costs(self, lookups: int) -> None:
        """Whether copies have saved more time than they took, since this was looked at last; if not, nothing is stored
        until it is looked at again.
        """
        before, copied, saved = self._looked
        if lookups - before < LOOKUPS:
            return
        now = lookups, self.copied, self.counts["tokens loaded"]
        took = (now[1] - copied) / self.tier.rate if self.tier.speed and now[1] > copied else 0.0
        self.resting = took > 0 and took > (now[2] - saved) / self.tier.speed
        self.counts["rests"] += self.resting
        self._looked = now

    # ---- the way back, and checks

    def rebuild(self) -> None:
        """Sort what there is anew, after an interrupt. The trie has been counted."""
        there, self.loading, self._decided = list(self.reuse.columns), None, None
        known = [*self.alone, *self.doubles]
        copies = dict.fromkeys([c for c in known if c.host is not None and self.reuse.columns.holds(c)])
        copies |= dict.fromkeys(c for c in reversed(there) if c.host is not None)
        self.alone = {c: None for c in copies if c.pages is None}
        self.doubles = {c: None for c in copies if c.pages is not None}
        states = {c: c.stored for c in [*self.states, *there] if self.reuse.columns.holds(c)}
        self.states = {c: stored for c, stored in states.items() if isinstance(stored, Stored)}

    def check(self) -> None:
        """Everything is where the trie says, or AssertionError."""
        there = list(self.reuse.columns)
        assert {c for c in there if c.pages is None} == self.alone.keys(), "columns on the host are lost"
        assert {c for c in there if c.host is not None} == self.alone.keys() | self.doubles.keys()
        assert not self.alone.keys() & self.doubles.keys()
        assert {c for c in there if c.stored is not None} == self.states.keys(), "states on the host are lost"
        for column, stored in self.states.items():
            assert column.stored is stored and not column.gone
        for column in self.alone:
            assert column.host is not None and not column.live and column.checkpoint is None
            assert column.kept or not self.reuse.has_state, "columns are on the host that nobody can use"


def _branch(column: Column) -> list[Column]:
    """It and all below it."""
    found = [column]
    for each in found:
        found += each.children.values()
    return found


def _copy_of(column: Column) -> HostBlocks:
    assert isinstance(column.host, HostBlocks)
    return column.host
