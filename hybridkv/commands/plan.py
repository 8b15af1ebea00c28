"""`hybridkv plan`: what a model and a context cost in memory, before anything is downloaded or loaded.

Every number comes from the cache schema that the model itself runs with, and from its own loading code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hybridkv.commands.options import ModelOptions, with_options
from hybridkv.errors import HybridKVError, ModelFileError

if TYPE_CHECKING:
    from rich.table import Table

    from hybridkv.planner import CachePlan

EMBEDDED = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Choice:
    """One KV dtype, and what fits with it. The last three are None when no memory was named."""

    kv_dtype: str
    plan: CachePlan
    total: int
    fits: bool | None = None
    longest_context: int | None = None  # for the requests asked for
    most_requests: int | None = None  # of the context asked for


@dataclass(frozen=True)
class Report:
    model: str
    requests: int
    context: int
    dtype: str
    layers: int
    weights: int
    memory: int | None
    choices: list[Choice]


@with_options
def plan(
    model: ModelOptions,
    requests: Annotated[int | None, Option("--requests", metavar="N", help="the same as --max-requests; 1")] = None,
    as_json: Annotated[bool, Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show the bytes of weights, KV cache and state for a model and a context.

    --model takes a folder with a config.json (weights are not needed), a .gguf file, or the name of a known model
    such as Qwen3.5-27B. Without --kv-dtype both are shown.
    """
    from rich.console import Console

    report = make_report(model, next((n for n in (requests, model.max_requests) if n is not None), 1))
    if as_json:
        print(json.dumps(as_dict(report)))
        return
    console = Console(highlight=False)
    console.print(table(report))
    if report.memory is not None:
        console.print("What a step needs to compute comes on top; leave a few hundred MiB.", style="dim")


def make_report(options: ModelOptions, requests: int) -> Report:
    from hybridkv.config import KV_DTYPES, CacheConfig, EngineConfig
    from hybridkv.llm import resolve_device, resolve_dtype
    from hybridkv.models import cache_schema
    from hybridkv.models.config import ModelConfig
    from hybridkv.planner import longest_context, model_bytes, most_requests, plan_cache, planned_tensors

    limits = EngineConfig(requests, options.context, options.memory)
    cache = CacheConfig(kv_dtype=options.kv_dtype)
    device = resolve_device(options.device)
    name, raw = read_config(options.model)
    config = ModelConfig.from_dict(raw)
    dtype = resolve_dtype(options.dtype, device, raw)
    weights = model_bytes(config, planned_tensors(config, raw), dtype, device.type)
    context = limits.max_context or config.max_positions
    if context > config.max_positions:
        raise HybridKVError(f"max_context {context} exceeds the model's own limit of {config.max_positions} tokens")
    choices = []
    for kv_dtype in KV_DTYPES if cache.kv_dtype == "auto" else (cache.kv_dtype,):
        schema = cache_schema(config, replace(cache, kv_dtype=kv_dtype), dtype)
        pools = plan_cache(schema, requests, context, None)
        choice = Choice(kv_dtype, pools, weights + pools.nbytes)
        if limits.memory_bytes is not None:
            room = limits.memory_bytes - weights
            longest = longest_context(schema, room, requests, config.max_positions)
            most = most_requests(schema, room, context)
            choice = replace(choice, fits=pools.nbytes <= room, longest_context=longest, most_requests=most)
        choices.append(choice)
    short = str(dtype).removeprefix("torch.")
    return Report(name, requests, context, short, config.layers, weights, limits.memory_bytes, choices)


def read_config(model: str | None) -> tuple[str, dict[str, Any]]:
    """(name, config) of a model that may not be there yet. Never reaches for the network."""
    from hybridkv.models.files import read_json
    from hybridkv.models.known import KNOWN, known_config
    from hybridkv.models.weights import open_checkpoint

    if model is None:
        return EMBEDDED, KNOWN[EMBEDDED]
    path = Path(model).expanduser()
    if path.is_dir() and (path / "config.json").exists():
        return path.resolve().name, read_json(path / "config.json")
    if path.suffix == ".json" and path.exists():
        return path.resolve().parent.name, read_json(path)
    if path.exists():
        with open_checkpoint(path) as checkpoint:
            return path.stem, checkpoint.config
    found = known_config(model)
    if found is None:
        raise ModelFileError(
            f"there is no model at {model!r}; give a folder with a config.json, a .gguf file, or one of "
            f"{', '.join(KNOWN)}"
        )
    return found


def table(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    from hybridkv.planner import human

    many = f", {report.requests} requests" if report.requests > 1 else ""
    out = Table(
        title=f"{report.model}, {report.context} tokens{many}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("", "layers", "streams", "entries", "pages"):
        out.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
    for choice in report.choices:
        out.add_column(f"KV {choice.kv_dtype}", justify="right", no_wrap=True)
    first = report.choices[0].plan
    for i, s in enumerate(first.schema.streams):
        bytes_of = [human(c.plan.pool_bytes[c.plan.schema.streams[i].name]) for c in report.choices]
        counts = (len(s.layers), s.streams, s.entries(report.context), first.pages[s.name])
        out.add_row(f"{s.name} pages", *map(str, counts), *bytes_of)
    for s in first.schema.states:
        size = human(report.requests * s.slot_bytes)
        out.add_row(f"{s.name} state", str(len(s.layers)), "", "", "", *[size] * len(report.choices))
    weights = human(report.weights)
    out.add_row(
        f"weights {report.dtype}", str(report.layers), "", "", "", *[weights] * len(report.choices), end_section=True
    )
    out.add_row("total", "", "", "", "", *(human(c.total) for c in report.choices), style="bold")
    if report.memory is not None:
        rows = (
            (f"fits in {human(report.memory)}", ["yes" if c.fits else "no" for c in report.choices]),
            ("longest context each", [str(c.longest_context) for c in report.choices]),
            (f"requests of {report.context}", [str(c.most_requests) for c in report.choices]),
        )
        out.add_section()
        for label, cells in rows:
            out.add_row(label, "", "", "", "", *cells)
    return out


def as_dict(report: Report) -> dict[str, Any]:
    return {
        "model": report.model,
        "context": report.context,
        "requests": report.requests,
        "dtype": report.dtype,
        "weights_bytes": report.weights,
        "memory_bytes": report.memory,
        "choices": [
            {
                "kv_dtype": choice.kv_dtype,
                "streams": [
                    {
                        "name": s.name,
                        "layers": len(s.layers),
                        "streams": s.streams,
                        "lanes": s.lanes,
                        "tokens_per_entry": s.tokens_per_entry,
                        "entries": s.entries(report.context),
                        "pages": choice.plan.pages[s.name],
                        "page_bytes": s.page_bytes,
                        "bytes": choice.plan.pool_bytes[s.name],
                    }
                    for s in choice.plan.schema.streams
                ],
                "states": [
                    {"name": s.name, "layers": len(s.layers), "bytes": report.requests * s.slot_bytes}
                    for s in choice.plan.schema.states
                ],
                "kv_bytes": sum(choice.plan.pool_bytes.values()),
                "state_bytes": choice.plan.state_bytes,
                "cache_bytes": choice.plan.nbytes,
                "total_bytes": choice.total,
                "fits": choice.fits,
                "longest_context": choice.longest_context,
                "most_requests": choice.most_requests,
            }
            for choice in report.choices
        ],
    }
