"""Ranks that run the same engine after the same events: the answers of one process, and no step that differs."""

from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import ranks
import tiny
from long_form import LONG, more
from tiny_ranks import build

from hybridkv.parallel.group import Alone

GREEDY: dict[str, Any] = dict(max_tokens=14, temperature=0, ignore_eos=True)
LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lock_step")
    build("llama", 9).save_pretrained(place)
    return place


def prompts() -> list[list[int]]:
    return [tiny.token_ids(length, seed=length) for length in (3, 17, 40, 5, 80, 9, 33, 61)]


def alone(folder: Path, params: list[dict[str, Any]]) -> list[list[int]]:
    """Each prompt by itself, with all the room there is."""
    model, config, _ = rank_jobs.open_part(str(folder), Alone())
    engine = rank_jobs.engine_of(model, config, rank_jobs.CacheConfig(kv_dtype="f32"))
    found = []
    for prompt, given in zip(prompts(), params, strict=True):
        request = engine.add(prompt, rank_jobs.SamplingParams(**given))
        while not engine.idle:
            engine.step()
        found.append(request.generated)
    return found


def test_a_batch_answers_as_one_process_does_though_requests_are_preempted(folder: Path) -> None:
    params = [GREEDY] * 8
    found = ranks.run(2, "together", path=folder, prompts=prompts(), params=params, pages=7)
    assert found[0]["answers"] == alone(folder, params)
    assert found[0]["preempted"] == found[1]["preempted"] > 0
    assert found[0]["steps"] == found[1]["steps"] > 20


@pytest.mark.parametrize("ahead", (False, True))
def test_seeded_samples_and_adjusted_rows_are_those_of_one_process(ahead: bool, folder: Path) -> None:
    """Rank 0 draws; all ranks go on with its tokens. With steps launched ahead, before any host has seen them."""
    params = [
        GREEDY,
        dict(max_tokens=9, temperature=0.9, seed=3),
        dict(max_tokens=9, temperature=1.3, seed=4, top_k=7, top_p=0.9),
        dict(max_tokens=9, temperature=0, repetition_penalty=1.4),
        dict(max_tokens=9, temperature=0, logit_bias={5: 3.0}, min_tokens=4),
        dict(max_tokens=9, temperature=0, logprobs=3),
        dict(max_tokens=9, temperature=0.7, seed=8, min_p=0.05),
        dict(max_tokens=6, temperature=0, prompt_logprobs=1),
    ]
    found = ranks.run(2, "together", path=folder, prompts=prompts(), params=params, ahead=ahead)
    assert found[0]["answers"] == alone(folder, params)
    assert found[0]["ahead"] == found[1]["ahead"] and (found[0]["ahead"] > 10 if ahead else found[0]["ahead"] == 0)


def test_a_greedy_step_has_one_broadcast_one_exchange_and_one_gather(folder: Path) -> None:
    for rank in ranks.run(2, "together", path=folder, prompts=prompts()[:3], params=[GREEDY] * 3):
        steps = rank["steps"]
        assert rank["calls"]["all_reduce"] == steps * (2 * LAYERS + 1)
        assert rank["calls"]["all_gather_single"] == 2 * steps  # the digest, and the best tokens
        assert rank["calls"]["broadcast"] == steps + 1 and rank["calls"]["gather"] == 0  # and the end


@pytest.mark.long
@pytest.mark.parametrize(("seed", "ahead"), ((1, False), (3, True), *more((2, False))))
def test_random_events_never_part_the_ranks(seed: int, ahead: bool, folder: Path) -> None:
    found = ranks.run(2, "random_events", path=folder, seed=seed, events=10_000 if LONG else 250, ahead=ahead)
    assert found[0] == found[1] and found[0][0] > 60 and (found[0][1] > 20) == ahead


@pytest.mark.parametrize(
    ("how", "at"),
    (
        ("a shorter prompt", 1),
        pytest.param("a lost event", 1, marks=pytest.mark.slow),  # which is seen when an exchange has waited its time
        ("another graph", 1),
        ("another graph", 4),
    ),
)
def test_ranks_that_part_are_seen_before_the_step_runs(
    how: str, at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LIMIT", 5.0)
    _, codes, errors = ranks.attempt(2, "diverge", path=folder, how=how, at=at)
    assert codes == [1, 1]
    if how != "a lost event":
        assert "ranks [1] are about to run another step" in errors[0]
        assert all(f"rank {rank} was about to run [{at}, [0]" in said for rank, said in enumerate(errors))
        assert all(f"{at - 1} forward passes" in said for said in errors)
    assert all("GroupError" in said for said in errors)


def test_ranks_go_by_the_least_room_and_the_largest_need_of_any() -> None:
    assert ranks.run(3, "agree") == [[98, 7, 7]] * 3


def test_a_graph_is_had_by_all_ranks_or_by_none() -> None:
    for rank, said in enumerate(ranks.run(3, "vote", without=[-1, 1, -1, 2])):
        other = "rank {} has no memory for it, or could not record it"
        own = ["captured", other.format(1), "captured", other.format(2)]
        assert said == [vote if vote != other.format(rank) else "no memory here" for vote in own]


def test_all_ranks_take_the_graph_that_reaches_the_longest_stream_of_any(folder: Path) -> None:
    assert ranks.run(2, "longest", path=folder) == [1007, 1007]


def test_a_device_that_hangs_is_an_error_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LIMIT", 2.0)
    for rank, said in enumerate(ranks.run(2, "hang")):
        assert said == f"rank {rank} of 2: its device has waited 2 s for another rank, or hangs"


def test_the_best_tokens_of_all_parts_are_those_of_the_whole_row(folder: Path) -> None:
    for got, want in ranks.run(2, "best", path=folder):
        assert got[1] == want[1]  # which rows are broken
        assert [token for token, broken in zip(*got) if not broken] == [t for t, broken in zip(*want) if not broken]
