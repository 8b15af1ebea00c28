"""Where kernels run, and what the device under them has.

Triton kernels run on CUDA tensors, if Triton is installed. Everything else takes the plain-torch form. A kernel file
writes `from hybridkv.kernels.backend import tl, triton` and can be imported without Triton: the stand-ins below make
its decorators harmless, and `use_triton` then never picks a kernel.

The facts about a device are asked here and nowhere else. Off a GPU (kernels in Triton's interpreter) each has one
answer: capability (0, 0), SMS_OFF_GPU multiprocessors, SHARED_MEMORY_OFF_GPU bytes, neither Hopper nor PDL.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


class Absent:
    """Takes the place of a language that is not installed, in definitions that will never run."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


if TYPE_CHECKING:
    triton: Any = Absent()  # kernels are a language of their own, which a Python type checker does not know
    tl: Any = Absent()
    HAS_TRITON = True
else:
    try:
        import triton
        import triton.language as tl

        HAS_TRITON = True
    except ImportError:
        HAS_TRITON = False
        triton = tl = Absent()

COMPILED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") != "1"  # and not interpreted
GLUON = "3.6."  # the Triton whose Gluon the kernels for Hopper are written in: that language still changes
HAS_GLUON = HAS_TRITON and triton.__version__.startswith(GLUON)

SMS_OFF_GPU = 2  # the least with which programs share their work
SHARED_MEMORY_OFF_GPU = 227 * 1024  # a Hopper GPU's: the interpreter has no limit
LARGE_SHARED_MEMORY = 160 * 1024  # data-centre GPUs have this or more, others 99 KiB or less


def use_triton(x: Tensor) -> bool:
    """Whether an op on this tensor runs its Triton kernel."""
    return HAS_TRITON and x.is_cuda


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def sm_count(device: torch.device) -> int:
    """The number of streaming multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SMS_OFF_GPU


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return SHARED_MEMORY_OFF_GPU
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def is_hopper(device: torch.device) -> bool:
    """Whether this is an H100, H200 or GH200: compute capability 9.0 and no other."""
    return capability(device) == (9, 0)


def has_pdl(device: torch.device) -> bool:
    """Whether compiled kernels can use programmatic dependent launch (overlap.py): Hopper GPUs and later ones."""
    return COMPILED and capability(device) >= (9, 0)


def has_gluon(device: torch.device) -> bool:
    """Whether the kernels in Gluon run there: they are written for Hopper, in one version of the language."""
    return COMPILED and HAS_GLUON and is_hopper(device)


__all__ = [
    "COMPILED", "GLUON", "HAS_GLUON", "HAS_TRITON", "LARGE_SHARED_MEMORY", "Absent", "capability", "has_gluon",
    "has_pdl", "is_hopper", "shared_memory", "sm_count", "tl", "triton", "use_triton",
]  # fmt: skip
