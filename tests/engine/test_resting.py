"""Held caches without a slot: more conversations than slots or pages, each token for token as with room for all."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_v4

from engine.driving import assert_nothing_held, prompt, run
from engine.test_sessions import CACHES, ask, engine_with
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cache import KVCacheManager
from hybridkv.cache.store import Store
from hybridkv.cache.tiers import HostTier
from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import EngineOwner
from hybridkv.engine.storing import load_request, save_request
from hybridkv.request import Request

TALKS, TURNS = 3, 2


def talk(engine: Engine, words: Callable[[int, int], int] = lambda i, turn: 9 + 4 * i + turn) -> list[list[int]]:
    """Conversations whose turns take turns; all their tokens."""
    last: list[Request | None] = [None] * TALKS
    for turn in range(TURNS):
        for i in range(TALKS):
            last[i] = ask(engine, last[i], words(i, turn))
            assert turn == 0 or last[i].cached_tokens > 0, "the cache was computed again"  # type: ignore[union-attr]
    for request in last:
        assert request is not None
        engine.abort(request)
    assert_nothing_held(engine)
    assert engine.manager.host.used == 0
    return [request.tokens for request in last if request is not None]


@pytest.mark.parametrize(("kind", "cache"), [("llama", "plain"), ("qwen3_5", "fp8"), ("qwen3_5", "bounded")])
def test_conversations_beyond_the_slots_lose_nothing(kind: str, cache: str) -> None:
    want = talk(engine_with(kind, pool=1024, slots=6, **CACHES[cache]))
    engine = engine_with(kind, pool=1024, slots=1, **CACHES[cache])
    assert talk(engine) == want
    counts = engine.scheduler.counts
    assert counts["frozen"] >= 5 and counts["thawed"] >= 3 and not counts["given_up"]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_conversations_beyond_the_pages_wait_on_the_host(kind: str) -> None:
    want = talk(engine_with(kind, pool=1024, slots=6))
    engine = engine_with(kind, pool=72, slots=6)  # of the 120 tokens that they have in the end
    engine.manager.host = HostTier(64 << 20, engine.manager.device, pages=True)
    assert talk(engine) == want
    counts = engine.scheduler.counts
    assert counts["exported"] > 1 and counts["imported"] > 1 and not counts["given_up"]


def test_what_is_given_up_is_the_cache_unused_longest_and_the_next_turn_says_so() -> None:
    engine = engine_with("llama", pool=120, slots=6)
    held = [ask(engine, None, 20 + i) for i in range(3)]
    ask(engine, None, 40)
    assert held[0] not in engine.scheduler.held and held[2] in engine.scheduler.held
    again = ask(engine, held[0], 5)
    assert again.cached_tokens == 0 and again.stats["cache_given_up"] == 1
    assert "cache_given_up" not in ask(engine, again, 3).stats
    assert again.tokens[: len(held[0].tokens)] == held[0].tokens


def test_a_turn_that_never_began_leaves_the_frozen_cache_to_the_next() -> None:
    engine = engine_with("qwen3_5", slots=1)
    first = ask(engine, None, 20)
    running = engine.add(prompt(9, 1), SamplingParams(max_tokens=30))
    engine.step()
    assert first.key in engine.manager.frozen
    turn = engine.add(first.tokens + prompt(5, 5), SamplingParams(max_tokens=4), hold=True, after=first)
    engine.stop(turn)  # before it found a slot
    run(engine)
    assert running.finish_reason == "length"
    again = engine.add(first.tokens + prompt(5, 5), SamplingParams(max_tokens=4), hold=True, after=turn)
    run(engine)
    assert again.cached_tokens == 28
    assert again.generated == ask_alone(first)


def ask_alone(first: Request) -> list[int]:
    engine = engine_with("qwen3_5")
    alone = engine.add(first.tokens + prompt(5, 5), SamplingParams(max_tokens=4))
    run(engine)
    return alone.generated


# ---- DeepSeek-V4


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tiny_v4.Oracle("mini", tmp_path_factory.mktemp("mini")).folder
    return LLM(str(folder), "cpu", "float32", cache=CacheConfig(kv_dtype="f32", block=16), max_context=300, reuse=None)


def v4_engine(llm: LLM, slots: int, pages: int = 80) -> Engine:
    manager = KVCacheManager(llm.plan.schema, {"csa": pages, "hca": pages}, slots, 300)
    return Engine(llm.model, manager, step_tokens=64)


def test_compressed_caches_rest_and_are_saved_at_any_position(v4: LLM, tmp_path: Path) -> None:
    """Also where a page is half full, which a fork cannot be."""
    want = talk(v4_engine(v4, 6))
    few = v4_engine(v4, 1, 9)
    few.manager.host = HostTier(64 << 20, few.manager.device, pages=True)
    assert talk(few) == want and few.scheduler.counts["thawed"] > 2
    for words in (14, 21):
        engine, there = v4_engine(v4, 2), v4_engine(v4, 2)
        request = ask(engine, None, words)
        store, owner, other = Store(tmp_path), EngineOwner(engine), EngineOwner(there)
        save_request(owner, store, "talk", request, {}, {"mode": "fast"})
        back, _, _ = load_request(other, store, "talk", {"mode": "fast"})
        assert back is not None
        turns = [o.run(lambda e, r=r: ask(e, r, 9)) for o, r in ((owner, request), (other, back))]
        assert turns[0].tokens == turns[1].tokens and turns[1].cached_tokens == turns[0].cached_tokens > 0
        owner.close(), other.close()
