"""`hybridkv plan`: what a model and a context cost in memory, before anything is downloaded or loaded.

Every number comes from the cache schema that the model itself runs with, and from its own loading code.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hybridkv.commands.options import ModelOptions, with_options
from hybridkv.errors import HybridKVError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hybridkv.cache import CacheSchema
    from hybridkv.config import CacheConfig
    from hybridkv.models.config import ModelConfig
    from hybridkv.planner import CachePlan

EMBEDDED = "SmolLM2-135M-Instruct"
BUDGET = 2048  # where none is named


@dataclass(frozen=True)
class Choice:
    """One KV dtype, and what fits with it. The last three are None when no memory was named."""

    kv_dtype: str
    plan: CachePlan
    total: int
    fits: bool | None = None
    longest_context: int | None = None  # for the requests asked for
    most_requests: int | None = None  # of the context asked for

    @property
    def index_dtype(self) -> str | None:
        """The dtype of the keys by which DeepSeek-V4 chooses entries."""
        return next((layer.index.name for layer in self.plan.schema.compressed if layer.index), None)

    @property
    def token_bytes(self) -> float:
        """Bytes of pages that one more token takes in the long run."""
        each = (s.streams * s.page_bytes / (s.entries_per_page * s.tokens_per_entry) for s in self.plan.schema.streams)
        return sum(each)


@dataclass(frozen=True)
class Buy:
    """One KV dtype with one budget, for the context and the requests asked for. Bytes are those of all requests."""

    kv_dtype: str
    budget: int | None
    bounded: bool
    held_bytes: int  # pages once the prompts are read
    peak_bytes: int  # pages while the last of the prompts is read: they are read one after the other
    state_bytes: int
    longest_context: int | None = None
    most_requests: int | None = None
    ffn_layers: int | None = None  # of the file's, in the bytes that the peak leaves free compared with f32, all kept


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
    buys: list[Buy]
    ffn_layer_bytes: int | None = None  # the largest FFN layer as the file stores it
    packed_on_gpu: int | None = None  # bytes of a GGUF file's weights there, where they are for a CPU here
    workspace: int = 0  # bytes that steps take for a while: logits, sampling, eviction


@with_options
def plan(
    model: ModelOptions,
    requests: Annotated[int | None, Option("--requests", metavar="N", help="the same as --max-requests; 1")] = None,
    as_json: Annotated[bool, Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show the bytes of weights, KV cache and state for a model and a context.

    --model takes a folder with a config.json (weights are not needed), a .gguf file, or the name of a known model
    such as Qwen3.5-27B. Without --kv-dtype all are shown. With --memory or --budget a second table shows what each
    KV dtype and budget buys; without --budget it takes 2048 tokens.
    """
    from rich.console import Console

    from hybridkv.commands.plan_tables import as_dict, buys_table, table
    from hybridkv.kernels.linear.packed import WORKSPACE
    from hybridkv.planner import human

    report = make_report(model, next((n for n in (requests, model.max_requests) if n is not None), 1))
    if as_json:
        print(json.dumps(as_dict(report)))
        return
    console = Console(highlight=False)
    console.print(table(report))
    if report.buys and (report.memory is not None or model.budget is not None):
        console.print(buys_table(report))
    if report.packed_on_gpu is not None:
        console.print(f"Weights packed on a GPU: {human(report.packed_on_gpu)}", style="dim")
    if report.memory is not None:
        written = f", {human(2 * WORKSPACE)} of it for packed weights" if report.dtype == "packed" else ""
        console.print(
            f"On top: up to {human(report.workspace)} for logits, sampling and eviction, and what a step needs to "
            f"compute{written}; leave a few hundred MiB.",
            style="dim",
        )


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights in the form that the options ask for."""

    nbytes: int
    form: str  # float32, bfloat16, fp8, "fp8 as ..." where a machine has none, or packed
    packed_on_gpu: int | None  # of a GGUF file that is planned for a CPU


def make_report(options: ModelOptions, requests: int) -> Report:
    from hybridkv.config import EngineConfig
    from hybridkv.devices import resolve_device, resolve_dtype
    from hybridkv.engine.workspace import workspace
    from hybridkv.models import cache_schema, check_exact, family_of
    from hybridkv.models.config import ModelConfig

    limits = EngineConfig(requests, options.context, options.memory)
    device = resolve_device(options.device)
    name, raw = read_config(options.model)
    config = ModelConfig.from_dict(raw)
    check_exact(config, options.exact, options.state_dtype)
    evicts = family_of(config).supports("budget")
    if not evicts and options.budget is not None:
        raise HybridKVError(
            f"--budget is not for {config.architecture}: it compresses its cache itself and never evicts"
        )
    evicting = (replace(options, budget=BUDGET) if evicts and options.budget is None else options).cache()
    cache = replace(evicting, budget=None, bounded=False, decode_every=0) if evicts else evicting
    dtype = resolve_dtype(options.dtype, device, raw)
    weights = find_weights(options, config, raw, device, dtype)
    context = limits.max_context or config.max_positions
    if context > config.max_positions:
        raise HybridKVError(f"max_context {context} exceeds the model's own limit of {config.max_positions} tokens")
    choices = find_choices(config, cache, dtype, requests, context, weights.nbytes, limits.memory_bytes)
    ffn = ffn_layer_bytes(options.model)
    buys = []
    if evicts:
        kinds = [choice.kv_dtype for choice in choices]
        room = None if limits.memory_bytes is None else limits.memory_bytes - weights.nbytes
        buys = find_buys(config, evicting, dtype, kinds, limits.step_tokens, requests, context, room, ffn)
    beside = workspace(
        config, cache_schema(config, evicting, dtype), evicting, limits, context, dtype, device.type == "cuda"
    )
    return Report(
        model=name,
        requests=requests,
        context=context,
        dtype=weights.form,
        layers=config.layers,
        weights=weights.nbytes,
        memory=limits.memory_bytes,
        choices=choices,
        buys=buys,
        ffn_layer_bytes=ffn,
        packed_on_gpu=weights.packed_on_gpu,
        workspace=beside.nbytes,
    )


def find_weights(
    options: ModelOptions, config: ModelConfig, raw: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> Weights:
    import torch

    from hybridkv.devices import resolve_fp8
    from hybridkv.kernels.linear.fp8 import keeps_codes
    from hybridkv.kernels.linear.packed import keeps_packed
    from hybridkv.models import check_fp8
    from hybridkv.planner import model_bytes, planned_tensors

    fp8 = resolve_fp8(options.weight_dtype)
    check_fp8(config, fp8)
    stays_fp8 = fp8 and not options.exact and keeps_codes(device, dtype)
    has, packed = file_tensors(options.model) or (planned_tensors(config, raw), {})
    plain = model_bytes(config, has, dtype, device.type, stays_fp8)
    may_pack = options.weight_dtype == "auto" and not options.exact
    nbytes = plain
    if may_pack and keeps_packed(device, dtype):
        nbytes = model_bytes(config, has, dtype, device.type, packed=packed)
    on_gpu = None
    if packed and may_pack and device.type == "cpu":
        unpacked_there = model_bytes(config, has, torch.bfloat16, "cuda", packed={})
        packed_there = model_bytes(config, has, torch.bfloat16, "cuda", packed=packed)
        if packed_there < unpacked_there:
            on_gpu = packed_there
    name = str(dtype).removeprefix("torch.")
    if nbytes < plain:
        form = "packed"
    elif stays_fp8:
        form = "fp8"
    else:
        form = f"fp8 as {name}" if fp8 else name
    return Weights(nbytes, form, on_gpu)


def find_choices(
    config: ModelConfig,
    cache: CacheConfig,
    dtype: torch.dtype,
    requests: int,
    context: int,
    weights: int,
    memory: int | None,
) -> list[Choice]:
    """One for each KV dtype that may be meant."""
    from hybridkv.config import KV_DTYPES
    from hybridkv.models import cache_schema
    from hybridkv.planner import longest_context, most_requests, plan_cache

    choices = []
    for kv_dtype in KV_DTYPES if cache.kv_dtype == "auto" else (cache.kv_dtype,):
        schema = cache_schema(config, replace(cache, kv_dtype=kv_dtype), dtype)
        pools = plan_cache(schema, requests, context, None)
        choice = Choice(kv_dtype, pools, weights + pools.nbytes)
        if memory is not None:
            room = memory - weights
            choice = replace(
                choice,
                fits=pools.nbytes <= room,
                longest_context=longest_context(schema, room, requests, config.max_positions),
                most_requests=most_requests(schema, room, context),
            )
        choices.append(choice)
    return choices


def find_buys(
    config: ModelConfig,
    evicting: CacheConfig,
    dtype: torch.dtype,
    kv_dtypes: list[str],
    step: int,
    requests: int,
    context: int,
    room: int | None,
    ffn: int | None,  # bytes of a feed-forward layer
) -> list[Buy]:
    """Each KV dtype with each budget to compare."""
    from hybridkv.models import cache_schema

    whole = cache_schema(config, replace(evicting, kv_dtype="f32", budget=None, bounded=False, decode_every=0), dtype)
    base = requests * (whole.kv_bytes(context) + whole.slot_bytes)  # page tables are alike in all
    buys = []
    for kv_dtype in kv_dtypes:
        for budget, bounded in budgets(evicting):
            settings = replace(evicting, kv_dtype=kv_dtype, budget=budget, bounded=bounded, decode_every=0)
            schema = cache_schema(config, settings, dtype)
            found = buy(schema, settings, step, requests, context, room, config.max_positions)
            if ffn:
                freed = max(base - found.peak_bytes - found.state_bytes, 0)
                found = replace(found, ffn_layers=min(freed // ffn, config.layers))
            buys.append(found)
    return buys


def budgets(cache: CacheConfig) -> list[tuple[int | None, bool]]:
    """(budget, bounded) to compare: none, the one asked for, and that one while the prompt is read too."""
    found: list[tuple[int | None, bool]] = [(None, False), (cache.budget, True)]
    if not cache.bounded:
        found.insert(1, (cache.budget, False))
    return found


def kv_bytes(schema: CacheSchema, tokens: int, max_held: int | None) -> int:
    """Page bytes of one request of `tokens` tokens whose attention streams hold at most `max_held` of them."""
    from hybridkv.eviction.evict import STREAMS

    held = tokens if max_held is None else min(tokens, max_held)
    return sum(s.pages(held if s.name == STREAMS else tokens) * s.page_bytes for s in schema.streams)


def buy(
    schema: CacheSchema, cache: CacheConfig, step: int, requests: int, context: int, room: int | None, limit: int
) -> Buy:
    """What a dtype and a budget cost for `requests` requests of `context` tokens, and what fits in `room` bytes."""
    from hybridkv.eviction import query_buffers_for
    from hybridkv.planner import most_that_fits

    def held(tokens: int) -> int:
        return kv_bytes(schema, tokens, cache.budget)

    def peak(tokens: int) -> int:
        return kv_bytes(schema, tokens, cache.budget + step if cache.bounded and cache.budget is not None else None)

    def state(many: int) -> int:
        return many * schema.slot_bytes + query_buffers_for(cache, step, many) * schema.query_buffer_bytes

    def need(many: int, tokens: int) -> int:
        return (many - 1) * held(tokens) + peak(tokens) + state(many) + many * schema.table_bytes(tokens)

    sizes = (requests * held(context), (requests - 1) * held(context) + peak(context), state(requests))
    found = Buy(cache.kv_dtype, cache.budget, cache.bounded, *sizes)
    if room is None:
        return found
    longest = most_that_fits(lambda tokens: need(requests, tokens), room, limit)
    each = held(context) + schema.slot_bytes
    most = most_that_fits(lambda many: need(many, context), room, max(room, 0) // each if each else 0)
    return replace(found, longest_context=longest, most_requests=most)


def file_tensors(model: str | None) -> tuple[Callable[[str], bool], dict[str, int]] | None:
    """Which tensors a GGUF file has, and the bytes of those that can stay packed, by name. None for anything else."""
    from hybridkv.models import open_checkpoint

    path = Path(model).expanduser() if model else Path()
    if path.suffix != ".gguf" or not path.is_file():
        return None
    with open_checkpoint(path) as checkpoint:
        return set(checkpoint.names()).__contains__, checkpoint.packed_bytes()


def ffn_layer_bytes(model: str | None) -> int | None:
    """Bytes of the largest feed-forward layer of a GGUF file, as stored. None for anything else."""
    from hybridkv.checkpoint.gguf_file import GgufFile

    path = Path(model).expanduser() if model else Path()
    if path.suffix != ".gguf" or not path.is_file():
        return None
    layers: dict[str, int] = {}
    with GgufFile(path) as file:
        for name, tensor in file.tensors.items():
            match = re.fullmatch(r"blk\.(\d+)\.ffn_(?!norm).*", name)
            if match:
                layers[match[1]] = layers.get(match[1], 0) + tensor.nbytes
    return max(layers.values(), default=None)


def read_config(model: str | None) -> tuple[str, dict[str, Any]]:
    """(name, config) of a model that may not be there yet. Never reaches for the network."""
    from hybridkv.files import read_json
    from hybridkv.models import open_checkpoint
    from hybridkv.models.known import KNOWN, known_config

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
