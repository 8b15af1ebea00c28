"""Running an engine in tests: to the end, one request alone, and the look afterwards."""

from collections.abc import Callable, Sequence

import tiny

from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine, Update
from hybridkv.engine.mixed_graphs import MixedGraphs
from hybridkv.engine.runner import StepInputs
from hybridkv.engine.step_cost import StepCost
from hybridkv.request import Request

KINDS = ("llama", "qwen3_5")


def prompt(length: int, seed: int = 0) -> list[int]:
    return tiny.token_ids(length, seed=100 + seed)


def run(engine: Engine, each_step: Callable[[int], None] | None = None, steps: int = 5000) -> list[Update]:
    """Step until idle. An engine that does not come to an end is a failure, not a hanging test."""
    updates: list[Update] = []
    for step in range(steps):
        if engine.idle:
            return updates
        if each_step is not None:
            each_step(step)
        updates += engine.step()
    raise AssertionError(f"not idle after {steps} steps: {engine.scheduler.waiting}, {engine.scheduler.running}")


def alone(engine: Engine, tokens: Sequence[int], params: SamplingParams) -> Request:
    """The request in an engine of its own."""
    request = engine.add(tokens, params)
    run(engine)
    assert request.error is None
    return request


def assert_nothing_held(engine: Engine) -> None:
    """Every slot is back, and every page is free or kept only as long as nobody needs it."""
    manager = engine.manager
    manager.check_integrity()
    assert engine.idle and not engine.scheduler.held
    assert manager.free_slots == manager.slots and not manager.slot_of
    assert manager.pages_to_be_had() == {n: t.allocator.total for n, t in manager.tables.items()}
    if manager.reuse is not None:
        manager.reuse.check()


def count_tokens(engine: Engine) -> list[int]:
    """How many tokens each forward pass runs; grows as the engine steps."""
    counts: list[int] = []
    forward = engine.runner.forward

    def counted(inputs: StepInputs) -> object:
        counts.append(len(inputs.tokens))
        return forward(inputs)

    engine.runner.forward = counted  # type: ignore[method-assign,assignment]
    return counts


def with_graphs(engine: Engine, seconds: dict[int, float] | None = None) -> MixedGraphs:
    """`seconds`: what steps are said to take."""
    cost = StepCost(engine.runner.model.nbytes)
    cost.seconds = seconds or {1: 20e-3, 64: 28e-3, 512: 86e-3}
    graphs = MixedGraphs(engine.runner.model, engine.manager, engine.scheduler.step_tokens, cost)
    engine.runner.mixed = engine.scheduler.mixed = graphs
    engine.scheduler.cost = cost
    return graphs
