"""What a benchmark can be asked for. Every option is declared once, here, for both command lines: `hybridkv bench`
(typer) and `python -m hybridkv.bench` (argparse).
"""

from __future__ import annotations

import json
import time
from dataclasses import Field, dataclass, field, fields
from typing import Any

from hybridkv.config import KV_DTYPES
from hybridkv.errors import HybridKVError

BENCHES = ("kernels", "decode", "prefill", "eviction", "capacity")
V4_BENCHES = ("v4_kernels", "v4_model")  # of DeepSeek-V4, whose cache and layers are its own; not part of "all"


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
        None, "PATTERN", "kernels: ops and cases; decode: budget, context, batch, weights, state, peers"
    )
    quick: bool = option(False, "", "few cases")
    kv_dtypes: tuple[str, ...] = option((), "NAMES", "of the cache, such as bf16,fp8", "kv-dtype")
    weight_dtype: str = option("auto", "NAME", "of the model's matrices: auto or fp8")
    contexts: tuple[int, ...] = option((), "LIST", "tokens, such as 2048,16384")
    batches: tuple[int, ...] = option((), "LIST", "decode: requests at once")
    budget: int = option(2048, "TOKENS", "kept in each stream where something is evicted")
    chunks: tuple[int, ...] = option(
        (), "LIST", "prefill: tokens a step; more than one, such as 8192,4096: compared", "chunk"
    )
    memory: str = option("80GiB", "SIZE", "capacity: for weights and cache")
    skip_peers: bool = option(False, "", "measure nothing but hybridkv")
    peer_layers: int = option(8, "N", "decode: layers of the model that transformers runs")
    compiled_layers: tuple[int, ...] = option((4,), "LIST", "decode: layers that transformers runs compiled")
    warm: int = option(0, "N", "kernels: compile first, in N processes")
    trace: str | None = option(None, "DIR", "decode, prefill: write a profiler trace there, print the largest costs")
    limit: float | None = option(None, "SECONDS", "begin no new row of a bench after this time")

    @property
    def deadline(self) -> float | None:
        return None if self.limit is None else time.monotonic() + self.limit

    def __post_init__(self) -> None:
        wrong = [k for k in self.kv_dtypes if k not in KV_DTYPES]
        if wrong:
            raise HybridKVError(f"kv_dtype {wrong[0]!r} is not supported; choose {', '.join(KV_DTYPES)}")
        if self.weight_dtype not in ("auto", "fp8"):
            raise HybridKVError(f"weight_dtype must be auto or fp8, not {self.weight_dtype!r}")
        for name in ("contexts", "batches", "chunks", "compiled_layers"):
            if any(n < 1 for n in getattr(self, name)):
                raise HybridKVError(f"{name} must be positive numbers")
        for name in ("budget", "peer_layers"):
            if getattr(self, name) < 1:
                raise HybridKVError(f"{name} must be a positive number, not {getattr(self, name)}")
        for chunk in self.chunks:
            if chunk % 64:
                raise HybridKVError(f"chunk must be a multiple of 64, not {chunk}")


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
        raise HybridKVError(f"{flag_of(f)} takes whole numbers with commas between them, not {text!r}") from None


def from_json(text: str) -> BenchOptions:
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
    return BenchOptions(**given)
