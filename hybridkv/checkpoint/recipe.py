"""Recipe: how one tensor, under its Hugging Face name, is made from the tensors that a file stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    parts: tuple[str, ...]  # stored names, in the order `make` takes them
    shape: tuple[int, ...]  # of the result
    make: Callable[..., Tensor] | None = None  # None: the only part as it is
    experts: int = 0  # E > 0: the rows of all parts, one after the other for each expert, make [E, rows, columns]
