"""An exception at any line of a step: nothing is lost, nobody is wrong, and those who are not concerned go on.

A trace function counts the lines that Python runs in the package while an engine works, and raises at the n-th. The
work has prompts in chunks, answers side by side, preemption, a held cache that goes on, steps launched ahead, and
eviction where the model has attention layers to evict from.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tiny_v4
import torch

import hybridkv
from engine.driving import assert_nothing_held, prompt
from hybridkv import CacheConfig, SamplingParams
from hybridkv.cache import CacheSchema, KVCacheManager, StreamSchema, TensorSpec
from hybridkv.cache.allocator import PageAllocator
from hybridkv.cache.page_table import PageTable
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.models.random_weights import random_decoder
from hybridkv.request import Request

PACKAGE = str(Path(hybridkv.__file__).parent)
WATCHED = ("/engine/", "/cache/", "/eviction/", "/request.py", "/eviction_record.py")  # where bookkeeping is done
POINTS = {"llama": 80, "qwen3_5": 80, "deepseek_v4": 50}  # of interruption, spread over the whole work


HELD = 3  # the request whose cache is held for the second turn


class Interrupted(KeyboardInterrupt):
    pass


@contextmanager
def interrupt_at(line: int) -> Iterator[list[int]]:
    """Raise when the package runs its n-th watched line; 0: count only. Gives the count so far."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or not any(part in name for part in WATCHED):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                sys.settrace(None)
                frame.f_trace = None
                raise Interrupted(f"{name[len(PACKAGE) :]}:{frame.f_lineno}")
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


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
    model = model_of(kind)
    compressed = kind == "deepseek_v4"
    config = CacheConfig("f32", block=16) if compressed else CacheConfig("f32", 2, budget=8, window=2, recent=2)
    schema = cache_schema(model.config, config, torch.float32)
    manager = KVCacheManager(schema, schema.pool_pages(1, 48 if compressed else 18), 3, 64)
    evictor = Evictor.make(config, manager, scale=model.config.attention_scale)
    engine = Engine(model, manager, step_tokens=64, evictor=evictor)
    engine.launches_ahead = True  # as on a GPU
    return engine


def work(engine: Engine, requests: list[Request]) -> None:
    """Four requests and a second turn. Goes on from wherever it stands, so that it can be called again."""
    asked = [(3, 8), (4, 7), (14, 2), (9, 3)] if engine.evictor is not None else [(13, 12), (14, 11), (20, 2), (9, 3)]
    while len(requests) < len(asked):
        n, answer = asked[len(requests)]
        requests.append(engine.add(prompt(n, n), SamplingParams(max_tokens=answer), hold=n == 9))
    while not engine.idle:
        engine.step()
    if len(requests) == len(asked):
        first = requests[HELD]
        requests.append(engine.add(first.tokens + prompt(3, 99), SamplingParams(max_tokens=3), after=first))
    while not engine.idle:
        engine.step()


def finish(engine: Engine, requests: list[Request]) -> None:
    """After the interrupt: all that is left runs, and everything goes back."""
    work(engine, requests)
    for request in requests:
        engine.abort(request)
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", POINTS)
def test_an_interrupt_at_any_line_harms_only_the_requests_of_its_step(kind: str) -> None:
    want: list[Request] = []
    engine = engine_for(kind)
    with interrupt_at(0) as lines:
        work(engine, want)
    total = lines[0]
    assert all(r.finish_reason == "length" for r in want) and sum(r.preemptions for r in want) > 0
    assert kind == "deepseek_v4" or any(r.evictions for r in want)
    places = set()
    rng = random.Random(7)
    ended = 0
    for point in sorted(rng.sample(range(1, total), POINTS[kind])):
        engine, requests = engine_for(kind), []
        with interrupt_at(point) as lines:
            try:
                work(engine, requests)
            except Interrupted as where:
                places.add(str(where))
        assert lines[0] == point, "the interrupt did not come"
        engine.manager.check_integrity()
        concerned = [r for r in requests if r.finish_reason == "error"]
        finish(engine, requests)
        for i, request in enumerate(requests):
            if request in concerned:
                assert request.tokens == want[i].tokens[: len(request.tokens)], f"{places}: wrong tokens before the end"
                ended += 1
            elif requests[HELD] in concerned and i == 4:
                assert request.finish_reason == "length"  # a turn after a shorter answer is another turn
            else:
                assert request.tokens == want[i].tokens, f"request {i} has wrong tokens after an interrupt at {point}"
    assert len(places) > POINTS[kind] / 3 and ended > 20, f"{len(places)} different lines, {ended} requests ended"


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
    "compact": PageTable._compact,
    "acquire": PageAllocator.acquire,
    "release pages": PageAllocator.release,
    "release": KVCacheManager._release,
    "rebuild": KVCacheManager.rebuild,
}


@pytest.mark.parametrize("place", PLACES)
def test_every_line_of_the_bookkeeping_may_be_the_last(place: str) -> None:
    want: list[Request] = []
    work(engine_for("llama"), want)
    interrupted = 0
    for n in range(1, 40):
        engine, requests = engine_for("llama"), []
        if place == "rebuild":
            engine.manager.interrupted = True  # as after an interrupt: the next call begins with it
        try:
            interrupt_line(engine, requests, PLACES[place], n)
        except Interrupted:
            interrupted += 1
        concerned = [r for r in requests if r.finish_reason == "error"]
        finish(engine, requests)
        for i, request in enumerate(requests):
            if request not in concerned and requests[HELD] not in concerned:
                assert request.tokens == want[i].tokens
    assert interrupted > 5


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
            if request not in concerned and requests[HELD] not in concerned:
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
