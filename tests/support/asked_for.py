"""A loader that has no files and writes down what a family's loading code asks it for."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridkv.checkpoint.loader import Loader, Part, count
from hybridkv.kernels.linear.linear import Linear


class AskedFor(Loader):
    """`tensors`: name -> (shape, dtype that it is held in, whether it is a matrix that may be FP8 or packed)."""

    def __init__(self, has: Callable[[str], bool], dtype: torch.dtype, runs_on: str) -> None:
        self.has = has  # type: ignore[method-assign]
        self.device, self.dtype, self.runs_on = torch.device("meta"), dtype, torch.device(runs_on)
        self.used: set[str] = set()
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {}
        self._of_matrices = False

    def _note(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        assert name not in self.tensors, f"{name} is loaded twice"
        self.tensors[name] = tuple(shape), dtype, self._of_matrices and name.endswith(".weight")

    def raw(self, name: str, *shape: int) -> Tensor:
        self._note(name, shape, self.dtype)
        return torch.empty(shape, device="meta")

    def fill(self, out: Tensor, name: str) -> None:
        self._note(name, out.shape, out.dtype)

    def linear(self, inputs: int, *parts: Part) -> Linear:
        self._of_matrices = True
        try:
            return super().linear(inputs, *parts)
        finally:
            self._of_matrices = False

    def stays_packed(self, name: str) -> bool:
        return False

    def joined(self, inputs: int, *parts: Part, dtype: torch.dtype | None = None) -> Tensor:
        held = dtype or self.dtype
        for name, rows in parts:
            self._note(name, (count(rows), inputs), held)
        return torch.empty(sum(count(rows) for _, rows in parts), inputs, dtype=held, device="meta")

    def make_linear(self, weight: Tensor, bias: Tensor | None = None, shared: bool = False) -> Linear:
        return Linear(weight, bias)

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        self._note(name, shape, torch.int64)
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def vector(self, name: str, *shape: int, plus: float = 0.0) -> Tensor:
        self._note(name, shape, torch.float32)
        return torch.empty(shape, device="meta")
