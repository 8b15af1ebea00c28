"""Bounded requests: never more than budget + one step, in prompts, answers and later turns, whoever else is there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from engine.driving import run
from hybridkv import LLM, CacheConfig, EvictionConfig, SamplingParams
from hybridkv.errors import HybridKVError
from hybridkv.eviction import POLICIES, Ada, Pyramid, find_policy
from hybridkv.eviction.policies import Peak
from hybridkv.request import Request

BUDGET, STEP = 96, 128


@pytest.fixture
def open_bounded(oracle: Callable) -> Callable[..., LLM]:
    def build(kind: str = "llama", requests: int = 1, exact: bool = False, **cache: Any) -> LLM:
        settings = {"budget": BUDGET, "window": 16, "recent": 16, "page_size": 16, "bounded": True, **cache}
        return LLM(
            str(oracle(kind).folder), "cpu", "float32", exact, CacheConfig("f32", **settings), requests, 1024,
            step_tokens=STEP,
        )  # fmt: skip

    return build


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def finished(llm: LLM, *requests: Request) -> None:
    """To the end; streams may share a budget, so it is their mean that is bounded, and each one's where they do not."""
    config = llm.cache_config.eviction
    assert config is not None
    even, longest = find_policy(config.policy).spread is None, 0.0

    def look(step: int) -> None:
        nonlocal longest
        held = [llm.manager.lengths(r.key)["attention"] for r in requests if r.key in llm.manager.slot_of]
        longest = max([longest, *(float(n.max() if even else n.mean()) for n in held)])

    run(llm.engine, look)
    assert longest <= BUDGET + STEP
    assert all(r.error is None for r in requests), [r.error for r in requests]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ("auto", "snapkv", "peak:spread=all"))
@pytest.mark.parametrize(("kind", "prompt", "answer"), (("llama", 10, 500), ("qwen3_5", 300, 300)))
def test_answers_of_any_length(kind: str, prompt: int, answer: int, policy: str, open_bounded: Callable) -> None:
    llm = open_bounded(kind, policy=policy)
    request = llm.engine.add(tiny.token_ids(prompt), greedy(answer))
    finished(llm, request)
    assert request.answer_tokens == answer and len(request.evictions) >= 3


@pytest.mark.parametrize("policy", ("auto", "snapkv"))
def test_a_conversation_goes_on_in_its_own_pages(policy: str, open_bounded: Callable) -> None:
    """One slot and pools of budget + one step: what the first answer left is still there when the next turn is read."""
    llm = open_bounded(policy=policy)
    one = llm.engine.add(tiny.token_ids(300), greedy(150), hold=True)
    finished(llm, one)
    two = llm.engine.add(one.tokens + tiny.token_ids(200, seed=3), greedy(90), hold=True, after=one)
    finished(llm, two)
    assert two.cached_tokens == len(one.tokens) - 1 and two.answer_tokens == 90


@pytest.mark.parametrize("kind", (pytest.param("llama", marks=pytest.mark.slow), "qwen3_5"))
def test_cuts_and_answers_are_those_of_the_request_alone(kind: str, open_bounded: Callable) -> None:
    """Beside others a prompt is read in other chunks; in exact mode not a token may differ for that."""
    llm = open_bounded(kind, requests=3, exact=True)
    prompts = [tiny.token_ids(n, seed=n) for n in (300, 220, 40)]
    alone = []
    for p in prompts:
        alone.append(llm.engine.add(p, greedy(40)))
        finished(llm, alone[-1])
    together = [llm.engine.add(p, greedy(40)) for p in reversed(prompts)][::-1]
    finished(llm, *together)
    for a, b in zip(alone, together, strict=True):
        assert a.evictions.keys() == b.evictions.keys() and a.generated == b.generated
        assert all(torch.equal(torch.tensor(x), torch.tensor(y))
                   for at in a.evictions for la, lb in zip(a.evictions[at], b.evictions[at])
                   for x, y in zip(la, lb))  # fmt: skip


@pytest.mark.parametrize("kind", (pytest.param("llama", marks=pytest.mark.slow), "qwen3_5"))
def test_reading_ahead_leaves_no_trace(kind: str, open_bounded: Callable) -> None:
    """A request that is computed again drops what it dropped before, without looking ahead: it must say the same."""
    llm = open_bounded(kind, exact=True)
    tried, hidden = [], llm.engine.runner.hidden

    def counted(inputs: Any) -> Any:
        tried.append(inputs.tokens.tolist())
        return hidden(inputs)

    llm.engine.runner.hidden = counted
    prompt = tiny.token_ids(700)
    request = llm.engine.add(prompt, greedy(30))
    while len(request.generated) < 5:
        llm.engine.step()
    on_the_way = [at for at in request.evictions if at < 700]
    assert len(on_the_way) == len(tried) > 5 and all(ahead == prompt[-16:] for ahead in tried)
    again = llm.engine.add(prompt, greedy(30))
    again.evictions = dict(request.evictions)  # as if it had been preempted
    finished(llm, request, again)
    assert len(tried) == len(on_the_way) and again.generated == request.generated
    assert request.policy == "peak"


@pytest.mark.parametrize("policy", ("peak", "keydiff"))
def test_a_policy_that_is_named_chooses_by_what_was_read(policy: str, open_bounded: Callable) -> None:
    llm = open_bounded(policy=policy)
    llm.engine.runner.hidden = None  # nothing is read ahead
    request = llm.engine.add(tiny.token_ids(400), greedy(5))
    finished(llm, request)
    assert len(request.evictions) > 3


def test_the_question_is_found_on_the_way(open_bounded: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the prompt's end attends to survives every eviction before it: entries chosen without it do not. Here `peak`
    is that attention and nothing else."""
    monkeypatch.setitem(POLICIES, "peak", lambda: Peak(strength=1e6, values=False, heads=0.0, shared=False))
    llm = open_bounded(bounded=False)
    ids = tiny.token_ids(620)

    def kept(eviction: Any) -> set[tuple[int, int, int]]:
        request = llm.engine.add(ids, greedy(3), eviction=eviction)
        found: set[tuple[int, int, int]] = set()
        while not request.finished:
            llm.engine.step()
            if request.key in llm.manager.slot_of and request.prompt_tokens in request.evictions:
                at = llm.manager.entry_positions(request.key, "attention")
                found = {(i, 0, int(p)) for i, stream in enumerate(at) for p in stream}
        return found

    base = EvictionConfig(48, 16, 16, "peak", first=0)
    whole = kept(base)
    by_question = kept(replace(base, policy="auto", bounded=True))
    without = kept(replace(base, policy="keydiff", bounded=True))
    assert len(whole & by_question) > len(whole & without)


def test_logits_are_read_as_a_request_is(open_bounded: Callable) -> None:
    llm = open_bounded()
    ids = tiny.token_ids(400)
    request = llm.engine.add(ids, SamplingParams(max_tokens=1, logprobs=0))
    finished(llm, request)
    logits = llm.logits(ids)
    assert len(logits) == 400 and int(logits[-1].argmax()) == request.generated[0]
    torch.testing.assert_close(logits[-1], llm.logits(ids, chunk=50)[-1])


@pytest.mark.parametrize(("policy", "scope"), [(Ada(), "layer"), (Ada(), "global"), (Pyramid(), "global")])
def test_budgets_that_differ_need_lists_that_may(policy: Any, scope: str, open_bounded: Callable) -> None:
    with pytest.raises(HybridKVError, match="use scope='head'"):
        open_bounded(policy=policy, scope=scope)


def test_pyramid_does_not_drop_what_another_policy_spreads() -> None:
    with pytest.raises(HybridKVError, match=r"use Ada\(Pyramid\(\)\)"):
        Pyramid(Ada())
