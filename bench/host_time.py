"""Host time of a decode step: whole `Engine.step` calls of a model so small that the device waits for the host.

    python bench/host_time.py [--steps 300]

Run it with PYTHONPATH at another checkout to compare two versions. Prints a table and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from hybridkv.bench.shapes import find_shape
from hybridkv.bench.standin import fill_pages, fill_state, make_engine, resident
from hybridkv.config import CacheConfig
from hybridkv.models.random_weights import random_decoder

CONTEXT = 256


def measure(batch: int, budget: int | None, steps: int) -> float:
    """Milliseconds of a step of `batch` requests: the 10th percentile, as others may use the host's cores."""
    shape = find_shape("tiny", None, "auto")
    model = random_decoder(shape.config, shape.device, shape.dtype)
    cache = CacheConfig(kv_dtype="auto", budget=budget, recent=16, window=16)
    context = CONTEXT + 4 * steps
    engine = make_engine(model, cache, shape.device, shape.dtype, batch, context)
    fill_pages(engine.manager)
    fill_state(engine.manager)
    for _ in range(batch):
        resident(engine, CONTEXT, 3 * steps)
    for _ in range(steps // 4):  # compiles and captures
        engine.step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.quantiles(times, n=10)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"decode steps of a tiny model on {where}\n{'requests':>9} {'budget':>7} {'ms a step':>10}")
    rows = []
    for batch in (1, 16, 64, 256):
        for budget in (None, 64):
            ms = measure(batch, budget, steps)
            rows.append({"requests": batch, "budget": budget, "ms": ms})
            print(f"{batch:>9} {budget or 'all':>7} {ms:>10.3f}", flush=True)
    print(json.dumps({"bench": "host_time", "device": where, "rows": rows}))


if __name__ == "__main__":
    main()
