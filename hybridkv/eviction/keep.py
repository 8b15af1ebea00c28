"""Which entries survive: one rule for all policies.

Of a stream with budget b the last `recent` entries stay whatever their score, and the best of the others fill the
rest. The budget includes the recent ones. Ties go to the lower position. Lists are ascending, so survivors keep their
order. Where streams share a budget (`share`), each keeps its best few, and the best of what is left in any of them
fill the rest. Entries that must stay (`Protected`) count as better than any score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache.step import upload
from hybridkv.errors import HybridKVError
from hybridkv.eviction_record import Keep
from hybridkv.kernels.eviction.select import select_entries
from hybridkv.kernels.eviction.select_shared import select_shared

SURE_BYTES = 16 << 20  # that marking what a layer keeps for sure takes at once


@dataclass(frozen=True)
class Protected:
    """Entries that stay whatever their score, beside the recent ones, as far as the budget goes.

    Args:
        first: so many at the beginning of each stream.
        ranges: (begin, end) of absolute positions.
        positions: [streams, L] of each entry, where there are ranges.
    """

    first: int = 0
    ranges: Sequence[tuple[int, int]] = ()
    positions: Tensor | None = None

    def mark(self, rows: Tensor) -> None:
        """Raise the scores [streams, L] of these entries above all others, in place. NaN stays: it is refused."""
        if self.first:
            rows[:, : self.first].masked_fill_(~rows[:, : self.first].isnan(), torch.inf)
        for begin, end in self.ranges:
            assert self.positions is not None
            rows.masked_fill_((self.positions >= begin) & (self.positions < end) & ~rows.isnan(), torch.inf)


def joined(scores: Sequence[Tensor]) -> Tensor:
    """Scores [G, L] of each layer as rows [layers * G, L] f32, a copy; what stands past a layer's own L is never looked
    at.
    """
    L = max(each.shape[1] for each in scores)
    return torch.cat([each if each.shape[1] == L else F.pad(each, (0, L - each.shape[1])) for each in scores]).float()


def survivors(scores: Tensor, lengths: np.ndarray, budgets: np.ndarray, recent: int) -> Tensor:
    """Entries [R, K] int32 that stay of rows [R, L], on the device: ascending, then -1. lengths and budgets [R]."""
    fixed, whole = np.minimum(recent, budgets), budgets >= lengths
    visible, count = np.where(whole, 0, lengths - fixed), np.where(whole, 0, budgets - fixed)
    seen, most, ends = upload([visible, count, lengths], scores.device).view(3, -1)
    return select_entries(scores, seen, most, ends, int(np.minimum(budgets, lengths).max(initial=0)))


def best(scores: Tensor, length: int, budget: int, recent: int) -> np.ndarray:
    """Ascending numbers of the entries that stay, of `length` with scores [>= length]."""
    return survivors(scores[None], np.array([length]), np.array([budget]), recent)[0].cpu().numpy().astype(np.int64)


def share(
    scores: Sequence[Tensor], lengths: np.ndarray, even: np.ndarray, recent: int, floor: float, layers: float
) -> tuple[Tensor, Tensor]:
    """Entries [R, L] int32 that stay of each stream, ascending, then -1, and their counts [R], both on the device.

    Streams share `even` [layers, G], what each would keep by itself: `layers` of it (0 to 1) within their layer, the
    rest with all streams. Each keeps at least `floor` of its own. Where all streams that share hold no more than they
    may keep, nothing is lost.
    """
    count, G = lengths.shape
    fixed = np.minimum(np.minimum(recent, even), lengths)  # recent entries stay in every stream
    least = np.minimum(np.maximum(np.maximum(fixed, 1), (even * floor).astype(np.int64)), lengths)
    rows = joined(scores)
    if layers < 1:
        if layers > 0:  # what the streams of a layer win among themselves is theirs
            part = np.minimum((even * layers).astype(np.int64), lengths)
            _raise_sure(rows, _shared(rows, lengths, np.maximum(part, least), fixed, least, count)[0])
        return _shared(rows, lengths, even, fixed, least, 1)
    return _shared(rows, lengths, even, fixed, least, count)


def _shared(
    rows: Tensor, lengths: np.ndarray, even: np.ndarray, fixed: np.ndarray, least: np.ndarray, groups: int
) -> tuple[Tensor, Tensor]:
    """Entries and counts as `share` has them, where the streams of each of `groups` groups share what is `even`."""

    def by_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(groups, -1)

    whole = by_group(lengths).sum(1) <= by_group(even).sum(1)  # [groups] that keep everything
    least = np.where(np.repeat(whole, lengths.size // groups).reshape(lengths.shape), lengths, least)
    room = np.where(whole, 0, by_group(even).sum(1) - by_group(least).sum(1))
    sent = upload([(lengths - fixed).ravel(), (least - fixed).ravel(), lengths.ravel(), room], rows.device)
    visible, sure, ends = sent[: 3 * lengths.size].view(3, -1)
    return select_shared(rows, visible, sure, ends, groups, sent[3 * lengths.size :])


def _raise_sure(rows: Tensor, entries: Tensor) -> None:
    """Raise the scores [R, L] of these entries [R, K] above all others, in place. NaN stays: it is refused."""
    L = rows.shape[1]
    at_once = max(1, SURE_BYTES // (16 * max(1, L)))
    for part, kept in zip(rows.split(at_once), entries.split(at_once)):
        there = torch.zeros(len(part), L + 1, dtype=torch.bool, device=rows.device)
        there.scatter_(1, torch.where(kept >= 0, kept, L).long(), True)  # -1 goes to an extra column
        part.masked_fill_(there[:, :L] & ~part.isnan(), torch.inf)


def choose(
    scores: Sequence[Tensor],
    lengths: np.ndarray,
    budgets: np.ndarray,
    recent: int,
    scope: str,
) -> Keep:
    """Survivors of every stream. `scores`: a [G, L] for each layer; lengths and budgets [layers, G].

    scope "head": each stream by its own scores; "layer": one list for the heads of a layer, by the sum of their scores;
    "global": one list for all streams. The device is waited for once, at the end.
    """
    (layers, G), rows = lengths.shape, joined(scores)
    broken = _broken(rows, lengths)
    lists, ends, room = layers * G, lengths, budgets
    if scope != "head":
        same = lengths == lengths[:, :1] if scope == "layer" else lengths == lengths[0, 0]
        even = budgets == budgets[:, :1] if scope == "layer" else budgets == budgets[0, 0]
        if not same.all() or not even.all():
            raise HybridKVError(f"scope '{scope}' needs streams of one length and one budget; use scope='head'")
        rows, ends, room, lists = rows.view(layers, G, -1).sum(1), lengths[:, 0], budgets[:, 0], layers
    if scope == "global":
        rows, ends, room, lists = rows.sum(0, keepdim=True), ends[:1], room[:1], 1
    found = survivors(rows, ends.ravel(), room.ravel(), recent)
    host = torch.cat((found.view(-1), broken)).cpu().numpy().astype(np.int64)
    _refuse_broken(host[found.numel() :])
    each = [row[:n] for row, n in zip(host[: found.numel()].reshape(found.shape), np.minimum(ends, room).ravel())]
    return [[each[(i * G + g) * lists // (layers * G)] for g in range(G)] for i in range(layers)]


def choose_shared(
    scores: Sequence[Tensor], lengths: np.ndarray, even: np.ndarray, recent: int, floor: float, layers: float
) -> Keep:
    """Survivors of every stream where streams share their budgets (see `share`). The device is waited for once."""
    count, G = lengths.shape
    broken = _broken(joined(scores), lengths)
    found, counts = share(scores, lengths, even, recent, floor, layers)
    # a stream may keep all of its entries and another few; one after the other they are no more than the budgets
    most = min(int(lengths.sum()), int(even.sum()))
    flat = end_to_end(found, counts, most)
    host = torch.cat((flat, broken, counts.to(torch.int32))).cpu().numpy().astype(np.int64)
    entries, broken_layers, sizes = np.split(host, [most, most + count])
    _refuse_broken(broken_layers)
    rows = np.split(entries[: sizes.sum()], np.cumsum(sizes)[:-1])
    return [rows[i * G : (i + 1) * G] for i in range(count)]


def end_to_end(entries: Tensor, counts: Tensor, most: int) -> Tensor:
    """The first counts [R] numbers of each row of entries [R, L], one row after the other: [most] int32.

    What stands after the last of them means nothing. It takes memory for `most` numbers, not for all entries.
    """
    ends, place = counts.cumsum(0), torch.arange(most, device=entries.device)
    row = torch.searchsorted(ends, place, right=True).clamp(max=len(counts) - 1)
    return entries[row, (place - (ends - counts)[row]).clamp(max=entries.shape[1] - 1)]


def _broken(rows: Tensor, lengths: np.ndarray) -> Tensor:
    """[layers] int32 on the device: whether some entry of the layer has no score."""
    there = torch.arange(rows.shape[1], device=rows.device) < upload([lengths.ravel()], rows.device)[:, None]
    return (rows.isnan() & there).view(len(lengths), -1).any(1).to(torch.int32)


def _refuse_broken(broken: np.ndarray) -> None:
    if broken.any():
        layer = int(broken.argmax())
        raise HybridKVError(f"the policy gave NaN scores in attention layer {layer}; nothing was evicted")
