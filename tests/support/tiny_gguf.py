"""Writes the tiny models of `tiny.py` as GGUF files in llama.cpp's layout, the way its converter does.

What the converter changes, and a reader has to undo:
  llama        rows of q and k go from half-split to interleaved rotary pairs; llama3 scaling becomes a table of factors
  qwen3        nothing
  other Qwen   norm weights are stored + 1 (not the linear layers' own norm); A_log as -exp(A_log); conv squeezed
  qwen35(moe)  value heads of the linear layers go from grouped by key head, [k0v0 k0v1 k1v0 k1v1], to tiled,
               [k0v0 k1v0 k0v1 k1v1]
  qwen3next    the interleaved qkvz projection is split into qkv and z; value heads stay grouped
"""

import copy
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from packed_blocks import random_blocks
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

Kinds = bool | Callable[[str], str]  # Q8_0 for all matrices, or what a tensor of the file gets
# name in the model (decides whether it is quantised), name in the file, values
Named = Iterator[tuple[str, str, Tensor]]

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
} | {f"self_attn.{c}_proj.{part}": f"attn_{c}.{part}" for c in "qkv" for part in ("weight", "bias")}
TOP_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
TOP_NAMES["lm_head.weight"] = "output.weight"

QUANTISED = re.compile(r"(proj\w*\.weight|embed_tokens\.weight|lm_head\.weight|experts\.\w+_proj)$")


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the values that a Q8_0 file of it holds.

    Blocks are 32 values of one row. The layout changes move whole rows, or whole heads of 32 columns, so it is the same
    to round before them or after.
    """
    rounded = copy.deepcopy(model)
    for name, parameter in rounded.named_parameters():
        if QUANTISED.search(name):
            blocks = gguf.quantize(parameter.data.numpy(), GGMLQuantizationType.Q8_0)
            parameter.data = torch.from_numpy(gguf.dequantize(blocks, GGMLQuantizationType.Q8_0)).clone()
    rounded.tie_weights()
    return rounded


def write_gguf_llama(model: PreTrainedModel, path: Path, q8: Kinds = False) -> Path:
    config = model.config

    def tensors() -> Named:
        for name, tensor in _parameters(model):
            layer, rest = _split(name)
            if match := re.match(r"self_attn\.([qk])_proj", rest):
                heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
                tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            elif rest == "post_attention_layernorm.weight":
                yield name, f"blk.{layer}.ffn_norm.weight", tensor
                continue
            yield name, _file_name(layer, rest), tensor
        if config.rope_parameters["rope_type"] == "llama3":
            yield "rope_freqs", "rope_freqs.weight", _llama3_factors(config)

    writer = _begin(path, "llama", model)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(config.head_dim)
    return _finish(writer, path, tensors(), q8)


def write_gguf_qwen3(model: PreTrainedModel, path: Path, q8: Kinds = False) -> Path:
    config = model.config

    def tensors() -> Named:
        for name, tensor in _parameters(model):
            layer, rest = _split(name)
            if rest == "post_attention_layernorm.weight":
                yield name, f"blk.{layer}.ffn_norm.weight", tensor
            else:
                yield name, _file_name(layer, rest), tensor

    writer = _begin(path, "qwen3", model)
    writer.add_feed_forward_length(config.intermediate_size)
    return _finish(writer, path, tensors(), q8)


def write_gguf_qwen35(
    model: PreTrainedModel,
    path: Path,
    moe: bool = False,
    q8: Kinds = False,
    reorder: bool = True,
    mtp: bool = False,
    add_tokenizer: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """`reorder=False` leaves the value heads grouped: wrong on purpose. `mtp` adds a next-token block to set aside."""
    config, arch = model.config, "qwen35moe" if moe else "qwen35"

    def tensors() -> Named:
        for name, tensor in _parameters(model):
            layer, rest = _split(name)
            if reorder and rest.startswith("linear_attn."):
                tensor = _tile_value_heads(rest, tensor, config)
            yield from _qwen_tensors(name, layer, rest, tensor)
        if mtp:
            hidden, block = config.hidden_size, f"blk.{config.num_hidden_layers}"
            yield "mtp", f"{block}.nextn.eh_proj.weight", torch.randn(hidden, 2 * hidden)
            for norm in ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "attn_norm", "post_attention_norm"):
                yield "mtp", f"{block}.{norm}.weight", torch.randn(hidden)
            yield "mtp", f"{block}.attn_k.weight", torch.randn(config.num_key_value_heads * config.head_dim, hidden)

    writer = _begin(path, arch, model, extra_blocks=int(mtp))
    _qwen_metadata(writer, config, moe)
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    if mtp:
        writer.add_nextn_predict_layers(1)
    if add_tokenizer is not None:
        add_tokenizer(writer)
    return _finish(writer, path, tensors(), q8)


def write_gguf_qwen3next(model: PreTrainedModel, path: Path, q8: Kinds = False, fused: bool = False) -> Path:
    """`fused` keeps the interleaved projection as one tensor, `ssm_in`, as the first files of this kind did."""
    config = model.config
    k, v = config.linear_key_head_dim, config.linear_value_head_dim
    per_key = config.linear_num_value_heads // config.linear_num_key_heads * v

    def tensors() -> Named:
        for name, tensor in _parameters(model):
            layer, rest = _split(name)
            if rest != "linear_attn.in_proj_qkvz.weight":
                yield from _qwen_tensors(name, layer, rest, tensor)
            elif fused:
                yield name, f"blk.{layer}.ssm_in.weight", tensor
            else:
                grouped = tensor.view(config.linear_num_key_heads, -1, config.hidden_size)
                parts = [part.flatten(0, 1) for part in grouped.split([k, k, per_key, per_key], dim=1)]
                yield name, f"blk.{layer}.attn_qkv.weight", torch.cat(parts[:3])
                yield name, f"blk.{layer}.attn_gate.weight", parts[3]

    writer = _begin(path, "qwen3next", model)
    _qwen_metadata(writer, config, moe=True)
    return _finish(writer, path, tensors(), q8)


def _qwen_tensors(name: str, layer: int | None, rest: str, tensor: Tensor) -> Named:
    if rest.endswith("norm.weight") and rest != "linear_attn.norm.weight":
        tensor = tensor + 1
    if rest == "linear_attn.A_log":
        tensor = -tensor.exp()
    if rest == "linear_attn.conv1d.weight":
        tensor = tensor.squeeze(1)
    if rest == "mlp.shared_expert_gate.weight":
        tensor = tensor.squeeze(0)
    if rest == "post_attention_layernorm.weight":
        yield name, f"blk.{layer}.post_attention_norm.weight", tensor
    elif rest == "mlp.experts.gate_up_proj":  # [E, 2I, H], gate rows first
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1)):
            yield name, f"blk.{layer}.ffn_{part}_exps.weight", half
    else:
        yield name, _file_name(layer, rest), tensor


def _tile_value_heads(rest: str, tensor: Tensor, config: PreTrainedConfig) -> Tensor:
    keys, heads, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim

    def tile(values: Tensor, each: int) -> Tensor:  # [keys, heads per key, each, ...] along the first dimension
        grouped = values.reshape(keys, heads // keys, each, *values.shape[1:])
        return grouped.transpose(0, 1).reshape(values.shape)

    part = rest.removeprefix("linear_attn.")
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * config.linear_key_head_dim
        return torch.cat([tensor[:before], tile(tensor[before:], width)])
    if part == "in_proj_z.weight":
        return tile(tensor, width)
    if part == "out_proj.weight":
        return tile(tensor.T, width).T
    if part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return tile(tensor, 1)
    return tensor


def _llama3_factors(config: PreTrainedConfig) -> Tensor:
    """[head_dim / 2]: what each rotary frequency is divided by."""
    rope = config.rope_parameters
    frequency = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():  # a tied head is not listed a second time
        yield name, parameter.data


def _split(name: str) -> tuple[int | None, str]:
    match = re.match(r"model\.layers\.(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else (None, name)


def _file_name(layer: int | None, rest: str) -> str:
    return TOP_NAMES[rest] if layer is None else f"blk.{layer}.{LAYER_NAMES[rest]}"


def _begin(path: Path, arch: str, model: PreTrainedModel, extra_blocks: int = 0) -> GGUFWriter:
    config = model.config
    writer = GGUFWriter(path, arch)
    writer.add_name(f"tiny {arch}")
    writer.add_block_count(config.num_hidden_layers + extra_blocks)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    return writer


def _qwen_metadata(writer: GGUFWriter, config: PreTrainedConfig, moe: bool) -> None:
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    if not moe:
        writer.add_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _finish(writer: GGUFWriter, path: Path, tensors: Named, q8: Kinds) -> Path:
    """Formats that the gguf package does not write get random weights of the same size."""
    for source, name, tensor in tensors:
        values = np.ascontiguousarray(tensor.float().numpy())
        if q8 and QUANTISED.search(source):
            kind = q8(name) if callable(q8) else "Q8_0"
            if kind.endswith("_K"):
                blocks = random_blocks(kind, *values.shape, size=float(values.std())).numpy()
            else:
                blocks = gguf.quantize(values, GGMLQuantizationType[kind])
            writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
