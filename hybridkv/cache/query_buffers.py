"""QueryBuffers: which request has a buffer for its last queries (SnapKV's observation window), and since when.

Only an eviction that is still to come reads a buffer. So there may be fewer buffers than slots: a request takes one
when it begins to read its prompt and gives it back when no eviction will need it any more. Where there is one for every
slot, each request has its own from the start.
"""

from __future__ import annotations

import numpy as np

from hybridkv.errors import HybridKVError


class QueryBuffers:
    """Which slots have a query buffer, and since which position. `count`: buffers there are."""

    def __init__(self, slots: int, count: int) -> None:
        self.of = np.full(slots, -1, np.int64)  # buffer of each slot; -1: none
        self.since = np.zeros(slots, np.int64)  # position from which on it has every query
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many are not taken."""
        return len(self._free)

    def take(self, slot: int, position: int) -> bool:
        """Whether the slot has a buffer now."""
        if self.of[slot] < 0:
            if not self._free:
                return False
            self.since[slot] = position
            self.of[slot] = self._free.pop()
        return True

    def require(self, slot: int, position: int) -> None:
        """A buffer for a slot whose past has one, or HybridKVError."""
        if not self.take(slot, position):
            raise HybridKVError(
                "the request keeps its last queries for an eviction to come, a copy of it must too, and all "
                f"{self.count} query buffers are taken; wait until a request has been evicted, or release a fork or a "
                "held cache"
            )

    def whole(self, slot: int, begin: int) -> int:
        """The slot's buffer if it has every query from position `begin` on, -1 if not."""
        return int(self.of[slot]) if self.since[slot] <= begin else -1

    def drop(self, slot: int) -> None:
        """Give back the slot's buffer, if it has one."""
        if self.of[slot] >= 0:
            self._free.append(int(self.of[slot]))
            self.of[slot] = -1

    def rebuild(self, free_slots: list[int]) -> None:
        """Find the free buffers anew, from who has one: the way back after an interrupt."""
        self.of[free_slots] = -1
        taken = set(self.of.tolist())
        self._free = [buffer for buffer in range(self.count - 1, -1, -1) if buffer not in taken]

    def check(self, free_slots: list[int]) -> None:
        """Every buffer is free or has one owner, and no free slot has one."""
        if sorted([*self._free, *self.of[self.of >= 0].tolist()]) != list(range(self.count)):
            raise AssertionError(f"query buffers are lost or owned twice: {self._free} free, {self.of.tolist()} owned")
        if (self.of[free_slots] >= 0).any():
            raise AssertionError("a free slot has a query buffer")
