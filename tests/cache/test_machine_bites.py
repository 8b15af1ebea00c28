"""The state machine finds planted faults: each patch here is a mistake that a cache manager has been known to make."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache.machine import CacheMachine
from hybridkv.cache import KVCacheManager, OutOfPages, PageAllocator, PagedPool, StatePool, frozen
from hybridkv.cache.page_table import PageTable
from hybridkv.kernels.eviction.compact import compact_ref

Patch = tuple[type, str, Callable[..., Any]]


def release_forgets_a_page() -> Patch:
    def drop(self: PageTable, slot: int, keep: int = 0) -> None:
        rows = self.pages[slot, :, keep:]
        self.allocator.release(rows[rows >= 0][:-1])
        rows[:] = -1
        self.held[slot] = np.minimum(self.held[slot], keep)

    return PageTable, "drop", drop


def release_leaves_the_row() -> Patch:
    def drop(self: PageTable, slot: int, keep: int = 0) -> None:
        rows = self.pages[slot, :, keep:]
        self.allocator.release(rows[rows >= 0])
        self.held[slot] = np.minimum(self.held[slot], keep)

    return PageTable, "drop", drop


def fork_counts_no_owner() -> Patch:
    def share(self: PageTable, origin: int, slot: int) -> None:
        for array in (self.pages, self.held, self.lengths):
            array[slot] = array[origin]

    return PageTable, "share", share


def fork_shares_pages_reserved_for_later() -> Patch:
    def share(self: PageTable, origin: int, slot: int) -> None:
        self.allocator.share(self.pages[origin][self.pages[origin] >= 0])
        for array in (self.pages, self.held, self.lengths):
            array[slot] = array[origin]

    return PageTable, "share", share


def survivors_on_fresh_pages_keep_their_old_ones() -> Patch:
    def replace(self: PageTable, slot: int, counts: np.ndarray, fresh: np.ndarray) -> None:
        need = -(-counts // self.schema.entries_per_page)
        self.pages[slot] = -1
        self.pages[slot][np.arange(self.pages.shape[2]) < need[:, None]] = fresh[: need.sum()]
        self.held[slot], self.lengths[slot] = need, counts
        self._all_changed(slot)
        self.allocator.release(fresh[need.sum() :])

    return PageTable, "replace", replace


def fresh_pages_under_way_have_no_owner() -> Patch:
    return KVCacheManager, "_fresh_pages", lambda self, name: np.zeros(0, np.int32)


def shared_pages_are_compacted_in_place() -> Patch:
    return PageTable, "owns_pages", lambda self, slot: True


def copy_on_write_is_skipped() -> Patch:
    return PageTable, "shared", lambda self, slot, among: np.zeros(len(among), bool)


def copy_on_write_copies_no_bytes() -> Patch:
    return PagedPool, "copy_pages", lambda self, source, target: None


def copy_on_write_copies_the_first_lane_only() -> Patch:
    def copy_pages(self: PagedPool, source: Any, target: Any) -> None:
        for t in self.tensors.values():
            t[:1, target] = t[:1, source]

    return PagedPool, "copy_pages", copy_pages


def pages_are_taken_before_all_pools_are_asked() -> Patch:
    original = PageAllocator.acquire

    def acquire(self: PageAllocator, n: int, wanted: np.ndarray | None = None) -> np.ndarray:
        if n > self.free:
            raise OutOfPages(n, self.free, self.total, self.name)
        return original(self, n, wanted)

    return PageAllocator, "acquire", acquire


def a_retry_takes_pages_again() -> Patch:
    def grow(
        self: PageTable, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        P, lengths = self.schema.entries_per_page, self.lengths[slots]
        new = self.schema.new_entries(positions, tokens)[:, None]
        add = -(-(lengths + new) // P) + -lengths // P
        add = np.minimum(add, self.pages.shape[2] - self.held[slots])
        return add, self.shared(slots, (lengths % P > 0) & (new > 0))

    return PageTable, "grow", grow


def commit_forgets_a_table() -> Patch:
    original = KVCacheManager.commit

    def commit(self: KVCacheManager, plan: Any) -> None:
        before = self.tables["compressed"].lengths.copy()
        original(self, plan)
        self.tables["compressed"].lengths[:] = before

    return KVCacheManager, "commit", commit


def commit_stops_half_way() -> Patch:
    original = KVCacheManager.commit

    def commit(self: KVCacheManager, plan: Any) -> None:
        for item in plan:
            original(self, [item])

    return KVCacheManager, "commit", commit


def a_page_is_given_out_twice() -> Patch:
    original = PageAllocator.acquire

    def acquire(self: PageAllocator, n: int, wanted: np.ndarray | None = None) -> np.ndarray:
        ids = original(self, n, wanted)
        self._top += n > 1  # the last one stays on the stack
        return ids

    return PageAllocator, "acquire", acquire


def truncation_rounds_down() -> Patch:
    original = PageTable.drop
    return PageTable, "drop", lambda self, slot, keep=0: original(self, slot, max(keep - 1, 0))


def a_reused_slot_keeps_its_state() -> Patch:
    return StatePool, "reset", lambda self, slot: None


def a_fork_starts_with_fresh_state() -> Patch:
    return StatePool, "copy", lambda self, source, target, *_: self.reset(target)


def cut(self: PageTable, slot: int, s: int, pages: np.ndarray, length: int, returned: np.ndarray) -> None:
    """The last part of a compaction: the row, and what goes back."""
    row = self.pages[slot, s]
    self.allocator.release(returned)
    row[:] = -1
    row[: len(pages)] = pages
    self.held[slot, s], self.lengths[slot, s] = len(pages), length
    self.changed.add(slot)


def compaction_writes_into_shared_pages() -> Patch:
    def compact(self: PageTable, slot: int, keeps: Any) -> None:
        for s, keep in enumerate(keeps):
            row, n = self.pages[slot, s].copy(), -(-len(keep) // self.schema.entries_per_page)
            if len(keep) < self.lengths[slot, s]:
                places = (self.flat(row, keep), self.flat(row, np.arange(len(keep))))
                self.pool.move_entries(0, *(torch.from_numpy(x) for x in places))
                cut(self, slot, s, row[:n], len(keep), row[n:][row[n:] >= 0])

    return PageTable, "compact", compact


def compaction_forgets_to_return_a_page() -> Patch:
    original = PageTable.compact

    def compact(self: PageTable, *args: Any) -> None:
        release = self.allocator.release
        self.allocator.release = lambda ids: release(ids[: max(len(ids) - 1, 0)])  # type: ignore[method-assign]
        try:
            original(self, *args)
        finally:
            self.allocator.release = release  # type: ignore[method-assign]

    return PageTable, "compact", compact


def compaction_turns_the_order_round() -> Patch:
    original = PagedPool.move_entries
    return PagedPool, "move_entries", lambda self, lane, source, *rest: original(self, lane, source.flip(0), *rest)


def compaction_moves_one_tensor_only() -> Patch:
    def move_entries(self: PagedPool, lane: int, source: Any, target: Any, apart: bool) -> None:
        compact_ref(self.tensors["k"][lane], source, target)

    return PagedPool, "move_entries", move_entries


def compaction_copies_entry_by_entry_downwards() -> Patch:
    def move_entries(self: PagedPool, lane: int, source: Any, target: Any, apart: bool) -> None:
        for t in self.tensors.values():
            flat = t[lane].view(-1, *t.shape[3:])
            for a, b in reversed(list(zip(source.tolist(), target.tolist()))):
                if b >= 0:
                    flat[b] = flat[a]

    return PagedPool, "move_entries", move_entries


def a_fork_forgets_what_was_evicted() -> Patch:
    original = KVCacheManager.fork_request

    def fork_request(self: KVCacheManager, source: Any, request: Any) -> int:
        slot = original(self, source, request)
        self.compactions.pop(slot, None)
        return slot

    return KVCacheManager, "fork_request", fork_request


def a_restore_forgets_the_state() -> Patch:
    return frozen, "restore_state", lambda *of: None


FAULTS = (
    compaction_writes_into_shared_pages,
    compaction_forgets_to_return_a_page,
    compaction_turns_the_order_round,
    compaction_moves_one_tensor_only,
    compaction_copies_entry_by_entry_downwards,
    survivors_on_fresh_pages_keep_their_old_ones,
    fresh_pages_under_way_have_no_owner,
    shared_pages_are_compacted_in_place,
    a_fork_forgets_what_was_evicted,
    a_restore_forgets_the_state,
    release_forgets_a_page,
    release_leaves_the_row,
    fork_counts_no_owner,
    fork_shares_pages_reserved_for_later,
    copy_on_write_is_skipped,
    copy_on_write_copies_no_bytes,
    copy_on_write_copies_the_first_lane_only,
    pages_are_taken_before_all_pools_are_asked,
    a_retry_takes_pages_again,
    commit_forgets_a_table,
    commit_stops_half_way,
    a_page_is_given_out_twice,
    truncation_rounds_down,
    a_reused_slot_keeps_its_state,
    a_fork_starts_with_fresh_state,
)
OF_COMPACTION = FAULTS[: FAULTS.index(a_fork_forgets_what_was_evicted) + 1]
NOTICED = (AssertionError, ValueError, IndexError, pytest.fail.Exception)


class Compacting(CacheMachine):
    """Without the rules that no compaction needs: otherwise some dozens of examples pass before the first one."""

    restore = truncate = preempt = misuse = None  # type: ignore[assignment]


class Truncating(CacheMachine):
    """Without the rules after which nothing can be taken back."""

    restore = compact = preempt = misuse = None  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(fault: Callable[[], Patch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*fault())
    if fault is pages_are_taken_before_all_pools_are_asked:
        monkeypatch.setattr(PageAllocator, "require", lambda self, n: None)
    machine = Compacting if fault in OF_COMPACTION else CacheMachine
    machine = Truncating if fault is truncation_rounds_down else machine
    with pytest.raises(NOTICED):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=1000,  # what is drawn depends on the modules that are loaded
                stateful_step_count=50,
                derandomize=True,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
            ),
        )
