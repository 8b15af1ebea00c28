"""`hybridkv bench`: how fast this machine runs what the engine does, beside its own ceilings and other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

from hybridkv.errors import HybridKVError

NAMES = "kernels, decode, prefill, eviction, capacity or all"


def bench(
    name: Annotated[str, Argument(metavar="NAME", help=NAMES)] = "all",
    model_shape: Annotated[
        str, Option("--model-shape", metavar="NAME", help="widths: 27b, 9b, 4b, 0.8b, tiny, or a known model's name")
    ] = "27b",
    layers: Annotated[int | None, Option("--layers", metavar="N", help="cut the model to its first N layers")] = None,
    device: Annotated[str, Option("--device", metavar="NAME", help="auto, cpu (tiny alone) or cuda")] = "auto",
    only: Annotated[
        str | None,
        Option(
            "--only",
            metavar="PATTERN",
            help="kernels: ops and cases; decode: budget, context, batch, weights, state, peers",
        ),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="few cases")] = False,
    kv_dtype: Annotated[
        str | None, Option("--kv-dtype", metavar="NAMES", help="of the cache, such as bf16,fp8; the bench's own list")
    ] = None,
    weight_dtype: Annotated[
        str, Option("--weight-dtype", metavar="NAME", help="of the model's matrices: auto or fp8")
    ] = "auto",
    contexts: Annotated[
        str | None, Option("--contexts", metavar="LIST", help="tokens, such as 2048,16384; the bench's own list")
    ] = None,
    batches: Annotated[str | None, Option("--batches", metavar="LIST", help="decode: requests at once")] = None,
    budget: Annotated[
        int, Option("--budget", metavar="TOKENS", help="kept a stream where something is evicted")
    ] = 2048,
    chunk: Annotated[
        str,
        Option("--chunk", metavar="LIST", help="prefill: tokens a step; more than one, such as 8192,4096: compared"),
    ] = "8192",
    memory: Annotated[str, Option("--memory", metavar="SIZE", help="capacity: for weights and cache")] = "80GiB",
    skip_peers: Annotated[bool, Option("--skip-peers", help="measure nothing but hybridkv")] = False,
    peer_layers: Annotated[
        int, Option("--peer-layers", metavar="N", help="decode: layers of the model that transformers runs")
    ] = 8,
    compiled_layers: Annotated[
        str, Option("--compiled-layers", metavar="LIST", help="decode: layers that transformers runs compiled")
    ] = "4",
    warm: Annotated[int, Option("--warm", metavar="N", help="kernels: compile first, in N processes")] = 0,
    base: Annotated[
        str | None, Option("--base", metavar="REF", help="run the same on another commit and compare; a git checkout")
    ] = None,
    trace: Annotated[
        str | None,
        Option("--trace", metavar="DIR", help="decode, prefill: write a profiler trace there, print the largest costs"),
    ] = None,
    limit: Annotated[
        float | None, Option("--limit", metavar="SECONDS", help="begin no new row of a bench after so long")
    ] = None,
    json_file: Annotated[
        str | None, Option("--json", metavar="FILE", help="also add the JSON line to this file")
    ] = None,
) -> None:
    """Measure speed and memory with random weights at a model's real widths. Needs a GPU, but for --model-shape tiny.

    Prints a table and, last, one JSON line. Results are compared with their references before they are timed; what is
    wrong is reported, not timed, and the command ends with an error.
    """
    from hybridkv.bench.options import BENCHES, BenchOptions
    from hybridkv.bench.report import finish
    from hybridkv.bench.suite import run_bench

    if name not in (*BENCHES, "all"):
        raise BadParameter(f"there is no benchmark {name!r}; choose {NAMES}")
    for path, flag in ((json_file, "--json"), (trace, "--trace")):
        if path is not None and not Path(path).expanduser().absolute().parent.is_dir():
            raise BadParameter(f"{flag}: there is no folder {str(Path(path).parent)!r}")
    options = BenchOptions(
        model_shape=model_shape, layers=layers, device=device, only=only, quick=quick,
        kv_dtypes=tuple(kv_dtype.split(",")) if kv_dtype else (), weight_dtype=weight_dtype,
        contexts=numbers("--contexts", contexts), batches=numbers("--batches", batches), budget=budget,
        chunks=numbers("--chunk", chunk), memory=memory, skip_peers=skip_peers, peer_layers=peer_layers,
        compiled_layers=numbers("--compiled-layers", compiled_layers), warm=warm, trace=trace, limit=limit,
    )  # fmt: skip
    if base is not None:
        from hybridkv.bench.compare import repository

        repository()  # refused before anything runs
    results: list[dict[str, Any]] = []
    for each in BENCHES if name == "all" else (name,):
        result = run_bench(each, options)
        if base is not None:
            result |= compared(each, options, result, base)
        results.append(result)
    finish(results[0] if len(results) == 1 else {"bench": "all", "results": results}, json_file)
    failures = [f for result in results for f in result["failures"]]
    if failures:
        raise HybridKVError(f"{len(failures)} rows failed, first {failures[0]['op']} {failures[0]['case']}")


def compared(name: str, options: Any, ours: dict[str, Any], ref: str) -> dict[str, Any]:
    from hybridkv.bench.compare import print_comparison, run_base, side_by_side

    print(f"the same at {ref} ...", flush=True)
    theirs = run_base(name, options, ref)
    rows = side_by_side(ours, theirs)
    print_comparison(rows, ref, ours["measure"], len(ours["rows"]) - len(rows))
    return {"base": ref, "comparison": rows, "base_notes": theirs["notes"]}


def numbers(flag: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.split(",")) if text else ()
    except ValueError:
        raise BadParameter(f"{flag} takes whole numbers with commas between them, not {text!r}") from None
