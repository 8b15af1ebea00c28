"""StatePool: what a request holds whatever its length (recurrent state, convolution tails, rings), one row a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.cache.schema import StateSchema

Snapshot = dict[tuple[str, str], Tensor]  # (state, tensor) -> [layers, *shape]


class StatePool:
    """One tensor [layers, slots, *shape] for each state spec."""

    def __init__(self, schemas: tuple[StateSchema, ...], slots: int, device: torch.device) -> None:
        self.schemas, self.slots = schemas, slots
        self.tensors = {
            (s.name, t.name): torch.full((len(s.layers), slots, *t.shape), t.init, dtype=t.dtype, device=device)
            for s in schemas
            for t in s.tensors
        }

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def layer(self, layer: int) -> dict[str, Tensor]:
        """Views [slots, *shape] of all state that a model layer has."""
        return {
            t.name: self.tensors[s.name, t.name][s.layers.index(layer)]
            for s in self.schemas
            if layer in s.layers
            for t in s.tensors
        }

    def reset(self, slot: int) -> None:
        for s in self.schemas:
            for t in s.tensors:
                self.tensors[s.name, t.name][:, slot] = t.init

    def copy(self, source: int, target: int) -> None:
        for t in self.tensors.values():
            t[:, target] = t[:, source]

    def snapshot(self, slot: int) -> Snapshot:
        return {key: t[:, slot].clone() for key, t in self.tensors.items()}

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        if snapshot.keys() != self.tensors.keys():
            raise ValueError(f"the snapshot holds {sorted(snapshot)}, this pool {sorted(self.tensors)}")
        for key, t in self.tensors.items():
            if snapshot[key].shape != t[:, slot].shape or snapshot[key].dtype != t.dtype:
                raise ValueError(f"snapshot tensor {key} is {snapshot[key].shape}, this pool needs {t[:, slot].shape}")
        for key, t in self.tensors.items():
            t[:, slot] = snapshot[key]
