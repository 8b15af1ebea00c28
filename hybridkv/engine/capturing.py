"""Recording a CUDA graph so that a capture that cannot be had leaves everything else as it is.

A capture that fails half-way, for want of memory or because another graph is destroyed meanwhile, leaves its stream and
its memory pool in a state that torch does not get out of (2.11 ended the process). So memory is asked for before, and
nothing is garbage-collected until the graph is recorded.

Where a model is one of several ranks, a graph is of use only if all of them have it: `Consent` is asked before and
after (rank_graphs.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
SPARE = 32 << 20  # bytes beyond those that are known: pieces of memory are taken in sizes of their own


class Consent:
    """Of all whose graphs are replayed together: here this process alone."""

    mode = "global"  # whose calls a capture does not bear: those of all threads

    def warm_up(self, run: Callable[[], T]) -> T:
        """What `run` gives, once outside the graph: kernels are compiled, libraries begin."""
        return run()

    def all_agree(self, problem: RuntimeError | None) -> None:
        """RuntimeError if somebody cannot have the graph. `problem`: why this process cannot."""
        try:
            if problem is not None:
                raise problem
        finally:
            del problem  # else it would hold this frame, and what a step holds, until garbage is collected


ALONE = Consent()


def capture(
    run: Callable[[], T],
    pool: Any,
    room: Callable[[T], int],  # bytes that the graph takes from the pool, by what a run gives
    device: torch.device,
    consent: Consent = ALONE,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """(a graph, what it writes to): run once to compile and to warm up, once to be recorded. RuntimeError: it cannot be
    had, and nothing else has changed.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        needed = room(consent.warm_up(run))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with recording(graph, pool, needed, device, consent):
        found = run()
    return graph, found


@contextmanager
def recording(
    graph: torch.cuda.CUDAGraph, pool: Any, room: int, device: torch.device, consent: Consent = ALONE
) -> Iterator[None]:
    """Inside, launches go to the graph; `room`: bytes that it takes from the pool. RuntimeError, before: they are not
    there.
    """
    consent.all_agree(_problem(lambda: torch.empty(room + SPARE, dtype=torch.uint8, device=device)))
    torch.cuda.empty_cache()  # for the pool to take
    collects = gc.isenabled()
    gc.disable()
    problem = None
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=consent.mode):
            yield
    except RuntimeError as found:
        problem = found
    finally:
        if collects:
            gc.enable()
    try:
        consent.all_agree(problem)
    finally:
        del problem


def _problem(run: Callable[[], object]) -> RuntimeError | None:
    try:
        run()
    except RuntimeError as found:
        return found
    return None
