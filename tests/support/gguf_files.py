"""GGUF files with the tensors of small Hugging Face models: the converter's changes, written as loops over rows."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from hybridkv.checkpoint.checkpoint import Checkpoint

Tensors = dict[str, Tensor]


H, V, HEADS, KV, D, F = 32, 50, 4, 2, 8, 24  # hidden, vocabulary, heads, KV heads, head dim, feed-forward
HK, HV, DK, DV, TAPS = 2, 6, 4, 3, 4  # linear attention: K heads, V heads, their dims, conv taps
E, I, S = 3, 10, 14  # experts, their width, the shared expert's width
C, Z = 2 * HK * DK + HV * DV, HV * DV


def write_gguf(
    path: Path, arch: str, keys: dict[str, Any], tensors: Tensors, quantise: dict[str, Type] | None = None
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        full = name if name.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{name}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    for name, tensor in tensors.items():
        if kind := (quantise or {}).get(name):
            writer.add_tensor(name, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave_rope(w: Tensor, heads: int) -> Tensor:
    """Row i of the first half of a head goes to row 2i, row i of the second half to row 2i + 1."""
    out, half = torch.empty_like(w), len(w) // heads // 2
    for head in range(heads):
        for i in range(half):
            out[head * 2 * half + 2 * i] = w[head * 2 * half + i]
            out[head * 2 * half + 2 * i + 1] = w[head * 2 * half + half + i]
    return out


def tile(w: Tensor, each: int, skip: int = 0) -> Tensor:
    """V head r of K head g, stored by Hugging Face at g * R + r, goes to r * HK + g."""
    out, per = w.clone(), HV // HK
    for g in range(HK):
        for r in range(per):
            source, target = skip + (g * per + r) * each, skip + (r * HK + g) * each
            out[target : target + each] = w[source : source + each]
    return out


LLAMA_KEYS: dict[str, Any] = {
    "block_count": 2, "context_length": 512, "embedding_length": H, "feed_forward_length": F,
    "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5, "rope.dimension_count": D,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(V)],
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


def llama() -> tuple[Tensors, Tensors]:
    """(what Hugging Face has, what the GGUF file stores)"""
    hf = {"model.embed_tokens.weight": torch.randn(V, H), "model.norm.weight": torch.randn(H)}
    stored = {"token_embd.weight": hf["model.embed_tokens.weight"], "output_norm.weight": hf["model.norm.weight"]}
    for layer in range(2):
        for name, target, shape in (
            ("attn_norm", "input_layernorm", (H,)), ("ffn_norm", "post_attention_layernorm", (H,)),
            ("attn_q", "self_attn.q_proj", (HEADS * D, H)), ("attn_k", "self_attn.k_proj", (KV * D, H)),
            ("attn_v", "self_attn.v_proj", (KV * D, H)), ("attn_output", "self_attn.o_proj", (H, HEADS * D)),
            ("ffn_gate", "mlp.gate_proj", (F, H)), ("ffn_up", "mlp.up_proj", (F, H)),
            ("ffn_down", "mlp.down_proj", (H, F)),
        ):  # fmt: skip
            w = hf[f"model.layers.{layer}.{target}.weight"] = torch.randn(shape)
            heads = {"attn_q": HEADS, "attn_k": KV}.get(name)
            stored[f"blk.{layer}.{name}.weight"] = interleave_rope(w, heads) if heads else w
    return hf, stored


def qwen(arch: str, split: bool = True, fused: bool = False) -> tuple[dict[str, Any], Tensors, Tensors]:
    """(keys, Hugging Face tensors, stored tensors): three linear layers, a full one, and for qwen35 an MTP block."""
    keys: dict[str, Any] = {
        "block_count": 4 + (arch != "qwen3next"), "context_length": 512, "embedding_length": H,
        "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.key_length": D,
        "attention.value_length": D, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7,
        "rope.dimension_count": 2, "ssm.conv_kernel": TAPS, "ssm.state_size": DK, "ssm.group_count": HK,
        "ssm.time_step_rank": HV, "ssm.inner_size": Z,
    }  # fmt: skip
    moe, tiled = arch != "qwen35", arch != "qwen3next"
    if tiled:
        keys |= {"nextn_predict_layers": 1, "rope.dimension_sections": [1, 1, 1, 0]}
    keys |= {"expert_count": E, "expert_used_count": 2} if moe else {"feed_forward_length": F}
    if moe:
        keys |= {"expert_feed_forward_length": I, "expert_shared_feed_forward_length": S}
    hf: Tensors = {}
    stored: Tensors = {}

    def both(name: str, target: str, *shape: int) -> Tensor:
        stored[name] = hf[target] = torch.randn(shape)
        return hf[target]

    def norm(name: str, target: str, width: int) -> None:
        stored[name] = 1 + both(name, target, width)

    both("token_embd.weight", "model.embed_tokens.weight", V, H)
    both("output.weight", "lm_head.weight", V, H)
    norm("output_norm.weight", "model.norm.weight", H)
    for layer in range(4):
        b, m = f"blk.{layer}.", f"model.layers.{layer}."
        norm(b + "attn_norm.weight", m + "input_layernorm.weight", H)
        norm(b + "post_attention_norm.weight", m + "post_attention_layernorm.weight", H)
        if moe:
            both(b + "ffn_gate_inp.weight", m + "mlp.gate.weight", E, H)
            both(b + "ffn_down_exps.weight", m + "mlp.experts.down_proj", E, H, I)
            gate_up = hf[m + "mlp.experts.gate_up_proj"] = torch.randn(E, 2 * I, H)
            if fused:
                stored[b + "ffn_gate_up_exps.weight"] = gate_up
            else:
                stored[b + "ffn_gate_exps.weight"], stored[b + "ffn_up_exps.weight"] = gate_up[:, :I], gate_up[:, I:]
            stored[b + "ffn_gate_inp_shexp.weight"] = both("", m + "mlp.shared_expert_gate.weight", 1, H)[0]
            for part in ("gate", "up"):
                both(f"{b}ffn_{part}_shexp.weight", f"{m}mlp.shared_expert.{part}_proj.weight", S, H)
            both(b + "ffn_down_shexp.weight", m + "mlp.shared_expert.down_proj.weight", H, S)
        else:
            for part, shape in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F))):
                both(f"{b}ffn_{part}.weight", f"{m}mlp.{part}_proj.weight", *shape)
        if layer == 3:
            both(b + "attn_q.weight", m + "self_attn.q_proj.weight", 2 * HEADS * D, H)
            both(b + "attn_k.weight", m + "self_attn.k_proj.weight", KV * D, H)
            both(b + "attn_v.weight", m + "self_attn.v_proj.weight", KV * D, H)
            both(b + "attn_output.weight", m + "self_attn.o_proj.weight", H, HEADS * D)
            norm(b + "attn_q_norm.weight", m + "self_attn.q_norm.weight", D)
            norm(b + "attn_k_norm.weight", m + "self_attn.k_norm.weight", D)
            continue
        m += "linear_attn."
        reorder = tile if tiled else (lambda w, each, skip=0: w)
        conv = both("", m + "conv1d.weight", C, 1, TAPS)
        stored[b + "ssm_conv1d.weight"] = reorder(conv[:, 0], DV, 2 * HK * DK)
        stored[b + "ssm_dt.bias"] = reorder(both("", m + "dt_bias", HV), 1)
        stored[b + "ssm_a"] = -reorder(both("", m + "A_log", HV), 1).exp()
        both(b + "ssm_norm.weight", m + "norm.weight", DV)
        stored[b + "ssm_out.weight"] = reorder(both("", m + "out_proj.weight", H, Z).T, DV).T
        if tiled:
            stored[b + "attn_qkv.weight"] = reorder(both("", m + "in_proj_qkv.weight", C, H), DV, 2 * HK * DK)
            stored[b + "attn_gate.weight"] = reorder(both("", m + "in_proj_z.weight", Z, H), DV)
            stored[b + "ssm_alpha.weight"] = reorder(both("", m + "in_proj_a.weight", HV, H), 1)
            stored[b + "ssm_beta.weight"] = reorder(both("", m + "in_proj_b.weight", HV, H), 1)
            continue
        both(b + "ssm_ba.weight", m + "in_proj_ba.weight", 2 * HV, H)
        qkvz = both(b + "ssm_in.weight", m + "in_proj_qkvz.weight", C + Z, H)
        if split:
            del stored[b + "ssm_in.weight"]
            per_v = HV // HK * DV
            groups = qkvz.split(2 * DK + 2 * per_v)  # one for each K head: its q, k, then its v and z heads
            q, k, v, z = (torch.cat([g.split([DK, DK, per_v, per_v])[i] for g in groups]) for i in range(4))
            stored[b + "attn_qkv.weight"], stored[b + "attn_gate.weight"] = torch.cat([q, k, v]), z
    stored.pop("", None)
    if tiled:
        stored |= {"blk.4.nextn.eh_proj.weight": torch.randn(H, 2 * H), "blk.4.attn_norm.weight": torch.randn(H)}
    return keys, hf, stored


def assert_same(checkpoint: Checkpoint, expected: Tensors) -> None:
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, values in expected.items():
        got = checkpoint.read(name)
        assert checkpoint.shape(name) == tuple(got.shape) == tuple(values.shape), name
        assert got.dtype == values.dtype and got.is_contiguous(), name
        if "norm.weight" in name or name.endswith(
            "A_log"
        ):  # through 1 + w, or -exp(w), and back: one rounding each way
            assert torch.allclose(got, values, atol=1e-6), name
        else:
            assert torch.equal(got, values), name
