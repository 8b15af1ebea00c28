"""Thousands of short requests through one engine, and a census of what there is before and after: nothing may grow.

The census counts all objects that Python's collector knows by their type, what containers hold that can be reached from
the engine (a list of numbers has no objects of its own), memory blocks of the interpreter, and on a GPU bytes.
"""

import gc
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from crowd import EVERY

from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.errors import RequestError
from hybridkv.request import Request

EVICTION: dict[str, int] = dict(budget=32, window=8, recent=8)  # longer prompts are evicted


def _params(rng: random.Random) -> SamplingParams:
    ask: dict[str, Any] = rng.choice([{}, {"temperature": 0.8, "top_p": 0.9}, EVERY, EVERY | {"n": 2}, {"logprobs": 2}])
    seed = rng.choice([None, rng.randrange(1 << 60)])
    return SamplingParams(max_tokens=rng.randint(1, 6), ignore_eos=True, seed=seed, **ask)


def _fails(tokens: list[int], logits: torch.Tensor) -> None:
    raise ValueError("on purpose")


def serve(engine: Engine, count: int, seed: int, at_once: int) -> Counter[str]:
    """So many requests, of which `at_once` are there at a time; some are preempted, cancelled, refused, held or fail.
    Counts how they ended.
    """
    rng, ended, live, held = random.Random(seed), Counter[str](), list[Request](), deque[Request]()
    while count or not engine.idle:
        while count and len(live) < at_once:
            count -= 1
            tokens = tiny.token_ids(rng.choice([1, 5, 20, 64, 64]), seed=rng.randrange(1 << 30))
            if rng.random() < 0.02:
                with pytest.raises(RequestError):
                    engine.add(tokens, SamplingParams(logit_bias={engine.vocab: 1.0}))
                ended["refused"] += 1
                continue
            params = _params(rng)
            if rng.random() < 0.02:
                params = SamplingParams(max_tokens=3, logits_hook=_fails)
            live.append(engine.add(tokens, params, hold=params.n == 1 and rng.random() < 0.02))
        if rng.random() < 0.03:
            engine.drain()
            if len(engine.scheduler.running) > 1:
                engine.scheduler.preempt(max(engine.scheduler.running, key=lambda r: r.order))
        engine.step()
        if live and rng.random() < 0.1:
            engine.abort(rng.choice(live))
            ended["cancelled"] += 1
        for request in live:
            if request.finished:
                ended[str(request.finish_reason)] += 1
                ended["evicted"] += bool(request.evictions)
                ended["preempted"] += request.preemptions
                held += [request] if request.hold else []
        live = [request for request in live if not request.finished]
        while len(held) > 1:
            engine.abort(held.popleft())
    for request in held:
        engine.abort(request)
    return ended


@dataclass(frozen=True)
class Census:
    objects: Counter[str]  # of each type
    contents: int  # of all containers that the engine reaches
    blocks: int  # of the interpreter's memory
    kept: dict[str, int]  # pages, slots, buffers and graphs in use
    device: tuple[int, int] = (0, 0)  # bytes allocated, and reserved
    resident: int = 0  # bytes of the process

    @staticmethod
    def of(engine: Engine) -> "Census":
        """What there is once nothing is left to do."""
        engine.drain()
        assert engine.idle
        gc.collect()
        objects = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
        contents, blocks = _contents(engine), sys.getallocatedblocks()
        device = (0, 0)
        if engine.manager.device.type == "cuda":
            torch.cuda.synchronize()
            device = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Census(objects, contents, blocks, _kept(engine), device, 4096 * pages)

    def growth(self, before: "Census", requests: int) -> list[str]:
        """What has grown by more than a fiftieth of the requests served in between."""
        some = 20 + requests // 50
        found = [f"{n - before.objects[name]} more {name}" for name, n in self.objects.items()]
        found = [text for text, (name, n) in zip(found, self.objects.items()) if n - before.objects[name] > some]
        if self.contents - before.contents > some:
            found.append(f"{self.contents - before.contents} more entries of containers")
        if self.blocks - before.blocks > 1000 + requests // 10:  # the interpreter's own spare objects are some hundreds
            found.append(f"{self.blocks - before.blocks} more blocks of memory")
        if self.kept != before.kept:
            found.append(f"kept: {before.kept}, then {self.kept}")
        return found


def _kept(engine: Engine) -> dict[str, int]:
    manager, runner = engine.manager, engine.runner
    found = {name: table.allocator.held for name, table in manager.tables.items()}
    found |= {"slots": manager.slots - manager.free_slots, "buffers": manager.query_buffers.count}
    found["buffers"] -= manager.query_buffers.free
    found["graphs"] = len(runner.graphs.captured) if runner.graphs is not None else 0
    found["mixed graphs"] = len(runner.mixed.captured) if runner.mixed is not None else 0
    return found


def _contents(root: object) -> int:
    """Entries of all containers and arrays that can be reached, but through modules, types and functions."""
    total, seen, left = 0, {id(root)}, deque[object]([root])
    while left:
        this = left.pop()
        if isinstance(this, np.ndarray):
            total += this.size
        elif isinstance(this, list | tuple | dict | set | frozenset | deque | bytearray):
            total += len(this)
        for each in gc.get_referents(this):
            if id(each) not in seen and not isinstance(each, ModuleType | type | FunctionType):
                seen.add(id(each))
                left.append(each)
    return total
