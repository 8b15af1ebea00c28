"""What a benchmark can be asked for. Every option is declared once, here, for both command lines: `hybridkv bench`
(typer) and `python -m hybridkv.bench` (argparse).
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import Field, dataclass, field, fields
from typing import Any

from hybridkv.bench.load_workload import SPREADS, Range
from hybridkv.config import KV_DTYPES
from hybridkv.errors import HybridKVError

BENCHES = ("kernels", "decode", "prefill", "eviction", "capacity", "load", "start", "reuse", "sessions", "ranks")
BUDGET = 2048  # kept in each stream where something is evicted and no number is given
MOST_LOAD = 5.0  # of the capacity: beyond it requests only wait
WEIGHT_DTYPES = ("auto", "fp8", "q8_0", "q6_k", "q5_k", "q4_k", "q4_k_m", "released")
V4_BENCHES = ("v4_kernels", "v4_model")  # of DeepSeek-V4, whose cache and layers are its own; not part of "all"
SERVER_BENCHES = ("serve", "soak")  # of a running server with a tiny model on a CPU; not part of "all"
NAMES = (*BENCHES, *V4_BENCHES, *SERVER_BENCHES)
PARTS = {  # that --only picks from
    "decode": ("budget", "context", "batch", "weights", "state", "exact", "peers"),
    "load": ("offline", "sampled", "clients", "mixed", "online", "peers"),
    "start": ("cold, together", "warm", "cold, in turn"),
    "reuse": ("hits", "host", "misses", "sessions"),
    "ranks": ("decode", "prefill", "group"),
}


def option(default: Any, metavar: str, help: str, flag: str | None = None) -> Any:
    """A field with what a command line says about it. `flag`: where it is not the field's name."""
    return field(default=default, metadata={"metavar": metavar, "help": help, "flag": flag})


@dataclass(frozen=True)
class BenchOptions:
    """An empty tuple, or None, stands for the bench's own choice."""

    model_shape: str | None = option(
        None, "NAME", "widths: 27b (without this option), 9b, 4b, 0.8b, tiny, or a known model's name"
    )
    layers: int | None = option(None, "N", "cut the model to its first N layers")
    device: str = option("auto", "NAME", "auto, cpu (tiny alone) or cuda")
    only: str | None = option(
        None, "PATTERN", "kernels: ops and cases; " + "; ".join(f"{k}: {', '.join(v)}" for k, v in PARTS.items())
    )
    quick: bool = option(False, "", "few cases")
    kv_dtypes: tuple[str, ...] = option((), "NAMES", "of the cache, such as bf16,fp8", "kv-dtype")
    weight_dtype: str = option("auto", "NAME", f"of the model's matrices: {', '.join(WEIGHT_DTYPES)}")
    contexts: tuple[int, ...] = option((), "LIST", "tokens, such as 2048,16384")
    batches: tuple[int, ...] = option((), "LIST", "decode and mixed steps: requests at once")
    budget: int | None = option(
        None, "TOKENS", f"kept in each stream where something is evicted, {BUDGET} by default; load: nothing is without"
    )
    chunks: tuple[int, ...] = option(
        (), "LIST", "prefill, load: tokens a step; prefill: more than one, such as 8192,4096, are compared", "chunk"
    )
    memory: str = option("80GiB", "SIZE", "capacity: for weights and cache")
    skip_peers: bool = option(False, "", "measure nothing but hybridkv")
    peer_layers: int = option(8, "N", "decode: layers of the model that transformers runs")
    compiled_layers: tuple[int, ...] = option((4,), "LIST", "decode: layers that transformers runs compiled")
    warm: int = option(0, "N", "kernels: compile first, in N processes")
    ranks: tuple[int, ...] = option(
        (), "LIST", "v4_model: numbers of GPUs, such as 2,4,8: the first rank of each is timed, without its sums"
    )
    tp: int = option(1, "N", "decode, prefill, load: GPUs that share the model; the ranks are started here")
    trace: str | None = option(None, "DIR", "decode, prefill: write a profiler trace there, print the largest costs")
    requests: int | None = option(None, "N", "load: asked at once, 256 by default; serve: of each client, 500")
    clients: int | None = option(None, "N", "serve: at once, 64 by default; soak: 12")
    prompt_tokens: str | None = option(None, "LOW:HIGH", "load: lengths of prompts, 100:1024 by default")
    answer_tokens: str | None = option(None, "LOW:HIGH", "load: lengths of answers, 100:1024 by default")
    spread: str = option("uniform", "NAME", "load: lengths of prompts: uniform, or log: each factor of two has as many")
    seed: int = option(0, "N", "load: of lengths, tokens, arrivals and sampling")
    slots: int | None = option(None, "N", "load: requests that run at once; by default all, as far as memory goes")
    reuse: bool = option(
        False, "", "load: keep what is read for others, as an LLM does; all prompts differ, so this is what it costs"
    )
    load: tuple[float, ...] = option(
        (), "SHARES", "load: arrivals, as shares of the measured capacity, such as 0.4,0.8"
    )
    rate: tuple[float, ...] = option((), "LIST", "load: arrivals a second, in place of shares")
    seconds: float | None = option(
        None, "SECONDS", "load: how long requests arrive at each rate, 30 by default; soak: in all, 600"
    )
    ttft_limit: float | None = option(None, "MS", "load: within which a first token is good; default: relative")
    tbt_limit: float | None = option(None, "MS", "load: within which next tokens are good; default: relative")
    limit: float | None = option(None, "SECONDS", "begin no new row of a bench after this time")

    @property
    def deadline(self) -> float | None:
        return None if self.limit is None else time.monotonic() + self.limit

    def __post_init__(self) -> None:
        wrong = [k for k in self.kv_dtypes if k not in KV_DTYPES]
        if wrong:
            raise HybridKVError(f"kv_dtype {wrong[0]!r} is not supported; choose {', '.join(KV_DTYPES)}")
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise HybridKVError(f"weight_dtype must be one of {', '.join(WEIGHT_DTYPES)}, not {self.weight_dtype!r}")
        for name in ("contexts", "batches", "chunks", "compiled_layers", "ranks"):
            if any(n < 1 for n in getattr(self, name)):
                raise HybridKVError(f"{name} must be positive numbers")
        for name in ("budget", "peer_layers", "requests", "clients", "slots", "seconds", "ttft_limit", "tbt_limit"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN is refused too
                raise HybridKVError(f"{flag_of(OPTIONS[name])} must be a positive number, not {value}")
        self._check_load()
        try:
            re.compile(self.only or "")
        except re.error as problem:
            raise HybridKVError(f"--only {self.only!r} is no pattern: {problem}") from None
        for chunk in self.chunks:
            if chunk % 64:
                raise HybridKVError(f"chunk must be a multiple of 64, not {chunk}")

    def _check_load(self) -> None:
        for name in ("prompt_tokens", "answer_tokens"):
            if (text := getattr(self, name)) is not None:
                Range.read(flag_of(OPTIONS[name]), text)
        if self.spread not in SPREADS:
            raise HybridKVError(f"--spread must be {' or '.join(SPREADS)}, not {self.spread!r}")
        if self.seed < 0:
            raise HybridKVError(f"--seed must not be negative, not {self.seed}")
        if self.load and self.rate:
            raise HybridKVError("--load and --rate both say how many requests arrive; give one of them")
        for share in self.load:
            if not 0 < share <= MOST_LOAD:
                raise HybridKVError(
                    f"--load takes shares of the capacity above 0, at most {MOST_LOAD:g}, not {share:g}"
                )
        for rate in self.rate:
            if not 0 < rate < float("inf"):
                raise HybridKVError(f"--rate takes requests a second above 0, not {rate:g}")


def check_only(name: str, options: BenchOptions) -> None:
    """Refuse a pattern by which nothing of a bench would be measured, before weights are made for it."""
    parts = [part for part in PARTS.get(name, ()) if not (part == "peers" and options.skip_peers)]
    if parts and not any(re.search(options.only or "", part) for part in parts):
        raise HybridKVError(f"--only {options.only!r} picks nothing of {name}; there is {', '.join(parts)}")


OPTIONS = {f.name: f for f in fields(BenchOptions)}


def flag_of(f: Field[Any]) -> str:
    return "--" + (f.metadata["flag"] or f.name).replace("_", "-")


def kind_of(f: Field[Any]) -> type:
    """int, float, str or bool, as the field's type is written; for a tuple the kind of its items."""
    written = str(f.type)
    return next((kind for kind in (int, float, bool) if kind.__name__ in written), str)


def is_list(f: Field[Any]) -> bool:
    return str(f.type).startswith("tuple")


def read_list(f: Field[Any], text: Any) -> tuple[Any, ...]:
    """The values of a list that a command line names with commas between them."""
    if isinstance(text, tuple):  # a default
        return text
    try:
        return tuple(kind_of(f)(item) for item in text.split(",")) if text else ()
    except ValueError:
        kind = "whole numbers" if kind_of(f) is int else "numbers"
        raise HybridKVError(f"{flag_of(f)} takes {kind} with commas between them, not {text!r}") from None


def from_json(text: str) -> BenchOptions:
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
    return BenchOptions(**given)
