"""Requests that move between engines of one rank and of several: each goes on as it would have where it was."""

from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import ranks
from long_form import LONG, more
from moving_ranks import AFTER, BEFORE, CASES
from tiny_ranks import build

from hybridkv.parallel.group import Alone

SIZES = (1, 2, 4)
SOME = list(CASES) if LONG else list(CASES)[:2]
WAYS = [(a, b) for a in SIZES for b in SIZES] if LONG else [(1, 4), (4, 2), (2, 1)]


@pytest.fixture(scope="module", params=("qwen3_5", *more("llama")))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV heads, so that at four ranks each is on two; its tokens are bytes."""
    place = tmp_path_factory.mktemp("moving")
    build(request.param, 5, vocab_size=300).save_pretrained(place)
    return place


def on(size: int, model: Path, script: str, **given: Any) -> Any:
    """What rank 0 gives. At the end no rank holds anything."""
    given = {"path": str(model), "script": script, **given}
    found = [rank_jobs.moves(Alone(), **given)] if size == 1 else ranks.run(size, "moves", **given)
    for rank, (_, left) in enumerate(found):
        assert not any(left), f"rank {rank} holds slots, pages, caches: {left}"
    return found[0][0]


@pytest.mark.slow
def test_the_next_tokens_are_those_of_the_request_that_stayed(folder: Path, tmp_path: Path) -> None:
    """From any number of ranks to any other: tokens and their logprobs, bit for bit (64 of them in the long form)."""
    want = {}
    for size in SIZES:
        (tmp_path / str(size)).mkdir()
        want[size] = on(size, folder, "leave", folder=str(tmp_path / str(size)), cases=SOME)
        assert all(answer[1] == "length" and len(answer[2]) == BEFORE + AFTER for _, answer in want[size].values())
    assert len({tuple(answer[2]) for _, answer in want[1].values()}) == len(SOME)
    for source, size in WAYS:
        found = on(size, folder, "arrive", folder=str(tmp_path / str(source)), cases=SOME)
        assert found == want[source], f"{source} -> {size}"


@pytest.mark.parametrize("script", ("wherever", "code", "full", "preempted"))
def test_what_moves_on_one_rank_moves_over_two_in_the_same_way(script: str, folder: Path) -> None:
    assert on(2, folder, script) == on(1, folder, script)


def test_what_is_refused_leaves_the_group_alive_and_takes_nothing(folder: Path) -> None:
    for size in (1, 2):
        said, want, found = on(size, folder, "refusals")
        for words, problem in said.items():
            whose = words.startswith("1: ") and size == 2  # rank 0 only hears of it
            assert ("does not fit the part of rank 1" if whose else words.split(": ")[-1]) in problem
        assert found == want and len(said) >= 14


@pytest.mark.slow
def test_requests_that_move_again_and_again_leave_nothing_behind(folder: Path) -> None:
    given = {"seed": 3, "events": 1500 if LONG else 150}
    one, two = on(1, folder, "storm", **given), on(2, folder, "storm", **given)
    assert one[0] > given["events"] // 10 and one[0] == two[0]
