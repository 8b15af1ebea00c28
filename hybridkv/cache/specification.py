"""Names that come from the specification of the cache. Other code calls them; the engine does not."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from hybridkv.cache.bookkeeping import bookkeeping
from hybridkv.cache.facts import Facts
from hybridkv.errors import RequestError


class SpecificationNames(Facts):
    """Names that a specification gave to what the cache does; the engine uses others."""

    @bookkeeping
    def allocate_block(self, request: Hashable, name: str) -> int:
        """One more page for each of the request's streams of a schema, ahead of need; returns the last page's id.

        `prepare_forward` counts what is held, so it takes none for what this has brought.
        """
        if name not in self.tables:
            raise RequestError(f"there is no pool '{name}'; there are {', '.join(self.tables) or 'none'}")
        slot, table = self._slot(request), self.tables[name]
        if table.held[slot].max() >= table.pages.shape[2]:
            raise RequestError(f"request {request!r} holds the pages of {self.max_tokens} tokens already")
        table.allocator.require(table.schema.streams)
        none = np.zeros(table.schema.streams, bool)
        table.take(slot, np.ones(table.schema.streams, np.int64), none)
        return int(table.pages[slot, -1, table.held[slot, -1] - 1])

    def reset_slot(self, slot: int) -> None:
        """State of a slot as if nothing had been seen. Admitting a request does it; one that goes on needs its own."""
        if not 0 <= slot < self.slots:
            raise RequestError(f"there is no slot {slot}; slots are 0 to {self.slots - 1}")
        self.state.reset(slot)
