"""What a case of the kernel benchmark is, and what the builders of cases share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridkv.bench.shapes import Shape
from hybridkv.kernels.formats.fp8 import Fp8Pages, fp8_encode_ref
from hybridkv.kernels.formats.kv_format import Pages

Op = Callable[[Any], object]
Peers = dict[str, tuple[Op, Sequence[Any]]]
PAGE = 64


@dataclass
class Case:
    run: Op
    inputs: Sequence[Any]
    verify: Callable[[], float]  # relative error against the reference, or WrongResult
    nbytes: float = 0.0  # that must move
    flops: float = 0.0
    torch: Op | None = None  # the reference, on the same inputs
    peers: Peers = field(default_factory=dict)
    graph: bool = True  # False: part of it is the host's, so it is timed by plain calls


class Listed(NamedTuple):
    """A case that is built only if it is wanted. Its builder imports the op: another tree may not have it (--base)."""

    op: str
    name: str
    build: Callable[[], Case]


@dataclass(frozen=True)
class Setup:
    shape: Shape
    quick: bool
    kv_dtypes: tuple[str, ...]

    @property
    def device(self) -> str:
        return self.shape.device

    def some(self, full: Sequence[Any], quick: Sequence[Any], tiny: Sequence[Any]) -> Sequence[Any]:
        return tiny if self.shape.tiny else quick if self.quick else full

    def randn(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """In the model's dtype unless said otherwise."""
        return torch.randn(size, device=self.device, dtype=dtype or self.shape.dtype)

    def pages(self, kind: str, count: int, width: int) -> Pages:
        """A pool of random entries; FP8 ones repeat a block."""
        if kind != "fp8":
            return self.randn(count, PAGE, width, dtype=torch.float32 if kind == "f32" else torch.bfloat16)
        codes = torch.empty(count, PAGE, width, dtype=torch.uint8, device=self.device)
        scale = torch.empty(count, PAGE, device=self.device)
        some = fp8_encode_ref(torch.randn(min(count, 1024), PAGE, width, device=self.device))
        for a in range(0, count, len(some[0])):
            codes[a : a + len(some[0])], scale[a : a + len(some[0])] = (x[: count - a] for x in some)
        return Fp8Pages(codes, scale)

    def table(self, *rows: int, pages: int) -> Tensor:
        """Page ids [*rows, pages] in random order."""
        total = pages
        for n in rows:
            total *= n
        return torch.randperm(total, device=self.device).view(*rows, pages).to(torch.int32)


def entry_bytes(kind: str, width: int) -> int:
    """Of one key or value."""
    return {"f32": 4 * width, "bf16": 2 * width, "fp8": width + 4}[kind]


def clone(pages: Pages) -> Pages:
    return pages.clone() if isinstance(pages, Tensor) else type(pages)(*(t.clone() for t in pages))


def flat_bytes(pages: Pages) -> Tensor:
    """All that a pool holds, to be compared bit for bit."""
    parts = (pages,) if isinstance(pages, Tensor) else pages
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in parts])
