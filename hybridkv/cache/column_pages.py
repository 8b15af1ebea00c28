"""Pages of columns: where a column's page ids lie in its row, for all pools, and how the pools count them.

Which columns there are is columns.py's, when they own pages reuse.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hybridkv.cache.columns import Column
from hybridkv.cache.page_table import PageTable


class ColumnPages:
    """Rows of page ids [width], those of all pools one after another.

    Args:
        tables: the pools.
        q: tokens of a column.
    """

    def __init__(self, tables: Mapping[str, PageTable], q: int) -> None:
        self.tables = tables
        self.parts: dict[str, tuple[int, int, int]] = {}  # of each pool: where its ids begin, streams, pages of each
        self.width = 0
        for name, table in tables.items():
            streams, per = table.schema.streams, q // (table.schema.entries_per_page * table.schema.tokens_per_entry)
            self.parts[name] = self.width, streams, per
            self.width += streams * per

    def own(self, pages: np.ndarray) -> None:
        """[columns, width] page ids that columns name from here on, and give up when they are needed."""
        for name, (begin, streams, per) in self.parts.items():
            ids = pages[..., begin : begin + streams * per].ravel()
            self.tables[name].allocator.share_distinct(ids[ids >= 0], spare=True)

    def disown(self, pages: np.ndarray) -> None:
        """[width] page ids that a column no longer names."""
        for name, (begin, streams, per) in self.parts.items():
            ids = pages[begin : begin + streams * per]
            self.tables[name].allocator.release_distinct(ids[ids >= 0], spare=True)

    def ids(self, path: list[Column], name: str) -> np.ndarray:
        """[columns, streams * pages] page ids of a path in one pool."""
        begin, streams, per = self.parts[name]
        rows = [column.pages for column in path]
        joined = np.concatenate(rows).reshape(len(rows), -1) if rows else np.zeros((0, self.width), np.int32)  # type: ignore[arg-type]
        return joined[:, begin : begin + streams * per]

    def rows_of(self, path: list[Column], name: str) -> np.ndarray:
        """[streams, pages] of a path, as page tables have them."""
        _, streams, per = self.parts[name]
        ids = self.ids(path, name).reshape(len(path), streams, per)
        return ids.transpose(1, 0, 2).reshape(streams, len(path) * per)

    def of_slot(self, slot: int, first: int, last: int) -> np.ndarray:
        """[columns, width] page ids of a slot's columns first .. last - 1."""
        found = [np.zeros((last - first, 0), np.int32)]
        for name, (_, streams, per) in self.parts.items():
            ids = self.tables[name].pages[slot, :, first * per : last * per]
            found.append(
                ids.reshape(streams, last - first, per).transpose(1, 0, 2).reshape(last - first, streams * per)
            )
        return np.concatenate(found, axis=1)

    def of(self, name: str, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Page ids of a pool in such rows, as often as they are there."""
        begin, streams, per = self.parts[name]
        found = np.concatenate([row[begin : begin + streams * per] for row in rows] or [np.zeros(0, np.int32)])
        return found[found >= 0]
