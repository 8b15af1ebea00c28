"""Columns that were read before anybody asked for them (engine/warm.py): which they are, what came of them, and how far
the reading can be taken up again.

They are columns as all others, and go as all others when pages are needed. Each is marked until a prompt has used it:
from then on it would have been read anyway. Marked ones below a text's columns are what was read ahead of its next
turn, so they go when the text is forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from hybridkv.cache.checkpoints import Checkpoint, Kind
from hybridkv.cache.columns import Column
from hybridkv.cache.publishing import column_at, last_column

if TYPE_CHECKING:
    from hybridkv.cache.lookup import Hit
    from hybridkv.cache.reuse import Reuse

COUNTS = "warm_tokens warm_hits warm_hit_tokens"  # read ahead; prompts that began with such, and their tokens of it
WARM: Kind = "warm"


def note_read(reuse: Reuse, request: Hashable, tokens: int) -> None:
    """So many tokens more were read ahead by a resident request, and what it wrote is there for all."""
    reading = reuse.readings[request]
    reuse.counts["warm_tokens"] += tokens
    column, own = reading.column, reading.own
    while own is not None and column.end >= own.end and not column.warm:
        column.warm = True
        assert column.parent is not None
        column = column.parent


def count_hit(reuse: Reuse, hit: Hit) -> None:
    """A prompt begins with a hit: what of it was read ahead has been of use."""
    if not reuse.counts["warm_tokens"]:
        return
    used = [column for column in hit.path if column.warm]
    found = sum(reuse.q for column in used if column.end <= hit.cached)
    reuse.counts["warm_hits"] += found > 0
    reuse.counts["warm_hit_tokens"] += found
    for column in used:
        column.warm = False


def keep_state(reuse: Reuse, request: Hashable, before: Checkpoint | None = None) -> Checkpoint | None:
    """The state of a resident request stays at the column where it stands; None: there is none, or no row for it.

    `before`: where the same reading was kept last, which goes if nobody has used it.
    """
    manager, reading = reuse.manager, reuse.readings.get(request)
    if reading is None or not reading.writes or not reuse.has_state:
        return None
    slot = manager.slot_of[request]
    position = int(manager.positions[slot])
    column = column_at(last_column(reuse.columns, reading), position)
    if column.parent is None or column.end != position or column.pages is None:
        return None
    if column.checkpoint is None:
        row = reuse.checkpoints.reserve()
        if row is None:
            return None
        manager.state.copy(slot, row)
        reuse.checkpoints.add(column, row, WARM)
        reuse.host.forget_state(column)  # it may have other bits
    made = column.checkpoint
    assert isinstance(made, Checkpoint)
    there = before is not None and before is not made and reuse.checkpoints.all.get(before.row) is before
    if before is not None and there and before.kind == WARM and not before.uses and not before.pins:
        reuse.checkpoints.drop(before)
        before.column.lost = False  # it made room for nobody
    return made


def drop_unused(reuse: Reuse, path: Sequence[Column]) -> None:
    """What was read ahead below these columns, not being one of them, and nobody has used, goes."""
    inside = {id(column) for column in path}
    for column in path:
        below = [child for child in column.children.values() if child.warm and id(child) not in inside]
        for each in below:
            below += each.children.values()
        for each in reversed(below):
            if each.warm and not each.children and not each.live:
                reuse.cut(each)
