"""Llama: full attention in every layer. Also SmolLM2 and every other model whose model_type is llama."""

from __future__ import annotations

from functools import partial

from hybridkv.checkpoint.config_reader import Reader
from hybridkv.checkpoint.gguf_architecture import Config, GgufArchitecture
from hybridkv.checkpoint.gguf_config import Keys
from hybridkv.checkpoint.gguf_map import GATED_MLP, Row, Table, unpermute
from hybridkv.errors import UnsupportedModel
from hybridkv.models.config import MAX_POSITIONS, ModelConfig, common_fields, read_rotation
from hybridkv.models.family import Family
from hybridkv.models.inventory import dense_decoder
from hybridkv.models.schemas import attention_schema


def parse(read: Reader) -> ModelConfig:
    """A `config.json` of this family, checked."""
    common = common_fields(read, "llama")
    return ModelConfig(
        **common,
        intermediate=read.size("intermediate_size"),
        max_positions=read.size("max_position_embeddings", limit=MAX_POSITIONS),
        attention_layers=tuple(range(common["layers"])),
        rotation=read_rotation(read, common["head_dim"]),
    )


# --- GGUF -----------------------------------------------------------------------------------------------------------


def _gguf_config(keys: Keys) -> Config:
    experts = keys.integer("expert_count", 0, least=0)
    if experts:
        raise UnsupportedModel(f"{keys.where}: a llama model with {experts} experts (Mixtral) is not supported")
    biases = [name for name in keys.shapes if name.endswith(".bias")]
    return {
        "intermediate_size": keys.integer("feed_forward_length"),
        "attention_bias": any(".attn_" in name for name in biases),
        "mlp_bias": any(".ffn_" in name for name in biases),
    }


def _add_gguf_layer(table: Table, config: Config, layer: int) -> None:
    # the converter re-orders the rows of q and k inside each head for interleaved RoPE pairs
    undo_q = partial(unpermute, heads=config["num_attention_heads"])
    undo_k = partial(unpermute, heads=config["num_key_value_heads"])
    table.add_rows(
        layer,
        [
            ("attn_norm.weight", "input_layernorm.weight", "H"),
            ("ffn_norm.weight", "post_attention_layernorm.weight", "H"),
            ("attn_q.weight", "self_attn.q_proj.weight", "Q H", undo_q),
            ("attn_k.weight", "self_attn.k_proj.weight", "K H", undo_k),
            ("attn_v.weight", "self_attn.v_proj.weight", "K H"),
            ("attn_output.weight", "self_attn.o_proj.weight", "H Q"),
            *GATED_MLP,
        ],
    )
    biases: list[Row] = [
        ("attn_q.bias", "self_attn.q_proj.bias", "Q", undo_q),
        ("attn_k.bias", "self_attn.k_proj.bias", "K", undo_k),
        ("attn_v.bias", "self_attn.v_proj.bias", "K"),
        ("attn_output.bias", "self_attn.o_proj.bias", "H"),
        ("ffn_gate.bias", "mlp.gate_proj.bias", "F"),
        ("ffn_up.bias", "mlp.up_proj.bias", "F"),
        ("ffn_down.bias", "mlp.down_proj.bias", "H"),
    ]
    table.add_rows(layer, [row for row in biases if table.has(layer, row[0])])


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    parse=parse,
    cache_schema=attention_schema,
    weights=dense_decoder,
    module="hybridkv.models.llama",
    gguf=(GgufArchitecture("llama", "llama", _gguf_config, _add_gguf_layer, rope_factors=True),),
)
