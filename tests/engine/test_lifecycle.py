"""How requests end: stop conditions, refusals, aborts, errors; and that the engine goes on afterwards."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.driving import KINDS, alone, assert_nothing_held, count_tokens, prompt, run
from hybridkv.config import SamplingParams
from hybridkv.engine import pipeline
from hybridkv.engine.engine import Engine
from hybridkv.engine.runner import StepInputs
from hybridkv.errors import RequestError
from hybridkv.request import Status
from hybridkv.text.stream import TextStream
from hybridkv.text.tokenizer import Tokenizer

ASK = SamplingParams(max_tokens=12)


# ---- how an answer ends


def test_max_tokens_end_an_answer(engine_of: Callable) -> None:
    for n in (1, 2, 12):
        done = alone(engine_of("llama"), prompt(9), SamplingParams(max_tokens=n))
        assert len(done.generated) == n and done.finish_reason == "length"


def test_the_context_ends_an_answer(engine_of: Callable) -> None:
    engine = engine_of("llama", context=40)
    done = alone(engine, prompt(30), SamplingParams(max_tokens=100))
    assert len(done.tokens) == 40 and done.finish_reason == "length"
    done = alone(engine, prompt(39), SamplingParams(max_tokens=100))
    assert len(done.generated) == 1 and done.finish_reason == "length"
    assert_nothing_held(engine)


def test_the_end_token_ends_an_answer_unless_ignored(engine_of: Callable, ascii_tokenizer: Tokenizer) -> None:
    free = alone(engine_of("llama"), prompt(9), ASK).generated
    end = free[5]
    cut = free[: free.index(end) + 1]
    engine = engine_of("llama", eos=frozenset({end}), tokenizer=ascii_tokenizer)
    done = alone(engine, prompt(9), ASK)
    assert done.generated == cut and done.finish_reason == "stop"
    assert done.text.text == ascii_tokenizer.decode(cut[:-1])  # the end token has no text
    done = alone(engine, prompt(9), SamplingParams(max_tokens=12, ignore_eos=True))
    assert done.generated == free and done.finish_reason == "length"


def test_stop_ids_end_an_answer_also_when_the_end_token_is_ignored(engine_of: Callable) -> None:
    free = alone(engine_of("llama"), prompt(9), ASK).generated
    stop = SamplingParams(max_tokens=12, stop_token_ids=(free[4], 96), ignore_eos=True)
    done = alone(engine_of("llama", eos=frozenset({free[0]})), prompt(9), stop)
    assert done.generated == free[: free.index(free[4]) + 1] and done.finish_reason == "stop"


@pytest.mark.parametrize("length", (1, 3))
def test_stop_strings_end_an_answer_and_are_cut_from_it(
    length: int, engine_of: Callable, ascii_tokenizer: Tokenizer
) -> None:
    engine = engine_of("llama", tokenizer=ascii_tokenizer)
    free = alone(engine, prompt(9), SamplingParams(max_tokens=30))
    text = free.text.text
    stop = text[8 : 8 + length]
    done = alone(engine, prompt(9), SamplingParams(max_tokens=30, stop=("never there", stop)))
    assert done.text.text == text[: text.index(stop)] and done.finish_reason == "stop"
    assert done.generated == free.generated[: len(done.generated)] and len(done.generated) < 30


def test_a_stop_string_that_only_begins_at_the_end_is_text(engine_of: Callable, ascii_tokenizer: Tokenizer) -> None:
    engine = engine_of("llama", tokenizer=ascii_tokenizer)
    text = alone(engine, prompt(9), ASK).text.text
    done = alone(engine, prompt(9), SamplingParams(max_tokens=12, stop=text[-3:] + "\n"))
    assert done.text.text == text and done.finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_all_requests_join_to_their_texts(kind: str, engine_of: Callable, ascii_tokenizer: Tokenizer) -> None:
    engine = engine_of(kind, tokenizer=ascii_tokenizer)
    requests = [engine.add(prompt(5 + i, i), SamplingParams(max_tokens=15 + i, stop="zq")) for i in range(4)]
    updates = run(engine)
    for request in requests:
        mine = [u for u in updates if u.request is request]
        assert [u.token for u in mine] == request.generated
        assert "".join(u.text for u in mine) == request.text.text == ascii_tokenizer.decode(request.generated)
        assert len({u.text for u in mine}) > 3


# ---- refusals


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(engine_of: Callable) -> None:
    engine = engine_of("llama", context=64)
    for n in (64, 65, 1000):
        with pytest.raises(RequestError, match=f"{n} tokens.* 64 "):
            engine.add(prompt(n), ASK)
    assert_nothing_held(engine)
    assert len(alone(engine, prompt(63), ASK).generated) == 1


def test_a_prompt_longer_than_the_pool_is_refused_with_both_numbers(engine_of: Callable) -> None:
    """Else it would wait for ever, and all behind it."""
    engine = engine_of("llama", pool=96, context=512)
    with pytest.raises(RequestError, match=r"96 tokens.* 96 "):
        engine.add(prompt(96), ASK)
    assert_nothing_held(engine)
    done = alone(engine, prompt(95), ASK)
    assert done.finish_reason == "length" and len(done.generated) == 1
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_fills_the_pool_ends_there_and_alone(kind: str, engine_of: Callable) -> None:
    engine = engine_of(kind, pool=64, context=512)
    big, small = engine.add(prompt(40), SamplingParams(max_tokens=400)), engine.add(prompt(5), ASK)
    run(engine)
    assert big.finish_reason == "length" and len(big.tokens) == 64
    assert small.finish_reason == "length" and len(small.generated) == 12
    assert_nothing_held(engine)


@pytest.mark.parametrize("bad", ([], [97], [-1], [3, 2**40], [True], [1.0], ["1"], [None]))
def test_bad_token_ids_are_refused(bad: list[Any], engine_of: Callable) -> None:
    engine = engine_of("llama")
    with pytest.raises(RequestError, match="token"):
        engine.add(bad, ASK)
    with pytest.raises(RequestError, match="token"):
        engine.score(bad)
    assert_nothing_held(engine)


# ---- aborts


def test_a_waiting_request_can_be_aborted(engine_of: Callable) -> None:
    engine = engine_of("llama", slots=1)
    first, second, third = (engine.add(prompt(9, i), ASK) for i in range(3))
    engine.step()
    assert second.status is Status.WAITING
    engine.abort(second)
    run(engine)
    assert second.finish_reason == "abort" and second.generated == []
    assert first.finish_reason == third.finish_reason == "length"
    assert third.generated == alone(engine_of("llama"), prompt(9, 2), ASK).generated
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "steps"), ((200, 1), (200, 2), (5, 1), (5, 4)))
@pytest.mark.parametrize("hold", (False, True))
def test_a_running_request_can_be_aborted(kind: str, length: int, steps: int, hold: bool, engine_of: Callable) -> None:
    """In the middle of its prompt, and while it decodes, beside one that goes on."""
    engine = engine_of(kind, step_tokens=64)
    gone = engine.add(prompt(length, 1), ASK, hold=hold)
    stays = engine.add(prompt(7, 2), SamplingParams(max_tokens=20))
    for _ in range(steps):
        engine.step()
    assert gone.status is Status.RUNNING and bool(gone.generated) == (length == 5)
    engine.abort(gone)
    engine.abort(gone)  # twice does no harm
    assert gone.key not in engine.manager.slot_of
    run(engine)
    assert gone.finish_reason == "abort"
    assert stays.generated == alone(engine_of(kind), prompt(7, 2), SamplingParams(max_tokens=20)).generated
    assert_nothing_held(engine)


def test_a_preempted_request_can_be_aborted(engine_of: Callable) -> None:
    engine = engine_of("llama")
    request = engine.add(prompt(9), ASK)
    engine.step()
    engine.scheduler.preempt(request)
    engine.abort(request)
    assert_nothing_held(engine)
    assert request.finish_reason == "abort" and len(request.generated) == 1


def test_a_held_cache_can_be_given_back(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5")
    request = engine.add(prompt(9), ASK, hold=True)
    run(engine)
    assert engine.scheduler.held == [request] and request.finish_reason == "length"
    engine.abort(request)
    engine.abort(request)
    assert request.finish_reason == "length"
    assert_nothing_held(engine)


def test_stop_ends_an_answer_and_keeps_its_cache(engine_of: Callable) -> None:
    engine = engine_of("llama")
    request = engine.add(prompt(9), ASK, hold=True)
    for _ in range(4):
        engine.step()
    engine.stop(request)
    assert request.finish_reason == "abort" and len(request.generated) == 4 and engine.scheduler.held == [request]
    engine.stop(request)
    engine.abort(request)
    assert_nothing_held(engine)


# ---- errors


class Broken:
    """A model that fails in its third step, before or after it has written pages and state."""

    def __init__(self, model: Any, when: str) -> None:
        self.model, self.config, self.when, self.steps = model, model.config, when, 0

    def forward(self, *args: Any) -> Tensor:
        self.steps += 1
        if self.steps == 3 and self.when == "before":
            raise RuntimeError("injected")
        logits = self.model.forward(*args)
        if self.steps == 3:
            raise RuntimeError("injected")
        return logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ("before", "after"))
def test_a_failed_forward_ends_its_batch_and_the_engine_serves_on(kind: str, when: str, engine_of: Callable) -> None:
    engine = engine_of(kind, slots=2)
    good = engine.runner.model
    engine.runner.model = Broken(good, when)
    first, second, waiting = (engine.add(prompt(9 + i, i), ASK, hold=i == 0) for i in range(3))
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
    for request in (first, second):
        assert request.finished and request.finish_reason == "error" and "injected" in (request.error or "")
        assert len(request.generated) == 2
    assert not waiting.finished and not engine.scheduler.held
    run(engine)
    assert waiting.generated == alone(engine_of(kind), prompt(11, 2), ASK).generated
    again = alone(engine, prompt(9, 0), ASK)
    assert again.generated == alone(engine_of(kind), prompt(9, 0), ASK).generated
    assert_nothing_held(engine)


def fail_on_third(function: Callable) -> Callable:
    calls = 0

    def call(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("injected")
        return function(*args, **more)

    return call


@pytest.mark.parametrize("what", ("sampler", "detokenizer"))
def test_a_failure_after_the_forward_ends_its_batch_and_the_engine_serves_on(
    what: str, engine_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one request's text does wrong is its own, and is not raised."""
    engine = engine_of("qwen3_5", slots=1)
    if what == "sampler":
        monkeypatch.setattr(pipeline, "sample", fail_on_third(pipeline.sample))
    else:
        monkeypatch.setattr(TextStream, "push", fail_on_third(TextStream.push))
    broken, waiting = engine.add(prompt(9), ASK), engine.add(prompt(8, 1), ASK)
    with pytest.raises(RuntimeError, match="injected") if what == "sampler" else nullcontext():
        run(engine)
    assert broken.finish_reason == "error" and "injected" in (broken.error or "")
    run(engine)
    assert waiting.generated == alone(engine_of("qwen3_5"), prompt(8, 1), ASK).generated
    assert_nothing_held(engine)


@pytest.mark.parametrize("ask", ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}, {"logprobs": 2}))
def test_nan_logits_end_their_request_alone(ask: dict, engine_of: Callable) -> None:
    engine = engine_of("llama")
    forward = engine.runner.forward

    def poisoned(inputs: StepInputs) -> Tensor:
        logits = forward(inputs).clone()
        if len(first.generated) == 3 and not first.finished:
            logits[0, 50] = torch.nan
        return logits

    engine.runner.forward = poisoned
    params = SamplingParams(max_tokens=12, **ask)
    first, second = engine.add(prompt(9, 0), params), engine.add(prompt(8, 1), params)
    updates = run(engine)
    assert first.finish_reason == "error" and "NaN" in (first.error or "") and len(first.generated) == 3
    assert [u.token for u in updates if u.request is first][-1] is None
    assert second.generated == alone(engine_of("llama"), prompt(8, 1), params).generated
    assert_nothing_held(engine)
    assert alone(engine, prompt(9, 5), ASK).generated == alone(engine_of("llama"), prompt(9, 5), ASK).generated


# ---- a held cache goes on


def continued(
    engine: Engine, first: list[int], then: Callable[[list[int]], list[int]]
) -> tuple[list[int], list[int], int]:
    """(prompt, answer, tokens run) of a second turn after a first one of twelve tokens."""
    one = engine.add(first, ASK, hold=True)
    run(engine)
    counts = count_tokens(engine)
    tokens = then(one.tokens)
    two = engine.add(tokens, ASK, after=one)
    run(engine)
    return tokens, two.generated, sum(counts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_goes_on_runs_only_what_is_new(kind: str, engine_of: Callable) -> None:
    engine = engine_of(kind)
    tokens, answer, ran = continued(engine, prompt(70), lambda said: said + prompt(20, 5))
    assert answer == alone(engine_of(kind), tokens, ASK).generated
    assert ran == 1 + 20 + 11  # the last token of the answer was never run; then the new ones and eleven steps
    assert_nothing_held(engine)


@pytest.mark.parametrize(("kind", "keep"), [(kind, n) for kind in KINDS for n in (0, 1, 16, 33, 75)])
def test_a_turn_that_differs_is_cut_back_or_computed_again(kind: str, keep: int, engine_of: Callable) -> None:
    """Pages can be cut at any token; recurrent state cannot be rewound."""

    def differ(said: list[int]) -> list[int]:
        return said[:keep] + [(said[keep] + 1) % 97] + prompt(20, 5)

    engine = engine_of(kind)
    tokens, answer, ran = continued(engine, prompt(70), differ)
    assert answer == alone(engine_of(kind), tokens, ASK).generated
    reused = keep if kind == "llama" else 0
    assert ran == len(tokens) - reused + 11
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", (30, 70, 81))
def test_a_turn_that_is_a_beginning_of_what_is_held(kind: str, length: int, engine_of: Callable) -> None:
    """The last token is always run: it gives the logits."""
    engine = engine_of(kind)
    tokens, answer, ran = continued(engine, prompt(70), lambda said: said[:length])
    assert answer == alone(engine_of(kind), tokens, ASK).generated
    assert ran == (1 if kind == "llama" else length) + 11
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_held_cache_makes_room_when_others_need_it(kind: str, engine_of: Callable) -> None:
    engine = engine_of(kind, slots=2, pool=192)
    one = engine.add(prompt(70), ASK, hold=True)
    run(engine)
    others = [engine.add(prompt(60, i), ASK) for i in range(2)]
    run(engine)
    assert one not in engine.scheduler.held and one.key not in engine.manager.slot_of
    two = engine.add(one.tokens + prompt(5, 5), ASK, after=one)
    run(engine)
    assert two.generated == alone(engine_of(kind), one.tokens + prompt(5, 5), ASK).generated
    assert all(len(r.generated) == 12 for r in others)
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_request_survives_preemption(kind: str, engine_of: Callable) -> None:
    engine = engine_of(kind)
    one = engine.add(prompt(30), ASK, hold=True)
    run(engine)
    two = engine.add(one.tokens + prompt(20, 5), ASK, after=one, hold=True)
    engine.step()
    engine.step()
    engine.scheduler.preempt(two)
    run(engine)
    assert two.preemptions == 1
    assert two.generated == alone(engine_of(kind), one.tokens + prompt(20, 5), ASK).generated
    engine.abort(two)
    assert_nothing_held(engine)


def test_a_refused_second_turn_leaves_the_first_one_held(engine_of: Callable) -> None:
    engine = engine_of("llama", context=100)
    one = engine.add(prompt(30), ASK, hold=True)
    run(engine)
    with pytest.raises(RequestError, match="100"):
        engine.add(one.tokens + prompt(60, 5), ASK, after=one)
    assert engine.scheduler.held == [one]
    engine.abort(one)
    assert_nothing_held(engine)
