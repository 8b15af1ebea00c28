"""Requests on the host under random use, and proof that faults are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cache.away_machine import AwayMachine
from cache.late_tier import LateTier
from cache.test_reuse import search, search_until
from hybridkv.cache import away
from hybridkv.cache import schema as schema_file
from hybridkv.cache.tiers import HostTier

AT_LEAST = {
    "steps": 50, "sent away": 10, "sent without shared pages": 2, "came back": 6, "came back to columns": 1,
    "could not come back": 1, "stayed": 1, "compactions": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_file, "SCAN", 4)


@pytest.mark.slow
def test_random_use_with_requests_that_come_back_agrees_with_what_tokens_give() -> None:
    search_until(10, AT_LEAST, AwayMachine)


# ---- planted faults

SENT, TAKE, BRING = away._sent, away._take_pages, away.bring_back


def a_column_more_is_left_out(manager: Any, slot: int, begin: int) -> Any:
    return SENT(manager, slot, begin and begin + 8)


def the_first_pages_come_back_in_another_order(manager: Any, slot: int, taken: Any, path: Any) -> Any:
    return [ids[::-1].copy() for ids in TAKE(manager, slot, taken, path)]


def the_state_does_not_come_back(*args: Any) -> None:
    pass


def its_blocks_are_not_given_back(manager: Any, request: Any) -> None:
    gone = manager.away.pop(request)
    if gone.column is not None and not gone.column.gone:
        manager.reuse.columns.leave(gone.column)


def the_column_is_not_left(manager: Any, request: Any) -> None:
    for blocks in manager.away.pop(request).blocks:
        manager.host.drop(blocks)


def survivors_are_forgotten(manager: Any, request: Any, path: Any) -> int:
    manager.away[request] = replace(manager.away[request], compaction=None)
    return BRING(manager, request, path)


FAULTS: dict[str, Callable] = {
    "_sent": a_column_more_is_left_out,
    "_take_pages": the_first_pages_come_back_in_another_order,
    "restore_state": the_state_does_not_come_back,
    "drop_away": its_blocks_are_not_given_back,
    "drop_away ": the_column_is_not_left,
    "bring_back": survivors_are_forgotten,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cache.away_machine as machine
    from hybridkv.cache import manager

    for module in (away, machine, manager):
        if hasattr(module, what.strip()):
            monkeypatch.setattr(module, what.strip(), FAULTS[what])
    with pytest.raises(Exception):  # noqa: B017
        search(900, machine=AwayMachine)


@pytest.mark.slow
def test_what_is_late_and_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateTier, "_up", HostTier._up)
    with pytest.raises(AssertionError):
        search(900, machine=AwayMachine)
