"""GGUF files of Qwen3.5 and Qwen3-Next.

What llama.cpp's converter does, and these rows undo:
    all        norm weights stored as 1 + w (not linear_attn.norm); ssm_a = -exp(A_log); conv1d [C, 1, W] -> [C, W]
    qwen35*    V heads grouped by K head (g*R + j) -> tiled (j*Hk + g), where Hk K heads serve R = Hv/Hk V heads each
    qwen3next  in_proj_qkvz, interleaved per K head, split into attn_qkv and attn_gate (older files: kept, as ssm_in)
"""

from __future__ import annotations

from functools import partial

from hybridkv.checkpoint.gguf_architecture import Config, GgufArchitecture
from hybridkv.checkpoint.gguf_config import Keys
from hybridkv.checkpoint.gguf_map import (
    GATED_MLP,
    Row,
    Table,
    group_heads,
    interleave_qkvz,
    less_one,
    log_decay,
)
from hybridkv.checkpoint.recipe import Recipe
from hybridkv.errors import ModelFileError

ATTENTION: tuple[Row, ...] = (
    ("attn_q.weight", "self_attn.q_proj.weight", "2Q H"),
    ("attn_k.weight", "self_attn.k_proj.weight", "K H"),
    ("attn_v.weight", "self_attn.v_proj.weight", "K H"),
    ("attn_output.weight", "self_attn.o_proj.weight", "H Q"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight", "D", less_one),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", "D", less_one),
)
NORMS: tuple[Row, ...] = (
    ("attn_norm.weight", "input_layernorm.weight", "H", less_one),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", "H", less_one),
)
EXPERTS: tuple[Row, ...] = (
    ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", "S H"),
    ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", "S H"),
    ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", "H S"),
    ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "1 H"),
    ("ffn_gate_inp.weight", "mlp.gate.weight", "E H"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj", "E H I"),
)


# --- keys -----------------------------------------------------------------------------------------------------------


def _dense_config(keys: Keys) -> Config:
    return _gdn_config(keys) | {"intermediate_size": keys.integer("feed_forward_length")}


def _moe_config(keys: Keys) -> Config:
    keys.neutral("expert_gating_func", 1)
    experts = keys.integer("expert_count", 0, least=0)
    used = keys.integer("expert_used_count")
    if not 1 <= used <= experts:
        raise ModelFileError(f"{keys.where}: {keys.arch}.expert_used_count is {used} of {experts} experts")
    widths = [keys.shapes.get(f"blk.0.ffn_down_{name}.weight", (0,))[-1] or None for name in ("exps", "shexp")]
    return _gdn_config(keys) | {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", widths[0]),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", widths[1]),
        "norm_topk_prob": True,
    }


def _gdn_config(keys: Keys) -> Config:
    v_heads = keys.integer("ssm.time_step_rank")
    k_heads, inner = keys.integer("ssm.group_count"), keys.integer("ssm.inner_size")
    if inner % v_heads or v_heads % k_heads:
        raise ModelFileError(
            f"{keys.where}: ssm sizes do not divide: inner {inner}, V heads {v_heads}, K heads {k_heads}"
        )
    return {
        "layer_types": _layer_types(keys),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // v_heads,
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
    }


def _layer_types(keys: Keys) -> list[str]:
    marks = keys.metadata.get(f"{keys.arch}.attention.recurrent_layers")
    if marks is None:
        interval = keys.integer("full_attention_interval", 4)
        marks = [(i + 1) % interval != 0 for i in range(keys.layers)]
    good = isinstance(marks, list) and keys.layers <= len(marks) <= keys.blocks
    if not good or any(mark not in (0, 1) for mark in marks):
        raise ModelFileError(
            f"{keys.where}: {keys.arch}.attention.recurrent_layers must hold 0 or 1 for {keys.blocks} layers"
        )
    return ["linear_attention" if mark else "full_attention" for mark in marks[: keys.layers]]


# --- tensors --------------------------------------------------------------------------------------------------------


def _sizes(config: Config) -> dict[str, int]:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    sizes = {
        "N": config["linear_num_value_heads"],
        "2N": 2 * config["linear_num_value_heads"],
        "Z": values,
        "C": 2 * keys + values,
        "P": 2 * keys + 2 * values,
        "d": config["linear_value_head_dim"],
        "W": config["linear_conv_kernel_dim"],
    }
    if "num_experts" in config:
        sizes |= {
            "E": config["num_experts"],
            "I": config["moe_intermediate_size"],
            "2I": 2 * config["moe_intermediate_size"],
            "S": config["shared_expert_intermediate_size"],
        }
    return sizes


def _add_layer(table: Table, config: Config, layer: int) -> None:
    """A layer of qwen35 or qwen35moe, whose V heads are tiled."""
    _add_common(table, config, layer)
    if config["layer_types"][layer] == "full_attention":
        return
    k_heads = config["linear_num_key_heads"]
    group = partial(group_heads, k_heads=k_heads, v_heads=config["linear_num_value_heads"])
    channels = partial(group, skip=2 * k_heads * config["linear_key_head_dim"])
    table.add_rows(
        layer,
        [
            ("ssm_conv1d.weight", "linear_attn.conv1d.weight", "C 1 W", channels),
            ("ssm_dt.bias", "linear_attn.dt_bias", "N", group),
            ("ssm_a", "linear_attn.A_log", "N", lambda w: log_decay(group(w))),
            ("ssm_norm.weight", "linear_attn.norm.weight", "d"),
            ("ssm_out.weight", "linear_attn.out_proj.weight", "H Z", partial(group, dim=1)),
            ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", "C H", channels),
            ("attn_gate.weight", "linear_attn.in_proj_z.weight", "Z H", group),
            ("ssm_alpha.weight", "linear_attn.in_proj_a.weight", "N H", group),
            ("ssm_beta.weight", "linear_attn.in_proj_b.weight", "N H", group),
        ],
    )


def _add_next_layer(table: Table, config: Config, layer: int) -> None:
    """A layer of qwen3next, whose V heads stay where they are."""
    _add_common(table, config, layer)
    if config["layer_types"][layer] == "full_attention":
        return
    table.add_rows(
        layer,
        [
            ("ssm_conv1d.weight", "linear_attn.conv1d.weight", "C 1 W"),
            ("ssm_dt.bias", "linear_attn.dt_bias", "N"),
            ("ssm_a", "linear_attn.A_log", "N", log_decay),
            ("ssm_norm.weight", "linear_attn.norm.weight", "d"),
            ("ssm_out.weight", "linear_attn.out_proj.weight", "H Z"),
            ("ssm_ba.weight", "linear_attn.in_proj_ba.weight", "2N H"),
        ],
    )
    _add_qkvz(table, config, layer)


def _add_common(table: Table, config: Config, layer: int) -> None:
    table.add_rows(layer, NORMS)
    if "num_experts" in config:
        table.add_rows(layer, EXPERTS)
        _add_gate_up(table, layer)
    else:
        table.add_rows(layer, GATED_MLP)
    if config["layer_types"][layer] == "full_attention":
        table.add_rows(layer, ATTENTION)


def _add_gate_up(table: Table, layer: int) -> None:
    """gate_up_proj [E, 2I, H], from one stored tensor or from two."""
    if table.has(layer, "ffn_gate_up_exps.weight"):
        table.add(("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj", "E 2I H"), layer)
        return
    parts = tuple(table.part(f"blk.{layer}.ffn_{name}_exps.weight", "E I H") for name in ("gate", "up"))
    canonical = f"model.layers.{layer}.mlp.experts.gate_up_proj"
    table.recipes[canonical] = Recipe(parts, table.shape("E 2I H"), experts=table.sizes["E"])


def _add_qkvz(table: Table, config: Config, layer: int) -> None:
    """The projection as Hugging Face has it, whole (ssm_in) or put together again."""
    if table.has(layer, "ssm_in.weight"):
        table.add(("ssm_in.weight", "linear_attn.in_proj_qkvz.weight", "P H"), layer)
        return
    qkv = table.part(f"blk.{layer}.attn_qkv.weight", "C H")
    z = table.part(f"blk.{layer}.attn_gate.weight", "Z H")
    k_heads = config["linear_num_key_heads"]
    k_dim = k_heads * config["linear_key_head_dim"]
    make = partial(interleave_qkvz, k_heads=k_heads, k_dim=k_dim, v_dim=table.sizes["Z"])
    canonical = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
    table.recipes[canonical] = Recipe((qkv, z), table.shape("P H"), make)


QWEN35 = GgufArchitecture(
    "qwen35", "qwen3_5_text", _dense_config, _add_layer, _sizes, undo_norm=less_one, partial_rotary=True
)
QWEN35_MOE = GgufArchitecture(
    "qwen35moe", "qwen3_5_moe_text", _moe_config, _add_layer, _sizes, undo_norm=less_one, partial_rotary=True
)
QWEN3_NEXT = GgufArchitecture(
    "qwen3next", "qwen3_next", _moe_config, _add_next_layer, _sizes, undo_norm=less_one, partial_rotary=True
)
