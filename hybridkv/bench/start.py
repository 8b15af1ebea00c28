"""From nothing to tokens: how long a fresh process takes until an engine has given its first ones.

    first short    the first token of a short prompt
    second         its second one: a decode step has been captured
    first long     the first token of a long prompt
    full batch     the second tokens of as many short prompts as there are slots: a full decode step

Each way is a process of its own, with its own folder of kernels:

    cold, together     nothing is compiled; common steps are gone through first, on several threads (precompile.py)
    warm               all kernels are on disk
    cold, in turn      nothing is compiled; each kernel is when it is first launched

"At" is by the clock, from the start of the process. Below each: where the time went. Seconds of kernels are the sum
over threads. Weights are random numbers made on the device, the same in every process, so reading files is not in it;
where a way gives other tokens than the first one, that is noted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybridkv.bench.options import BenchOptions, from_json
from hybridkv.bench.report import Column, Report
from hybridkv.bench.shapes import Shape, find_shape, random_model
from hybridkv.bench.timing import Ceilings
from hybridkv.errors import HybridKVError
from hybridkv.kernels.compiling import Compiles, counted

COLUMNS = (
    Column("at", "at s", 8, ".2f"),
    Column("s", "seconds", 8, ".2f"),
    Column("compiled", "compiled", 8, ".0f"),
    Column("compile_s", "sum s", 8, ".2f"),
    Column("found", "found", 6, ".0f"),
    Column("found_s", "sum s", 8, ".2f"),
    Column("graphs", "graphs", 6, ".0f"),
    Column("capture_s", "capt. s", 8, ".2f"),
    Column("replay_s", "timed s", 8, ".2f"),
)
TOGETHER, WARM, IN_TURN = WAYS = ("cold, together", "warm", "cold, in turn")
CODE = "import sys; from hybridkv.bench.start import child; child(*sys.argv[1:])"
SECONDS = 240.0  # a process that takes longer is ended
SLOTS, SHORT, LONG = 32, 40, 4000


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    about = {"model": shape.name, "layers": shape.config.layers, "weights": options.weight_dtype}
    about |= {"slots": slots_of(shape, options), "long": long_of(shape), "budget": options.budget}
    report = Report("start", "s", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    given = json.dumps(asdict(replace(options, limit=None, device=shape.device)))
    told: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="hybridkv-kernels-") as folder:
        for way in (way for way in WAYS if re.search(options.only or "", way)):
            own = f"{folder}/{0 if way == IN_TURN else 1}"
            if way == WARM and not os.path.isdir(own):  # made by the way before, or by one that is not shown
                report.attempt("start", "to have kernels", lambda own=own: measured(given, TOGETHER, own))
            stages = report.attempt("start", way, lambda way=way, own=own: measured(given, way, own))
            for stage in stages or ():
                report.add(way, **stage)
                if stage["tokens"] != told.setdefault(stage["case"], stage["tokens"]):
                    report.note(f"{way}: {stage['case']} gave other tokens than the first way")
            slowest = max((stage["slowest"] for stage in stages or ()), key=lambda found: found[:1], default=None)
            if slowest:
                report.note(f"{way}: slowest to compile: {', '.join(f'{name} {s:.1f} s' for s, name in slowest)}")
    return report


def slots_of(shape: Shape, options: BenchOptions) -> int:
    return options.slots or (4 if shape.tiny else SLOTS)


def long_of(shape: Shape) -> int:
    return 200 if shape.tiny else LONG


def measured(given: str, way: str, folder: str) -> list[dict[str, Any]]:
    """The stages of a fresh process, or HybridKVError."""
    environment = os.environ | {"TRITON_CACHE_DIR": folder}
    command = [sys.executable, "-c", CODE, given, way, repr(time.time())]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise HybridKVError(f"the process was not done after {SECONDS:.0f} s") from None
    if ended.returncode:
        raise HybridKVError(f"the process ended with {ended.returncode}: {ended.stderr.strip()[-300:]}")
    return json.loads(ended.stdout.splitlines()[-1])


# ---- in the process that is measured


@dataclass
class Captures:
    """Graphs that were captured, what that took, and how much of it were the replays that are timed."""

    graphs: int = 0
    capture_s: float = 0.0
    replay_s: float = 0.0

    def captured(self, seconds: float) -> None:
        self.graphs += 1
        self.capture_s += seconds

    def replayed(self, seconds: float) -> None:
        self.replay_s += seconds


class Stages:
    """What happened between two marks, as rows of the table."""

    def __init__(self, begin: float) -> None:
        self.begin = self.last = begin
        self.rows: list[dict[str, Any]] = []

    def mark(
        self, case: str, kernels: Compiles | None = None, captures: Captures | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """All since the last mark was for this, which gave these tokens."""
        now = time.time()
        row = {"case": case, "at": now - self.begin, "s": now - self.last, "slowest": [], "tokens": list(tokens)}
        if kernels is not None:
            row |= {"compiled": kernels.compiled, "compile_s": kernels.seconds}
            row |= {"found": kernels.found, "found_s": kernels.found_seconds}
            row["slowest"] = sorted(kernels.slowest)[:-4:-1]
        if captures is not None:
            row |= asdict(captures)
        self.rows.append(row)
        self.last = now


def child(given: str, way: str, begin: str) -> None:
    """Prints the stages as JSON. `begin`: when the process was started, by the clock that all processes share."""
    stages = Stages(float(begin))
    import torch

    from hybridkv.bench.standin import make_engine
    from hybridkv.config import CacheConfig, SamplingParams
    from hybridkv.engine.precompile import go_through

    stages.mark("import")
    options = from_json(given)
    shape = find_shape(options.model_shape, options.layers, options.device)
    if shape.device == "cuda":
        torch.zeros(1, device="cuda")
    stages.mark("device")
    torch.manual_seed(0)
    with counted() as kernels:
        model = random_model(shape, options.weight_dtype)
        synchronize(shape)
    stages.mark("weights", kernels)
    kind = (options.kv_dtypes or (("bf16",) if shape.device == "cuda" else ("f32",)))[0]
    slots, long = slots_of(shape, options), long_of(shape)
    with counted() as kernels:
        engine = make_engine(
            model, CacheConfig(kv_dtype=kind, budget=options.budget), shape.device, shape.dtype, slots, long + 256,
            step_tokens=options.chunks[0] if options.chunks else 2048,
        )  # fmt: skip
        synchronize(shape)
    stages.mark("engine", kernels)
    if way == TOGETHER and shape.device == "cuda":
        with counted() as kernels:
            go_through(engine)
        stages.mark("compile", kernels)

    def until(prompts: list[int], tokens: int) -> list[int]:
        asked = [engine.add([7] * n, SamplingParams(max_tokens=tokens, temperature=0)) for n in prompts]
        while not all(request.finished for request in asked):
            engine.step()
        problems = [request.error for request in asked if request.error is not None]
        if problems:
            raise RuntimeError(problems[0])
        return [token for request in asked for token in request.generated]

    for case, prompts, tokens in (
        ("first short", [SHORT], 1), ("second", [SHORT], 2), ("first long", [long], 1),
        ("full batch", [SHORT] * slots, 2),
    ):  # fmt: skip
        with counted() as kernels, watched_captures() as captures:
            told = until(prompts, tokens)
            synchronize(shape)
        stages.mark(case, kernels, captures, told)
    print(json.dumps(stages.rows))


def synchronize(shape: Shape) -> None:
    import torch

    if shape.device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def watched_captures() -> Iterator[Captures]:
    """Inside, captures of graphs are timed."""
    from hybridkv.engine.graphs import DecodeGraphs
    from hybridkv.engine.mixed_graphs import MixedGraphs
    from hybridkv.engine.step_cost import StepCost

    found = Captures()
    with ExitStack() as stack:
        for kind, name, note in (
            (DecodeGraphs, "_capture", found.captured),
            (MixedGraphs, "_capture", found.captured),
            (StepCost, "measure", found.replayed),
        ):
            stack.callback(setattr, kind, name, getattr(kind, name))
            setattr(kind, name, _timed(getattr(kind, name), note))
        yield found


def _timed(call: Callable[..., Any], note: Callable[[float], None]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args)
        finally:
            note(time.perf_counter() - begin)

    return run
