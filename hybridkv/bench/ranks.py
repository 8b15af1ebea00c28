"""One rank of a model over several GPUs, alone on one: what its part of a step takes without the sums.

A rank's kernels run at its own shapes; what it would send is left out, so this is the part of tensor parallelism that
one GPU can show, not a speed-up. `of 1/n` is the time as a multiple of the whole model's divided by the ranks: 1.10 at
two ranks and 1.25 at four are the bars. The floor counts the rank's own bytes, or products, as `decode` and `prefill`
do.

`group` compares an engine with the same one as the only rank of a group: events, digests, sums and gathers with nobody,
by NCCL inside the captured steps. That must not show: one per cent is the bar.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridkv.bench.decode import ANSWER, DecodeBench
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.prefill import prefill_flops, read
from hybridkv.bench.report import Column, Report
from hybridkv.bench.shapes import Shape, random_model
from hybridkv.bench.standin import fill_pages, make_engine
from hybridkv.bench.timing import Ceilings, free_memory
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.engine.lock_step import LockStepEngine
from hybridkv.engine.rank_sessions import WholeCache
from hybridkv.errors import HybridKVError
from hybridkv.models.decoder import Model
from hybridkv.models.schemas import head_counts
from hybridkv.parallel.group import LOOPBACK, Alone, Group, free_port
from hybridkv.parallel.layers import ShardedDecoder, ShardedV4
from hybridkv.parallel.random_part import RandomTensors, random_part
from hybridkv.parallel.shard import Shard, sizes_that_work

SIZES = (1, 2, 4, 8)
BARS = {2: 1.10, 4: 1.25}  # of the whole model's time divided by the ranks
GAP = 0.01  # of a step, that a group of one may add
GROUP_LAYERS = 16  # of the model that is run in a group of one
PARTED = (ShardedDecoder, ShardedV4)
TURNS = 3  # of both engines, one after the other: the medians are compared
COLUMNS = (
    Column("ms", "step ms", 9, ".2f"),
    Column("graph_ms", "graph ms", 9, ".2f"),
    Column("floor_ms", "floor ms", 9, ".2f"),
    Column("share", "of floor", 8, "%"),
    Column("of_part", "of 1/n", 8, ".2f"),
    Column("bar", "bar", 6, ".2f"),
)


class Silent(Alone):
    """A group of n of which this is the first rank, and from which nothing is heard: the shapes are right."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...], each of them x."""
        return x.unsqueeze(0).expand(self.size, *x.shape)


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    if options.weight_dtype not in ("auto", "fp8"):
        raise HybridKVError(f"ranks measures weights in auto or fp8, not {options.weight_dtype}")
    about = {"model": shape.name, "layers": shape.config.layers, "weights": options.weight_dtype}
    report = Report("ranks", "ms", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    kind = options.kv_dtypes[0] if options.kv_dtypes else "bf16" if shape.device == "cuda" else "f32"
    bench = RankBench(shape, options, report, CacheConfig(kv_dtype=kind))

    def wanted(part: str) -> bool:
        return re.search(options.only or "", part) is not None

    if wanted("decode") or wanted("prefill"):
        for size in (1, *(n for n in SIZES if n in sizes_that_work(shape.config))):
            report.attempt("ranks", f"n={size}", lambda n=size: bench.rank(n, wanted))
            free_memory(shape.device)
    if wanted("group"):
        report.attempt("ranks", "a group of one", bench.group)
    return report


class RankBench:
    """One model, one kind of cache, any number of ranks."""

    def __init__(self, shape: Shape, options: BenchOptions, report: Report, cache: CacheConfig) -> None:
        self.shape, self.report, self.cache = shape, report, cache
        self.fp8 = options.weight_dtype == "fp8"
        self.contexts = options.contexts or ((128,) if shape.tiny else (2048,))
        self.batches = options.batches or ((1, 3) if shape.tiny else (1, 16))
        self.chunk = 64 if shape.tiny else (options.chunks or (4096,))[0]
        self.length = 192 if shape.tiny else 2 * self.chunk
        self.whole: dict[str, float] = {}  # ms of the same on one rank

    def part(self, size: int, group: Alone | Group, shape: Shape) -> Model:
        """The first rank of so many."""
        self.report.doing(f"making weights of 1/{size}")
        device = torch.device(shape.device)
        return random_part(RandomTensors(shape.config, device, shape.dtype), Shard(0, size), group, device, self.fp8)

    def rank(self, size: int, wanted: Callable[[str], bool]) -> None:
        """A decode step and a prompt of the first rank of so many."""
        if size > 1:
            model = self.part(size, Silent(size), self.shape)
        else:
            model = random_model(self.shape, "fp8" if self.fp8 else "auto")
        if wanted("decode"):
            self.decode(model, size)
        if wanted("prefill"):
            self.prefill(model, size)

    def decode(self, model: Model, size: int) -> None:
        shape = replace(self.shape, config=replace(model.config, vocab=own_tokens(model)))
        bench = DecodeBench(shape, model, self.report, self.cache)
        if not self.fp8:  # whose prompts are rounded otherwise than its steps
            bench.agreement()
        bench.model = parted(model)
        for context in self.contexts:
            engine = own_logits(bench.engine(max(self.batches), context + ANSWER))
            for batch in self.batches:
                case = f"{self.cache.kv_dtype} n={size} B={batch} context {context}"
                row = bench.timed(engine, case, batch, context)
                same = f"decode B={batch} context {context}"
                self.add("decode", case, size, same, row, batch=batch, context=context)
                for request in [*engine.scheduler.running]:
                    engine.abort(request)
            del engine
            free_memory(self.shape.device)

    def prefill(self, model: Model, size: int) -> None:
        length = self.length
        engine = self.engine(parted(model), 1, length + 8)
        read(engine, length)  # compiles, and captures what is asked for twice
        read(engine, length)
        ms = statistics.median(read(engine, length).seconds for _ in range(3)) * 1e3
        floor = self.report.ceilings.floor_us(0, prefill_flops(model.config, length)) / 1e3
        row = {"ms": ms, "floor_ms": floor, "share": floor / ms, "tok_s": length / ms * 1e3}
        self.add("prefill", f"{self.cache.kv_dtype} n={size} T={length}", size, "prefill", row, tokens=length)

    def add(self, op: str, case: str, size: int, same: str, row: dict[str, Any], **about: Any) -> None:
        """A row beside that of one rank."""
        if size == 1:
            self.whole[same] = row["ms"]
        alone = self.whole.get(same)
        of_part = None if alone is None else row["ms"] * size / alone
        self.report.add(op, case, **row, of_part=of_part, bar=BARS.get(size), ranks=size, **about)

    def engine(self, model: Model, slots: int, context: int) -> Engine:
        shape, chunk = self.shape, self.chunk
        engine = make_engine(model, self.cache, shape.device, shape.dtype, slots, context, step_tokens=chunk)
        return own_logits(engine)

    def group(self) -> None:
        """An engine by itself, and one that is the only rank of a group, in turns."""
        shape, context = self.shape.cut(min(GROUP_LAYERS, self.shape.config.layers)), self.contexts[0]
        device = torch.device("cuda", torch.cuda.current_device()) if shape.device == "cuda" else torch.device("cpu")
        group = Group.join(0, 1, device, f"tcp://{LOOPBACK}:{free_port()}")
        ranked: LockStepEngine | None = None
        try:
            found: dict[str, list[dict[str, Any]]] = {"no group": [], "a group of one": []}
            models = [parted(self.part(1, of, shape)) for of in (Alone(), group)]
            plain, made = (self.engine(model, 1, context + ANSWER) for model in models)
            whole = WholeCache(made.manager.schema, head_counts(shape.config))
            ranked = LockStepEngine(models[1], made.manager, None, self.chunk, frozenset(), None, group, whole)
            for engine in (plain, ranked):
                fill_pages(engine.manager)
            for _ in range(TURNS):
                for name, model, engine in zip(found, models, (plain, ranked), strict=True):
                    bench = DecodeBench(shape, model, self.report, self.cache)
                    found[name].append(bench.timed(engine, name, 1, context))
                    for request in [*engine.scheduler.running]:
                        engine.abort(request)
        finally:
            if ranked is not None:
                ranked.drop_graphs()
            group.close()
        for name, rows in found.items():
            row = sorted(rows, key=lambda each: each["ms"])[len(rows) // 2]
            layers = f"{shape.config.layers} layers"
            self.report.add("group", f"{name}, context {context}, {layers}", **row, context=context)
        first, second = (statistics.median(row["ms"] for row in rows) for rows in found.values())
        self.report.about["group_gap"] = second / first - 1
        self.report.note(f"a group of one adds {second / first - 1:+.1%} to a step; the bar is {GAP:.0%}")


def parted(model: Model) -> Model:
    """Its steps give the logits of the rank's own tokens, from which the ranks would choose."""
    return replace(model, parted=True) if isinstance(model, PARTED) else model


def own_tokens(model: Model) -> int:
    """The rank's tokens, from 0 on. Those of others would be rows of zeros here, which a card multiplies faster."""
    return model.vocabulary.sizes[0] if isinstance(model, PARTED) else model.config.vocab


def own_logits(engine: Engine) -> Engine:
    """So do steps with prompts, which are of the rank's tokens."""
    model = engine.runner.model
    if isinstance(model, PARTED):
        engine.runner.logits, engine.vocab = model.own_logits, own_tokens(model)
    return engine
