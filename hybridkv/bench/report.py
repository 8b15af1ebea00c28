"""Report: a table that grows line by line, one JSON line at its end, and the check that stands before every time."""

from __future__ import annotations

import datetime
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hybridkv.bench.timing import Ceilings
from hybridkv.errors import HybridKVError

T = TypeVar("T")


class WrongResult(HybridKVError):
    """An op that is to be timed does not compute what its reference does."""


def relative_rms(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def check(what: str, got: Tensor, want: Tensor, bound: float) -> float:
    """Relative RMS between a result and the reference's, or WrongResult. Bound 0: bit for bit."""
    if bound == 0:
        error = 0.0 if torch.equal(got, want) else float("inf")
    else:
        error = relative_rms(got, want)
    if not error <= bound:  # NaN fails too
        raise WrongResult(f"{what}: differs from the reference by {error:.1e} of its size, more than {bound:.0e}")
    return error


def rounding(layers: int) -> float:
    """Bound for logits of one model by two ways, whose sums run in another order: bf16 roundings add up as the square
    root of the layers does (seen on an H200: 0.03 at 8 layers, 0.1 at 64). A wrong step gives logits of its own, 1.4.
    """
    return 0.025 * layers**0.5


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    width: int = 10
    form: str = ".1f"  # "%": a share; "each": a dict of times

    def show(self, row: dict[str, Any]) -> str:
        value = row.get(self.key)
        if self.form == "each":
            return "  " + ", ".join(f"{name} {t:.1f}" for name, t in (value or {}).items())
        if value is None:
            return f"{'-':>{self.width}}"
        return f"{value:>{self.width}{'.0%' if self.form == '%' else self.form}}"


@dataclass
class Report:
    bench: str
    measure: str  # the key of a row that comparisons look at: us | ms | s | requests
    columns: Sequence[Column]
    device: str
    ceilings: Ceilings
    about: dict[str, Any] = field(default_factory=dict)  # model, layers, dtypes
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)  # rows that were wrong or broke: not timed
    deadline: float | None = None  # of time.monotonic(); rows after it are left out
    left_out: int = 0
    latest: ClassVar[Report | None] = None  # what a run that is stopped has measured

    def start(self) -> None:
        Report.latest = self
        print(heading(self.device))
        print(f"{self.bench}: " + ", ".join(f"{k} {v}" for k, v in self.about.items()))
        c = self.ceilings
        print(f"ceilings of this run: copy {c.tb_s:.3g} TB/s (read + write), matmul {c.tflop_s:.4g} TFLOP/s")
        if self.device == "cpu":
            print("on a CPU: no CUDA graphs, plain calls; only good to see that it runs")
        titles = "".join(f" {c.title:>{c.width}}" for c in self.columns)
        print(f"{'op':22} {'case':42}{titles}", flush=True)

    def add(self, op: str, case: str, **found: Any) -> None:
        row = {"op": op, "case": case, **found}
        self.rows.append(row)
        self.doing("")
        cells = "".join(f" {c.show(row)}" for c in self.columns)
        print(f"{op:22} {case:42}{cells}", flush=True)

    def attempt(self, op: str, case: str, run: Callable[[], T]) -> T | None:
        """What `run` gives; None if it fails, which is reported, or if time is up. The next row goes on."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.left_out += 1
            self.note("time is up: the rest is left out")
            return None
        self.doing(f"{op} {case}")
        try:
            return run()
        except Exception as problem:
            said = f"{type(problem).__name__}: {' '.join(str(problem).split())[:160]}"
            self.failures.append({"op": op, "case": case, "problem": said})
            self.doing("")
            print(f"{op:22} {case:42} FAILED {said}", flush=True)
            return None

    def note(self, text: str) -> None:
        """Something that was left out, and why; once each."""
        if text not in self.notes:
            self.notes.append(text)
            self.doing("")
            print(f"  note: {text}", flush=True)

    def doing(self, text: str) -> None:
        """What is under way, on a terminal alone."""
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)

    def result(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "date": str(datetime.date.today()),
            "device": device_name(self.device),
            "versions": versions(),
            "measure": self.measure,
            **self.about,
            "ceilings": asdict(self.ceilings),
            "notes": self.notes,
            "failures": self.failures,
            "left_out": self.left_out,
            "rows": self.rows,
        }


def in_words(failures: Sequence[Mapping[str, str]]) -> str:
    """How many rows failed, and what the first one said."""
    first = failures[0]
    return f"{len(failures)} rows failed, first {first['op']} {first['case']}: {first['problem']}"


def finish(result: dict[str, Any], path: str | None = None) -> None:
    """The JSON line, last on standard output; also added to a file if one is named."""
    line = json.dumps(rounded(result))
    if path is not None:
        with Path(path).expanduser().open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    print(line, flush=True)


def rounded(value: Any) -> Any:
    """Five digits are more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU {platform.machine()}"


def versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "transformers", "fla-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def heading(device: str = "cuda") -> str:
    found = ", ".join(f"{k} {v}" for k, v in versions().items() if v)
    return f"date {datetime.date.today()}   {device_name(device)}   {found}"
