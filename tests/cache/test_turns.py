"""Random use with turns that end and texts that are pinned, and proof that faults in these are found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from cache.test_reuse import Patch, search_until
from cache.turns_machine import TurnsMachine
from hybridkv.cache import lookup as lookup_file
from hybridkv.cache import pins as pins_file
from hybridkv.cache import reuse as reuse_file
from hybridkv.cache import schema as schema_file
from hybridkv.cache import tails as tails_file
from hybridkv.cache.checkpoints import Checkpoints
from hybridkv.cache.columns import Column, Columns
from hybridkv.cache.manager import PageTable
from hybridkv.cache.pins import Pin
from hybridkv.cache.publishing import Publishing
from hybridkv.cache.reuse import Reuse

AT_LEAST = {
    "steps": 200, "hits": 20, "pins": 8, "ends of turns": 12, "ends of turns taken up": 3, "ends in doubt": 10,
    "states dropped": 10, "forgotten": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_file, "SCAN", 4)


@pytest.mark.slow
def test_random_turns_agree_with_what_tokens_give() -> None:
    search_until(40, AT_LEAST, TurnsMachine)


# ---- planted faults

KEEP_END, FIND_TAIL = tails_file.keep_end, tails_file.find_tail
OCCUPY, RESERVE = Columns.occupy, Checkpoints.reserve


def an_open_page_is_shared_without_a_copy() -> Patch:
    return PageTable, "shared", lambda self, slots, among: np.zeros(among.shape, bool)


def the_end_of_a_turn_covers_the_whole_prompt() -> Patch:
    FIND = lookup_file.find_tail
    return (
        lookup_file,
        "find_tail",
        lambda reuse, salt, path, keys, most, after: FIND(  # type: ignore[return-value]
            reuse, salt, path, keys, len(keys) // 4, after
        ),
    )


def the_end_of_a_turn_is_a_token_short() -> Patch:
    def end(reuse: Reuse, request: Any, tokens: Sequence[int], ended: Any = None) -> bool:
        slot = reuse.manager.slot_of[request]
        reuse.manager.reached[slot] = reuse.manager.positions[slot]
        return KEEP_END(reuse, request, tokens, ended)

    return tails_file, "keep_end", end  # type: ignore[return-value]


def the_end_of_a_turn_is_a_token_long() -> Patch:
    STAGE_TAIL = tails_file.stage_tail

    def stage(reuse: Reuse, request: Any, reading: Any, tokens: Sequence[int], end: int, ended: Any) -> bool:
        return STAGE_TAIL(reuse, request, reading, [*tokens, 90], end + 1, ended)

    return tails_file, "stage_tail", stage  # type: ignore[return-value]


def a_step_in_flight_is_not_waited_for() -> Patch:
    HOLD = Publishing.hold_back
    return Publishing, "hold_back", lambda self, *what: HOLD(self, *what[:-1], None)


def an_end_without_its_state_is_a_hit() -> Patch:
    def find(reuse: Reuse, *where: Any) -> Column | None:
        before, reuse.has_state = reuse.has_state, False
        try:
            return FIND_TAIL(reuse, *where)
        finally:
            reuse.has_state = before

    return lookup_file, "find_tail", find  # type: ignore[return-value]


def what_waits_for_a_step_keeps_its_pages() -> Patch:
    def settle(self: Publishing) -> None:
        while self.late:
            self.late.pop()

    return Publishing, "settle_late", settle


def pinned_columns_are_dropped() -> Patch:
    def count(self: Columns, column: Column, before: Column | None = None) -> None:
        caller = sys._getframe(1).f_code.co_name
        if caller != "pin":
            OCCUPY(self, column, before)

    return Columns, "occupy", count


def a_pinned_state_is_dropped() -> Patch:
    def reserve(self: Checkpoints) -> int | None:
        pinned = [checkpoint for checkpoint in self.all.values() if checkpoint.pins]
        if pinned and not self._free:
            self.drop(pinned[0], "rows")
        return RESERVE(self)

    return Checkpoints, "reserve", reserve


def a_pin_owns_no_pages() -> Patch:
    return Pin, "pages", lambda self, reuse, name: np.zeros(0, np.int32)


def more_than_half_is_pinned() -> Patch:
    return pins_file, "may_pin", lambda pinned, more, capacity: True  # type: ignore[return-value]


def a_failure_takes_what_is_pinned() -> Patch:
    return reuse_file, "first_unpinned", lambda reuse, path: path[0] if path else None  # type: ignore[return-value]


FAULTS = [
    an_open_page_is_shared_without_a_copy,
    the_end_of_a_turn_covers_the_whole_prompt,
    the_end_of_a_turn_is_a_token_short,
    the_end_of_a_turn_is_a_token_long,
    a_step_in_flight_is_not_waited_for,
    an_end_without_its_state_is_a_hit,
    what_waits_for_a_step_keeps_its_pages,
    pinned_columns_are_dropped,
    a_pinned_state_is_dropped,
    a_pin_owns_no_pages,
    more_than_half_is_pinned,
    a_failure_takes_what_is_pinned,
]


def play(stateful: bool) -> None:
    """A few turns by hand: each fault shows in them, and nothing does without one."""
    m = TurnsMachine()
    m.build(160, stateful)

    def then(act: Callable[..., object], *how: object) -> None:
        act(*how)
        m.check()

    then(m.turn, [0, 1], 3, b"", 0, "no")
    then(m.next_turn, 0, 0, 0, "runs")  # the same prompt again: its last token is computed
    then(m.next_turn, 0, 1, 0, "runs")
    then(m.next_turn, 0, 9, 0, "ends")
    then(m.turn, [1, 1], 3, b"", 0, "well")
    then(m.next_turn, 0, 9, 0, "runs")
    then(m.turn, [1, 0], 5, b"", 0, "nan")
    then(m.next_turn, 0, 1, 0, "runs")
    then(m.turn, [1, 0, 1], 5, b"", 0, "no")
    while m.r.checkpoints.all:
        then(m.lose, 0)
    for which in range(4):  # no end has its state
        then(m.next_turn, which, 1, 0, "runs")
    m.r.forget()
    then(m.read, [0, 0, 1], 3, b"", 31, 1, 8, "stays")
    for which in range(4):
        then(m.pin, 4 * which, False)
    for which in range(1, 4):
        then(m.pin, which, False)
    assert m.pins, "nothing is pinned"
    then(m.read, [0, 0, 1, 1], 3, b"", 0, 1, 40, "nan")  # what is pinned stays
    then(m.read, [1, 0, 1], 3, b"", 31, 1, 8, "stays")  # rows are short
    while m.live:
        then(m.release, 0)
    then(m.trouble, "kv", 4)
    then(m.interrupt)
    then(m.turn, [1, 0], 5, b"", 0, "well")
    then(m.interrupt)
    m.teardown()


@pytest.mark.parametrize("stateful", [False, True])
def test_turns_by_hand_agree_with_what_tokens_give(stateful: bool) -> None:
    play(stateful)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[], Patch], monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, patched = fault()
    monkeypatch.setattr(where, name, patched)
    with pytest.raises(Exception):  # noqa: B017  # whatever it breaks
        for stateful in (True, False):
            play(stateful)
