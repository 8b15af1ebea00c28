"""PageAllocator: a stack of free page ids and a reference count for each page. Knows nothing of what a page holds."""

from __future__ import annotations

from collections.abc import Sequence
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
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)  # the top is the end: low ids go out first
        self._top = total

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._top

    @property
    def held(self) -> int:
        """Pages that somebody holds; a shared page counts once."""
        return self.total - self._top

    def require(self, n: int) -> None:
        """OutOfPages unless `n` pages are free."""
        if n > self._top:
            raise OutOfPages(n, self._top, self.total, self.name)

    def acquire(self, n: int) -> PageIds:
        """n pages with one owner each, or OutOfPages and nothing changed."""
        n = index(n)
        if n < 0:
            raise ValueError(f"cannot acquire {n} pages")
        self.require(n)
        self._top -= n
        ids = self._stack[self._top : self._top + n][::-1].copy()
        self.refs[ids] = 1
        return ids

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
        self._stack[self._top : self._top + len(freed)] = freed
        self._top += len(freed)
        return len(freed)

    def rebuild(self, named: np.ndarray) -> None:
        """Count owners and free pages anew, from the page ids that all tables name: the way back after an interrupt."""
        self.refs = np.bincount(named, minlength=self.total).astype(np.int32)
        free = np.flatnonzero(self.refs == 0)[::-1].astype(np.int32)
        self._stack[: len(free)] = free
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
        if len(np.unique(on_stack)) != self._top or (self.refs[on_stack] != 0).any():
            raise AssertionError(f"free list of pool '{self.name}' is corrupt")
        if int((self.refs > 0).sum()) != self.held or (self.refs < 0).any():
            raise AssertionError(
                f"pool '{self.name}': {int((self.refs > 0).sum())} pages have owners, {self.held} are held"
            )
