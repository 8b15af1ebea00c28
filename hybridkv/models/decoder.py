"""The decoder that all models share, and the parts that most of them use.

A layer is `h += mixer(norm(h)); h += feed_forward(norm(h))`. A part's last product adds to h where that is free (many
tokens on a GPU); else what it adds is handed on, and the next norm adds it: one pass over h instead of two. Models
differ in their mixers (full attention, gated attention, Gated DeltaNet) and feed-forward parts, which llama.py and
qwen3_5.py define.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache import LayerHandle, StreamSchema, TensorSpec
from hybridkv.kernels.formats.kv_format import kv_format
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.rope import rope_angles
from hybridkv.kernels.row_ops import FAST, RowOps
from hybridkv.models.config import ModelConfig

Angles = tuple[Tensor, Tensor]  # cos, sin [T, 1, R]


class Mixer(Protocol):
    def __call__(
        self, x: Tensor, angles: Angles, handle: LayerHandle, rows: Tensor | None, h: Tensor | None
    ) -> Tensor | None:
        """`rows`: in the last layer, which tokens' results are wanted; all are stored. `h`: the result may be added
        here instead, and is None then.
        """
        ...


class FeedForward(Protocol):
    def __call__(self, x: Tensor, h: Tensor | None = None) -> Tensor | None: ...


class Model(Protocol):
    """What the engine runs."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def nbytes(self) -> int: ...

    def forward(
        self, tokens: Tensor, positions: Tensor, handles: Mapping[int, LayerHandle], rows: Tensor | None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Norm:
    weight: Tensor  # [hidden] f32
    eps: float
    ops: RowOps = FAST

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        return self.ops.add_rms_norm(x, delta, self.weight, self.eps)


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate x) * up x)."""

    gate_up: Linear  # [2 I, hidden]
    down: Linear  # [hidden, I]

    def __call__(self, x: Tensor, h: Tensor | None = None) -> Tensor | None:
        return self.down.add_to(h, self.gate_up.gated(x))

    def product(self, x: Tensor) -> Tensor:
        """The result alone, added to nothing."""
        return self.down(self.gate_up.gated(x))


@dataclass(frozen=True)
class DecoderLayer:
    mixer_norm: Norm
    mixer: Mixer
    feed_norm: Norm
    feed: FeedForward

    def __call__(
        self, h: Tensor, delta: Tensor | None, angles: Angles, handle: LayerHandle, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """h + delta comes in, and goes out as such a pair; h may be written to. `rows`: which tokens go on; all are
        stored.
        """
        h, x = self.mixer_norm.add(h, delta)
        delta = self.mixer(x, angles, handle, rows, h if rows is None else None)
        h = h if rows is None else h[rows]
        h, x = self.feed_norm.add(h, delta)
        return h, self.feed(x, h) if len(h) else delta


@dataclass(frozen=True)
class Decoder:
    """Token ids to logits, through the cache."""

    config: ModelConfig
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear  # [vocab, hidden]; the embedding itself when tied
    inv_freq: Tensor  # [R] f32

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64 absolute
        handles: Mapping[int, LayerHandle],
        rows: Tensor | None,  # [S] which tokens' logits are wanted; None: of all
    ) -> Tensor:  # [S, vocab] in the dtype of the weights
        h, delta = F.embedding(tokens, self.embedding), None
        angles = rope_angles(positions, self.inv_freq)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            h, delta = layer(h, delta, angles, handles[i], rows if i == last else None)
        return self.head(self.norm.add(h, delta)[1])

    @property
    def nbytes(self) -> int:
        return weight_bytes(self)


def weight_bytes(part: object) -> int:
    """Bytes of all weights of a model, each counted once."""
    seen: dict[int, int] = {}
    _collect(part, seen)
    return sum(seen.values())


def _collect(part: object, seen: dict[int, int]) -> None:
    if isinstance(part, Linear) and part.packed:
        seen[id(part)] = part.nbytes
    elif isinstance(part, Linear):
        _collect((part.weight, part.scale, part.bias), seen)
    elif isinstance(part, Tensor):
        seen[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    elif isinstance(part, tuple):
        for item in part:
            _collect(item, seen)
    elif hasattr(part, "__dataclass_fields__"):
        for item in vars(part).values():
            _collect(item, seen)


def attention_streams(config: ModelConfig, kv_dtype: torch.dtype, page_size: int) -> StreamSchema:
    """Full attention: one stream for each layer and KV head. An entry is a key and a value in the format's tensors."""
    entry = tuple(TensorSpec(*tensor) for tensor in kv_format(kv_dtype).tensors(config.head_dim))
    return StreamSchema("attention", config.attention_layers, entry, page_size, heads=config.kv_heads)
