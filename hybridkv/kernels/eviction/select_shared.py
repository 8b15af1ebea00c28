"""select_shared: the entries that survive where streams share a budget. Nothing waits for the device.

Rows are streams; `groups` equal runs of neighbouring rows each share a budget: the heads of a layer, or everything. Of
its first `visible` entries a row keeps the `least` best ones, and `room` more entries of the group are the best of what
is left in any of its rows. Ties go to the lower row, then to the lower index. The entries from `visible` to the row's
length survive whatever their score. -0 equals 0. NaN is above +inf: the caller refuses rows that hold it.

What a row keeps is always the best of that row, so the search is for how many. Let c(t) be the entries of a row that
reach a bound t. A row keeps the larger of `least` and c(t), and the bound of a group is the highest t with

    sum over rows of max(0, c(t) - least) >= room

of whose equals only the first ones stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.eviction.select import select_entries_ref

BITS = 32  # of a key


def order_keys_ref(scores: Tensor) -> Tensor:
    """f32 -> int32 in the same order, above -2^31 and below 2^31 - 1. NaN is the largest; -0 equals 0."""
    bits = (scores + 0.0).contiguous().view(torch.int32)
    return torch.where(scores.isnan(), 0x7FFFFFFE, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def shared_counts_ref(scores: Tensor, visible: Tensor, least: Tensor, groups: int, room: Tensor) -> Tensor:
    """How many of its first `visible` entries each row keeps, [R] int64."""
    R, L = scores.shape
    least = torch.minimum(least.clamp(min=0), visible)
    keys = order_keys_ref(scores)
    keys.masked_fill_(torch.arange(L, device=scores.device) >= visible[:, None], -(2**31))
    left = (visible - least).view(groups, -1).sum(1)
    room = torch.minimum(room.clamp(min=0), left)  # [groups]

    def reach(bound: Tensor) -> Tensor:
        """Entries of each row that reach its group's bound [groups] -> [R]."""
        return (keys.view(groups, -1, L) >= bound.view(-1, 1, 1).int()).sum(-1).view(-1)

    low = torch.full((groups,), -(2**31) + 1, device=scores.device)  # int64; every key reaches it
    high = low + (2**BITS - 2)  # no key does
    for _ in range(BITS):
        middle = (low + high) >> 1
        enough = (reach(middle) - least).clamp(min=0).view(groups, -1).sum(1) >= room
        low, high = low.where(~enough, middle), high.where(enough, middle)
    above = torch.maximum(reach(low + 1), least)
    tied = torch.maximum(reach(low), least) - above  # each would be one more
    above_all = (above - least).view(groups, -1).sum(1, keepdim=True)
    before = tied.view(groups, -1).cumsum(1) - tied.view(groups, -1)
    return above + torch.minimum((room[:, None] - above_all - before).clamp(min=0).view(-1), tied)


def select_shared_ref(
    scores: Tensor, visible: Tensor, least: Tensor, lengths: Tensor, groups: int, room: Tensor
) -> tuple[Tensor, Tensor]:
    kept = shared_counts_ref(scores, visible, least, groups, room)
    return select_entries_ref(scores, visible, kept, lengths, scores.shape[1]), kept + lengths - visible


def select_shared(
    scores: Tensor,  # [R, L] f32
    visible: Tensor,  # [R] int64
    least: Tensor,  # [R] int64
    lengths: Tensor,  # [R] int64
    groups: int,
    room: Tensor,  # [groups] int64
) -> tuple[Tensor, Tensor]:
    """Survivors [R, L] int32 of rows that hold `lengths` entries, ascending, then -1; and how many each has, [R] int64.

    A row keeps the `least` best of its first `visible`; a group's rows share `room` more; all that follow stay.
    """
    return select_shared_ref(scores, visible, least, lengths, groups, room)
