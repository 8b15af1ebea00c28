"""EvenPages: the pages of a decode step's one request on a CPU, if all of its streams are equally long.

Found once a step and read by every layer. Where a stream's pages follow one another in the pool, and the streams are
equally far apart (`PageTable` sees to that while it can), the entries of a layer are a view: nothing is copied.
Elsewhere its pages are gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class EvenPages(NamedTuple):
    """[streams, n] page ids and how much each stream holds."""

    ids: Tensor
    length: int
    first: list[int] | None  # [streams] first pages, where the rest follows them; None: somewhere it does not
    apart: int  # pages from one stream's first to the next one's

    @staticmethod
    def of(ids: np.ndarray, length: int) -> EvenPages:
        """ids int [streams, n], all of them pages."""
        firsts = ids[:, 0].tolist()
        apart = firsts[1] - firsts[0] if len(firsts) > 1 else 0
        even = apart >= 0 and bool((np.diff(ids[:, 0]) == apart).all())
        in_a_row = even and bool((np.diff(ids, axis=1) == 1).all())
        copied = torch.from_numpy(np.array(ids, order="C"))  # the page table goes on changing
        return EvenPages(copied, length, firsts if in_a_row else None, apart)

    def entries(self, pool: Tensor, streams: slice) -> Tensor:
        """Entries [1, G, length, D] of a layer's streams, out of a pool [N, P, D]."""
        _, P, D = pool.shape
        G = streams.stop - streams.start
        if self.first is None:
            found = pool.index_select(0, self.ids[streams].view(-1))
            return found.view(1, G, -1, D).narrow(2, 0, self.length)
        step, row, one = pool.stride()
        assert step == P * row
        begin = pool.storage_offset() + self.first[streams.start] * step
        return pool.as_strided((1, G, self.length, D), (0, self.apart * step, row, one), begin)
