"""A request with a seed gets the same tokens alone, in any batch, after a preemption and with steps launched ahead."""

from collections.abc import Callable
from functools import cache

import pytest
from long_form import spread

from engine.driving import KINDS, alone, assert_nothing_held, prompt, run
from hybridkv.config import SamplingParams

FILTERS: tuple[dict, ...] = (
    {}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9},
    {"logit_bias": {3: 2.0, 50: -5.0}, "top_k": 20}, {"min_tokens": 30, "stop_token_ids": tuple(range(40))},
)  # fmt: skip


def asked(i: int, ask: dict) -> tuple[list[int], SamplingParams]:
    return prompt(6 + 3 * i, seed=i), SamplingParams(max_tokens=30, temperature=1.4, seed=1000 + i, **ask)


@pytest.fixture(scope="module")
def alone_of(engine_of: Callable) -> Callable[[str], list[list[int]]]:
    """The answers of each, by itself."""

    @cache
    def found(kind: str) -> list[list[int]]:
        lonely = engine_of(kind)
        return [alone(lonely, *asked(i, ask)).generated for i, ask in enumerate(FILTERS)]

    return found


@spread("ahead, kind", (False, True), KINDS)
def test_tokens_do_not_depend_on_who_runs_beside(
    kind: str, ahead: bool, engine_of: Callable, alone_of: Callable
) -> None:
    want = alone_of(kind)
    assert len(set(map(tuple, want))) == len(FILTERS) and all(len(set(tokens)) > 8 for tokens in want)
    engine = engine_of(kind, slots=12)
    engine.launches_ahead = ahead
    requests = [engine.add(*asked(i, ask)) for i, ask in enumerate(FILTERS)]
    engine.add(prompt(5), SamplingParams(max_tokens=12))  # a greedy one, and later one that comes and goes
    stepped, launched = [], engine.pipeline.launch_ahead

    def count() -> None:
        launched()
        stepped.append(engine.pipeline.ahead is not None)

    engine.pipeline.launch_ahead = count

    def disturb(step: int) -> None:
        if step in (7, 15) and engine.pipeline.in_flight is None:
            engine.scheduler.preempt(requests[step % 6])
        if step == 10:
            engine.add(prompt(20, seed=9), SamplingParams(max_tokens=5, temperature=1.0))

    run(engine, disturb)
    assert [r.generated for r in requests] == want
    assert (sum(stepped) > 10) == ahead and (ahead or requests[1].preemptions == requests[3].preemptions == 1)
    assert_nothing_held(engine)


def test_numbers_are_counted_by_position(engine_of: Callable) -> None:
    """What follows a held cache, and what follows the same tokens read at once, is drawn alike."""
    engine, params = engine_of("llama"), SamplingParams(max_tokens=12, temperature=1.5, seed=5)
    first = engine.add(prompt(9), SamplingParams(max_tokens=6), hold=True)
    run(engine)
    tokens = [*first.tokens, *prompt(4, seed=3)]
    second = engine.add(tokens, params, hold=True, after=first)
    run(engine)
    assert second.cached_tokens > 0
    assert second.generated == alone(engine_of("llama"), tokens, params).generated


def test_without_a_seed_every_request_has_its_own(engine_of: Callable) -> None:
    engine = engine_of("llama")
    requests = [engine.add(prompt(9), SamplingParams(max_tokens=12, temperature=2.0)) for _ in range(4)]
    run(engine)
    assert len({r.seed for r in requests}) == len({tuple(r.generated) for r in requests}) == 4
    assert all(0 <= r.seed < 1 << 63 for r in requests)
