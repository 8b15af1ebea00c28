"""Host time of one eviction that is left to the device: what Python takes to launch it, and to finish it later.

    python bench/eviction_host.py [--streams 64] [--tokens 16384] [--budget 2048]

Launching is timed on streams of few tokens. On a CPU the kernels are left out, since their plain-torch forms take most
of the time: what is left is Python around them, and the torch ops between them. Finishing (pages, lengths, records,
positions) is timed on streams as long as asked for. Run it with PYTHONPATH at the checkout to be measured. It ends in
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor

from hybridkv.bench.eviction import Configured
from hybridkv.bench.standin import fill_pages, fill_state, give_weights, make_engine, resident
from hybridkv.cache import compacting
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.eviction import keep, policies
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


def leave_out_kernels() -> None:
    """From here on kernels return tensors of the right shapes, and nothing is computed or moved."""

    def front(pools: object, table: Tensor, entries: Tensor, counts: Tensor, flags: Tensor, report: Tensor) -> None:
        report.zero_()
        report[: len(counts)] = 1

    def shared(rows: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return torch.zeros(rows.shape, dtype=torch.int32), torch.ones(len(rows), dtype=torch.int64)

    policies.peak_scores = lambda q, when, pool, table, at, *_: torch.empty(at.shape)
    policies.pool_peaks = policies.standings = lambda scores, *_: torch.empty_like(scores)
    policies.key_differences = policies.value_norms = lambda pool, table, lengths, L: torch.empty(len(table), L)
    policies.raise_strongest = keep.raise_kept = lambda *_: None
    policies.mix_peaks = lambda peaks, *_: torch.zeros_like(peaks)
    keep.select_shared, compacting.to_front = shared, front


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
    end = measure(engine_of(layers, asked.tokens, asked.budget, 16), asked.tokens, 5)["finish"]
    if not torch.cuda.is_available():
        leave_out_kernels()
    start = measure(engine_of(layers, FEW, 48, 16), FEW, 50)["start"]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{asked.streams} streams on {where}: start {start:.2f} ms, finish {end:.2f} ms of the host")
    row = {"streams": asked.streams, "tokens": asked.tokens, "start_ms": start, "finish_ms": end}
    print(json.dumps({"bench": "eviction_host", "device": where, **row}))


if __name__ == "__main__":
    main()
