"""The tensors of all files of a safetensors model, under their stored names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridkv.checkpoint.recipe import Recipe
from hybridkv.checkpoint.safetensors_file import DTYPES, SafetensorsFile, StoredTensor
from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.kernels.linear.block_form import BlockForm, Span
from hybridkv.kernels.linear.block_scaled import BlockScaled


class SafetensorsStore:
    def __init__(self, files: list[SafetensorsFile]) -> None:
        self._files = files
        self.home: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self.home:
                    both = f"{self.home[name].path.name!r} and {file.path.name!r}"
                    raise ModelFileError(f"{str(file.path.parent)!r}: tensor {name[:200]!r} is in both {both}")
                self.home[name] = file

    def file_of(self, name: str) -> str | None:
        return self.home[name].path.name if name in self.home else None

    def names(self) -> list[str]:
        return sorted(self.home)

    def stored(self, name: str) -> StoredTensor:
        return self.home[name].tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `read` gives, or UnsupportedModel for a tensor that is not read."""
        found = DTYPES.get(self.stored(name).dtype)
        if found is None:
            raise UnsupportedModel(
                f"{self.where(name)}: tensor {name[:200]!r} is {self.stored(name).dtype}; "
                "BF16, F16, F32 and GGUF are read"
            )
        return found

    def nbytes(self, name: str) -> int:
        return self.stored(name).nbytes

    def read(self, name: str) -> Tensor:
        return self.home[name].read(name)

    def block_form(self, name: str) -> BlockForm | None:
        """How a matrix is stored as codes with scales; None: it is not."""
        return None

    def read_rows(self, name: str, rows: Span | None = None) -> Tensor:
        """A tensor as it is stored, or some of its rows: no others are read."""
        return self.home[name].read(name, rows)

    def read_blocks(self, name: str, rows: Span | None = None) -> BlockScaled:
        """Codes and scales, where block_form says that there are any. Of `rows`: the first scales are of the block in
        which the first one lies.
        """
        raise NotImplementedError(f"{name} is stored without scales")

    def expert(self, recipe: Recipe, expert: int) -> Iterator[Tensor]:
        each = len(recipe.parts) // recipe.experts  # [rows, columns] each, those of one expert side by side
        for name in recipe.parts[expert * each : (expert + 1) * each]:
            yield self.read(name)

    def where(self, name: str) -> str:
        return repr(str(self.home[name].path.parent))

    def close(self) -> None:
        for file in self._files:
            file.close()
