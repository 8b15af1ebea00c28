"""The routing simulation: the same by seed, right where it can be computed by hand, and its curves in their order."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "routing.py"


@pytest.fixture(scope="module")
def routing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("routing", BENCH)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["routing"] = found
    spec.loader.exec_module(found)
    return found


def test_reading_takes_what_was_measured(routing: ModuleType) -> None:
    for tokens, seconds in routing.READ:
        assert routing.read_seconds(tokens) == pytest.approx(seconds)
    assert routing.read_seconds(16384, 2.0) == pytest.approx(2.66) and routing.read_seconds(9216) == pytest.approx(
        0.7425
    )


def test_a_held_conversation_reads_what_is_new_and_a_queue_is_waited_for(routing: ModuleType) -> None:
    state = routing.Replicas(routing.POLICIES[1], 1, 1)
    first, other = (routing.Talk(number, 8, False, 0) for number in (1, 2))
    assert state.turn(0.0, first, 16384) == pytest.approx(1.330)
    assert state.turn(1.0, other, 2048) == pytest.approx(0.33 + 0.155)  # behind the rest of the first
    before = 16384 + routing.ANSWER_TOKENS
    want = routing.read_seconds(before + 1000) - routing.read_seconds(before)
    assert state.turn(10.0, first, 1000) == pytest.approx(want) and state.found == 1
    state.held[0].clear()
    assert state.turn(20.0, first, 1000) == pytest.approx(routing.read_seconds(first.tokens - routing.ANSWER_TOKENS))


def test_room_and_loss_cost_what_is_read_again(routing: ModuleType) -> None:
    state = routing.Replicas(routing.POLICIES[1]._replace(held=1), 2, 1)
    first, other = (routing.Talk(number, 8, False, 0) for number in (1, 2))
    for number, talk in enumerate((first, other, first)):  # each drives the other out
        state.turn(100.0 * number, talk, 5000)
    assert state.found == 0
    state.turn(400.0, first, 5000)
    assert state.found == 1
    state.lose(0.5)
    [dead] = state.dead
    first.home = dead
    state.turn(500.0, first, 10)
    assert first.home == 1 - dead and state.found == 1


def test_a_conversation_is_moved_where_that_is_sooner(routing: ModuleType) -> None:
    times = []
    for policy in routing.POLICIES[2:]:
        state, talk = routing.Replicas(policy, 2, 3), routing.Talk(1, 8, False, 0)
        state.turn(0.0, talk, 4000)
        state.free_at[0] = 30.0
        state.lighter = lambda: 1
        times.append(state.turn(10.0, talk, 100))
        assert state.moved == policy.moves and state.found == 1
    assert times[0] > 20.0 > 0.3 > times[1] >= routing.MOVE_SECONDS


def test_the_same_seed_gives_the_same_lines_and_curves_lie_in_order() -> None:
    command = [sys.executable, BENCH, "--replicas", "20", "--minutes", "3", "--rates", "0.8", "--seed", "5"]
    runs = [subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1]
    found = json.loads(runs[0].splitlines()[-1])
    p99 = {row["policy"]: row["p99"] for row in found["rows"]}
    ordered = [p99[name] for name in ("two choices, no affinity", "session hash", "and evicted", "and moved")]
    assert ordered == sorted(ordered, reverse=True) and ordered[0] > 3 * ordered[1]
    assert len(found["lost"]) == 3 and len(found["wrong"]) == 4
