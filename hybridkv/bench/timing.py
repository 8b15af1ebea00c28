"""What the benchmarks share: medians of CUDA-graph replays over rotating inputs, and this machine's own ceilings.

On a CPU there are no graphs: a median of plain calls.
"""

from __future__ import annotations

import gc
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

CALLS = 20  # in one replay
ROTATE = 200_000_000  # bytes that the inputs of one replay hold together at least: several times an L2 cache
MOST_COPIES: int = 64
GIB = 1 << 30


def copies(nbytes: float, device: str = "cuda") -> int:
    """How many inputs of this size must alternate so that none is still in the cache when it is used again."""
    return 1 if device == "cpu" else int(min(max(1, -(-ROTATE // max(nbytes, 1))), MOST_COPIES))


def median_us(
    op: Callable[[Any], object],
    inputs: Sequence[Any],
    repeats: int = 20,
    graph: bool = True,
    device: str = "cuda",
    enough_s: float = 0.15,  # after 3 repeats, stop once this many seconds were spent
) -> float:
    """Microseconds of one call. A replay holds many, so that its own launch does not count; inputs alternate."""
    if device == "cpu":
        return _median_cpu(op, inputs, min(repeats, 5))
    for each in inputs:
        op(each)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    op(inputs[0])
    torch.cuda.synchronize()
    if graph:  # many short calls, few long ones
        calls = max(1, min(CALLS, int(0.02 / max(time.perf_counter() - begin, 1e-6))))
        inputs = [*inputs] * max(1, calls // len(inputs))

    def run() -> None:
        for each in inputs:
            op(each)

    recorded = None
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            run()
        recorded.replay()
        torch.cuda.synchronize()
        run = recorded.replay
    times, begin = [], time.perf_counter()
    for i in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20000)  # so that the launches are queued before the clock starts
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(inputs))
        if i >= 2 and time.perf_counter() - begin > enough_s:
            break
    return statistics.median(times)


def _median_cpu(op: Callable[[Any], object], inputs: Sequence[Any], repeats: int) -> float:
    op(inputs[0])
    times = []
    for i in range(repeats):
        begin = time.perf_counter()
        op(inputs[i % len(inputs)])
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TimeoutError if what is inside takes longer. In the main thread alone."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Nothing of a case is left on the GPU when the next begins."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches in the simplest programs there are, measured in the same run."""

    tb_s: float  # copy, bytes read and written
    tflop_s: float  # dense product, bf16 (f32 on a CPU)

    @staticmethod
    def measure(device: str = "cuda") -> Ceilings:
        return Ceilings(copy_tb_s(device), matmul_tflop_s(8192 if device == "cuda" else 256, device))

    def floor_us(self, nbytes: float, flops: float) -> float:
        """The shortest time in which the bytes can move and the operations can be done."""
        return max(nbytes / self.tb_s, flops / self.tflop_s) / 1e6


def copy_tb_s(device: str = "cuda") -> float:
    """Measured copy bandwidth, bytes read and written, in TB/s."""
    a = torch.randn(1 << (28 if device == "cuda" else 22), device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / median_us(lambda _: torch.neg(a, out=b), [None], repeats=5, device=device) / 1e6


def matmul_tflop_s(n: int = 8192, device: str = "cuda") -> float:
    """Measured dense product on random data, in TFLOP/s."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / median_us(lambda _: a @ b, [None], repeats=5, device=device) / 1e6


class Meter:
    """Seconds, and peak bytes beyond what was there before."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.peak = device, 0.0, 0.0

    def __enter__(self) -> Meter:
        gc.collect()  # freed blocks stay with torch: taking them from the driver again is not what is measured
        sync(self.device)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        self.begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        sync(self.device)
        self.seconds = time.perf_counter() - self.begin
        if self.device == "cuda":
            self.peak = (torch.cuda.max_memory_allocated() - self.before) / GIB
