"""Compacting: a compaction that the device carries out while the host goes on.

Survivors move to the front of their stream's own pages, by lists that are on the device (kernels/eviction/to_front.py),
or, where others own those pages too, into fresh ones (to_fresh.py), which belong to the compaction until it is settled.
The lists follow to the host in a copy that nothing waits for. Until they have come, the host's tables say what they
said before: the request holds all its pages, and no step may run it. The manager settles it then, or when somebody asks
for what it holds: pages that emptied are free, and lengths and positions are those of the survivors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.facts import Compaction


@dataclass(frozen=True)
class Survivors:
    """What the device chose."""

    counts: np.ndarray  # [streams]
    flags: np.ndarray  # any that is not 0: nothing was moved
    lists: list[np.ndarray]  # of each stream its entries, ascending


@dataclass(eq=False)
class Compacting:
    """One request's streams of one schema, being compacted. `settled`: the manager's tables follow it."""

    name: str  # of the schema
    position: int  # of the request
    lengths: np.ndarray  # [streams] entries before
    before: Compaction | None  # what was dropped earlier
    flags: int  # how many there are
    report: Tensor  # on the device, as to_front writes it
    fresh: np.ndarray | None = None  # pages that the survivors go to, stream after stream; None: their own
    settled: bool = False
    _host: Tensor = field(init=False)
    _ready: torch.cuda.Event | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._host = self.report
        if self.report.is_cuda:
            self._host = torch.empty(self.report.shape, dtype=self.report.dtype, device="cpu", pin_memory=True)
            self._host.copy_(self.report, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def ready(self) -> bool:
        """Whether the lists have come."""
        return self._ready is None or self._ready.query()

    @cached_property
    def survivors(self) -> Survivors:
        """What was chosen. The host waits until it is there."""
        if self._ready is not None:
            self._ready.synchronize()
        host, streams = self._host.numpy(), len(self.lengths)
        counts, flags = host[:streams].astype(np.int64), host[streams : streams + self.flags].copy()
        ends = [0, *np.cumsum(counts).tolist()]
        entries = host[streams + self.flags :][: ends[-1]].astype(np.int64)
        return Survivors(counts, flags, [entries[a:b] for a, b in pairwise(ends)])

    def compaction(self) -> Compaction:
        """What the request holds of its past then."""
        kept, before = self.survivors.lists, self.before  # entries that were never moved are numbered by positions
        if before is None:
            return Compaction(self.position, {self.name: kept})
        where = {name: before.positions(name, self.position) for name in before.kept}
        if self.name in where:
            kept = [at[entries] for at, entries in zip(where[self.name], kept, strict=True)]
        return Compaction(self.position, where | {self.name: kept})
