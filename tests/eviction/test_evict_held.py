"""Caches that are held, evicted by hand: what an eviction at the prompt's end would have left, and what comes after."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from numerics import assert_same_bytes, logit_gap

from engine.driving import assert_nothing_held, run
from eviction.harness import MaskedRun, dropped_by, record_logits
from hybridkv.cache.session import Session
from hybridkv.config import CacheConfig, EvictionConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.request import Request

KINDS = ("llama", "qwen3_5")
POLICIES = ("auto", "peak:spread=all", "snapkv:pooling=none", "keydiff", "random")
PROMPT = 150
ONE, SAY = SamplingParams(max_tokens=1, ignore_eos=True), SamplingParams(max_tokens=12, ignore_eos=True)
WIDE = EvictionConfig(1 << 20, window=16, recent=8)  # nothing is evicted, and the last queries are kept


def held(engine: Engine) -> Request:
    """A prompt that was read, its cache held whole; the first token of its answer is known."""
    request = engine.add(tiny.token_ids(PROMPT), ONE, hold=True, eviction=WIDE)
    run(engine)
    assert engine.manager.position(request.key) == PROMPT and not request.evictions
    return request


def answered(engine: Engine, after: Request, tokens: list[int] | None = None) -> Request:
    """The rest of the answer, or an answer to `tokens` more, on the held cache as it is."""
    more = after.tokens if tokens is None else after.tokens[:PROMPT] + tokens
    request = engine.add(more, replace(SAY, max_tokens=11), after=after, eviction=None)
    run(engine)
    assert request.error is None
    return request


def contents(engine: Engine, request: Request) -> list[dict[str, torch.Tensor]]:
    """All bytes of each stream's entries."""
    table, slot = engine.manager.tables["attention"], engine.manager.slot_of[request.key]
    found, P = [], table.schema.entries_per_page
    for layer in table.schema.layers:
        lane, rows = table.schema.place(layer)
        for s in range(rows.start, rows.stop):
            entry = np.arange(table.lengths[slot, s])
            page = torch.from_numpy(table.pages[slot, s][entry // P].astype(np.int64))
            found.append({n: t[page, torch.from_numpy(entry % P)] for n, t in table.pool.lane(lane).items()})
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_an_eviction_at_the_prompts_end(kind: str, policy: str, evicting: Callable) -> None:
    asked = EvictionConfig(40, window=16, recent=8, policy=policy)
    usual = evicting(kind, query_buffers=1)
    seen = record_logits(usual)
    want = usual.add(tiny.token_ids(PROMPT), SAY, hold=True, eviction=asked)
    run(usual)
    engine = evicting(kind, query_buffers=1)
    request = held(engine)
    before = engine.manager.tables["attention"].allocator.held
    freed = engine.evict_held(request, asked, seen=True)
    assert freed == before - engine.manager.tables["attention"].allocator.held > 0
    assert request.policy == want.policy and list(request.evictions) == [PROMPT]
    for ours, its in zip(request.evictions[PROMPT], want.evictions[PROMPT], strict=True):
        assert all(map(np.array_equal, ours, its))
    again = record_logits(engine)
    answer = answered(engine, request)
    assert request.tokens[PROMPT:] + answer.generated == want.generated
    for a, b in zip([x for x in again if len(x)], [x for x in seen if len(x)][1:], strict=True):
        assert_same_bytes(a, b)
    assert_nothing_held(engine)


def test_the_bytes_that_stay_are_those_of_an_eviction_at_the_prompts_end(evicting: Callable) -> None:
    asked = EvictionConfig(40, window=16, recent=8)
    usual, engine = evicting("llama", query_buffers=1), evicting("llama", query_buffers=1)
    want = usual.add(tiny.token_ids(PROMPT), ONE, hold=True, eviction=asked)
    run(usual)
    request = held(engine)
    engine.evict_held(request, asked, seen=True)
    for ours, its in zip(contents(engine, request), contents(usual, want), strict=True):
        for name in its:
            assert_same_bytes(ours[name], its[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("twice", (False, True), ids=("once", "twice"))
def test_computed_again_after_a_preemption_it_drops_the_same(kind: str, twice: bool, evicting: Callable) -> None:
    """Twice: at one position, so that both are one record of the entries that were there."""
    answers = []
    for preempted in (None, 1, 6):
        engine = evicting(kind, query_buffers=1)
        request = held(engine)
        if twice:
            engine.evict_held(request, EvictionConfig(80, 16, 8, policy="keydiff"))
        engine.evict_held(request, EvictionConfig(40, 16, 8), seen=True)
        assert list(request.evictions) == [PROMPT] and request.evictions[PROMPT].kept == 40
        left = [at.tolist() for at in engine.manager.entry_positions(request.key, "attention")]
        turn = engine.add(request.tokens + [5, 6, 7], SAY, hold=True, after=request, eviction=None)
        for step in range(1, 40):
            if engine.idle:
                break
            engine.step()
            if step == preempted:
                engine.scheduler.preempt(turn)
        assert turn.preemptions == (preempted is not None) and turn.error is None
        now = [at[at < PROMPT].tolist() for at in engine.manager.entry_positions(turn.key, "attention")]
        assert now == left
        answers.append(turn.generated)
        engine.abort(turn)
        assert_nothing_held(engine)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_is_cut_and_its_origin_stays_whole(kind: str, evicting: Callable) -> None:
    engine = evicting(kind, query_buffers=3)
    origin = held(engine)
    before = contents(engine, origin)
    forks = [engine.fork_held(origin) for _ in range(2)]
    engine.evict_held(forks[0], EvictionConfig(40, 16, 8), seen=True)
    engine.evict_held(forks[1], EvictionConfig(20, 16, 8, policy="streaming"))
    for ours, was in zip(contents(engine, origin), before, strict=True):
        for name in was:
            assert_same_bytes(ours[name], was[name])
    assert [engine.manager.kept_tokens(r.key) for r in (origin, *forks)] == [PROMPT, 40, 20]
    full = answered(engine, origin)
    alone = evicting(kind, query_buffers=1)
    assert full.generated == answered(alone, held(alone)).generated and not full.evictions
    for fork in forks:
        answered(engine, fork)
    assert_nothing_held(engine)


def test_what_was_cut_by_hand_is_saved_and_goes_on(evicting: Callable, tmp_path: Path) -> None:
    engine, other = evicting("qwen3_5", query_buffers=2), evicting("qwen3_5", query_buffers=2)
    request = held(engine)
    engine.evict_held(request, EvictionConfig(40, 16, 8), seen=True)
    engine.session(request).save(tmp_path / "cut")
    back = other.restore_held(Session.load(tmp_path / "cut"))
    assert back.policy == request.policy is not None and list(back.evictions) == [PROMPT]
    assert answered(other, back, [3, 4]).generated == answered(engine, request, [3, 4]).generated
    assert_nothing_held(other)


def test_scores_and_ranges_of_ones_own(evicting: Callable) -> None:
    engine = evicting("llama", query_buffers=2)
    request = held(engine)
    heads, layers = engine.manager.tables["attention"].schema.heads, len(engine.runner.model.config.attention_layers)
    scores = [torch.arange(PROMPT).float().expand(heads, -1) for _ in range(layers)]
    asked = EvictionConfig(40, 16, 8, policy="peak:spread=even", first=0)
    engine.evict_held(request, asked, scores, ranges=[(20, 30)])
    want = [*range(20, 30), *range(PROMPT - 30, PROMPT)]
    assert all(at.tolist() == want for at in engine.manager.entry_positions(request.key, "attention"))
    engine.abort(request)
    assert_nothing_held(engine)


def test_a_cache_within_the_budget_stays_as_it_is(evicting: Callable) -> None:
    engine = evicting("llama", query_buffers=1)
    request = held(engine)
    assert engine.evict_held(request, EvictionConfig(PROMPT, 16, 8)) == 0
    assert not request.evictions and request.policy is None
    assert engine.manager.kept_tokens(request.key) == PROMPT


def test_what_is_not_held_or_has_no_queries_is_refused(evicting: Callable) -> None:
    asked = EvictionConfig(40, 16, 8, "peak")
    engine = evicting("llama", query_buffers=1)
    running = engine.add(tiny.token_ids(PROMPT), SAY, hold=True, eviction=WIDE)
    for _ in range(4):
        engine.step()
    with pytest.raises(RequestError, match="not held any more: there is nothing to evict"):
        engine.evict_held(running, asked)
    engine.abort(running)
    gone = held(engine)
    engine.abort(gone)
    with pytest.raises(RequestError, match="not held any more"):
        engine.evict_held(gone, asked)
    plain = engine.add(tiny.token_ids(PROMPT), ONE, hold=True, eviction=None)
    run(engine)
    with pytest.raises(HybridKVError, match="last queries .* were not kept"):
        engine.evict_held(plain, asked)
    assert engine.manager.kept_tokens(plain.key) == PROMPT and not plain.evictions and plain.policy is None
    engine.abort(plain)
    good = held(engine)
    with pytest.raises(HybridKVError, match="a window of 64 queries was asked for, the cache keeps 16"):
        engine.evict_held(good, EvictionConfig(64))
    with pytest.raises(HybridKVError, match="no setting 'poling'"):
        engine.evict_held(good, replace(asked, policy="peak:poling=3"))
    assert engine.evict_held(good, asked) > 0, "the next good call works"
    answered(engine, good)
    assert_nothing_held(engine)
    without = evicting("llama", query_buffers=0)
    request = without.add(tiny.token_ids(PROMPT), ONE, hold=True)
    run(without)
    with pytest.raises(RequestError, match="query_buffers=1 or more"):
        without.evict_held(request, asked)


# ---- score_after


@pytest.mark.parametrize("kind", KINDS)
def test_logits_after_a_held_cache_are_those_of_one_text(kind: str, evicting: Callable) -> None:
    engine = evicting(kind, query_buffers=2)
    rest = tiny.token_ids(40, seed=9)
    request = held(engine)
    got = engine.score_after(request, rest)
    assert logit_gap(engine.score(tiny.token_ids(PROMPT) + rest)[PROMPT:], got) < 1e-5
    assert request.tokens == tiny.token_ids(PROMPT) + rest and engine.manager.position(request.key) == PROMPT + 40
    turn = engine.add([*request.tokens, 7], SAY, after=request, eviction=None)  # they are part of the cache now
    run(engine)
    assert turn.cached_tokens == PROMPT + 40
    fresh = engine.add([*request.tokens, 7], SAY, eviction=None)
    run(engine)
    assert turn.generated == fresh.generated
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_after_a_cut_cache_are_those_of_a_masked_one(kind: str, evicting: Callable) -> None:
    engine = evicting(kind, query_buffers=2)
    rest = tiny.token_ids(40, seed=9)
    request = held(engine)
    engine.evict_held(request, EvictionConfig(40, 16, 8), seen=True)
    got = engine.score_after(request, rest)
    config = engine.runner.model.config
    dropped = dropped_by(request, config.attention_layers, config.kv_heads)
    masked = MaskedRun(engine.runner.model, CacheConfig("f32", 16), dropped)
    masked.feed(tiny.token_ids(PROMPT), 64)
    assert logit_gap(masked.feed(rest), got) < 1e-5
    whole = engine.score(tiny.token_ids(PROMPT) + rest)[PROMPT:]
    assert logit_gap(whole, got) > 1e-3, "with the dropped entries in sight they are others"


def test_scoring_after_what_is_not_held_or_does_not_fit_is_refused(evicting: Callable) -> None:
    engine = evicting("llama", query_buffers=1, context=200)
    request = held(engine)
    with pytest.raises(RequestError, match=r"150 \+ 60 tokens do not fit a context of 200"):
        engine.score_after(request, [1] * 60)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.score_after(request, [1 << 30])
    with pytest.raises(RequestError, match="no tokens"):
        engine.score_after(request, [])
    assert engine.manager.position(request.key) == PROMPT
    engine.score_after(request, [1, 2])
    engine.abort(request)
    with pytest.raises(RequestError, match="not held any more"):
        engine.score_after(request, [1])
    assert_nothing_held(engine)


def test_scoring_without_room_leaves_the_held_cache_as_it_was(evicting: Callable) -> None:
    engine = evicting("llama", query_buffers=1, pool=160)
    request = held(engine)
    with pytest.raises(HybridKVError, match="page"):
        engine.score_after(request, [1] * 40)
    assert engine.manager.position(request.key) == PROMPT and len(request.tokens) == PROMPT + 1
    engine.score_after(request, [1, 2])
    engine.abort(request)
    assert_nothing_held(engine)
