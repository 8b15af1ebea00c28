"""GGUF checkpoints: names, shapes and values are those of the Hugging Face model."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import (
    DK,
    DV,
    HEADS,
    HK,
    HV,
    KV,
    LLAMA_KEYS,
    TAPS,
    D,
    E,
    F,
    H,
    I,
    S,
    V,
    assert_same,
    interleave_rope,
    llama,
    qwen,
    write_gguf,
)

from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.models import open_checkpoint


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
    with pytest.raises(UnsupportedModel, match="'mamba'.*llama, qwen3, qwen35, qwen35moe, qwen3next"):
        open_checkpoint(path)
