"""Random use of the cache against the model in `machine.py`, and proof that the interesting things took place."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from long_form import LONG

from cache import machine

AT_LEAST = {
    "steps": 333,
    "steps with several requests": 100,
    "forks": 66,
    "copies on write": 66,
    "out of pages": 100,
    "preemptions": 66,
    "preemptions recomputed in full": 33,
    "releases": 66,
    "truncations": 13,
    "truncation refused": 33,
    "retry": 10,
    "abandon": 8,
    "slots are full": 16,
    "too long": 8,
    "already resident": 33,
    "compactions": 66,
    "compactions of shared pages": 16,
    "compactions that give pages back": 33,
    "compactions from lists on the device": 16,
    "compactions of shared pages on the device": 8,
    "no pages to compact into": 8,
    "forks of compacted requests": 8,
    "restores": 33,
    "restores of compacted requests": 10,
    "no pages to restore into": 8,
}


@pytest.mark.long
@pytest.mark.slow
def test_random_use_agrees_with_the_model() -> None:
    machine.counts.clear()
    run_state_machine_as_test(
        machine.CacheMachine,
        settings=settings(max_examples=200 if LONG else 100, stateful_step_count=50, derandomize=True, deadline=None),
    )
    share = 1 if LONG else 8  # the rarest of all comes once or twice in the short form
    rare = {what: machine.counts[what] for what, n in AT_LEAST.items() if machine.counts[what] < n // share}
    assert not rare, f"rules that hardly ran: {rare}; all: {machine.counts}"
