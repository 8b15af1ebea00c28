"""StepIndex: which request and which position each token of a step has, on the device, in one upload.

    tokens           [ a | b | c c c c c | d d d ]       T = 10, B = 4
    token_to_req     [ 0 | 1 | 2 2 2 2 2 | 3 3 3 ]       request row of a token
    positions        [ 9 | 4 | 0 1 2 3 4 | 7 8 9 ]       absolute
    num_computed     [ 9, 4, 0, 7 ]                      tokens each request had seen before
    query_start_loc  [ 0, 1, 2, 7, 10 ]                  first token of each request
    slots            [ 5, 0, 3, 1 ]                      state row of each request; -1: padding

A row of padding (a captured graph has more rows than requests) has slot -1: no op writes for it or reads its past.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class StepIndex:
    slots: Tensor  # [B] int64
    num_computed: Tensor  # [B] int64
    query_start_loc: Tensor  # [B + 1] int64
    token_to_req: Tensor  # [T] int64
    positions: Tensor  # [T] int64

    @staticmethod
    def host(slots: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
        """The five arrays, int64, for requests of `counts` new tokens each."""
        starts = np.concatenate(([0], np.cumsum(counts)))
        owner = np.repeat(np.arange(len(slots)), counts)
        positions = begins[owner] + np.arange(len(owner)) - starts[owner]
        return tuple(np.asarray(x, np.int64) for x in (slots, begins, starts, owner, positions))

    @staticmethod
    def make(slots: list[int], begins: list[int], counts: list[int], device: torch.device | str = "cpu") -> StepIndex:
        """For tests and benchmarks; the manager packs its own."""
        arrays = StepIndex.host(*(np.array(x, np.int64) for x in (slots, begins, counts)))
        return StepIndex(*(torch.from_numpy(x).to(device) for x in arrays))

    @property
    def token_slots(self) -> Tensor:
        """State row of each token [T]; -1: padding."""
        return self.slots[self.token_to_req]

    def part(self, begin: int, end: int) -> StepIndex:
        """The same for tokens begin .. end - 1 alone; requests without a token among them stay, empty."""
        if begin == 0 and end >= len(self.token_to_req):
            return self
        rows, end = slice(begin, end), min(end, len(self.token_to_req))
        first = (self.query_start_loc - begin).clamp(0, end - begin)
        begins = self.num_computed + (first[:-1] + begin - self.query_start_loc[:-1])
        return StepIndex(self.slots, begins, first, self.token_to_req[rows], self.positions[rows])
