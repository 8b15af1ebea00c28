"""Logprobs of the prompt's tokens: those of the logits of teacher forcing, however the prompt is read."""

from collections.abc import Callable

import pytest
import tiny_v4
import torch
from torch import Tensor

from engine.driving import KINDS, alone, assert_nothing_held, count_tokens, prompt, run
from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine import pipeline
from hybridkv.engine.engine import Engine
from hybridkv.engine.workspace import PROMPT_ROWS, prompt_rows_at_once, sampling_bytes
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.random_weights import random_decoder
from hybridkv.request import Request


def check(request: Request, logits: Tensor, count: int) -> None:
    """Against logits [T, vocab] after each token of the prompt."""
    found, logs = request.prompt_logprobs, logits.double().log_softmax(-1)
    assert len(found) == request.prompt_tokens and found[0] is None
    for i, one in enumerate(found[1:], 1):
        assert one is not None
        assert one.token == pytest.approx(float(logs[i - 1, request.tokens[i]]), abs=1e-4)
        assert len(one.top) == count
        best = logs[i - 1].topk(count).values.tolist()
        assert list(one.top.values()) == pytest.approx(best, abs=1e-4)
        assert [float(logs[i - 1, t]) for t in one.top] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", (1, 2, 9, 64, 65, 200))
def test_each_token_of_a_prompt_has_the_logprob_of_the_logits_before_it(
    kind: str, length: int, engine_of: Callable
) -> None:
    tokens = prompt(length, seed=length)
    engine = engine_of(kind, step_tokens=64)
    engine.launches_ahead = True
    logits = engine_of(kind).score(tokens)
    beside = engine.add(prompt(70, seed=1), SamplingParams(max_tokens=9))
    asked = [engine.add(tokens, SamplingParams(max_tokens=5, prompt_logprobs=n, logprobs=1)) for n in (3, 0)]
    run(engine)
    check(asked[0], logits, 3)
    check(asked[1], logits, 0)
    plain = alone(engine_of(kind), tokens, SamplingParams(max_tokens=5))
    assert [r.generated for r in asked] == [plain.generated] * 2 and plain.prompt_logprobs == []
    assert beside.generated == alone(engine_of(kind), prompt(70, seed=1), SamplingParams(max_tokens=9)).generated
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_prompt_has_each_logprob_once(kind: str, engine_of: Callable) -> None:
    tokens = prompt(200)
    engine = engine_of(kind, step_tokens=64)
    engine.add(prompt(5, seed=1), SamplingParams(max_tokens=20))
    request = engine.add(tokens, SamplingParams(max_tokens=5, prompt_logprobs=2))

    def preempt(step: int) -> None:
        if step in (2, 6):
            assert request in engine.scheduler.running
            engine.scheduler.preempt(request)

    run(engine, preempt)
    assert request.preemptions == 2
    check(request, engine_of(kind).score(tokens), 2)


def test_a_held_cache_does_not_skip_the_prompt(engine_of: Callable) -> None:
    engine = engine_of("llama")
    first = engine.add(prompt(20), SamplingParams(max_tokens=4), hold=True)
    run(engine)
    counts = count_tokens(engine)
    hidden, read = engine.runner.hidden, []
    engine.runner.hidden = lambda inputs: (read.append(len(inputs.tokens)), hidden(inputs))[1]
    tokens = [*first.tokens, *prompt(6, seed=2)]
    second = engine.add(tokens, SamplingParams(max_tokens=4, prompt_logprobs=1), hold=True, after=first)
    run(engine)
    assert read == [len(tokens)] and counts == [1, 1, 1] and second.cached_tokens == 0
    check(second, engine_of("llama").score(tokens), 1)
    engine.abort(second)
    assert_nothing_held(engine)


def test_logits_of_a_whole_prompt_are_never_there_at_once(engine_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", slots=2)
    most = prompt_rows_at_once(2, engine.vocab)
    assert most >= PROMPT_ROWS and most * engine.vocab * 24 <= sampling_bytes(2, engine.vocab)
    monkeypatch.setattr(pipeline, "prompt_rows_at_once", lambda rows, vocab: 7)
    model, rows = engine.runner.model, []
    logits = type(model).logits
    monkeypatch.setattr(type(model), "logits", lambda self, hidden: (rows.append(len(hidden)), logits(self, hidden))[1])
    request = engine.add(prompt(100), SamplingParams(max_tokens=1, prompt_logprobs=2))
    run(engine)
    assert max(rows) == 7 and sum(rows) == 100
    monkeypatch.undo()
    check(request, engine_of("llama").score(prompt(100)), 2)


def test_deepseek_v4() -> None:
    config = ModelConfig.from_dict(tiny_v4.DeepseekV4Config(**tiny_v4.KINDS["mini"]).to_dict())
    torch.manual_seed(3)
    model = random_decoder(config, "cpu", torch.float32)
    schema = cache_schema(config, CacheConfig("f32", block=128), torch.float32)
    engine = Engine(model, KVCacheManager(schema, schema.pool_pages(1, 512), 2, 512), step_tokens=64)
    tokens = prompt(100)
    logits = engine.score(tokens, chunk=64)
    check(alone(engine, tokens, SamplingParams(max_tokens=3, prompt_logprobs=2)), logits, 2)
