"""Several answers to one prompt: it is read once, its pages are shared, and answer i is that of seed + i alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from long_form import few, spread
from torch import Tensor

from engine.driving import assert_nothing_held, count_tokens, prompt, run
from engine.test_interrupts import model_of
from hybridkv import CacheConfig, EvictionConfig, SamplingParams
from hybridkv.cache import KVCacheManager
from hybridkv.engine.engine import Engine
from hybridkv.errors import RequestError
from hybridkv.eviction import Evictor
from hybridkv.models import cache_schema
from hybridkv.request import Request

pytestmark = pytest.mark.usefixtures("weights_measured_once")
PLAIN = ("llama", "qwen3_5")
EVICTIONS: dict[str, EvictionConfig | None] = {
    "all kept": None,
    "evicted": EvictionConfig(24, window=4, recent=4),
    "bounded": EvictionConfig(24, window=4, recent=4, bounded=True),
    "again": EvictionConfig(24, window=4, recent=4, decode_every=5),
}


def engine_for(
    kind: str,
    pool: int = 2000,
    slots: int = 8,
    eviction: EvictionConfig | None = None,
    ahead: bool = False,
    query_buffers: int | None = None,
) -> Engine:
    model = model_of(kind)
    size = {"block": 16} if kind == "deepseek_v4" else {"page_size": 4}
    config = CacheConfig("f32", **size)  # type: ignore[arg-type]
    if eviction is not None:
        config = replace(config, **vars(eviction))
    schema = cache_schema(model.config, config, torch.float32)
    manager = KVCacheManager(schema, schema.pool_pages(1, pool), slots, 256, query_buffers=query_buffers)
    evictor = Evictor.make(config, manager, scale=model.config.attention_scale)
    engine = Engine(model, manager, step_tokens=64, evictor=evictor)
    engine.launches_ahead = ahead
    return engine


def params(n: int = 1, seed: int = 5, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "temperature": 1.0, "seed": seed, "n": n, "logprobs": 1} | more))


def all_of(request: Request) -> list[Request]:
    return [request, *request.siblings]


def alone(make: Callable[[], Engine], tokens: list[int], n: int, seed: int = 5, **more: Any) -> list[list[int]]:
    """The answers to n single requests, each in an engine of its own."""
    found = []
    for i in range(n):
        engine = make()
        request = engine.add(tokens, params(seed=seed + i, **more))
        run(engine)
        assert request.error is None
        found.append(request.generated)
    return found


@cache
def answers_alone(kind: str, what: str) -> list[list[int]]:
    """To a prompt of 90 tokens, of four seeds."""
    return alone(lambda: engine_for(kind, eviction=EVICTIONS[what]), prompt(90), 4)


@pytest.mark.long
@few("what, ahead", [*EVICTIONS], (False, True))
@pytest.mark.parametrize("kind", PLAIN)
def test_answer_i_is_that_of_a_single_request_with_seed_plus_i(kind: str, what: str, ahead: bool) -> None:
    tokens, n = prompt(90), 4
    make = partial(engine_for, kind, eviction=EVICTIONS[what])
    want = answers_alone(kind, what)
    assert len({tuple(w) for w in want}) == n, "the seeds change nothing"
    engine = engine_for(kind, eviction=EVICTIONS[what], ahead=ahead)
    beside = engine.add(prompt(20, seed=3), params(seed=50))
    counts = count_tokens(engine)
    request = engine.add(tokens, params(n))
    assert len(request.siblings) == 3
    run(engine)
    assert [r.generated for r in all_of(request)] == want
    assert [beside.generated] == alone(make, prompt(20, seed=3), 1, seed=50)
    assert sum(c for c in counts if c > 8) <= 64 + 26 + 20 + 8, "the prompt was read more than once"
    assert [r.cached_tokens for r in all_of(request)] == [0, 90, 90, 90]
    assert all(len(r.logprobs) == 12 and r.finish_reason == "length" for r in all_of(request))
    assert_nothing_held(engine)


@spread("length, kind", (1, 2, 64, 65, 90), PLAIN)
def test_prompts_of_all_lengths(kind: str, length: int) -> None:
    tokens = prompt(length, seed=length)
    more: dict[str, Any] = {
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {4: 2.0},
        "min_tokens": 3,
    }
    want = alone(lambda: engine_for(kind), tokens, 3, **more)
    engine = engine_for(kind, ahead=True)
    request = engine.add(tokens, params(3, **more))
    run(engine)
    assert [r.generated for r in all_of(request)] == want
    assert_nothing_held(engine)


def test_the_prompts_pages_are_shared_and_the_open_one_is_copied() -> None:
    engine = engine_for("llama")
    request = engine.add(prompt(90), params(5))
    engine.step(), engine.step()  # the prompt, in two chunks
    assert [r.answer_tokens for r in all_of(request)] == [1] * 5
    [table] = engine.manager.tables.values()
    streams, full = table.schema.streams, 90 // 4
    assert table.allocator.held == streams * (full + 1)
    engine.step()
    assert table.allocator.held == streams * (full + 5)  # five open pages of two tokens each
    pages = [table.pages[engine.manager.slot_of[r.key]] for r in all_of(request)]
    assert all((own[:, :full] == pages[0][:, :full]).all() for own in pages)
    assert len({int(own[0, full]) for own in pages}) == 5
    engine.manager.check_integrity()
    run(engine)
    assert_nothing_held(engine)


@pytest.mark.long
@few("room, what", ((112, 8), (144, 8), (300, 1), (300, 2), (200, 3)), [*EVICTIONS])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_sibling_that_finds_no_room_is_computed_again_and_is_the_same(
    kind: str, room: tuple[int, int], what: str
) -> None:
    (pool, slots), tokens, n = room, prompt(90), 4
    want = answers_alone(kind, what)
    engine = engine_for(kind, pool, slots, EVICTIONS[what], ahead=True, query_buffers=1)
    request, beside = engine.add(tokens, params(n)), engine.add(prompt(9, seed=1), params(seed=70))
    run(engine)
    assert [r.generated for r in all_of(request)] == want
    again = [r for r in request.siblings if r.cached_tokens == 0]
    assert len(again) >= {112: 1 if what == "all kept" else 0, 300: 4 - slots}.get(pool, 0), "there was no room for it"
    assert beside.answer_tokens == 12
    assert_nothing_held(engine)


def test_deepseek_v4_shares_where_its_pages_are_full_and_computes_again_elsewhere() -> None:
    for length, shared in ((64, True), (70, False)):
        want = alone(lambda n=length: engine_for("deepseek_v4"), prompt(length), 3)  # type: ignore[misc]
        engine = engine_for("deepseek_v4")
        request = engine.add(prompt(length), params(3))
        run(engine)
        assert [r.generated for r in all_of(request)] == want
        assert [r.cached_tokens for r in request.siblings] == [length * shared] * 2
        assert_nothing_held(engine)


def test_held_caches_make_room_for_siblings() -> None:
    """They rest without a slot."""
    engine = engine_for("llama", slots=3)
    held = [engine.add(prompt(9, seed=i), params(seed=i), hold=True) for i in range(2)]
    run(engine)
    request = engine.add(prompt(30), params(3))
    run(engine)
    assert [r.cached_tokens for r in request.siblings] == [30, 30] and engine.scheduler.held == held
    assert all(r.finished for r in held)
    for r in held:
        engine.scheduler.give_up(r)
    assert_nothing_held(engine)


def test_a_sibling_ends_by_itself() -> None:
    want = alone(lambda: engine_for("llama"), prompt(20), 3, max_tokens=30)
    stop = want[1][3]
    engine = engine_for("llama", ahead=True)
    request = engine.add(prompt(20), params(3, max_tokens=30, stop_token_ids=[stop]))
    run(engine)
    for found, one in zip(all_of(request), want, strict=True):
        end = one.index(stop) + 1 if stop in one else 30
        assert found.generated == one[:end] and found.finish_reason == ("stop" if stop in one else "length")
    assert_nothing_held(engine)


def test_an_abort_while_the_prompt_is_read_ends_all_and_later_one_alone() -> None:
    engine = engine_for("qwen3_5")
    request = engine.add(prompt(90), params(3))
    engine.step()
    engine.abort(request)
    assert [r.finish_reason for r in all_of(request)] == ["abort"] * 3 and all(r.finished for r in all_of(request))
    assert_nothing_held(engine)
    want = alone(lambda: engine_for("qwen3_5"), prompt(90), 3)
    for gone in range(3):
        engine = engine_for("qwen3_5", ahead=True)
        request = engine.add(prompt(90), params(3))
        for _ in range(4):
            engine.step()
        engine.abort(all_of(request)[gone])
        run(engine)
        for i, each in enumerate(all_of(request)):
            assert each.finish_reason == ("abort" if i == gone else "length")
            assert each.generated == want[i][: each.answer_tokens] and (i == gone or each.answer_tokens == 12)
        assert_nothing_held(engine)


def test_a_sibling_that_was_aborted_before_it_began_never_begins() -> None:
    engine = engine_for("llama")
    request = engine.add(prompt(90), params(3))
    engine.step()
    engine.abort(request.siblings[0])
    run(engine)
    assert [r.finish_reason for r in all_of(request)] == ["length", "abort", "length"]
    assert not request.siblings[0].generated
    assert_nothing_held(engine)


def test_where_the_prompt_fails_all_end_with_its_error() -> None:
    engine = engine_for("llama")
    request = engine.add(prompt(90), params(3))
    engine.step()
    forward = engine.runner.forward

    def failing(inputs: object) -> Tensor:
        raise RuntimeError("injected")

    engine.runner.forward = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError):
        engine.step()
    engine.runner.forward = forward  # type: ignore[method-assign]
    assert all(r.finished and "injected" in str(r.error) for r in all_of(request))
    assert_nothing_held(engine)
    request = engine.add(prompt(90), params(2))
    engine.runner.forward = lambda inputs: forward(inputs).clone().fill_(torch.nan)  # type: ignore[method-assign]
    updates = run(engine)
    assert all(r.finished and "NaN" in str(r.error) for r in all_of(request))
    assert {u.request for u in updates} == set(all_of(request))
    assert_nothing_held(engine)


def test_a_hook_that_fails_for_one_answer_ends_that_one() -> None:
    calls = []

    def hook(generated: list[int], logits: Tensor) -> None:
        calls.append(len(generated))
        if len(calls) == 2:
            raise ValueError("second call")

    engine = engine_for("llama")
    request = engine.add(prompt(9), params(3, logits_hook=hook))
    run(engine)
    assert [r.finish_reason for r in all_of(request)] == ["length", "error", "length"] and calls[:3] == [0, 0, 0]
    assert_nothing_held(engine)


def test_preempted_siblings_go_on_as_if_nothing_had_happened() -> None:
    want = alone(lambda: engine_for("qwen3_5"), prompt(40), 3)
    engine = engine_for("qwen3_5")
    request = engine.add(prompt(40), params(3))

    def preempt(step: int) -> None:
        if step in (2, 3, 6):
            engine.scheduler.preempt(max(engine.scheduler.running, key=lambda r: r.order))

    run(engine, preempt)
    assert [r.generated for r in all_of(request)] == want and request.siblings[1].preemptions > 0
    assert_nothing_held(engine)


def test_greedy_siblings_and_those_without_a_seed() -> None:
    engine = engine_for("llama")
    request = engine.add(prompt(9), SamplingParams(max_tokens=6, n=3))
    run(engine)
    assert len({tuple(r.generated) for r in all_of(request)}) == 1
    request = engine.add(prompt(9), SamplingParams(max_tokens=20, n=3, temperature=2.0))
    run(engine)
    assert len({tuple(r.generated) for r in all_of(request)}) == 3


def test_logprobs_of_a_shared_prompt_are_there_once_for_all() -> None:
    engine = engine_for("llama", pool=112)
    request = engine.add(prompt(90), params(3, prompt_logprobs=1))
    run(engine)
    assert [len(r.prompt_logprobs) for r in all_of(request)] == [90] * 3


def test_more_answers_than_slots_take_no_more_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 answers in two slots: they are sampled two at a time, and keep nothing on the device while they wait."""
    from hybridkv.engine import sampler

    blocks, rows = [], sampler.sample_rows
    monkeypatch.setattr(sampler, "sample_rows", lambda x, some, found: (blocks.append(len(some)), rows(x, some, found)))
    engine = engine_for("llama", slots=2)
    request = engine.add(prompt(9), params(128, max_tokens=2, frequency_penalty=1.0))
    engine.step()
    assert max(blocks) == 2 and sum(blocks) == 128
    assert [r.sampler for r in request.siblings] == [None] * 127
    run(engine)
    assert all(r.answer_tokens == 2 for r in all_of(request))


def test_answers_whose_cache_is_to_be_held_are_refused() -> None:
    engine = engine_for("llama")
    with pytest.raises(RequestError, match="cannot be held"):
        engine.add(prompt(9), params(2), hold=True)
    assert engine.idle
