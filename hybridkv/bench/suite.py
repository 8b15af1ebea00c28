"""A benchmark from its name and options: the shape, this machine's ceilings, the table, the result."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hybridkv.bench import over_ranks
from hybridkv.bench.compare import print_comparison, repository, run_base, side_by_side
from hybridkv.bench.options import BENCHES, NAMES, SERVER_BENCHES, V4_BENCHES, BenchOptions, check_only, from_json
from hybridkv.bench.report import Report, finish
from hybridkv.bench.shapes import find_shape
from hybridkv.bench.timing import Ceilings, free_memory
from hybridkv.errors import HybridKVError

Result = dict[str, Any]  # what belongs in a JSON line


def run_benches(name: str, options: BenchOptions, base: str | None = None, path: str | None = None) -> list[Any]:
    """One benchmark, or "all"; prints tables and, last, one JSON line. Returns the rows that failed.

    `base`: the same on another commit, compared. `path`: a file that gets the JSON line too. One that is stopped by
    Ctrl-C prints the JSON line of what it has.
    """
    for place, flag in ((path, "--json"), (options.trace, "--trace")):
        if place is not None and not Path(place).expanduser().absolute().parent.is_dir():
            raise HybridKVError(f"{flag}: there is no folder {str(Path(place).parent)!r}")
    if base is not None:
        repository()  # refused before anything runs
    results: list[Result] = []
    Report.latest = None
    try:
        for each in BENCHES if name == "all" else (name,):
            result = run_bench(each, options)
            if base is not None:
                result |= _compared(each, options, result, base)
            results.append(result)
    except KeyboardInterrupt:
        if Report.latest is not None:
            Report.latest.note("stopped before the end")
            finish(Report.latest.result(), path)
        raise
    finish(results[0] if name != "all" else {"bench": "all", "results": results}, path)
    return [failure for result in results for failure in result["failures"]]


def run_bench(name: str, options: BenchOptions) -> Result:
    """Prints the table; what is returned belongs in a JSON line."""
    if name not in NAMES:
        raise HybridKVError(f"there is no benchmark {name!r}; choose {', '.join(NAMES)} or all")
    check_only(name, options)
    if options.tp != 1:
        over_ranks.check_options(name, options)
    if name in SERVER_BENCHES:
        options = replace(options, model_shape="tiny", device="cpu")
    shape = find_shape(options.model_shape, options.layers, options.device, name in V4_BENCHES)
    torch.manual_seed(0)
    if options.tp != 1:
        report = over_ranks.run(name, shape, options, Ceilings.measure(shape.device))
    else:
        report = import_module(f"hybridkv.bench.{name}").run(shape, options, Ceilings.measure(shape.device))
    result = report.result()
    free_memory(shape.device)
    return result


def run_json(name: str, options: str) -> None:
    """For another process: options as JSON, the result as the last line."""
    finish(run_bench(name, from_json(options)))


def _compared(name: str, options: BenchOptions, ours: Result, ref: str) -> Result:
    print(f"the same at {ref} ...", flush=True)
    theirs = run_base(name, options, ref)
    rows = side_by_side(ours, theirs)
    print_comparison(rows, ref, ours["measure"], len(ours["rows"]) - len(rows))
    return {"base": ref, "comparison": rows, "base_notes": theirs["notes"]}
