"""Pools of pages at the widths of Qwen3.5-27B, and comparing them."""

from typing import Any

import torch
from numerics import assert_same_bytes
from torch import Tensor

from hybridkv.kernels.formats.fp8 import Fp8Pages
from hybridkv.kernels.formats.kv_format import Pages

KINDS = ("f32", "bf16", "fp8")
G, D, P = 4, 256, 64  # KV heads, head width, entries a page


def pool(kind: str, N: int) -> Pages:
    if kind == "fp8":
        return Fp8Pages(torch.randint(0, 256, (N, P, D), dtype=torch.uint8), torch.randn(N, P))
    return torch.randn(N, P, D).to(torch.float32 if kind == "f32" else torch.bfloat16)


def copy(pages: Pages) -> Any:
    return Fp8Pages(*(t.clone() for t in pages)) if isinstance(pages, Fp8Pages) else pages.clone()


def copy_like(pages: Pages) -> Any:
    return Fp8Pages(*(torch.zeros_like(t) for t in pages)) if isinstance(pages, Fp8Pages) else torch.zeros_like(pages)


def same(a: Pages, b: Pages) -> None:
    for x, y in zip(a, b) if isinstance(a, Fp8Pages) and isinstance(b, Fp8Pages) else ((a, b),):
        assert isinstance(x, Tensor) and isinstance(y, Tensor)
        assert_same_bytes(x, y)
