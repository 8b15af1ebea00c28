"""Random use of the cache against the model in `machine.py`, and proof that the interesting things took place."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from cache import machine

AT_LEAST = {
    "steps": 1000,
    "steps with several requests": 300,
    "forks": 200,
    "copies on write": 200,
    "out of pages": 300,
    "preemptions": 200,
    "preemptions recomputed in full": 100,
    "releases": 200,
    "truncations": 40,
    "truncation refused": 100,
    "retry": 30,
    "abandon": 20,
    "slots are full": 50,
    "too long": 20,
    "already resident": 100,
    "compactions": 200,
    "compactions of shared pages": 50,
    "compactions that give pages back": 100,
    "no pages to compact into": 5,
    "forks of compacted requests": 20,
    "restores": 100,
    "restores of compacted requests": 30,
    "no pages to restore into": 20,
}


def test_random_use_agrees_with_the_model() -> None:
    machine.counts.clear()
    run_state_machine_as_test(
        machine.CacheMachine,
        settings=settings(max_examples=200, stateful_step_count=50, derandomize=True, deadline=None),
    )
    rare = {what: machine.counts[what] for what, n in AT_LEAST.items() if machine.counts[what] < n}
    assert not rare, f"rules that hardly ran: {rare}; all: {machine.counts}"
