"""StatePool: what a request holds whatever its length (recurrent state, convolution tails, query buffers).

One row a slot, and of what is lent one row a query buffer (`query_buffers.py`). Behind the slots' rows are those of
checkpoints (`checkpoints.py`), if there are any. What checkpoints keep in another dtype has a tensor of its own for
them; rows are numbered as if it had not, and copying one to a slot or back converts: bf16 is rounded to, once, and
widened to f32 without loss.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridkv.cache.schema import StateSchema
from hybridkv.dtypes import torch_dtype

Snapshot = dict[tuple[str, str], Tensor]  # (state, tensor) -> [layers, *shape]
NOTHING: Mapping[str, Tensor] = {}


class StatePool:
    """One tensor [layers, slots (and checkpoints) or query buffers, *shape] for each state spec, and one [layers,
    checkpoints, *shape] for those that checkpoints keep in another dtype.
    """

    def __init__(
        self,
        schemas: tuple[StateSchema, ...],
        slots: int,
        device: torch.device,
        query_buffers: int = 0,
        checkpoints: int = 0,
    ) -> None:
        self.schemas, self.slots = schemas, slots
        self.tensors: Snapshot = {}
        self.rounded: Snapshot = {}  # rows of checkpoints alone
        for s in schemas:
            for t in s.tensors:
                apart = not s.lent and bool(t.checkpoint_dtype)
                rows = query_buffers if s.lent else slots if apart else slots + checkpoints
                shape = (len(s.layers), rows, *t.shape)
                self.tensors[s.name, t.name] = torch.empty(shape, dtype=t.torch_dtype, device=device)
                if apart:
                    shape, dtype = (len(s.layers), checkpoints, *t.shape), torch_dtype(t.checkpoint_dtype)
                    self.rounded[s.name, t.name] = torch.empty(shape, dtype=dtype, device=device)
        for s in schemas:
            for t in s.tensors:  # memory of checkpoints is not touched before there are any
                self.tensors[s.name, t.name][:, : query_buffers if s.lent else slots] = t.init
        # made once: every layer asks for its views in every step
        self._layers: dict[int, dict[str, Tensor]] = {}
        for s in schemas:
            for i, layer in enumerate(s.layers):
                views = {t.name: self.tensors[s.name, t.name][i] for t in s.tensors}
                self._layers.setdefault(layer, {}).update(views)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for t in (*self.tensors.values(), *self.rounded.values()))

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """Views [slots or query buffers, *shape] of all state that a model layer has."""
        return self._layers.get(layer, NOTHING)

    def rows(self, slot: int, buffer: int = -1) -> Snapshot:
        """Views of all that a slot, or the row of a checkpoint, has, and of a buffer; -1: it has none."""
        return {
            (s.name, t.name): self._row((s.name, t.name), buffer if s.lent else slot)
            for s in self.schemas
            if not s.lent or buffer >= 0
            for t in s.tensors
        }

    def _row(self, key: tuple[str, str], row: int) -> Tensor:
        if row >= self.slots and key in self.rounded:
            return self.rounded[key][:, row - self.slots]
        return self.tensors[key][:, row]

    def reset(self, slot: int) -> None:
        """What a fresh slot holds. A buffer is not read where it was not written."""
        for s in self.schemas:
            for t in s.tensors if not s.lent else ():
                self._row((s.name, t.name), slot).fill_(t.init)

    def copy(self, source: int, target: int, query_buffers: tuple[int, int] = (-1, -1)) -> None:
        """Slot `target` gets slot `source`'s rows; either may be a checkpoint's. Dtypes are converted by the copies
        themselves, on the device, and the host waits for nothing. `query_buffers`: the buffers of both; -1: none.
        """
        rows = self.rows(source, query_buffers[0])
        for key, row in self.rows(target, query_buffers[1]).items():
            row.copy_(rows[key])

    def snapshot(self, slot: int, buffer: int = -1) -> Snapshot:
        """Copies of the rows of a slot, and of its query buffer if it has one."""
        return {key: row.clone() for key, row in self.rows(slot, buffer).items()}

    def restore(self, slot: int, snapshot: Snapshot, buffer: int = -1) -> None:
        """The rows of a slot become those of a snapshot; nothing changes if it does not fit."""
        rows = self.rows(slot, buffer)
        if snapshot.keys() != rows.keys():
            raise ValueError(f"the snapshot holds {sorted(snapshot)}, this pool {sorted(rows)}")
        for key, row in rows.items():
            if snapshot[key].shape != row.shape or snapshot[key].dtype != row.dtype:
                raise ValueError(f"snapshot tensor {key} is {snapshot[key].shape}, this pool needs {row.shape}")
        for key, row in rows.items():
            row.copy_(snapshot[key])
