"""Columns and states on the host under random use, and proof that faults in copies and their order are found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cache.host_machine import HostMachine
from cache.late_tier import LateTier
from cache.test_reuse import Patch, search, search_until
from hybridkv.cache import lookup as lookup_file
from hybridkv.cache import schema as schema_file
from hybridkv.cache.checkpoints import Checkpoint
from hybridkv.cache.columns import Column
from hybridkv.cache.host_columns import HostColumns, Load
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier
from hybridkv.errors import HybridKVError

AT_LEAST = {
    "steps": 200, "hits": 20, "loads": 10, "columns loaded": 15, "states loaded": 5, "loads that failed": 2,
    "went to the host": 8, "copies seen": 30, "states seen": 20, "room on the host": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_file, "SCAN", 4)


def test_random_use_with_a_host_agrees_with_what_tokens_give() -> None:
    search_until(25, AT_LEAST, HostMachine)


class RoundedHostMachine(HostMachine):
    """Checkpoints are in bf16, on the device and there."""

    rounds = True


@pytest.mark.slow
def test_random_use_of_rounded_checkpoints_with_a_host_agrees_with_what_tokens_give() -> None:
    search_until(12, {"hits": 8, "loads": 4, "states loaded": 2, "states seen": 8}, RoundedHostMachine)


def test_a_rounded_state_that_comes_back_into_another_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, patched = a_state_comes_back_into_another_row()
    monkeypatch.setattr(where, name, patched)
    with pytest.raises(Exception):  # noqa: B017  # whatever it breaks
        search(900, machine=RoundedHostMachine)


# ---- planted faults

COPY, PUT, FORGET = HostColumns._copy, HostColumns._put, HostColumns.forget


def a_page_is_given_away_before_its_copy() -> Patch:
    def put(self: HostColumns, group: list[Column], ids: np.ndarray) -> None:
        for pool, places, part in self._views(torch.zeros(len(ids), self.each * BLOCK, dtype=torch.uint8), ids):
            pool[:, places] = part.flatten(1, 2)  # whoever has it next writes there
        PUT(self, group, ids)

    return HostColumns, "_put", put


def a_row_is_given_away_before_its_copy() -> Patch:
    def down(self: LateTier, chunk: torch.Tensor, ids: np.ndarray, at: int) -> None:
        self.late.append((chunk, ids.copy(), at))  # what lies in the row when its turn comes

    return LateTier, "_down", down


def a_state_comes_back_into_another_row() -> Patch:
    def copy(self: HostColumns, load: Load, ids: np.ndarray, row: int) -> None:
        first, rows = self.reuse.checkpoints.first, self.reuse.checkpoints.rows
        COPY(self, load, ids, first + (row - first + 1) % rows if row >= 0 else row)

    return HostColumns, "_copy", copy


def pages_come_back_in_another_order() -> Patch:
    return HostColumns, "_copy", lambda self, load, ids, row: COPY(self, load, ids[::-1].copy(), row)


def columns_are_there_before_they_are_copied() -> Patch:
    return HostColumns, "_copy", lambda self, load, ids, row: None


def what_is_late_is_not_waited_for() -> Patch:
    return LateTier, "_up", HostTier._up


def a_dropped_column_leaves_its_copy() -> Patch:
    def forget(self: HostColumns, column: Column) -> None:
        kept = column.host
        FORGET(self, column)
        if kept is not None and self.reuse.q == column.end:
            self.reuse.columns.root(b"").children.setdefault(column.key, column)  # found again, with blocks of nobody
            column.host = kept

    return HostColumns, "forget", forget


def a_dropped_column_keeps_its_blocks() -> Patch:
    return HostColumns, "_drop_copy", lambda self, column: None


def a_dropped_state_keeps_its_blocks() -> Patch:
    def forget(self: HostColumns, column: Column) -> None:
        self._drop_copy(column)
        self.states.pop(column, None)

    return HostColumns, "forget", forget


def what_is_read_again_keeps_its_old_copy() -> Patch:
    return HostColumns, "renew", lambda self, column: None


def a_load_that_fails_keeps_its_pages() -> Patch:
    def copy(self: HostColumns, load: Load, ids: np.ndarray, row: int) -> None:
        try:
            COPY(self, load, ids, row)
        except HybridKVError:
            return

    return HostColumns, "_copy", copy


def what_cannot_be_copied_stays() -> Patch:
    return HostColumns, "_lose", lambda self, load: None


def a_load_makes_room_at_its_own_cost() -> Patch:
    LOAD = HostColumns.load

    def load(self: HostColumns, what: Load) -> object:
        columns = self.reuse.columns
        columns.occupy = lambda column, before=None: None  # type: ignore[method-assign]
        columns.leave = lambda column: None  # type: ignore[method-assign]
        try:
            return LOAD(self, what)
        finally:
            del columns.occupy, columns.leave

    return HostColumns, "load", load


def a_trial_goes_to_the_host() -> Patch:
    return Checkpoint, "on_trial", False  # type: ignore[return-value]


def columns_leave_before_those_below_them() -> Patch:
    def droppable(self: Column) -> bool:
        return not (self.live or self.covers or self.gone) and self.pages is not None

    return Column, "droppable", property(droppable)  # type: ignore[return-value]


def columns_that_no_state_needs_go_to_the_host() -> Patch:
    return HostColumns, "takes", lambda self, column: self.is_on and not self.reuse.columns.is_tail(column)


def a_tail_goes_to_the_host() -> Patch:
    return HostColumns, "takes", lambda self, column: self.is_on and (column.kept > 0 or not self.reuse.has_state)


def a_lookup_takes_columns_on_the_host_for_pages() -> Patch:
    return lookup_file, "on_device", lambda path: path  # type: ignore[return-value]


def an_interrupt_forgets_what_is_on_the_host() -> Patch:
    return HostColumns, "blocks", lambda self: []


FAULTS = [
    a_page_is_given_away_before_its_copy, a_row_is_given_away_before_its_copy, a_state_comes_back_into_another_row,
    pages_come_back_in_another_order, columns_are_there_before_they_are_copied, what_is_late_is_not_waited_for,
    a_dropped_column_leaves_its_copy, a_dropped_column_keeps_its_blocks, a_dropped_state_keeps_its_blocks,
    what_is_read_again_keeps_its_old_copy, a_load_that_fails_keeps_its_pages, what_cannot_be_copied_stays,
    a_load_makes_room_at_its_own_cost, a_trial_goes_to_the_host, columns_leave_before_those_below_them,
    columns_that_no_state_needs_go_to_the_host, a_tail_goes_to_the_host,
    a_lookup_takes_columns_on_the_host_for_pages, an_interrupt_forgets_what_is_on_the_host,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[], Patch], monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, patched = fault()
    monkeypatch.setattr(where, name, patched)
    with pytest.raises(Exception):  # noqa: B017  # whatever it breaks
        search(900, machine=HostMachine)
