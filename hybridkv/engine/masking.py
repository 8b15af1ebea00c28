"""Masks of constrained requests: filled on the host while the forward pass runs, sent in one copy beside it.

A mask needs the tokens so far and nothing of the step, so on a GPU all of this is done before the logits are there. The
copy goes on a stream of its own; the sampler's stream waits for it and for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.sampling.mask import mask_rows
from hybridkv.request import Request


@dataclass
class Masks:
    """Masks that rows of logits have got, and the requests whose grammar failed, with how."""

    packed: Tensor | None = None  # [M, words] int32, on the device
    place: dict[int, int] = field(default_factory=dict)  # row of the logits -> its mask
    failed: dict[int, str] = field(default_factory=dict)  # number of the request -> what went wrong

    def apply(self, row: int, own: Tensor) -> None:
        """Once more, to a request's own logits [vocab], which a hook has changed."""
        at = self.place.get(row)
        if at is not None and self.packed is not None:
            first = torch.zeros(1, dtype=torch.int64, device=own.device)
            mask_rows(own.unsqueeze(0), self.packed[at : at + 1], first)


def mask_logits(logits: Tensor, requests: Sequence[Request], rows: Sequence[int]) -> Masks:
    """Write -inf to logits [R, vocab] for tokens that constrained requests may not have. All other rows stay."""
    bound = [i for i, request in enumerate(requests) if request.following is not None]
    found = Masks()
    if not bound:
        return found
    words = max((logits.shape[1] + 31) // 32, *(requests[i].following.words for i in bound))
    on_gpu = logits.is_cuda
    packed = torch.empty(len(bound), words, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
    table = packed.numpy()
    with requests[bound[0]].following.timer.timed("mask"):
        for i in bound:
            if rows[i] not in found.place:  # answers to one prompt begin with the same mask
                _fill(found, i, requests, rows, table)
    if found.place:
        count = len(found.place)
        numbers = torch.tensor(list(found.place), dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        found.packed, numbers = _sent(packed[:count], numbers, logits.device)
        mask_rows(logits, found.packed, numbers)
    return found


def _fill(found: Masks, i: int, requests: Sequence[Request], rows: Sequence[int], table: np.ndarray) -> None:
    at = len(found.place)
    try:
        if requests[i].following.fill(table[at]):
            found.place[rows[i]] = at
    except (Exception, SystemExit) as problem:  # what a grammar raises is its own request's
        for j, other in enumerate(requests):
            if rows[j] == rows[i] and other.following is not None:
                found.failed[j] = f"structured output failed: {problem}"


def _sent(packed: Tensor, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    if device.type != "cuda":
        return packed, rows
    beside, main = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(beside):
        sent = packed.to(device, non_blocking=True), rows.to(device, non_blocking=True)
    main.wait_stream(beside)
    for tensor in sent:
        tensor.record_stream(main)  # its memory is not given out again before the kernel has read it
    return sent


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
