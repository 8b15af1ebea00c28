"""PageAllocator: a stack of free page ids and a reference count for each page. Knows nothing of what a page holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index

import numpy as np

from hybridkv.errors import OutOfPages

PageIds = np.ndarray  # int32


class PageAllocator:
    """Hands out page ids. A page is free (count 0, on the stack once) or held (count = number of owners)."""

    def __init__(self, total: int, name: str = "") -> None:
        if total < 0 or total > 2**31 - 1:
            raise ValueError(f"a pool has from 0 to 2**31 - 1 pages, not {total}")
        self.total, self.name = total, name
        self.refs = np.zeros(total, np.int32)
        self.spare = np.zeros(total, np.int32)  # of the owners those that give a page up when it is needed (reuse.py)
        self.reclaim: Callable[[int], None] | None = None  # asked for so many pages where too few are free
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)  # the top is the end: low ids go out first
        self._place = self._stack.copy()  # of each free page on the stack
        self._top = total

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._top

    @property
    def held(self) -> int:
        """Pages that somebody holds; a shared page counts once."""
        return self.total - self._top

    @property
    def reclaimable(self) -> int:
        """Pages that all their owners would give up."""
        return int(np.count_nonzero((self.refs == self.spare) & (self.spare > 0))) if self.reclaim is not None else 0

    def require(self, n: int) -> None:
        """OutOfPages unless `n` pages are free, or can be had from owners that give theirs up."""
        if n > self._top and self.reclaim is not None:
            self.reclaim(n)
        if n > self._top:
            raise OutOfPages(n, self._top, self.total, self.name)

    def acquire(self, n: int, wanted: PageIds | None = None) -> PageIds:
        """n pages with one owner each, or OutOfPages and nothing changed. `wanted` [n]: where these are free, they are
        taken.
        """
        n = index(n)
        if n < 0:
            raise ValueError(f"cannot acquire {n} pages")
        self.require(n)
        if wanted is not None:
            return self._acquire_wanted(wanted)
        self._top -= n
        ids = self._stack[self._top : self._top + n][::-1].copy()
        self.refs[ids] = 1
        return ids

    def _acquire_wanted(self, wanted: PageIds) -> PageIds:
        """The first to name a free page gets it; the others get what is on top."""
        ids = np.asarray(wanted, np.int32).copy()
        known = (ids >= 0) & (ids < self.total)
        first = np.zeros(len(ids), bool)
        first[np.unique(ids, return_index=True)[1]] = True
        given = known & first & (self.refs[np.where(known, ids, 0)] == 0)
        top, places = self._top - int(given.sum()), self._place[ids[given]]
        above = self._stack[top : self._top]
        stay = above[~np.isin(above, ids[given])]  # they fill the places of those that leave from below
        self._put(stay, places[places < top])
        self._top = top
        self.refs[ids[given]] = 1
        ids[~given] = self.acquire(len(ids) - int(given.sum()))
        return ids

    def _put(self, pages: PageIds, places: np.ndarray) -> None:
        """Free pages to places of the stack."""
        self._stack[places] = pages
        self._place[pages] = places

    def share(self, ids: PageIds | Sequence[int]) -> None:
        """One more owner for each page."""
        pages, times, owners = self._held_pages(ids)
        self.refs[pages] = owners + times

    def release(self, ids: PageIds | Sequence[int]) -> int:
        """One owner less for each page; those without owners return to the stack. Returns how many did."""
        pages, times, owners = self._held_pages(ids)
        left = owners - times
        if (left < 0).any():
            raise ValueError(f"pages {pages[left < 0][:8].tolist()} are released more often than they are held")
        self.refs[pages] = left
        freed = pages[left == 0][::-1]
        self._put(freed, np.arange(self._top, self._top + len(freed)))
        self._top += len(freed)
        return len(freed)

    def share_distinct(self, ids: PageIds, spare: bool = False) -> None:
        """`share` of pages that differ from one another and are held, which is quicker. `spare`: the new owner gives
        them up when they are needed.
        """
        self.refs[ids] += 1
        if spare:
            self.spare[ids] += 1

    def release_distinct(self, ids: PageIds, spare: bool = False) -> int:
        """`release` of such pages. Returns how many are free now."""
        left = self.refs[ids] - 1
        if spare:
            self.spare[ids] -= 1
        if (left < 0).any() or (spare and (self.spare[ids] < 0).any()):
            raise ValueError(f"pages {ids[left < 0][:8].tolist()} are released more often than they are held")
        self.refs[ids] = left
        freed = ids[left == 0][::-1]
        self._put(freed, np.arange(self._top, self._top + len(freed)))
        self._top += len(freed)
        return len(freed)

    def rebuild(self, named: np.ndarray, spare: np.ndarray | None = None) -> None:
        """Count owners and free pages anew, from the page ids that all tables name and those of owners that give theirs
        up: the way back after an interrupt.
        """
        self.refs = np.bincount(named, minlength=self.total).astype(np.int32)
        self.spare = np.zeros(self.total, np.int32)
        if spare is not None:
            self.spare += np.bincount(spare, minlength=self.total).astype(np.int32)
            self.refs += self.spare
        free = np.flatnonzero(self.refs == 0)[::-1].astype(np.int32)
        self._put(free, np.arange(len(free)))
        self._top = len(free)

    def _held_pages(self, ids: PageIds | Sequence[int]) -> tuple[PageIds, np.ndarray, np.ndarray]:
        """Each page once in ascending order, how often it is named, and how many owners it has; or ValueError."""
        ids = np.sort(np.asarray(ids, np.int64), axis=None, kind="stable")  # quick where they are nearly in order
        first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])[: len(ids)])
        pages, times = ids[first], np.diff(first, append=len(ids)).astype(np.int32)
        if len(pages) and not 0 <= pages[0] <= pages[-1] < self.total:
            bad = pages[(pages < 0) | (pages >= self.total)]
            raise ValueError(f"page ids {bad[:8].tolist()} are outside 0..{self.total - 1}")
        owners = self.refs[pages]
        if not owners.all():
            raise ValueError(f"pages {pages[owners == 0][:8].tolist()} are free and have no owner")
        return pages, times, owners

    def check(self) -> None:
        """The stack holds exactly the pages without owners, each once."""
        on_stack = self._stack[: self._top]
        placed = (self._place[on_stack] == np.arange(self._top)).all()
        if len(np.unique(on_stack)) != self._top or (self.refs[on_stack] != 0).any() or not placed:
            raise AssertionError(f"free list of pool '{self.name}' is corrupt")
        if int((self.refs > 0).sum()) != self.held or (self.refs < 0).any():
            raise AssertionError(
                f"pool '{self.name}': {int((self.refs > 0).sum())} pages have owners, {self.held} are held"
            )
