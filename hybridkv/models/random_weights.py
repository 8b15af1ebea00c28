"""A model of any known shape with random weights, made on the device: for tests and benchmarks at real widths."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.checkpoint.loader import Loader
from hybridkv.models import FAMILIES
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model


class RandomLoader(Loader):
    """Gives weights of the size that keeps activations near 1, from a seed."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0, fp8: bool = False, exact: bool = False) -> None:
        self.device, self.dtype, self.fp8, self.exact = torch.device(device), dtype, fp8, exact
        self.runs_on = self.device
        self.used: set[str] = set()
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name: a head of its own, nothing else that is optional."""
        return name == "lm_head.weight"

    def raw(self, name: str, *shape: int) -> Tensor:
        wide = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return wide.mul_(shape[-1] ** -0.5 if len(shape) > 1 else 0.1)

    def fill(self, out: Tensor, name: str) -> None:
        out.copy_(self.raw(name, *out.shape))

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        """Rows of different indices."""
        rows = torch.rand(*shape[:-1], below, generator=self.generator, device=self.device)
        return rows.topk(shape[-1]).indices

    def vector(self, name: str, *shape: int, plus: float = 0.0) -> Tensor:
        return self.raw(name, *shape).float() + (plus or (1.0 if name.endswith("norm.weight") else 0.0))


def random_decoder(
    config: ModelConfig, device: str, dtype: torch.dtype, fp8: bool = False, exact: bool = False
) -> Model:
    """`fp8`: projections in E4M3. `exact`: a model for exact mode, with the same weights."""
    return FAMILIES[config.architecture].load(config, RandomLoader(device, dtype, fp8=fp8, exact=exact))
