"""Which steps with prompts a graph runs, and in what shape, without a GPU: the capture itself is stood in for, all else
is real.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from long_form import more

from engine.driving import KINDS, alone, assert_nothing_held, prompt, run, with_graphs
from hybridkv.config import SamplingParams
from hybridkv.engine import mixed_graphs, workspace
from hybridkv.engine.mixed_graphs import CapturedMixed, MixedGraphs, decode_sizes
from hybridkv.engine.workspace import AT_ONCE, BESIDE, GRAPH_BYTES, chunk_rows, graph_bytes, mixed_sizes
from hybridkv.kernels.attention import dequantise, prefill_plan
from hybridkv.kernels.gdn import prefill as gdn_prefill
from hybridkv.kernels.gdn import rule
from hybridkv.kernels.step_index import StepShape
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Norm
from hybridkv.models.known import known_config


def asked(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths, greedy ones and such with a seed."""
    lengths = (3, 126, 250, 64, 65, 1, 300, 33, 128, 90, 2, 200)[:count]
    return [
        (prompt(n, seed=i), SamplingParams(max_tokens=6 + i, temperature=0.8 * (i % 2), seed=i))
        for i, n in enumerate(lengths)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_answers_as_each_alone(kind: str, ahead: bool, engine_of: Callable, replays: list[StepShape]) -> None:
    """Requests that come while others decode, in graphs and beside each other. f32: every token is the same."""
    want = [alone(engine_of(kind), *each).generated for each in asked(12)]
    engine = engine_of(kind)
    engine.launches_ahead = ahead
    graphs = with_graphs(engine)
    requests = [engine.add(*each) for each in asked(12)[:3]]

    def late(step: int) -> None:
        if step % 2 and len(requests) < 12:
            requests.append(engine.add(*asked(12)[len(requests)]))

    run(engine, late)
    assert [r.generated for r in requests] == want
    beside = [shape for shape in replays if shape.decodes]
    assert len(graphs.captured) > 1 and len(beside) > 3, "prompts did not run through graphs beside others"
    assert_nothing_held(engine)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ("llama", "qwen3_5", "qwen3_next", *more("qwen3_5_moe")))  # whose layers it shares
def test_exact_mode_has_the_same_bits_in_graphs(
    kind: str, engine_of: Callable, replays: list[StepShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others, padded, in steps of other sizes: logprobs to the last bit. With a norm that knows how many rows
    there are, the same comparison fails.
    """

    def bits() -> tuple[list, list]:
        each = [(tokens, replace(params, logprobs=3)) for tokens, params in asked(7)]
        want = [alone(engine_of(kind, exact=True), *one) for one in each]
        engine = engine_of(kind, exact=True)
        with_graphs(engine)
        requests = [engine.add(*one) for one in each[:2]]
        run(engine, lambda step: step % 2 and len(requests) < 7 and requests.append(engine.add(*each[len(requests)])))
        assert len(requests) == 7
        assert_nothing_held(engine)
        return [r.logprobs for r in want], [r.logprobs for r in requests]

    monkeypatch.setattr(mixed_graphs, "ASKED", 1)
    want, got = bits()
    assert got == want
    assert len(replays) > 5 and any(shape.decodes for shape in replays)
    add = Norm.add
    monkeypatch.setattr(Norm, "add", lambda self, x, delta: add(self, x * (1 + len(x) * 2.0**-16), delta))
    want, got = bits()
    assert got != want


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_in_a_crowd(kind: str, engine_of: Callable, replays: list[StepShape]) -> None:
    """Pages run out: what was computed is computed again, in graphs, and every token is the same."""
    each = [(prompt(60 + i, seed=i), SamplingParams(max_tokens=30, temperature=0.8, seed=i)) for i in range(3)]
    want = [alone(engine_of(kind), *one).generated for one in each]
    engine = engine_of(kind, pool=208)
    engine.launches_ahead = True
    with_graphs(engine)
    for _ in range(2):
        requests = [engine.add(*one) for one in each]
        run(engine)
        assert [r.generated for r in requests] == want and sum(r.preemptions for r in requests) > 0
    assert len(replays) >= 2
    assert_nothing_held(engine)


def test_many_short_prompts_are_one_captured_step(engine_of: Callable, replays: list[StepShape]) -> None:
    """A size is taken that has room for all of them, and no more are planned than that."""
    engine = engine_of("qwen3_5", slots=24)
    with_graphs(engine)
    for _ in range(3):
        replays.clear()
        requests = [engine.add(prompt(9 + i, seed=i), SamplingParams(max_tokens=1)) for i in range(20)]
        run(engine)
    assert len(replays) <= 2 and max(shape.chunks for shape in replays) > 16
    assert all(r.error is None and r.answer_tokens == 1 for r in requests)
    assert_nothing_held(engine)


def test_a_shape_is_captured_when_it_is_asked_for_again(engine_of: Callable, replays: list[StepShape]) -> None:
    engine = engine_of("llama")
    graphs = with_graphs(engine)
    for times in range(3):
        alone(engine, prompt(100), SamplingParams(max_tokens=1))
        assert len(replays) == max(0, times)
    assert set(graphs.captured) == {StepShape(128, 0, chunk_rows(128))}


@pytest.mark.parametrize("decoding", (1, 5))
def test_a_step_beside_others_is_as_full_as_its_graph(
    decoding: int, engine_of: Callable, replays: list[StepShape]
) -> None:
    """All of its 128 tokens are real, also where others decode: a prompt is cut at any token."""
    engine = engine_of("qwen3_5", context=2048)
    with_graphs(engine, {1: 20e-3, 128: 40e-3, 192: 200e-3, 512: 900e-3})
    for i in range(decoding):
        engine.add(prompt(9, seed=i), SamplingParams(max_tokens=60, temperature=0))
    engine.step()
    long = engine.add(prompt(1500), SamplingParams(max_tokens=2, temperature=0))
    engine.step()
    at = [0]
    while engine.manager.position(long.key) < 1300:
        engine.step()
        at.append(engine.manager.position(long.key))
    read = [b - a for a, b in zip(at[1:], at[2:])]
    assert len(read) > 5 and set(read) == {128 - decoding}
    assert set(replays[1:]) == {StepShape(128, decode_sizes(8)[1], chunk_rows(128))}
    run(engine)
    assert long.generated == alone(engine_of("qwen3_5", context=2048), *[prompt(1500), long.params]).generated


def test_a_capture_that_fails_is_not_tried_again(
    engine_of: Callable, replays: list[StepShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, say: the step runs as it is, with a warning, and other shapes still may be captured."""
    want, tries = alone(engine_of("llama"), *asked(2)[1]).generated, []

    def fails(self: MixedGraphs, shape: StepShape) -> CapturedMixed:
        tries.append(shape)
        raise torch.OutOfMemoryError("no memory for the graph")

    monkeypatch.setattr(MixedGraphs, "_capture", fails)
    engine = engine_of("llama")
    with_graphs(engine)
    assert alone(engine, *asked(2)[1]).generated == want
    with pytest.warns(UserWarning, match="steps of 128 tokens run without a CUDA graph: no memory"):
        assert alone(engine, *asked(2)[1]).generated == want
    assert alone(engine, *asked(2)[1]).generated == want
    assert len(tries) == 1 and not replays
    assert_nothing_held(engine)


def test_prompt_logprobs_and_scores_of_every_token_are_not_a_graphs(
    engine_of: Callable, replays: list[StepShape]
) -> None:
    engine = engine_of("qwen3_5")
    want = engine.score(prompt(100)), alone(engine, prompt(100), SamplingParams(max_tokens=2, prompt_logprobs=1))
    with_graphs(engine)
    for _ in range(3):
        assert torch.equal(engine.score(prompt(100)), want[0])
        got = alone(engine, prompt(100), SamplingParams(max_tokens=2, prompt_logprobs=1))
        assert [x and x.token for x in got.prompt_logprobs] == pytest.approx(
            [x and x.token for x in want[1].prompt_logprobs], abs=1e-4
        )
    assert not replays


def config_of(name: str) -> ModelConfig:
    found = known_config(name)
    assert found is not None
    return ModelConfig.from_dict(found[1])


def test_sizes() -> None:
    """Padding is at most a quarter of a step from 256 tokens on; a graph's activations are bounded."""
    config = config_of("Qwen3.5-27B")
    sizes = mixed_sizes(config, 4096)
    assert sizes[:8] == [64, 128, 192, 256, 320, 384, 448, 512] and sizes == sorted(sizes)
    assert all(b <= 1.25 * a for a, b in zip(sizes[3:], sizes[4:]))
    assert BESIDE * graph_bytes(config, sizes[-1]) <= GRAPH_BYTES and mixed_sizes(config, 128) == [64, 128]
    assert decode_sizes(256) == [0, 16, 64, 256] and decode_sizes(6) == [0, 6] and decode_sizes(16) == [0, 16]
    assert [chunk_rows(n) for n in (64, 512, 4096)] == [5, 17, 33]
    assert mixed_sizes(config_of("DeepSeek-V4-Flash"), 4096) == []


def test_what_a_graph_holds_counts_weights_in_f32_and_dequantised_keys() -> None:
    """27B, FP8 keys: 32,768 of them and a tile for each prompt, 4 heads of 256, keys and values in bf16: 136 MiB."""
    config = config_of("Qwen3.5-27B")
    tiles = graph_bytes(config, 2048, 2, True) - graph_bytes(config, 2048)
    assert tiles == 2 * 4 * (32768 + 64 * chunk_rows(2048)) * 256 * 2 and round(tiles / 2**20) == 136
    assert graph_bytes(config, 2048, 4) == pytest.approx(2 * graph_bytes(config, 2048), rel=0.01)
    plain, wide, both = (mixed_sizes(config, 4096, *how)[-1] for how in ((2, False), (2, True), (4, True)))
    assert plain > wide > both >= 512 and BESIDE * graph_bytes(config, both, 4, True) <= GRAPH_BYTES


def test_no_graph_has_more_tokens_than_its_ops_take_at_once() -> None:
    assert mixed_sizes(config_of("SmolLM2-135M-Instruct"), 1 << 20)[-1] == AT_ONCE
    assert AT_ONCE == prefill_plan.PIECE == gdn_prefill.PIECE
    assert workspace.PART == rule.CHUNK and workspace.KEYS == dequantise.KEYS


@pytest.mark.parametrize(
    ("shape", "why"),
    [(StepShape(100, 4, 3), "tokens"), (StepShape(200, 0, 3), "decodes"), (StepShape(200, 4, 2), "chunks")],
)
def test_a_step_that_does_not_fit_its_shape_is_refused_and_reserves_nothing(
    shape: StepShape, why: str, engine_of: Callable
) -> None:
    manager = engine_of("llama").manager
    for key in "abc":
        manager.admit_request(key)
    with pytest.raises(ValueError, match="do not make a step of"):
        manager.prepare_forward([("a", 1), ("b", 60), ("c", 60)], shape=shape)
    assert not any(manager.held_bytes(key) for key in "abc"), why
    step = manager.prepare_forward([("a", 1), ("b", 60), ("c", 60)], shape=StepShape(128, 2, 4))
    assert step.host.query_start_loc.tolist() == [0, 1, 1, 61, 121, 121, 128]
    assert step.slots[0] >= 0 and step.slots[1] == -1 and step.slots[4:] == [-1, -1] and step.num_decodes == 2
