"""InMemory: a model whose tensors are at hand, to be loaded like a checkpoint. Names are Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from hybridkv.kernels.linear.block_form import BlockForm, Span
from hybridkv.kernels.linear.block_scaled import BlockScaled


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

    def block_form(self, name: str) -> BlockForm | None:
        """Nothing is in codes."""
        return None

    def read_blocks_into(
        self,
        out: BlockScaled,
        name: str,
        experts: range | None = None,
        rows: Sequence[Span] | None = None,
        columns: Span | None = None,
    ) -> None:
        """As `Checkpoint` has it, where block_form says that there are codes."""
        raise NotImplementedError(f"{name} is at hand as its values")

    def experts(self, name: str) -> int:
        """Everything is read whole."""
        return 0

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def read_into(self, out: Tensor, name: str) -> None:
        out.copy_(self.tensors[name])
