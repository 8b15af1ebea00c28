"""Old turns of a conversation, each evicted down to a budget of its own. All that is not in them stays.

Nothing is remembered about which turns were evicted before: a turn of which a stream holds more than the budget is
evicted, and one that holds no more is left alone. So a turn is evicted once, unless the budget becomes smaller or the
conversation is read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybridkv.cache import KVCacheManager
from hybridkv.eviction.entries import positions
from hybridkv.eviction.evict import Evictor
from hybridkv.eviction.keep import Keep, Protected, choose, joined
from hybridkv.eviction.named import find_policy
from hybridkv.eviction.sizes import STREAMS
from hybridkv.request import Request

END = torch.iinfo(torch.int64).max


def evict_turns(
    evictor: Evictor, request: Request, manager: KVCacheManager, turns: Sequence[tuple[int, int]], budget: int
) -> int:
    """Evict each turn down to `budget` entries a stream. Returns the pages that went back.

    Args:
        request: one that does not run.
        turns: (begin, end) of their positions.
        budget: entries of a turn that a stream keeps; 0: none.

    What the next question will ask is not known, so policy "auto" chooses as for a question that was not seen.
    """
    table, slot = manager.tables[STREAMS], manager.slot_of[request.key]
    lengths = table.lengths[slot].reshape(len(table.schema.layers), -1)  # [layers, G]
    where = manager.entry_positions(request.key, STREAMS)
    excess = {}  # (begin, end) -> [layers, G] entries that have to go
    for begin, end in turns:
        held = np.array([np.diff(np.searchsorted(at, (begin, end)))[0] for at in where]).reshape(lengths.shape)
        excess[begin, end] = np.maximum(held - budget, 0)
    most = torch.tensor([int(gone.max()) for gone in excess.values()])
    if evictor.ranks is not None:
        most = evictor.ranks.largest(most)  # a turn is evicted on all ranks or on none
    excess = {turn: gone for (turn, gone), some in zip(excess.items(), most.tolist(), strict=True) if some}
    if not excess:
        return 0
    policy = find_policy("auto", seen=False)
    scores = joined(evictor.scores(request, manager, policy, manager.schema.query_window or 0))
    at = positions(slot, manager)

    def lists() -> Keep:
        keep = None
        for (begin, end), gone in excess.items():
            rows = scores.clone()
            Protected(ranges=[(0, begin), (end, END)], positions=at).mark(rows)
            chosen = choose(rows.split(table.schema.heads), lengths, lengths - gone, 0, "head")
            keep = chosen if keep is None else _both(keep, chosen)
        assert keep is not None
        return keep

    return evictor.keep(request, manager, evictor.on_all_ranks(lists), alike=False)


def _both(a: Keep, b: Keep) -> Keep:
    """Entries that stay in both."""
    return [[np.intersect1d(x, y, assume_unique=True) for x, y in zip(*layers, strict=True)] for layers in zip(a, b)]
