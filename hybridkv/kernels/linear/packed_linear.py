"""PackedLinear: a layer like `Linear` of several projections of the same inputs, in a GGUF file's formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.kernels.activation import silu_mul
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed import BESIDE, linear_packed
from hybridkv.kernels.linear.packed_weights import Packed, join


class PackedLinear(Linear):
    """Matrices of the same inputs one below the other, each packed or in the model's dtype. Neighbours of one format
    are one product.
    """

    def __init__(self, parts: Sequence[Packed | Tensor], bias: Tensor | None = None) -> None:
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.bias = bias
        self.exact = False
        self.packed = True
        self.nbytes = sum(part.nbytes for part in (*parts, bias) if part is not None)
        joined: list[Packed | Tensor] = []
        for part in parts:
            last = joined[-1] if joined else None
            if isinstance(part, Packed) and isinstance(last, Packed) and last.like(part):
                joined[-1] = join([last, part])
            elif isinstance(part, Tensor) and isinstance(last, Tensor):
                joined[-1] = torch.cat([last, part])
            else:
                joined.append(part)
        self.parts = [part.laid(BESIDE) if isinstance(part, Packed) else Linear(part) for part in joined]

    def __call__(self, x: Tensor) -> Tensor:
        if self._whole is not None:
            return linear_packed(x, self._whole, self.bias)
        y, at = x.new_empty(len(x), self.shape[0]), 0
        for part in self.parts:
            columns = y[:, at : at + part.shape[0]]
            if isinstance(part, Packed):
                linear_packed(x, part, out=columns)
            else:
                columns.copy_(part(x))
            at += part.shape[0]
        return y if self.bias is None else y.add_(self.bias)

    def gated(self, x: Tensor) -> Tensor:
        whole = self._whole
        return silu_mul(self(x)) if whole is None else linear_packed(x, whole, self.bias, gated=True)

    def adds_in_place(self, h: Tensor, x: Tensor) -> bool:
        return False

    @property
    def _whole(self) -> Packed | None:
        """The only part, if there is just one and it is packed."""
        only = self.parts[0] if len(self.parts) == 1 else None
        return only if isinstance(only, Packed) else None
