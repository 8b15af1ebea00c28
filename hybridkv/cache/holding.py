"""Holding: what a request holds, to be read wherever it lies: in a slot, frozen, or with its pages on the host.

Whoever saves a cache reads it here, run by run, so that no more than a run is copied at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.facts import Compaction
from hybridkv.cache.frozen import exported_pages, state_of
from hybridkv.cache.manager import KVCacheManager
from hybridkv.cache.page_table import places_of
from hybridkv.cache.schema import StreamSchema
from hybridkv.errors import RequestError


@dataclass(frozen=True)
class Holding:
    """All that a request holds. It is read while nothing else happens to the request."""

    position: int
    lengths: dict[str, np.ndarray]  # stream schema -> [streams] entries
    compaction: Compaction | None
    schemas: dict[str, StreamSchema]
    pages: dict[str, np.ndarray]  # stream schema -> [streams, N] page numbers
    pools: Mapping[str, Mapping[str, Tensor]]  # stream schema -> tensor -> [lanes, pages, entries, ...]
    states: Callable[[], dict[tuple[str, str], Tensor]]  # copies on the host, [layers, *shape]
    pinned: bool = False  # of a GPU: whether what is read lies in pinned memory

    def read(self, name: str, begin: np.ndarray, count: np.ndarray) -> dict[str, Tensor]:
        """[lanes, all entries, ...] on the host: `count` [streams] entries of each stream from `begin` [streams] on,
        stream after stream.
        """
        at = places_of(self.schemas[name], self.pages[name], begin, count)
        found = {}
        for key, pool in self.pools[name].items():
            flat = pool.view(pool.shape[0], -1, *pool.shape[3:])
            found[key] = to_host(flat[:, at.to(pool.device)], self.pinned)
        return found


def to_host(tensor: Tensor, pinned: bool = False) -> Tensor:
    """A tensor on the host, in pinned memory where it comes from a GPU and that is asked for."""
    if not (pinned and tensor.is_cuda):
        return tensor.cpu()
    place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return place.copy_(tensor)  # waits for the copy


def holding(manager: KVCacheManager, request: Hashable, pinned: bool = False) -> Holding:
    """What the request holds, or RequestError: it is not there, or its state is not that of its position.

    `pinned`: what is read of a GPU is to lie in pinned memory.
    """
    schemas: dict[str, Any] = {name: table.schema for name, table in manager.tables.items()}
    frozen = manager.frozen.get(request)
    if frozen is not None:
        pages, pools = frozen.pages, {name: table.pool.tensors for name, table in manager.tables.items()}
        if frozen.exported is not None:
            pages, pools = exported_pages(manager, frozen)
        window_start = max(0, frozen.position - (manager.schema.query_window or 0))
        lent = {(s.name, t.name) for s in manager.schema.states if s.lent for t in s.tensors}
        left_out = lent if frozen.since > window_start else set()  # queries before that are missing in it
        return Holding(
            frozen.position,
            manager.lengths(request),
            frozen.compaction,
            schemas,
            pages,
            pools,
            lambda: {key: t for key, t in state_of(manager, frozen).items() if key not in left_out},
            pinned,
        )
    slot = manager.slot_of.get(request)
    if slot is None:
        raise RequestError(f"request {request!r} is not resident; it was released or never admitted")
    manager.settle(request)
    manager.check_committed(slot)
    position = int(manager.positions[slot])
    buffer = manager.query_buffers.whole(slot, max(0, position - (manager.schema.query_window or 0)))
    return Holding(
        position,
        manager.lengths(request),
        manager.compactions.get(slot),
        schemas,
        {name: table.pages[slot] for name, table in manager.tables.items()},
        {name: table.pool.tensors for name, table in manager.tables.items()},
        lambda: {key: to_host(t, pinned) for key, t in manager.state.snapshot(slot, buffer).items()},
        pinned,
    )
