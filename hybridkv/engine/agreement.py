"""Agreement: what a scheduler asks before it decides something by the pages of its own pools.

On one rank it is its own answer. Over several ranks the fullest decides: where streams keep unlike numbers of entries,
ranks hold unlike numbers of pages, and each would decide otherwise by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridkv.parallel.group import Group


class Agreement:
    """Of one rank."""

    parts = 1  # ranks that hold different streams: the fullest may hold so many times the mean
    uneven = False  # whether ranks may hold unlike numbers of pages

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        return flag

    def most(self, number: int) -> int:
        """The largest of all ranks."""
        return number


@dataclass
class RanksAgree(Agreement):
    """Of one rank of several. Every rank asks the same questions in the same order.

    As long as `uneven` is False all ranks hold equally many pages, and nothing is exchanged.
    """

    group: Group
    parts: int
    uneven: bool = False  # whether some request's heads may share a budget: from then on

    def any(self, flag: bool) -> bool:
        return bool(self.most(int(flag)))

    def most(self, number: int) -> int:
        return int(self.group.all_gather(torch.tensor([number])).max()) if self.uneven else number
