"""The scripts in bench/: the options of `hybridkv bench` by argparse, for machines where the command does not start."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from hybridkv.bench.options import BenchOptions
from hybridkv.bench.report import Report, finish
from hybridkv.bench.suite import run_bench
from hybridkv.errors import HybridKVError

FLAGS = {"kv_dtypes": "kv-dtype", "chunks": "chunk"}  # where they differ from the field


def main(name: str, what: str | None) -> None:
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(BenchOptions):
        flag = "--" + FLAGS.get(field.name, field.name).replace("_", "-")
        more: dict[str, Any] = {"action": "store_true"} if field.type == "bool" else {"type": reader(field)}
        parser.add_argument(flag, dest=field.name, default=field.default, **more)
    parser.add_argument("--json", help="also add the JSON line to this file")
    given = vars(parser.parse_args())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where we were started in the background
    path = given.pop("json")
    try:
        result = run_bench(name, BenchOptions(**given))
    except HybridKVError as problem:
        raise SystemExit(f"{name}: {problem}") from None
    except KeyboardInterrupt:
        if Report.latest is None:
            raise
        Report.latest.note("stopped before the end")
        finish(Report.latest.result(), path)
        raise SystemExit(130) from None
    finish(result, path)
    if result["failures"]:
        raise SystemExit(f"{name}: {len(result['failures'])} rows failed")


def reader(field: Field[Any]) -> Callable[[str], Any]:
    """From what the field's type is written as."""
    kind = str(field.type)
    one = int if "int" in kind else float if "float" in kind else str
    return (lambda text: tuple(one(n) for n in text.split(","))) if kind.startswith("tuple") else one
