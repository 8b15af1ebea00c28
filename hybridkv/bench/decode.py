"""Decode steps of a whole model with random weights: by context, by batch, and with a budget.

Caches are stand-ins (standin.py): real requests, pages and lengths, random contents. A step's time is that of
`engine.step()` by the clock: scheduling, the forward pass, sampling, bookkeeping. Where the step is a CUDA graph, its
replay alone is timed on the device as well; the difference is what the host adds. The floor counts every weight once,
all stored keys and values, and state read and written, at the copy rate of this run, or the products at its matmul
rate.

Before anything is timed, decode steps over a short real prompt are compared with its prefill.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridkv.bench.options import BUDGET, BenchOptions
from hybridkv.bench.report import Column, Report, check, rounding
from hybridkv.bench.shapes import Shape, random_model
from hybridkv.bench.standin import fill_pages, fill_state, make_engine, resident
from hybridkv.bench.timing import GIB, Ceilings, free_memory
from hybridkv.cache import CacheSchema
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.kernels.formats.fp8 import fp8_decode
from hybridkv.kernels.linear.linear import Linear
from hybridkv.models.decoder import Model
from hybridkv.models.random_weights import random_decoder
from hybridkv.planner import matrix_elements

COLUMNS = (
    Column("ms", "step ms", 9, ".2f"),
    Column("graph_ms", "graph ms", 9, ".2f"),
    Column("host_ms", "host ms", 8, ".2f"),
    Column("floor_ms", "floor ms", 9, ".2f"),
    Column("share", "of floor", 8, "%"),
    Column("tok_s", "tok/s", 9, ".0f"),
)
STEPS, WARM = 12, 3
ANSWER = STEPS + WARM + 8  # tokens of room: no request ends while steps are timed
CHECKED = 192  # tokens
EXACT_CASES, EXACT_TINY = ((1, 16384), (64, 2048)), ((1, 128), (3, 128))  # requests and their tokens
CHECKED_LAYERS = 4  # of FP8 weights, by steps alone
OURS = ("budget", "context", "batch", "weights", "state", "exact")  # parts that --only picks from, and "peers"


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    kinds = options.kv_dtypes or (("bf16", "fp8") if shape.device == "cuda" else ("f32",))
    about = {"model": shape.name, "layers": shape.config.layers, "weights": options.weight_dtype, "steps": STEPS}
    report = Report("decode", "ms", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    contexts = options.contexts or (
        (128, 256) if shape.tiny else (2048, 32768) if options.quick else tuple(n << 10 for n in (2, 16, 64, 128, 256))
    )

    def wanted(part: str) -> bool:
        return re.search(options.only or "", part) is not None

    if any(map(wanted, OURS)):
        ours(shape, options, report, kinds, contexts, wanted)
        free_memory(shape.device)
    if wanted("peers") and not options.skip_peers:
        from hybridkv.bench.peers import decode_peers

        report.attempt("decode", "beside peers", lambda: decode_peers(shape, options, report))
    return report


def ours(
    shape: Shape, options: BenchOptions, report: Report, kinds: tuple[str, ...], contexts: tuple[int, ...],
    wanted: Callable[[str], bool],
) -> None:  # fmt: skip
    """The parts that were asked for; what matters most comes first, as time may be short."""
    report.doing("making weights")
    model = random_model(shape, options.weight_dtype)
    batches = options.batches or ((1, 3) if shape.tiny else (1, 64) if options.quick else (1, 4, 16, 64, 128, 256))
    short, first = min(contexts), kinds[0]
    many, length = (3, 256) if shape.tiny else (16 if options.quick else 64, 16384)
    for kind in kinds if wanted("context") or wanted("batch") else kinds[:1]:
        bench = DecodeBench(shape, model, report, CacheConfig(kv_dtype=kind))
        error = report.attempt(
            "decode", f"{kind}, compared with prefill", lambda b=bench: b.agreement(options.weight_dtype)
        )
        if error is None:
            continue  # what is wrong is not timed
        report.note(f"{kind} KV: decode steps of {CHECKED} tokens against their prefill: {error:.0e} of the logits")
        if kind == first and wanted("budget"):
            with_budget(shape, model, report, kind, many, length, 128 if shape.tiny else options.budget or BUDGET)
        if wanted("context"):
            report.attempt("decode by context", kind, lambda b=bench: b.by_context(contexts))
            free_memory(shape.device)
        if wanted("batch"):
            report.attempt("decode by batch", kind, lambda b=bench: b.by_batch(batches, short))
            free_memory(shape.device)
        if kind == first and wanted("weights") and options.weight_dtype == "auto":
            report.attempt("decode fp8 weights", kind, lambda k=kind: fp8_weights(shape, report, k, short))
            free_memory(shape.device)
        if kind == first and wanted("state") and shape.config.gdn is not None:
            some = tuple(b for b in batches if b >= 64) or batches[-1:]
            report.attempt(
                "decode bf16 state", kind, lambda k=kind, b=some: bf16_state(shape, model, report, k, b, short)
            )
            free_memory(shape.device)
        if kind == first and wanted("exact"):
            report.attempt("decode exact", kind, lambda k=kind: exact_mode(shape, model, report, k))
            free_memory(shape.device)
        if kind == first and options.trace is not None:
            from hybridkv.bench.trace import trace_decode

            report.attempt("trace", "decode step", lambda b=bench: trace_decode(b, str(options.trace), short))
            free_memory(shape.device)


def fp8_weights(shape: Shape, report: Report, kind: str, context: int) -> None:
    """One request with the projections in E4M3, beside the model that is there.

    Steps are compared as `fp8_agreement` says.
    """
    fp8_agreement(shape, kind)
    model = random_decoder(shape.config, shape.device, shape.dtype, True)
    bench = DecodeBench(shape, model, report, CacheConfig(kv_dtype=kind))
    bench.measure(bench.engine(1, context + ANSWER), "decode fp8 weights", 1, context)


def fp8_agreement(shape: Shape, kind: str) -> float:
    """A prompt's activations are rounded to E4M3 too, a step's are not, so one cannot be compared with the other. Steps
    of the first layers are compared with those of the dequantised weights.
    """
    few = shape.cut(min(CHECKED_LAYERS, shape.config.layers))
    model = random_decoder(few.config, few.device, few.dtype, True)
    got = steps_alone(few, model, kind)
    dequantise_weights(model)
    return check("a decode step with FP8 weights", got, steps_alone(few, model, kind), rounding(few.config.layers))


def steps_alone(shape: Shape, model: Model, kind: str) -> Tensor:
    """Logits [8, vocab] of the last of some steps of one token each."""
    tokens = torch.randint(0, shape.config.vocab, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = make_engine(model, CacheConfig(kv_dtype=kind), shape.device, shape.dtype, 1, len(tokens))
    return engine.score(tokens, prefill=1)[-8:]


def dequantise_weights(part: object) -> None:
    """In place: quantised values become the weights that they stand for."""
    if isinstance(part, Linear):
        if part.scale is not None:
            part.weight, part.scale = fp8_decode(part.weight, part.scale).to(torch.bfloat16), None
    elif isinstance(part, tuple) or hasattr(part, "__dataclass_fields__"):
        for item in part if isinstance(part, tuple) else vars(part).values():
            dequantise_weights(item)


def bf16_state(shape: Shape, model: Model, report: Report, kind: str, batches: tuple[int, ...], context: int) -> None:
    """Many requests whose recurrent state takes half the bytes."""
    bench = DecodeBench(shape, model, report, CacheConfig(kv_dtype=kind, state_dtype="bf16"))
    bench.agreement()
    bench.by_batch(batches, context, "decode bf16 state")


def exact_mode(shape: Shape, model: Model, report: Report, kind: str) -> None:
    """What the same bits from any batch cost a step: one request and many, beside the model that is there.

    Exact weights are a second model, of as many layers as memory has room for, or of few.
    """
    room = model.nbytes + 24 * GIB < free_bytes(shape.device)
    shape = shape if room else shape.cut(min(CHECKED_LAYERS, shape.config.layers))
    layers = f" {shape.config.layers} layers"
    for exact in (False, True):
        same = not exact and shape.config.layers == model.config.layers
        own = model if same else random_decoder(shape.config, shape.device, shape.dtype, exact=exact)
        bench = DecodeBench(shape, own, report, CacheConfig(kv_dtype=kind), exact)
        for batch, context in EXACT_TINY if shape.tiny else EXACT_CASES:
            engine = bench.engine(batch, context + ANSWER)
            bench.measure(engine, "decode exact" if exact else "decode fast", batch, context, layers)
            del engine
            free_memory(shape.device)


class DecodeBench:
    """One model, one kind of cache."""

    def __init__(self, shape: Shape, model: Model, report: Report, cache: CacheConfig, exact: bool = False) -> None:
        self.shape, self.model, self.report, self.cache, self.exact = shape, model, report, cache, exact

    def engine(self, slots: int, context: int, held: int | None = None, spare: int = 0) -> Engine:
        engine = make_engine(
            self.model, self.cache, self.shape.device, self.shape.dtype, slots, context, held, spare=spare,
            exact=self.exact,
        )  # fmt: skip
        fill_pages(engine.manager)
        return engine

    def agreement(self, weight_dtype: str = "auto") -> float:
        if weight_dtype == "fp8":
            return fp8_agreement(self.shape, self.cache.kv_dtype)
        engine = make_engine(self.model, self.cache, self.shape.device, self.shape.dtype, 1, CHECKED)
        tokens = torch.randint(0, self.shape.config.vocab, (CHECKED,), generator=torch.Generator().manual_seed(0))
        want = engine.score(tokens.tolist())[-8:]
        got = engine.score(tokens.tolist(), prefill=CHECKED - 8)[-8:]
        return check("a decode step", got, want, rounding(self.shape.config.layers))

    def by_context(self, contexts: tuple[int, ...]) -> None:
        engine = self.engine(1, max(contexts) + ANSWER)
        for context in contexts:
            self.measure(engine, "decode by context", 1, context)
        del engine
        free_memory(self.shape.device)

    def by_batch(self, batches: tuple[int, ...], context: int, op: str = "decode by batch") -> None:
        room = free_bytes(self.shape.device)
        top = context + ANSWER
        engine = self.engine(1, top)
        each = engine.manager.schema.kv_bytes(top) + engine.manager.schema.slot_bytes
        fits = [b for b in batches if b * each < room - 6 * GIB]
        for left in sorted(set(batches) - set(fits)):
            self.report.note(f"batch {left} at {context} tokens does not fit: {left * each / GIB:.0f} GiB of cache")
        del engine
        free_memory(self.shape.device)
        if not fits:
            return
        engine = self.engine(max(fits), top)
        for batch in fits:
            self.measure(engine, op, batch, context)
        del engine
        free_memory(self.shape.device)

    def measure(self, engine: Engine, op: str, batch: int, context: int, more: str = "") -> dict[str, Any] | None:
        case = f"{self.cache.kv_dtype} B={batch} context {context}{more}"
        found = self.report.attempt(op, case, lambda: self._measure(engine, op, case, batch, context))
        for request in [*engine.scheduler.running]:
            engine.abort(request)
        return found

    def _measure(self, engine: Engine, op: str, case: str, batch: int, context: int) -> dict[str, Any]:
        row = self.timed(engine, case, batch, context)
        self.report.add(op, case, **row, batch=batch, context=context, kv_dtype=self.cache.kv_dtype)
        return row

    def timed(self, engine: Engine, case: str, batch: int, context: int) -> dict[str, Any]:
        """What a decode step of so many requests takes."""
        requests = [resident(engine, context, ANSWER - 2) for _ in range(batch)]
        fill_state(engine.manager)
        held = float(sum(n.sum() for r in requests for n in engine.manager.lengths(r.key).values()))
        ms, graph = timed_steps(engine)
        problems = [r.error for r in requests if r.error is not None]
        if problems:
            raise RuntimeError(f"{case}: {problems[0]}")
        floor = self.floor_us(engine, batch, held) / 1e3
        row: dict[str, Any] = {"ms": ms, "graph_ms": graph, "host_ms": None if graph is None else max(ms - graph, 0.0)}
        return row | {"floor_ms": floor, "share": floor / ms, "tok_s": batch / ms * 1e3}

    def floor_us(self, engine: Engine, batch: int, entries: float) -> float:
        """`entries`: of all requests' streams together."""
        return StepWork.of(self.model, engine.manager.schema).floor_us(self.report.ceilings, batch, entries)


@dataclass(frozen=True)
class StepWork:
    """What a decode step must read, write and multiply, counted."""

    weights: int  # bytes, read once for all requests
    entry: float  # bytes of one entry of a stream
    state: int  # bytes of a request's recurrent state, which is read and written
    row_flops: float  # of one token
    entry_flops: float  # of one entry that a token attends to

    @staticmethod
    def of(model: Model, schema: CacheSchema) -> StepWork:
        config = model.config
        return StepWork(
            read_bytes(model),
            sum(s.page_bytes / s.entries_per_page for s in schema.streams),
            sum(s.slot_bytes for s in schema.states if s.name != "queries"),
            2 * matrix_elements(config),
            4 * config.heads / config.kv_heads * config.head_dim,
        )

    def floor_us(self, ceilings: Ceilings, batch: int, entries: float) -> float:
        """`entries`: of all requests' streams together."""
        nbytes = self.weights + entries * self.entry + 2 * batch * self.state
        return ceilings.floor_us(nbytes, batch * self.row_flops + entries * self.entry_flops)


def timed_steps(engine: Engine) -> tuple[float, float | None]:
    """Median ms of decode steps that are the same but for one more token each, and of the captured graph alone."""
    return statistics.median(step_times(engine)), graph_ms(engine)


def step_times(engine: Engine) -> list[float]:
    """Ms of such steps."""
    for _ in range(WARM):
        engine.step()  # captures the graph
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def graph_ms(engine: Engine) -> float | None:
    """The captured step of what is running alone, on the device; None where there is none."""
    graphs, running = engine.runner.graphs, engine.scheduler.running
    if graphs is None or not running:
        return None
    longest = max(int(n.max()) for r in running for n in engine.manager.lengths(r.key).values())
    found = graphs.captured.get(graphs.key(graphs.rows(len(running)), longest))
    if found is None:
        return None
    graph = found.graph
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before = torch.cuda.memory_allocated()
    start.record()
    for _ in range(10):
        graph.replay()
    stop.record()
    stop.synchronize()
    assert torch.cuda.memory_allocated() == before, "a replay moved the allocator"
    return start.elapsed_time(stop) / 10


def with_budget(shape: Shape, model: Model, report: Report, kind: str, many: int, length: int, budget: int) -> None:
    """Many long requests, with all tokens kept and with a budget: how much faster each token comes."""
    rows, top = [], length + ANSWER
    for keep in (None, budget):
        cache = CacheConfig(kv_dtype=kind, budget=keep)
        bench = DecodeBench(shape, model, report, cache)
        held = top if keep is None else keep + 2 * cache.window
        spare = 0 if keep is None else top
        name = " all kept" if keep is None else f" budget {keep}"

        def run(bench: DecodeBench = bench, held: int = held, spare: int = spare, name: str = name) -> Any:
            engine = bench.engine(many, top, held, spare)
            return bench.measure(engine, "decode with budget", many, length, name)

        rows.append(report.attempt("decode with budget", f"{kind} {many} requests{name}", run))
        free_memory(shape.device)
    if rows[0] and rows[1]:
        ratio = rows[1]["tok_s"] / rows[0]["tok_s"]
        report.about["budget_speedup"] = ratio
        report.note(f"{many} requests of {length} tokens: a budget of {budget} decodes at {ratio:.2f} times the speed")


def free_bytes(device: str) -> float:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 8 * GIB


def read_bytes(model: Model) -> int:
    """Weights that a step reads: all but the embedding, of which it reads a row; a tied one is the head as well."""
    return model.nbytes - (0 if model.config.tied else model.embedding.nbytes)  # type: ignore[attr-defined]
