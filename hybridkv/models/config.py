"""ModelConfig: what the forward pass needs to know of a model, checked once, from a Hugging Face style config.

Each family parses its own config in its own file. What several of them read alike is here: the common sizes
(`common_fields`), rotary positions, and ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridkv.checkpoint.config_reader import Raw, Reader
from hybridkv.checkpoint.quantisation import stored_as
from hybridkv.config import shown
from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.models.deepseek_config import DeepseekV4Config
from hybridkv.models.rotation import Linear, Llama3, Rotation

MAX_LAYERS = 1024
MAX_HEAD_DIM = 1 << 14
MAX_POSITIONS = 1 << 31


@dataclass(frozen=True)
class GdnConfig:
    """A Gated DeltaNet layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel_width: int  # tokens that the causal convolution sees

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class MoeConfig:
    """A mixture-of-experts feed-forward layer with one shared expert."""

    experts: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    renormalise: bool
    dense_layers: frozenset[int]  # layers that have a plain feed-forward instead


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder-only text model."""

    architecture: str  # the name of its family
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    tied: bool
    attention_layers: tuple[int, ...]  # layers with full attention; the others are Gated DeltaNet, or `v4` says
    rotation: Rotation  # of queries and keys; DeepSeek-V4: of its window layers
    eos_ids: tuple[int, ...]
    gdn: GdnConfig | None = None
    moe: MoeConfig | None = None
    v4: DeepseekV4Config | None = None
    scale: float | None = None  # of attention scores; None: head_dim ** -0.5

    @property
    def inv_freq(self) -> tuple[float, ...]:
        """One frequency for each rotated pair."""
        return self.rotation.frequencies

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by, in the layers and where eviction scores the cache."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with recurrent state."""
        if self.gdn is None:
            return ()
        attention = set(self.attention_layers)
        return tuple(i for i in range(self.layers) if i not in attention)

    @staticmethod
    def from_dict(raw: Raw) -> ModelConfig:
        """What a `config.json` says, checked; UnsupportedModel if its model type is not known."""
        from hybridkv.models.registry import parse_config

        return parse_config(raw)


def common_fields(read: Reader, architecture: str, methods: Sequence[str] = ()) -> dict[str, Any]:
    """Those fields of ModelConfig that every Llama-like family reads alike. What no such family computes is refused.
    `methods`: the quant_methods whose folders are read.
    """
    quantised = read.raw.get("quantization_config")
    if quantised is not None and not methods:
        raise UnsupportedModel("the checkpoint is quantised (quantization_config); use its bf16 form or a GGUF file")
    if quantised is not None:
        stored_as(quantised, methods)  # refuses what is not read
    hidden = read.size("hidden_size")
    layers = read.size("num_hidden_layers", limit=MAX_LAYERS)
    heads = read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    head_dim = read.size("head_dim", hidden // heads if heads <= hidden else None, limit=MAX_HEAD_DIM)
    if heads % kv_heads:
        raise ModelFileError(f"config: {heads} attention heads cannot share {kv_heads} KV heads evenly")
    if read.raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"config: activation {shown(read.raw['hidden_act'])} is not supported, only silu")
    return dict(
        architecture=architecture,
        vocab=read.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=read.number("rms_norm_eps", 1e-6, high=1.0),
        tied=read.flag("tie_word_embeddings", False),
        eos_ids=token_ids(read.raw.get("eos_token_id")),
    )


def refuse_biases(read: Reader, architecture: str) -> None:
    """UnsupportedModel if the config asks for biases."""
    for key in ("attention_bias", "mlp_bias"):
        if read.raw.get(key):
            raise UnsupportedModel(f"config: {key} is not supported for {architecture}")


def token_ids(value: object) -> tuple[int, ...]:
    """One id, several, or none; what is not an id is left out."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


# --- rotation -------------------------------------------------------------------------------------------------------


def read_rotation(read: Reader, head_dim: int, default_part: float | None = None) -> Rotation:
    """Rotary positions, scaling included. Both spellings are read: rope_parameters, or rope_theta with rope_scaling.
    `default_part`: which part of each head is rotated if the config does not say; None: always the whole.
    """
    rope = read.raw.get("rope_parameters") or read.raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelFileError(f"config: rope_parameters must be an object, not {shown(rope)}")
    merged = Reader({key: read.raw.get(key) for key in ("rope_theta", "partial_rotary_factor")} | dict(rope))
    theta = merged.number("rope_theta", 10000.0)
    channels = _rotated_channels(merged, head_dim, default_part)
    scaling = _scaling(str(rope.get("rope_type", rope.get("type", "default"))), merged)
    factors = rope.get("freq_factors")
    divided = None if factors is None else _freq_factors(factors, channels // 2)
    return Rotation(theta, channels, scaling, divided).check()


def _rotated_channels(rope: Reader, head_dim: int, default_part: float | None) -> int:
    part = rope.number("partial_rotary_factor", default_part or 1.0, high=1e6)
    if default_part is None and part != 1.0:
        raise UnsupportedModel(f"config: rotation of a part of the head ({part:g}) is not supported for this family")
    rotary = int(head_dim * part)
    if rotary % 2 or not 2 <= rotary <= head_dim:
        raise ModelFileError(
            f"config: {rotary} rotated channels of a head of {head_dim} is not an even number in range"
        )
    return rotary


def _scaling(kind: str, rope: Reader) -> Linear | Llama3 | None:
    if kind == "linear":
        return Linear(rope.number("factor"))
    if kind == "llama3":
        return _llama3(rope)
    if kind not in ("default", "mrope"):
        raise UnsupportedModel(
            f"config: rope type {kind[:40]!r} is not supported; supported are default, linear, llama3"
        )
    return None


def _llama3(rope: Reader) -> Llama3:
    factor = rope.number("factor")
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    if high <= low:
        raise ModelFileError(f"config: high_freq_factor {high:g} must exceed low_freq_factor {low:g}")
    return Llama3(factor, low, high, rope.number("original_max_position_embeddings"))


def _freq_factors(factors: object, pairs: int) -> tuple[float, ...]:
    """[pairs] what each frequency is divided by, as GGUF files have it."""
    good = isinstance(factors, list) and len(factors) == pairs and all(isinstance(f, float | int) for f in factors)
    if not good or not all(0 < f <= 1e30 for f in factors):  # type: ignore[union-attr]
        raise ModelFileError(f"config: {pairs} positive rope freq_factors are needed, not {shown(factors)}")
    return tuple(map(float, factors))  # type: ignore[arg-type]
