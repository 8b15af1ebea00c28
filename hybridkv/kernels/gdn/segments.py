"""Segments: the prompt chunks of a step, cut into the 64-token parts that the delta rule takes at once.

    tokens   [ a a a .. a (100) | b b b (3) | - - (padding) ]      starts = [0, 100, 103, 105], slots = [7, 2, -1]
    parts    a: 0 .. 63, a: 64 .. 99, b: 100 .. 102, -: 103 .. 104, and such with no tokens, if more were asked for
    ends     [2, 3, 4]                                             parts of all prompts up to this one

A part says all that a program needs to know of its prompt, so that it waits for one read before it asks for its data.
All of it is made on the device from `starts`, so that a captured graph makes it anew from what a replay brings. The
number of parts is fixed beforehand: `most_parts` is enough for any division of so many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.kernels.attention.prefill_plan import dealt
from hybridkv.kernels.gdn.rule import CHUNK

Span = tuple[int, int, int]  # slot, first token, end


@dataclass(frozen=True)
class Segments:
    slots: Tensor  # [C] int64 state row of each prompt; -1: padding
    starts: Tensor  # [C + 1] int64: prompt i has the tokens starts[i] .. starts[i + 1] - 1
    parts: Tensor  # [N, 4] int64: slot, begin and end of the prompt, first token; no part: slot -1, token end
    ends: Tensor  # [C] int64
    spans: list[Span] | None = None  # the same on the host; None in a graph, which serves any division

    @staticmethod
    def make(slots: Tensor, starts: Tensor, count: int, spans: list[Span] | None = None) -> Segments:
        """With room for `count` parts, which must be enough."""
        begin, end = starts[:-1], starts[1:]
        each = (end - begin + (CHUNK - 1)) // CHUNK
        prompt, number = dealt(each, count)
        there, begin, end = number >= 0, begin[prompt], end[prompt]
        slot, first = torch.where(there, slots[prompt], -1), torch.where(there, begin + number * CHUNK, end)
        return Segments(slots, starts, torch.stack((slot, begin, end, first), 1), each.cumsum(0), spans)

    @staticmethod
    def of(spans: Sequence[Span], device: torch.device) -> Segments:
        """Of neighbours, from the host."""
        starts = torch.tensor([spans[0][1], *(end for _, _, end in spans)])
        slots = torch.tensor([slot for slot, _, _ in spans])
        count = sum(-(-(end - begin) // CHUNK) for _, begin, end in spans)
        return Segments.make(slots.to(device), starts.to(device), count, list(spans))


def most_parts(tokens: int, prompts: int) -> int:
    """Parts that so many tokens of so many prompts have at the most."""
    return tokens // CHUNK + prompts


def pieces(spans: Sequence[Span], most: int) -> list[list[Span]]:
    """Neighbouring spans of at most `most` tokens together; a longer one is cut at multiples of that from its start."""
    found: list[list[Span]] = []
    room = 0
    for slot, begin, end in spans:
        for first in range(begin, end, most):
            last = min(first + most, end)
            if last - first > room or first > begin:
                found.append([])
                room = most
            found[-1].append((slot, first, last))
            room -= last - first
    return found
