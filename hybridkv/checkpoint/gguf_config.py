"""From a GGUF file's keys to the config that transformers would have for the same model.

Every key is checked for type and range; a key that changes the mathematics in a way we do not compute is refused, never
skipped. The tensors are left to `gguf_map.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hybridkv.checkpoint.gguf_file import GgufFile
from hybridkv.errors import ModelFileError, UnsupportedModel

MODEL_TYPES = {
    "llama": "llama",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next",
}
MAX_INT = 2**31 - 1


def gguf_architecture(file: GgufFile) -> str:
    where, metadata = repr(str(file.path)), file.metadata
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelFileError(f"{where}: the key general.architecture is missing or not a string")
    if arch not in MODEL_TYPES:
        raise UnsupportedModel(f"{where}: architecture {arch[:80]!r} is not supported; {', '.join(MODEL_TYPES)} are")
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModel(f"{where}: is a GGUF of type {shown(metadata['general.type'])}, not a whole model")
    if metadata.get("split.count", 1) not in (0, 1):
        count = shown(metadata["split.count"])
        raise UnsupportedModel(f"{where}: is one of {count} split files; join them with llama-gguf-split --merge")
    return arch


def shown(value: object) -> str:
    """A value for a message: a key may hold a very long text or list."""
    return repr(value[:80]) if isinstance(value, str) else f"{value!r}" if isinstance(value, int | float) else "a list"


class _Keys:
    """The metadata of one architecture, each value checked for type and range."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.metadata, self.arch, self.where = file.metadata, arch, repr(str(file.path))

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


def _rope(keys: _Keys, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10000.0)}
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
    if keys.arch == "llama" and width != head_dim:
        raise UnsupportedModel(f"{keys.where}: RoPE on {width} of {head_dim} dimensions is not supported for llama")
    if keys.arch != "llama":
        part = width / head_dim
        rope["partial_rotary_factor"] = part if int(head_dim * part) == width else math.nextafter(part, 2.0)
    return rope


def _layer_types(keys: _Keys, blocks: int, trunk: int) -> list[str]:
    marks = keys.metadata.get(f"{keys.arch}.attention.recurrent_layers")
    if marks is None:
        interval = keys.integer("full_attention_interval", 4)
        marks = [(i + 1) % interval != 0 for i in range(trunk)]
    if not isinstance(marks, list) or not trunk <= len(marks) <= blocks or any(mark not in (0, 1) for mark in marks):
        raise ModelFileError(
            f"{keys.where}: {keys.arch}.attention.recurrent_layers must hold 0 or 1 for {blocks} layers"
        )
    return ["linear_attention" if mark else "full_attention" for mark in marks[:trunk]]


def gguf_config(file: GgufFile) -> tuple[dict[str, Any], int]:
    """The Hugging Face config, and how many blocks the file has (with those for multi-token prediction)."""
    arch = gguf_architecture(file)
    keys, shapes = _Keys(file, arch), {name: tensor.shape for name, tensor in file.tensors.items()}
    blocks = keys.integer("block_count")
    if blocks > len(shapes):
        raise ModelFileError(
            f"{keys.where}: {arch}.block_count is {blocks}, but there are {len(shapes)} tensors in all"
        )
    trunk = blocks - keys.integer("nextn_predict_layers", 0, least=0)
    if trunk < 1:
        raise ModelFileError(f"{keys.where}: {arch}.nextn_predict_layers leaves {trunk} of {blocks} blocks")
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelFileError(f"{keys.where}: the tensor 'token_embd.weight' is missing or not a matrix")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
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
    config: dict[str, Any] = {
        "model_type": MODEL_TYPES[arch],
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "num_hidden_layers": trunk,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": _rope(keys, head_dim),
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": keys.token("eos"),
    }
    experts = keys.integer("expert_count", 0, least=0)
    if arch == "llama":
        if experts:
            raise UnsupportedModel(f"{keys.where}: a llama model with {experts} experts (Mixtral) is not supported")
        config["attention_bias"] = any(".attn_" in name and name.endswith(".bias") for name in shapes)
        config["mlp_bias"] = any(".ffn_" in name and name.endswith(".bias") for name in shapes)
    else:
        v_heads = keys.integer("ssm.time_step_rank")
        k_heads, inner = keys.integer("ssm.group_count"), keys.integer("ssm.inner_size")
        if inner % v_heads or v_heads % k_heads:
            raise ModelFileError(
                f"{keys.where}: ssm sizes do not divide: inner {inner}, V heads {v_heads}, K heads {k_heads}"
            )
        config |= {
            "layer_types": _layer_types(keys, blocks, trunk),
            "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
            "linear_key_head_dim": keys.integer("ssm.state_size"),
            "linear_value_head_dim": inner // v_heads,
            "linear_num_key_heads": k_heads,
            "linear_num_value_heads": v_heads,
        }
    if arch in ("qwen35moe", "qwen3next"):
        keys.neutral("expert_gating_func", 1)
        used = keys.integer("expert_used_count")
        if not 1 <= used <= experts:
            raise ModelFileError(f"{keys.where}: {arch}.expert_used_count is {used} of {experts} experts")
        widths = [shapes.get(f"blk.0.ffn_down_{name}.weight", (0,))[-1] or None for name in ("exps", "shexp")]
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": used,
            "moe_intermediate_size": keys.integer("expert_feed_forward_length", widths[0]),
            "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", widths[1]),
            "norm_topk_prob": True,
        }
    else:
        config["intermediate_size"] = keys.integer("feed_forward_length")
    return config, blocks
