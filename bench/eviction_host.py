"""Host time of one eviction that is left to the device: what Python takes to launch it, and to finish it later.

    python bench/eviction_host.py [--streams 64] [--tokens 16384] [--budget 2048]

Launching is timed on streams of few tokens, so that what is launched takes next to no time: on a CPU the plain-torch
forms run, whose own calls count as launches do. Finishing (pages, lengths, records, positions) is timed on streams as
long as asked for. Run it with PYTHONPATH at another checkout to compare two versions. It ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

from hybridkv.bench.eviction import Configured
from hybridkv.bench.standin import fill_pages, fill_state, give_weights, make_engine, resident
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.eviction.under_way import finish
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN

HEADS = 4  # KV heads of a layer
FEW = 96  # tokens of the streams on which launching is timed


def engine_of(layers: int, tokens: int, budget: int, head_dim: int) -> Engine:
    """Full attention in every layer, entries of `head_dim` channels, evictions left to the device."""
    sizes = dict(num_hidden_layers=layers, full_attention_interval=1, head_dim=head_dim, num_attention_heads=2 * HEADS)
    known = {name: value for name, value in KNOWN["Qwen3.5-27B"].items() if name != "layer_types"}
    config = ModelConfig.from_dict(known | sizes | dict(num_key_value_heads=HEADS))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = CacheConfig(kv_dtype="bf16" if device == "cuda" else "f32", budget=budget, window=16, recent=16)
    engine = make_engine(Configured(config), cache, device, torch.float32, 1, tokens + 8)  # type: ignore[arg-type]
    assert engine.evictor is not None
    engine.evictor = engine.scheduler.evictor = replace(engine.evictor, deferred=True)
    fill_pages(engine.manager)
    fill_state(engine.manager)
    give_weights(engine)
    return engine


def measure(engine: Engine, tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a start and of a finish."""
    times: dict[str, list[float]] = {"start": [], "finish": []}
    assert engine.evictor is not None
    for _ in range(repeats):
        request = resident(engine, tokens, 1, evict=False)
        begin = time.perf_counter()
        engine.evictor.start(request, engine.manager)
        started = time.perf_counter()
        if engine.manager.device.type == "cuda":
            torch.cuda.synchronize()
        ready = time.perf_counter()
        finish(request, engine.manager)
        times["start"].append((started - begin) * 1e3)
        times["finish"].append((time.perf_counter() - ready) * 1e3)
        engine.abort(request)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--budget", type=int, default=2048)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    layers = asked.streams // HEADS
    start = measure(engine_of(layers, FEW, 48, 16), FEW, 30)["start"]
    end = measure(engine_of(layers, asked.tokens, asked.budget, 16), asked.tokens, 5)["finish"]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{asked.streams} streams on {where}: start {start:.2f} ms, finish {end:.2f} ms of the host")
    row = {"streams": asked.streams, "tokens": asked.tokens, "start_ms": start, "finish_ms": end}
    print(json.dumps({"bench": "eviction_host", "device": where, **row}))


if __name__ == "__main__":
    main()
