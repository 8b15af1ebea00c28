"""A mixed step: requests that decode, and one chunk of a prompt in the same step, beside the sum of both alone.

All three are real steps of the engine: by the clock, and on the device (load_serve.py: `Watch`). How large the chunk
is is up to the scheduler; the chunk alone has as many tokens as it gave.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from hybridkv.bench.decode import timed_steps
from hybridkv.bench.load_engine import load_engine, mean_context, pool_tokens, step_tokens_of
from hybridkv.bench.load_serve import Watch, watched
from hybridkv.bench.load_workload import Mix
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.prefill import random_tokens
from hybridkv.bench.report import Report
from hybridkv.bench.shapes import Shape
from hybridkv.bench.standin import fill_state, resident
from hybridkv.bench.timing import free_memory
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError
from hybridkv.models.decoder import Model
from hybridkv.request import Request

CHUNK = 512  # tokens of the prompt
STEPS, WARM = 6, 2
ROOM = 256  # tokens that requests may decode meanwhile: none ends


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step."""

    wall: float
    device: float | None  # None: on a CPU


@dataclass(frozen=True)
class Mixed:
    decode: Times
    chunk: Times
    both: Times
    tokens: int  # of the chunk

    @property
    def of_sum(self) -> float:
        """By the clock."""
        return self.both.wall / (self.decode.wall + self.chunk.wall)

    @property
    def device_of_sum(self) -> float | None:
        if self.both.device is None or self.decode.device is None or self.chunk.device is None:
            return None
        return self.both.device / (self.decode.device + self.chunk.device)


def mixed_rows(shape: Shape, model: Model, report: Report, options: BenchOptions, cache: CacheConfig, mix: Mix) -> None:
    """Steps of `--batches` decoding requests and one chunk."""
    context, chunk = mean_context(mix), 48 if shape.tiny else CHUNK
    top = max(context, chunk) + ROOM + 16
    if chunk > step_tokens_of(shape, options):
        report.note(f"mixed steps are left out: they need --chunk {chunk} or more")
        return
    for batch in options.batches or ((3,) if shape.tiny else (16, 64, 256)):
        name = f"{cache.kv_dtype} B={batch} context {context} + {chunk}"

        def measure(batch: int = batch, name: str = name) -> None:
            try:
                engine = load_engine(shape, model, options, cache, batch + 1, top, least=batch + 1)
            except HybridKVError as problem:
                report.note(f"B={batch} does not fit: {problem}")
                return
            if (batch + 1) * top > pool_tokens(engine):
                report.note(f"B={batch} does not fit: the pools hold {pool_tokens(engine):.0f} tokens")
                return
            found = measure_mixed(engine, batch, context, chunk)
            times = found.of_sum if found.device_of_sum is None else found.device_of_sum
            report.add(
                "mixed step", name, s=found.both.wall / 1e3, ms=found.both.wall, device_ms=found.both.device,
                of_sum=times, wall_of_sum=found.of_sum, decode_ms=found.decode.wall, chunk_ms=found.chunk.wall,
                decode_device_ms=found.decode.device, chunk_device_ms=found.chunk.device, chunk_tokens=found.tokens,
                batch=batch, context=context,
            )  # fmt: skip
            device = "" if found.both.device is None else (
                f"; device {found.both.device:.2f} for {found.decode.device:.2f} + {found.chunk.device:.2f}"
            )  # fmt: skip
            report.note(
                f"B={batch}: chunk of {found.tokens} tokens; {found.both.wall:.2f} ms for {found.decode.wall:.2f} + "
                f"{found.chunk.wall:.2f}, {found.of_sum:.2f} x{device}"
            )

        report.attempt("mixed step", name, measure)
        free_memory(shape.device)


def measure_mixed(engine: Engine, batch: int, context: int, chunk: int = CHUNK) -> Mixed:
    """`batch` requests of `context` tokens decode; a prompt of `chunk` tokens comes beside them."""
    requests = [resident(engine, context, ROOM) for _ in range(batch)]
    fill_state(engine.manager)
    try:
        wall = timed_steps(engine)[0]
        _check_running(requests)
        with watched(engine) as watch:
            decode = Times(wall, _decode_on_device(engine, watch))
            tokens, both = _chunks(engine, watch, chunk, "mixed")
        _check_running(requests)
    finally:
        for request in requests:
            engine.abort(request)
    with watched(engine) as watch:
        alone, only = _chunks(engine, watch, tokens, "prompt")
    if alone != tokens:
        raise RuntimeError(f"a prompt of {tokens} tokens alone was read in steps of {alone}")
    return Mixed(decode, only, both, tokens)


def _check_running(requests: list[Request]) -> None:
    problems = [r.error or r.finish_reason for r in requests if r.finished]
    if problems:
        raise RuntimeError(f"a request that was to decode meanwhile has ended: {problems[0]}")


def _decode_on_device(engine: Engine, watch: Watch) -> float | None:
    if engine.manager.device.type != "cuda":
        return None
    found: list[float] = []
    with _one_by_one(engine, watch):
        for _ in range(WARM + STEPS):
            watch.step()
            if watch.last is not None and watch.last.kind == "decode" and watch.device_ms is not None:
                found.append(watch.device_ms)
    return statistics.median(settled(found))


def _chunks(engine: Engine, watch: Watch, tokens: int, kind: str) -> tuple[int, Times]:
    """Steps of that kind while prompts of `tokens` tokens are read: (tokens of the usual chunk, its times)."""
    walls = _read_prompts(engine, watch, tokens, kind)
    usual = usual_size([n for n, _, _ in walls])
    wall = statistics.median(settled([seconds * 1e3 for n, seconds, _ in walls if n == usual]))
    if engine.manager.device.type != "cuda":
        return usual, Times(wall, None)
    with _one_by_one(engine, watch):
        found = _read_prompts(engine, watch, tokens, kind)
    device = settled([ms for n, _, ms in found if n == usual and ms is not None])
    if not device:
        raise HybridKVError(f"no {kind} step of {usual} tokens ran again, one by one")
    return usual, Times(wall, statistics.median(device))


def usual_size(sizes: list[int]) -> int:
    """The largest chunk that came again and again: once a graph was captured and timed, steps may be cut otherwise."""
    counts = Counter(sizes)
    return max((n for n, times in counts.items() if times > WARM), default=counts.most_common(1)[0][0])


def settled(times: list[float]) -> list[float]:
    """Without the first ones, if enough are left."""
    return times[WARM:] if len(times) > 2 * WARM else times


def _read_prompts(engine: Engine, watch: Watch, tokens: int, kind: str) -> list[tuple[int, float, float | None]]:
    """(prompt tokens, seconds, milliseconds on the device) of each step of that kind."""
    found = []
    for _ in range(WARM + STEPS):
        request = engine.add(random_tokens(engine.vocab, tokens), SamplingParams(max_tokens=1, ignore_eos=True))
        while not request.finished:
            seconds, waited = watch.step()
            if watch.last is not None and watch.last.kind == kind and waited:
                found.append((watch.last.prompt_tokens, seconds, watch.device_ms))
        if request.error is not None:
            raise RuntimeError(request.error)
    if not found:
        raise HybridKVError(f"no {kind} step ran while prompts of {tokens} tokens were read")
    return found


class _one_by_one:
    """Inside, no step is launched before the one before it has been given out, and each is timed on the device."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self.engine, self.watch, self.before = engine, watch, engine.launches_ahead

    def __enter__(self) -> None:
        self.engine.drain()
        self.engine.launches_ahead, self.watch.by_device = False, True

    def __exit__(self, *_: object) -> None:
        self.engine.launches_ahead, self.watch.by_device, self.watch.device_ms = self.before, False, None
