"""DeepSeek-V4's config: both spellings are one config, what is refused and in which words, rotation frequencies."""

import json
import math
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config as HfConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from hybridkv.errors import HybridKVError, ModelFileError, UnsupportedModel
from hybridkv.models.config import ModelConfig

YARN = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
FLASH: dict[str, Any] = dict(
    model_type="deepseek_v4", vocab_size=129280, hidden_size=4096, num_hidden_layers=43, num_attention_heads=64,
    num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024,
    sliding_window=128, index_n_heads=64, index_head_dim=128, index_topk=512, n_routed_experts=256,
    num_experts_per_tok=6, n_shared_experts=1, moe_intermediate_size=2048, scoring_func="sqrtsoftplus",
    norm_topk_prob=True, routed_scaling_factor=1.5, num_hash_layers=3, swiglu_limit=10.0, hc_mult=4,
    hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, max_position_embeddings=1 << 20, rope_theta=10000,
    compress_rope_theta=160000, rope_scaling=YARN, compress_ratios=[0, 0, *[4, 128] * 20, 4, 0], eos_token_id=1,
    num_nextn_predict_layers=1,
    quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
)  # fmt: skip


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**FLASH, **changes})


def modern() -> dict[str, Any]:
    """The same model in the spelling that transformers writes."""
    hf = HfConfig(**{k: v for k, v in FLASH.items() if k != "model_type"})
    written = json.loads(hf.to_json_string())
    assert "compress_ratios" not in written and "layer_types" in written and "main" in written["rope_parameters"]
    return written


def test_the_released_config_is_read() -> None:
    config = config_of()
    v4 = config.v4
    assert v4 is not None
    assert v4.kinds == ("window", "window", *("csa", "hca") * 20, "csa")  # the draft layer's ratio is dropped
    assert (v4.csa_ratio, v4.hca_ratio, v4.window, v4.rope) == (4, 128, 128, 64)
    assert (v4.q_rank, v4.o_groups, v4.o_rank) == (1024, 8, 1024)
    assert (v4.index_heads, v4.index_dim, v4.index_topk) == (64, 128, 512)
    assert (v4.experts, v4.per_token, v4.expert_width, v4.scaling, v4.limit) == (256, 6, 2048, 1.5, 10.0)
    assert v4.hash_layers == {0, 1, 2} and v4.renormalise
    assert (v4.streams, v4.sinkhorn_iters, v4.hc_eps) == (4, 20, 1e-6)
    assert (config.architecture, config.kv_heads, config.head_dim, config.intermediate) == ("deepseek_v4", 1, 512, 2048)
    assert config.attention_layers == config.gdn_layers == () and config.gdn is None and config.moe is None
    assert config.eos_ids == (1,) and config.max_positions == 1 << 20


def test_both_spellings_are_one_config() -> None:
    assert ModelConfig.from_dict(modern()) == config_of()


def test_the_schedule_may_be_given_in_words() -> None:
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention", "sliding_attention"]
    found = config_of(
        num_hidden_layers=3,
        compress_ratios=None,
        layer_types=kinds,
        compress_rates={"heavily_compressed_attention": 16},
        mlp_layer_types=["moe", "hash_moe", "moe"],
        num_hash_layers=None,
        partial_rotary_factor=0.125,
        qk_rope_head_dim=None,
    ).v4
    assert found is not None
    assert found.kinds == ("hca", "csa", "window") and (found.csa_ratio, found.hca_ratio) == (4, 16)
    assert found.hash_layers == {1} and found.rope == 64
    rated = config_of(num_hidden_layers=2, compress_ratios=[8, 16, 0], compress_rate_csa=8, compress_rate_hca=16).v4
    assert rated is not None and rated.kinds == ("csa", "hca") and (rated.csa_ratio, rated.hca_ratio) == (8, 16)


@pytest.mark.parametrize("scaling", [YARN, None, {**YARN, "factor": 4, "beta_fast": 8, "beta_slow": 2}])
@pytest.mark.parametrize(("head_dim", "rope"), [(512, 64), (32, 8), (48, 6)])
def test_frequencies_are_those_of_transformers(scaling: dict | None, head_dim: int, rope: int) -> None:
    changes = dict(rope_scaling=scaling, head_dim=head_dim, qk_rope_head_dim=rope)
    config = config_of(**changes)
    assert config.v4 is not None
    table = DeepseekV4RotaryEmbedding(HfConfig(**{k: v for k, v in {**FLASH, **changes}.items() if k != "model_type"}))
    for kind, found in (("main", config.inv_freq), ("compress", config.v4.compress_inv_freq)):
        torch.testing.assert_close(torch.tensor(found), getattr(table, f"{kind}_inv_freq"), rtol=1e-6, atol=0)
        assert getattr(table, f"{kind}_attention_scaling") == 1.0


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    """The released numbers: pairs up to 15 as they are, from 25 on sixteen times slower, those between in a line."""
    v4 = config_of().v4
    assert v4 is not None
    for i, found in enumerate(v4.compress_inv_freq):
        plain = 160000 ** (-2 * i / 64)
        part = min(max((i - 15) / 10, 0), 1)
        assert math.isclose(found, plain * (1 - part) + plain / 16 * part, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(compress_ratios=None), r"neither layer_types nor compress_ratios"),
        (dict(compress_ratios=[0, 4]), r"compress_ratios must list 43 layers, not 2"),
        (dict(compress_ratios="4"), r"compress_ratios must list 43"),
        (dict(compress_ratios=[7] * 43), r"compress_ratios has 7 for layer 0; it must be 0, 4, 128"),
        (dict(compress_ratios=[False] * 43), r"compress_ratios has False"),
        (dict(compress_ratios=[[4]] * 43), r"compress_ratios has \[4\]"),
        (dict(layer_types=["full_attention"] * 43), r"layer_types has 'full_attention' for layer 0"),
        (dict(layer_types=["sliding_attention"] * 43), r"layer_types has layer 2 as window, compress_ratios as csa"),
        (dict(compress_rates=[4, 128]), r"compress_rates must be an object"),
        (dict(compress_rates={"compressed_sparse_attention": 0}), r"compress_rates.compressed_sparse_attention must"),
        (dict(compress_rate_hca=4), r"must differ"),
        (dict(compress_rate_csa=8, compress_rates={"compressed_sparse_attention": 4}), r"compress_rate_csa 8 and"),
        (dict(num_hash_layers=None), r"num_hash_layers"),
        (dict(num_hash_layers=-1), r"num_hash_layers"),
        (dict(num_hash_layers=True), r"num_hash_layers"),
        (dict(mlp_layer_types=["moe"] * 43), r"num_hash_layers 3 and mlp_layer_types differ"),
        (dict(mlp_layer_types=["dense"] * 43), r"mlp_layer_types has 'dense'"),
        (dict(qk_rope_head_dim=None), r"qk_rope_head_dim"),
        (dict(qk_rope_head_dim=63), r"qk_rope_head_dim 63 must be an even"),
        (dict(qk_rope_head_dim=1024), r"qk_rope_head_dim"),
        (dict(partial_rotary_factor=0.25), r"must say the same, not \[64, 128\]"),
        (dict(partial_rotary_factor=1.5), r"partial_rotary_factor"),
        (dict(index_head_dim=32), r"qk_rope_head_dim 64 exceeds index_head_dim 32"),
        (dict(num_experts_per_tok=257), r"num_experts_per_tok 257 exceeds n_routed_experts 256"),
        (dict(o_groups=7), r"o_groups"),
        (dict(routed_scaling_factor=None), r"routed_scaling_factor"),
        (dict(routed_scaling_factor=float("nan")), r"routed_scaling_factor"),
        (dict(rope_theta=1.0), r"rope_theta"),
        (dict(compress_rope_theta=0), r"compress_rope_theta"),
        (dict(compress_rope_theta=1e300), r"compress_rope_theta 1e\+300 and its scaling"),
        (dict(rope_scaling=3), r"rope_parameters must be an object"),
        (dict(rope_parameters={"main": {}}), r"both main and compress"),
        (dict(rope_parameters={"main": 1, "compress": 2}), r"must be objects"),
        (dict(rope_scaling={**YARN, "original_max_position_embeddings": None}), r"original_max_position_embeddings"),
        (dict(rope_scaling={**YARN, "factor": -1}), r"\bfactor\b"),
        (dict(rope_scaling={**YARN, "beta_fast": 1}), r"beta_fast 1 must exceed beta_slow 1"),
        (dict(hc_mult=0), r"hc_mult"),
        (dict(hc_sinkhorn_iters=10**6), r"hc_sinkhorn_iters"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as problem:
        config_of(**changes)
    assert len(str(problem.value)) < 300


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
        "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok",
        "moe_intermediate_size", "vocab_size", "max_position_embeddings",
    ],
)  # fmt: skip
@pytest.mark.parametrize("bad", (None, 0, 2.5, "64", True, 10**400), ids=lambda v: str(type(v)))
def test_a_bad_or_missing_size_is_named(key: str, bad: object) -> None:
    with pytest.raises(ModelFileError, match=rf"\b{key}\b"):
        config_of(**{key: bad})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "softmax"),
        ("num_key_value_heads", 8),
        ("n_shared_experts", 2),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("rope_scaling", {**YARN, "type": "linear"}),
        ("rope_scaling", {**YARN, "attention_factor": 1.2}),
        ("rope_parameters", {"main": {"rope_type": "yarn"}, "compress": {}}),
    ],
)
def test_what_no_released_model_has_is_refused(key: str, value: object) -> None:
    words = "rope type|attention_factor" if key.startswith("rope") else key
    with pytest.raises(UnsupportedModel, match=words):
        config_of(**{key: value})


def test_other_architectures_still_refuse_quantised_checkpoints() -> None:
    with pytest.raises(HybridKVError, match="quantised"):
        ModelConfig.from_dict({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}})
