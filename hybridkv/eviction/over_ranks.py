"""OverRanks: what an eviction on one rank of several must know of the others.

A rank holds some KV heads, or one that other ranks hold too. Most scores are a stream's own, and need nothing more than
the queries of all query heads of the KV head: where those are spread over ranks, they are gathered, and each of these
ranks computes the scores that one rank would. What compares streams, a list for several heads or a budget that they
share, is decided on every rank for all heads, by the same code and numbers, and each takes its own part.

    queries     of a KV head that lies on several ranks: gathered before its entries are scored; while a text is read
                again, scores by each rank's queries are, and the largest counts
    attention   of all heads of a layer (TOVA), the strongest peak of each position (Peak): while they are
    scores      of all heads, for scope layer and global and for shared budgets: before the choice

So the lists are those of one rank, up to the rounding of keys and queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.errors import HybridKVError, OutOfPages, OutOfPagesElsewhere
from hybridkv.eviction_record import Keep


class Exchange(Protocol):
    """The part of parallel.Group that is needed here."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def all_gather(self, x: Tensor) -> Tensor:
        """x of every rank: [n, ...]."""


@dataclass(frozen=True)
class OverRanks:
    """This rank's heads among all of them. Every rank makes the same calls in the same order."""

    group: Exchange
    heads: int  # KV heads of the whole model, G

    @property
    def copies(self) -> int:
        """Ranks that hold the same KV head."""
        return max(1, self.group.size // self.heads)

    @property
    def parts(self) -> int:
        """Ranks that hold different ones."""
        return self.group.size // self.copies

    @property
    def own(self) -> slice:
        """This rank's among all KV heads."""
        each = self.heads // self.parts
        first = self.group.rank // self.copies * each
        return slice(first, first + each)

    def queries(self, x: Tensor, dim: int) -> Tensor:
        """This rank's query heads along `dim` -> all that its KV heads have."""
        if self.copies == 1:
            return x
        first = self.group.rank // self.copies * self.copies
        return torch.cat(list(self.group.all_gather(x)[first : first + self.copies]), dim)

    def strongest(self, own: Tensor) -> Tensor:
        """Scores [rows, L] that this rank's query heads give its KV heads -> the largest of all that these have."""
        if self.copies == 1:
            return own
        longest = int(self.largest(torch.tensor([own.shape[1]])))  # others may hold more entries
        return self.queries(F.pad(own, (0, longest - own.shape[1])).unsqueeze(0), 0).amax(0)[:, : own.shape[1]]

    def largest(self, x: Tensor) -> Tensor:
        """Of each number the largest of all ranks."""
        return self.group.all_gather(x).amax(0)

    def each(self, x: Tensor) -> Tensor:
        """[parts, ...] x of every rank; what several ranks have is there once."""
        return self.group.all_gather(x)[:: self.copies]

    def lengths(self, own: np.ndarray) -> np.ndarray:
        """[layers, g] of this rank's heads -> [layers, G] of all, on the host."""
        found = self.each(torch.from_numpy(own.astype(np.int64)))  # [parts, layers, g]
        return found.transpose(0, 1).reshape(len(own), -1).numpy()

    def rows(self, own: Tensor, lengths: np.ndarray) -> Tensor:
        """Scores [layers * g, L] of this rank's streams -> [layers * G, L] of all; `lengths` [layers, G]."""
        layers, longest = len(lengths), int(lengths.max(initial=0))
        own = own[:, :longest]
        found = self.each(F.pad(own, (0, longest - own.shape[1])).view(layers, -1, longest))  # [parts, layers, g, L]
        return found.transpose(0, 1).reshape(-1, longest)

    def agree(self, problem: Exception | None) -> None:
        """Raises on all ranks where something is wrong on one: a rank's own problem, or that another has one."""
        code = 0 if problem is None else 1 if isinstance(problem, OutOfPages) else 2
        codes = self.group.all_gather(torch.tensor([code])).flatten().tolist()
        if problem is not None and code == max(codes):
            raise problem
        if max(codes) == 1:
            raise OutOfPagesElsewhere()
        if max(codes):
            raise HybridKVError(f"rank {codes.index(2)} could not choose what to keep")

    def own_part(self, keep: Keep, alike: bool) -> tuple[Keep, np.ndarray]:
        """Lists of this rank's streams, from those of all or of its own, and what all streams keep: [layers, G].

        `alike`: all heads of a layer keep equally many.
        """
        counts = np.array([[len(entries) for entries in layer] for layer in keep])
        if counts.shape[1] == self.heads:
            return [layer[self.own] for layer in keep], counts
        return keep, np.repeat(counts[:, :1], self.heads, 1) if alike else self.lengths(counts)
