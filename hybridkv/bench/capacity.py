"""How many long requests are resident at once in a fixed amount of memory, weights included.

"plan" is what the planner's arithmetic says. "admitted" is how many really go in: pools and state are allocated in the
memory that the weights leave, and prompts that were read (standin.py: pages and lengths are real) are admitted until
pages or slots run out. Prompts are read one after the other: with a budget each holds all its pages for a moment, or if
it is bounded those of its budget and one step, then the survivors'. What a step needs to compute comes on top.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridkv.bench.eviction import Configured
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.report import Column, Report
from hybridkv.bench.shapes import Shape
from hybridkv.bench.standin import fill_state, resident
from hybridkv.bench.timing import GIB, Ceilings, free_memory
from hybridkv.cache import CacheSchema, KVCacheManager
from hybridkv.config import CacheConfig, parse_bytes
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, OutOfPages
from hybridkv.eviction import Evictor, most_held
from hybridkv.models import cache_schema
from hybridkv.planner import model_bytes

STEP_TOKENS = 4096  # of a bounded prompt at once
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
    budget = 128 if shape.tiny else options.budget
    memory = parse_bytes("4MiB" if shape.tiny else options.memory)
    assert memory is not None
    fp8 = {"fp8": True} if options.weight_dtype == "fp8" else {}
    weights = model_bytes(shape.config, lambda name: name == "lm_head.weight", shape.dtype, "cuda", **fp8)
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
    for name, cache, small_state in choices(shape, budget):
        schema = cache_schema(shape.config, cache, shape.dtype)
        schema = bf16_state(schema) if small_state else schema
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
            "resident", name, plan=plan, requests=count, kv_gib=held / GIB, state_gib=count * schema.slot_bytes / GIB,
            each_mib=(held / max(count, 1) + schema.slot_bytes) / (1 << 20), times=count / max(first, 1),
        )  # fmt: skip
    return report


def choices(shape: Shape, budget: int) -> list[tuple[str, CacheConfig, bool]]:
    """(name, cache, whether the recurrent state is bf16): what can be bought."""
    kv = "bf16" if shape.dtype == torch.bfloat16 else "f32"
    cut = CacheConfig(kv_dtype=kv, budget=budget)
    return [
        (f"{kv}, all kept", CacheConfig(kv_dtype=kv), False),
        (f"{kv}, budget {budget}", cut, False),
        (f"{kv}, budget {budget}, window 32", replace(cut, window=32), False),
        ("fp8, all kept", CacheConfig(kv_dtype="fp8"), False),
        (f"fp8, budget {budget}", replace(cut, kv_dtype="fp8"), False),
        (f"fp8, budget {budget}, bf16 state", replace(cut, kv_dtype="fp8"), True),
        (f"{kv}, budget {budget}, bounded", replace(cut, bounded=True), False),
    ]


def bf16_state(schema: CacheSchema) -> CacheSchema:
    """State in half the bytes, as CacheConfig's state_dtype does it: trees that --base measures may lack it."""
    states = tuple(
        replace(s, tensors=tuple(replace(t, dtype=torch.bfloat16) if t.name == "recurrent" else t for t in s.tensors))
        for s in schema.states
    )
    return replace(schema, states=states)


def planned(schema: CacheSchema, room: int, context: int, cache: CacheConfig) -> int:
    """All but the last are cut to the budget; the last one is whole while it is read, or bounded."""
    held = context if cache.budget is None else min(cache.budget, context)
    most = most_held(cache, STEP_TOKENS)
    kept, whole = schema.kv_bytes(held), schema.kv_bytes(context if most is None else min(most, context))
    return max(0, room - whole - schema.slot_bytes) // (kept + schema.slot_bytes) + 1


def admitted(
    shape: Shape, schema: CacheSchema, cache: CacheConfig, room: int, context: int, slots: int
) -> tuple[int, int]:
    """(page bytes held, requests) when no more go in."""
    page = sum(s.page_bytes for s in schema.streams)
    pages = {s.name: (room - slots * schema.slot_bytes) // page for s in schema.streams}
    manager = KVCacheManager(schema, pages, slots, context + 2, shape.device)
    evictor = Evictor.make(cache, manager, shape.config.head_dim)
    engine = Engine(Configured(shape.config), manager, step_tokens=STEP_TOKENS, evictor=evictor)
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
