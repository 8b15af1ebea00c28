"""InMemory: a model whose tensors are at hand, to be loaded like a checkpoint. Names are Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


class InMemory:
    """Takes the place of `Checkpoint` in a `Loader`."""

    path = Path("tensors in memory")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def packed_form(self, name: str) -> None:
        """Nothing is packed."""

    def experts(self, name: str) -> int:
        """Everything is read whole."""
        return 0

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def read_into(self, out: Tensor, name: str) -> None:
        out.copy_(self.tensors[name])
