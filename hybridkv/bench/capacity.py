"""How many long requests are resident at once in a fixed amount of memory, weights included.

"plan" is what the planner's arithmetic says. "admitted" is how many really go in: pools and state are allocated in the
memory that the weights leave, and prompts that were read (standin.py: pages and lengths are real) are admitted until
pages or slots run out. Prompts are read one after the other: with a budget each holds all its pages for a moment, or if
it is bounded those of its budget and one step, then the survivors'. State is what requests hold, page tables and the
query buffers that are lent to those that read. What a step needs to compute comes on top.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridkv.bench.eviction import Configured
from hybridkv.bench.options import BUDGET, BenchOptions
from hybridkv.bench.report import Column, Report
from hybridkv.bench.shapes import Shape
from hybridkv.bench.standin import fill_state, give_weights, resident
from hybridkv.bench.timing import GIB, Ceilings, free_memory
from hybridkv.cache import CacheSchema, KVCacheManager
from hybridkv.config import CacheConfig, parse_bytes
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, OutOfPages
from hybridkv.eviction import Evictor, most_held, query_buffers_for
from hybridkv.models import cache_schema
from hybridkv.planner import model_bytes

STEP_TOKENS = 4096  # of prompts at once
ANSWER = 2  # tokens of room for one
COLUMNS = (
    Column("plan", "plan", 9, ".0f"),
    Column("requests", "admitted", 9, ".0f"),
    Column("kv_gib", "pages GiB", 10, ".2f"),
    Column("state_gib", "state GiB", 10, ".2f"),
    Column("each_mib", "MiB each", 10, ".1f"),
    Column("times", "times", 7, ".2f"),
)


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    context = options.contexts[0] if options.contexts else 512 if shape.tiny else 16384
    budget = 128 if shape.tiny else options.budget or BUDGET
    memory = parse_bytes("4MiB" if shape.tiny else options.memory)
    assert memory is not None
    fp8 = options.weight_dtype == "fp8"
    if options.weight_dtype not in ("auto", "fp8"):
        raise HybridKVError(f"capacity counts weights in auto or fp8; `hybridkv plan` counts {options.weight_dtype}")
    weights = model_bytes(shape.config, lambda name: name == "lm_head.weight", shape.dtype, "cuda", fp8)
    about = {
        "model": shape.name,
        "context": context,
        "memory_gib": memory / GIB,
        "weights_gib": weights / GIB,
        "weights": options.weight_dtype,
    }
    report = Report("capacity", "requests", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    if memory <= weights:
        raise HybridKVError(f"memory {options.memory} does not hold the weights, {weights / GIB:.1f} GiB")
    report.start()
    first, room = None, memory - weights
    for name, cache in choices(shape, budget):
        schema = cache_schema(shape.config, cache, shape.dtype)
        plan = planned(schema, room, context, cache)
        found = report.attempt(
            "resident", name, lambda s=schema, c=cache, n=plan: admitted(shape, s, c, room, context, n)
        )
        free_memory(shape.device)
        if found is None:
            continue
        held, count = found
        first = first or count
        report.add(
            "resident", name, plan=plan, requests=count, kv_gib=held / GIB,
            state_gib=(slot_bytes(schema, context) * count + query_buffer_bytes(schema, cache, count)) / GIB,
            each_mib=(held / max(count, 1) + slot_bytes(schema, context)) / (1 << 20), times=count / max(first, 1),
        )  # fmt: skip
    return report


def choices(shape: Shape, budget: int) -> list[tuple[str, CacheConfig]]:
    """(name, cache): what can be bought."""
    kv = "bf16" if shape.dtype == torch.bfloat16 else "f32"
    evicting = CacheConfig(kv_dtype=kv, budget=budget)
    smallest = (f"fp8, budget {budget}, bf16 state", replace(evicting, kv_dtype="fp8", state_dtype="bf16"))
    return [
        (f"{kv}, all kept", CacheConfig(kv_dtype=kv)),
        (f"{kv}, budget {budget}", evicting),
        ("fp8, all kept", CacheConfig(kv_dtype="fp8")),
        (f"fp8, budget {budget}", replace(evicting, kv_dtype="fp8")),
        *([smallest] if shape.config.gdn is not None else []),
        (f"{kv}, budget {budget}, bounded", replace(evicting, bounded=True)),
    ]


def planned(schema: CacheSchema, room: int, context: int, cache: CacheConfig) -> int:
    """How many requests fit: all but the last hold their budget; the last one is whole while it is read, or bounded."""
    held = context if cache.budget is None else min(cache.budget, context)
    bound = most_held(cache, STEP_TOKENS)
    kept, whole = schema.kv_bytes(held), schema.kv_bytes(context if bound is None else min(bound, context))
    each, count = kept + slot_bytes(schema, context), 1
    while whole - kept + (count + 1) * each + query_buffer_bytes(schema, cache, count + 1) <= room:
        count += 1
    return count


def slot_bytes(schema: CacheSchema, context: int) -> int:
    """What a resident request takes besides pages: state, and its page ids on the device."""
    return schema.slot_bytes + 4 * sum(s.pages(context + ANSWER) for s in schema.streams)


def query_buffer_bytes(schema: CacheSchema, cache: CacheConfig, slots: int) -> int:
    """What requests that read a prompt keep their last queries in."""
    return query_buffers_for(cache, STEP_TOKENS, slots) * schema.query_buffer_bytes


def admitted(
    shape: Shape, schema: CacheSchema, cache: CacheConfig, room: int, context: int, slots: int
) -> tuple[int, int]:
    """(page bytes held, requests) when no more go in."""
    page = sum(s.page_bytes for s in schema.streams)
    rest = room - slots * slot_bytes(schema, context) - query_buffer_bytes(schema, cache, slots)
    pages, query_buffers = {s.name: rest // page for s in schema.streams}, query_buffers_for(cache, STEP_TOKENS, slots)
    manager = KVCacheManager(schema, pages, slots, context + ANSWER, shape.device, query_buffers=query_buffers)
    evictor = Evictor.make(cache, manager, scale=shape.config.attention_scale)
    engine = Engine(Configured(shape.config), manager, step_tokens=STEP_TOKENS, evictor=evictor)
    give_weights(engine)
    for table in manager.tables.values():
        for t in table.pool.tensors.values():
            t.zero_()  # the memory is really there
    fill_state(manager)
    count = 0
    try:
        while manager.free_slots:
            resident(engine, context, 1)
            count += 1
    except OutOfPages:
        pass
    manager.check_integrity()
    return sum(manager.held_bytes(r.key) for r in engine.scheduler.running), count
