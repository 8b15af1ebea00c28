"""ModelConfig: what the forward pass needs to know of a model, checked once, from a Hugging Face style config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybridkv.checkpoint.config_reader import Raw, Reader
from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.models.deepseek_config import DeepseekV4Config, parse_deepseek_v4


@dataclass(frozen=True)
class GdnConfig:
    """A Gated DeltaNet layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
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

    architecture: str
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
    inv_freq: tuple[float, ...]  # one frequency for each rotated pair
    eos_ids: tuple[int, ...]
    gdn: GdnConfig | None = None
    moe: MoeConfig | None = None
    v4: DeepseekV4Config | None = None

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        if self.gdn is None:
            return ()
        return tuple(i for i in range(self.layers) if i not in set(self.attention_layers))

    @staticmethod
    def from_dict(raw: Raw) -> ModelConfig:
        return parse_config(raw)


# model_type -> the architecture that runs it; a vision-language checkpoint runs as its text model
ARCHITECTURES = {
    "llama": "llama",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
    "deepseek_v4": "deepseek_v4",
}
MAX_LAYERS = 1024
MAX_HEAD_DIM = 1 << 14


def parse_config(raw: Raw) -> ModelConfig:
    model_type = raw.get("model_type")
    nested = raw.get("text_config")
    if isinstance(nested, Mapping):
        raw = {
            **nested,
            "tie_word_embeddings": nested.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)),
        }
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        raise UnsupportedModel(
            f"model type {str(model_type)[:80]!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    if architecture == "deepseek_v4":
        return _deepseek_v4(Reader(raw))
    if raw.get("quantization_config") is not None:
        raise UnsupportedModel("the checkpoint is quantised (quantization_config); use its bf16 form or a GGUF file")
    read = Reader(raw)
    hidden, layers = read.size("hidden_size"), read.size("num_hidden_layers", limit=MAX_LAYERS)
    heads = read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    head_dim = read.size("head_dim", hidden // heads if heads <= hidden else None, limit=MAX_HEAD_DIM)
    if heads % kv_heads:
        raise ModelFileError(f"config: {heads} attention heads cannot share {kv_heads} KV heads evenly")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key) and architecture != "llama":
            raise UnsupportedModel(f"config: {key} is not supported for {architecture}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"config: activation {raw['hidden_act']!r} is not supported, only silu")
    hybrid = architecture != "llama"
    moe = _moe(read, layers) if architecture in ("qwen3_5_moe", "qwen3_next") else None
    max_positions = read.size("max_position_embeddings", 32768 if hybrid else None, limit=1 << 31)
    return ModelConfig(
        architecture=architecture,
        vocab=read.size("vocab_size"),
        hidden=hidden,
        intermediate=read.size("intermediate_size", moe.intermediate if moe else None),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=read.number("rms_norm_eps", 1e-6, high=1.0),
        max_positions=max_positions,
        tied=read.flag("tie_word_embeddings", False),
        attention_layers=_attention_layers(read, layers) if hybrid else tuple(range(layers)),
        inv_freq=_inv_freq(read, head_dim, 0.25 if hybrid else 1.0),
        eos_ids=_ids(raw.get("eos_token_id")),
        gdn=_gdn(read) if hybrid else None,
        moe=moe,
    )


def _deepseek_v4(read: Reader) -> ModelConfig:
    layers = read.size("num_hidden_layers", limit=MAX_LAYERS)
    heads, head_dim = read.size("num_attention_heads"), read.size("head_dim", limit=MAX_HEAD_DIM)
    inv_freq, v4 = parse_deepseek_v4(read, layers, heads, head_dim)
    return ModelConfig(
        architecture="deepseek_v4",
        vocab=read.size("vocab_size"),
        hidden=read.size("hidden_size"),
        intermediate=v4.expert_width,
        layers=layers,
        heads=heads,
        kv_heads=1,  # one vector serves all heads as key and value
        head_dim=head_dim,
        eps=read.number("rms_norm_eps", 1e-6, high=1.0),
        max_positions=read.size("max_position_embeddings", limit=1 << 31),
        tied=read.flag("tie_word_embeddings", False),
        attention_layers=(),
        inv_freq=inv_freq,
        eos_ids=_ids(read.raw.get("eos_token_id")),
        v4=v4,
    )


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _attention_layers(read: Reader, layers: int) -> tuple[int, ...]:
    types = read.raw.get("layer_types")
    if types is None:
        every = read.size("full_attention_interval", 4)
        return tuple(i for i in range(layers) if (i + 1) % every == 0)
    kinds = ("full_attention", "linear_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in kinds for kind in types):
        raise ModelFileError(
            f"config: layer_types must name full_attention or linear_attention for each of {layers} layers"
        )
    return tuple(i for i, kind in enumerate(types) if kind == "full_attention")


def _gdn(read: Reader) -> GdnConfig:
    gdn = GdnConfig(
        key_heads=read.size("linear_num_key_heads"),
        value_heads=read.size("linear_num_value_heads"),
        key_dim=read.size("linear_key_head_dim"),
        value_dim=read.size("linear_value_head_dim"),
        taps=read.size("linear_conv_kernel_dim", 4, limit=64),
    )
    if gdn.value_heads % gdn.key_heads:
        raise ModelFileError(f"config: {gdn.value_heads} value heads cannot share {gdn.key_heads} key heads evenly")
    return gdn


def _moe(read: Reader, layers: int) -> MoeConfig:
    experts, per_token = read.size("num_experts"), read.size("num_experts_per_tok")
    if per_token > experts:
        raise ModelFileError(f"config: num_experts_per_tok {per_token} exceeds num_experts {experts}")
    listed = read.raw.get("mlp_only_layers") or []
    every = read.size("decoder_sparse_step", 1)
    dense = {i for i in range(layers) if (isinstance(listed, list) and i in listed) or (i + 1) % every}
    return MoeConfig(
        experts=experts,
        per_token=per_token,
        intermediate=read.size("moe_intermediate_size"),
        shared_intermediate=read.size("shared_expert_intermediate_size"),
        renormalise=read.flag("norm_topk_prob", True),
        dense_layers=frozenset(dense),
    )


def _inv_freq(read: Reader, head_dim: int, default_part: float) -> tuple[float, ...]:
    """Rotation frequencies, scaling included. Accepts both spellings: rope_parameters, or rope_theta with
    rope_scaling.
    """
    rope = read.raw.get("rope_parameters") or read.raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelFileError("config: rope_parameters must be an object")
    merged = Reader({key: read.raw.get(key) for key in ("rope_theta", "partial_rotary_factor")} | dict(rope))
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    theta = merged.number("rope_theta", 10000.0)
    part = merged.number("partial_rotary_factor", default_part)
    if default_part == 1.0 and part != 1.0:
        raise UnsupportedModel(f"config: llama with rotation of a part of the head ({part:g}) is not supported")
    rotary = int(head_dim * part)
    if rotary % 2 or not 2 <= rotary <= head_dim:
        raise ModelFileError(
            f"config: {rotary} rotated channels of a head of {head_dim} is not an even number in range"
        )
    freq = 1.0 / theta ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)
    if kind == "linear":
        freq = freq / merged.number("factor")
    elif kind == "llama3":
        freq = _llama3(freq, merged)
    elif kind not in ("default", "mrope"):
        raise UnsupportedModel(
            f"config: rope type {kind[:40]!r} is not supported; supported are default, linear, llama3"
        )
    factors = rope.get("freq_factors")
    if factors is not None:
        good = (
            isinstance(factors, list) and len(factors) == len(freq) and all(isinstance(f, float | int) for f in factors)
        )
        if not good or not all(0 < f <= 1e30 for f in factors):  # type: ignore[union-attr]
            raise ModelFileError(f"config: {len(freq)} positive rope freq_factors are needed, not {str(factors)[:40]}")
        freq = freq / torch.tensor(factors, dtype=torch.float32)
    if not bool((freq.isfinite() & (freq > 0)).all()):
        raise ModelFileError(f"config: rope_theta {theta:g} and its scaling give rotation frequencies outside f32")
    return tuple(freq.tolist())


def _llama3(freq: torch.Tensor, rope: Reader) -> torch.Tensor:
    """Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ModelFileError(f"config: high_freq_factor {high:g} must exceed low_freq_factor {low:g}")
    turns = (
        rope.number("original_max_position_embeddings") * freq / (2 * math.pi)
    )  # rotations over the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return freq * blend + freq / factor * (1 - blend)
