"""PagedPool: the bytes of all pages of one StreamSchema. Which page belongs to whom is the manager's business."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridkv.cache.schema import StreamSchema
from hybridkv.kernels.eviction.compact import compact


class PagedPool:
    """One tensor [lanes, pages, entries_per_page, *shape] for each paged spec."""

    def __init__(self, schema: StreamSchema, pages: int, device: torch.device) -> None:
        self.schema, self.pages = schema, pages
        lead = (schema.lanes, pages, schema.entries_per_page)
        self.tensors = {t.name: torch.empty(lead + t.shape, dtype=t.torch_dtype, device=device) for t in schema.tensors}
        # made once: every layer asks for its lane in every step
        self._lanes = [{name: t[lane] for name, t in self.tensors.items()} for lane in range(schema.lanes)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for t in self.tensors.values())

    def lane(self, lane: int) -> Mapping[str, Tensor]:
        """Views [pages, entries, *shape] of one lane."""
        return self._lanes[lane]

    def move_entries(self, lane: int, source: Tensor, target: Tensor, apart: bool = False) -> None:
        """Entries (flat numbers page * entries_per_page + offset; -1: none) to other places, byte for byte.

        They may overlap; `apart` says that they do not.
        """
        compact([t[lane] for t in self.tensors.values()], source, target, apart)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages, all lanes and tensors, byte for byte. The two sets of ids do not overlap."""
        for t in self.tensors.values():
            t[:, target] = t[:, source]
