"""From a GGUF file's keys to the config that transformers would have for the same model.

Every key is checked for type and range. A key that changes the mathematics in a way we do not compute is refused, never
skipped. This file reads what every decoder has; what one architecture adds is its `GgufArchitecture`'s. Tensors are
left to `gguf_map.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hybridkv.checkpoint.gguf_architecture import Config, GgufArchitecture
from hybridkv.checkpoint.gguf_file import GgufFile
from hybridkv.config import shown
from hybridkv.errors import ModelFileError, UnsupportedModel

MAX_INT = 2**31 - 1


def find_architecture(file: GgufFile, known: Mapping[str, GgufArchitecture]) -> GgufArchitecture:
    where, metadata = repr(str(file.path)), file.metadata
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelFileError(f"{where}: the key general.architecture is missing or not a string")
    if arch not in known:
        raise UnsupportedModel(f"{where}: architecture {arch[:80]!r} is not supported; {', '.join(known)} are")
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModel(f"{where}: is a GGUF of type {shown(metadata['general.type'])}, not a whole model")
    if metadata.get("split.count", 1) not in (0, 1):
        count = shown(metadata["split.count"])
        raise UnsupportedModel(f"{where}: is one of {count} split files; join them with llama-gguf-split --merge")
    return known[arch]


class Keys:
    """The keys of one file's architecture, each value checked for type and range."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.metadata, self.arch, self.where = file.metadata, arch, repr(str(file.path))
        self.shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        self.blocks = self.integer("block_count")  # with those for multi-token prediction
        if self.blocks > len(self.shapes):
            raise ModelFileError(
                f"{self.where}: {arch}.block_count is {self.blocks}, but there are {len(self.shapes)} tensors in all"
            )
        self.layers = self.blocks - self.integer("nextn_predict_layers", 0, least=0)
        if self.layers < 1:
            raise ModelFileError(
                f"{self.where}: {arch}.nextn_predict_layers leaves {self.layers} of {self.blocks} blocks"
            )

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        full = f"{self.arch}.{key}"
        value = self.metadata.get(full, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one number per layer, all the same
        if isinstance(value, list):
            raise UnsupportedModel(f"{self.where}: {full} differs from layer to layer, which is not supported")
        if value is None:
            raise ModelFileError(f"{self.where}: the key {full} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_INT:
            raise ModelFileError(
                f"{self.where}: {full} is {shown(value)}, expected a whole number from {least} to {MAX_INT}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        full = f"{self.arch}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise ModelFileError(f"{self.where}: the key {full} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise ModelFileError(f"{self.where}: {full} is {shown(value)}, expected a positive number")
        return float(str(np.float32(value)))  # stored as float32: 1e-05 again, not 9.999999747378752e-06

    def neutral(self, key: str, *allowed: object) -> None:
        """Refuse a key that changes the mathematics unless it says what we compute anyway."""
        full = f"{self.arch}.{key}"
        if self.metadata.get(full, allowed[0]) not in allowed:
            raise UnsupportedModel(f"{self.where}: {full} = {shown(self.metadata[full])} is not supported")

    def token(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT else None


def _rope(keys: Keys, head_dim: int, partial: bool) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10000.0)}
    prefix = f"{keys.arch}.rope.scaling."
    known = {"type", "factor", "original_context_length", "finetuned"}
    kind = keys.metadata.get(prefix + "type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" and keys.arch + ".rope.scale_linear" in keys.metadata and factor != 1.0:
        kind = "linear"  # the older name of the same thing
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{keys.where}: RoPE scaling {shown(kind)} is not supported; none, linear and Llama 3's are"
        )
    if unknown := [key for key in keys.metadata if key.startswith(prefix) and key.removeprefix(prefix) not in known]:
        raise UnsupportedModel(f"{keys.where}: the RoPE scaling key {unknown[0][:80]!r} is not supported")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    width = keys.integer("rope.dimension_count", head_dim)
    if width > head_dim or width % 2:
        raise ModelFileError(
            f"{keys.where}: {keys.arch}.rope.dimension_count is {width}, the head dimension {head_dim}"
        )
    if partial:
        part = width / head_dim
        rope["partial_rotary_factor"] = part if int(head_dim * part) == width else math.nextafter(part, 2.0)
    elif width != head_dim:
        raise UnsupportedModel(
            f"{keys.where}: RoPE on {width} of {head_dim} dimensions is not supported for {keys.arch}"
        )
    return rope


def gguf_config(keys: Keys, arch: GgufArchitecture) -> Config:
    """The Hugging Face config."""
    embedding = keys.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelFileError(f"{keys.where}: the tensor 'token_embd.weight' is missing or not a matrix")
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding[0]:
        raise ModelFileError(f"{keys.where}: {len(tokens)} tokens, but the embedding has {embedding[0]} rows")
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    if keys.integer("attention.value_length", head_dim) != head_dim or heads % kv_heads or head_dim % 2:
        raise ModelFileError(
            f"{keys.where}: {heads} heads, {kv_heads} KV heads and a head dimension of {head_dim} do not fit together"
        )
    keys.neutral("attention.causal", True)
    keys.neutral("attention.sliding_window", 0)
    keys.neutral("attention.scale", 0.0)
    for key in ("logit_scale", "residual_scale", "embedding_scale"):
        keys.neutral(key, 1.0, 0.0)
    config: Config = {
        "model_type": arch.model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": _rope(keys, head_dim, arch.partial_rotary),
        "tie_word_embeddings": "output.weight" not in keys.shapes,
        "eos_token_id": keys.token("eos"),
    }
    return config | arch.config(keys)
