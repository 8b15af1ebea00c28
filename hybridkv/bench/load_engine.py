"""The engine that is put under load: slots and pages for the requests that are to come, as far as memory goes."""

from __future__ import annotations

from hybridkv.bench.decode import ANSWER, free_bytes
from hybridkv.bench.load_workload import Mix
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.shapes import Shape
from hybridkv.bench.standin import fill_pages, make_engine
from hybridkv.bench.timing import GIB
from hybridkv.cache import CacheSchema
from hybridkv.config import CacheConfig, ReuseConfig
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError
from hybridkv.models import cache_schema
from hybridkv.models.decoder import Model

RESERVE = 12 * GIB  # of a GPU's memory: graphs, logits, activations
STATE_SHARE = 0.5  # of what is left that recurrent state may take, where not everything fits


def step_tokens_of(shape: Shape, options: BenchOptions) -> int:
    return options.chunks[0] if options.chunks else 64 if shape.tiny else 2048


def load_engine(
    shape: Shape, model: Model, options: BenchOptions, cache: CacheConfig, slots: int, context: int, least: int = 1
) -> Engine:
    """An engine for up to `slots` requests of up to `context` tokens, in the memory that is free. Where not all of that
    fits, requests wait for slots and pages as they would in a service; there are at least `least` slots. With
    `options.reuse` it keeps what is read, with as many checkpoints as an LLM has by default.
    """
    schema = cache_schema(shape.config, cache, shape.dtype)
    free = free_bytes(shape.device)
    checkpoints = ReuseConfig().rows(schema.slot_bytes, int(free), shape.device == "cpu") if options.reuse else None
    free -= (checkpoints or 0) * schema.slot_bytes
    slots, held = pool_sizes(schema, slots, context, free, shape.device, cache.budget is not None, least)
    engine = make_engine(
        model, cache, shape.device, shape.dtype, slots, context, held, step_tokens=step_tokens_of(shape, options),
        checkpoints=checkpoints,
    )  # fmt: skip
    fill_pages(engine.manager)
    return engine


def pool_sizes(
    schema: CacheSchema, slots: int, context: int, free: float, device: str, queries: bool = False, least: int = 1
) -> tuple[int, int]:
    """Slots, and tokens for which each has pages, in so many free bytes; or HybridKVError. `queries`: each has a query
    buffer, too.
    """
    room = free - (RESERVE if device == "cuda" else 0)
    each = schema.slot_bytes + (schema.query_buffer_bytes if queries else 0)
    if each and slots * (each + schema.kv_bytes(context)) > room:
        slots = max(least, min(slots, int(max(room, 0) * STATE_SHARE // each)))
    token = schema.kv_bytes(context) / context
    held = context if token == 0 else min(context, int((room - slots * each) / max(slots, 1) / token))
    if held * slots < context:
        raise HybridKVError(
            f"{max(room, 0) / GIB:.1f} GiB are left for the cache; a request of {context} tokens takes "
            f"{(each + schema.kv_bytes(context)) / GIB:.2f} GiB; lower the lengths, --slots or --layers"
        )
    return slots, held


def mean_context(mix: Mix) -> int:
    """Tokens of a request half way through its answer."""
    return round(mix.prompts.mean(mix.spread) + mix.answers.mean() / 2)


def context_of(mix: Mix) -> int:
    return max(mix.longest, mean_context(mix) + ANSWER) + 8


def pool_tokens(engine: Engine) -> float:
    """Tokens that the pools hold, of all requests together."""
    tables = engine.manager.tables.values()
    tokens = [t.allocator.total * t.schema.entries_per_page / t.schema.streams for t in tables]
    return min(tokens, default=float("inf"))
