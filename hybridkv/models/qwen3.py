"""Qwen3 (dense): Llama with an RMS norm of each query and key head. docs/add_a_model.md goes through this file."""

from __future__ import annotations

from hybridkv.checkpoint.config_reader import Reader
from hybridkv.checkpoint.gguf_architecture import Config, GgufArchitecture
from hybridkv.checkpoint.gguf_config import Keys
from hybridkv.checkpoint.gguf_map import GATED_MLP, Row, Table
from hybridkv.checkpoint.loader import Loader
from hybridkv.errors import UnsupportedModel
from hybridkv.models.attention import attention_schema, load_attention
from hybridkv.models.config import MAX_POSITIONS, ModelConfig, common_fields, refuse_biases, rope_frequencies
from hybridkv.models.decoder import Decoder, DecoderLayer, assemble, gated_mlp, layer_norm
from hybridkv.models.family import Family


def parse(read: Reader) -> ModelConfig:
    """A `config.json` of this family, checked."""
    common = common_fields(read, "qwen3")
    refuse_biases(read, "qwen3")
    types = read.raw.get("layer_types") or []
    if read.raw.get("use_sliding_window") or not isinstance(types, list) or "sliding_attention" in types:
        raise UnsupportedModel("config: sliding windows (use_sliding_window, layer_types) are not supported for qwen3")
    return ModelConfig(
        **common,
        intermediate=read.size("intermediate_size"),
        max_positions=read.size("max_position_embeddings", limit=MAX_POSITIONS),
        attention_layers=tuple(range(common["layers"])),
        inv_freq=rope_frequencies(read, common["head_dim"]),
    )


def load(config: ModelConfig, loader: Loader) -> Decoder:
    """The model, its weights read."""
    layers = tuple(_layer(config, loader, f"model.layers.{i}") for i in range(config.layers))
    return assemble(config, loader, layers)


def _layer(config: ModelConfig, loader: Loader, name: str) -> DecoderLayer:
    return DecoderLayer(
        mixer_norm=layer_norm(config, loader, f"{name}.input_layernorm"),
        mixer=load_attention(config, loader, f"{name}.self_attn", normed=True),
        feed_norm=layer_norm(config, loader, f"{name}.post_attention_layernorm"),
        feed=gated_mlp(loader, f"{name}.mlp", config.hidden, config.intermediate),
    )


# stored name, canonical name, shape: llama.cpp's converter changes no values of this family
GGUF_LAYER: tuple[Row, ...] = (
    ("attn_norm.weight", "input_layernorm.weight", "H"),
    ("ffn_norm.weight", "post_attention_layernorm.weight", "H"),
    ("attn_q.weight", "self_attn.q_proj.weight", "Q H"),
    ("attn_k.weight", "self_attn.k_proj.weight", "K H"),
    ("attn_v.weight", "self_attn.v_proj.weight", "K H"),
    ("attn_output.weight", "self_attn.o_proj.weight", "H Q"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight", "D"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", "D"),
    *GATED_MLP,
)


def _gguf_config(keys: Keys) -> Config:
    return {"intermediate_size": keys.integer("feed_forward_length")}


def _add_gguf_layer(table: Table, config: Config, layer: int) -> None:
    table.add_rows(layer, GGUF_LAYER)


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    parse=parse,
    cache_schema=attention_schema,
    load=load,
    gguf=(GgufArchitecture("qwen3", "qwen3", _gguf_config, _add_gguf_layer),),
)
