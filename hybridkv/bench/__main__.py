"""`python -m hybridkv.bench NAME`: the same as `hybridkv bench NAME` on machines that have no typer."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from typing import Any, NoReturn

import hybridkv.bench
from hybridkv.bench.options import NAMES, OPTIONS, BenchOptions, flag_of, is_list, kind_of, read_list
from hybridkv.bench.report import in_words
from hybridkv.bench.suite import run_benches
from hybridkv.errors import HybridKVError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m hybridkv.bench",
        description=hybridkv.bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("name", choices=(*NAMES, "all"))
    for f in OPTIONS.values():
        form: dict[str, Any] = {"type": kind_of(f), "metavar": f.metadata["metavar"]}
        if kind_of(f) is bool:
            form = {"action": "store_true"}
        elif is_list(f):
            form["type"] = str  # read later, with errors in our own words
        made.add_argument(flag_of(f), dest=f.name, default=f.default, help=f.metadata["help"], **form)
    made.add_argument("--base", metavar="REF", help="run the same on another commit and compare; a git checkout")
    made.add_argument("--json", metavar="FILE", help="also add the JSON line to this file")
    return made


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where we were started in the background
    try:
        given = vars(parser().parse_args(arguments))
        name, base, path = given.pop("name"), given.pop("base"), given.pop("json")
        given |= {name: read_list(OPTIONS[name], value) for name, value in given.items() if is_list(OPTIONS[name])}
        failures = run_benches(name, BenchOptions(**given), base, path)
    except HybridKVError as problem:
        raise SystemExit(f"hybridkv.bench: {problem}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(f"hybridkv.bench: {in_words(failures)}" if failures else 0)


if __name__ == "__main__":
    main()
