"""Whole prompts through a model with random weights: seconds until the first token, and the peak of memory.

Prompts are random tokens, read in chunks by `engine.step()`, once to compile (at most two chunks) and once by the
clock. Before, a short prompt is read in one piece and in several, and its logits compared. Peak memory is what the
prompt adds to the weights: cache and workspace. With a budget entries are evicted when the prompt has been read; the
time of that, the device's work included, is a row of its own. The first length is the one that matters: other chunks
and transformers are compared there, before the other lengths begin. Exact mode is measured last, on few layers.
"""

from __future__ import annotations

import statistics
import time
from typing import ClassVar

import torch

from hybridkv.bench.options import BUDGET, BenchOptions
from hybridkv.bench.report import Column, Report, check, rounding
from hybridkv.bench.shapes import Shape, random_model
from hybridkv.bench.standin import fill_pages, make_engine, resident
from hybridkv.bench.timing import GIB, Ceilings, Meter, free_memory, sync
from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.kernels.gdn.rule import CHUNK
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.random_weights import random_decoder
from hybridkv.planner import matrix_elements
from hybridkv.request import Request

CHECKED = 3 * 64 + 5  # tokens
EXACT_LAYERS = 4  # that exact mode is measured on, beside fast mode
DECODED = 5  # steps that its median is of
PEER_MOST = 16384  # tokens that transformers reads; longer ones take it many seconds
COLUMNS = (
    Column("s", "seconds", 9, ".4f"),
    Column("tok_s", "tok/s", 9, ".0f"),
    Column("tflop_s", "TFLOP/s", 8, ".0f"),
    Column("share", "of matmul", 9, "%"),
    Column("peak_gib", "peak GiB", 9, ".2f"),
    Column("part", "of prompt", 9, ".2%"),
)


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    kinds = options.kv_dtypes or (("bf16",) if shape.device == "cuda" else ("f32",))
    lengths = options.contexts or ((192, 96) if shape.tiny else (4096,) if options.quick else (16384, 2048, 65536))
    chunk, *others = (64, 128) if shape.tiny else options.chunks or (8192,)
    budget = 64 if shape.tiny else options.budget or BUDGET
    about = {"model": shape.name, "layers": shape.config.layers, "chunk": chunk, "weights": options.weight_dtype}
    report = Report("prefill", "s", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    report.doing("making weights")
    model = random_model(shape, options.weight_dtype)
    peers = None
    if not options.skip_peers:
        from hybridkv.bench.peers import PrefillPeers

        peers = PrefillPeers(shape, report)
    for kind in kinds:
        bench = PrefillBench(shape, model, report, kind, max(*lengths, CHECKED) + 8)
        kept = bench.engine(chunk)
        error = report.attempt(
            "prefill", f"{kind}, chunked in two ways", lambda e=kept: agreement(e, shape.config.layers)
        )
        if error is None:
            continue  # what is wrong is not timed
        report.note(f"{kind} KV: two ways to chunk a prompt agree to {error:.0e} of the logits")
        evicting = bench.engine(chunk, budget)
        for length in lengths:
            bench.row(kept, length)
            bench.row(evicting, length)
            if length == lengths[0]:
                if options.trace is not None:
                    bench.traced(kept, options.trace, min(lengths))
                for other in others:
                    bench.row(bench.engine(other), length, f" chunk {other}")
                    free_memory(shape.device)
            if peers is not None and kind == kinds[0] and length <= PEER_MOST:
                report.attempt("prefill transformers", f"T={length}", lambda n=length: peers.read(n))
        del kept, evicting
        free_memory(shape.device)
        if kind == kinds[0]:
            report.attempt(
                "exact", f"{kind} T={lengths[0]}", lambda k=kind: exact_mode(shape, report, k, lengths[0], chunk)
            )
    return report


def exact_mode(shape: Shape, report: Report, kind: str, length: int, chunk: int) -> None:
    """What the same bits from any batch and any chunks cost: a prompt, and a decode step after it, on few layers."""
    few = shape.cut(min(EXACT_LAYERS, shape.config.layers))
    for exact in (False, True):
        model = random_decoder(few.config, few.device, few.dtype, exact=exact)
        cache, context = CacheConfig(kv_dtype=kind), length + 2 * CHECKED
        engine = make_engine(model, cache, few.device, few.dtype, 1, context, step_tokens=chunk, exact=exact)
        read(engine, min(length, 2 * chunk))
        name = f"{'exact' if exact else 'fast'} mode, {few.config.layers} layers"
        about = {"tokens": length, "kv_dtype": kind, "exact": exact, "layers": few.config.layers}
        report.add("prefill", f"{kind} T={length} {name}", s=read(engine, length).seconds, **about)
        request, steps = resident(engine, length, DECODED + 8), []
        for _ in range(DECODED + 4):
            with Meter(few.device) as meter:
                engine.step()
            steps.append(meter.seconds)
        engine.abort(request)
        report.add("decode step", f"{kind} T={length} {name}", s=statistics.median(steps[4:]), **about)
        del model, engine
        free_memory(few.device)


class Timed(Evictor):
    """Notes how long each eviction takes."""

    seconds: ClassVar[list[float]] = []

    def evict(self, request: Request, manager: KVCacheManager, ahead: int = 0) -> int:
        sync(manager.device.type)
        begin = time.perf_counter()
        freed = super().evict(request, manager, ahead)
        sync(manager.device.type)
        self.seconds.append(time.perf_counter() - begin)
        return freed


class PrefillBench:
    """One model, one kind of cache."""

    def __init__(self, shape: Shape, model: Model, report: Report, kind: str, context: int) -> None:
        self.shape, self.model, self.report, self.kind, self.context = shape, model, report, kind, context
        self.warm: set[tuple[int, bool, int]] = set()  # (chunk, whether all is kept, tokens) that have been read

    def engine(self, chunk: int, budget: int | None = None) -> Engine:
        few = min(64, budget or 64)
        cache = CacheConfig(kv_dtype=self.kind, budget=budget, recent=few, window=few)
        shape = self.shape
        engine = make_engine(self.model, cache, shape.device, shape.dtype, 1, self.context, step_tokens=chunk)
        fill_pages(engine.manager)
        if engine.evictor is not None:
            e = engine.evictor
            engine.evictor = Timed(e.default, e.scale, e.step_tokens, deferred=False)
        return engine

    def row(self, engine: Engine, length: int, more: str = "") -> None:
        default = engine.evictor.default if engine.evictor is not None else None
        budget = default.budget if default is not None else None
        name = f"{self.kind} T={length}{more}" + ("" if budget is None else f" budget {budget}")
        self.report.attempt("prefill", name, lambda: self._row(engine, length, name, budget))

    def _row(self, engine: Engine, length: int, name: str, budget: int | None) -> None:
        self.warm_up(engine, length)
        Timed.seconds.clear()
        meter = read(engine, length)
        flops, ceilings = prefill_flops(self.shape.config, length), self.report.ceilings
        about = {"tokens": length, "kv_dtype": self.kind, "budget": budget, "chunk": engine.scheduler.step_tokens}
        self.report.add(
            "prefill", name, s=meter.seconds, tok_s=length / meter.seconds, tflop_s=flops / meter.seconds / 1e12,
            share=flops / meter.seconds / 1e12 / ceilings.tflop_s, floor_s=ceilings.floor_us(0, flops) / 1e6,
            peak_gib=meter.peak + engine.manager.schema.kv_bytes(length) / GIB, flops=flops, **about,
        )  # fmt: skip
        if Timed.seconds:
            spent = sum(Timed.seconds)
            self.report.add("eviction in prefill", name, s=spent, part=spent / meter.seconds, **about)

    def warm_up(self, engine: Engine, length: int) -> None:
        """Compiles all that a prompt of this length runs: its chunks, and the eviction from as many entries."""
        some = min(length, 2 * engine.scheduler.step_tokens)
        known = engine.scheduler.step_tokens, engine.evictor is None, some
        if known not in self.warm:
            read(engine, some)
            self.warm.add(known)
        if engine.evictor is not None and some < length:
            engine.abort(resident(engine, length, 1))

    def traced(self, engine: Engine, folder: str, length: int) -> None:
        from hybridkv.bench.trace import trace_prefill

        run = lambda: trace_prefill(engine, folder, length, self.shape.device)  # noqa: E731
        self.report.attempt("trace", "prefill chunk", run)


def agreement(engine: Engine, layers: int) -> float:
    """The same prompt in one piece and in several: another order of sums, the same logits."""
    tokens = random_tokens(engine.vocab, CHECKED)
    want, got = engine.score(tokens)[-1], engine.score(tokens, chunk=64)[-1]
    return check("a prompt in chunks", got, want, rounding(layers))


def random_tokens(vocab: int, count: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def read(engine: Engine, length: int) -> Meter:
    """Until the first token is there. The whole prompt is read, whatever the engine keeps of earlier ones."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    request = engine.add(random_tokens(engine.vocab, length), params, cache=False)
    with Meter(engine.manager.device.type) as meter:
        while not request.finished:
            engine.step()
    if request.error is not None:
        raise RuntimeError(request.error)
    return meter


def prefill_flops(config: ModelConfig, T: int) -> float:
    """Products of the projections (the head for one token only), of causal attention, and of the delta rule."""
    head = config.vocab * config.hidden
    total = 2 * T * (matrix_elements(config) - head) + 2 * head
    total += 4 * len(config.attention_layers) * config.heads * config.head_dim * T * (T + 1) / 2
    if config.gdn is not None:
        K, V = config.gdn.key_dim, config.gdn.value_dim
        total += len(config.gdn_layers) * T * config.gdn.value_heads * (2 * CHUNK * (3 * K + 2 * V) + 6 * K * V)
    return total
