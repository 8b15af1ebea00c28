"""StepIndex: which request and which position each token of a step has. Made on the host, sent in one upload.

    tokens           [ a | b | c c c c c | d d d ]       T = 10, B = 4
    token_to_req     [ 0 | 1 | 2 2 2 2 2 | 3 3 3 ]       request row of a token
    positions        [ 9 | 4 | 0 1 2 3 4 | 7 8 9 ]       absolute
    num_computed     [ 9, 4, 0, 7 ]                      tokens each request had seen before
    query_start_loc  [ 0, 1, 2, 7, 10 ]                  first token of each request
    slots            [ 5, 0, 3, 1 ]                      state row of each request; -1: padding

A row of padding (a captured graph has more rows than requests) has slot -1: no op writes for it or reads its past.
`HostIndex` is the same in numpy, where Python reads it.

A step that a graph replays has the graph's shape, whatever its requests are. Missing requests have no tokens, but for
the last row, a prompt of padding that holds all tokens that are missing:

    tokens           [ a | b | c c c c c | - - - ]       shape: T = 10, 4 rows for decoding requests, 3 for prompts
    query_start_loc  [ 0, 1, 2, 2, 2, 7, 7, 10 ]
    slots            [ 5, 0, -1, -1, 3, -1, -1 ]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class StepShape(NamedTuple):
    """What a captured step has room for."""

    tokens: int
    decodes: int  # requests with one new token
    chunks: int  # prompts, that of padding included


@dataclass(frozen=True)
class HostIndex:
    """The requests of a step and their tokens, on the host. Requests with one new token come first."""

    slots: np.ndarray  # [B] int64; -1: padding
    num_computed: np.ndarray  # [B] int64
    num_scheduled: np.ndarray  # [B] int64, new tokens of each request
    decodes: int | None = None  # rows for requests with one new token; None: as many as there are

    @staticmethod
    def padding(rows: int) -> HostIndex:
        """One-token requests that do not exist."""
        return HostIndex(np.full(rows, -1), np.zeros(rows, np.int64), np.ones(rows, np.int64))

    def padded(self, rows: int) -> HostIndex:
        """The same requests and padding, `rows` in all."""
        missing = self.padding(rows - len(self.slots))
        return HostIndex(
            np.concatenate((self.slots, missing.slots)),
            np.concatenate((self.num_computed, missing.num_computed)),
            np.concatenate((self.num_scheduled, missing.num_scheduled)),
        )

    def shaped(self, shape: StepShape) -> HostIndex:
        """The same requests in a step of this shape, or ValueError."""
        n, total = self.num_decodes, int(self.num_scheduled.sum())
        missing = shape.decodes - n, shape.chunks - (len(self.slots) - n), shape.tokens - total
        if missing[0] < 0 or missing[1] < 1 or missing[2] < 0:
            raise ValueError(f"{n} + {len(self.slots) - n} requests with {total} tokens do not make a step of {shape}")

        def joined(x: np.ndarray, value: int, last: int) -> np.ndarray:
            rest = [value] * (missing[1] - 1)
            return np.concatenate((x[:n], [value] * missing[0], x[n:], rest, [last])).astype(np.int64)

        return HostIndex(
            joined(self.slots, -1, -1),
            joined(self.num_computed, 0, 0),
            joined(self.num_scheduled, 0, missing[2]),
            shape.decodes,
        )

    @cached_property
    def real(self) -> np.ndarray:
        """Rows that are requests, ascending."""
        return np.flatnonzero(self.slots >= 0)

    @cached_property
    def num_decodes(self) -> int:
        """Rows for requests with one new token; they come first."""
        return int(np.count_nonzero(self.num_scheduled == 1)) if self.decodes is None else self.decodes

    @cached_property
    def query_start_loc(self) -> np.ndarray:  # [B + 1]
        if self.num_decodes == len(self.slots):
            return np.arange(len(self.slots) + 1)
        return np.concatenate(([0], np.cumsum(self.num_scheduled)))

    @cached_property
    def token_to_req(self) -> np.ndarray:  # [T]
        if self.num_decodes == len(self.slots):
            return np.arange(len(self.slots))
        return np.repeat(np.arange(len(self.slots)), self.num_scheduled)

    @cached_property
    def positions(self) -> np.ndarray:  # [T]
        if self.num_decodes == len(self.slots):
            return self.num_computed
        first = self.num_computed - self.query_start_loc[:-1]
        return np.arange(len(self.token_to_req)) + first[self.token_to_req]

    @property
    def chunks(self) -> HostIndex:
        """The prompt chunks alone."""
        n = self.num_decodes
        return HostIndex(self.slots[n:], self.num_computed[n:], self.num_scheduled[n:])

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The five arrays of a StepIndex, in the order of its fields."""
        return self.slots, self.num_computed, self.query_start_loc, self.token_to_req, self.positions

    def query_rows(self, window: int, buffers: np.ndarray) -> np.ndarray:
        """[T] row of a token's query among those of all query buffers: buffer * window + position mod window for the
        last `window` tokens of each request, -1 for the others. `buffers`: of each slot; -1: it has none.
        """
        request = self.token_to_req
        buffer = np.where(self.slots >= 0, buffers[self.slots], -1)[request]
        to_end = self.query_start_loc[1:][request] - np.arange(len(request))  # 1 for a request's last token
        kept = (to_end <= window) & (buffer >= 0)
        return np.where(kept, buffer * window + self.positions % window, -1)


@dataclass(frozen=True)
class StepIndex:
    slots: Tensor  # [B] int64
    num_computed: Tensor  # [B] int64
    query_start_loc: Tensor  # [B + 1] int64
    token_to_req: Tensor  # [T] int64
    positions: Tensor  # [T] int64

    @staticmethod
    def make(
        slots: list[int], num_computed: list[int], num_scheduled: list[int], device: torch.device | str = "cpu"
    ) -> StepIndex:
        """For tests and benchmarks; the manager sends its own with the rest of a step."""
        made = [np.array(x, np.int64) for x in (slots, num_computed, num_scheduled)]
        host = HostIndex(made[0], made[1], made[2])
        return StepIndex(*(torch.from_numpy(np.asarray(x, np.int64)).to(device) for x in host.arrays))

    @property
    def token_slots(self) -> Tensor:
        """State row of each token [T]; -1: padding."""
        return self.slots[self.token_to_req]

    def part(self, begin: int, end: int) -> StepIndex:
        """The same for tokens begin .. end - 1 alone; requests without a token among them stay, empty."""
        if begin == 0 and end >= len(self.token_to_req):
            return self
        end = min(end, len(self.token_to_req))
        tokens = slice(begin, end)
        first = (self.query_start_loc - begin).clamp(0, end - begin)
        num_computed = self.num_computed + (first[:-1] + begin - self.query_start_loc[:-1])
        return StepIndex(self.slots, num_computed, first, self.token_to_req[tokens], self.positions[tokens])
