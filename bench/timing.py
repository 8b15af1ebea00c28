"""What the GPU benchmarks share: medians of CUDA-graph replays over rotating inputs, and this card's own ceilings."""

from __future__ import annotations

import datetime
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

CALLS = 20  # in one replay


def median_us(op: Callable[[Any], object], inputs: Sequence[Any], repeats: int = 20, graph: bool = True) -> float:
    """Microseconds of one call. A replay holds many, so that its own launch does not count; inputs take turns."""
    if graph:
        inputs = [*inputs] * max(1, CALLS // len(inputs))
    for each in inputs:
        op(each)
    torch.cuda.synchronize()

    def run() -> None:
        for each in inputs:
            op(each)

    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            run()
        run = recorded.replay
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20000)  # so that the launches are queued before the clock starts
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(inputs))
    return statistics.median(times)


def copy_tb_s() -> float:
    """Measured copy bandwidth, bytes read and written, in TB/s."""
    a = torch.randn(1 << 28, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / median_us(lambda _: torch.neg(a, out=b), [None], repeats=5) / 1e6


def matmul_tflop_s(n: int = 8192) -> float:
    """Measured dense bf16 product on random data, in TFLOP/s."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / median_us(lambda _: a @ b, [None], repeats=5) / 1e6


def heading() -> str:
    return (
        f"date {datetime.date.today()}   command: python {' '.join(sys.argv)}\n"
        f"GPU {torch.cuda.get_device_name()}   torch {torch.__version__}   triton {triton.__version__}   "
        f"CUDA {torch.version.cuda}   python {platform.python_version()}"
    )
