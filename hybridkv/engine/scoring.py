"""Teacher forcing: logits of given tokens through the real path, steps, eviction and all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridkv.cache import ForwardStep
from hybridkv.config import SamplingParams, is_whole
from hybridkv.engine.ahead import evict_after_step
from hybridkv.errors import HybridKVError, OutOfPages, RequestError
from hybridkv.eviction.sizes import bounded_stride
from hybridkv.request import Request, RequestKey

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine


def score(engine: Engine, tokens: Sequence[int], prefill: int | None, chunk: int | None) -> Tensor:
    """Logits [T, vocab] f32 after each token: the first `prefill` tokens in chunks, the rest one decode step each."""
    tokens = engine.check_tokens(tokens)
    manager, scheduler = engine.manager, engine.scheduler
    eviction = engine.evictor.default if engine.evictor is not None else None
    bounds = _chunk_bounds(engine, len(tokens), prefill, chunk)
    request = engine.new_request(tokens, SamplingParams(), eviction=eviction)
    request.prompt_tokens = len(tokens) if prefill is None else prefill
    while not manager.free_slots and _make_room(engine):
        pass
    manager.admit_request(request.key)
    try:
        while not (given := scheduler.give_query_buffer(request)) and _make_room(engine):
            pass
        if not given:
            raise HybridKVError(
                f"all {manager.query_buffers.count} query buffers are taken by prompts that are being read; let the "
                "engine run until one has been evicted, or raise max_requests"
            )
        out = torch.empty(len(tokens), engine.vocab, dtype=torch.float32, device=manager.device)
        for a, b in pairwise(bounds):
            if ahead := engine.evictor.read_ahead(request, manager, b - a) if engine.evictor is not None else 0:
                _reserve(engine, request.key, b - a + ahead)
            step = _reserve(engine, request.key, b - a)
            logits = engine.runner.forward(engine.runner.inputs([tokens[a:b]], range(b - a), step))
            out[a:b] = engine.whole_rows(logits)
            manager.commit([(request.key, b - a)])
            evict_after_step(engine, request)
        return out
    finally:
        manager.release_request(request.key)


def _chunk_bounds(engine: Engine, tokens: int, prefill: int | None, chunk: int | None) -> list[int]:
    """Where the steps begin and end."""
    prefill = tokens if prefill is None else prefill
    chunk = prefill if chunk is None else chunk
    good = is_whole(prefill) and is_whole(chunk)
    if not good or not 0 <= prefill <= tokens or (prefill and chunk < 1):
        raise RequestError(f"prefill must be from 0 to {tokens} and chunk positive, not {prefill} and {chunk}")
    if tokens > engine.manager.max_tokens:
        raise RequestError(f"{tokens} tokens do not fit a context of {engine.manager.max_tokens}")
    bounds = {*range(0, prefill, chunk or 1), *range(prefill, tokens), tokens}
    default = engine.evictor.default if engine.evictor is not None else None
    if engine.evictor is not None and default is not None and default.bounded:
        # where a bounded prompt is evicted
        bounds.update(range(0, prefill, bounded_stride(engine.evictor.step_tokens)))
    return sorted(bounds)


def _reserve(engine: Engine, key: RequestKey, tokens: int) -> ForwardStep:
    """Pages for one request, at the cost of the others."""
    while True:
        try:
            return engine.scheduler.reserve([(key, tokens)], every_row=True)
        except OutOfPages:
            if not _make_room(engine):
                raise


def _make_room(engine: Engine) -> bool:
    """Give up a cache that is only held, or preempt the youngest request, which is computed again later.

    False: there is none, or a step of it is still in flight on a device.
    """
    scheduler, pipeline = engine.scheduler, engine.pipeline
    if not scheduler.holding_pages and (pipeline.in_flight is not None or not scheduler.running):
        return False
    if not scheduler.holding_pages:
        pipeline.prepared = None  # the step that was to come next may be of this request
        scheduler.preempt(max(scheduler.running, key=lambda request: request.order))
        return True
    return scheduler.make_room() is not None


def score_after(engine: Engine, request: Request, tokens: Sequence[int]) -> Tensor:
    """Logits [T, vocab] f32 after each of these tokens, which follow a finished request whose cache is held.

    They become part of the held cache; nothing is evicted.
    """
    tokens = engine.check_tokens(tokens)
    manager = engine.manager
    if not engine.scheduler.bring_back(request):
        raise RequestError("the request's cache is not held any more, or every slot is taken; read its tokens again")
    position = manager.position(request.key)
    if position + len(tokens) > manager.max_tokens:
        raise RequestError(f"{position} + {len(tokens)} tokens do not fit a context of {manager.max_tokens}")
    step = engine.scheduler.reserve([(request.key, len(tokens))], every_row=True)
    logits = engine.runner.forward(engine.runner.inputs([tokens], range(len(tokens)), step))
    found = engine.whole_rows(logits).float().clone()
    manager.commit([(request.key, len(tokens))])
    request.tokens[position:] = tokens
    return found
