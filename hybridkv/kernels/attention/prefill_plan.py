"""Which queries and keys go together in a launch of attention_prefill. Plans are made on the host, once a step.

`query_blocks` cuts queries into the blocks of one program each, for both kernels. The rest is for the Hopper kernel:
`dequantised_parts` puts requests together, or cuts a long one, so that no more than `piece` keys are dequantised at
once, and `key_splits` says over how many programs the keys of a block are split.
"""

from __future__ import annotations

from functools import lru_cache
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
