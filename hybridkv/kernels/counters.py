"""Counters that the programs of one launch share: zero before a launch, and set back to zero by it.

Two launches that run at the same time must not have the same counters. Launches on one stream follow each other, so
each stream has its own. A captured graph can be replayed on any stream, beside others that were captured on the same
one: the counters of a capture are its own, allocated and zeroed inside it, once in a graph.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hybridkv.kernels.backend import triton


class Counters:
    """Zeros [count] int32 for launches on a stream."""

    def __init__(self) -> None:
        self.held: dict[tuple[torch.device, int, int], tuple[int, Tensor]] = {}

    def take(self, count: int, device: torch.device, stream: int, capture: int) -> Tensor:
        """`capture` numbers the capture that the stream is in; 0: none.

        A stream is in one capture at a time. So when another number comes, the counters of the capture before it are
        no longer needed here: its graph zeroes them again whenever it is replayed.
        """
        key = device, stream, count
        number, zeros = self.held.get(key, (-1, None))
        if zeros is None or number != capture:
            zeros = torch.zeros(count, dtype=torch.int32, device=device)
            self.held[key] = capture, zeros
        return zeros


COUNTERS = Counters()


def counters(count: int, device: torch.device) -> Tensor:
    """Zeros [count] int32 for a launch on the device's current stream, which leaves them zero."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = triton.runtime.driver.active.get_current_stream(device.index)
    capture = capture_number(stream) if torch.cuda.is_current_stream_capturing() else 0
    return COUNTERS.take(count, device, stream, capture)


def capture_number(stream: int) -> int:
    """The number that the driver gave to the capture that this stream is in: another one for every capture."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error or not number.value:
        raise RuntimeError(f"the CUDA driver does not say which capture a stream is in: error {error}")
    return number.value


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
