"""Evictions that the device carries out while the host goes on: what the host does when their lists have come.

    Evictor.start    scores, choice and moves are launched; Request.evicting is set, and the request does not run
    finish           pages go back, lengths are those of the survivors, the request remembers what was kept

In between the request holds all its pages. What is launched later in the same stream comes after the moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.cache import KVCacheManager
from hybridkv.cache.compacting import Compacting
from hybridkv.eviction.keep import refuse_broken
from hybridkv.eviction_record import EvictionRecord
from hybridkv.request import Request


@dataclass(frozen=True)
class UnderWay:
    """One eviction of one request."""

    compacting: Compacting
    policy: str  # what it is called, `auto` resolved


def is_ready(request: Request) -> bool:
    """Whether the request can go on without waiting: nothing is under way, or its lists have come."""
    return not isinstance(request.evicting, UnderWay) or request.evicting.compacting.ready()


def finish(request: Request, manager: KVCacheManager) -> int:
    """Do the bookkeeping of what is under way; the host waits for it. Returns the pages that went back.

    HybridKVError where scores were broken: then nothing was evicted. May be repeated, after an interrupt.
    """
    under_way = request.evicting
    if not isinstance(under_way, UnderWay):
        return 0
    compacting = under_way.compacting
    found, layers = compacting.survivors, compacting.flags
    if found.flags.any():
        manager.settle(request.key)
        request.evicting = None
        refuse_broken(found.flags)
    lengths = compacting.lengths.reshape(layers, -1)  # [layers, G]
    lists, G = found.lists, lengths.shape[1]
    record = EvictionRecord([lists[i : i + G] for i in range(0, len(lists), G)], lengths)
    freed = manager.settle(request.key)
    at = compacting.position
    for earlier in [record for position, record in request.evictions.items() if position != at][-1:]:
        earlier.pack()
    request.evictions = {**request.evictions, at: record}
    request.policy = under_way.policy
    request.evicting = None
    return freed
