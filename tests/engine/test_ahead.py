"""The next step is prepared while one runs: used if all goes on as it is, forgotten otherwise, and never seen."""

from collections.abc import Callable

import pytest

from engine.driving import KINDS, alone, assert_nothing_held, prompt, run
from hybridkv.cache import ForwardStep
from hybridkv.cache.snapshot import snapshot_request
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.pipeline import SURE
from hybridkv.engine.sampler import SampledTokens
from hybridkv.errors import RequestError
from hybridkv.request import Request


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0)


def watch(engine: Engine) -> tuple[list[ForwardStep], list[ForwardStep]]:
    """(steps that were prepared ahead, steps that ran)."""
    prepared: list[ForwardStep] = []
    ran: list[ForwardStep] = []
    prepare, forward = engine.pipeline.prepare_next, engine.runner.forward

    def prepare_next() -> None:
        prepare()
        if engine.pipeline.prepared is not None:
            prepared.append(engine.pipeline.prepared.step)

    def forward_(inputs: object) -> object:
        ran.append(inputs.step)  # type: ignore[attr-defined]
        return forward(inputs)  # type: ignore[arg-type]

    engine.pipeline.prepare_next = prepare_next  # type: ignore[method-assign]
    engine.runner.forward = forward_  # type: ignore[method-assign,assignment]
    return prepared, ran


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_answer_runs_on_steps_prepared_ahead(kind: str, engine_of: Callable) -> None:
    engine = engine_of(kind)
    prepared, ran = watch(engine)
    answer = alone(engine, prompt(20), greedy(10)).generated
    assert len(answer) == 10 and len(ran) == 10
    assert [any(step is other for other in prepared) for step in ran] == [False, False] + [True] * 8
    forgetful = engine_of(kind)
    forgetful.pipeline.prepare_next = lambda: None  # type: ignore[method-assign]
    assert alone(forgetful, prompt(20), greedy(10)).generated == answer
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_ends_or_joins_makes_it_another_step(kind: str, engine_of: Callable) -> None:
    """Answers of different lengths, and one that is asked for while others decode: each as if alone."""
    asked = [(prompt(10 + 7 * i, seed=i), greedy(4 + 3 * i)) for i in range(4)]
    want = [alone(engine_of(kind), *each).generated for each in asked]
    engine = engine_of(kind)
    prepared, ran = watch(engine)
    requests = [engine.add(*each) for each in asked[:3]]

    def late(step: int) -> None:
        if step == 5:
            requests.append(engine.add(*asked[3]))

    run(engine, late)
    assert [r.generated for r in requests] == want
    used = [step for step in prepared if any(step is other for other in ran)]
    assert used and len(used) < len(prepared)
    assert_nothing_held(engine)


def test_pages_that_are_not_there_ahead_are_found_in_time(engine_of: Callable) -> None:
    """Two requests fill the pool: one is preempted, as without preparation, and both answers are right."""
    asked = [(prompt(60, seed=i), greedy(30)) for i in range(2)]
    want = [alone(engine_of("llama"), *each).generated for each in asked]
    engine = engine_of("llama", pool=144)
    requests = [engine.add(*each) for each in asked]
    run(engine)
    assert [r.generated for r in requests] == want and sum(r.preemptions for r in requests) > 0
    assert_nothing_held(engine)


def test_an_aborted_request_leaves_nothing_behind(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5")
    first, second = engine.add(prompt(9), greedy(20)), engine.add(prompt(12, seed=1), greedy(6))
    for _ in range(3):
        engine.step()
    assert engine.pipeline.prepared is not None
    engine.abort(first)
    run(engine)
    assert second.generated == alone(engine_of("qwen3_5"), prompt(12, seed=1), greedy(6)).generated
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_launched_before_the_last_tokens_are_known_give_the_same_answers(kind: str, engine_of: Callable) -> None:
    """As on a GPU: some answers end at a stop token, one step after they have been run on; others join meanwhile."""
    free = [alone(engine_of(kind), prompt(10 + 7 * i, seed=i), greedy(12)).generated for i in range(4)]
    ends = [free[0][5], free[2][3]]
    asked = [
        (prompt(10 + 7 * i, seed=i), SamplingParams(max_tokens=12, stop_token_ids=tuple(ends), logprobs=2))
        for i in range(4)
    ]
    want = [alone(engine_of(kind), *each) for each in asked]
    assert any(r.finish_reason == "stop" and r.answer_tokens > 1 for r in want)
    engine = engine_of(kind, slots=3)  # the fourth takes the slot and the pages of one that has ended
    engine.launches_ahead = True
    _, ran = watch(engine)
    requests = [engine.add(*each) for each in asked[:2]]
    flew = []

    def late(step: int) -> None:
        flew.append(engine.pipeline.in_flight is not None)
        if step == 4:
            requests.extend(engine.add(*each) for each in asked[2:])

    run(engine, late)
    for got, one in zip(requests, want, strict=True):
        assert got.generated == one.generated and got.finish_reason == one.finish_reason
        assert [x.token for x in got.logprobs] == pytest.approx([x.token for x in one.logprobs], abs=1e-4)
        same = ("kept_tokens", "kv_bytes_kept", "kv_bytes_full")
        assert {k: got.stats[k] for k in same} == {k: one.stats[k] for k in same}
    assert any(flew) and len(ran) > max(len(r.generated) for r in requests)
    assert_nothing_held(engine)


def test_an_answer_is_not_run_past_an_end_that_is_foreseen(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5")
    engine.launches_ahead = True
    _, ran = watch(engine)
    alone(engine, prompt(20), greedy(10))
    assert len(ran) == 10 and engine.pipeline.in_flight is None
    assert_nothing_held(engine)


def test_a_held_cache_ends_where_its_answer_does(engine_of: Callable) -> None:
    """A next turn goes on from it: state that had seen one token too many could not."""
    engine = engine_of("qwen3_5")
    engine.launches_ahead = True
    end = alone(engine_of("qwen3_5"), prompt(20), greedy(6)).generated[4]
    first = engine.add(prompt(20), SamplingParams(max_tokens=30, stop_token_ids=(end,)), hold=True)
    run(engine)
    second = engine.add([*first.tokens, 5, 6], greedy(5), after=first)
    run(engine)
    assert second.cached_tokens == len(first.tokens) - 1
    assert second.generated == alone(engine_of("qwen3_5"), [*first.tokens, 5, 6], greedy(5)).generated


def test_an_abort_between_steps_drops_what_flies(engine_of: Callable) -> None:
    engine = engine_of("llama")
    engine.launches_ahead = True
    first, second = engine.add(prompt(9), greedy(20)), engine.add(prompt(12, seed=1), greedy(8))
    for _ in range(3):
        engine.step()
    assert engine.pipeline.in_flight is not None
    engine.abort(first)
    run(engine)
    assert second.generated == alone(engine_of("llama"), prompt(12, seed=1), greedy(8)).generated
    engine.add(prompt(9), greedy(20))
    for _ in range(3):
        engine.step()
    engine.abort(engine.scheduler.running[0])  # nobody is left
    third = engine.add(prompt(12, seed=1), greedy(8))
    run(engine)
    assert third.generated == second.generated
    assert_nothing_held(engine)


def test_a_request_whose_next_step_runs_is_forked_and_saved_once_that_is_drained(engine_of: Callable) -> None:
    """Before, its recurrent state is a token further than its position."""
    engine = engine_of("qwen3_5")
    engine.launches_ahead = True
    request = engine.add(prompt(9), greedy(20))
    for _ in range(3):
        engine.step()
    assert engine.pipeline.in_flight is not None
    for take in (
        lambda: engine.manager.fork_request(request.key, "copy"),
        lambda: snapshot_request(engine.manager, request.key),
    ):
        with pytest.raises(RequestError, match="drain"):
            take()
    answered = request.answer_tokens
    assert [u.token for u in engine.drain()] == request.generated[answered:] and engine.pipeline.in_flight is None
    assert engine.drain() == [] and request.answer_tokens == answered + 1
    engine.manager.fork_request(request.key, "copy")
    snapshot_request(engine.manager, request.key)
    engine.manager.release_request("copy")
    engine.step()
    assert engine.pipeline.in_flight is not None  # it goes on as before
    run(engine)
    assert request.generated == alone(engine_of("qwen3_5"), prompt(9), greedy(20)).generated
    assert_nothing_held(engine)


def test_draining_launches_nothing_where_all_that_is_in_flight_has_ended(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5")
    engine.launches_ahead = True
    request = engine.add(prompt(9), greedy(20))
    for _ in range(3):
        engine.step()
    assert engine.pipeline.in_flight is not None
    engine.abort(request)
    other = engine.add(prompt(5), greedy(4))
    assert engine.drain() == [] and engine.pipeline.in_flight is None and other.answer_tokens == 0
    run(engine)
    assert other.generated == alone(engine_of("qwen3_5"), prompt(5), greedy(4)).generated
    assert_nothing_held(engine)


def test_a_step_of_a_long_prompt_is_waited_for(engine_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it gives no token: at most one step is launched ahead of what the host has seen."""
    engine = engine_of("llama", step_tokens=64)
    engine.launches_ahead = True
    events, wait, forward = [], SampledTokens.wait, engine.runner.forward
    monkeypatch.setattr(SampledTokens, "wait", lambda self: events.append("wait") or wait(self))
    engine.runner.forward = lambda inputs: events.append("launch") or forward(inputs)  # type: ignore[method-assign]
    engine.add(prompt(400), greedy(2))
    run(engine)
    ahead = [events[: i + 1].count("launch") - events[: i + 1].count("wait") for i in range(len(events))]
    assert events.count("launch") > 6 and max(ahead) == 2 and ahead[-1] == 0


def crowd_of(engine: Engine, count: int = 8, tokens: int = 12) -> list[Request]:
    return [engine.add(prompt(10 + i, seed=i), greedy(tokens)) for i in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_request_whose_cache_is_held_keeps_nobody_else_from_going_on(kind: str, engine_of: Callable) -> None:
    """It alone waits until its token has been seen; its cache ends where its answer does."""
    want = [alone(engine_of(kind), prompt(10 + i, seed=i), greedy(12)).generated for i in range(8)]
    end = alone(engine_of(kind), prompt(33), greedy(6)).generated[4]
    engine = engine_of(kind, slots=12)
    engine.launches_ahead = True
    held = engine.add(prompt(33), SamplingParams(max_tokens=30, stop_token_ids=(end,)), hold=True)
    others, flew = crowd_of(engine), []

    def look(step: int) -> None:
        flying = engine.pipeline.in_flight
        flew.append(flying is not None)
        assert flying is None or held not in flying.batch.requests or not held.answer_tokens or held.unseen == 1

    run(engine, look)
    assert [r.generated for r in others] == want and sum(flew) > 8
    second = engine.add([*held.tokens, 5, 6], greedy(5), after=held)
    run(engine)
    assert second.cached_tokens == len(held.tokens) - 1
    assert second.generated == alone(engine_of(kind), [*held.tokens, 5, 6], greedy(5)).generated
    assert_nothing_held(engine)


def test_where_many_caches_are_held_steps_wait_for_all(engine_of: Callable) -> None:
    """Going on without them would give each of them half its tokens."""
    engine = engine_of("llama", slots=12)
    engine.launches_ahead = True
    crowd_of(engine, 8)
    held = [engine.add(prompt(9), greedy(8), hold=True) for _ in range(2)]
    steps = 0
    while not all(r.finished for r in held):
        engine.step()
        steps += 1
    assert steps <= 9  # eight tokens each, and a step for the prompts


@pytest.mark.parametrize("how", ("hold", "logprobs", "siblings"))
def test_a_request_that_only_waits_keeps_nobody_from_going_on(how: str, engine_of: Callable) -> None:
    engine = engine_of("llama", slots=4)
    engine.launches_ahead = True
    running = crowd_of(engine, 4, tokens=20)
    params = greedy(3)
    if how != "hold":
        params = SamplingParams(max_tokens=3, **({"n": 3} if how == "siblings" else {"prompt_logprobs": 1}))
    last = engine.add(prompt(9), params, hold=how == "hold")
    flew = []
    while not any(r.finished for r in running):
        engine.step()
        flew.append(engine.pipeline.in_flight is not None)
    assert sum(flew) >= len(flew) - 3 and not last.answer_tokens
    run(engine)
    assert last.finish_reason == "length"
    engine.abort(last)
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_stopped_in_flight_leaves_no_state_that_is_ahead_of_it(kind: str, engine_of: Callable) -> None:
    """Its cache was to be held. Attention goes on from where it was, recurrent state is computed again."""
    engine = engine_of(kind, slots=12, step_tokens=64)
    engine.launches_ahead = True
    crowd_of(engine, 8)
    held = engine.add(prompt(300), greedy(5), hold=True)
    for _ in range(12):
        engine.step()
        if held.started_at and engine.manager.position(held.key):
            break
    assert engine.pipeline.in_flight is not None and held in engine.pipeline.in_flight.batch.requests
    engine.stop(held)
    second = engine.add(prompt(310), greedy(5), after=held)
    run(engine)
    assert second.generated == alone(engine_of(kind), prompt(310), greedy(5)).generated
    assert (second.cached_tokens > 0) == (kind == "llama")
    assert_nothing_held(engine)


def test_a_request_that_cannot_go_on_ends_alone(engine_of: Callable) -> None:
    """Its state was taken further by someone else. That is found while a step is prepared ahead, and told later."""
    engine = engine_of("qwen3_5")
    engine.launches_ahead = True
    broken, other = engine.add(prompt(9), greedy(20)), engine.add(prompt(12, seed=1), greedy(8))
    for _ in range(3):
        engine.step()
    prepare = engine.pipeline.prepare_next

    def further() -> None:
        if broken.key in engine.manager.slot_of:
            engine.manager.reached[engine.manager.slot_of[broken.key]] += 9
        prepare()

    engine.pipeline.prepare_next = further  # type: ignore[method-assign]
    run(engine)
    assert broken.finish_reason == "error" and "was not committed" in (broken.error or "")
    assert other.generated == alone(engine_of("qwen3_5"), prompt(12, seed=1), greedy(8)).generated
    assert_nothing_held(engine)


def test_a_caller_may_wait_while_a_long_step_runs(engine_of: Callable) -> None:
    """And not where nothing is in flight, nor where no step was ever timed."""
    engine = engine_of(KINDS[0])
    engine.launches_ahead = True
    assert engine.slack() == 0
    request = engine.add(prompt(20), greedy(6))
    engine.step()
    engine.step()
    assert engine.slack() == 0  # what a step takes is not known
    engine.scheduler.cost.seconds, engine.scheduler.cost.weight_bytes = {1: 100.0, 64: 200.0}, 10**15
    assert 0 < engine.slack() <= SURE * 100
    engine.scheduler.cost.seconds = {1: 1e-6, 64: 1e-6}
    assert engine.slack() == 0
    engine.scheduler.cost.seconds = {1: 100.0, 64: 200.0}
    while not engine.idle:
        engine.step()
    assert request.answer_tokens == 6 and engine.slack() == 0
