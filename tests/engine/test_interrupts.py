"""An exception at any line of a step: nothing is lost, nobody is wrong, and those who are not concerned go on.

A trace function counts the lines that Python runs in the package while an engine works, and raises at the n-th. The
work has prompts in chunks, answers side by side, preemption, a held cache that goes on, steps launched ahead, and
eviction where the model has attention layers to evict from.
"""

import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tiny_v4
import torch
from interrupting import PACKAGE, Interrupted
from long_form import LONG

from engine.driving import assert_nothing_held, prompt
from hybridkv import CacheConfig, SamplingParams
from hybridkv.cache import CacheSchema, KVCacheManager, StreamSchema, TensorSpec, away, compacting
from hybridkv.cache.allocator import PageAllocator
from hybridkv.cache.compacting import Compacting
from hybridkv.cache.page_table import PageTable
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier
from hybridkv.engine import preempted
from hybridkv.engine.beginnings import take_over
from hybridkv.engine.engine import Engine
from hybridkv.engine.runner import Runner
from hybridkv.engine.scheduler import Scheduler
from hybridkv.errors import RequestError
from hybridkv.eviction import Evictor, under_way
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.models.random_weights import random_decoder
from hybridkv.request import Request

WATCHED = ("/engine/", "/cache/", "/eviction/", "/request.py", "/eviction_record.py")  # where bookkeeping is done
# points of interruption, spread over the whole work; HYBRIDKV_INTERRUPTS=24 takes twenty-four times as many
MORE = int(os.environ.get("HYBRIDKV_INTERRUPTS", "1"))
LEFT = " left to the device"  # evictions of this kind of engine are
SHARED = f", shared{LEFT}"  # and columns share its pages
HOST = ", with a host"  # requests that make room go there
SHARES = {
    "llama": 30,
    "qwen3_5": 30,
    "qwen3_5_moe": 8,
    "qwen3": 8,
    "deepseek_v4": 5,
    f"llama{LEFT}": 30,
    f"llama{SHARED}": 30,
    f"llama{SHARED}{HOST}": 20,
    f"qwen3_5{HOST}": 30,
}
POINTS = {kind: MORE * share for kind, share in SHARES.items()}


HELD = 3  # the request whose cache is held for the second turn


class Calls:
    """Calls of an engine, numbered. One of them is traced, and raises when it has run `line` lines of the package."""

    def __init__(self, number: int = -1, line: int = 0) -> None:
        self.number, self.line = number, line
        self.lines: list[int] = []  # that each call has run, where all are traced (`number` -1)
        self.made = 0
        self.place = ""  # where it was interrupted

    def __call__(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.made += 1
        if self.number not in (-1, self.made - 1):
            return function(*args, **more)
        count = 0

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal count
            name = frame.f_code.co_filename
            if not name.startswith(PACKAGE) or not any(part in name for part in WATCHED):
                return None
            if event == "line":
                count += 1
                if count == self.line:
                    sys.settrace(None)
                    self.place = f"{name[len(PACKAGE) :]}:{frame.f_lineno}"
                    raise Interrupted(self.place)
            return trace

        sys.settrace(trace)
        try:
            return function(*args, **more)
        finally:
            sys.settrace(None)
            self.lines.append(count)


SMALL = dict(hidden_size=32, vocab_size=97, max_position_embeddings=512)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL | dict(
        model_type="llama", num_hidden_layers=2, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    ),
    "qwen3_5": KNOWN["Qwen3.5-27B"] | SMALL | dict(
        num_hidden_layers=2, full_attention_interval=2, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "qwen3": SMALL | dict(
        model_type="qwen3", num_hidden_layers=2, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8,
    ),
    "qwen3_5_moe": KNOWN["Qwen3.5-35B-A3B"] | SMALL | dict(
        num_hidden_layers=2, full_attention_interval=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    "deepseek_v4": tiny_v4.DeepseekV4Config(
        **tiny_v4.KINDS["mini"] | dict(
            num_hidden_layers=3, num_hash_layers=1, layer_types=[tiny_v4.TYPES[ratio] for ratio in (0, 4, 128)],
        )
    ).to_dict(),
}  # fmt: skip


@cache
def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    return random_decoder(ModelConfig.from_dict(CONFIGS[kind]), "cpu", torch.float32)


def engine_for(kind: str) -> Engine:
    """Small pools, so that requests are preempted; a budget where there is something to evict."""
    host = HostTier(64 * BLOCK, torch.device("cpu"), pages=True, preempted=True) if kind.endswith(HOST) else None
    kind = kind.removesuffix(HOST)
    model = model_of(kind.removesuffix(SHARED).removesuffix(LEFT))
    compressed = kind == "deepseek_v4"
    config = CacheConfig("f32", block=16) if compressed else CacheConfig("f32", 2, budget=8, window=2, recent=2)
    schema = cache_schema(model.config, config, torch.float32)
    shared = kind.endswith(SHARED)
    pages = schema.pool_pages(1, 48 if compressed else 34 if shared else 18)
    manager = KVCacheManager(schema, pages, 3, 64, checkpoints=0 if shared else None, host=host)
    if shared:
        Reuse(manager)
    evictor = Evictor.make(config, manager, scale=model.config.attention_scale)
    if evictor is not None:
        evictor = replace(evictor, deferred=kind.endswith(LEFT))
    engine = Engine(model, manager, step_tokens=64, evictor=evictor)
    engine.launches_ahead = True  # as on a GPU
    return engine


def work(engine: Engine, requests: list[Request], call: Callable[..., Any] = lambda f, *a, **k: f(*a, **k)) -> None:
    """Four requests, a second turn, one more that is stopped before it begins, and one that is aborted.

    Goes on from wherever it stands, so that it can be called again.
    """
    asked = [(3, 8), (4, 7), (14, 2), (9, 3)] if engine.evictor is not None else [(13, 12), (14, 11), (20, 2), (9, 3)]
    while len(requests) < len(asked):
        n, answer = asked[len(requests)]
        requests.append(call(engine.add, prompt(n, n), SamplingParams(max_tokens=answer), hold=n == 9))
    while not engine.idle:
        call(engine.step)
    said = requests[HELD]
    if len(requests) == 4:  # a turn that never begins leaves its conversation the cache
        turn = call(engine.add, said.tokens + prompt(2, 98), SamplingParams(max_tokens=3), hold=True, after=said)
        requests.append(turn)
    if not requests[4].finished:
        call(engine.stop, requests[4])
    if len(requests) == 5:
        turn = call(engine.add, said.tokens + prompt(3, 99), SamplingParams(max_tokens=3), after=requests[4])
        requests.append(turn)
        requests.append(call(engine.add, prompt(6, 6), SamplingParams(max_tokens=9)))
    while not engine.idle:
        call(engine.step)
        if requests[-1].answer_tokens > 2 and not requests[-1].finished:
            call(engine.abort, requests[-1])


def finish(engine: Engine, requests: list[Request]) -> None:
    """After the interrupt: all that is left runs, every request has ended, and everything goes back."""
    work(engine, requests)
    assert all(request.finished for request in requests)
    for request in requests:
        engine.abort(request)
    assert_nothing_held(engine)
    if engine.manager.reuse is not None:
        engine.manager.reuse.forget()
    assert not engine.manager.away and not engine.manager.host.used


@pytest.mark.slow
@pytest.mark.parametrize("kind", POINTS)
def test_an_interrupt_at_any_line_harms_only_the_requests_of_its_step(kind: str) -> None:
    want: list[Request] = []
    watched = Calls()
    work(engine_for(kind), want, watched)
    assert [r.finish_reason for r in want] == ["length"] * 4 + ["abort", "length", "abort"]
    assert sum(r.preemptions for r in want) > 0 and want[5].cached_tokens > 0
    assert kind == "deepseek_v4" or any(r.evictions for r in want)
    assert any(r.restored for r in want) == kind.endswith(HOST)
    points = [(number, line) for number, lines in enumerate(watched.lines) for line in range(1, lines + 1)]
    places, ended = set(), 0
    for number, line in sorted(random.Random(7).sample(points, POINTS[kind])):
        engine, requests, calls = engine_for(kind), [], Calls(number, line)
        with suppress(Interrupted):
            work(engine, requests, calls)
        assert calls.place, "the interrupt did not come"
        places.add(calls.place)
        engine.manager.check_integrity()
        concerned = [r for r in requests if r.finish_reason == "error"]
        cut_short = [r for r in requests if r.finish_reason == "abort"]
        finish(engine, requests)
        if len(requests) < len(want):  # it came inside `add`, after the request was queued: nobody knows that one
            continue
        for i, request in enumerate(requests):
            ended += request in concerned
            if i in (4, 5) and requests[HELD] in concerned:
                continue  # a turn after another answer is another turn
            if request in concerned or request in cut_short or i in (4, 6):  # as far as it came
                n = min(len(request.tokens), len(want[i].tokens))
                assert request.tokens[:n] == want[i].tokens[:n], f"{calls.place}: wrong tokens"
            else:
                assert request.tokens == want[i].tokens, f"{calls.place}: request {i} has wrong tokens"
    assert len(places) > min(150, POINTS[kind] / 3), f"{len(places)} different lines"
    assert ended >= min(10, POINTS[kind] / 4), f"{ended} requests ended"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("llama", "qwen3_5", "deepseek_v4", f"llama{LEFT}", f"llama{SHARED}"))
def test_an_interrupt_while_siblings_begin_harms_only_the_requests_of_its_step(kind: str) -> None:
    """Three answers to one prompt, in pools too small for all of them, and a neighbour."""

    def ask(engine: Engine, requests: list[Request], call: Callable[..., Any] = lambda f, *a, **k: f(*a, **k)) -> None:
        if not requests:
            requests.append(call(engine.add, prompt(4, 4), SamplingParams(max_tokens=9)))
        if len(requests) == 1:
            params = SamplingParams(max_tokens=3, n=3, temperature=1.0, seed=1, frequency_penalty=0.5)
            first = call(engine.add, prompt(12, 12), params)
            requests += [first, *first.siblings]
        while not engine.idle:
            call(engine.step)

    want: list[Request] = []
    watched = Calls()
    ask(engine_for(kind), want, watched)
    assert [len(r.generated) for r in want] == [9, 3, 3, 3]
    points = [(number, line) for number, lines in enumerate(watched.lines[2:4], 2) for line in range(1, lines + 1)]
    places = set()
    for number, line in random.Random(5).sample(points, min(len(points), MORE * 45)):
        engine, requests, calls = engine_for(kind), [], Calls(number, line)
        with suppress(Interrupted):
            ask(engine, requests, calls)
        places.add(calls.place)
        engine.manager.check_integrity()
        concerned = [r for r in requests if r.finish_reason == "error"]
        ask(engine, requests)
        assert len(requests) == 4 and all(r.finished for r in requests), calls.place
        for i, request in enumerate(requests):
            n = len(request.tokens) if request in concerned else len(want[i].tokens)
            assert request.tokens == want[i].tokens[:n], f"{calls.place}: request {i} has wrong tokens"
        assert_nothing_held(engine)
    queues = ("scheduler.py", "admission.py", "room.py")
    assert any(file in place for place in places for file in queues) and len(places) > 15


# ---- the places at which damage was seen, one by one


def interrupt_line(engine: Engine, requests: list[Request], function: Callable, times: int) -> None:
    """Raise at each of the lines of one function in turn: the n-th line that runs in it, in its `times`-th call."""
    code, count = function.__code__, [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == times:
                sys.settrace(None)
                raise Interrupted(f"line {frame.f_lineno}")
        return trace

    sys.settrace(trace)
    try:
        work(engine, requests)
    finally:
        sys.settrace(None)


PLACES = {
    "finish": Scheduler.finish,
    "take over": take_over,
    "truncate": PageTable.drop,
    "sort": Scheduler.rebuild,
    "compact": PageTable._compact,
    "acquire": PageAllocator.acquire,
    "release pages": PageAllocator.release,
    "release": KVCacheManager._release,
    "rebuild": KVCacheManager.rebuild,
    "start compaction": compacting.start_compaction.__wrapped__,
    "settle": compacting.settle_slot,
    "shrink": PageTable.shrink,
    "finish eviction": under_way.finish,
    "start beside shared pages": compacting.start_compaction.__wrapped__,
    "replace": PageTable.replace,
    "stop": compacting.stop_compacting,
    "preempt": Scheduler.preempt,
    "send away": away.send_away.__wrapped__,  # type: ignore[attr-defined]
    "come back": preempted.come_back,
    "bring back": away.bring_back.__wrapped__,  # type: ignore[attr-defined]
    "take pages": away._take_pages,
    "drop away": away.drop_away,
    "runs again": preempted._bring_back,
}
BESIDE_SHARED = {"start beside shared pages", "replace", "stop"}
ON_HOST = {"preempt", "send away", "come back", "bring back", "take pages", "drop away", "runs again"}
ON_DEVICE = {"start compaction", "settle", "shrink", "finish eviction"} | BESIDE_SHARED


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_every_line_of_the_bookkeeping_may_be_the_last(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want: list[Request] = []
    kind = f"llama{SHARED if place in BESIDE_SHARED else LEFT}" if place in ON_DEVICE else "llama"
    kind = f"qwen3_5{HOST}" if place in ON_HOST else kind
    monkeypatch.setattr(Compacting, "ready", lambda compacting: False)  # as long under way as can be
    work(engine_for(kind), want)
    interrupted = 0
    lines = range(1, 40, 1 if LONG else 2) if place in ON_DEVICE else range(1, 14 if place in ON_HOST else 12)
    for n in lines:
        engine, requests = engine_for(kind), []
        if place in ("rebuild", "sort"):
            engine.manager.interrupted = engine.calls.changing = True  # as after an interrupt
        try:
            interrupt_line(engine, requests, PLACES[place], n)
        except Interrupted:
            interrupted += 1
        concerned = [r for r in requests if r.finish_reason == "error"]
        finish(engine, requests)
        for i, request in enumerate(requests):
            if request not in concerned and requests[HELD] not in concerned and i < 4:
                assert request.tokens == want[i].tokens
    assert interrupted > 5


@pytest.mark.slow
def test_a_second_interrupt_while_the_first_is_mended() -> None:
    """Recovery may be interrupted too; the next call does it again."""
    want: list[Request] = []
    work(engine_for("qwen3_5"), want)
    for n in range(1, 30):
        engine, requests = engine_for("qwen3_5"), []
        forward, calls = engine.runner.forward, [0]

        def failing(inputs: object, forward: Callable = forward, calls: list[int] = calls) -> object:
            calls[0] += 1
            if calls[0] == 5:
                raise RuntimeError("injected")
            return forward(inputs)

        engine.runner.forward = failing  # type: ignore[method-assign,assignment]
        with pytest.raises((Interrupted, RuntimeError)):
            interrupt_line(engine, requests, Engine._recover, n)
        finish(engine, requests)
        concerned = [r for r in requests if r.finish_reason == "error"]
        assert concerned
        for i, request in enumerate(requests):
            if request not in concerned and requests[HELD] not in concerned and i < 4:
                assert request.tokens == want[i].tokens


@pytest.mark.parametrize("kind", ("qwen3_5", "deepseek_v4"))
def test_a_step_that_ran_and_was_forgotten_is_refused_not_run_twice(kind: str) -> None:
    """State has seen the token: the request ends, and its neighbour that has not run goes on."""
    engine = engine_for(kind)
    first, second = (engine.add(prompt(9, i), SamplingParams(max_tokens=8)) for i in range(2))
    for _ in range(3):
        engine.step()
    engine.drain()
    step = engine.manager.prepare_forward([(first.key, 1)])
    engine.runner.forward(engine.runner.inputs([first.tokens[-1:]], [0], step))  # and nobody commits it
    assert engine.scheduler.schedule_ahead() is None, "what cannot go on is no step to be launched ahead"
    while not engine.idle:
        engine.step()
    assert first.finish_reason == "error" and "was not committed" in str(first.error)
    assert second.finish_reason == "length" and second.answer_tokens == 8
    assert_nothing_held(engine)


def test_counts_are_made_anew_from_the_tables() -> None:
    """`rebuild` of a table whose counts are all wrong."""
    entry = (TensorSpec("k", (4,), torch.float32), TensorSpec("v", (4,), torch.float32))
    schema = CacheSchema((StreamSchema("attention", (0, 1), entry, 16, heads=2),))
    manager = KVCacheManager(schema, schema.pool_pages(1, 200), 3, 64)
    for name in "ab":
        manager.admit_request(name)
        manager.prepare_forward([(name, 30)])
        manager.commit([(name, 30)])
    table = manager.tables["attention"]
    before = table.pages.copy(), table.held.copy(), table.allocator.refs.copy(), table.allocator.free
    table.held[:] = 7
    table.allocator.refs[:] = 3
    table.allocator._top = 0
    manager._free_slots.clear()
    manager.rebuild()
    manager.check_integrity()
    assert np.array_equal(before[0], table.pages) and np.array_equal(before[1], table.held)
    assert np.array_equal(before[2], table.allocator.refs) and before[3] == table.allocator.free


@pytest.mark.parametrize("kind", ("qwen3_5", "deepseek_v4"))
def test_a_first_step_that_was_forgotten_is_run_again_on_fresh_state(kind: str) -> None:
    """At position 0 nothing is lost: the state starts anew."""
    manager, model = engine_for(kind).manager, model_of(kind)
    runner = Runner(model, manager)
    tokens, logits = prompt(9), []
    manager.admit_request("a")
    for _ in range(2):
        step = manager.prepare_forward([("a", 9)])
        logits.append(runner.forward(runner.inputs([tokens], range(9), step)))
    assert torch.equal(*logits)


def test_a_call_inside_a_step_waits_for_its_end() -> None:
    """As when a generator that nobody reads any more is collected in the middle of a step, and closes itself."""
    engine = engine_for("llama")
    first, second = (engine.add(prompt(4, i), SamplingParams(max_tokens=6)) for i in range(2))
    engine.step()
    forward = engine.runner.forward

    def meddling(inputs: Any) -> Any:
        engine.runner.forward = forward  # type: ignore[method-assign]
        engine.abort(first)
        with pytest.raises(RequestError, match="inside"):
            engine.step()
        return forward(inputs)

    engine.runner.forward = meddling  # type: ignore[method-assign]
    while not engine.idle:
        engine.step()
    assert first.finish_reason == "abort" and second.finish_reason == "length" and second.answer_tokens == 6
    assert_nothing_held(engine)
