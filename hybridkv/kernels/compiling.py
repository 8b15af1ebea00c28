"""Compiling kernels: how many there were and what they took, where they are kept, and many at a time.

Triton compiles a kernel when it is first launched with arguments of a kind, and keeps the result on disk: under
TRITON_CACHE_DIR, or ~/.triton/cache. A first run on a machine therefore compiles one kernel after the other, half a
second each. `together` does it beforehand: inside, what is launched is compiled on several threads and nothing runs, so
a step that is gone through there costs what its slowest kernel costs, and not the sum. Most of the compiler leaves
Python's lock to others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from hybridkv.kernels.backend import COMPILED

WORKERS = 16  # threads that compile, at the most
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # ops whose result is not written


@dataclass
class Compiles:
    """Kernels that were made since `counted` began, and such that were found on disk."""

    compiled: int = 0
    seconds: float = 0.0  # of all of them, each by the clock: together they may take less
    found: int = 0
    found_seconds: float = 0.0
    slowest: list[tuple[float, str]] = field(default_factory=list)  # seconds and names of those that were compiled

    def note(self, name: str, seconds: float, cache_hit: bool) -> None:
        """One more kernel."""
        if cache_hit:
            self.found += 1
            self.found_seconds += seconds
        else:
            self.compiled += 1
            self.seconds += seconds
            self.slowest.append((seconds, name))


def kernel_folder() -> Path | None:
    """Where compiled kernels are kept; None: nothing is compiled here."""
    if not COMPILED:
        return None
    from triton import knobs

    return Path(knobs.cache.dir)


@contextmanager
def counted() -> Iterator[Compiles]:
    """Inside, compiled kernels are counted; all of them, whichever thread compiles."""
    found = Compiles()
    if not COMPILED:
        yield found
        return
    from triton import knobs

    before, lock = knobs.compilation.listener, threading.Lock()

    def listen(*, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **more)
        with lock:
            found.note(src.name, times.total / 1e6, cache_hit)

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before


class _Zeros(TorchDispatchMode):
    """What no kernel writes holds zeros: as an index, they name something that is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _EMPTY:
            made.zero_()
        return made


_ONE_AT_A_TIME = threading.Lock()


class _Pool(ThreadPoolExecutor):
    """Says how many of the things that it was given are done."""

    def __init__(self, workers: int, progress: Callable[[int, int], None] | None) -> None:
        super().__init__(workers, "compile")
        self.progress, self.given, self.done = progress, 0, 0
        self.told = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given += 1
        made = super().submit(fn, *args, **kwargs)
        made.add_done_callback(self._tell)
        return made

    def _tell(self, _: Future[Any]) -> None:
        with self.told:
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.given)


@contextmanager
def together(progress: Callable[[int, int], None] | None = None, workers: int | None = None) -> Iterator[None]:
    """Inside, kernels that are launched are compiled, or read from disk, on several threads, and none runs. At its end
    all of them are there. A kernel that cannot be compiled is left to the launch that needs it, which says why.

    `progress`: called with (kernels done, kernels met so far), by any thread.
    """
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
    from triton.runtime.jit import JITFunction

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        if active_mode.get() is None:  # another thread's launch: an engine that is open already goes on
            return run(self, *args, grid=grid, warmup=warmup, **more)
        run(self, *args, grid=grid, warmup=True, **more)
        return None

    with ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)  # each puts back what it found
        run = JITFunction.run
        pool = stack.enter_context(_Pool(workers or min(WORKERS, os.cpu_count() or 1), progress))
        stack.callback(active_mode.set, None)  # also where waiting for the threads is interrupted
        stack.enter_context(AsyncCompileMode(pool, ignore_errors=True))
        stack.enter_context(_Zeros())
        JITFunction.run = compile_only
        stack.callback(setattr, JITFunction, "run", run)
        yield
