"""Where the time of a decode step and of a prompt chunk goes: a Chrome trace and the ten largest costs.

Open the .json.gz files with https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hybridkv.bench.timing import sync

MOST = 10


def trace(run: Callable[[], object], folder: str, name: str, device: str, times: int = 1) -> list[tuple[str, float]]:
    """Run under the profiler, write the trace, print and return (kernel group, ms of one run), largest first."""
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    on = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    sync(device)
    with warnings.catch_warnings(), profile(activities=on) as found:
        warnings.simplefilter("ignore")
        for _ in range(times):
            run()
        sync(device)
    target = path / f"{name}.json.gz"
    found.export_chrome_trace(str(target))
    costs = grouped(found.key_averages(), device)
    whole = sum(costs.values())
    print(f"{name}: the largest costs of {whole / times:.2f} ms on the {device}; all of them in {target}")
    top = sorted(costs.items(), key=lambda item: -item[1])
    for group, ms in top[:MOST]:
        print(f"  {group:60} {ms / times:9.3f} ms {ms / max(whole, 1e-9):6.1%}")
    return [(group, ms / times) for group, ms in top]


def grouped(events: Any, device: str) -> dict[str, float]:
    """Milliseconds of each group of kernels (on a CPU: of operators), by a short name."""
    costs: dict[str, float] = {}
    for event in events:
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device != (device == "cuda"):
            continue
        us = event.self_device_time_total if on_device else event.self_cpu_time_total
        costs[short(event.key)] = costs.get(short(event.key), 0.0) + us / 1e3
    return costs


def short(name: str) -> str:
    """A kernel's name without return type, arguments and template parameters; cuBLAS's products go together."""
    if re.search(r"gemm|cutlass|nvjet|gemv|xmma", name, re.IGNORECASE):
        return "matrix products (cuBLAS)"
    name = re.sub(r"^(?:void|static)\s+", "", name)
    name = re.split(r"[<(]", name, maxsplit=1)[0]
    return name.rsplit("::", 1)[-1][:60] or "other"


def trace_decode(bench: Any, folder: str, context: int) -> None:
    """`bench`: a DecodeBench."""
    from hybridkv.bench.standin import fill_state, resident

    engine = bench.engine(1, context + 16)
    request = resident(engine, context, 12)
    fill_state(engine.manager)
    for _ in range(3):
        engine.step()
    trace(engine.step, folder, "decode_step", bench.shape.device, times=4)
    engine.abort(request)


def trace_prefill(engine: Any, folder: str, length: int, device: str) -> None:
    """The last chunk of a prompt."""
    from hybridkv.bench.prefill import random_tokens
    from hybridkv.config import SamplingParams

    request = engine.add(random_tokens(engine.vocab, length), SamplingParams(max_tokens=1, ignore_eos=True))
    while request.prompt_tokens - _position(engine, request) > engine.scheduler.step_tokens:
        engine.step()
    trace(engine.step, folder, "prefill_chunk", device)
    if not request.finished:
        engine.abort(request)


def _position(engine: Any, request: Any) -> int:
    return engine.manager.position(request.key) if request.key in engine.manager.slot_of else 0
