"""Random use of compressed caches against the model in `compressed_machine.py`, and planted faults that it finds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from long_form import LONG

from cache import compressed_machine
from cache.compressed_machine import CompressedMachine, RealRatios
from hybridkv.cache import (
    CompressedHandle,
    ForwardStep,
    KVCacheManager,
    PagedPool,
    StatePool,
    compressed_handle,
    frozen,
    manager,
)
from hybridkv.cache.page_table import PageTable
from hybridkv.cache.step import StreamPlan
from hybridkv.kernels.step_index import HostIndex
from hybridkv.kernels.v4.flush_csa import save_rows_ref

AT_LEAST = {
    "commit": 150,
    "entries": 250,
    "steps with several requests": 50,
    "steps with padding": 20,
    "retry": 4,
    "abandon": 4,
    "forks": 10,
    "copies on write": 2,
    "restores": 10,
    "between boundaries": 20,
    "truncations": 10,
    "truncation refused": 10,
    "releases": 20,
    "out of pages": 10,
    "too long": 1,
    "unknown request": 10,
}


def play(machine: type[CompressedMachine], examples: int, steps: int, **more: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, derandomize=True, deadline=None, database=None, **more
        ),
    )


@pytest.mark.long
def test_random_use_agrees_with_the_model() -> None:
    compressed_machine.counts.clear()
    play(CompressedMachine, 50 if LONG else 30, 20)
    found = compressed_machine.counts
    rare = {what: found[what] for what, n in AT_LEAST.items() if found[what] < (n if LONG else (n + 1) // 2)}
    assert not rare, f"rules that hardly ran: {rare}; all: {found}"


def test_random_use_at_the_real_ratios() -> None:
    play(RealRatios, 5, 15)


# ---- planted faults

Patch = tuple[object, str, Callable[..., Any]]


def entries_are_flushed_one_token_late() -> Patch:
    original = PageTable.stream_plan

    def stream_plan(self: PageTable, step: HostIndex, reach: int | None = None) -> StreamPlan:
        late = original(self, replace(step, num_computed=step.num_computed - 1), reach)
        return replace(original(self, step, reach), entry_index=late.entry_index)

    return PageTable, "stream_plan", stream_plan


def entries_lie_one_place_further() -> Patch:
    original = PageTable.stream_plan

    def stream_plan(self: PageTable, step: HostIndex, reach: int | None = None) -> StreamPlan:
        plan = original(self, step, reach)
        assert plan.entry_index is not None
        return replace(plan, entry_index=np.where(plan.entry_index >= 0, plan.entry_index + 1, -1))

    return PageTable, "stream_plan", stream_plan


def token_rows_are_saved_before_they_are_read() -> Patch:
    original = CompressedHandle.maybe_flush_csa

    def maybe_flush_csa(self: CompressedHandle, which: str, p: Any, z: Any, bias: Any, *rest: Any) -> None:
        rows = self.state[f"{which}_p"], self.state[f"{which}_z"]
        save_rows_ref(*rows, p, z, bias, self.index, self.schema.ratio)
        original(self, which, p, z, bias, *rest)

    return CompressedHandle, "maybe_flush_csa", maybe_flush_csa


def running_sums_are_saved_before_they_are_read() -> Patch:
    original = CompressedHandle.maybe_flush_hca

    def maybe_flush_hca(self: CompressedHandle, p: Any, z: Any, bias: Any, *rest: Any) -> None:
        running = self.state["top"], self.state["total"], self.state["mixed"]
        compressed_handle.save_running(*running, p, z, bias, self.index, self.schema.ratio)
        original(self, p, z, bias, *rest)

    return CompressedHandle, "maybe_flush_hca", maybe_flush_hca


def index_keys_are_left_out() -> Patch:
    original = CompressedHandle.maybe_flush_csa

    def maybe_flush_csa(self: CompressedHandle, which: str, *rest: Any) -> None:
        if which == "main":
            original(self, which, *rest)

    return CompressedHandle, "maybe_flush_csa", maybe_flush_csa


def the_window_lies_one_row_further() -> Patch:
    original = compressed_handle.append_window

    def append_window(*given: Any) -> None:
        *before, index = given[:8]
        original(*before, replace(index, positions=index.positions + 1), *given[8:])

    return compressed_handle, "append_window", append_window


def the_device_is_not_told_of_new_pages() -> Patch:
    original = PageTable.take

    def take(self: PageTable, slot: int, *rest: Any) -> None:
        known = slot in self.changed
        original(self, slot, *rest)
        if not known and self.held[slot].max() > 1:
            self.changed.discard(slot)

    return PageTable, "take", take


def the_device_is_not_told_of_a_fork() -> Patch:
    original = PageTable.share

    def share(self: PageTable, origin: int, slot: int) -> None:
        original(self, origin, slot)
        self.changed.discard(slot)

    return PageTable, "share", share


def a_fork_counts_no_owner() -> Patch:
    def share(self: PageTable, origin: int, slot: int) -> None:
        for array in (self.pages, self.held, self.lengths):
            array[slot] = array[origin]
        self.changed.add(slot)

    return PageTable, "share", share


def a_fork_starts_with_fresh_state() -> Patch:
    return StatePool, "copy", lambda self, source, target, query_buffers: None


def a_restore_forgets_the_state() -> Patch:
    return frozen, "restore_state", lambda *of: None


def a_reused_slot_keeps_its_state() -> Patch:
    return StatePool, "reset", lambda self, slot: None


def shared_pages_are_written() -> Patch:
    return PageTable, "shared", lambda self, slot, among: np.zeros(len(among), bool)


def a_copied_page_loses_its_index_keys() -> Patch:
    def copy_pages(self: PagedPool, source: Any, target: Any) -> None:
        t = self.tensors["entries"]
        t[:, target] = t[:, source]

    return PagedPool, "copy_pages", copy_pages


def tokens_are_taken_back_from_where_the_request_is() -> Patch:
    """Not from the furthest that it has been."""
    original = KVCacheManager.truncate_request

    def truncate_request(self: KVCacheManager, request: Any, position: int) -> None:
        slot = self._slot(request)
        self.reached[slot] = self.positions[slot]
        original(self, request, position)

    return KVCacheManager, "truncate_request", truncate_request


def tokens_taken_back_leave_their_entries_counted() -> Patch:
    original = KVCacheManager.truncate_request

    def truncate_request(self: KVCacheManager, request: Any, position: int) -> None:
        lengths = self.lengths(request)
        original(self, request, position)
        for name, n in lengths.items():
            self.tables[name].lengths[self._slot(request)] = np.minimum(
                n, self.tables[name].held[self._slot(request)] * 4
            )

    return KVCacheManager, "truncate_request", truncate_request


def padding_is_the_request_in_slot_0() -> Patch:
    original = manager.build_step

    def build_step(host: HostIndex, *rest: Any, **more: Any) -> ForwardStep:
        return original(replace(host, slots=np.maximum(host.slots, 0)), *rest, **more)

    return manager, "build_step", build_step


FAULTS = (
    entries_are_flushed_one_token_late,
    entries_lie_one_place_further,
    token_rows_are_saved_before_they_are_read,
    running_sums_are_saved_before_they_are_read,
    index_keys_are_left_out,
    the_window_lies_one_row_further,
    the_device_is_not_told_of_new_pages,
    the_device_is_not_told_of_a_fork,
    a_fork_counts_no_owner,
    a_fork_starts_with_fresh_state,
    a_restore_forgets_the_state,
    a_reused_slot_keeps_its_state,
    shared_pages_are_written,
    a_copied_page_loses_its_index_keys,
    tokens_are_taken_back_from_where_the_request_is,
    tokens_taken_back_leave_their_entries_counted,
    padding_is_the_request_in_slot_0,
)
NOTICED = (AssertionError, ValueError, IndexError, pytest.fail.Exception)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(fault: Callable[[], Patch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*fault())
    with pytest.raises(NOTICED):
        play(CompressedMachine, 100, 20, phases=[Phase.generate], report_multiple_bugs=False)
