"""StreamTable: pages and lengths of one StreamSchema's streams, for all slots. When they change, the manager decides.

Ownership of one stream's pages (64 entries a page, length 150):

    entries   0 .. 63   64 .. 127   128 .. 149 | 150 .. 191
    pages    [   7   ] [    3    ] [         12            ]
              full: may be shared after a fork   the open page: written next, so it is copied first if another
              and is never written again         request holds it too
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybridkv.cache.allocator import PageAllocator
from hybridkv.cache.pools import PagedPool
from hybridkv.cache.schema import StreamSchema
from hybridkv.cache.step import EntryPlan, StreamView, upload
from hybridkv.errors import HybridKVError


class StreamTable:
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
        # lanes of one stream read the page ids from here, by slot; rows are sent when they have changed
        rows = (slots, self.pages.shape[2]) if schema.shared else (0, 0)
        self.mirror = torch.full(rows, -1, dtype=torch.int32, device=device)
        self.changed: set[int] = set()  # slots whose pages are not what the mirror says

    def grow(self, slot: int, position: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Per stream: pages to add, and whether the open page must be copied first."""
        new = self.schema.new_entries(position, tokens)
        P, lengths = self.schema.entries_per_page, self.lengths[slot]
        add = np.maximum(-(-(lengths + new) // P) - self.held[slot], 0)
        return add, self.shared(slot, lengths % P > 0) if new else np.zeros(len(lengths), bool)

    def open_pages(self, slot: int, streams: np.ndarray) -> np.ndarray:
        return self.pages[slot, streams, self.lengths[slot, streams] // self.schema.entries_per_page]

    def shared(self, slot: int, among: np.ndarray) -> np.ndarray:
        """Per stream: whether it is `among` those asked about and its open page has another owner."""
        streams, answer = np.flatnonzero(among), np.zeros(len(among), bool)
        answer[streams] = self.allocator.refs[self.open_pages(slot, streams)] > 1
        return answer

    def copies(self, asked: Sequence[tuple[int, np.ndarray]]) -> int:
        """Pages that (slot, copy) pairs of one step take: the last owner of a page keeps it, the others copy."""
        pages = [self.open_pages(slot, np.flatnonzero(copy)) for slot, copy in asked]
        ids, times = np.unique(np.concatenate(pages), return_counts=True)
        return int(np.minimum(times, self.allocator.refs[ids] - 1).sum())

    def take(self, slot: int, add: np.ndarray, copy: np.ndarray) -> None:
        """Carry out what `grow` asked for."""
        if copy.any():
            streams = np.flatnonzero(copy)
            at = self.lengths[slot, streams] // self.schema.entries_per_page
            old, new = self.pages[slot, streams, at], self.allocator.acquire(len(streams))
            try:
                self.pool.copy_pages(*(torch.from_numpy(x.astype(np.int64)) for x in (old, new)))
            except BaseException:  # no memory for the copy, or interrupted: the new pages are nobody's
                self.allocator.release(new)
                raise
            self.pages[slot, streams, at] = new
            self.allocator.release(old)
        self.changed.add(slot)
        # page by page over the streams: neighbours in time are neighbours in memory
        for step in range(int(add.max(initial=0))):
            streams = np.flatnonzero(add > step)
            self.pages[slot, streams, self.held[slot, streams]] = self.allocator.acquire(len(streams))
            self.held[slot, streams] += 1

    def share(self, origin: int, slot: int) -> None:
        """The pages in use belong to both slots. Pages reserved for a step that has not run stay the origin's alone."""
        used = -(-self.lengths[origin] // self.schema.entries_per_page)
        rows = np.where(np.arange(self.pages.shape[2]) < used[:, None], self.pages[origin], -1)
        self.allocator.share(rows[rows >= 0])
        self.pages[slot], self.held[slot], self.lengths[slot] = rows, used, self.lengths[origin]
        self.changed.add(slot)

    def flat(self, pages: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Flat pool numbers of a stream's entries."""
        P = self.schema.entries_per_page
        return pages[entries // P].astype(np.int64) * P + entries % P

    def compaction_pages(self, slot: int, keeps: Sequence[np.ndarray]) -> list[int]:
        """Fresh pages that compacting each stream takes: none, unless a page it would write has another owner."""
        need = []
        for s, keep in enumerate(keeps):
            n = -(-len(keep) // self.schema.entries_per_page)
            shared = len(keep) < self.lengths[slot, s] and (self.allocator.refs[self.pages[slot, s, :n]] > 1).any()
            need.append(n if shared else 0)
        return need

    def compact(self, slot: int, first: int, keeps: Sequence[np.ndarray], lane: int) -> None:
        """Move the survivors of streams first, first + 1, ... to their front and give back the pages that empty."""
        jobs, source, target = [], [], []
        for s, keep in enumerate(keeps, start=first):
            if len(keep) == self.lengths[slot, s]:
                continue
            row, n = self.pages[slot, s], -(-len(keep) // self.schema.entries_per_page)
            pages = row[:n].copy()
            if (self.allocator.refs[pages] > 1).any():
                pages = self.allocator.acquire(n)
            source.append(self.flat(row, keep))
            target.append(self.flat(pages, np.arange(len(keep))))
            jobs.append((s, pages, len(keep)))
        if jobs:
            device = next(iter(self.pool.tensors.values())).device
            moves = (torch.from_numpy(np.concatenate(x)).to(device) for x in (source, target))
            try:
                self.pool.move_entries(lane, *moves)
            except BaseException:  # no memory for the copy, or interrupted: fresh pages are nobody's
                for s, pages, _ in jobs:
                    self.allocator.release(pages[~np.isin(pages, self.pages[slot, s])])
                raise
        for s, pages, length in jobs:
            row = self.pages[slot, s]
            old = row[row >= 0]
            self.allocator.release(old[~np.isin(old, pages)])
            row[:] = -1
            row[: len(pages)] = pages
            self.held[slot, s], self.lengths[slot, s] = len(pages), length

    def drop(self, slot: int, keep: int = 0) -> None:
        """Give back all pages of a slot but the first `keep` of each stream."""
        rows = self.pages[slot, :, keep:]
        self.allocator.release(rows[rows >= 0])
        rows[:] = -1
        self.held[slot] = np.minimum(self.held[slot], keep)
        self.changed.add(slot)

    def view(self, slots: np.ndarray, counts: np.ndarray, positions: np.ndarray, device: torch.device) -> StreamView:
        s, P = self.schema, self.schema.entries_per_page
        new = (positions + counts) // s.tokens_per_entry - positions // s.tokens_per_entry  # [B]
        before = self.lengths[slots]  # [B, S]
        after = before + new[:, None]
        width = int(-(-after.max(initial=1) // P))
        index = None
        if s.tokens_per_entry == 1:
            owner = np.repeat(np.arange(len(slots)), counts)  # [T]
            inside = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
            entry = before[owner] + inside[:, None]  # [T, S]
            page = self.pages[slots[owner][:, None], np.arange(s.streams), entry // P].astype(np.int64)
            index = torch.from_numpy(np.ascontiguousarray((page * P + entry % P).T)).to(device)
        table = torch.from_numpy(self.pages[slots, :, :width]).to(device)
        return StreamView(table, after, torch.from_numpy(after).to(device), index)

    def entry_plan(self, slots: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> EntryPlan:
        """Where a step's new entries go, for a stream whose lengths follow from positions. Slot -1: padding."""
        self._refresh(slots)
        s, P = self.schema, self.schema.entries_per_page
        owner = np.repeat(np.arange(len(slots)), counts)  # [T]
        inside = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        seen = begins[owner] + inside + 1  # tokens, the one in question included
        entry = seen // s.tokens_per_entry - 1
        index = np.full(len(owner), -1, np.int64)
        full = np.flatnonzero((seen % s.tokens_per_entry == 0) & (slots[owner] >= 0))
        page = self.pages[slots[owner[full]], 0, entry[full] // P].astype(np.int64)
        index[full] = page * P + entry[full] % P
        longest = int((begins + counts).max(initial=0))
        return EntryPlan(s.name, self.mirror, index, s.entries(longest))

    def _refresh(self, slots: np.ndarray) -> None:
        """Send the rows that have changed, all in one copy."""
        stale = sorted(self.changed.intersection(slots.tolist()))
        if stale:
            rows = self.pages[stale, 0].astype(np.int64)
            sent = upload([np.array(stale), rows.ravel()], self.mirror.device)
            self.mirror[sent[: len(stale)]] = sent[len(stale) :].view(rows.shape).to(torch.int32)
            self.changed.difference_update(stale)
