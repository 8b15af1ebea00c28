"""Compiles before anything is timed: every case of the kernel benchmark runs once, dealt to several processes.

Their kernels, and what peers tune, end in Triton's cache on disk, where the process that times finds them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from importlib import import_module

from hybridkv.bench import timing
from hybridkv.bench.options import BenchOptions

CODE = "import sys; from hybridkv.bench.warm import warm_part; warm_part(*sys.argv[1:])"
SECONDS = 60.0  # processes that take longer are ended


def warm_up(bench: str, options: BenchOptions) -> str:
    """Runs the processes and says how it went."""
    begin, given = time.monotonic(), json.dumps(asdict(replace(options, warm=0, limit=None)))
    parts = [
        subprocess.Popen([sys.executable, "-c", CODE, bench, given, f"{i}/{options.warm}"], stdout=subprocess.DEVNULL)
        for i in range(options.warm)
    ]
    late = 0
    for part in parts:
        try:
            part.wait(max(0.1, begin + SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.kill()
            part.wait()
            late += 1
    bad = sum(part.returncode != 0 for part in parts) - late
    said = f"compiled by {options.warm} processes in {time.monotonic() - begin:.0f} s"
    return said + (f"; {late} did not end, {bad} failed" if late or bad else "")


def warm_part(bench: str, given: str, share: str) -> None:
    """Every n-th case from the i-th on, `share` being "i/n". What fails here fails again where it is reported."""
    from hybridkv.bench.options import V4_BENCHES, from_json
    from hybridkv.bench.shapes import find_shape

    timing.MOST_COPIES = 1  # one input each
    options = from_json(given)
    shape = find_shape(options.model_shape, options.layers, options.device, bench in V4_BENCHES)
    i, n = map(int, share.split("/"))
    for each in import_module(f"hybridkv.bench.{bench}").listed(shape, options)[i::n]:
        try:
            case = each.build()
            calls = [(case.run, case.inputs), *({} if options.skip_peers else case.peers).values()]
        except Exception:  # the process that times reports it
            continue
        for op, inputs in calls:
            try:
                op(inputs[0])
                timing.sync(shape.device)
            except Exception:  # as above
                continue
        timing.free_memory(shape.device)
