"""Penalties, logit bias, bad words, min_tokens and hooks, through the engine, against a plain loop over logits.

The loop asks a second engine for the logits after every token and chooses by itself. Each request must get what the
loop says, alone and beside others, with steps launched ahead as on a GPU, and after it was preempted.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.driving import KINDS, alone, assert_nothing_held, prompt, run
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.errors import RequestError
from hybridkv.kernels.sampling.rows import seen_tokens
from hybridkv.text.tokenizer import Tokenizer

VOCAB = 97


def plain_loop(
    logits_after: Callable[[list[int]], Tensor],
    tokens: Sequence[int],
    count: int,
    params: SamplingParams,
    ends: Sequence[int] = (),
    bad: Sequence[Sequence[int]] = (),
) -> list[int]:
    """`count` greedy tokens, chosen one logit at a time; fewer if one of `ends` comes."""
    p = params.resolved()
    answer: list[int] = []
    for _ in range(count):
        scores = logits_after([*tokens, *answer]).tolist()
        for i in range(len(scores)):
            scores[i] += p.logit_bias.get(i, 0.0)
            if i in tokens or i in answer:
                scores[i] = scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
            scores[i] -= p.frequency_penalty * answer.count(i)
            scores[i] -= p.presence_penalty * (i in answer)
            if i in ends and len(answer) < p.min_tokens:
                scores[i] = -float("inf")
            for *before, last in bad:
                if i == last and answer[len(answer) - len(before) :] == before:
                    scores[i] = -float("inf")
        answer.append(max(range(len(scores)), key=lambda i: scores[i]))
        if answer[-1] in ends:
            break
    return answer


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def logits_after(kind: str, engine_of: Callable) -> Callable[[list[int]], Tensor]:
    engine: Engine = engine_of(kind)
    found = cache(lambda tokens: engine.score(list(tokens))[-1])
    return lambda tokens: found(tuple(tokens))


ASKS: tuple[dict, ...] = (
    {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.4},
    {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"logit_bias": {5: 3.0, 90: 2.5, 17: -100.0}}, {"logit_bias": {8: 100.0}, "frequency_penalty": 2.0},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ahead", (False, True))
def test_penalties_and_biases_are_those_of_a_plain_loop(
    kind: str, ahead: bool, logits_after: Callable, engine_of: Callable
) -> None:
    """All together in one batch: each gets what the loop says. Half way one is preempted."""
    asked = [(prompt(6 + i, seed=i), SamplingParams(max_tokens=20, **ask)) for i, ask in enumerate(ASKS)]
    want = [plain_loop(logits_after, tokens, 20, params) for tokens, params in asked]
    plain = [plain_loop(logits_after, tokens, 20, SamplingParams()) for tokens, _ in asked]
    assert all(a != b for a, b in zip(want, plain)), "what was asked for changes nothing"
    engine = engine_of(kind)
    engine.launches_ahead = ahead
    requests = [engine.add(*each) for each in asked]

    def preempt(step: int) -> None:
        if step == 9 and engine.pipeline.in_flight is None:
            engine.scheduler.preempt(requests[2])

    run(engine, preempt)
    assert [r.generated for r in requests] == want
    assert requests[2].preemptions == (not ahead)
    assert all(r.sampler is None for r in requests)  # nothing stays on the device
    assert_nothing_held(engine)


def test_penalties_count_each_token_once_however_steps_are_launched(engine_of: Callable) -> None:
    """Launched ahead or not in turn, as when others come and go: the counts are those of the answer."""
    engine = engine_of("llama")
    want = alone(engine_of("llama"), prompt(7), SamplingParams(max_tokens=40, frequency_penalty=0.4)).generated
    request = engine.add(prompt(7), SamplingParams(max_tokens=40, frequency_penalty=0.4))
    counts = []

    def switch(step: int) -> None:
        engine.launches_ahead = step % 5 > 1
        if engine.pipeline.in_flight is None and request.sampler is not None:
            want = seen_tokens(VOCAB, prompt(7), request.generated, torch.device("cpu"))
            counts.append(torch.equal(request.sampler.row.seen, want))

    run(engine, switch)
    assert request.generated == want and len(counts) > 5 and all(counts)


def test_tokens_outside_the_vocabulary_and_bad_words_without_a_tokenizer_are_refused(engine_of: Callable) -> None:
    engine = engine_of("llama")
    with pytest.raises(RequestError, match="token id 97 of logit_bias is outside the vocabulary of 97"):
        engine.add(prompt(5), SamplingParams(logit_bias={97: 1.0}))
    with pytest.raises(RequestError, match="token id 97 of stop_token_ids is outside the vocabulary of 97"):
        engine.add(prompt(5), SamplingParams(stop_token_ids=[96, 97]))
    with pytest.raises(RequestError, match="bad_words need a tokenizer"):
        engine.add(prompt(5), SamplingParams(bad_words=["x"]))
    assert engine.idle


# ---- min_tokens


@pytest.mark.parametrize("ahead", (False, True))
def test_no_answer_ends_before_min_tokens(kind: str, ahead: bool, logits_after: Callable, engine_of: Callable) -> None:
    free = plain_loop(logits_after, prompt(9), 12, SamplingParams())
    ends = (free[1], free[4])
    for least in (0, 1, 2, 5, 7):
        params = SamplingParams(max_tokens=12, min_tokens=least, stop_token_ids=(ends[1],))
        want = plain_loop(logits_after, prompt(9), 12, params, ends)
        engine = engine_of(kind, eos=frozenset(ends[:1]))
        engine.launches_ahead = ahead
        beside = engine.add(prompt(4, seed=5), SamplingParams(max_tokens=30))
        request = engine.add(prompt(9), params)
        run(engine)
        assert request.generated == want and beside.answer_tokens > 0
        assert len(want) > least if request.finish_reason == "stop" else len(want) == 12


def test_a_stop_string_does_not_count_before_min_tokens(engine_of: Callable, ascii_tokenizer: Tokenizer) -> None:
    free = alone(engine_of("llama", tokenizer=ascii_tokenizer), prompt(9), SamplingParams(max_tokens=40))
    text, letters = free.text.text, [ascii_tokenizer.decode([t]) for t in free.generated]
    again = next(i for i in range(8, 40) if letters[i] and letters[i] in letters[:4])
    stop = letters[again]
    for least, end in ((0, letters.index(stop)), (5, next(i for i in range(5, 40) if letters[i] == stop))):
        engine = engine_of("llama", tokenizer=ascii_tokenizer)
        request = engine.add(prompt(9), SamplingParams(max_tokens=40, min_tokens=least, stop=stop))
        run(engine)
        assert request.generated == free.generated[: end + 1] and request.finish_reason == "stop"
        assert request.text.text == "".join(letters[:end]) == text[: len(request.text.text)]


# ---- bad words


@pytest.mark.parametrize("length", (1, 2, 3))
def test_a_bad_word_never_appears_and_its_beginning_may(
    kind: str, length: int, logits_after: Callable, engine_of: Callable, ascii_tokenizer: Tokenizer
) -> None:
    free = plain_loop(logits_after, prompt(9), 24, SamplingParams())
    letters = [ascii_tokenizer.decode([t]) for t in free]
    at = next(i for i in range(2, 20) if all(part.strip() for part in letters[i : i + length]))
    word = "".join(letters[at : at + length])
    want = plain_loop(logits_after, prompt(9), 24, SamplingParams(), bad=[free[at : at + length]])
    assert want != free and want[: at + length - 1] == free[: at + length - 1]
    engine = engine_of(kind, tokenizer=ascii_tokenizer)
    engine.launches_ahead = True
    beside = engine.add(prompt(5, seed=3), SamplingParams(max_tokens=24))
    request = engine.add(prompt(9), SamplingParams(max_tokens=24, bad_words=[word]))
    run(engine)
    assert request.generated == want and word not in request.text.text
    assert beside.generated == plain_loop(logits_after, prompt(5, seed=3), 24, SamplingParams())


def test_a_bad_word_outside_the_vocabulary_is_refused(engine_of: Callable, ascii_tokenizer: Tokenizer) -> None:
    """Of a tokenizer with more tokens than the model: refused at once, and others go on."""
    engine = engine_of("llama", tokenizer=ascii_tokenizer)
    other = engine.add(prompt(9), SamplingParams(max_tokens=2))
    engine.vocab = 20
    with pytest.raises(RequestError, match="bad word has token id .* outside the vocabulary of 20"):
        engine.add([1, 2, 3], SamplingParams(bad_words=["zz"]))
    run(engine)
    assert other.error is None and other.answer_tokens == 2


def test_bad_words_of_the_prompt_are_no_beginning(engine_of: Callable, ascii_tokenizer: Tokenizer) -> None:
    """Only what was generated counts: the prompt's last letter and the answer's first may make the word."""
    engine = engine_of("llama", tokenizer=ascii_tokenizer)
    free = alone(engine, prompt(9), SamplingParams(max_tokens=3)).generated
    word = ascii_tokenizer.decode([prompt(9)[-1], free[0]])
    assert len(word) == 2 and word.lstrip() == word
    assert alone(engine, prompt(9), SamplingParams(max_tokens=3, bad_words=[word])).generated[0] == free[0]


def test_a_bad_word_is_found_with_and_without_a_space_before_it(
    engine_of: Callable, ascii_tokenizer: Tokenizer
) -> None:
    engine = engine_of("llama", tokenizer=ascii_tokenizer)
    request = engine.add(prompt(3), SamplingParams(bad_words=["ab", " ab"], max_tokens=1))
    plain = ascii_tokenizer.encode("ab", bos=False)
    assert request.bad_words == (tuple(plain), tuple(ascii_tokenizer.encode(" ab", bos=False)))


def test_where_every_token_is_ruled_out_that_request_ends_and_others_go_on(
    engine_of: Callable, ascii_tokenizer: Tokenizer
) -> None:
    engine = engine_of("llama", tokenizer=ascii_tokenizer)
    everything = range(VOCAB)
    for extra in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "top_k": 4, "logprobs": 1}):
        bad = engine.add(prompt(5), SamplingParams(min_tokens=2, max_tokens=4, stop_token_ids=everything, **extra))
        good = engine.add(prompt(6), SamplingParams(max_tokens=4))
        run(engine)
        assert bad.finish_reason == "error" and "no token is left" in str(bad.error) and not bad.generated
        assert good.finish_reason == "length" and good.answer_tokens == 4 and bad.logprobs == []
    assert_nothing_held(engine)


# ---- hooks


def test_a_hook_sees_the_answer_so_far_and_its_logits(kind: str, logits_after: Callable, engine_of: Callable) -> None:
    seen: list[tuple[list[int], Tensor]] = []

    def watch(generated: list[int], logits: Tensor) -> None:
        seen.append((generated, logits.clone()))

    engine = engine_of(kind)
    engine.launches_ahead = True
    beside = engine.add(prompt(4, seed=2), SamplingParams(max_tokens=9))
    request = engine.add(prompt(9), SamplingParams(max_tokens=6, logits_hook=watch, logit_bias={3: 1.0}))
    run(engine)
    assert [s[0] for s in seen] == [request.generated[:i] for i in range(6)]
    for generated, logits in seen:
        want = logits_after([*prompt(9), *generated])
        want[3] += 1
        assert logits.dtype == torch.float32 and torch.allclose(logits, want, atol=1e-4)
    assert beside.answer_tokens == 9


def odd_only(generated: list[int], logits: Tensor) -> Tensor:
    return torch.where(torch.arange(len(logits)) % 2 == 1, logits, -torch.inf)


def odd_only_in_place(generated: list[int], logits: Tensor) -> None:
    logits[::2] = -torch.inf


@pytest.mark.parametrize("hook", (odd_only, odd_only_in_place))
@pytest.mark.parametrize("extra", ({}, {"temperature": 2.0, "seed": 1}, {"temperature": 2.0, "top_p": 0.9, "seed": 1}))
def test_a_hook_decides_which_tokens_may_come(hook: Callable, extra: dict, engine_of: Callable) -> None:
    engine = engine_of("llama")
    engine.launches_ahead = True
    request = engine.add(prompt(9), SamplingParams(max_tokens=20, logits_hook=hook, **extra))
    beside = engine.add(prompt(9), SamplingParams(max_tokens=20, **extra))
    run(engine)
    assert all(token % 2 for token in request.generated) and request.answer_tokens == 20
    assert beside.generated == alone(engine_of("llama"), prompt(9), beside.params).generated
    assert any(token % 2 == 0 for token in beside.generated)


def raises(generated: list[int], logits: Tensor) -> Tensor:
    if len(generated) == 2:
        raise KeyError("no such rule")
    return logits


def wrong_shape(generated: list[int], logits: Tensor) -> Tensor:
    return logits[:5]


def wrong_kind(generated: list[int], logits: Tensor) -> Any:
    return logits.tolist()


def all_gone(generated: list[int], logits: Tensor) -> Tensor:
    return torch.full_like(logits, -torch.inf)


def one_nan(generated: list[int], logits: Tensor) -> None:
    logits[7] = torch.nan


@pytest.mark.parametrize(
    ("hook", "message"),
    (
        (raises, "logits_hook failed: KeyError('no such rule')"),
        (wrong_shape, r"logits_hook must return a Tensor [97], or None, not a Tensor [5]"),
        (wrong_kind, r"logits_hook must return a Tensor [97], or None, not a list"),
        (all_gone, "no token is left"),
        (one_nan, "no token is left"),
    ),
)
@pytest.mark.parametrize("extra", ({}, {"temperature": 1.0, "seed": 4}))
def test_a_hook_that_fails_ends_its_request_alone(
    hook: Callable, message: str, extra: dict, engine_of: Callable
) -> None:
    engine = engine_of("qwen3_5")
    engine.launches_ahead = True
    others = [engine.add(prompt(5 + i, seed=i), SamplingParams(max_tokens=8, **extra)) for i in range(2)]
    bad = engine.add(prompt(9), SamplingParams(max_tokens=8, logits_hook=hook, logprobs=1, **extra))
    run(engine)
    assert bad.finish_reason == "error" and message in str(bad.error)
    assert len(bad.logprobs) == bad.answer_tokens == (2 if hook is raises else 0)
    for i, request in enumerate(others):
        want = alone(engine_of("qwen3_5"), prompt(5 + i, seed=i), SamplingParams(max_tokens=8, **extra))
        assert request.generated == want.generated
    assert alone(engine, prompt(9), SamplingParams(max_tokens=3)).answer_tokens == 3
    assert_nothing_held(engine)


# ---- defaults, and how long an answer is


def test_the_models_own_defaults_apply_where_a_request_says_nothing(engine_of: Callable) -> None:
    engine = engine_of("llama")
    greedy = alone(engine, prompt(9), SamplingParams(max_tokens=12)).generated
    engine.sampling_defaults = {"temperature": 1.5, "top_k": 10}
    drawn = alone(engine, prompt(9), SamplingParams(max_tokens=12, seed=3))
    assert (drawn.params.temperature, drawn.params.top_k, drawn.params.top_p) == (1.5, 10, 1.0)
    same = SamplingParams(max_tokens=12, seed=3, temperature=1.5, top_k=10)
    assert drawn.generated == alone(engine_of("llama"), prompt(9), same).generated != greedy
    assert alone(engine, prompt(9), SamplingParams(max_tokens=12, temperature=0)).generated == greedy
    assert alone(engine, prompt(9), replace(same, temperature=0.0, top_k=None)).generated == greedy


def test_an_answer_goes_on_as_long_as_the_context_allows(engine_of: Callable) -> None:
    engine = engine_of("llama", context=70)
    request = alone(engine, prompt(9), SamplingParams())
    assert len(request.tokens) == 70 and request.finish_reason == "length"
    assert alone(engine_of("llama", pool=64), prompt(9), SamplingParams()).answer_tokens == 64 - 9
