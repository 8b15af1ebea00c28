"""What is read of several prompts in one step: a long one neither stalls the others nor starves."""

from collections.abc import Callable

from engine.driving import alone, assert_nothing_held, prompt, run
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.request import Request

SAY = SamplingParams(max_tokens=2, temperature=0)


def read(engine: Engine, requests: list[Request]) -> list[dict[Request, int]]:
    """Tokens of each prompt in every step, until all are read."""
    found: list[dict[Request, int]] = []
    reserve = engine.scheduler.reserve

    def noted(plan: list, *more: object) -> object:
        keys = {request.key: request for request in requests}
        found.append({keys[key]: n for key, n in plan})
        return reserve(plan, *more)  # type: ignore[arg-type]

    engine.scheduler.reserve = noted  # type: ignore[method-assign,assignment]
    run(engine)
    return found


def test_short_prompts_pass_a_long_one_which_goes_on(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5", step_tokens=128, context=2048)
    long = engine.add(prompt(1000), SAY)
    short = [engine.add(prompt(60 + i, seed=i), SAY) for i in range(3)]
    steps = read(engine, [long, *short])
    reading = [step for step in steps if long in step and step[long] > 1]
    assert all(step[long] >= 64 for step in reading[:-1]), "the oldest prompt waited"
    ends = {r: max(i for i, step in enumerate(steps) if r in step) for r in (long, *short)}
    assert max(ends[r] for r in short) < ends[long] / 2
    assert [r.generated for r in (long, *short)] == [
        alone(engine_of("qwen3_5", context=2048), r.tokens[: r.prompt_tokens], SAY).generated for r in (long, *short)
    ]
    assert_nothing_held(engine)


def test_of_long_prompts_the_shortest_comes_first_and_every_one_comes_to_an_end(engine_of: Callable) -> None:
    engine = engine_of("llama", step_tokens=256, context=2048, pool=8192)
    requests = [engine.add(prompt(n, seed=n), SAY) for n in (900, 800, 300, 600)]
    steps = read(engine, requests)
    assert all(sum(step.values()) <= 256 for step in steps)
    first = {r: next(i for i, step in enumerate(steps) if step.get(r) == 1) for r in requests}
    order = sorted(requests, key=lambda r: first[r])
    assert order[0] is requests[2] and order[1] is requests[3]
    assert_nothing_held(engine)
