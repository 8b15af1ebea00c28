"""What it costs to evict a prompt of n tokens down to a budget: all attention layers, in whole and by part.

The cache is a stand-in (standin.py). "whole" is `Evictor.evict` by the clock, host included: scores, choice,
compaction, page tables. Two parts are timed alone: the scores (as many layers in one launch as the engine takes), and
the scores with the choice of survivors. The rest is moving survivors and giving pages back. The window's queries
are kept as a part of storing keys (kernels: attention_inputs).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import product

from torch import Tensor

from hybridkv.bench.options import BUDGET, BenchOptions
from hybridkv.bench.report import Column, Report, check
from hybridkv.bench.shapes import Shape
from hybridkv.bench.standin import fill_pages, fill_state, fill_sums, give_weights, make_engine, resident
from hybridkv.bench.timing import Ceilings, free_memory, sync
from hybridkv.cache import LayerHandle
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor, SnapKV
from hybridkv.kernels.eviction.score import window_scores_ref
from hybridkv.models.config import ModelConfig
from hybridkv.request import Request

COLUMNS = (
    Column("ms", "whole ms", 9, ".2f"),
    Column("score_ms", "scores", 8, ".2f"),
    Column("choose_ms", "choice", 8, ".2f"),
    Column("compact_ms", "moving", 8, ".2f"),
    Column("floor_ms", "floor ms", 9, ".2f"),
    Column("share", "of floor", 8, "%"),
    Column("pages", "pages freed", 12, ".0f"),
)
REPEATS = 3
SCORES_BOUND = 1e-2  # products in bf16, sums in f32
POLICIES = {"snapkv:pooling=none": "", "auto": ", by default"}  # and what a row's name ends in


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    kinds = options.kv_dtypes or (("bf16",) if shape.device == "cuda" else ("f32",))
    lengths = options.contexts or (
        (256, 512) if shape.tiny else (16384,) if options.quick else (4096, 16384, 32768, 65536, 131072)
    )
    budget = 128 if shape.tiny else options.budget or BUDGET
    layers = len(shape.config.attention_layers)
    about = {"model": shape.name, "attention_layers": layers, "budget": budget}
    report = Report("eviction", "ms", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    for kind, policy in product(kinds, POLICIES):
        cache = CacheConfig(kv_dtype=kind, budget=budget, policy=policy)
        engine = make_engine(Configured(shape.config), cache, shape.device, shape.dtype, 1, max(lengths) + 8)
        fill_pages(engine.manager)
        give_weights(engine)
        for length in lengths:
            name = f"{kind} T={length} keep {budget}{POLICIES[policy]}"
            found = report.attempt("evict", name, lambda e=engine, n=length: measure(e, n))
            for request in [*engine.scheduler.running]:
                engine.abort(request)
            if found is None:
                continue
            c = shape.config
            nbytes = layers * token_bytes(engine) * (length / 2 + 2 * min(budget, length))  # keys read, survivors moved
            flops = 2 * cache.window * c.heads * c.head_dim * length * layers
            floor = ceilings.floor_us(nbytes, flops) / 1e3
            report.add(
                "evict",
                name,
                **found,
                floor_ms=floor,
                share=floor / found["ms"],
                tokens=length,
                kv_dtype=kind,
                policy=policy,
            )
        del engine
        free_memory(shape.device)
    return report


class Configured:
    """Takes the place of a model: eviction and admission read the cache alone."""

    captures = False
    nbytes = 0

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def forward(
        self, tokens: Tensor, positions: Tensor, handles: Mapping[int, LayerHandle], rows: Tensor | None
    ) -> Tensor:
        raise AssertionError("there is no model to run")

    hidden = forward

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("there is no model to run")


def token_bytes(engine: Engine) -> float:
    """Keys and values of one token in one layer."""
    [s] = engine.manager.schema.streams
    return s.heads * s.page_bytes / s.entries_per_page


def measure(engine: Engine, length: int) -> dict[str, float]:
    manager, evictor = engine.manager, engine.evictor
    assert evictor is not None
    parts: dict[str, list[float]] = {"score": [], "choose": [], "whole": []}
    freed = 0
    for i in range(REPEATS + 1):  # the first one compiles
        request = resident(engine, length, 1, evict=False)
        fill_state(manager)
        fill_sums(evictor, request, manager)
        if i == 0:
            verify(evictor, request, engine)
        calls: dict[str, Callable[[], object]] = {
            "score": lambda r=request: evictor.scores(r, manager, evictor.policy, evictor.asked_by(r).window),
            "choose": lambda r=request: evictor.choose(r, manager),
            "whole": lambda r=request: evictor.evict(r, manager),
        }
        for name, call in calls.items():
            if name != "whole":
                call()
            sync(manager.device.type)
            begin = time.perf_counter()
            found = call()
            sync(manager.device.type)
            if i:
                parts[name].append((time.perf_counter() - begin) * 1e3)
        freed = int(found)  # type: ignore[call-overload]
        engine.abort(request)
    score, choose, whole = (statistics.median(parts[n]) for n in ("score", "choose", "whole"))
    return {
        "ms": whole, "score_ms": score, "choose_ms": max(choose - score, 0.0),
        "compact_ms": max(whole - choose, 0.0), "pages": freed,
    }  # fmt: skip


def verify(evictor: Evictor, request: Request, engine: Engine) -> float:
    """The first layer's scores against their definition: the sum over the window, on which the default's peaks rest."""
    layer = evictor.layers(request, engine.manager)[0]
    want = window_scores_ref(
        layer.queries, layer.query_positions, layer.k_pool, layer.table, layer.positions, layer.scale
    )
    got = SnapKV("none").score(layer)
    return check("scores", got, want.view(len(got), -1, got.shape[-1]).sum(1), SCORES_BOUND)
