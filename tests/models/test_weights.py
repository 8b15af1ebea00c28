"""Checkpoints: whatever the format, the names, shapes and values are those of the Hugging Face model."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from torch import Tensor

from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.models.weights import Checkpoint, open_checkpoint

Tensors = dict[str, Tensor]

# --- GGUF: the converter's changes, written here as loops over rows ---

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


def test_llama_gguf_gives_hugging_face_tensors_and_config(tmp_path: Path) -> None:
    hf, stored = llama()
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, stored)) as checkpoint:
        assert_same(checkpoint, hf)
        assert checkpoint.kind == "gguf" and checkpoint.set_aside == {}
        assert checkpoint.nbytes == sum(4 * w.numel() for w in hf.values())
        assert checkpoint.metadata["tokenizer.ggml.tokens"][7] == "t7"
        assert "lm_head.weight" not in checkpoint and "model.norm.weight" in checkpoint
        expected = {
            "model_type": "llama", "vocab_size": V, "hidden_size": H, "intermediate_size": F, "num_hidden_layers": 2,
            "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "tie_word_embeddings": True, "eos_token_id": 2,
        }  # fmt: skip
        assert {name: checkpoint.config[name] for name in expected} == expected


def test_the_permutation_of_q_and_k_matters(tmp_path: Path) -> None:
    hf, stored = llama()
    assert not torch.equal(stored["blk.0.attn_q.weight"], hf["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen35", {}),
        ("qwen35moe", {}),
        ("qwen35moe", {"fused": True}),
        ("qwen3next", {}),
        ("qwen3next", {"split": False}),
    ],
)
def test_qwen_gguf_gives_hugging_face_tensors(arch: str, options: dict[str, bool], tmp_path: Path) -> None:
    keys, hf, stored = qwen(arch, **options)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", arch, keys, stored)) as checkpoint:
        assert_same(checkpoint, hf)
        assert checkpoint.set_aside == ({} if arch == "qwen3next" else {"mtp": 2})


def test_qwen_config_has_the_names_that_transformers_uses(tmp_path: Path) -> None:
    keys, _, stored = qwen("qwen35moe")
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen35moe", keys, stored)) as checkpoint:
        config = checkpoint.config
    expected = {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "head_dim": D, "linear_conv_kernel_dim": TAPS,
        "linear_key_head_dim": DK, "linear_value_head_dim": DV, "linear_num_key_heads": HK,
        "linear_num_value_heads": HV, "num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": I,
        "shared_expert_intermediate_size": S, "tie_word_embeddings": False,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert config["rope_parameters"]["partial_rotary_factor"] == 2 / D
    assert "mrope_section" not in config["rope_parameters"], "text alone is rotated as ever"


def test_layers_may_be_listed_one_by_one(tmp_path: Path) -> None:
    keys, _, stored = qwen("qwen35")
    keys["attention.recurrent_layers"] = [True, True, True, False, False]
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen35", keys, stored)) as checkpoint:
        assert checkpoint.config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]


def test_quantised_gguf_tensors_come_as_float32_after_the_same_transforms(tmp_path: Path) -> None:
    keys, hf, stored = qwen("qwen35moe")
    kinds = dict.fromkeys(["blk.0.attn_qkv.weight", "blk.0.ffn_gate_exps.weight", "token_embd.weight"], Type.Q8_0)
    kinds["blk.0.ffn_up_exps.weight"] = Type.Q4_0  # gate and up need not be of one type
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen35moe", keys, stored, kinds)) as checkpoint:
        for name in ("linear_attn.in_proj_qkv.weight", "mlp.experts.gate_up_proj"):
            values = hf[f"model.layers.0.{name}"]
            got = checkpoint.read(f"model.layers.0.{name}")
            assert got.dtype == torch.float32 and got.shape == values.shape
            rows = values.reshape(-1, H).numpy()  # the re-orderings move whole rows, so they commute with rounding
            if name.startswith("mlp"):
                kind = [Type.Q8_0 if row % (2 * I) < I else Type.Q4_0 for row in range(len(rows))]
            else:
                kind = [Type.Q8_0] * len(rows)
            expected = np.concatenate([gguf.dequantize(gguf.quantize(r[None], k), k) for r, k in zip(rows, kind)])
            assert np.array_equal(got.reshape(-1, H).numpy(), expected)
        assert checkpoint.nbytes < sum(4 * w.numel() for w in hf.values())


def test_rope_scaling_keys_get_their_hugging_face_names(tmp_path: Path) -> None:
    def rope(**scaling: Any) -> dict[str, Any]:
        keys = LLAMA_KEYS | {f"rope.scaling.{name}": value for name, value in scaling.items()}
        with open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", keys, llama()[1])) as checkpoint:
            return checkpoint.config["rope_parameters"]

    assert rope(type="none") == {"rope_type": "default", "rope_theta": 5e5}
    assert rope(type="linear", factor=4.0) == {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    for bad, word in (
        ({"type": "longrope"}, "'longrope'"),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0}, "'yarn' is not"),
        ({"type": "linear", "factor": 4.0, "attn_factor": 2.0}, "attn_factor"),
        ({"type": [1.0] * 5000}, "RoPE scaling"),
    ):
        with pytest.raises(UnsupportedModel, match=word) as caught:
            rope(**bad)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", ["x" * 10_000, [2] * 5000, [2.5] * 5000, [1, 2]])
@pytest.mark.parametrize(
    "name",
    ["block_count", "rope.freq_base", "attention.scale", "general.type", "split.count", "attention.causal"],
)
def test_a_key_of_another_kind_is_refused_in_few_words(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS | {name: value}, llama()[1]))
    assert len(str(caught.value)) < 1000


def test_llama3_rope_factors_go_into_the_config(tmp_path: Path) -> None:
    hf, stored = llama()
    stored["rope_freqs.weight"] = torch.tensor([1.0, 1.5, 8.0, 8.0])
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, stored)) as checkpoint:
        assert checkpoint.config["rope_parameters"]["freq_factors"] == [1.0, 1.5, 8.0, 8.0]
        assert sorted(checkpoint.names()) == sorted(hf)
    for bad in (torch.ones(3), torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, float("nan"), 1.0, 1.0])):
        stored["rope_freqs.weight"] = bad
        with pytest.raises(ModelFileError, match="rope_freqs"):
            open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, stored))


BAD_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "layers_1e9": ({"block_count": 10**9}, "block_count is 1000000000"),
    "layers_0": ({"block_count": 0}, "block_count is 0"),
    "layers_text": ({"block_count": "2"}, "block_count is '2'"),
    "layers_true": ({"block_count": True}, "block_count is True"),
    "all_layers_mtp": ({"nextn_predict_layers": 2}, "leaves 0"),
    "one_layer_too_many": ({"block_count": 3}, "'blk.2.attn_norm.weight' is missing"),
    "one_layer_too_few": ({"block_count": 1}, "'blk.1.attn_norm.weight' is not part"),
    "heads_0": ({"attention.head_count": 0}, "head_count is 0"),
    "heads_do_not_divide": ({"attention.head_count_kv": 3}, "do not fit"),
    "heads_per_layer": ({"attention.head_count_kv": [1, 2]}, "differs from layer to layer"),
    "head_dim": (
        {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16},
        "attn_q.weight",
    ),
    "key_and_value_differ": ({"attention.value_length": 4}, "do not fit"),
    "hidden": ({"embedding_length": 64, "attention.key_length": D}, "token_embd.weight"),
    "width": ({"feed_forward_length": 25}, "ffn_gate.weight"),
    "width_huge": ({"feed_forward_length": 2**32 - 1}, "whole number"),
    "eps_nan": ({"attention.layer_norm_rms_epsilon": float("nan")}, "positive number"),
    "eps_text": ({"attention.layer_norm_rms_epsilon": "1e-5"}, "positive number"),
    "theta_inf": ({"rope.freq_base": float("inf")}, "positive number"),
    "rope_wider_than_head": ({"rope.dimension_count": 16}, "dimension_count is 16"),
    "rope_narrower_than_head": ({"rope.dimension_count": 4}, "4 of 8"),
    "experts": ({"expert_count": 8}, "Mixtral"),
    "sliding_window": ({"attention.sliding_window": 128}, "sliding_window"),
    "not_causal": ({"attention.causal": False}, "causal"),
    "too_many_tokens": ({"tokenizer.ggml.tokens": ["x"] * (V + 1)}, "51 tokens"),
    "split": ({"split.count": 3}, "--merge"),
    "adapter": ({"general.type": "adapter"}, "adapter"),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_keys_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    changes, message = BAD_KEYS[case]
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS | changes, llama()[1]))


@pytest.mark.parametrize("missing", ["block_count", "context_length", "embedding_length", "attention.head_count"])
def test_a_missing_key_is_named(missing: str, tmp_path: Path) -> None:
    keys = {name: value for name, value in LLAMA_KEYS.items() if name != missing}
    with pytest.raises(ModelFileError, match=f"llama.{missing} is missing"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", keys, llama()[1]))


def test_a_missing_or_unknown_tensor_is_named(tmp_path: Path) -> None:
    _, stored = llama()
    without = {name: w for name, w in stored.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(ModelFileError, match="'blk.1.ffn_up.weight' is missing"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, without))
    for name in ("blk.0.attn_q.scale", "blk.0.attn_q_norm.weight", "blk.2.attn_norm.weight", "cls.weight"):
        with pytest.raises(ModelFileError, match=f"'{name}' is not part"):
            open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, stored | {name: torch.ones(8)}))
    with_buffer = stored | {"blk.0.attn_rot_embd.weight": torch.ones(4)}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, with_buffer)) as checkpoint:
        assert checkpoint.set_aside == {"rotary": 1}


def test_biases_of_llama_are_found_and_permuted(tmp_path: Path) -> None:
    hf, stored = llama()
    for layer in range(2):
        bias = hf[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.randn(HEADS * D)
        stored[f"blk.{layer}.attn_q.bias"] = interleave_rope(bias, HEADS)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, stored)) as checkpoint:
        assert_same(checkpoint, hf)
        assert checkpoint.config["attention_bias"] is True and checkpoint.config["mlp_bias"] is False


def test_an_unknown_architecture_is_unsupported_and_the_known_ones_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, {"x": torch.ones(1)})
    with pytest.raises(UnsupportedModel, match="'mamba'.*llama, qwen35, qwen35moe, qwen3next"):
        open_checkpoint(path)


# --- safetensors folders ---


def write_folder(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    save_file({name: w.clone().contiguous() for name, w in tensors.items()}, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, shards: dict[str, Tensors], index: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard)
    listed = {name: shard for shard, tensors in shards.items() for name in tensors} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return folder


def test_a_folder_is_read_with_its_dtypes(tmp_path: Path) -> None:
    dtypes = {"model.norm.weight": torch.float32, "lm_head.weight": torch.bfloat16, "model.x": torch.float16}
    tensors = {name: torch.randn(3, 5).to(dtype) for name, dtype in dtypes.items()}
    config = {"model_type": "llama", "hidden_size": 5, "text_config": {"a": [1]}}
    with open_checkpoint(write_folder(tmp_path / "m", tensors, config)) as checkpoint:
        assert_same(checkpoint, tensors)
        assert checkpoint.config == config and checkpoint.kind == "safetensors" and checkpoint.metadata == {}
        assert checkpoint.nbytes == 15 * 8
        got = checkpoint.read("model.x")
    got += 1  # it owns its memory
    with pytest.raises(ModelFileError, match="no tensor 'nope'"):
        checkpoint.read("nope")
    with pytest.raises(ModelFileError, match="closed"):
        checkpoint.read("model.x")


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("norm.weight", "model.norm.weight"),
        ("something.else", "something.else"),
    ],
)
def test_names_are_brought_to_one_form(stored: str, canonical: str, tmp_path: Path) -> None:
    with open_checkpoint(write_folder(tmp_path / "m", {stored: torch.ones(2, 2)})) as checkpoint:
        assert checkpoint.names() == [canonical] and torch.equal(checkpoint.read(canonical), torch.ones(2, 2))


def test_what_is_not_the_text_model_is_set_aside_and_counted(tmp_path: Path) -> None:
    tensors = {"model.language_model.norm.weight": torch.ones(2), "lm_head.weight": torch.ones(2, 2)}
    tensors |= {f"{p}.fc.weight": torch.ones(2) for p in ("mtp", "model.mtp", "model.language_model.mtp")}
    tensors |= {f"{p}.weight": torch.ones(2) for p in ("visual.a", "model.visual.b", "vision_tower.c")}
    tensors |= {"visual.position_ids": torch.arange(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    config = {"text_config": {"tie_word_embeddings": True}}
    with open_checkpoint(write_folder(tmp_path / "m", tensors, config)) as checkpoint:
        assert checkpoint.names() == ["model.norm.weight"]
        assert checkpoint.set_aside == {"mtp": 3, "vision": 4, "rotary": 1, "tied": 1}
        assert checkpoint.nbytes == 8


def expert_tensors(count: int = 12) -> tuple[Tensors, Tensors]:
    """(per expert, fused): more than ten, so that the order of the names as text is not the order of the numbers."""
    at = "model.layers.0.mlp.experts"
    gate_up, down = torch.randn(count, 10, 4).bfloat16(), torch.randn(count, 4, 5).bfloat16()
    single: Tensors = {}
    for e in range(count):
        single[f"{at}.{e}.gate_proj.weight"], single[f"{at}.{e}.up_proj.weight"] = gate_up[e, :5], gate_up[e, 5:]
        single[f"{at}.{e}.down_proj.weight"] = down[e]
    return single, {f"{at}.gate_up_proj": gate_up, f"{at}.down_proj": down}


def test_experts_stored_one_by_one_are_presented_fused(tmp_path: Path) -> None:
    single, fused = expert_tensors()
    with open_checkpoint(write_folder(tmp_path / "m", single)) as checkpoint:
        assert_same(checkpoint, fused)
        assert checkpoint.nbytes == sum(2 * w.numel() for w in fused.values())


def test_experts_with_gaps_or_of_two_kinds_are_refused(tmp_path: Path) -> None:
    single, fused = expert_tensors()
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    cases: list[tuple[Tensors, str]] = [
        ({n: w for n, w in single.items() if n != name}, "4.up_proj.weight' is missing"),
        (single | {"model.layers.0.mlp.experts.999999.up_proj.weight": torch.ones(5, 4)}, "is missing, of 1000000"),
        (single | {name: torch.ones(6, 4).bfloat16()}, "differ in shape"),
        (single | fused, "two tensors stand for"),
    ]
    for tensors, message in cases:
        with pytest.raises(ModelFileError, match=message):
            open_checkpoint(write_folder(tmp_path / "m", tensors))


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(2), "model.language_model.norm.weight": torch.ones(2)}
    with pytest.raises(ModelFileError, match="two tensors stand for 'model.norm.weight'"):
        open_checkpoint(write_folder(tmp_path / "m", tensors))


def test_shards_are_read_through_links_as_in_a_hub_cache(tmp_path: Path) -> None:
    shards: dict[str, Tensors] = {
        "model-1-of-2.safetensors": {"model.a": torch.ones(2), "model.b": torch.zeros(3)},
        "model-2-of-2.safetensors": {"lm_head.weight": torch.ones(2, 2)},
    }
    folder = write_shards(tmp_path / "m", shards)
    blob = tmp_path / "blob"
    (folder / "model-1-of-2.safetensors").rename(blob)
    (folder / "model-1-of-2.safetensors").symlink_to(blob)
    with open_checkpoint(folder) as checkpoint:
        assert_same(checkpoint, {name: w for tensors in shards.values() for name, w in tensors.items()})


def test_nan_in_the_weights_is_never_silent(tmp_path: Path) -> None:
    tensors = {"model.a": torch.tensor([1.0, float("nan")]), "model.b": torch.tensor([-float("inf"), 0]).bfloat16()}
    folder = write_folder(tmp_path / "m", tensors)
    with open_checkpoint(folder) as checkpoint:
        for name in tensors:
            with pytest.raises(ModelFileError, match=f"'{name}' holds NaN or infinity.*download"):
                checkpoint.read(name)


def test_a_folder_with_one_gguf_and_no_config_opens(tmp_path: Path) -> None:
    hf, stored = llama()
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, stored)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert (
            checkpoint.kind == "gguf" and checkpoint.path == tmp_path / "m.gguf" and len(checkpoint.names()) == len(hf)
        )
    (tmp_path / "n.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match="2 .gguf files"):
        open_checkpoint(tmp_path)
