"""Every call of `step` ends, and says so when nothing can run, whatever was miscounted."""

from collections.abc import Callable

import pytest
import tiny

from engine.driving import assert_nothing_held, prompt, run
from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Evictor, Pyramid
from hybridkv.models import cache_schema
from hybridkv.text.tokenizer import Tokenizer

ASK = SamplingParams(max_tokens=12)


def limit_preemptions(engine: Engine, most: int = 500) -> None:
    """A scheduler that loops is a failure, not a hanging test."""
    preempt = engine.scheduler.preempt
    count = 0

    def counted(request: object) -> None:
        nonlocal count
        count += 1
        assert count <= most, f"{count} preemptions: the scheduler is in a loop"
        preempt(request)  # type: ignore[arg-type]

    engine.scheduler.preempt = counted  # type: ignore[method-assign]


def bounded_pyramid(open_llm: Callable, folder: object, pool: int) -> Engine:
    """Layers with different budgets in a pool of `pool` tokens: the longest stream holds more than the mean says."""
    llm = open_llm(folder)
    config = CacheConfig("f32", 16, budget=64, recent=0, window=8, bounded=True, policy=Pyramid())
    schema = cache_schema(llm.config, config, llm.dtype)
    manager = KVCacheManager(schema, schema.pool_pages(1, pool), 4, 2048)
    evictor = Evictor.make(config, manager, scale=llm.config.attention_scale)
    return Engine(llm.model, manager, step_tokens=64, evictor=evictor)


def test_uneven_bounded_budgets_in_a_tight_pool_come_to_an_end(oracle: Callable, open_llm: Callable) -> None:
    engine = bounded_pyramid(open_llm, oracle("llama").folder, pool=150)
    limit_preemptions(engine)
    asked = [(tiny.token_ids(n, seed=n), SamplingParams(max_tokens=m)) for n, m in ((202, 40), (25, 40), (253, 4))]
    requests = [engine.add(*each) for each in asked]
    run(engine)
    assert all(r.finish_reason == "length" and r.answer_tokens == r.params.max_tokens for r in requests)
    assert sum(r.preemptions for r in requests) > 0, "the pool was not tight"
    assert_nothing_held(engine)


def test_pages_that_a_fork_will_have_copied_are_counted_at_admission(engine_of: Callable) -> None:
    """After a fork the open pages have two owners: the next token costs a page a stream."""
    engine = engine_of("llama", pool=128)
    limit_preemptions(engine)
    first = engine.add(prompt(40), SamplingParams(max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.drain()
    engine.manager.fork_request(first.key, "fork")
    free = engine.manager.free_pages()["attention"] // engine.manager.tables["attention"].schema.streams
    second = engine.add(prompt(free * 16 - 1, 1), SamplingParams(max_tokens=1))  # what is free, to the last page
    run(engine)
    assert first.answer_tokens == 30 and second.answer_tokens == 1
    engine.manager.release_request("fork")
    assert_nothing_held(engine)


@pytest.mark.parametrize("what", ("slots", "pages"))
def test_a_request_that_outsiders_keep_out_is_an_error_not_a_wait(what: str, engine_of: Callable) -> None:
    engine = engine_of("llama", slots=1 if what == "slots" else 4, pool=96)
    engine.manager.admit_request("mine")
    if what == "pages":
        engine.manager.prepare_forward([("mine", 80)])
    request = engine.add(prompt(30), ASK)
    with pytest.raises(HybridKVError, match="held by requests outside the engine"):
        run(engine, steps=20)
    assert not request.finished
    engine.manager.release_request("mine")
    run(engine)  # and goes on once they are gone
    assert request.finish_reason == "length"
    assert_nothing_held(engine)


def test_generate_and_stream_end_with_an_error_when_nothing_can_run(oracle: Callable, open_llm: Callable) -> None:
    llm = open_llm(oracle("llama").folder, max_requests=1)
    llm.manager.admit_request("mine")
    try:
        with pytest.raises(HybridKVError, match="1 of 1 request slots"):
            llm.generate([[1, 2]], ASK)
        with pytest.raises(HybridKVError, match="1 of 1 request slots"):
            list(llm.stream([1, 2], ASK))
    finally:
        llm.manager.release_request("mine")
    assert llm.engine.idle and llm.generate([[1, 2]], ASK)[0].finish_reason == "length"


@pytest.mark.parametrize("name", (0, 1, "1", ("a", 1)))
def test_names_that_callers_choose_never_meet_those_of_requests(name: object, engine_of: Callable) -> None:
    engine = engine_of("llama")
    engine.manager.admit_request(name)
    requests = [engine.add(prompt(9, i), ASK) for i in range(3)]
    run(engine)
    assert all(r.finish_reason == "length" for r in requests)
    engine.manager.release_request(name)
    assert_nothing_held(engine)


# ---- turns and others queue alike


def test_turns_of_a_conversation_do_not_overtake_those_who_wait(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5", slots=1)
    said = engine.add(prompt(20), ASK, hold=True)
    run(engine)
    other = engine.add(prompt(30, 1), ASK)
    for turn in range(5):  # the next turn is asked for as soon as one ends
        said = engine.add(said.tokens + prompt(3, turn), ASK, hold=True, after=said)
        while not said.finished:
            engine.step()
        if other.finished:
            break
    assert turn == 0 and other.finish_reason == "length", "it was there first"
    engine.abort(said)
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_turn_that_waited_goes_on_in_its_cache_if_that_was_not_needed(kind: str, engine_of: Callable) -> None:
    engine = engine_of(kind, slots=3)
    said = engine.add(prompt(40), ASK, hold=True)
    run(engine)
    others = [engine.add(prompt(9, i), ASK) for i in range(2)]
    turn = engine.add(said.tokens + prompt(5, 7), ASK, after=said)
    run(engine)
    assert turn.cached_tokens == len(said.tokens) - 1 and all(r.finish_reason == "length" for r in others)
    assert_nothing_held(engine)


def test_a_turn_that_is_stopped_before_it_begins_leaves_its_conversation_the_cache(engine_of: Callable) -> None:
    engine = engine_of("llama", slots=2)
    said = engine.add(prompt(40), ASK, hold=True)
    run(engine)
    turn = engine.add(said.tokens + prompt(5, 7), ASK, hold=True, after=said)
    engine.stop(turn)
    assert engine.scheduler.held == [turn] and turn.key in engine.manager.slot_of
    again = engine.add(said.tokens + prompt(5, 8), ASK, after=turn)
    run(engine)
    assert again.cached_tokens == len(said.tokens) - 1
    assert_nothing_held(engine)


# ---- requests that have outgrown what the pools hold


def test_an_evicted_request_that_outgrew_the_pools_is_computed_again_after_preemption(
    oracle: Callable, open_llm: Callable
) -> None:
    """Its tokens alone would not fit; what it holds while its evictions are repeated does."""
    llm = open_llm(oracle("llama").folder)
    config = CacheConfig("f32", 4, budget=8, recent=2, window=2)
    schema = cache_schema(llm.config, config, llm.dtype)
    answers = []
    for slots in (1, 3):
        manager = KVCacheManager(schema, schema.pool_pages(1, 64), slots, 256)
        evictor = Evictor.make(config, manager, scale=llm.config.attention_scale)
        engine = Engine(llm.model, manager, step_tokens=64, evictor=evictor)
        limit_preemptions(engine)
        requests = [engine.add(tiny.token_ids(40, seed=i), SamplingParams(max_tokens=44)) for i in range(2)]
        run(engine)
        answers.append([r.generated for r in requests])
        assert all(r.finish_reason == "length" and r.answer_tokens == 44 for r in requests)
        assert slots == 1 or sum(r.preemptions for r in requests) > 0, "the pool was not tight"
        assert_nothing_held(engine)
    assert answers[0] == answers[1]


def test_the_last_text_of_an_answer_is_among_the_updates(engine_of: Callable, ascii_tokenizer: Tokenizer) -> None:
    """Text that was held back because a stop string might begin there comes with the last token."""
    engine = engine_of("llama", tokenizer=ascii_tokenizer)
    whole = engine.add(prompt(9), ASK)
    run(engine)
    text = whole.text.text
    request = engine.add(prompt(9), SamplingParams(max_tokens=12, stop=text[-1] + "never"))
    updates = run(engine)
    assert "".join(u.text for u in updates if u.request is request) == request.text.text == text


@pytest.mark.parametrize("first", (None, "default"))
def test_turns_with_different_evictions(first: str | None, oracle: Callable, open_llm: Callable) -> None:
    """Evicting after a turn that kept no queries: computed anew. Keeping all after an eviction: that is repeated."""
    llm = open_llm(oracle("qwen3_5").folder)
    config = CacheConfig("f32", 16, budget=32, recent=8, window=8)
    schema = cache_schema(llm.config, config, llm.dtype)
    manager = KVCacheManager(schema, schema.pool_pages(1, 600), 2, 256)
    engine = Engine(llm.model, manager, step_tokens=64, evictor=Evictor.make(config, manager, scale=0.3))
    assert engine.evictor is not None
    turns = (None, engine.evictor.default) if first is None else (engine.evictor.default, None)
    said = engine.add(prompt(60), ASK, hold=True, eviction=turns[0])
    run(engine)
    turn = engine.add(said.tokens + prompt(3, 1), ASK, after=said, eviction=turns[1])
    while turn.answer_tokens < 4:
        engine.step()
    engine.scheduler.preempt(turn)
    run(engine)
    assert turn.finish_reason == "length" and turn.error is None and len(turn.evictions) == 1
    assert (turn.cached_tokens == 0) and assert_nothing_held(engine) is None
