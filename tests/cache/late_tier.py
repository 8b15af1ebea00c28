"""A host tier whose copies are late, or fail."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier

MOST_LATE = 40  # copies


class LateTier(HostTier):
    """A host tier as on a GPU, in slow motion: what is to be copied is taken at once, and written to the host when its
    turn comes, in order. Every `every`th copy fails, or is late: it and all behind it come when somebody needs them.
    """

    def __init__(self, limit: int, every: int = 50) -> None:
        super().__init__(limit, torch.device("cpu"), pages=True, preempted=True)
        self.every, self.copies, self.trouble = every, 0, Counter[str]()
        self.late: list[tuple[Tensor, np.ndarray, int]] = []  # written by nobody yet

    def _meet(self) -> str:
        self.copies += 1
        what = ("fails", "late")[self.copies // self.every % 2] if self.copies % self.every == 0 else "well"
        self.trouble[what] += 1
        if what == "fails":
            raise RuntimeError("a copy that was made to fail")
        return what

    def _down(self, chunk: Tensor, ids: np.ndarray, at: int) -> None:
        late = self._meet() == "late" or bool(self.late)
        self.late.append((chunk.clone(), ids.copy(), at))
        if not late or len(self.late) > MOST_LATE:
            self.arrive()

    def _up(self, ids: np.ndarray, at: int, nbytes: int) -> tuple[Tensor, int | None]:
        self._meet()
        self.arrive()
        return super()._up(ids, at, nbytes)

    def arrive(self) -> None:
        """All that is late is there."""
        for chunk, ids, at in self.late:
            super()._down(chunk, ids, at)
        self.late = []

    def poison(self) -> None:
        """Blocks that nobody owns are hostile."""
        if not self.late:
            for block in np.flatnonzero(self.blocks.refs == 0).tolist():
                slab, at = divmod(block, self._slab)
                if slab in self._slabs:
                    self._slabs[slab][at * BLOCK : (at + 1) * BLOCK] = 255
