"""What a prompt costs that begins with what others have read: seconds until its first token, beside the same prompt
read cold.

A text of random tokens is read once, with a checkpoint at its end. Then prompts that begin with it and go on with a few
tokens of their own are asked for, one after the other. Misses are prompts that nobody has read, alternately with reuse
and without it. Before anything is timed, the logits after a hit are compared with those of a cold run.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from hybridkv.bench.options import BenchOptions
from hybridkv.bench.prefill import CHECKED
from hybridkv.bench.report import Column, Report, check, rounding
from hybridkv.bench.shapes import Shape, random_model
from hybridkv.bench.standin import fill_pages, make_engine
from hybridkv.bench.timing import Ceilings, Meter, free_memory
from hybridkv.cache.schema import column_tokens
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.request import Request

ROWS = 8  # checkpoints
COPIES = 20  # of a state, that one copy's time is the mean of
COLUMNS = (
    Column("s", "seconds", 9, ".4f"),
    Column("cached", "cached", 9, ".0f"),
    Column("read", "read", 9, ".0f"),
    Column("times", "of cold", 9, ".2%"),
    Column("spread_s", "+/-", 9, ".4f"),
)


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    kind = (options.kv_dtypes or (("bf16",) if shape.device == "cuda" else ("f32",)))[0]
    lengths = options.contexts or ((384, 192) if shape.tiny else (81920, 16384))
    repeats = 2 if shape.tiny or options.quick else 5
    news = (5, 64) if shape.tiny else (64, 512, 1024)
    chunk = (options.chunks or (64 if shape.tiny else 4096,))[0]
    about = {"model": shape.name, "layers": shape.config.layers, "chunk": chunk, "kv": kind}
    report = Report("reuse", "s", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    report.doing("making weights")
    bench = ReuseBench(shape, options, report, kind, chunk, max(lengths) + max(news) + 8)
    error = report.attempt("reuse", "logits after a hit", bench.agreement)
    if error is None:
        return report
    report.note(f"logits after a hit and of a cold run agree to {error:.0e}")
    report.attempt("checkpoint", "one state copied", bench.copies)
    for length in lengths:
        report.attempt("reuse", f"T={length}", lambda n=length: bench.hits(n, news, repeats))
    report.attempt("misses", f"T={min(lengths)}", lambda: bench.misses(min(lengths), repeats))
    bench.close()
    return report


class ReuseBench:
    """One model, one cache."""

    def __init__(
        self, shape: Shape, options: BenchOptions, report: Report, kind: str, chunk: int, context: int
    ) -> None:
        self.shape, self.report = shape, report
        model, cache = random_model(shape, options.weight_dtype), CacheConfig(kv_dtype=kind)
        self.engine: Engine = make_engine(
            model, cache, shape.device, shape.dtype, 2, context, step_tokens=chunk, checkpoints=ROWS
        )
        fill_pages(self.engine.manager)
        self.q = column_tokens(self.engine.manager.schema)
        self.seeds = 0

    def tokens(self, count: int) -> list[int]:
        """Others every time."""
        self.seeds += 1
        generator = torch.Generator().manual_seed(self.seeds)
        return torch.randint(0, self.engine.vocab, (count,), generator=generator).tolist()

    def ask(self, tokens: list[int], **how: object) -> tuple[Request, Meter]:
        """Until the first token is there."""
        with Meter(self.shape.device) as meter:
            request = self.engine.add(tokens, SamplingParams(max_tokens=1, ignore_eos=True), **how)  # type: ignore[arg-type]
            while not request.finished:
                self.engine.step()
        if request.error is not None:
            raise RuntimeError(request.error)
        return request, meter

    def agreement(self) -> float:
        """How far the logits after a hit are from those of a cold run."""
        found: list[Tensor] = []
        params = SamplingParams(max_tokens=1, logits_hook=lambda _, logits: found.append(logits.clone()))
        base = self.tokens(CHECKED)
        shared = CHECKED // self.q * self.q
        self.ask(base, marks=[(shared, "client")])
        for cache in (True, False):
            request = self.engine.add([*base[:shared], *base[: CHECKED - shared]], params, cache=cache)
            while not request.finished:
                self.engine.step()
            assert request.cached_tokens == (shared if cache else 0), request.reuse
        return check("logits after a hit", found[0], found[1], rounding(self.shape.config.layers))

    def copies(self) -> None:
        """One state from row to row."""
        state, slots = self.engine.manager.state, self.engine.manager.slots
        state.copy(slots, slots + 1)
        with Meter(self.shape.device) as meter:
            for _ in range(COPIES):
                state.copy(slots, slots + 1)
        self.report.add("checkpoint", "one state copied", s=meter.seconds / COPIES)

    def hits(self, length: int, news: tuple[int, ...], repeats: int) -> None:
        """A text read cold, and prompts that begin with it."""
        base = self.tokens(length)
        self.ask(self.tokens(min(length, 2 * self.engine.scheduler.step_tokens)), cache=False)  # compiles
        _, cold = self.ask(base, marks=[(length, "client")])
        self.report.add("cold", f"T={length}", s=cold.seconds, cached=0, read=length, tokens=length)
        for new in news:
            seconds = []
            for _ in range(repeats + 2):  # the first ones compile, and capture a graph
                request, meter = self.ask([*base, *self.tokens(new)])
                seconds.append(meter.seconds)
            median = statistics.median(seconds[2:])
            self.report.add(
                "hit", f"T={length} + {new}", s=median, cached=request.cached_tokens,
                read=len(request.tokens) - 1 - request.cached_tokens, times=median / cold.seconds,
                spread_s=max(seconds[2:]) - min(seconds[2:]), tokens=length, new=new,
            )  # fmt: skip

    def misses(self, length: int, repeats: int) -> None:
        """Prompts that nobody has read, with reuse and without, in turn."""
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats + 1):
            for cache in (True, False):
                seconds[cache].append(self.ask(self.tokens(length), cache=cache)[1].seconds)
        off = min(seconds[False][1:])
        for cache, found in seconds.items():
            spread = max(found[1:]) - min(found[1:])
            name = f"T={length} {'with' if cache else 'without'} reuse"
            self.report.add("miss", name, s=min(found[1:]), times=min(found[1:]) / off, spread_s=spread, read=length)

    def close(self) -> None:
        """Memory goes back."""
        del self.engine
        free_memory(self.shape.device)
