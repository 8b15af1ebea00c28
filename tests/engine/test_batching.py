"""Requests together: each gets the tokens that it would get alone, whatever the scheduler does with it meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.driving import KINDS, alone, assert_nothing_held, count_tokens, prompt, run
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.request import Request

LENGTHS = (5, 70, 1, 33, 64, 130, 2, 17)


def params(i: int, tokens: int = 20) -> SamplingParams:
    """Greedy and seeded sampling in turn, answers of different lengths."""
    if i % 2:
        return SamplingParams(max_tokens=tokens + i, temperature=0.8, top_p=0.95, seed=i)
    return SamplingParams(max_tokens=tokens + i)


@pytest.fixture(scope="module", params=KINDS)
def answers(request: pytest.FixtureRequest, engine_of: Callable) -> tuple[str, list[list[int]]]:
    """(kind, the answer to each of eight prompts in an engine of its own)."""
    kind = request.param
    return kind, [alone(engine_of(kind), prompt(n, i), params(i)).generated for i, n in enumerate(LENGTHS)]


def add_all(engine: Engine) -> list[Request]:
    return [engine.add(prompt(n, i), params(i)) for i, n in enumerate(LENGTHS)]


def check(engine: Engine, requests: list[Request], want: list[list[int]]) -> None:
    assert [r.generated for r in requests] == want
    assert [r.finish_reason for r in requests] == ["length"] * len(requests)
    assert_nothing_held(engine)


def test_a_request_among_seven_others_gets_what_it_gets_alone(answers: Any, engine_of: Callable) -> None:
    kind, want = answers
    engine = engine_of(kind)
    requests = add_all(engine)
    run(engine)
    check(engine, requests, want)
    assert all(len(set(w)) > 3 for w in want), "answers of one repeated token show nothing"


@pytest.mark.parametrize("step_tokens", (64, 128))
def test_small_steps_change_nothing(answers: Any, step_tokens: int, engine_of: Callable) -> None:
    kind, want = answers
    engine = engine_of(kind, step_tokens=step_tokens)
    counts = count_tokens(engine)
    requests = add_all(engine)
    run(engine)
    check(engine, requests, want)
    assert max(counts) <= step_tokens + 7  # seven decode while a prompt has its one chunk of 64


@pytest.mark.parametrize("every", (1, 3))
def test_forced_preemption_changes_nothing(answers: Any, every: int, engine_of: Callable) -> None:
    kind, want = answers
    engine = engine_of(kind, step_tokens=128)

    def preempt_youngest(step: int) -> None:
        if step % every == every - 1 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(max(engine.scheduler.running, key=lambda r: r.order))

    requests = add_all(engine)
    run(engine, preempt_youngest)
    check(engine, requests, want)
    assert sum(r.preemptions for r in requests) > 5
    assert requests[0].preemptions == 0
    assert [r.stats["preemptions"] for r in requests] == [r.preemptions for r in requests]


def test_requests_that_come_later_change_nothing(answers: Any, engine_of: Callable) -> None:
    kind, want = answers
    engine, requests = engine_of(kind), []
    for i, n in enumerate(LENGTHS):
        requests.append(engine.add(prompt(n, i), params(i)))
        engine.step()
        engine.step()
    run(engine)
    check(engine, requests, want)


@pytest.mark.parametrize("pool", (160, 224, 400))
def test_a_pool_too_small_for_all_serves_all_in_order(answers: Any, pool: int, engine_of: Callable) -> None:
    """The eight need 510 tokens of pages at their ends; the longest alone 155."""
    kind, want = answers
    engine = engine_of(kind, pool=pool, step_tokens=128)
    requests, first_run, preempted = add_all(engine), [], []
    preempt = engine.scheduler.preempt

    def only_the_youngest(request: Request) -> None:
        assert request is max(engine.scheduler.running, key=lambda r: r.order)
        preempted.append(request)
        preempt(request)

    engine.scheduler.preempt = only_the_youngest
    for _ in range(5000):
        if engine.idle:
            break
        engine.step()
        first_run += [r for r in engine.scheduler.running if r not in first_run]
        engine.manager.check_integrity()
    check(engine, requests, want)
    orders = [r.order for r in first_run]
    assert orders == sorted(orders), "a request overtook an older one"
    assert requests[0].preemptions == 0
    assert preempted or pool == 400, "the pool was meant to be too small"


def test_forty_requests_in_four_slots(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5", slots=4, step_tokens=128)
    requests = [engine.add(prompt(3 + 5 * (i % 9), i), SamplingParams(max_tokens=3 + i % 5)) for i in range(40)]
    most, waits = 0, []
    for step in range(5000):
        if engine.idle:
            break
        engine.step()
        most = max(most, len(engine.scheduler.running))
        waits += [(r.order, step) for r in engine.scheduler.running if r.order not in {o for o, _ in waits}]
    assert all(len(r.generated) == 3 + i % 5 and r.finish_reason == "length" for i, r in enumerate(requests))
    assert most == 4
    assert [order for order, _ in waits] == sorted(order for order, _ in waits)
    assert_nothing_held(engine)
    for i in (0, 17, 39):
        fresh = alone(engine_of("qwen3_5"), prompt(3 + 5 * (i % 9), i), SamplingParams(max_tokens=3 + i % 5))
        assert requests[i].generated == fresh.generated


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_goes_on_every_step_while_a_long_prompt_is_read(kind: str, engine_of: Callable) -> None:
    engine = engine_of(kind, step_tokens=64)
    short = [engine.add(prompt(4, i), SamplingParams(max_tokens=40)) for i in range(3)]
    engine.step()
    assert [len(r.generated) for r in short] == [1, 1, 1]
    long = engine.add(prompt(300, 9), SamplingParams(max_tokens=5))
    steps = 0
    while not long.generated:
        before = [len(r.generated) for r in short]
        position = 0 if steps == 0 else engine.manager.position(long.key)
        engine.step()
        steps += 1
        assert [len(r.generated) for r in short] == [n + 1 for n in before]
        assert engine.manager.position(long.key) > position, "the long prompt stands still while others decode"
        assert engine.manager.position(long.key) % 64 == 0 or long.generated, "a cut falls on a multiple of 64"
    assert steps == 5
    run(engine)
    want = alone(engine_of(kind), prompt(300, 9), SamplingParams(max_tokens=5))
    assert long.generated == want.generated


def test_two_long_prompts_are_read_oldest_first(engine_of: Callable) -> None:
    engine = engine_of("llama", step_tokens=64)
    first, second = (engine.add(prompt(200, i), SamplingParams(max_tokens=4)) for i in range(2))
    run(engine, lambda _: None if second.generated else _assert_ahead(engine, first, second))
    assert first.first_token_at < second.first_token_at


def _assert_ahead(engine: Engine, first: Request, second: Request) -> None:
    if first.key in engine.manager.slot_of and second.key in engine.manager.slot_of and not first.generated:
        assert engine.manager.position(first.key) >= engine.manager.position(second.key)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", (1, 2))
def test_a_short_prompt_in_a_used_slot_equals_a_fresh_one(kind: str, length: int, engine_of: Callable) -> None:
    ask = SamplingParams(max_tokens=8, logprobs=3)
    want = alone(engine_of(kind, slots=1), prompt(length), ask)
    used = engine_of(kind, slots=1)
    alone(used, prompt(150, 3), SamplingParams(max_tokens=20))
    got = alone(used, prompt(length), ask)
    assert got.generated == want.generated
    assert got.logprobs == want.logprobs  # to the last bit: nothing of the former owner is left


def test_a_finished_engine_keeps_no_request(engine_of: Callable) -> None:
    import gc
    import weakref

    engine = engine_of("llama")
    requests = [engine.add(prompt(9, i), SamplingParams(max_tokens=3)) for i in range(4)]
    engine.abort(requests[3])
    run(engine)
    watched = [weakref.ref(r) for r in requests]
    del requests
    gc.collect()
    assert [w() for w in watched] == [None] * 4
