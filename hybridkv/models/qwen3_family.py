"""Qwen3 (dense): Llama with an RMS norm of each query and key head. docs/add_a_model.md goes through this file."""

from __future__ import annotations

from functools import partial

from hybridkv.checkpoint.config_reader import Reader
from hybridkv.checkpoint.gguf_architecture import Config, GgufArchitecture
from hybridkv.checkpoint.gguf_config import Keys
from hybridkv.checkpoint.gguf_map import GATED_MLP, Row, Table
from hybridkv.errors import UnsupportedModel
from hybridkv.models.config import MAX_POSITIONS, ModelConfig, common_fields, read_rotation, refuse_biases
from hybridkv.models.family import Family
from hybridkv.models.inventory import dense_decoder
from hybridkv.models.schemas import attention_schema


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
        rotation=read_rotation(read, common["head_dim"]),
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
    weights=partial(dense_decoder, normed=True),
    module="hybridkv.models.qwen3",
    gguf=(GgufArchitecture("qwen3", "qwen3", _gguf_config, _add_gguf_layer),),
)
