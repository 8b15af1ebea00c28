"""Lookup: what of a prompt others have read, and what a request takes up of it. `load` copies it from the host first;
nothing else here changes what is kept.

How a request then begins with a hit is reuse.py's; whether there is room for it admission's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from hybridkv.cache.checkpoints import Checkpoint, Checkpoints
from hybridkv.cache.columns import Column, Columns, on_device
from hybridkv.cache.host_columns import Load
from hybridkv.cache.tails import find_tail, full_pages, tail_rows
from hybridkv.cache.tiers import Timer

if TYPE_CHECKING:
    from hybridkv.cache.reuse import Reuse

# why not more of a prompt was reused
Reason = Literal[
    "cold", "diverged", "no_checkpoint", "dropped", "window", "bounded", "loading_slower", "too_short", "off", "full"
]


@dataclass(frozen=True)
class Asked:
    """What a prompt may take up."""

    salt: bytes  # prompts of other salts are never seen
    tokens: np.ndarray  # [T] int32
    most: int  # tokens that need not be computed at the most
    reach: int  # tokens whose pages may be shared at the most: its first eviction
    limit: Reason = "full"  # what sets `most`
    marks: Sequence[tuple[int, str]] = ()  # positions at which a checkpoint is wished, with a Kind
    reads: bool = True
    writes: bool = True


@dataclass(frozen=True)
class Hit:
    """What a prompt takes up."""

    path: list[Column]  # whose pages are shared
    checkpoint: Checkpoint | None
    cached: int  # tokens that are not computed
    matched: int  # tokens whose pages are shared: those behind `cached` are read for the state alone
    reason: Reason  # why not more
    diverged_at: int | None = None  # the first token that is in no column
    keys: bytes = b""
    tail: Column | None = None  # whose pages are shared, too, behind those of the path
    load: Load | None = None  # what more there is on the host, if copying it is quicker than reading
    loaded: int = 0  # of the cached tokens those that came from the host just now
    timer: Timer | None = None  # how long that took

    @property
    def reaches(self) -> int:
        """Tokens that need not be computed, those included that are still on the host."""
        return self.cached if self.load is None else self.load.cached


def look_up(reuse: Reuse, asked: Asked) -> Hit:
    """What of a prompt is there. Nothing changes."""
    length, q = len(asked.tokens), reuse.q
    keys = Columns.keys(asked.tokens)
    if not asked.reads:
        return Hit([], None, 0, 0, "off", keys=keys)
    whole = reuse.columns.match(asked.salt, keys, min(length, asked.reach))
    path = on_device(whole)
    matched = path[-1].end if path else 0
    checkpoint = Checkpoints.deepest(path, asked.most) if reuse.has_state else None
    if reuse.has_state:
        cached = checkpoint.position if checkpoint is not None else 0
    else:
        cached = min(matched, asked.most)
    tail = find_tail(reuse, asked.salt, path, keys, min(asked.most, asked.reach), cached)
    if tail is not None:
        cached = tail.end
        checkpoint = tail.checkpoint if isinstance(tail.checkpoint, Checkpoint) else None
        tail = tail if tail.end > matched else None  # else the columns behind it have its tokens
    usable, limit = min(matched, asked.most // q * q), asked.most // q * q
    root = reuse.columns.roots.get(asked.salt)
    at = None
    if root is not None and len(whole) < length // q:
        at = len(whole) * q + reuse.columns.agrees(whole[-1] if whole else root, keys)
    load = reuse.host.offer(whole, asked.most, cached) if whole else None
    reason: Reason
    if load is not None and not reuse.host.pays(load, cached):
        load, reason = None, "loading_slower"
    elif limit < q:
        if cached:  # of the end of a turn
            reason = "full" if cached >= asked.most else "diverged"
        else:
            reason = "too_short" if length - 1 < q else asked.limit
    elif not matched and not cached:
        reason = "cold"
    elif cached < usable:
        lost = any(column.lost for column in path if cached < column.end <= usable)
        reason = "dropped" if lost else "no_checkpoint"
    elif usable == limit:
        reason = asked.limit if matched > usable and limit < (length - 1) // q * q else "full"
    else:
        reason = "diverged"
    return Hit(path, checkpoint, cached, max(matched, cached), reason, at, keys, tail, load)


def load(reuse: Reuse, asked: Asked) -> Hit:
    """What there is of a prompt once what lies on the host has been copied, or failed to be. The copies come before
    all that is launched from here on.
    """
    reuse.settle_late()  # else it might bring the same columns while they are copied
    hit = look_up(reuse, asked)  # what was found may have made room for others since
    timer = reuse.host.load(hit.load) if hit.load is not None else None
    found = replace(look_up(reuse, asked), load=None)
    if timer is None:
        return found
    loaded = max(0, found.cached - hit.cached)
    reuse.host.counts["tokens loaded"] += loaded
    return replace(found, loaded=loaded, timer=timer)


def pages_of(reuse: Reuse, hit: Hit) -> dict[str, int]:
    """Pages of each pool that a hit saves its request."""
    whole = {name: len(hit.path) * streams * per for name, (_, streams, per) in reuse.parts.items()}
    return {name: pages + full_pages(reuse, hit.tail, name) for name, pages in whole.items()}


def pages_to_load(reuse: Reuse, hit: Hit) -> dict[str, int]:
    """Pages of each pool that what is copied from the host takes: they are the request's, too."""
    columns = 0 if hit.load is None else len(hit.load.columns)
    return {name: columns * streams * per for name, (_, streams, per) in reuse.parts.items()}


def would_keep(reuse: Reuse, hit: Hit) -> dict[str, int]:
    """Pages of each pool that count as to be had, and no longer do once the hit is attached."""
    found = {}
    for name in reuse.parts:
        ids, allocator = reuse.column_pages.ids(hit.path, name).ravel(), reuse.manager.tables[name].allocator
        ids = np.concatenate((ids, tail_rows(reuse, hit.tail, name).ravel()))
        found[name] = int(np.count_nonzero(allocator.refs[ids] == allocator.spare[ids]))
    return found
