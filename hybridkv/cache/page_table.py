"""PageTable: pages and lengths of one StreamSchema's streams, for all slots. When they change, the manager decides.

Ownership of one stream's pages (64 entries a page, length 150):

    entries   0 .. 63   64 .. 127   128 .. 149 | 150 .. 191
    pages    [   7   ] [    3    ] [         12            ]
              full: may be shared after a fork   the open page: written next, so it is copied first if another
              and is never written again         request holds it too

`pages` is the truth: held pages, reference counts and free pages follow from it, and `rebuild` makes them anew. The
kernels read a copy on the device (`device_table`). `sent` is what that copy says; `changed` names the slots in which
`pages` and `sent` may differ, and a step sends the difference for its own slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from hybridkv.cache.allocator import PageAllocator
from hybridkv.cache.pools import PagedPool
from hybridkv.cache.schema import StreamSchema, ceil_div
from hybridkv.cache.step import StreamPlan, upload
from hybridkv.errors import HybridKVError
from hybridkv.kernels.step_index import HostIndex

UNKNOWN = -2  # what `sent` says where the device's copy is not known


class PageTable:
    """Pages and lengths of one StreamSchema's streams, for all slots."""

    def __init__(self, schema: StreamSchema, pages: int, slots: int, max_tokens: int, device: torch.device) -> None:
        if pages < schema.streams and schema.entries(max_tokens):  # no page is needed where no entry ever fills
            raise HybridKVError(
                f"pool '{schema.name}' of {pages} pages cannot hold one page for each of its {schema.streams} streams; "
                "give more memory or lower page_size"
            )
        self.schema = schema
        self.pool = PagedPool(schema, pages, device)
        self.allocator = PageAllocator(pages, schema.name)
        self.pages = np.full((slots, schema.streams, schema.pages_per_stream(max_tokens)), -1, np.int32)
        self.held = np.zeros((slots, schema.streams), np.int64)  # pages
        self.lengths = np.zeros((slots, schema.streams), np.int64)  # entries
        self.fresh = np.zeros(slots, np.int64)  # tokens before which nothing is stored: shared pages have it already
        self.device_table = torch.full(self.pages.shape, -1, dtype=torch.int32, device=device)
        self.rows_of_pages = device.type == "cpu" and self.pages.shape[2] > 0
        self.sent = self.pages.copy()
        self.changed: set[int] = set()
        self.columns: dict[int, tuple[int, int]] = {}  # columns [first, last) that changed, for slots that only grew
        self.other_owners: list[Callable[[], np.ndarray]] = []  # page ids that others than slots own, as often

    def grow(self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[B, streams] pages to add, and whether the open page must be copied first."""
        new = self.schema.new_entries(positions, tokens)[:, None]
        P = self.schema.entries_per_page
        lengths = self.lengths[slots]
        add = np.maximum(ceil_div(lengths + new, P) - self.held[slots], 0)
        writes = (new > 0) & (positions >= self.fresh[slots])[:, None]
        return add, self.shared(slots, (lengths % P > 0) & writes)

    def open_pages(self, slots: np.ndarray, among: np.ndarray) -> np.ndarray:
        """Pages that will be written next, of the streams that are `among` [B, streams]."""
        row, stream = np.nonzero(among)
        return self.pages[slots[row], stream, self.lengths[slots[row], stream] // self.schema.entries_per_page]

    def shared(self, slots: np.ndarray, among: np.ndarray) -> np.ndarray:
        """[B, streams] whether it is `among` those asked about and its open page has another owner."""
        answer = np.zeros(among.shape, bool)
        answer[among] = self.allocator.refs[self.open_pages(slots, among)] > 1
        return answer

    def copies(self, slots: np.ndarray, copy: np.ndarray) -> int:
        """Pages that the copies [B, streams] of one step take: the last owner of a page keeps it, the others copy."""
        ids, times = np.unique(self.open_pages(slots, copy), return_counts=True)
        return int(np.minimum(times, self.allocator.refs[ids] - 1).sum())

    def take(self, slot: int, add: np.ndarray, copy: np.ndarray) -> None:
        """Carry out what `grow` asked for."""
        if copy.any():
            streams = np.flatnonzero(copy)
            at = self.lengths[slot, streams] // self.schema.entries_per_page
            old = self.pages[slot, streams, at]
            new = self.allocator.acquire(len(streams))
            try:
                moved = upload([old.astype(np.int64), new.astype(np.int64)], self.device_table.device)
                self.pool.copy_pages(*moved.chunk(2))
            except BaseException:  # no memory for the copy, or interrupted: the new pages have no owner
                self.allocator.release(new)
                raise
            self.pages[slot, streams, at] = new
            self.allocator.release(old)
        self._grown(
            slot, int((self.lengths[slot] // self.schema.entries_per_page).min()), int((self.held[slot] + add).max())
        )
        # page by page over the streams: neighbours in time are neighbours in memory, but for a CPU's
        for step in range(int(add.max(initial=0))):
            streams = np.flatnonzero(add > step)
            wanted = self._in_a_row(slot, streams) if self.rows_of_pages else None
            self.pages[slot, streams, self.held[slot, streams]] = self.allocator.acquire(len(streams), wanted)
            self.held[slot, streams] += 1

    def _in_a_row(self, slot: int, streams: np.ndarray) -> np.ndarray:
        """Where a CPU would have the next pages of streams: behind their last ones, so that the entries of a stream can
        be read as they lie (EvenPages). Pages that are not free there come from anywhere.
        """
        last = self.held[slot, streams] - 1
        if (last >= 0).all():
            return self.pages[slot, streams, last] + 1
        # a pool is rows of pages, each as long as a stream can become: rows for one stream of each kind make a part
        S, total = self.schema.streams, self.allocator.total
        row = min(self.pages.shape[2], total // S)
        parts = self.allocator.refs[: total // (S * row) * S * row].reshape(-1, S, row)
        held = np.asarray(parts.any(1))  # [parts, row]
        ends = np.where(held.any(1), row - held[:, ::-1].argmax(1), 0)  # from here on all rows of a part are free
        part = len(ends) - 1 - int(ends[::-1].argmin())  # the emptiest, from the end: others are given low pages
        return (part * S + streams) * row + ends[part] if ends[part] < row else np.full(len(streams), -1)

    def share(self, origin: int, slot: int) -> None:
        """The pages in use belong to both slots. Pages reserved for a step that has not run stay the origin's alone."""
        used = ceil_div(self.lengths[origin], self.schema.entries_per_page)
        rows = np.where(np.arange(self.pages.shape[2]) < used[:, None], self.pages[origin], -1)
        self.allocator.share(rows[rows >= 0])
        self.pages[slot], self.held[slot], self.lengths[slot] = rows, used, self.lengths[origin]
        self._all_changed(slot)

    def detach(self, slot: int) -> np.ndarray:
        """Take the pages in use out of a slot, [streams, N] with -1 where there is none, for an owner that needs no
        slot; no count changes. Pages reserved for a step that has not run go back.
        """
        used = ceil_div(self.lengths[slot], self.schema.entries_per_page)
        most = int(used.max(initial=0))
        mine = self.pages[slot]
        taken = np.arange(mine.shape[1]) < used[:, None]
        reserved = mine[~taken & (mine >= 0)]
        rows = np.where(taken, mine, -1)[:, :most]
        mine[:] = -1
        self.held[slot] = self.lengths[slot] = 0
        self._all_changed(slot)
        self.allocator.release(reserved)
        return rows

    def attach(self, slot: int, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Put pages [streams, N] into an empty slot, which is their owner from here on; no count changes."""
        self.pages[slot, :, : rows.shape[1]] = rows
        self.held[slot] = (rows >= 0).sum(1)
        self.lengths[slot] = lengths
        self._all_changed(slot)

    def named(self) -> np.ndarray:
        """Page ids as often as somebody owns them: slots, and whoever needs none."""
        return np.concatenate([self.pages[self.pages >= 0], *(owned() for owned in self.other_owners)])

    def begin_with(self, slot: int, pages: np.ndarray, entries: int) -> None:
        """The slot's streams hold `entries` entries each, on pages [streams, n] that others own too. The rest of these
        pages is what the entries after them would be written to, and has them already.
        """
        self.allocator.share_distinct(pages.ravel())
        self.pages[slot, :, : pages.shape[1]] = pages
        self.held[slot], self.lengths[slot] = pages.shape[1], entries
        self._all_changed(slot)

    def flat(self, pages: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Flat pool numbers of a stream's entries."""
        P = self.schema.entries_per_page
        return pages[entries // P].astype(np.int64) * P + entries % P

    def rows(self, slot: int) -> torch.Tensor:
        """[streams, N] page ids of a slot, where the kernels read them."""
        self._send_changes(np.array([slot]))
        return self.device_table[slot]

    def checked(self, slot: int, keep: Mapping[int, Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Entries that each stream is to keep, from the lists given for layers, or ValueError."""
        heads, lengths, found = self.schema.heads, self.lengths[slot], []
        for layer in self.schema.layers:
            lists = keep.get(layer, ())
            if self.schema.shared or self.schema.tokens_per_entry > 1 or len(lists) != heads:
                raise ValueError(f"layer {layer} needs a list of entries to keep for each of {heads} streams")
            found += [np.asarray(given) for given in lists]
        bad = [e.ndim != 1 or not e.size or e.dtype.kind not in "iu" for e in found]
        found = [np.zeros(1, np.int64) if wrong else e for e, wrong in zip(found, bad, strict=True)]
        ends = np.cumsum([len(e) for e in found])
        starts = np.append(0, ends[:-1])
        joined = np.concatenate(found, dtype=np.int64, casting="unsafe")  # differences of unsigned numbers never fall
        falls = np.ones(len(joined), bool)
        np.less_equal(joined[1:], joined[:-1], out=falls[:-1])
        falls[ends - 1] = (joined[ends - 1] >= lengths) | (joined[starts] < 0)
        for stream in np.flatnonzero(np.logical_or(bad, np.logical_or.reduceat(falls, starts))):
            layer, length = self.schema.layers[stream // heads], lengths[stream]
            raise ValueError(
                f"layer {layer}: entries to keep must be ascending numbers, each once, from 0 to {length - 1}"
            )
        return np.split(joined, ends[:-1])

    def compaction_pages(self, slot: int, counts: np.ndarray) -> np.ndarray:
        """[streams] fresh pages that compacting each stream to `counts` entries needs: none, unless a page to be
        written has another owner.
        """
        need = ceil_div(counts, self.schema.entries_per_page)
        owned = self.allocator.refs[self.pages[slot]] > 1
        shared = (owned & (np.arange(owned.shape[1]) < need[:, None])).any(1)
        return np.where(shared & (counts < self.lengths[slot]), need, 0)

    def compact(self, slot: int, keeps: Sequence[np.ndarray]) -> None:
        """Move the survivors of all streams to their front and give back the pages that empty.

        They go into fresh pages where there are enough, which moves each entry once; what was given back then serves
        the next streams. Where there are not, they move within the stream's own pages, a layer at a time.
        """
        counts = np.array([len(keep) for keep in keeps])
        need = ceil_div(counts, self.schema.entries_per_page)
        shared = self.compaction_pages(slot, counts) > 0
        shrinks = counts < self.lengths[slot]
        rest = np.concatenate((np.flatnonzero(shrinks & shared), np.flatnonzero(shrinks & ~shared)))
        while len(rest):
            fit = int(np.searchsorted(np.cumsum(need[rest]), self.allocator.free, side="right"))
            if not fit and shared[rest[0]]:
                self.allocator.require(int(need[rest[0]]))
            part = rest[: fit or self.schema.heads]
            self._compact(slot, part, [keeps[s] for s in part], need[part], apart=fit > 0)
            rest = rest[len(part) :]

    def _compact(
        self, slot: int, streams: np.ndarray, keeps: Sequence[np.ndarray], need: np.ndarray, apart: bool
    ) -> None:
        """Survivors of some streams into their first `need` pages, or, apart, into as many fresh ones."""
        old = self.pages[slot, streams]
        counts = np.array([len(keep) for keep in keeps])
        taken = np.arange(int(need.max())) < need[:, None]
        new = np.where(taken, old[:, : taken.shape[1]], -1)
        if apart:
            new[taken] = self.allocator.acquire(int(need.sum()))
        try:
            self.pool.move_entries(0, *self._places(slot, streams, keeps, counts, new), apart)
        except BaseException:  # no memory for the copy, or interrupted: the fresh pages have no owner
            if apart:
                self.allocator.release(new[taken])
            raise
        emptied = old >= 0
        if not apart:
            emptied[:, : taken.shape[1]] &= ~taken
        row = np.full_like(old, -1)
        row[:, : taken.shape[1]] = new
        self.pages[slot, streams] = row  # from here on the survivors' pages are the stream's
        self.held[slot, streams] = need
        self.lengths[slot, streams] = counts
        self._all_changed(slot)
        self.allocator.release(old[emptied])

    def _places(
        self, slot: int, streams: np.ndarray, keeps: Sequence[np.ndarray], counts: np.ndarray, pages: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat pool numbers of the entries that the streams keep, and of their new places on `pages` [s, N]."""
        P, rows, total = self.schema.entries_per_page, self.rows(slot), int(counts.sum())
        small = upload([streams, counts, np.cumsum(counts) - counts, pages.ravel()], rows.device)
        which, times, starts, new = small.split([len(streams)] * 3 + [pages.size])
        # pinning so much memory would take longer than waiting for the copy
        kept = torch.from_numpy(np.concatenate(keeps)).to(rows.device)
        owner = torch.repeat_interleave(times, output_size=total)
        entry = torch.arange(total, device=rows.device) - starts[owner]
        source = rows[which[owner], kept // P].to(torch.int64) * P + kept % P
        target = new.view(pages.shape)[owner, entry // P] * P + entry % P
        return source, target

    def owns_pages(self, slot: int) -> bool:
        """Whether the slot shares no page with another owner."""
        rows = self.pages[slot, :, : int(self.held[slot].max(initial=0))]
        return not ((self.allocator.refs[rows] > 1) & (rows >= 0)).any()

    def shrink(self, slot: int, counts: np.ndarray) -> None:
        """The streams hold `counts` [streams] entries in their first pages. Where those are fewer than before, the
        other pages go back. May be repeated, after an interrupt.
        """
        need = np.where(counts < self.lengths[slot], ceil_div(counts, self.schema.entries_per_page), self.held[slot])
        most = int(self.held[slot].max(initial=0))
        rows = self.pages[slot, :, :most]
        # page by page over the streams, as they were taken: in ascending order, mostly
        emptied = rows.T[(np.arange(most)[:, None] >= need) & (rows.T >= 0)]
        rows[np.arange(most) >= need[:, None]] = -1  # from here on they are not the stream's
        self.held[slot] = need
        self.lengths[slot] = counts
        self._all_changed(slot)
        self.allocator.release(emptied)

    def replace(self, slot: int, counts: np.ndarray, fresh: np.ndarray) -> None:
        """The streams hold `counts` [streams] entries in fresh pages, one stream after the other, and give their own
        back with what is left of the fresh ones. May be repeated, after an interrupt.
        """
        need = ceil_div(counts, self.schema.entries_per_page)
        rows, used, before = np.full_like(self.pages[slot], -1), int(need.sum()), self.pages[slot].copy()
        rows[np.arange(rows.shape[1]) < need[:, None]] = fresh[:used]
        done = self.is_on(slot, fresh)
        self.pages[slot] = rows  # from here on the fresh pages are the streams'
        self.held[slot] = need
        self.lengths[slot] = counts
        self._all_changed(slot)
        if not done:
            self.allocator.release(np.concatenate((before[before >= 0], fresh[used:])))

    def is_on(self, slot: int, fresh: np.ndarray) -> bool:
        """Whether the slot's streams have fresh pages already."""
        return bool(len(fresh)) and bool(self.pages[slot, 0, 0] == fresh[0])

    def drop(self, slot: int, keep: int = 0) -> None:
        """Give back all pages of a slot but the first `keep` of each stream."""
        rows = self.pages[slot, :, keep:]
        dropped = rows[rows >= 0]
        rows[:] = -1
        self.held[slot] = np.minimum(self.held[slot], keep)
        self._all_changed(slot)
        self.allocator.release(dropped)

    def rebuild(self, free_slots: list[int], spare: np.ndarray | None = None) -> None:
        """Make all counts anew from `pages`, with nothing in the free slots: the way back after an interrupt. `spare`:
        pages that others own too, as often as they do.

        A slot that was interrupted in the middle of a change is consistent again, but its entries may be lost.
        """
        self.pages[free_slots] = -1
        self.lengths[free_slots] = 0
        self.held = (self.pages >= 0).sum(2)
        self.lengths = np.minimum(self.lengths, self.held * self.schema.entries_per_page)
        self.allocator.rebuild(self.named(), spare)
        self.sent[:] = UNKNOWN
        self.changed = set(range(len(self.pages)))
        self.columns.clear()

    def check(self, free_slots: list[int], spare: np.ndarray) -> None:
        """Every page is free or owned exactly as often as the table, frozen caches and columns name it; free slots are
        empty.
        """
        self.allocator.check()
        named, what = self.named(), f"pool '{self.schema.name}'"
        outside = np.bincount(spare, minlength=self.allocator.total)
        if not np.array_equal(np.bincount(named, minlength=self.allocator.total) + outside, self.allocator.refs):
            raise AssertionError(f"{what}: page tables and reference counts disagree")
        if not np.array_equal(outside, self.allocator.spare):
            raise AssertionError(f"{what}: columns and their reference counts disagree")
        if not np.array_equal((self.pages >= 0).sum(2), self.held):
            raise AssertionError(f"{what}: held page counts disagree with the table")
        if (self.held * self.schema.entries_per_page < self.lengths).any():
            raise AssertionError(f"{what}: a stream is longer than its pages")
        if self.held[free_slots].any() or self.lengths[free_slots].any():
            raise AssertionError(f"{what}: a free slot holds pages")

    def stream_plan(self, step: HostIndex, reach: int | None = None) -> StreamPlan:
        """Where a step's new entries go and how long each stream is then. Slot -1: padding.

        `reach`: the step is to be captured, for requests of up to `reach` tokens.
        """
        self._send_changes(step.slots)
        ratio = self.schema.tokens_per_entry
        real = (step.slots >= 0)[:, None]
        new = self.schema.new_entries(step.num_computed, step.num_scheduled)[:, None]
        before = np.where(real, self.lengths[step.slots], 0)  # [B, streams]
        after = before + np.where(real, new, 0)
        max_entries = int(after.max(initial=0)) if reach is None else self.schema.entries(reach)
        index = None  # of a prompt chunk: arrays of [streams, T] would take milliseconds here
        if ratio > 1:
            index = self._places_of_entries(step, before)
        elif step.num_decodes == len(step.slots):
            index = self._places_of_tokens(step, before)
        return StreamPlan(self.schema.name, self.device_table, self.schema.entries_per_page, after, index, max_entries)

    def _places_of_tokens(self, step: HostIndex, before: np.ndarray) -> np.ndarray:
        """[streams, B] flat place of the one new entry of each request, where every token is one; -1: padding, or
        stored already.
        """
        P, slots = self.schema.entries_per_page, step.slots
        page = self.pages[slots[:, None], np.arange(self.schema.streams), before // P].astype(np.int64)
        stored = (slots >= 0) & (step.num_computed >= self.fresh[slots])
        return np.where(stored[:, None], page * P + before % P, -1).T

    def _places_of_entries(self, step: HostIndex, before: np.ndarray) -> np.ndarray:
        """[streams, T] flat place of the entry that each token completes, -1 where it completes none, or one that is
        stored already.

        before [B, streams]: entries that the requests held before the step.
        """
        P, ratio = self.schema.entries_per_page, self.schema.tokens_per_entry
        seen = step.positions + 1  # tokens, this one included
        slots = step.slots[step.token_to_req]
        token = np.flatnonzero((slots >= 0) & (seen % ratio == 0) & (seen > self.fresh[slots]))
        request = step.token_to_req[token]
        earlier = seen[token] // ratio - step.num_computed[request] // ratio - 1  # entries of this step before it
        entry = before[request] + earlier[:, None]  # [tokens, streams]
        page = self.pages[step.slots[request][:, None], np.arange(self.schema.streams), entry // P].astype(np.int64)
        index = np.full((self.schema.streams, len(seen)), -1, np.int64)
        index[:, token] = (page * P + entry % P).T
        return index

    def _grown(self, slot: int, first: int, last: int) -> None:
        """Columns [first, last) of the slot's pages may have changed, and no others."""
        if slot not in self.changed or slot in self.columns:
            was = self.columns.get(slot, (first, last))
            self.columns[slot] = min(was[0], first), max(was[1], last)
        self.changed.add(slot)

    def _all_changed(self, slot: int) -> None:
        self.changed.add(slot)
        self.columns.pop(slot, None)

    def _send_changes(self, slots: np.ndarray) -> None:
        """Send the page ids of these slots that have changed, all in one copy."""
        stale = sorted(self.changed.intersection(slots.tolist()))
        if not stale:
            return
        spans = [self.columns.get(slot, (0, self.pages.shape[2])) for slot in stale]
        part = slice(min(a for a, _ in spans), max(b for _, b in spans))
        now = self.pages[stale, :, part]
        row, stream, column = np.nonzero(now != self.sent[stale, :, part])
        if len(row):
            where = np.array(stale)[row], stream, column + part.start
            flat = np.ravel_multi_index(where, self.sent.shape)
            sent = upload([flat, now[row, stream, column].astype(np.int64)], self.device_table.device)
            self.device_table.view(-1)[sent[: len(flat)]] = sent[len(flat) :].to(torch.int32)
        self.sent[stale, :, part] = now
        for slot in stale:
            self.changed.discard(slot)
            self.columns.pop(slot, None)


def places_of(schema: StreamSchema, pages: np.ndarray, begin: np.ndarray, count: np.ndarray) -> torch.Tensor:
    """Flat pool numbers of `count` [streams] entries of each stream from `begin` on, by its pages [streams, N]."""
    P, end, some = schema.entries_per_page, begin + count, count > 0
    if not some.any():
        return torch.zeros(0, dtype=torch.int64)
    first, last = int(begin[some].min()) // P, ceil_div(int(end[some].max()), P)  # pages that any stream reads
    at = pages[:, first:last, None].astype(np.int64) * P + np.arange(P)  # of all their entries
    entry = np.arange(first * P, last * P)
    wanted = (entry >= begin[:, None]) & (entry < end[:, None])
    return torch.from_numpy(at.reshape(wanted.shape)[wanted])
