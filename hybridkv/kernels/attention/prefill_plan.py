"""Which queries and keys go together in a launch of attention_prefill. Plans are made once a step: on the host, or, for
a captured graph, on the device (DevicePlan), from what a replay brings.

`query_blocks` cuts queries into the blocks of one program each, for both kernels. The rest is for the Hopper kernel:
`dequantised_parts` puts requests together, or cuts a long one, so that no more than `piece` keys are dequantised at
once, and `key_splits` says over how many programs the keys of a block are split (`graph_splits` in a graph).
"""

from __future__ import annotations

from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.attention.dequantise import KEYS

ROWS = 128  # query rows of a block of the Hopper kernel
PIECE = 32768  # keys that are dequantised at once, in all


@lru_cache(maxsize=32)
def query_blocks(starts: tuple[int, ...], rows: int, group: int, device: torch.device) -> Tensor:
    """[blocks, 4] int32: request, its first query, its number of queries, the block's first row (query * group + head).

    The same for every layer of a step. The blocks that read the most keys come first.
    """
    blocks = [
        (b, begin, end - begin, row)
        for b, (begin, end) in enumerate(pairwise(starts))
        for row in range(0, (end - begin) * group, rows)
    ]
    return torch.tensor(blocks[::-1], dtype=torch.int32).view(-1, 4).to(device)


@cache
def token_blocks(count: int, rows: int, group: int, device: torch.device) -> Tensor:
    """query_blocks of so many requests with one query each. It lives on, as captured graphs hold it."""
    return query_blocks.__wrapped__(tuple(range(count + 1)), rows, group, device)


class Part(NamedTuple):
    """Requests whose keys are dequantised together, or a piece of one request's keys."""

    requests: tuple[int, int]  # from, to
    first: int  # key
    last: int  # key, exclusive
    tiles: Tensor  # [tiles, 2] int32, as `dequantise` takes them
    table: Tensor  # [B, G, N] int32: the tiles of each stream of these requests


@lru_cache(maxsize=32)
def dequantised_parts(lengths: tuple[int, ...], G: int, piece: int, device: torch.device) -> list[Part]:
    """The parts of a step, by the longest stream of each request: the same for every layer."""
    spans: list[tuple[int, int, int, int]] = []  # requests from, to; keys from, to
    total = piece + 1  # keys of the open part; more than a piece: no part is open
    for b, length in enumerate(lengths):
        size = max(1, -(-length // KEYS)) * KEYS
        if total + size <= piece:
            spans[-1] = (spans[-1][0], b + 1, 0, max(spans[-1][3], length))
            total += size
        else:
            spans += [(b, b + 1, first, min(first + piece, length)) for first in range(0, max(length, 1), piece)]
            total = size if size <= piece else piece + 1
    parts = []
    for b_first, b_last, first, last in spans:
        counts = [max(1, -(-(min(lengths[b], last) - first) // KEYS)) for b in range(b_first, b_last)]
        tiles = [(b, first + i * KEYS) for b, count in zip(range(b_first, b_last), counts) for i in range(count)]
        table = np.full((len(counts), G, max(counts)), -1, np.int32)
        for b, (count, at) in enumerate(zip(counts, np.cumsum([0, *counts]))):
            table[b, :, :count] = np.arange(G)[:, None] * len(tiles) + at + np.arange(count)
        plan = torch.tensor(tiles, dtype=torch.int32).view(-1, 2).to(device)
        parts.append(Part((b_first, b_last), first, last, plan, torch.from_numpy(table).to(device)))
    return parts


def key_splits(programs: int, keys: int, outputs: int, processors: int) -> int:
    """Over how many programs the keys of a block are split: more than one where too few programs would fill the card.

    The costs were measured on an H200, in units of one key in one program (about 0.02 us): a program costs 200 beside
    its keys, joining the splits 1e-4 for each number of the output.
    """

    def cost(splits: int) -> float:
        return -(-programs * splits // processors) * (keys / splits + 200) + (splits > 1) * splits * outputs * 1e-4

    return min(range(1, 17), key=cost)


def graph_splits(programs: int, processors: int) -> int:
    """The same for a graph, which does not know how many keys there will be."""
    return 1 if programs >= 0.7 * processors else min(8, -(-processors // max(programs, 1)))


class DevicePlan:
    """The prompt chunks of a step that is captured. The last one is padding, and so is what no chunk needs."""

    def __init__(self, starts: Tensor, tokens: int, longest: Tensor) -> None:
        self.starts = starts  # [C + 1] int64: prompt i has the queries starts[i] .. starts[i + 1] - 1
        self.tokens = tokens  # of the step, at the most
        self.longest = longest  # [C] entries of each prompt's longest stream; 0: padding
        self._blocks: dict[tuple[int, int], Tensor] = {}
        self._tables: dict[int, Tensor] = {}

    def blocks(self, rows: int, group: int) -> Tensor:
        """As `query_blocks`, with as many blocks as there can be."""
        if (rows, group) not in self._blocks:
            prompts = len(self.starts) - 1
            begin, count = self.starts[:-1], self.starts[1:] - self.starts[:-1]
            each = (count * group + (rows - 1)) // rows
            prompt, number = dealt(each, self.tokens * group // rows + prompts)
            prompt, number = prompt.flip(0), number.flip(0)
            there = number >= 0
            columns = prompt, begin[prompt], torch.where(there, count[prompt], 0), number.clamp(min=0) * rows
            self._blocks[rows, group] = torch.stack(columns, 1).to(torch.int32)
        return self._blocks[rows, group]

    @cached_property
    def tiles(self) -> Tensor:
        """[PIECE / KEYS + C, 2] int32, as `dequantise` takes them: all keys, which may be PIECE at the most."""
        prompt, number = dealt(self._each, PIECE // KEYS + len(self.longest))
        return torch.stack((prompt, torch.where(number >= 0, number * KEYS, -1)), 1).to(torch.int32)

    def table(self, G: int) -> Tensor:
        """[C, G, N] int32: the tiles of each stream."""
        if G not in self._tables:
            device = self.longest.device
            first = self._each.cumsum(0) - self._each
            streams = torch.arange(G, device=device)[:, None] * len(self.tiles)
            table = first[:, None, None] + streams + torch.arange(PIECE // KEYS, device=device)
            self._tables[G] = table.to(torch.int32)
        return self._tables[G]

    @cached_property
    def _each(self) -> Tensor:
        return (self.longest + (KEYS - 1)) // KEYS


def dealt(each: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Deal out `count` things, each[0] to the first owner, each[1] to the next: owner and number among the owner's.

    What is left is the last owner's and has the number -1.
    """
    ends = each.cumsum(0)
    number = torch.arange(count, device=each.device)
    owner = torch.searchsorted(ends, number, right=True)
    there = owner < len(each)
    owner = owner.clamp(max=len(each) - 1)
    return owner, torch.where(there, number - ends[owner] + each[owner], -1)


def fits_graph(longest: list[int], piece: int = PIECE) -> bool:
    """Whether prompts of so many keys can be dequantised by a graph: at once."""
    return sum(-(-keys // KEYS) for keys in longest) * KEYS <= piece
