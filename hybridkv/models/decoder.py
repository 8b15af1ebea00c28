"""The decoder that most families share, and the parts they build it from.

A layer computes h += mixer(norm(h)), then h += feed_forward(norm(h)). The sum is not always taken at once: a layer
works on a pair (h, delta) that stands for h + delta. With many tokens on a GPU the part's last product adds to h for
free and returns None as delta. Otherwise delta is the part's result, and the next norm adds it: one pass over h instead
of two.

Families differ in their mixers (`attention.py`, `deltanet.py`) and in their feed-forward parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache import LayerHandle
from hybridkv.checkpoint.loader import Loader
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.rope import rope_angles
from hybridkv.kernels.row_ops import FAST, RowOps
from hybridkv.models.config import ModelConfig

Angles = tuple[Tensor, Tensor]  # cos, sin [T, 1, R]


class Mixer(Protocol):
    """The part of a layer that reads other tokens, through its handle."""

    def __call__(
        self, x: Tensor, angles: Angles, handle: LayerHandle, rows: Tensor | None, h: Tensor | None
    ) -> Tensor | None:
        """The result for x [T, hidden], or None if it was added to `h` instead. `rows`: in the last layer, the tokens
        whose results are wanted; keys, values and state of all tokens are stored.
        """
        ...


class FeedForward(Protocol):
    """The part of a layer that sees one token at a time."""

    def __call__(self, x: Tensor, h: Tensor | None = None) -> Tensor | None:
        """The result for x [T, hidden], or None if it was added to `h` instead."""
        ...


class Model(Protocol):
    """What the engine runs. The handles are those of `KVCacheManager.acquire`: each family knows its own kind."""

    @property
    def config(self) -> ModelConfig:
        """What was loaded."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        ...

    def forward(self, tokens: Tensor, positions: Tensor, handles: Mapping[int, Any], rows: Tensor | None) -> Tensor:
        """[T] tokens at [T] positions -> [S, vocab] logits of the tokens in `rows`; None: of all."""
        ...

    # the two halves of `forward`, for many rows whose logits are not all wanted at once

    def hidden(self, tokens: Tensor, positions: Tensor, handles: Mapping[int, Any], rows: Tensor | None) -> Tensor:
        """As `forward`, up to what the head turns into logits: [S, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab]."""
        ...


@dataclass(frozen=True)
class Norm:
    """RMS norm."""

    weight: Tensor  # [hidden] f32
    eps: float
    ops: RowOps = FAST

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
    """Mixer and feed-forward, each after its norm. A sum is added where the next norm reads it."""

    mixer_norm: Norm
    mixer: Mixer
    feed_norm: Norm
    feed: FeedForward

    def __call__(
        self, h: Tensor, delta: Tensor | None, angles: Angles, handle: LayerHandle, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(h, delta) after the layer. h may be written to. `rows`: the tokens that go on; all are stored."""
        h, x = self.mixer_norm.add(h, delta)
        delta = self.mixer(x, angles, handle, rows, h if rows is None else None)
        h = h if rows is None else h[rows]
        h, x = self.feed_norm.add(h, delta)
        return h, self.feed(x, h) if h.shape[0] else delta


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
        rows: Tensor | None,  # [S] tokens whose logits are wanted; None: all
    ) -> Tensor:  # [S, vocab] in the dtype of the weights
        """Logits of the wanted tokens; keys, values and state of all tokens are stored."""
        return self.logits(self.hidden(tokens, positions, handles, rows))

    @torch.inference_mode()
    def hidden(
        self, tokens: Tensor, positions: Tensor, handles: Mapping[int, LayerHandle], rows: Tensor | None
    ) -> Tensor:
        """[S, hidden]: what the head turns into logits."""
        h, delta = self.embed(tokens), None
        angles = rope_angles(positions, self.inv_freq)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            h, delta = layer(h, delta, angles, handles[i], rows if i == last else None)
        return self.norm.add(h, delta)[1]

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] tokens -> [T, hidden]."""
        return F.embedding(tokens, self.embedding)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, vocab] of what `hidden` gave."""
        return self.head(hidden)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return weight_bytes(self)


def assemble(config: ModelConfig, loader: Loader, layers: tuple[DecoderLayer, ...], norm_plus: float = 0.0) -> Decoder:
    """These layers with embedding, final norm and head around them. `norm_plus`: added to the norm's weight."""
    embedding = loader.weight("model.embed_tokens.weight", config.vocab, config.hidden)
    has_head = loader.has("lm_head.weight")
    if config.tied or not has_head:
        head = loader.make_linear(embedding, shared=True)
    else:
        head = loader.linear(config.hidden, ("lm_head", config.vocab))
    if config.tied and has_head:
        loader.used.add("lm_head.weight")  # some writers store the tied matrix twice
    norm = Norm(loader.vector("model.norm.weight", config.hidden, plus=norm_plus), config.eps, loader.ops)
    inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device=loader.device)
    return Decoder(config, embedding, layers, norm, head, inv_freq)


def gated_mlp(loader: Loader, name: str, hidden: int, intermediate: int) -> GatedMlp:
    """The feed-forward of most families, its weights read under `name`."""
    gate_up = loader.linear(hidden, (f"{name}.gate_proj", intermediate), (f"{name}.up_proj", intermediate))
    return GatedMlp(gate_up, loader.linear(intermediate, (f"{name}.down_proj", hidden)))


def layer_norm(config: ModelConfig, loader: Loader, name: str, plus: float = 0.0) -> Norm:
    """The norm before a mixer or a feed-forward part. `plus`: added to its weight."""
    return Norm(loader.vector(f"{name}.weight", config.hidden, plus=plus), config.eps, loader.ops)


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
