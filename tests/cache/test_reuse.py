"""Random use of reuse against the function in `reuse_machine.py`, and proof that it finds faults others have made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache import reuse_machine
from cache.reuse_machine import ReuseMachine
from hybridkv.cache import KVCacheManager, PageAllocator, StatePool
from hybridkv.cache import schema as schema_file
from hybridkv.cache.checkpoints import Checkpoints
from hybridkv.cache.column_pages import ColumnPages
from hybridkv.cache.columns import Column, Columns
from hybridkv.cache.manager import PageTable
from hybridkv.cache.publishing import Publishing, Staged
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.schema import CacheSchema, StateSchema, StreamSchema, TensorSpec
from hybridkv.errors import HybridKVError

AT_LEAST = {
    "steps": 200, "hits": 20, "replays": 2, "forks": 10, "compactions": 3, "steps that failed": 4, "shortages": 15,
    "checkpoints seen": 30, "cold": 10, "diverged": 3, "no_checkpoint": 1, "full": 3, "forgotten": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_file, "SCAN", 4)


def search(examples: int, steps: int = 40, machine: type[ReuseMachine] = ReuseMachine) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, derandomize=True, deadline=None,
            phases=(Phase.generate,), print_blob=False,
        ),
    )  # fmt: skip


def search_until(examples: int, at_least: dict[str, int], machine: type[ReuseMachine] = ReuseMachine) -> None:
    """What is drawn depends on the modules that are loaded. Where something rare did not come, more is drawn."""
    for more in (1, 2, 4):
        reuse_machine.counts.clear()
        search(examples * more, machine=machine)
        rare = {what: reuse_machine.counts[what] for what, n in at_least.items() if reuse_machine.counts[what] < n}
        if not rare:
            return
    pytest.fail(f"hardly ever happened: {rare}; all: {reuse_machine.counts}")


def test_random_use_agrees_with_what_tokens_give() -> None:
    search_until(80, AT_LEAST)


class RoundedMachine(ReuseMachine):
    """Checkpoints are in bf16."""

    rounds = True


def test_random_use_of_rounded_checkpoints_agrees_with_what_tokens_give() -> None:
    few = ("hits", "replays", "steps that failed", "shortages", "checkpoints seen")
    search_until(25, {what: -(-AT_LEAST[what] // 4) for what in few}, RoundedMachine)


# ---- planted faults

Patch = tuple[type, str, Callable[..., Any]]
STAGE, COPY, PUBLISH, FRESH = Reuse.stage, StatePool.copy, Reuse.publish, KVCacheManager.attach_request


def a_state_is_not_copied_to_the_request() -> Patch:
    def copy(self: StatePool, source: int, target: int, query_buffers: tuple[int, int] = (-1, -1)) -> None:
        if source < self.slots:
            COPY(self, source, target, query_buffers)

    return StatePool, "copy", copy


def a_state_is_not_copied_from_the_request() -> Patch:
    def copy(self: StatePool, source: int, target: int, query_buffers: tuple[int, int] = (-1, -1)) -> None:
        if target < self.slots:
            COPY(self, source, target, query_buffers)

    return StatePool, "copy", copy


def a_row_is_given_out_twice() -> Patch:
    def reserve(self: Checkpoints) -> int | None:
        row = self.first
        self.all.pop(row, None)
        self.reserved.add(row)
        return row

    return Checkpoints, "reserve", reserve


def what_failed_is_published() -> Patch:
    def publish(self: Reuse, failed: Iterable[Any] = ()) -> None:
        self.discard = lambda request: None  # type: ignore[method-assign]
        PUBLISH(self)

    return Reuse, "publish", publish


def columns_enter_before_their_step() -> Patch:
    def until(self: Reuse, request: Any, position: int, tokens: int) -> int:
        reading = self.readings[request]
        slot = self.manager.slot_of[request]
        self.manager.positions[slot] += tokens
        try:
            STAGE(self, request, [*np.frombuffer(reading.keys, np.int32).tolist(), *[90] * 60])
            PUBLISH(self)
        finally:
            self.manager.positions[slot] -= tokens
        return tokens

    return Reuse, "until_stop", until


def salts_are_left_out() -> Patch:
    MATCH = Columns.match
    return Columns, "match", lambda self, salt, keys, tokens: MATCH(self, b"", keys, tokens)


def a_lookup_is_a_column_short() -> Patch:
    MATCH = Columns.match
    return Columns, "match", lambda self, salt, keys, tokens: MATCH(self, salt, keys, tokens)[:-1]


def a_lookup_reads_one_token_too_few() -> Patch:
    MATCH = Columns.match

    def match(self: Columns, salt: bytes, keys: bytes, tokens: int) -> list[Column]:
        found = MATCH(self, salt, keys, tokens)
        below = found[-1].children if found else {}
        return [*found, *list(below.values())[:1]]

    return Columns, "match", match


def the_deepest_checkpoint_is_not_asked_for() -> Patch:
    DEEPEST = Checkpoints.deepest
    return Checkpoints, "deepest", staticmethod(lambda path, most: DEEPEST(path[:-1], most))  # type: ignore[return-value]


def a_hit_covers_the_whole_prompt() -> Patch:
    DEEPEST = Checkpoints.deepest
    return Checkpoints, "deepest", staticmethod(lambda path, most: DEEPEST(path, 10**9))  # type: ignore[return-value]


def shared_pages_are_written() -> Patch:
    def attach(self: KVCacheManager, request: Any, pages: Any, tokens: int, position: int, row: int = -1) -> int:
        slot = FRESH(self, request, pages, tokens, position, row)
        self.fresh[slot] = position
        return slot

    return KVCacheManager, "attach_request", attach


def columns_count_no_owner() -> Patch:
    return ColumnPages, "own", lambda self, pages: None


def a_dropped_column_keeps_its_pages() -> Patch:
    return ColumnPages, "disown", lambda self, pages: None


def a_request_that_leaves_is_not_forgotten() -> Patch:
    return Reuse, "leave", lambda self, request: self.readings.pop(request, None)


def columns_with_a_checkpoint_are_dropped() -> Patch:
    droppable = property(lambda self: not (self.children or self.live or self.gone) and self.parent is not None)
    return Column, "droppable", droppable  # type: ignore[return-value]


def what_was_compacted_enters() -> Patch:
    def stage(self: Reuse, request: Any, tokens: Sequence[int]) -> None:
        self.part = lambda request: None  # type: ignore[method-assign]
        before, self.manager.compactions = self.manager.compactions, {}
        try:
            STAGE(self, request, tokens)
        finally:
            self.manager.compactions = before

    return Reuse, "stage", stage


def a_checkpoint_is_of_the_column_before() -> Patch:
    ADD = Checkpoints.add

    def add(self: Checkpoints, column: Column, row: int, kind: Any) -> Any:
        assert column.parent is not None
        return ADD(self, column.parent if column.parent.parent is not None else column, row, kind)

    return Checkpoints, "add", add


def a_checkpoint_is_never_given_up() -> Patch:
    return Checkpoints, "give_way", lambda self: False


def an_abandoned_step_keeps_its_row() -> Patch:
    def abandon(self: Publishing, staged: Staged) -> None:
        for pages in staged.pages:
            self.pages.disown(pages)

    return Publishing, "_abandon", abandon


def a_fork_does_not_live_anywhere() -> Patch:
    return Reuse, "fork", lambda self, source, request: None


def an_interrupt_forgets_columns() -> Patch:
    REBUILD = PageTable.rebuild
    return PageTable, "rebuild", lambda self, free, spare=None: REBUILD(self, free)


def pages_to_be_had_are_overcounted() -> Patch:
    return PageAllocator, "reclaimable", property(lambda self: int((self.spare > 0).sum()))  # type: ignore[return-value]


def what_is_rounded_is_not_copied() -> Patch:
    def copy(self: StatePool, source: int, target: int, query_buffers: tuple[int, int] = (-1, -1)) -> None:
        rows = self.rows(source)
        for key, row in self.rows(target).items():
            if row.dtype == rows[key].dtype:
                row.copy_(rows[key])

    return StatePool, "copy", copy


def a_rounded_row_is_that_of_the_slot() -> Patch:
    ROW = StatePool._row

    def found(self: StatePool, key: tuple[str, str], row: int) -> torch.Tensor:
        return self.tensors[key][:, row % self.slots] if key in self.rounded else ROW(self, key, row)

    return StatePool, "_row", found


ROUNDED_FAULTS = [
    what_is_rounded_is_not_copied, a_rounded_row_is_that_of_the_slot, a_state_is_not_copied_to_the_request,
    a_state_is_not_copied_from_the_request, a_row_is_given_out_twice, a_checkpoint_is_of_the_column_before,
]  # fmt: skip
FAULTS = [
    a_state_is_not_copied_to_the_request, a_state_is_not_copied_from_the_request, a_row_is_given_out_twice,
    what_failed_is_published, columns_enter_before_their_step, salts_are_left_out, a_lookup_is_a_column_short,
    a_lookup_reads_one_token_too_few, the_deepest_checkpoint_is_not_asked_for, a_hit_covers_the_whole_prompt,
    shared_pages_are_written, columns_count_no_owner, a_dropped_column_keeps_its_pages,
    a_request_that_leaves_is_not_forgotten,
    columns_with_a_checkpoint_are_dropped, what_was_compacted_enters, a_checkpoint_is_of_the_column_before,
    a_checkpoint_is_never_given_up, an_abandoned_step_keeps_its_row, a_fork_does_not_live_anywhere,
    an_interrupt_forgets_columns, pages_to_be_had_are_overcounted,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[], Patch], monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, patched = fault()
    monkeypatch.setattr(where, name, patched)
    with pytest.raises(Exception):  # noqa: B017  # whatever it breaks
        search(900)


# ---- sizes


@pytest.mark.parametrize("fault", ROUNDED_FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_of_rounded_checkpoints_is_found(
    fault: Callable[[], Patch], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, patched = fault()
    monkeypatch.setattr(where, name, patched)
    with pytest.raises(Exception):  # noqa: B017  # whatever it breaks
        search(900, machine=RoundedMachine)


def test_pages_that_never_fill_together_are_refused() -> None:
    kv = TensorSpec("k", (2,), "float32")
    odd = CacheSchema((StreamSchema("a", (0,), (kv,), 67), StreamSchema("b", (1,), (kv,), 63)))
    with pytest.raises(HybridKVError, match="only every 4221 tokens"):
        schema_file.check_column(odd)
    state = StateSchema("s", (0,), (kv,))
    assert schema_file.column_tokens(CacheSchema((StreamSchema("a", (1,), (kv,), 6),), (state,))) == 12
    with pytest.raises(ValueError, match="without rows"):
        Reuse(KVCacheManager(CacheSchema((StreamSchema("a", (1,), (kv,), 6),)), {"a": 4}, 1, 24))
