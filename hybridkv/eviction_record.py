"""EvictionRecord: which entries one eviction kept, in few bytes.

A request remembers every eviction, because it is computed again after a preemption and must then drop the same entries
at the same positions. A bounded request of 262,144 tokens is evicted hundreds of times. So all records but the latest
are packed, into the smallest of three forms, over all streams one after the other:

    kept      numbers of the entries that stay          4 bytes an entry that stays
    dropped   numbers of the entries that go            4 bytes an entry that goes
    mask      a bit for every entry                     1/8 byte an entry

The latest stays as the lists that were chosen, which the cache keeps for its own use anyway: most requests are evicted
once, and packing would take a part of the time of that eviction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Keep = list[list[np.ndarray]]  # [layers][G] ascending entry numbers


class EvictionRecord:
    def __init__(self, keep: Sequence[Sequence[np.ndarray]], lengths: np.ndarray) -> None:
        """`keep`: of each layer and stream the entries that stay; lengths [layers, G] before the eviction."""
        self._lengths = lengths.astype(np.uint32)
        self._lists: Keep | None = [list(layer) for layer in keep]  # None: packed
        sizes = [len(entries) for layer in keep for entries in layer]
        self.kept = sum(sizes) / max(1, len(sizes))  # entries of a stream, on average
        self.even = min(sizes) == max(sizes)
        self._form = ""
        self._data: np.ndarray = np.zeros(0, np.uint8)

    def pack(self) -> None:
        """From here on in few bytes."""
        if self._lists is None:
            return
        lengths = self._lengths.astype(np.int64)
        starts = np.cumsum(lengths) - lengths.ravel()  # of each stream, if all lie one after the other
        streams = [entries for layer in self._lists for entries in layer]
        stays = np.concatenate([entries + start for entries, start in zip(streams, starts, strict=True)])
        total = int(lengths.sum())
        number = np.uint32 if total < 1 << 32 else np.uint64
        sizes = {"kept": 4 * len(stays), "dropped": 4 * (total - len(stays)), "mask": total // 8}
        form = min(sizes, key=sizes.__getitem__)
        if form == "kept":
            data = stays.astype(number)
        else:
            mask = np.zeros(total, bool)
            mask[stays] = True
            data = np.packbits(mask) if form == "mask" else np.flatnonzero(~mask).astype(number)
        self._form, self._data = form, data
        self._lists = None  # last: an interrupt before this leaves the lists

    @property
    def nbytes(self) -> int:
        if self._lists is not None:
            return self._lengths.nbytes + sum(entries.nbytes for layer in self._lists for entries in layer)
        return self._data.nbytes + self._lengths.nbytes

    def lists(self) -> Keep:
        """The entries that stay of each layer and stream, ascending."""
        if self._lists is not None:
            return self._lists
        lengths = self._lengths.astype(np.int64)
        total = int(lengths.sum())
        if self._form == "kept":
            stays = self._data.astype(np.int64)
        elif self._form == "mask":
            stays = np.flatnonzero(np.unpackbits(self._data, count=total))
        else:
            mask = np.ones(total, bool)
            mask[self._data] = False
            stays = np.flatnonzero(mask)
        ends = np.cumsum(lengths)
        parts = np.split(stays, np.searchsorted(stays, ends[:-1]))
        streams = [part - start for part, start in zip(parts, ends - lengths.ravel(), strict=True)]
        G = lengths.shape[1]
        return [streams[i : i + G] for i in range(0, len(streams), G)]

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return iter(self.lists())

    def __getitem__(self, layer: int) -> list[np.ndarray]:
        return self.lists()[layer]
