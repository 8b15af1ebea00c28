"""Where Triton runs: on CUDA tensors, if Triton is there. Everything else takes the plain-torch form.

A kernel file writes `from hybridkv.kernels.backend import tl, triton` and can be imported without Triton: the stand-ins
below make its decorators harmless, and `use_triton` then never picks a kernel.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    triton: Any  # kernels are a language of their own, which a Python type checker does not know
    tl: Any
    HAS_TRITON = True
else:
    try:
        import triton
        import triton.language as tl

        HAS_TRITON = True
    except ImportError:
        HAS_TRITON = False

        class _Absent:
            """Takes the place of triton and triton.language in definitions that will never run."""

            def __getattr__(self, name: str) -> Any:
                return self

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return args[0] if args and callable(args[0]) else self

        triton = tl = _Absent()

COMPILED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") != "1"  # and not interpreted
GLUON = "3.6."  # the Triton whose Gluon the kernels for Hopper are written in: that language still changes


def use_triton(x: Tensor) -> bool:
    """Whether an op on this tensor runs its Triton kernel."""
    return HAS_TRITON and x.is_cuda


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device; (0, 0) elsewhere, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon run there: they are written for one card, in one version of the language."""
    return COMPILED and triton.__version__.startswith(GLUON) and capability(device) == (9, 0)


def roomy(device: torch.device) -> bool:
    """Whether a program may have the shared memory of a data-centre GPU: 160 KiB or more, where others have 99."""
    return capability(device) in ((0, 0), (8, 0), (9, 0), (10, 0), (10, 3))


__all__ = ["COMPILED", "GLUON", "HAS_TRITON", "capability", "has_gluon", "roomy", "tl", "triton", "use_triton"]
