"""What `hybridkv bench` can be asked for."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from hybridkv.config import KV_DTYPES
from hybridkv.errors import HybridKVError

BENCHES = ("kernels", "decode", "prefill", "eviction", "capacity")


@dataclass(frozen=True)
class BenchOptions:
    model_shape: str = "27b"
    layers: int | None = None
    device: str = "auto"
    only: str | None = None  # ops or cases whose name matches
    quick: bool = False  # fewer cases, no torch form
    kv_dtypes: tuple[str, ...] = ()  # empty: the bench's own list, here and below
    weight_dtype: str = "auto"  # auto | fp8
    contexts: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    budget: int = 2048
    chunks: tuple[int, ...] = (8192,)  # prompt tokens a step; all but the first are compared with it
    memory: str = "80GiB"
    skip_peers: bool = False
    peer_layers: int = 8
    compiled_layers: tuple[int, ...] = (4,)  # of those, one measurement each; compiling takes seconds a layer
    warm: int = 0  # processes that compile before kernels are timed
    trace: str | None = None
    limit: float | None = None  # seconds after which no new row begins

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
        if not self.chunks:
            raise HybridKVError("chunk must name one number at least")
        for chunk in self.chunks:
            if chunk % 64:
                raise HybridKVError(f"chunk must be a multiple of 64, not {chunk}")


def from_json(text: str) -> BenchOptions:
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
    return BenchOptions(**given)
