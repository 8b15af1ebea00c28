"""What it costs to evict a prompt of n tokens down to a budget: all attention layers.

The cache is a stand-in (standin.py). On a GPU the eviction is left to the device, as in the engine:

    stream     how long it keeps the stream of the steps busy, all of it launched before: what those who decode wait
    host       what Python takes to launch it, and, after that, to do the bookkeeping when the lists have come
    goes on    from the call to the end of the bookkeeping, on an idle device: then the request itself can run again
    scores     the part of the stream's time that the scores take (as many layers in one launch as the engine takes)
    by host    the other path, for pages that are shared: the host makes the lists and moves by them (`Evictor.evict`)

On a CPU there is one path: all of it is `by host`. The window's queries are kept as a part of storing keys (kernels:
attention_inputs).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import product

import torch
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
from hybridkv.eviction.under_way import finish
from hybridkv.kernels.eviction.score import window_scores_ref
from hybridkv.models.config import ModelConfig
from hybridkv.request import Request

COLUMNS = (
    Column("ms", "stream ms", 10, ".2f"),
    Column("host_ms", "host", 7, ".2f"),
    Column("finish_ms", "+ later", 8, ".2f"),
    Column("goes_on_ms", "goes on", 8, ".2f"),
    Column("score_ms", "scores", 8, ".2f"),
    Column("by_host_ms", "by host", 8, ".2f"),
    Column("floor_ms", "floor ms", 9, ".2f"),
    Column("share", "of floor", 8, "%"),
    Column("pages", "pages freed", 12, ".0f"),
)
REPEATS = 3
SLEEP = 40_000_000  # cycles, some 20 ms: everything is launched before the clock starts
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
    embedding = torch.empty(0, dtype=torch.bfloat16)

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
    """Medians of all columns but the floor."""
    on_gpu, found = engine.manager.device.type == "cuda", defaultdict[str, list[float]](list)
    for i in range(REPEATS + 1):  # the first one compiles
        for name, form in (FORMS if on_gpu else {"by host": by_host}).items():
            request = prepared(engine, length, first=i == 0)
            if i == 0 and name == "by host":
                verify(the(engine.evictor), request, engine)
            for column, value in form(engine, request).items():
                found[column] += [value] if i else []
            engine.abort(request)
    medians = {column: statistics.median(values) for column, values in found.items()}
    return medians if on_gpu else {"ms": medians["by_host_ms"], **medians}


def the(evictor: Evictor | None) -> Evictor:
    assert evictor is not None
    return evictor


def prepared(engine: Engine, length: int, first: bool) -> Request:
    """A request whose prompt has been read. What its queries saw is made once: other keys of the same kind will do."""
    request = resident(engine, length, 1, evict=False)
    if first:
        fill_state(engine.manager)
        fill_sums(the(engine.evictor), request, engine.manager)
    sync(engine.manager.device.type)
    return request


def by_host(engine: Engine, request: Request) -> dict[str, float]:
    """The lists are made and carried out by the host."""
    begin = time.perf_counter()
    pages = the(engine.evictor).evict(request, engine.manager)
    sync(engine.manager.device.type)
    return {"by_host_ms": (time.perf_counter() - begin) * 1e3, "pages": pages}


def queued(engine: Engine, request: Request) -> dict[str, float]:
    """Left to a device that is busy: its own time alone."""
    manager, evictor = engine.manager, the(engine.evictor)
    start, scored, stop = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(SLEEP)
    start.record()
    evictor.scores(request, manager, evictor.policy, evictor.asked_by(request).window)
    scored.record()
    evictor.start(request, manager)
    stop.record()
    sync("cuda")
    finish(request, manager)
    scores = start.elapsed_time(scored)
    return {"score_ms": scores, "ms": scored.elapsed_time(stop)}


def alone(engine: Engine, request: Request) -> dict[str, float]:
    """Left to an idle device, and waited for."""
    manager = engine.manager
    begin = time.perf_counter()
    the(engine.evictor).start(request, manager)
    launched = time.perf_counter()
    finish(request, manager)
    done = time.perf_counter()
    return {"host_ms": (launched - begin) * 1e3, "goes_on_ms": (done - begin) * 1e3}


def waited(engine: Engine, request: Request) -> dict[str, float]:
    """What is left for the host when the lists have come."""
    the(engine.evictor).start(request, engine.manager)
    sync(engine.manager.device.type)
    begin = time.perf_counter()
    finish(request, engine.manager)
    return {"finish_ms": (time.perf_counter() - begin) * 1e3}


FORMS: dict[str, Callable[[Engine, Request], dict[str, float]]] = {
    "by host": by_host, "queued": queued, "alone": alone, "waited": waited,
}  # fmt: skip


def verify(evictor: Evictor, request: Request, engine: Engine) -> float:
    """The first layer's scores against their definition: the sum over the window, on which the default's peaks rest."""
    layer = evictor.layers(request, engine.manager)[0]
    want = window_scores_ref(
        layer.queries, layer.query_positions, layer.k_pool, layer.table, layer.positions, layer.scale
    )
    got = SnapKV("none").score(layer)
    return check("scores", got, want.view(len(got), -1, got.shape[-1]).sum(1), SCORES_BOUND)
