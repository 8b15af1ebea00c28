"""A rank's part of a model of any known shape with random weights: for tests and benchmarks at real widths.

A tensor is drawn whole, by its name, whenever it is read, and then cut as one of a checkpoint would be: parts of ranks
that were made by themselves belong together, and nothing is held but what a rank needs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.checkpoint.in_memory import InMemory
from hybridkv.kernels.linear.block_form import BlockForm, Span
from hybridkv.kernels.linear.block_scaled import BlockScaled, empty_blocks, put_blocks
from hybridkv.models import family_of, load_model
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.random_weights import draw_codes
from hybridkv.models.weight_forms import released_forms
from hybridkv.parallel.block_parts import block_shard
from hybridkv.parallel.layers import AnyGroup
from hybridkv.parallel.loader import load_sharded
from hybridkv.parallel.shard import Shard


class RandomTensors(InMemory):
    """Tensors of the size that keeps activations near 1, drawn on `device`: on another kind they are others."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__({})
        self.config, self.device, self.dtype, self.seed = config, device, dtype, seed
        fused = config.architecture == "qwen3_next"
        optional = (".in_proj_qkvz.weight", ".in_proj_ba.weight") if fused else ()
        has = lambda name: (name == "lm_head.weight" and not config.tied) or name.endswith(optional)  # noqa: E731
        self.weights = {weight.name: weight for weight in family_of(config).weights(config, has)}

    def names(self) -> list[str]:
        return list(self.weights)

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights[name].shape

    def read(self, name: str) -> Tensor:
        weight, device = self.weights[name], self.device
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + self.seed)
        if weight.kind == "indices":  # rows of different experts
            assert self.config.v4 is not None
            rows = torch.rand(weight.shape[0], self.config.v4.experts, generator=generator, device=device)
            return rows.topk(weight.shape[1]).indices
        dtype = torch.float32 if weight.kind == "vector" else self.dtype
        found = torch.randn(weight.shape, generator=generator, device=device, dtype=dtype)
        if len(weight.shape) > 1:
            return found.mul_(weight.shape[-1] ** -0.5)
        return found.mul_(0.1).add_(1.0 if name.endswith("norm.weight") else 0.0)

    def read_into(self, out: Tensor, name: str) -> None:
        out.copy_(self.read(name))


class RandomCodes(RandomTensors):
    """The same, with random codes for all that the model's released files have in codes."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__(config, device, dtype, seed)
        self.forms = released_forms(config, self.__contains__)

    def block_form(self, name: str) -> BlockForm | None:
        return self.forms.get(name)

    def read_blocks_into(
        self,
        out: BlockScaled,
        name: str,
        experts: range | None = None,
        rows: Sequence[Span] | None = None,
        columns: Span | None = None,
    ) -> None:
        whole, device = empty_blocks(self.forms[name], self.weights[name].shape, self.device), self.device
        draw_codes(whole, torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + self.seed))
        places = [(out, whole)]
        if whole.codes.ndim == 3:
            places = [(out[i], whole[e]) for i, e in enumerate(experts or range(len(whole)))]
        for there, matrix in places:
            row, R = 0, whole.form.rows
            for begin, end in rows or ((0, matrix.shape[0]),):
                scales = matrix.scales[begin // R : -(-end // R)]
                put_blocks(there, row, BlockScaled(matrix.codes[begin:end], scales, whole.form), begin % R, columns)
                row += end - begin


def random_part(
    tensors: RandomTensors, shard: Shard, group: AnyGroup, device: torch.device, fp8: bool = False
) -> Model:
    """A rank's part of the model."""
    coded = isinstance(tensors, RandomCodes)
    if coded:
        shard = block_shard(tensors.config, shard, tensors.__contains__, tensors.forms)
    return load_sharded(tensors.config, shard, group, tensors, device, tensors.dtype, fp8=fp8, released=coded)


def random_whole(tensors: RandomTensors, device: torch.device) -> Model:
    """The model of which `random_part` gives parts."""
    return load_model(tensors.config, tensors, device, tensors.dtype, released=isinstance(tensors, RandomCodes))
