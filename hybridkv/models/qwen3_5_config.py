"""Configs of Qwen3.5 and Qwen3-Next: which layers are attention, the sizes of the others, and the experts."""

from __future__ import annotations

from hybridkv.checkpoint.config_reader import Reader
from hybridkv.config import shown
from hybridkv.errors import ModelFileError
from hybridkv.models.config import (
    MAX_POSITIONS,
    GdnConfig,
    ModelConfig,
    MoeConfig,
    common_fields,
    read_rotation,
    refuse_biases,
)

ROTATED = 0.25  # of each head, unless the config says otherwise
QUANTISED = ("fp8", "compressed-tensors", "quark")  # quant_methods of folders that are read
NEXT_QUANTISED = QUANTISED[1:]  # of Qwen3-Next, whose fused rows change places: no block may have several of them


def parse_qwen3_5(read: Reader, architecture: str, has_experts: bool) -> ModelConfig:
    """A `config.json` of Qwen3.5 or Qwen3-Next, checked. `has_experts`: its feed-forwards are mixtures of experts."""
    common = common_fields(read, architecture, NEXT_QUANTISED if architecture == "qwen3_next" else QUANTISED)
    refuse_biases(read, architecture)
    layers = common["layers"]
    moe = _moe(read, layers) if has_experts else None
    return ModelConfig(
        **common,
        intermediate=read.size("intermediate_size", moe.intermediate if moe else None),
        max_positions=read.size("max_position_embeddings", 32768, limit=MAX_POSITIONS),
        attention_layers=_attention_layers(read, layers),
        rotation=read_rotation(read, common["head_dim"], ROTATED),
        gdn=_gdn(read),
        moe=moe,
    )


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
        kernel_width=read.size("linear_conv_kernel_dim", 4, limit=64),
    )
    if gdn.value_heads % gdn.key_heads:
        raise ModelFileError(f"config: {gdn.value_heads} value heads cannot share {gdn.key_heads} key heads evenly")
    return gdn


def _moe(read: Reader, layers: int) -> MoeConfig:
    experts, per_token = read.size("num_experts"), read.size("num_experts_per_tok")
    if per_token > experts:
        raise ModelFileError(f"config: num_experts_per_tok {per_token} exceeds num_experts {experts}")
    every = read.size("decoder_sparse_step", 1)
    dense = _mlp_only_layers(read, layers) | {i for i in range(layers) if (i + 1) % every}
    return MoeConfig(
        experts=experts,
        per_token=per_token,
        intermediate=read.size("moe_intermediate_size"),
        shared_intermediate=read.size("shared_expert_intermediate_size"),
        renormalise=read.flag("norm_topk_prob", True),
        dense_layers=dense,
    )


def _mlp_only_layers(read: Reader, layers: int) -> frozenset[int]:
    listed = read.raw.get("mlp_only_layers")
    if listed is None:
        return frozenset()
    if not isinstance(listed, list) or len(listed) > layers:
        found = f"a list of {len(listed)}" if isinstance(listed, list) else shown(listed)
        raise ModelFileError(f"config: mlp_only_layers must list at most {layers} layers, not {found}")
    for layer in listed:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < layers:
            raise ModelFileError(
                f"config: mlp_only_layers must hold layer numbers from 0 to {layers - 1}, not {shown(layer)}"
            )
    return frozenset(listed)
