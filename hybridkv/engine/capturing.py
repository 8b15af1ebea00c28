"""Recording a CUDA graph so that a capture that cannot be had leaves everything else as it is.

A capture that fails half-way, for want of memory or because another graph is destroyed meanwhile, leaves its stream and
its memory pool in a state that torch does not get out of (2.11 ended the process). So memory is asked for before, and
nothing is garbage-collected until the graph is recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SPARE = 32 << 20  # bytes beyond those that are known: pieces of memory are taken in sizes of their own


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, room: int, device: torch.device) -> Iterator[None]:
    """Inside, launches go to the graph; `room`: bytes that it takes from the pool. RuntimeError, before: they are not
    there.
    """
    torch.empty(room + SPARE, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()  # for the pool to take
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if collects:
            gc.enable()
