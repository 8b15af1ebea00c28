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
from hybridkv.kernels.eviction.raise_kept import raise_kept
from hybridkv.kernels.eviction.select import select_entries
from hybridkv.kernels.eviction.select_shared import select_shared
from hybridkv.kernels.eviction.to_fresh import end_to_end


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


@dataclass(frozen=True)
class Chosen:
    """Survivors of every stream, on the device."""

    entries: Tensor  # [R, K] int32: of each stream ascending, then anything
    counts: Tensor  # [R] int64
    broken: Tensor  # [layers] int32: whether some entry of the layer has no score
    most: int  # entries of all streams together, at the most

    def lists(self) -> Keep:
        """The same on the host, or HybridKVError where scores are broken. The device is waited for once, here."""
        flat = end_to_end(self.entries, self.counts, self.most)[0]
        host = torch.cat((flat, self.broken, self.counts.to(torch.int32))).cpu().numpy().astype(np.int64)
        entries, broken, sizes = np.split(host, [self.most, self.most + len(self.broken)])
        refuse_broken(broken)
        rows, G = np.split(entries[: sizes.sum()], np.cumsum(sizes)[:-1]), len(sizes) // len(broken)
        return [rows[i : i + G] for i in range(0, len(rows), G)]


def refuse_broken(broken: np.ndarray) -> None:
    """HybridKVError where a layer's flag [layers] says that some entry has no score."""
    if broken.any():
        layer = int(broken.argmax())
        raise HybridKVError(f"the policy gave NaN scores in attention layer {layer}; nothing was evicted")


def survivors(scores: Tensor, lengths: np.ndarray, budgets: np.ndarray, recent: int) -> Tensor:
    """Entries [R, K] int32 that stay of rows [R, L], on the device: ascending, then -1. lengths and budgets [R]."""
    return _survivors(scores, lengths, budgets, recent)[0]


def _survivors(scores: Tensor, lengths: np.ndarray, budgets: np.ndarray, recent: int) -> tuple[Tensor, Tensor]:
    """Entries as `survivors` has them, and how many of each row, [R] int64."""
    fixed, whole, kept = np.minimum(recent, budgets), budgets >= lengths, np.minimum(budgets, lengths)
    visible, count = np.where(whole, 0, lengths - fixed), np.where(whole, 0, budgets - fixed)
    seen, most, ends, counts = upload([visible, count, lengths, kept], scores.device).view(4, -1)
    return select_entries(scores, seen, most, ends, int(kept.max(initial=0))), counts


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
    return _share(joined(scores), lengths, even, recent, floor, layers)


def _share(
    rows: Tensor, lengths: np.ndarray, even: np.ndarray, recent: int, floor: float, layers: float
) -> tuple[Tensor, Tensor]:
    """`share` of scores [R, L], which are changed."""
    count = len(lengths)
    fixed = np.minimum(np.minimum(recent, even), lengths)  # recent entries stay in every stream
    least = np.minimum(np.maximum(np.maximum(fixed, 1), (even * floor).astype(np.int64)), lengths)
    if layers < 1:
        if layers > 0:  # what the streams of a layer win among themselves is theirs
            part = np.minimum((even * layers).astype(np.int64), lengths)
            raise_kept(rows, *_shared(rows, lengths, np.maximum(part, least), fixed, least, count))
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


def pick(rows: Tensor, lengths: np.ndarray, budgets: np.ndarray, recent: int, scope: str) -> Chosen:
    """Survivors of every stream. Scores [layers * G, L]; lengths and budgets [layers, G]. Nothing waits for the device.

    scope "head": each stream by its own scores; "layer": one list for the heads of a layer, by the sum of their scores;
    "global": one list for all streams.
    """
    layers, G = lengths.shape
    broken, ends, room = _broken(rows, lengths), lengths.ravel(), budgets.ravel()
    if scope != "head":
        same = lengths == lengths[:, :1] if scope == "layer" else lengths == lengths[0, 0]
        even = budgets == budgets[:, :1] if scope == "layer" else budgets == budgets[0, 0]
        if not same.all() or not even.all():
            raise HybridKVError(f"scope '{scope}' needs streams of one length and one budget; use scope='head'")
        rows, ends, room = rows.view(layers, G, -1).sum(1), lengths[:, 0], budgets[:, 0]
    if scope == "global":
        rows, ends, room = rows.sum(0, keepdim=True), ends[:1], room[:1]
    found, counts = _survivors(rows, ends, room, recent)
    streams = layers * G // len(rows)  # that have the same list
    if streams > 1:
        found = found[:, None].expand(-1, streams, -1).flatten(0, 1)
        counts = counts.repeat_interleave(streams, output_size=streams * len(counts))  # in memory, not by a stride of 0
    return Chosen(found, counts, broken, streams * int(np.minimum(ends, room).sum()))


def pick_shared(
    rows: Tensor, lengths: np.ndarray, even: np.ndarray, recent: int, floor: float, layers: float
) -> Chosen:
    """Survivors of every stream where streams share their budgets (see `share`). Nothing waits for the device.

    The scores [R, L] of what a layer's streams win among themselves are raised in place.
    """
    broken = _broken(rows, lengths)
    found, counts = _share(rows, lengths, even, recent, floor, layers)
    # a stream may keep all of its entries and another few; one after the other they are no more than the budgets
    return Chosen(found, counts, broken, min(int(lengths.sum()), int(even.sum())))


def choose(
    scores: Sequence[Tensor],
    lengths: np.ndarray,
    budgets: np.ndarray,
    recent: int,
    scope: str,
) -> Keep:
    """Lists of `pick`, of scores [G, L] for each layer. The device is waited for once, at the end."""
    return pick(joined(scores), lengths, budgets, recent, scope).lists()


def choose_shared(
    scores: Sequence[Tensor], lengths: np.ndarray, even: np.ndarray, recent: int, floor: float, layers: float
) -> Keep:
    """Lists of `pick_shared`, of scores [G, L] for each layer. The device is waited for once, at the end."""
    return pick_shared(joined(scores), lengths, even, recent, floor, layers).lists()


def _broken(rows: Tensor, lengths: np.ndarray) -> Tensor:
    """[layers] int32 on the device: whether some entry of the layer has no score."""
    if (lengths < rows.shape[1]).any():  # what stands past a stream's length may be anything
        there = torch.arange(rows.shape[1], device=rows.device) < upload([lengths.ravel()], rows.device)[:, None]
        rows = torch.where(there, rows, 0)
    if not rows.shape[1]:
        return torch.zeros(len(lengths), dtype=torch.int32, device=rows.device)
    return rows.amax(1).isnan().view(len(lengths), -1).any(1).to(torch.int32)  # the largest with a NaN is NaN
