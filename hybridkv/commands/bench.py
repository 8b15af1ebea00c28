"""`hybridkv bench`: how fast this machine runs what the engine does, beside its own ceilings and other libraries.

The options are those of hybridkv/bench/options.py.
"""

from __future__ import annotations

from typing import Annotated

from typer import Argument, BadParameter, Option

from hybridkv.bench.options import NAMES as BENCHES
from hybridkv.bench.options import BenchOptions
from hybridkv.commands.declaring import with_options
from hybridkv.errors import HybridKVError

NAMES = f"{', '.join(BENCHES)} or all"


@with_options
def bench(
    options: BenchOptions,
    name: Annotated[str, Argument(metavar="NAME", help=NAMES)] = "all",
    base: Annotated[
        str | None, Option("--base", metavar="REF", help="run the same on another commit and compare; a git checkout")
    ] = None,
    json_file: Annotated[
        str | None, Option("--json", metavar="FILE", help="also add the JSON line to this file")
    ] = None,
) -> None:
    """Measure speed and memory with random weights at a model's real widths. Needs a GPU, except --model-shape tiny.

    Prints a table and, last, one JSON line. Results are compared with their references before they are timed; what is
    wrong is reported, not timed, and the command ends with an error.
    """
    from hybridkv.bench.report import in_words
    from hybridkv.bench.suite import run_benches

    if name not in (*BENCHES, "all"):
        raise BadParameter(f"there is no benchmark {name!r}; choose {NAMES}")
    failures = run_benches(name, options, base, json_file)
    if failures:
        raise HybridKVError(in_words(failures))
