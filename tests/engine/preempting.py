"""Requests that make room for others and come back: engines with a host, and what is to be true of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.driving import assert_nothing_held, prompt, run
from engine.reusing import ASK
from hybridkv import CacheConfig, SamplingParams
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier
from hybridkv.engine.engine import Engine
from hybridkv.request import Request

CPU = torch.device("cpu")
BUDGET: dict[str, int] = dict(budget=32, window=8, recent=8)
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "budget": BUDGET,
    "again": BUDGET | {"decode_every": 8},
    "bounded": BUDGET | {"bounded": True},
}
TEXT = prompt(128, 5)


def host(blocks: int = 400) -> HostTier:
    return HostTier(blocks * BLOCK, CPU, pages=True, preempted=True)


def params(i: int, tokens: int = 18) -> SamplingParams:
    """Greedy and sampled, with everything that an answer's past decides."""
    how: dict[str, Any] = {"max_tokens": tokens + i, "logprobs": ASK.logprobs, "ignore_eos": True}
    if i % 2:
        how |= {"temperature": 0.9, "seed": i, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    return SamplingParams(**how)


def builder(engine_of: Callable) -> Callable[..., Engine]:
    """`built("llama", "fp8", "budget", pool=200)`: exact, with room on the host for pages as on a GPU."""

    def build(kind: str, kv: str = "f32", setting: str = "whole", **more: Any) -> Engine:
        eviction = CacheConfig(kv, 16, **SETTINGS[setting]) if SETTINGS[setting] else None
        sizes = {"exact": True, "step_tokens": 64, "slots": 4, "host": host()} | more
        return engine_of(kind, kv=kv, eviction=eviction, **sizes)

    return build


def alone(engine: Engine, tokens: list[int], how: SamplingParams, **more: Any) -> Request:
    request = engine.add(tokens, how, **more)
    run(engine)
    return request


def halfway(engine: Engine, request: Request, tokens: int = 4) -> None:
    """Until the request has so many tokens of its answer, and nothing is in flight."""
    while request.answer_tokens < tokens:
        engine.step()
    engine.drain()


def two(engine: Engine) -> tuple[Request, Request]:
    """Two requests that begin alike, in the middle of their answers: the second one runs on the first one's columns."""
    first = engine.add([*TEXT, *prompt(20, 6)], params(1), marks=[(128, "client")])
    halfway(engine, first, 1)
    second = engine.add([*TEXT, *prompt(20, 7)], params(1))
    halfway(engine, second)
    assert second.cached_tokens == 128
    return first, second


def computed(requests: list[Request]) -> int:
    """Tokens that are to run if each runs once: all but the last one of each answer, which nobody asks for."""
    return sum(len(r.tokens) - 1 for r in requests)


def ways(engine: Engine) -> tuple[int, int, int]:
    """How often a request was sent to the host, came back from there, and was read again."""
    counts = engine.scheduler.counts
    return counts["sent_away"], counts["came_back"], counts["read_again"]


def came_back(requests: list[Request]) -> int:
    return sum(r.restored for r in requests)


def assert_back(engine: Engine) -> None:
    """Nothing is held anywhere, once what is kept for others has been forgotten."""
    assert_nothing_held(engine)
    assert not engine.manager.away and not engine.manager.arriving
    if engine.manager.reuse is not None:
        engine.manager.reuse.forget()
    assert engine.manager.host.used == 0
