"""Driving an engine by the clock: requests go in when their time has come, steps run one after the other, and each is
noted with what was in it. One thread, no server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from hybridkv.bench.load_samples import Sample, percentile
from hybridkv.bench.load_workload import Asked, sampling
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.pipeline import InFlightStep
from hybridkv.request import Request

KINDS = ("decode", "mixed", "prompt")
AHEAD_CYCLES = 200_000_000  # about 0.1 s: the device waits until a step's launches are queued
SHOWN_EVERY = 0.5  # seconds between two lines of progress
REHEARSAL, REHEARSED = 20.0, 32  # seconds of a warm-up for the workload itself, and tokens of its answers, at the most


@dataclass(frozen=True)
class StepSeen:
    """What was in a step: requests with one new token, those with a part of a prompt, and its tokens."""

    decoding: int
    reading: int
    prompt_tokens: int
    keys: float = 0.0  # that a token of a prompt attends to, on average
    predicted: float | None = None  # seconds, as the scheduler would have it

    @property
    def kind(self) -> str:
        return "decode" if not self.reading else "mixed" if self.decoding else "prompt"


class Watch:
    """What each step of an engine had in it. This is the one place that looks behind `Engine.step`: at the pipeline's
    step whose results are due.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last: StepSeen | None = None  # of the step that `Engine.step` has just run
        self.by_device = False  # time the launched step on the device, too
        self.device_ms: float | None = None
        self._next_step = engine.pipeline.next_step

    def step(self) -> tuple[float, bool]:
        """Run a step. Returns its seconds by the clock, and whether it gave a token: the host has waited for it."""
        self.last = None
        begin = time.perf_counter()
        updates = self.engine.step()
        return time.perf_counter() - begin, any(update.token is not None for update in updates)

    def look(self) -> InFlightStep | None:
        found = self._timed() if self.by_device else self._next_step()
        if found is not None:
            counts = found.batch.counts
            decoding = sum(n == 1 for n in counts)
            parts = [(n, first) for n, first in zip(counts, found.batch.positions) if n > 1]
            keys = sum(n * (first + n / 2) for n, first in parts) / max(sum(n for n, _ in parts), 1)
            self.last = StepSeen(
                decoding,
                len(counts) - decoding,
                sum(counts) - decoding,
                keys,
                self.engine.scheduler.predicted(found.batch),
            )
        return found

    def _timed(self) -> InFlightStep | None:
        """The device's time from the first to the last kernel of a step. It is kept busy until all are queued, so that
        the host's time between them does not count, unless it waits for the device itself.
        """
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD_CYCLES)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        found = self._next_step()
        stop.record()
        stop.synchronize()
        self.device_ms = start.elapsed_time(stop)
        return found


@contextmanager
def watched(engine: Engine) -> Iterator[Watch]:
    """Inside, every step of the engine is noted."""
    before = vars(engine.pipeline).get("next_step")  # of a watch around this one
    watch = Watch(engine)
    engine.pipeline.next_step = watch.look  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        if before is None:
            del engine.pipeline.next_step  # the class's own again
        else:
            engine.pipeline.next_step = before


@dataclass
class StepTimes:
    """Seconds of steps, by what was in them.

    A step that gives no token is not waited for: the device may still be at it when the next one is launched. Its
    seconds therefore count together with those of the next step that is waited for, and each gets an equal part.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    open_kinds: list[str] = field(default_factory=list)
    open_seconds: float = 0.0

    def add(self, kind: str, seconds: float, waited: bool) -> None:
        self.open_kinds.append(kind)
        self.open_seconds += seconds
        if waited:
            for each in self.open_kinds:
                self.seconds[each].append(self.open_seconds / len(self.open_kinds))
            self.open_kinds, self.open_seconds = [], 0.0

    def table(self) -> dict[str, dict[str, float]]:
        """Of every kind that there was: how many, seconds together, mean and p99 in milliseconds."""
        return {
            kind: {
                "steps": len(found), "s": sum(found), "ms": sum(found) / len(found) * 1e3,
                "p99_ms": percentile(found, 99) * 1e3,
            }
            for kind, found in self.seconds.items()
            if found
        }  # fmt: skip


@dataclass(frozen=True)
class Wait:
    """A step for whose end requests waited."""

    seconds: float  # by the clock, with those of steps before it that nobody waited for
    seen: StepSeen
    graphs: int  # captured meanwhile

    def __str__(self) -> str:
        graphs = f", {self.graphs} graphs captured" if self.graphs else ""
        prompts = (
            f" + {self.seen.prompt_tokens} tokens of {self.seen.reading} prompts at {self.seen.keys:.0f}"
            if self.seen.reading
            else ""
        )
        due = "" if self.seen.predicted is None else f" for {self.seen.predicted * 1e3:.1f}"
        return f"{self.seconds * 1e3:.1f} ms{due}: {self.seen.decoding} decoding{prompts}{graphs}"


@dataclass
class Served:
    """A whole run."""

    samples: list[Sample]
    requests: list[Request]
    seconds: float  # until the last token
    prompt_s: float  # until the last first token
    steps: StepTimes
    stopped: bool = False  # before the end, as time was up
    waits: list[Wait] = field(default_factory=list)  # of steps in which somebody decoded

    @property
    def answer_tokens(self) -> int:
        return sum(request.answer_tokens for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Of prompts that were read to their end."""
        return sum(r.prompt_tokens for r in self.requests if r.first_token_at is not None)

    @property
    def preemptions(self) -> int:
        return sum(request.preemptions for request in self.requests)

    def check(self) -> None:
        """Every request got what it asked for, or RuntimeError."""
        for request, sample in zip(self.requests, self.samples, strict=False):
            if request.error is not None:
                raise RuntimeError(f"a request of {sample.prompt} tokens failed: {request.error}")
            if request.answer_tokens != sample.answer:
                got = f"{request.answer_tokens} of {sample.answer} tokens ({request.finish_reason})"
                raise RuntimeError(f"a request of {sample.prompt} tokens ended with {got}")
            if request.cached_tokens and not request.preemptions:
                raise RuntimeError(f"{request.cached_tokens} of {sample.prompt} tokens were not read, but found")


def forget(engine: Engine) -> None:
    """What earlier runs of the same prompts have left, so that all of them are read."""
    if engine.manager.reuse is not None:
        engine.manager.reuse.forget()


def serve(
    engine: Engine, asked: Sequence[Asked], params: Sequence[SamplingParams], at: Sequence[float] | None = None,
    until: float | None = None, say: Callable[[str], None] = lambda _: None,
) -> Served:  # fmt: skip
    """Serve all requests; `at`: the second at which each arrives, all at once without. `until`: of time.monotonic(),
    when it stops whatever is left. Token by token times are noted where requests arrive one by one. Nothing that was
    kept before is found.
    """
    forget(engine)
    due = at if at is not None else [0.0] * len(asked)
    samples = [Sample(len(a.prompt), a.answer, t) for a, t in zip(asked, due, strict=True)]
    times, requests, index, waits = StepTimes(), [], {}, []
    stopped, shown, graphs, last = False, 0.0, _graphs(engine), 0.0
    with watched(engine) as watch:
        begin = last = time.perf_counter()
        try:
            while len(requests) < len(asked) or not engine.idle:
                now = time.perf_counter() - begin
                while len(requests) < len(asked) and due[len(requests)] <= now:
                    i = len(requests)
                    requests.append(engine.add(asked[i].prompt, params[i]))
                    index[requests[i]] = samples[i]
                if until is not None and time.monotonic() > until:
                    stopped = True
                    break
                if engine.idle:
                    time.sleep(max(0.0, min(due[len(requests)] - now, SHOWN_EVERY)))
                    continue
                if len(requests) < len(asked) and due[len(requests)] - now < (spare := engine.slack()):
                    time.sleep(max(0.0, min(due[len(requests)] - now, spare)))
                    continue
                began = time.perf_counter()
                updates = engine.step()
                now = time.perf_counter()
                waited = any(update.token is not None for update in updates)
                if watch.last is not None:
                    times.add(watch.last.kind, now - began, waited)
                    if at is not None:
                        if waited and watch.last.decoding:
                            waits.append(Wait(now - max(last, began), watch.last, _graphs(engine) - graphs))
                        if waited:
                            last, graphs = now, _graphs(engine)
                        for update in updates:
                            if update.token is not None:
                                index[update.request].times.append(now - begin)
                                index[update.request].batches.append(max(watch.last.decoding, 1))
                if now - begin > shown:
                    shown = now - begin + SHOWN_EVERY
                    done = sum(request.finished for request in requests)
                    say(f"{done} of {len(asked)} requests, {now - begin:.0f} s")
        finally:
            for request in requests:
                if not request.finished:
                    engine.abort(request)
    firsts = [r.first_token_at - begin for r in requests if r.first_token_at is not None]
    lasts = [r.last_token_at - begin for r in requests if r.last_token_at is not None]
    for request, sample in zip(requests, samples, strict=False):
        sample.started = None if request.started_at is None else request.started_at - begin
    return Served(samples, requests, max(lasts, default=0.0), max(firsts, default=0.0), times, stopped, waits)


def _graphs(engine: Engine) -> int:
    """Steps that have been captured so far."""
    mixed, decode = engine.scheduler.mixed, engine.scheduler.graphs
    return len(mixed.captured if mixed is not None else ()) + len(decode.captured if decode is not None else ())


def warm_up(engine: Engine, asked: Sequence[Asked], sampled: bool, say: Callable[[str], None]) -> float:
    """Compile and capture all that the workload runs. Returns the seconds it took.

    Requests fill all slots with short prompts and end in halves, so that every batch is met; at each, prompts of
    different lengths come in between. Then the workload's shortest, middle and longest prompts are read together, and
    last the workload itself is begun, with short answers, for some seconds: its own mixed steps.
    """
    begin = time.perf_counter()
    by_length = sorted(asked, key=lambda a: len(a.prompt))
    slots = min(engine.manager.slots, len(asked))
    levels = [slots >> i for i in range(slots.bit_length())]  # slots, half of them, ..., 1
    short = by_length[0].prompt[:64]
    lengths = sorted({min(n, len(by_length[-1].prompt)) for n in (64, 192, 512, len(by_length[-1].prompt))})
    running: list[Request] = []

    def add(prompts: Sequence[list[int]], answer: int) -> list[Request]:
        params = sampling([answer] * len(prompts), sampled, 0)
        return [engine.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    for i, level in enumerate(levels):
        say(f"warming up, {level} requests")
        for request in running[level:]:
            engine.abort(request)
        running = running[:level] or add([short] * level, 64 * len(levels))
        if i == 0:
            while any(request.first_token_at is None for request in running):
                engine.step()
        for _ in range(3):
            engine.step()
        if level < engine.manager.slots:  # a slot is free for a prompt beside them
            beside = add([by_length[-1].prompt[: lengths[i % len(lengths)]]], 2)
            while not all(request.finished for request in beside):
                engine.step()
    for request in running:
        engine.abort(request)
    few = [by_length[0], by_length[len(by_length) // 2], by_length[-1]]
    say("warming up, prompts of all lengths")
    rest = add([a.prompt for a in few], 4)
    while not engine.idle:
        engine.step()
    begun = [replace(a, answer=min(a.answer, REHEARSED)) for a in asked]
    params = sampling([a.answer for a in begun], sampled, 0)
    rehearsed = serve(engine, begun, params, until=time.monotonic() + REHEARSAL, say=say)
    for request in [*running, *rest, *rehearsed.requests]:
        if request.error is not None:
            raise RuntimeError(f"while warming up: {request.error}")
    if engine.manager.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
