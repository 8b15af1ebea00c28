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
FORMS = ("kept", "dropped", "mask")


class EvictionRecord:
    """Which entries one eviction kept."""

    def __init__(
        self, keep: Sequence[Sequence[np.ndarray]], lengths: np.ndarray, everywhere: np.ndarray | None = None
    ) -> None:
        """`keep`: of each layer and stream the entries that stay; lengths [layers, G] before the eviction.

        `everywhere`: where these are a rank's streams, [layers, all G] entries that those of all ranks keep.
        """
        self._lengths = lengths.astype(np.uint32)
        self._lists: Keep | None = [list(layer) for layer in keep]  # None: packed
        sizes = [len(entries) for layer in keep for entries in layer] if everywhere is None else everywhere.ravel()
        self.everywhere = everywhere
        self.kept = float(sum(sizes) / max(1, len(sizes)))  # entries of a stream, on average
        self.even = bool(min(sizes) == max(sizes))
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

    def then(self, later: EvictionRecord) -> EvictionRecord:
        """One record for this eviction and a later one at the same position."""
        both = [
            [first[second] for first, second in zip(mine, others, strict=True)]
            for mine, others in zip(self.lists(), later.lists(), strict=True)
        ]
        return EvictionRecord(both, self.lengths, later.everywhere)

    def fullest(self, parts: int) -> float:
        """Entries of a stream on average, on that of `parts` ranks that keeps most."""
        if self.everywhere is None:
            return self.kept
        return float(self.everywhere.reshape(len(self.everywhere), parts, -1).mean((0, 2)).max())

    @property
    def alike(self) -> bool:
        """Whether the heads of a layer keep equally many entries, on all ranks."""
        counts = self.counts() if self.everywhere is None else self.everywhere
        return bool((counts == counts[:, :1]).all())

    def packed(self) -> tuple[np.ndarray, str, np.ndarray]:
        """(lengths [layers, G], form, data [n]), as a file holds it, in any thread. The record stays as it is."""
        record, lists = self, self._lists  # looked at once: the engine's thread may pack it at any moment
        if lists is not None:
            record = EvictionRecord(lists, self._lengths)
            record.pack()
        return record._lengths, record._form, record._data

    @staticmethod
    def of_packed(lengths: np.ndarray, form: str, data: np.ndarray) -> EvictionRecord:
        """A record from what `packed` gave, or ValueError: what is wrong with it. Nothing is unpacked."""
        if form not in FORMS:
            raise ValueError(f"form {form[:20]!r} is not one of {', '.join(FORMS)}")
        if lengths.ndim != 2 or not lengths.size or data.ndim != 1:
            raise ValueError("its lengths are not a matrix, or its data are not a vector")
        total = int(lengths.astype(np.int64).sum())
        if form == "mask":
            if data.dtype != np.uint8 or len(data) != -(-total // 8):
                raise ValueError(f"a mask of {total} entries takes {-(-total // 8)} bytes, not {data.nbytes}")
        elif len(data) and not (data[0] >= 0 and data[-1] < total and (data[1:] > data[:-1]).all()):
            raise ValueError(f"the entries are not in ascending order from 0 to {total - 1}")
        record = EvictionRecord([[data[:0]]], lengths)
        number = np.uint8 if form == "mask" else np.uint32 if total < 1 << 32 else np.uint64
        record._form, record._data, record._lists = form, data.astype(number), None
        counts = record.counts()
        record.kept, record.even = float(counts.mean()), counts.min() == counts.max()
        return record

    @property
    def lengths(self) -> np.ndarray:
        """[layers, G] entries of each stream before the eviction."""
        return self._lengths.astype(np.int64)

    def counts(self) -> np.ndarray:
        """[layers, G] entries of each stream that stayed. A packed record stays packed."""
        if self._lists is not None:
            return np.array([[len(entries) for entries in layer] for layer in self._lists])
        lengths = self.lengths
        ends = np.cumsum(lengths)
        if self._form == "mask":
            bits = np.unpackbits(self._data, count=int(ends[-1]))
            starts = ends - lengths.ravel()
            found = np.array([np.count_nonzero(bits[a:b]) for a, b in zip(starts, ends, strict=True)])
        else:
            found = np.diff(np.searchsorted(self._data, ends), prepend=0)
        found = found.reshape(lengths.shape)
        return lengths - found if self._form == "dropped" else found

    @property
    def nbytes(self) -> int:
        """What it takes as it is now, packed or not."""
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
