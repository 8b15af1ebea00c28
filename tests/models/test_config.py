"""ModelConfig: what is refused and in which words, and the rotation frequencies against transformers'."""

import copy
import time
from typing import Any

import pytest
import tiny
import torch
from numerics import assert_close_rms
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.models.config import ModelConfig
from hybridkv.models.registry import BY_MODEL_TYPE

LLAMA: dict[str, Any] = {**tiny.LLAMA, "model_type": "llama"}
QWEN3: dict[str, Any] = {**tiny.LLAMA, "model_type": "qwen3"}
HYBRID: dict[str, Any] = {**tiny.QWEN, "num_hidden_layers": 8}
QWEN: dict[str, Any] = {
    **HYBRID,
    "model_type": "qwen3_5_text",
    "intermediate_size": 96,
    "rope_parameters": tiny.MROPE,
}
MOE: dict[str, Any] = {**HYBRID, **tiny.MOE, "model_type": "qwen3_5_moe_text", "rope_parameters": tiny.MROPE}
CONFIGS = {"llama": LLAMA, "qwen3": QWEN3, "qwen": QWEN, "moe": MOE}
NAN, INF = float("nan"), float("inf")

SIZES = [
    (family, key)
    for family, keys in (
        (
            "llama",
            "hidden_size num_hidden_layers num_attention_heads vocab_size intermediate_size max_position_embeddings",
        ),
        (
            "qwen",
            "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads vocab_size "
            "hidden_size intermediate_size num_attention_heads num_hidden_layers",
        ),
        ("moe", "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size"),
    )
    for key in keys.split()
]
OPTIONAL = [("llama", "num_key_value_heads"), ("llama", "head_dim"), ("qwen", "linear_conv_kernel_dim")]


def changed(family: str, **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(CONFIGS[family]), **changes}


def rope(**changes: Any) -> dict[str, Any]:
    return changed("llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **changes})


@pytest.mark.parametrize("family", CONFIGS)
def test_the_tiny_configs_are_read(family: str) -> None:
    """Guard: what the other tests change is accepted as it is."""
    config = ModelConfig.from_dict(CONFIGS[family])
    assert config.vocab == tiny.VOCAB and config.eos_ids == (2,)
    assert (config.gdn is not None) == (family in ("qwen", "moe")) and (config.moe is not None) == (family == "moe")


@pytest.mark.parametrize(("family", "key"), SIZES)
def test_a_missing_size_is_named(family: str, key: str) -> None:
    raw = changed(family)
    del raw[key]
    with pytest.raises(ModelFileError, match=rf"\b{key}\b"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "bad",
    (0, -1, 10**9 + 2**31, 10**400, 10**5000, 2.5, 64.0, NAN, INF, "64", True, [64], {"a": 1}),
    ids=lambda v: str(type(v)),
)
@pytest.mark.parametrize(("family", "key"), SIZES + OPTIONAL)
def test_a_bad_size_is_named(family: str, key: str, bad: object) -> None:
    with pytest.raises(ModelFileError, match=rf"\b{key}\b") as problem:
        ModelConfig.from_dict(changed(family, **{key: bad}))
    assert len(str(problem.value)) < 300


def test_a_billion_layers_are_refused_before_anything_is_built() -> None:
    with pytest.raises(ModelFileError, match="num_hidden_layers.*1024.*1000000000"):
        ModelConfig.from_dict(changed("llama", num_hidden_layers=10**9))


@pytest.mark.parametrize("bad", (0, 0.0, -1.0, NAN, INF, -INF, 10**400, "1e4", True, [1.0]), ids=lambda v: str(v)[:12])
def test_bad_numbers_are_named(bad: object) -> None:
    for raw, key in (
        (rope(rope_theta=bad), "rope_theta"),
        (changed("llama", rms_norm_eps=bad), "rms_norm_eps"),
        (changed("llama", rope_parameters=None, rope_theta=bad), "rope_theta"),
        (rope(partial_rotary_factor=bad), "partial_rotary_factor"),
        (rope(rope_type="linear", factor=bad), "factor"),
        *((rope(**{**tiny.LLAMA3_ROPE, key: bad}), key) for key in tiny.LLAMA3_ROPE if key != "rope_type"),
    ):
        with pytest.raises(ModelFileError, match=rf"\b{key}\b"):
            ModelConfig.from_dict(raw)


def test_missing_scaling_parameters_are_named() -> None:
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        parameters = {k: v for k, v in tiny.LLAMA3_ROPE.items() if k != key}
        with pytest.raises(ModelFileError, match=rf"\b{key}\b"):
            ModelConfig.from_dict(changed("llama", rope_parameters=parameters))
    with pytest.raises(ModelFileError, match=r"\bfactor\b"):
        ModelConfig.from_dict(rope(rope_type="linear"))
    with pytest.raises(ModelFileError, match="high_freq_factor 1 must exceed low_freq_factor 1"):
        ModelConfig.from_dict(changed("llama", rope_parameters={**tiny.LLAMA3_ROPE, "high_freq_factor": 1.0}))


@pytest.mark.parametrize(
    "changes", ({"rope_theta": 1e-300}, {"rope_theta": 1e300}, {"rope_type": "linear", "factor": 1e-300})
)
def test_frequencies_outside_f32_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="rope_theta"):
        ModelConfig.from_dict(rope(**changes))


@pytest.mark.parametrize(
    "factors",
    (
        "x",
        3,
        {},
        [],
        [1.0] * 15,
        [1.0] * 17,
        [[1.0] * 16],
        [0.0] * 16,
        [-1.0] * 16,
        [NAN] * 16,
        ["1"] * 16,
        [None] * 16,
    ),
)
def test_bad_frequency_factors_are_refused(factors: object) -> None:
    with pytest.raises(ModelFileError, match="16 positive rope freq_factors"):
        ModelConfig.from_dict(rope(freq_factors=factors))


@pytest.mark.parametrize("model_type", ("gpt2", "qwen3_5_vision", None, 7, ["llama"], "", "x" * 10**6))
def test_an_unknown_architecture_is_answered_with_the_supported_ones(model_type: object) -> None:
    with pytest.raises(UnsupportedModel) as problem:
        ModelConfig.from_dict(changed("llama", model_type=model_type))
    assert all(name in str(problem.value) for name in BY_MODEL_TYPE)
    assert len(str(problem.value)) < 400


@pytest.mark.parametrize("kind", ("yarn", "longrope", "dynamic", "proportional", "x" * 10**6))
def test_an_unknown_rope_type_is_answered_with_the_supported_ones(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match="default, linear, llama3") as problem:
        ModelConfig.from_dict(rope(rope_type=kind, factor=2.0))
    assert len(str(problem.value)) < 300


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    (
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ("llama", {"head_dim": 33}, "33 rotated channels"),
        ("llama", {"head_dim": None, "num_attention_heads": 192, "num_key_value_heads": 1}, "head_dim"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "part of the head"),
        ("qwen", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}}, "64 rotated channels"),
        ("llama", {"rms_norm_eps": 1e300}, "rms_norm_eps"),
        ("llama", {"head_dim": 1 << 24}, "head_dim"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"hidden_act": [10**5000]}, "activation a list with a huge number"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ("qwen", {"attention_bias": True}, "attention_bias"),
        ("qwen", {"linear_num_value_heads": 5}, "5 value heads cannot share 2 key heads"),
        ("qwen", {"layer_types": ["full_attention"] * 7}, "layer_types"),
        ("qwen", {"layer_types": ["full_attention"] * 7 + ["sliding_attention"]}, "layer_types"),
        ("qwen", {"layer_types": [["full_attention"]] * 8}, "layer_types"),
        ("qwen", {"layer_types": "full_attention"}, "layer_types"),
        ("qwen", {"full_attention_interval": 0}, "full_attention_interval"),
        ("qwen", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 9e307}}, "partial_rotary_factor"),
        ("moe", {"mlp_only_layers": list(range(9))}, "mlp_only_layers must list at most 8 layers, not a list of 9"),
        ("moe", {"mlp_only_layers": 3}, "mlp_only_layers must list at most 8 layers, not 3"),
        ("moe", {"mlp_only_layers": [8]}, "mlp_only_layers must hold layer numbers from 0 to 7, not 8"),
        ("moe", {"mlp_only_layers": [[1]]}, "mlp_only_layers must hold layer numbers"),
        ("moe", {"mlp_only_layers": [True]}, "mlp_only_layers must hold layer numbers"),
        ("moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ("moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ),
)
def test_what_does_not_fit_together_is_refused(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        ModelConfig.from_dict(changed(family, **changes))


def test_a_nested_text_config_is_read_and_its_own_keys_win() -> None:
    outer = {
        "model_type": "qwen3_5",
        "text_config": {**QWEN, "hidden_size": 128},
        "hidden_size": 7,
        "vision_config": {},
    }
    config = ModelConfig.from_dict(outer)
    assert config.hidden == 128 and config.architecture == "qwen3_5" and not config.tied
    assert ModelConfig.from_dict({**outer, "tie_word_embeddings": True}).tied
    with pytest.raises(ModelFileError):
        ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": 5})


def test_code_named_by_a_config_is_not_looked_at() -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}, "trust_remote_code": True}
    assert ModelConfig.from_dict(changed("llama", **code)) == ModelConfig.from_dict(LLAMA)


def test_layers_are_named_by_layer_types_or_by_an_interval() -> None:
    types = ["full_attention", "linear_attention"] * 4
    assert ModelConfig.from_dict(changed("qwen", layer_types=types)).attention_layers == (0, 2, 4, 6)
    config = ModelConfig.from_dict(changed("qwen", layer_types=None, full_attention_interval=4))
    assert config.attention_layers == (3, 7) and config.gdn_layers == (0, 1, 2, 4, 5, 6)


def test_layers_without_experts_are_listed_or_follow_from_a_step() -> None:
    def dense(**changes: Any) -> set[int]:
        moe = ModelConfig.from_dict(changed("moe", **changes)).moe
        assert moe is not None
        return set(moe.dense_layers)

    assert dense() == dense(mlp_only_layers=None) == dense(mlp_only_layers=[]) == set()
    assert dense(mlp_only_layers=[5, 0, 5]) == {0, 5}
    assert dense(mlp_only_layers=[1], decoder_sparse_step=4) == {0, 1, 2, 4, 5, 6}


def test_a_long_list_of_layers_is_refused_at_once() -> None:
    """1024 layers looked for in a list of millions took most of a minute."""
    raw = changed("moe", num_hidden_layers=1024, mlp_only_layers=[-1] * 5_000_000)
    begin = time.perf_counter()
    with pytest.raises(ModelFileError, match="not a list of 5000000"):
        ModelConfig.from_dict(raw)
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize(("ids", "want"), ((2, (2,)), ([2, 5], (2, 5)), (None, ()), ("2", ()), ([True, 3], (3,))))
def test_end_tokens_are_one_several_or_none(ids: object, want: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(changed("llama", eos_token_id=ids)).eos_ids == want


# ---- rotation frequencies: f32 on both sides, so equal to a few roundings


@pytest.mark.parametrize("theta", (10000.0, 500000.0, 1e7))
@pytest.mark.parametrize(
    "scaling",
    (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"factor": 2.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 512},
    ),
)
def test_llama3_scaling_is_that_of_transformers(scaling: dict[str, float], theta: float) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    raw = changed("llama", head_dim=64, rope_parameters=parameters)
    theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(**{k: v for k, v in raw.items() if k != "model_type"}), None
    )
    assert factor == 1.0
    assert_close_rms("frequencies", theirs, torch.tensor(ModelConfig.from_dict(raw).inv_freq), 2e-7)
    relative = torch.tensor(ModelConfig.from_dict(raw).inv_freq).double() / theirs.double() - 1
    assert relative.abs().max() < 1e-6  # each one, also the smallest


def test_linear_scaling_is_that_of_transformers() -> None:
    raw = rope(rope_type="linear", factor=4.0)
    theirs, _ = ROPE_INIT_FUNCTIONS["linear"](LlamaConfig(**{k: v for k, v in raw.items() if k != "model_type"}), None)
    assert_close_rms("frequencies", theirs, torch.tensor(ModelConfig.from_dict(raw).inv_freq), 2e-7)
    plain = torch.tensor(ModelConfig.from_dict(rope()).inv_freq)
    assert_close_rms("quarter", plain / 4, torch.tensor(ModelConfig.from_dict(raw).inv_freq), 2e-7)


def test_both_spellings_of_scaling_are_the_same() -> None:
    new = ModelConfig.from_dict(changed("llama", rope_parameters=tiny.LLAMA3_ROPE))
    old_scaling = {k: v for k, v in tiny.LLAMA3_ROPE.items() if k != "rope_theta"}
    for name in ("rope_type", "type"):
        spelled = {name if k == "rope_type" else k: v for k, v in old_scaling.items()}
        raw = changed("llama", rope_parameters=None, rope_theta=10000.0, rope_scaling=spelled)
        assert ModelConfig.from_dict(raw).inv_freq == new.inv_freq


def test_plain_and_partial_frequencies() -> None:
    want = torch.tensor([10000.0 ** (-2 * i / 32) for i in range(16)], dtype=torch.float64)
    assert_close_rms("plain", want, torch.tensor(ModelConfig.from_dict(LLAMA).inv_freq), 2e-7)
    quarter = ModelConfig.from_dict(QWEN).inv_freq
    want = torch.tensor([1e7 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    assert_close_rms("a quarter of the head", want, torch.tensor(quarter), 2e-7)
    factors = [float(i + 1) for i in range(16)]
    divided = torch.tensor(ModelConfig.from_dict(rope(freq_factors=factors)).inv_freq)
    assert_close_rms(
        "factors", torch.tensor(ModelConfig.from_dict(LLAMA).inv_freq) / torch.tensor(factors), divided, 2e-7
    )
