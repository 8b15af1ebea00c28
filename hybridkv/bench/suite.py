"""One benchmark from its name and options: the shape, this machine's ceilings, the table, the result."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from hybridkv.bench.options import BENCHES, BenchOptions, from_json
from hybridkv.bench.report import finish
from hybridkv.bench.shapes import find_shape
from hybridkv.bench.timing import Ceilings, free_memory
from hybridkv.errors import HybridKVError


def run_bench(name: str, options: BenchOptions) -> dict[str, Any]:
    """Prints the table; what is returned belongs in a JSON line."""
    if name not in BENCHES:
        raise HybridKVError(f"there is no benchmark {name!r}; choose {', '.join(BENCHES)} or all")
    shape = find_shape(options.model_shape, options.layers, options.device)
    torch.manual_seed(0)
    report = import_module(f"hybridkv.bench.{name}").run(shape, options, Ceilings.measure(shape.device))
    result = report.result()
    free_memory(shape.device)
    return result


def run_json(name: str, options: str) -> None:
    """For another process: options as JSON, the result as the last line."""
    finish(run_bench(name, from_json(options)))
