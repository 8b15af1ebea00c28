"""Replay: scores are the attention of a model that repeats its text, and reading again leaves nothing behind."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from engine.driving import KINDS, assert_nothing_held, prompt, run
from hybridkv import LLM, CacheConfig, EvictionConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.replay import ReplayPart
from hybridkv.errors import RequestError
from hybridkv.request import Request

ONE = SamplingParams(max_tokens=1)
TEXT = 150  # tokens


@pytest.fixture(scope="module")
def model(oracle: Callable[[str], tiny.Oracle]) -> Callable[..., LLM]:
    """`model("llama", exact=True)`: opened once for each; steps of 64 tokens, so that a part takes several."""
    opened: dict[Any, LLM] = {}

    def build(kind: str, **more: Any) -> LLM:
        key = (kind, *sorted(more.items()))
        if key not in opened:
            kv = more.pop("kv_dtype", "f32")
            config = CacheConfig(kv_dtype=kv, page_size=8)
            settings: dict[str, Any] = {"max_requests": 3, "max_context": 512, "step_tokens": 64, **more}
            opened[key] = LLM(oracle(kind).folder, device="cpu", dtype="float32", cache=config, **settings)
        return opened[key]

    return build


def read(engine: Engine, tokens: list[int]) -> Request:
    """A held request that has read these tokens."""
    request = engine.add(tokens, ONE, hold=True, eviction=None)
    run(engine)
    assert engine.manager.position(request.key) == len(tokens)
    return request


def parts(tokens: list[int], size: int = 70) -> list[ReplayPart]:
    return [ReplayPart(prompt(9, seed=i), tokens[i : i + size]) for i in range(0, len(tokens), size)]


def replayed(engine: Engine, request: Request, pieces: list[ReplayPart]) -> list[Tensor]:
    scores: list[Tensor] | None = None
    for part in pieces:
        scores = engine.replay(request, part, scores)
    assert scores is not None
    return scores


@torch.no_grad()
def weights_of(oracle: tiny.Oracle, tokens: list[int], pieces: list[ReplayPart]) -> list[Tensor]:
    """[G, L] of each full-attention layer, from the attention matrices of transformers."""
    found: list[Tensor] = []
    for part in pieces:
        ids = torch.tensor([[*tokens, *part.prompt, *part.text]])
        layers = oracle.model(ids, use_cache=False, output_attentions=True).attentions
        first = len(tokens) + len(part.prompt) - 1  # the token after which the text is to be said
        peaks = [w[0, :, first:, : len(tokens)].amax(1) for w in layers if w is not None]  # [H, L]
        heads = oracle.model.config.num_key_value_heads
        peaks = [w.view(heads, -1, len(tokens)).amax(1) for w in peaks]
        found = peaks if not found else [torch.maximum(a, b) for a, b in zip(found, peaks, strict=True)]
    return found


@pytest.mark.parametrize(("exact", "steps"), ((False, 64), (False, 512), (True, 64)))
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_attention_of_a_model_that_repeats_the_text(
    kind: str, exact: bool, steps: int, model: Callable[..., LLM], oracle: Callable[[str], tiny.Oracle]
) -> None:
    engine, tokens = model(kind, exact=exact, step_tokens=steps).engine, prompt(TEXT)
    request, pieces = read(engine, tokens), parts(prompt(TEXT), steps + 6)
    scores, want = replayed(engine, request, pieces), weights_of(oracle(kind), tokens, pieces)
    assert len(scores) == len(want) == len(engine.manager.tables["attention"].schema.layers)
    for mine, theirs in zip(scores, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)
    engine.abort(request)
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_request_does_not_change_by_a_bit_and_nothing_is_left(kind: str, model: Callable[..., LLM]) -> None:
    engine, tokens = model(kind).engine, prompt(TEXT)
    request = read(engine, tokens)
    manager = engine.manager
    before = engine.session(request).snapshot
    free = {name: table.allocator.free for name, table in manager.tables.items()}
    replayed(engine, request, parts(tokens))
    after = engine.session(request).snapshot
    assert before is not None and after is not None
    for name, old in before.contents()[0].items():
        assert torch.equal(old, after.contents()[0][name]), f"{name} changed"
    assert {name: table.allocator.free for name, table in manager.tables.items()} == free
    manager.check_integrity()
    engine.abort(request)
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_scores_do_not_depend_on_steps_or_on_what_runs_beside(kind: str, model: Callable[..., LLM]) -> None:
    tokens, found = prompt(TEXT), []
    for steps in (64, 512):
        engine = model(kind, exact=True, step_tokens=steps).engine
        beside = engine.add(prompt(30, seed=9), SamplingParams(max_tokens=20)) if steps == 512 else None
        request = engine.add(tokens, ONE, hold=True, eviction=None)
        while not request.finished:
            engine.step()
        engine.drain()
        found.append(replayed(engine, request, parts(tokens)))
        run(engine)
        assert beside is None or beside.error is None
        engine.abort(request)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_cache_that_was_cut_before_is_scored_where_it_still_is(
    model: Callable[..., LLM], oracle: Callable[[str], tiny.Oracle]
) -> None:
    engine, tokens = model("llama").engine, prompt(TEXT)
    request = read(engine, tokens)
    pieces = parts(tokens)
    scores = replayed(engine, request, pieces)
    engine.evict_held(request, EvictionConfig(60, recent=4, policy="replay:spread=all"), scores)
    lengths = engine.manager.tables["attention"].lengths[engine.manager.slot_of[request.key]]
    assert lengths.min() < lengths.max(), "the streams are of different lengths"
    again = torch.cat(replayed(engine, request, pieces))
    assert again.shape == (len(lengths), lengths.max()) and not again.isnan().any()
    for row, length in zip(again, lengths.tolist(), strict=True):
        assert (row[:length] > 0).all() and (row[length:] == 0).all()
    engine.abort(request)


# ---- what is refused, and what an interrupt leaves


def test_a_text_that_does_not_fit_twice_is_refused(model: Callable[..., LLM]) -> None:
    engine, tokens = model("llama").engine, prompt(400)
    request = read(engine, tokens)
    with pytest.raises(RequestError, match="shorten the text by 48 tokens"):
        engine.replay(request, ReplayPart([1] * 10, [2] * 150))
    engine.replay(request, ReplayPart([1] * 10, [2] * 102))
    engine.abort(request)
    with pytest.raises(RequestError, match="given up"):
        engine.replay(request, ReplayPart([1], [2]))
    assert_nothing_held(engine)


def test_running_requests_keep_their_room(model: Callable[..., LLM]) -> None:
    """Other held caches give their slots for the fork; requests that run do not."""
    engine = model("llama").engine
    held = [read(engine, prompt(20, seed=i)) for i in range(3)]
    engine.replay(held[1], ReplayPart([1], [2, 3]))
    assert engine.scheduler.held == held and held[0].key in engine.manager.frozen
    running = [engine.add(prompt(20, seed=7 + i), SamplingParams(max_tokens=50)) for i in range(2)]
    engine.step()
    assert engine.scheduler.held == held
    left = held[1]
    with pytest.raises(RequestError, match="no room to read 3 tokens again beside the 20 of the text and 2 running"):
        engine.replay(left, ReplayPart([1], [2, 3]))
    run(engine)
    assert all(request.error is None for request in running)
    engine.replay(left, ReplayPart([1], [2, 3]))
    for request in held:
        engine.abort(request)
    assert_nothing_held(engine)


class Torn(BaseException):
    """An interrupt in the middle of a step."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problem", (Torn, RequestError))
def test_an_interrupt_leaves_the_request_and_no_fork(
    kind: str, problem: type[BaseException], model: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = model(kind).engine, prompt(TEXT)
    request = read(engine, tokens)
    want = replayed(engine, request, parts(tokens))
    calls = 0

    def torn(*args: Any, **more: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise problem("torn")
        observe(*args, **more)

    observe = engine.runner.observe
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "observe", torn)
        with pytest.raises(problem):
            replayed(engine, request, parts(tokens))
    assert calls == 3
    engine.manager.check_integrity()
    assert list(engine.manager.slot_of) == [request.key], "the fork is gone and the request is not"
    assert all(torch.equal(a, b) for a, b in zip(replayed(engine, request, parts(tokens)), want, strict=True))
    engine.abort(request)
    assert_nothing_held(engine)


def test_steps_of_requests_are_not_looked_at(model: Callable[..., LLM]) -> None:
    """An answer is the same bits after a replay as without one, and no observer stays behind."""
    engine, tokens = model("qwen3_5").engine, prompt(TEXT)
    request = engine.add(tokens, SamplingParams(max_tokens=6), eviction=None)
    run(engine)
    held = read(engine, tokens)
    replayed(engine, held, parts(tokens))
    after = engine.add(tokens, SamplingParams(max_tokens=6), eviction=None)
    run(engine)
    assert after.tokens == request.tokens
    engine.abort(held)
