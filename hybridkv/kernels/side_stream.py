"""beside: launches that run beside others on a GPU, on a stream of their own.

    with beside(device) as join:
        a = ...          # begins when all that was launched before has ended
    b = ...              # runs beside it
    join()               # from here on what is launched may read a

Memory of `a` comes from the side stream. It may be given up at any time after `join`: whatever takes it next does so on
the side stream, inside a later `beside`, which begins after all that was launched before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """On a CPU: in order, as ever."""
    if device.type != "cuda":
        yield lambda: None
        return
    main, side = torch.cuda.current_stream(device), _stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)
