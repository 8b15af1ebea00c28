"""Gluon, the language below Triton in which the kernels for Hopper GPUs are written. Only this file imports it.

In Gluon, layouts, shared memory and the work of each warp are explicit. The language still changes: under any Triton
but the one the kernels are written for, these names are stand-ins. Kernel files can then be imported, but not run;
`has_gluon` (backend.py) is False there.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hybridkv.kernels.backend import HAS_GLUON, Absent

# kernels are a language of their own, which a Python type checker does not know
gluon: Any = Absent()
gl: Any = Absent()
hopper: Any = Absent()
cuda: Any = Absent()
TensorDescriptor: Any = Absent()
PropagateNan: Any = Absent()

if HAS_GLUON:
    gluon = import_module("triton.experimental.gluon")
    gl = import_module("triton.experimental.gluon.language")
    hopper = import_module("triton.experimental.gluon.language.nvidia.hopper")
    cuda = import_module("triton.language.extra.cuda")
    TensorDescriptor = import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
    PropagateNan = import_module("triton.language").PropagateNan

async_copy = hopper.async_copy  # global to shared memory, by the threads
tma = hopper.tma  # global to shared memory, by the copy engine
mbarrier = hopper.mbarrier
fence_async_shared = hopper.fence_async_shared
warpgroup_mma = hopper.warpgroup_mma
warpgroup_mma_wait = hopper.warpgroup_mma_wait


def from_triton(function: Any) -> Any:
    """A function of Triton kernels, for kernels in Gluon."""
    return gluon.jit(function.fn) if HAS_GLUON else function


__all__ = [
    "PropagateNan", "TensorDescriptor", "async_copy", "cuda", "fence_async_shared", "from_triton", "gl", "gluon",
    "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip
