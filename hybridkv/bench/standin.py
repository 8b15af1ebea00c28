"""Caches as a prompt would leave them, without reading one: what decoding costs does not depend on what is stored.

Requests, pages and lengths are real: they go through the engine's queue and the page tables' own calls, so that tables,
page order and memory are those of a prompt that was read. Only the bytes in pages and state are random numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.cache.reuse import Reuse
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Evictor
from hybridkv.eviction.evict import STREAMS
from hybridkv.kernels.formats.fp8 import fp8_encode_ref
from hybridkv.models import cache_schema
from hybridkv.models.decoder import Model
from hybridkv.request import Request

BLOCK = 256  # pages of random numbers, repeated all over a pool


def make_engine(
    model: Model, cache: CacheConfig, device: str, dtype: torch.dtype, slots: int, context: int,
    held: int | None = None, step_tokens: int = 2048, spare: int = 0, exact: bool = False,
    checkpoints: int | None = None,
) -> Engine:  # fmt: skip
    """An engine for `slots` requests, each of which holds `held` tokens (all of them without a budget). It has pages
    for `spare` tokens more, which one prompt needs before its entries are evicted. `checkpoints`: what is read is kept
    for others, with so many of these.
    """
    schema = cache_schema(model.config, cache, dtype)
    pages = {s.name: slots * s.pages(held or context) + s.pages(spare) for s in schema.streams}
    manager = KVCacheManager(schema, pages, slots, context, device, exact, checkpoints=checkpoints)
    if checkpoints is not None:
        Reuse(manager)
    evictor = Evictor.make(cache, manager, scale=model.config.attention_scale)
    return Engine(model, manager, step_tokens=step_tokens, evictor=evictor)


def give_weights(engine: Engine) -> None:
    """Random stream weights, where there is no model that could be read to measure them."""
    table = engine.manager.tables[STREAMS].schema
    engine.stream_weights = torch.rand(table.heads * len(table.layers), device=engine.manager.device)


def fill_pages(manager: KVCacheManager) -> None:
    """Random keys and values in every page."""
    for table in manager.tables.values():
        tensors = table.pool.tensors
        for name, t in tensors.items():
            if t.is_floating_point() and not name.endswith("_scale"):
                t.normal_()
            elif f"{name}_scale" in tensors:
                some = torch.randn(min(BLOCK, t.shape[1]), *t.shape[2:], device=t.device)
                for pages, part in zip((t, tensors[f"{name}_scale"]), fp8_encode_ref(some), strict=True):
                    _repeat(part, pages)


def _repeat(part: Tensor, pages: Tensor) -> None:
    """Copy part [n, ...] repeatedly into pages [lanes, N, ...]."""
    for a in range(0, pages.shape[1], len(part)):
        pages[:, a : a + len(part)] = part[: pages.shape[1] - a]


def fill_state(manager: KVCacheManager) -> None:
    """Random recurrent and convolution state, window queries and their log-sum-exps."""
    for t in manager.state.tensors.values():
        t.normal_(0, 0.5)


def fill_sums(evictor: Evictor, request: Request, manager: KVCacheManager) -> None:
    """What attention notes beside the window's queries: the logarithm of each one's sum of exp(q . k * scale)."""
    row = manager.query_buffers.of[manager.slot_of[request.key]]
    for layer, seen in zip(manager.tables[STREAMS].schema.layers, evictor.layers(request, manager), strict=True):
        lse = manager.state.layer(layer).get("lse")
        if lse is None:
            return
        W, H, D = seen.queries.shape
        for g, keys in enumerate(seen.keys):
            rows = seen.queries.float().view(W, len(seen.lengths), -1, D)[:, g]  # [W, H/G, D]
            logits = rows @ keys.t() * seen.scale  # [W, H/G, L]
            later = seen.positions[g] > seen.query_positions[:, None]
            sums = logits.masked_fill(later[:, None], -torch.inf).logsumexp(-1)
            per = H // len(seen.lengths)
            lse[row, seen.query_positions % W, g * per : (g + 1) * per] = sums


def take_pages(manager: KVCacheManager, request: Request, tokens: int) -> None:
    """What prepare_forward and commit do, without a step in between."""
    slot = manager.slot_of[request.key]
    for table in manager.tables.values():
        P = table.schema.entries_per_page
        add = -(-(table.lengths[slot] + tokens) // P) - table.held[slot]
        table.allocator.require(int(add.sum()))
        table.take(slot, add, np.zeros(len(add), bool))
    manager.commit([(request.key, tokens)])


def resident(engine: Engine, tokens: int, answer: int, evict: bool = True) -> Request:
    """A request in the state after its prompt of `tokens` tokens was read and evicted down to its budget, if there is
    one; `answer` tokens more will be decoded.
    """
    request = engine.add([1] * tokens, SamplingParams(max_tokens=answer + 1, ignore_eos=True))
    engine.scheduler.waiting.remove(request)
    manager = engine.manager
    manager.admit_request(request.key)
    evictor = engine.evictor if evict else None
    bounded = evictor is not None and evictor.default is not None and evictor.default.bounded
    step = evictor.step_tokens if evictor is not None and bounded else tokens
    try:
        if evictor is not None and not engine.scheduler.give_query_buffer(request):
            raise HybridKVError("no query buffer is free")
        for begin in range(0, tokens, step):
            take_pages(manager, request, min(step, tokens - begin))
            if evictor is not None and evictor.due(request, manager):
                evictor.evict(request, manager)
        if evictor is not None and not evictor.needs_queries(request, manager):
            manager.drop_query_buffer(request.key)
    except BaseException:
        manager.release_request(request.key)
        raise
    request.tokens.append(1)  # what the prompt's last step gives
    engine.scheduler.adopt(request)
    return request
