"""An engine over several ranks of this machine, with random weights: `bench decode --tp 2`, `bench prefill --tp 2`, and
`bench load --tp 2`, of which it does what all requests at once take (load.py).

Every rank makes its own part (parallel/random_part.py). Rank 0 measures, and the others follow it as those of an LLM
do, so a time has all in it that several ranks add: messages, what they compare, sums, gathers. Prompts are read: a
stand-in for their caches would have to be put in place on every rank. The floor is that of a rank's own bytes or
products: what is sent is not in it.

    python -m hybridkv.bench.over_ranks      one of the others; what is run on standard input: one line of JSON
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch

from hybridkv import follower
from hybridkv.bench import decode, load, prefill
from hybridkv.bench.decode import ANSWER, CHECKED, DecodeBench, free_bytes, step_times
from hybridkv.bench.load import LoadBench
from hybridkv.bench.load_engine import context_of, pool_sizes, step_tokens_of
from hybridkv.bench.options import OPTIONS as ALL
from hybridkv.bench.options import BenchOptions, flag_of, from_json
from hybridkv.bench.prefill import prefill_flops, random_tokens, read
from hybridkv.bench.report import Report, check, rounding
from hybridkv.bench.shapes import Shape, find_shape
from hybridkv.bench.timing import Ceilings, free_memory
from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.lock_step import LockStepEngine
from hybridkv.engine.step_cost import DEFAULT
from hybridkv.errors import HybridKVError
from hybridkv.models import cache_schema
from hybridkv.models.decoder import Model
from hybridkv.parallel.group import Group, GroupError, torchrun_place
from hybridkv.parallel.launch import LEAVE, Place, start_ranks
from hybridkv.parallel.random_part import RandomTensors, random_part
from hybridkv.parallel.shard import Shard, check_size
from hybridkv.parallel.signs import FAILED
from hybridkv.planner import human
from hybridkv.ranks import exchange_seconds

NAMES = ("decode", "prefill", "load")
MEASURES = {"decode": ("ms", decode.COLUMNS), "prefill": ("s", prefill.COLUMNS), "load": ("s", load.COLUMNS)}
ALL_AT_ONCE = ("offline", "sampled")  # parts of load
MODULE = "hybridkv.bench.over_ranks"
TIMES = 3  # that a prompt is read, beside the first times


@dataclass(frozen=True)
class Work:
    """What is measured: the same on every rank, from the same options."""

    name: str
    shape: Shape
    kinds: tuple[str, ...]  # of the cache
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    chunk: int
    fp8: bool

    @staticmethod
    def of(name: str, options: BenchOptions) -> Work:
        shape = find_shape(options.model_shape, options.layers, options.device)
        tiny, reads = shape.tiny, name == "prefill"
        kinds = options.kv_dtypes or (("bf16",) if shape.device == "cuda" else ("f32",))
        if name == "load":
            context, slots = context_of(load.mix_of(shape, options)), load.slots_of(shape, options)
            fp8 = options.weight_dtype == "fp8"
            return Work(name, shape, kinds[:1], (context,), (slots,), step_tokens_of(shape, options), fp8)
        return Work(
            name,
            shape,
            kinds,
            options.contexts or ((192,) if tiny else (8192,) if reads else (2048, 16384)),
            (1,) if reads else options.batches or ((1, 3) if tiny else (1, 16)),
            64 if tiny else (options.chunks or (4096,))[0],
            options.weight_dtype == "fp8",
        )

    @property
    def answer(self) -> int:
        """Tokens of a request at most: what is timed, and what it decodes while the prompts of others are read. Of load
        the contexts have all tokens in them.
        """
        if self.name == "load":
            return 0
        least = min(DEFAULT, self.chunk)  # tokens of a step beside decoding requests
        return ANSWER + max(self.batches) * (max(self.contexts) // least + 1)

    def part(self, group: Group) -> Model:
        """A rank's part of the model."""
        tensors = RandomTensors(self.shape.config, group.device, self.shape.dtype)
        return random_part(tensors, Shard(group.rank, group.size), group, group.device, self.fp8)

    def engine(self, kind: str, model: Model, place: Place) -> LockStepEngine:
        """Of this rank, once all have come to it."""
        slots, context = max(self.batches), max(*self.contexts, CHECKED) + self.answer
        schema = cache_schema(model.config, CacheConfig(kv_dtype=kind), self.shape.dtype)
        held = context
        if self.name == "load":
            free = torch.tensor([free_bytes(self.shape.device)], dtype=torch.float64)
            least = float(place.group.all_gather(free).min())  # all ranks have as many
            slots, held = pool_sizes(schema, slots, context, least, self.shape.device)
        pages = schema.pool_pages(slots, held)
        manager = KVCacheManager(schema, pages, slots, context, str(place.group.device))
        place.group.meet(f"{kind} is made", place.check)  # an exchange waits for seconds only
        return LockStepEngine(model, manager, None, self.chunk, frozenset(), None, place.group)


def run(name: str, shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    """Of rank 0, which starts the others."""
    size, work = check_size(shape.config, options.tp), Work.of(name, options)
    about = {"model": shape.name, "layers": shape.config.layers, "weights": options.weight_dtype, "ranks": size}
    if name == "load":
        about |= load.about_load(shape, options)
    measure, columns = MEASURES[name]
    report = Report(name, measure, columns, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    report.doing("starting ranks")
    place = begin(name, options, size, torch.device(shape.device))
    engine: LockStepEngine | None = None
    try:
        report.doing("making weights")
        model = work.part(place.group)
        report.note(f"{size} ranks; the first one has {human(model.nbytes)} of weights")  # type: ignore[attr-defined]
        for kind in work.kinds:
            engine = work.engine(kind, model, place)
            lead(RankedBench(work, kind, engine, report, options), place)
            engine = None
            free_memory(shape.device)
        place.end()
    except BaseException:
        place.kill()
        place.group.abandon(lambda: None if engine is None else close(engine))
        raise
    return report


def lead(bench: RankedBench, place: Place) -> None:
    """Measure with an engine that the others follow."""
    engine = bench.engine
    engine.watch(place.check)
    engine.channel.begin_beat()
    bench.all()
    if engine.failure is not None:
        if isinstance(engine.failure.__cause__, KeyboardInterrupt):
            raise engine.failure.__cause__
        place.check_soon()  # which says why, where a rank has ended
        raise engine.failure
    with engine.channel.telling("end"):
        place.group.settle(place.check)
    close(engine)


def close(engine: LockStepEngine) -> None:
    """It is not used any more."""
    engine.channel.close()
    engine.drop_graphs()


def check_options(name: str, options: BenchOptions) -> None:
    """Refuse what is not measured over ranks."""
    if name not in NAMES:
        raise HybridKVError(
            f"--tp measures {', '.join(NAMES[:-1])} and {NAMES[-1]} over several ranks, not {name}; `ranks` times the "
            "first of several alone, without what they send each other"
        )
    if options.weight_dtype not in ("auto", "fp8"):
        raise HybridKVError(f"--tp measures weights in auto or fp8, not {options.weight_dtype}")
    if name == "load":
        if not any(re.search(options.only or "", part) for part in ALL_AT_ONCE):
            parts = " and ".join(ALL_AT_ONCE)
            raise HybridKVError(f"--only {options.only!r} picks nothing of load over several ranks; there is {parts}")
        if options.reuse or options.rate or options.load:
            raise HybridKVError("--reuse, --rate and --load are not for --tp, which measures all requests at once")
    for wrong in ("budget", "trace") if name == "load" else ("only", "budget", "trace"):
        if getattr(options, wrong) is not None:
            alone = "all requests at once" if name == "load" else "--contexts and --batches alone"
            raise HybridKVError(f"{flag_of(ALL[wrong])} is not for --tp, which measures {alone}")
    if torchrun_place() is not None:
        raise HybridKVError("bench --tp starts its ranks by itself: run it without torchrun")


def begin(name: str, options: BenchOptions, size: int, device: torch.device) -> Place:
    """This process as rank 0; the others are started."""
    words = {"name": name, "options": json.dumps(asdict(options))}
    return start_ranks(size, device, words, exchange_seconds(), MODULE)


class RankedBench:
    """One kind of cache, on rank 0."""

    def __init__(self, work: Work, kind: str, engine: LockStepEngine, report: Report, options: BenchOptions) -> None:
        self.work, self.kind, self.engine, self.report, self.options = work, kind, engine, report, options
        self.size = engine.group.size

    def all(self) -> None:
        """What is wrong is not timed."""
        work, report, name = self.work, self.report, self.work.name
        if work.fp8:
            report.note("FP8 weights: steps are not compared with their prefill, whose activations are rounded, too")
        else:
            error = report.attempt(name, f"{self.kind}, compared with prefill", self.agreement)
            if error is None:
                return
            report.note(
                f"{self.kind} KV: steps over {self.size} ranks against their prefill: {error:.0e} of the logits"
            )
        if name == "load":
            self.load()
            return
        measure = self.decode if name == "decode" else self.prefill
        for context in work.contexts:
            for batch in work.batches:
                what = f"{self.kind} B={batch} context {context}" if name == "decode" else f"{self.kind} T={context}"
                case = f"{what}, {self.size} ranks"
                report.attempt(name, case, lambda c=case, n=context, b=batch: measure(c, n, b))
                if self.engine.failure is not None:
                    return  # the others have ended

    def load(self) -> None:
        """All requests at once, greedy and sampled; floors are of this rank's bytes and products."""
        shape, options = self.work.shape, self.options
        mix, count = load.mix_of(shape, options), load.count_of(shape, options)
        model, cache = self.engine.runner.model, CacheConfig(kv_dtype=self.kind)
        bench = LoadBench(shape, model, self.report, options, cache, mix, count, self.engine)
        bench.about["ranks"] = self.size
        if len(options.kv_dtypes) > 1:
            self.report.note(f"one kind of cache at a time: {self.kind}")
        bench.rows(lambda part: part in ALL_AT_ONCE and re.search(options.only or "", part) is not None)

    def agreement(self) -> float:
        """Steps of the last tokens of a short prompt, and the whole of it at once."""
        tokens = random_tokens(self.engine.vocab, CHECKED)
        want, got = (self.engine.score(tokens, prefill=n)[-8:] for n in (None, CHECKED - 8))
        return check("a decode step over ranks", got, want, rounding(self.work.shape.config.layers))

    def decode(self, case: str, context: int, batch: int) -> None:
        """A step of requests that have all read their prompts."""
        engine, params = self.engine, SamplingParams(max_tokens=self.work.answer, ignore_eos=True)
        requests = [engine.add(random_tokens(engine.vocab, context), params) for _ in range(batch)]
        try:
            while any(len(request.tokens) == context for request in requests):
                engine.step()
            ms = statistics.median(step_times(engine))
            if problem := next((request.error for request in requests if request.finished), None):
                raise RuntimeError(f"{case}: {problem}")
            assert len(engine.scheduler.running) == batch, "a request has ended before its steps were timed"
            entries = float(sum(n.sum() for r in requests for n in engine.manager.lengths(r.key).values()))
        finally:
            if engine.failure is None:  # the next case begins with none
                for request in requests:
                    engine.abort(request)
                engine.drain()
        bench = DecodeBench(self.work.shape, engine.runner.model, self.report, CacheConfig(kv_dtype=self.kind))
        floor = bench.floor_us(engine, batch, entries) / 1e3
        row: dict[str, Any] = {"floor_ms": floor, "share": floor / ms, "tok_s": batch / ms * 1e3}
        about = {"batch": batch, "context": context, "kv_dtype": self.kind, "ranks": self.size}
        self.report.add("decode", case, ms=ms, **row, **about)

    def prefill(self, case: str, length: int, batch: int) -> None:
        """A prompt of one request, until its first token."""
        for _ in range(2):  # compiles, and captures what is asked for twice
            read(self.engine, length)
        seconds = statistics.median(read(self.engine, length).seconds for _ in range(TIMES))
        flops, ceilings = prefill_flops(self.work.shape.config, length), self.report.ceilings
        each = flops / self.size
        row: dict[str, Any] = {"s": seconds, "tok_s": length / seconds, "tflop_s": flops / seconds / 1e12}
        row |= {"share": each / seconds / 1e12 / ceilings.tflop_s, "floor_s": ceilings.floor_us(0, each) / 1e6}
        self.report.add("prefill", case, **row, tokens=length, kv_dtype=self.kind, ranks=self.size)


# ---- the others


def main() -> NoReturn:
    """The whole life of a rank that rank 0 has started."""
    told = follower.begin()
    try:
        device, work = torch.device(told["device"]), Work.of(told["name"], from_json(told["options"]))
        place = Place(Group.join(told["rank"], told["size"], device, told["meeting"], told["timeout"]))
        follow(work, place)
    except Exception as problem:
        if not isinstance(problem, GroupError):
            traceback.print_exc()
        follower.leave(told["rank"], problem, FAILED)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the watching thread is in a read


def follow(work: Work, place: Place) -> None:
    """Do what rank 0 does."""
    group, model = place.group, work.part(place.group)
    for kind in work.kinds:
        engine = work.engine(kind, model, place)
        engine.follow()
        group.settle()
        engine.drop_graphs()
        del engine
        free_memory(work.shape.device)
    if group.device.type == "cuda":
        group.part(LEAVE)
    group.close()


if __name__ == "__main__":
    main()
