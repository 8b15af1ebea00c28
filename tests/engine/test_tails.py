"""Tails: the next turn of a conversation begins with the one before, to its last token, and answers as it does cold."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from long_form import spread

from engine.driving import assert_nothing_held, count_tokens, prompt, run
from engine.reusing import ASK, Cold, ask, check, poison, same
from hybridkv.cache.reuse import Reuse
from hybridkv.config import CacheConfig
from hybridkv.engine import ending
from hybridkv.engine.engine import Engine
from hybridkv.request import Request

KINDS = ("llama", "qwen3_5")


@pytest.fixture(scope="module")
def cold(engine_of: Callable) -> Callable[[str], Cold]:
    made: dict[str, Cold] = {}
    return lambda kind: made.setdefault(kind, Cold(lambda: engine_of(kind, exact=True)))


def reuse_of(engine: Engine) -> Reuse:
    assert engine.manager.reuse is not None
    return engine.manager.reuse


def turn(engine: Engine, cold: Cold, end: int, seed: int = 0) -> Request:
    """A turn whose cache ends at `end` tokens: the model says what ends it after up to three tokens more.

    With steps launched ahead the last token has been read, too, before it was known.
    """
    ahead = engine.launches_ahead
    for said in (3, 2, 1, 0):
        tokens = prompt(end - said - ahead, seed)
        known = cold(tokens).generated
        if known[said] not in known[:said]:
            break
    first = ask(engine, tokens, replace(ASK, max_tokens=20, stop_token_ids=[known[said]]))
    assert first.finish_reason == "stop" and first.generated == known[: said + 1]
    assert len(first.tokens) == end + (not ahead)
    assert bool(reuse_of(engine).publishing.late) == ahead, "no step was launched ahead"
    return first


@spread("kind, ahead", KINDS, (False, True))
def test_a_turn_of_any_length_is_taken_up_at_its_last_token(
    kind: str, ahead: bool, engine_of: Callable, cold: Callable
) -> None:
    engine = engine_of(kind, exact=True, rows=8)
    engine.launches_ahead = ahead
    q = reuse_of(engine).q
    for i, end in enumerate(k * q + off for k in (1, 2) for off in (0, 1, 2, 5, q - 1)[:: k if q > 16 else 1]):
        first = turn(engine, cold(kind), end, seed=i)
        poison(engine)
        counts = count_tokens(engine)
        tokens = [*first.tokens, *prompt(9, 40 + i)]
        second = ask(engine, tokens)
        assert second.cached_tokens == end == second.reuse["cached"] and counts[0] == len(tokens) - end
        assert second.reuse["reason"] in ("full", "diverged")
        assert same(second, cold(kind)(tokens))
        check(engine)
    assert_nothing_held(engine)


def test_the_state_of_another_position_shows(
    engine_of: Callable, cold: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by one: the end is said to be a token before what a step that was launched ahead has read."""
    engine, keep = engine_of("qwen3_5", exact=True, rows=8), ending.keep_end
    engine.launches_ahead = True

    def short(reuse: Reuse, request: Hashable, *more: Any) -> bool:
        slot = reuse.manager.slot_of[request]
        reuse.manager.reached[slot] = reuse.manager.positions[slot]
        return keep(reuse, request, *more)

    monkeypatch.setattr(ending, "keep_end", short)
    stop = cold("qwen3_5")(prompt(70, 3)).generated[0]
    first = ask(engine, prompt(70, 3), replace(ASK, max_tokens=20, stop_token_ids=[stop]))
    more = [*first.tokens, *prompt(9, 9)]
    second = ask(engine, more)
    assert second.cached_tokens == 70 and not same(second, cold("qwen3_5")(more))


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_turn_and_a_conversation_of_many_turns(kind: str, engine_of: Callable, cold: Callable) -> None:
    """Also one that is shorter than a column; each turn goes on from the one before it."""
    engine = engine_of(kind, exact=True, rows=3)
    tokens, before = prompt(5, 3), 0
    for i in range(6):
        poison(engine)
        found = ask(engine, tokens)
        assert same(found, cold(kind)(tokens))
        assert found.cached_tokens == before
        before = len(found.tokens) - 1
        tokens = [*found.tokens, *prompt(7, 50 + i)]
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_several_go_on_from_one_turn_at_once(kind: str, engine_of: Callable, cold: Callable) -> None:
    """Each copies the open page before it writes; the turn stays as it was."""
    engine = engine_of(kind, exact=True, rows=6, slots=4)
    first = ask(engine, prompt(75, 3))
    poison(engine)
    prompts = [[*first.tokens, *prompt(6 + i, 60 + i)] for i in range(3)]
    asked = [engine.add(tokens, replace(ASK, max_tokens=8)) for tokens in prompts]
    run(engine)
    check(engine)
    for request, tokens in zip(asked, prompts, strict=True):
        assert request.cached_tokens == 78 and same(request, cold(kind)(tokens, replace(ASK, max_tokens=8)))
    again = ask(engine, prompts[0])
    assert again.cached_tokens >= 78 and same(again, cold(kind)(prompts[0]))


def test_an_end_on_trial_takes_the_place_of_no_checkpoint_near_it(engine_of: Callable, cold: Callable) -> None:
    engine = engine_of("qwen3_5", exact=True, rows=2)
    marks = [(64, "client"), (128, "client")]
    ask(engine, prompt(150, 3), marks=marks)
    kinds = sorted(c.kind for c in reuse_of(engine).checkpoints.all.values())
    assert kinds == ["client", "client"], "the end of a turn drove out what is worth more"
    engine = engine_of("qwen3_5", exact=True, rows=2)
    one, two, three = (ask(engine, prompt(70 + i, 10 + i)) for i in range(3))
    found = {c.position for c in reuse_of(engine).checkpoints.all.values()}
    assert found == {len(two.tokens) - 1, len(three.tokens) - 1}, "of those on trial the oldest goes"
    assert ask(engine, [*one.tokens, 5, 6]).cached_tokens == 0
    used = ask(engine, [*three.tokens, 5, 6])
    assert used.cached_tokens == len(three.tokens) - 1
    for seed in range(3):  # one that was used is on trial no more
        ask(engine, prompt(80, 20 + seed))
    assert ask(engine, [*three.tokens, 7]).cached_tokens == len(three.tokens) - 1


def test_a_step_launched_ahead_that_gave_no_numbers_leaves_nothing(
    engine_of: Callable, cold: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("qwen3_5", exact=True, rows=4)
    engine.launches_ahead = True
    tokens, forward, calls = prompt(70, 3), engine.runner.forward, []
    stop = cold("qwen3_5")(tokens).generated[0]

    def broken(inputs: object) -> torch.Tensor:
        calls.append(1)
        return forward(inputs) * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(engine.runner, "forward", broken)
    first = ask(engine, tokens, replace(ASK, max_tokens=9, stop_token_ids=[stop]))
    assert len(calls) == 2 and first.finish_reason == "stop" and reuse_of(engine).publishing.late
    monkeypatch.undo()
    poison(engine)
    more = [*first.tokens, *prompt(5, 4)]
    second = ask(engine, more)
    assert second.cached_tokens == 0 and same(second, cold("qwen3_5")(more))
    assert not reuse_of(engine).publishing.late and not reuse_of(engine).checkpoints.reserved


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_held_private_or_one_of_several_leaves_no_end(kind: str, engine_of: Callable) -> None:
    config = CacheConfig("f32", 16, budget=32, window=8, recent=8)
    engine = engine_of(kind, exact=True, rows=4, eviction=config)

    def ends() -> int:
        columns = reuse_of(engine).columns
        return sum(map(columns.is_tail, columns)) + sum(
            c.kind == "turn" for c in reuse_of(engine).checkpoints.all.values()
        )

    assert ask(engine, prompt(75, 3)).evictions and not ends()
    ask(engine, prompt(75, 4), eviction=None, cache=False)
    ask(engine, prompt(75, 5), eviction=None, cache="read")
    ask(engine, prompt(75, 6), replace(ASK, n=2), eviction=None)
    held = ask(engine, prompt(75, 7), eviction=None, hold=True)
    assert not ends()
    engine.abort(held)
    ask(engine, prompt(75, 8), eviction=None)
    assert ends()
    reuse_of(engine).tails = False
    reuse_of(engine).forget()
    ask(engine, prompt(75, 8), eviction=None)
    assert not ends()


@pytest.mark.parametrize("kind", KINDS)
def test_ends_give_up_their_pages_first(kind: str, engine_of: Callable, cold: Callable) -> None:
    engine = engine_of(kind, exact=True, rows=6, pool=320, slots=2)
    turns = [ask(engine, prompt(90, 20 + i)) for i in range(6)]
    assert reuse_of(engine).counts["columns_dropped"] > 0
    for first in turns[::-1]:
        tokens = [*first.tokens, *prompt(4, 5)]
        assert same(ask(engine, tokens), cold(kind)(tokens))
    assert_nothing_held(engine)


# ---- why not more


def test_reasons_that_come_from_a_budget_and_from_what_was_asked(engine_of: Callable) -> None:
    """`window`, `bounded` and `off`, each where it holds and nowhere else; the others are in test_reuse.py."""
    text = prompt(300, 3)
    plain = CacheConfig("f32", 16, budget=96, window=24, recent=16)
    engine = engine_of("llama", rows=0, eviction=plain, step_tokens=128)
    ask(engine, text, eviction=None)
    found = ask(engine, text).reuse
    assert found["reason"] == "window" and found["cached"] == 276 and "queries" in found["why"]
    assert ask(engine, text, eviction=None).reuse["reason"] == "full"
    engine = engine_of("llama", rows=0, eviction=replace(plain, bounded=True), step_tokens=128)
    ask(engine, text, eviction=None)
    found = ask(engine, text).reuse
    assert found["reason"] == "bounded" and 0 < found["cached"] < 276 and "evicted" in found["why"]
    for how in ({"cache": False}, {"cache": "write"}):
        found = ask(engine, text, eviction=None, **how).reuse
        assert found["reason"] == "off" and found["cached"] == 0
    found = ask(engine, text, replace(ASK, prompt_logprobs=0), eviction=None).reuse
    assert found["reason"] == "off" and found["read"] == 300


def test_with_the_end_of_a_turn_reasons_are_those_of_what_follows(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5", rows=4)
    first = ask(engine, prompt(30, 3))
    short = ask(engine, first.tokens)
    assert short.reuse["reason"] == "full" and short.cached_tokens == 33, "shorter than a column, and there"
    more = ask(engine, [*first.tokens, 5]).reuse
    assert more["reason"] == "diverged" and more["cached"] == 33, "the last token of an answer is not read"
    ask(engine, prompt(1, 7), replace(ASK, max_tokens=1))
    one = ask(engine, [*prompt(1, 7), *prompt(32, 8)]).reuse
    assert (one["cached"], one["read"], one["reason"]) == (1, 32, "diverged")
    assert one["why"] == "the prompt leaves what is kept at token 1"
    far = ask(engine, [*first.tokens, *prompt(200, 4)]).reuse
    assert far["reason"] == "diverged" and far["cached"] == 33 <= far["diverged_at"] < 40
    assert ask(engine, prompt(30, 9)).reuse["reason"] == "too_short"
