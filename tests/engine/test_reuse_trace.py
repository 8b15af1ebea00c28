"""A trace of agents on a tiny hybrid: the engine reuses exactly as many tokens of each prompt as the simulator says."""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.driving import assert_nothing_held
from engine.reusing import ask
from hybridkv.cache.worth import policy_of
from hybridkv.config import SamplingParams

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from reuse_simulation import Simulator, Sizes
from reuse_traces import Asked, Segment, agent, documents, shortened

VOCAB = 97


def tokens_of(segments: Sequence[Segment]) -> list[int]:
    """Random token ids, always the same ones for a segment."""
    found: list[int] = []
    for segment in segments:
        rng = random.Random(segment.number)
        found += [rng.randrange(VOCAB) for _ in range(segment.size)]
    return found


def saying(answer: list[int]) -> SamplingParams:
    """Parameters under which the model says just this."""

    def force(generated: list[int], logits: Tensor) -> None:
        logits.fill_(float("-inf"))
        logits[answer[len(generated)]] = 0.0

    return SamplingParams(max_tokens=len(answer), ignore_eos=True, logits_hook=force)


def agents(**edits: Any) -> list[Asked]:
    """Two agents in turn."""
    return shortened(agent(4, agents=2, **edits), 6, 10, apart=2)


def strangers() -> list[Asked]:
    """Questions about a few documents between prompts that come once."""
    return shortened(documents(3, requests=24, unique=16), 12, 32)


TRACES = {
    "agents": (agents, "value"),
    "edits": (lambda: agents(reminders=True, tools_change=0.2), "lru"),
    "strangers": (strangers, "value"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_the_engine_reuses_what_the_simulator_says(engine_of: Callable, name: str) -> None:
    """With too few rows for all."""
    make, policy = TRACES[name]
    trace = make()
    most = max(asked.tokens for asked in trace) + 256
    engine = engine_of("qwen3_5", rows=3, context=most, pool=24 * most, step_tokens=512)
    reuse, schema = engine.manager.reuse, engine.manager.schema
    reuse.checkpoints.policy = policy_of(policy, schema)
    reuse.tails = False  # as the simulator below has none
    sizes = Sizes(reuse.q, schema.kv_bytes(reuse.q) // reuse.q, schema.slot_bytes)
    simulator = Simulator(0, policy, tails=False, rows=3, sizes=sizes)
    found, expected = [], []
    for asked in trace:
        request = ask(engine, tokens_of(asked.prompt), saying(tokens_of(asked.answer)), marks=asked.marks)
        found.append(request.cached_tokens)
        expected.append(simulator.ask(asked))
    assert found == expected
    assert len(set(found)) > 2 and reuse.checkpoints.dropped["rows"] > 0  # some were found, and some had to go
    assert_nothing_held(engine)
