"""What a prompt costs that begins with what others have read: seconds until its first token, beside the same prompt
read cold.

A text of random tokens is read once, with a checkpoint at its end. Then prompts that begin with it and go on with a few
tokens of their own are asked for, one after the other. Hits from the host: what was read is driven out of pages and
rows before each prompt, and copied back. Misses are prompts that nobody has read, alternately with reuse and without
it. Last, many sessions ask something of their own after one system prompt, whose pages are then counted. Before
anything is timed, the logits after a hit are compared with those of a cold run, and after one from the host with those
after one on the device.
"""

from __future__ import annotations

import re
import statistics

import torch
from torch import Tensor

from hybridkv.bench.options import BenchOptions
from hybridkv.bench.prefill import CHECKED
from hybridkv.bench.report import Column, Report, WrongResult, check, rounding
from hybridkv.bench.shapes import Shape, random_model
from hybridkv.bench.standin import fill_pages, make_engine
from hybridkv.bench.timing import Ceilings, Meter, free_memory
from hybridkv.cache.schema import column_tokens
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.models import cache_schema
from hybridkv.request import Request

ROWS = 8  # checkpoints
SESSIONS, SYSTEM = 1000, 8192  # that begin with one system prompt of so many tokens
MIB = 1 << 20
COPIES = 20  # of a state, that one copy's time is the mean of
COLUMNS = (
    Column("s", "seconds", 9, ".4f"),
    Column("cached", "cached", 9, ".0f"),
    Column("read", "read", 9, ".0f"),
    Column("times", "of cold", 9, ".2%"),
    Column("spread_s", "+/-", 9, ".4f"),
    Column("load_ms", "load ms", 9, ".1f"),
    Column("gb_s", "GB/s", 7, ".1f"),
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
    system, sessions = (128, 20) if shape.tiny else (min(SYSTEM, *lengths), SESSIONS)
    bench = ReuseBench(shape, options, report, kind, chunk, max(lengths) + max(news) + 8, sessions)
    error = report.attempt("reuse", "logits after a hit", bench.agreement)
    if error is None:
        return report
    report.note(f"logits after a hit and of a cold run agree to {error:.0e}")

    def wanted(part: str) -> bool:
        return re.search(options.only or "", part) is not None

    if wanted("hits"):
        report.attempt("checkpoint", "one state copied", bench.copies)
        for length in lengths:
            report.attempt("reuse", f"T={length}", lambda n=length: bench.hits(n, news, repeats))
    if wanted("host") and bench.engine.manager.host.pages:
        for length in lengths:
            report.attempt("host", f"T={length}", lambda n=length: bench.host_hits(n, news[0], repeats))
    if wanted("misses"):
        report.attempt("misses", f"T={min(lengths)}", lambda: bench.misses(min(lengths), repeats))
    if wanted("sessions"):
        report.attempt("sessions", f"{sessions} x T={system}", lambda: bench.sessions(system, sessions))
    bench.close()
    return report


class ReuseBench:
    """One model, one cache."""

    def __init__(
        self, shape: Shape, options: BenchOptions, report: Report, kind: str, chunk: int, context: int, sessions: int
    ) -> None:
        self.shape, self.report = shape, report
        model, cache = random_model(shape, options.weight_dtype), CacheConfig(kv_dtype=kind)
        self.q = column_tokens(cache_schema(shape.config, cache, shape.dtype))
        self.engine: Engine = make_engine(
            model, cache, shape.device, shape.dtype, 2, context, step_tokens=chunk, checkpoints=ROWS,
            spare=sessions * self.q,
        )  # fmt: skip
        if shape.tiny:
            self.engine.manager.host.pages = True  # also on a CPU, to see that it runs
        fill_pages(self.engine.manager)
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

    def wait(self) -> None:
        if self.shape.device == "cuda":
            torch.cuda.synchronize()

    def drive_out(self) -> float:
        """Whatever is kept leaves pages and rows, and all copies have ended; seconds that this took."""
        manager = self.engine.manager
        assert manager.reuse is not None
        checkpoints, rows = manager.reuse.checkpoints, []
        with Meter(self.shape.device) as meter:
            while (row := checkpoints.reserve()) is not None:
                rows.append(row)
                self.wait()  # only so much may be on its way to the host at once
            for table in manager.tables.values():
                many = table.allocator.free + table.allocator.reclaimable
                step = max(1, many // 128)
                for n in range(step, many + 1, step):
                    table.allocator.release(table.allocator.acquire(n))
                    self.wait()
                table.allocator.release(table.allocator.acquire(many))
        for row in rows:
            checkpoints.give_back(row)
        return meter.seconds

    def host_hits(self, length: int, new: int, repeats: int) -> None:
        """A text that has gone to the host, and prompts that begin with it."""
        manager = self.engine.manager
        reuse = manager.reuse
        assert reuse is not None
        reuse.forget()
        found: list[Tensor] = []
        base, rest = self.tokens(length), self.tokens(new)
        params = SamplingParams(
            max_tokens=1, ignore_eos=True, logits_hook=lambda _, logits: found.append(logits.clone())
        )
        _, cold = self.ask(base, marks=[(length // self.q * self.q, "client")])
        for where in ("device", "host"):
            if where == "host":
                self.drive_out()
            request = self.engine.add([*base, *rest], params, cache="read")
            while not request.finished:
                self.engine.step()
            if request.reuse.get("tier") != where:
                raise WrongResult(f"a hit on the {where} was {request.reuse}")
        error = check("logits after a hit from the host", found[1], found[0], rounding(self.shape.config.layers))
        seconds, loads, away, copied = [], [], [], 0
        for _ in range(repeats + 1):
            away.append(self.drive_out())
            up = manager.host.copied_up
            request, meter = self.ask([*base, *self.tokens(new)], cache="read")
            if request.reuse.get("tier") != "host":
                raise WrongResult(f"not from the host: {request.reuse}")
            seconds.append(meter.seconds)
            loads.append(request.reuse["load_ms"])
            copied = manager.host.copied_up - up
        median, load = statistics.median(seconds[1:]), statistics.median(loads[1:])
        self.report.add(
            "from host", f"T={length} + {new}", s=median, cached=request.cached_tokens,
            read=len(request.tokens) - 1 - request.cached_tokens, times=median / cold.seconds,
            spread_s=max(seconds[1:]) - min(seconds[1:]), load_ms=load, gb_s=copied / max(1e-9, load) / 1e6,
            tokens=length, new=new,
        )  # fmt: skip
        self.report.note(
            f"T={length}: {copied / MIB:,.0f} MiB come from the host; logits agree with those after one on the device "
            f"to {error:.0e}; one copy of 64 MiB: {manager.host.rate / 1e9:.1f} GB/s; driven out in {max(away):.2f} s"
        )

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

    def sessions(self, system: int, sessions: int) -> None:
        """Sessions with a system prompt in common, and a column of their own each: how many pages they hold."""
        manager = self.engine.manager
        reuse = manager.reuse
        assert reuse is not None
        reuse.forget()
        system = system // self.q * self.q
        base = self.tokens(system)
        _, cold = self.ask([*base, *self.tokens(self.q)], marks=[(system, "client")])
        cached, seconds = 0, 0.0
        for _ in range(sessions - 1):
            request, meter = self.ask([*base, *self.tokens(self.q)])
            cached, seconds = cached + request.cached_tokens, seconds + meter.seconds
        once = system // self.q + sessions  # columns: the prompt's, and one of each session
        held = {name: table.allocator.held for name, table in manager.tables.items()}
        want = {name: once * streams * per for name, (_, streams, per) in reuse.parts.items()}
        if reuse.columns.count != once or held != want or cached != (sessions - 1) * system:
            raise WrongResult(f"{sessions} sessions hold {held} pages, and {want} with their prompt held once")
        each = seconds / (sessions - 1)
        self.report.add(
            "sessions", f"{sessions} x (T={system} + {self.q})", s=each, cached=cached / (sessions - 1), read=self.q,
            times=each / cold.seconds, tokens=system,
        )  # fmt: skip
        mine, apart = once * reuse.column_bytes / MIB, sessions * manager.schema.kv_bytes(system + self.q) / MIB
        self.report.note(
            f"{sessions} sessions hold their system prompt of {system} tokens once: {mine:,.1f} MiB of pages, "
            f"{apart:,.1f} if each had its own"
        )

    def close(self) -> None:
        """Memory goes back."""
        del self.engine
        free_memory(self.shape.device)
