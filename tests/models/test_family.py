"""Family: every family has all its parts, refuses in its own words, and has one attention scale."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny
import torch
from numerics import logit_gap

from eviction.harness import Run, request_of
from hybridkv.config import CacheConfig
from hybridkv.errors import HybridKVError
from hybridkv.models import FAMILIES, cache_schema, check_exact, check_fp8, load_model, open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.family import OPTIONS
from hybridkv.models.known import KNOWN
from hybridkv.models.registry import BY_MODEL_TYPE, LAYOUTS

KNOWN_CONFIGS = {config.architecture: config for config in map(ModelConfig.from_dict, KNOWN.values())}


def ask(option: str, config: ModelConfig) -> None:
    """Ask a model for an option in the way that a caller does."""
    cache = {
        "budget": CacheConfig(budget=2048),
        "state_dtype": CacheConfig(state_dtype="bf16"),
        "index_dtype": CacheConfig(index_dtype="fp8"),
    }
    if option in cache:
        cache_schema(config, cache[option], torch.bfloat16)
    elif option == "exact":
        check_exact(config, True)
    else:
        check_fp8(config, True)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_takes_an_option_or_says_why_not(name: str, option: str) -> None:
    family, config = FAMILIES[name], KNOWN_CONFIGS[name]
    if family.supports(option):
        ask(option, config)
        return
    with pytest.raises(HybridKVError, match=option.removesuffix("_dtype")) as problem:
        ask(option, config)
    assert name in str(problem.value) and "{" not in str(problem.value)


def test_what_families_refuse() -> None:
    refused = {name: set(family.refuses) for name, family in FAMILIES.items()}
    plain, hybrid = {"state_dtype", "index_dtype"}, {"index_dtype"}
    assert refused == {
        "llama": plain,
        "qwen3": plain,
        "qwen3_5": hybrid,
        "qwen3_5_moe": hybrid,
        "qwen3_next": hybrid,
        "deepseek_v4": {"exact", "fp8", "budget", "state_dtype"},
    }


def test_an_option_that_does_not_exist_cannot_be_refused() -> None:
    with pytest.raises(ValueError, match="colour"):
        replace(FAMILIES["llama"], refuses={"colour": "no"})


def test_no_two_families_claim_the_same_model() -> None:
    families = FAMILIES.values()
    assert len(BY_MODEL_TYPE) == sum(len(family.model_types) for family in families)
    assert len(LAYOUTS.gguf) == sum(len(family.gguf) for family in families)
    for name, arch in LAYOUTS.gguf.items():
        assert arch.name == name and arch.model_type in BY_MODEL_TYPE


@pytest.mark.parametrize("kind", ("llama", "qwen3", "qwen3_5"))
def test_layers_and_eviction_read_the_scale_of_the_config(kind: str, oracle: Callable) -> None:
    """Against transformers, whose attention layers are given the same scale."""
    found, scale, ids = oracle(kind), 0.31, tiny.token_ids(100)
    with open_checkpoint(found.folder) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        assert config.attention_scale == config.head_dim**-0.5
        config = replace(config, scale=scale)
        model = load_model(config, checkpoint, torch.device("cpu"), torch.float32)
    run = Run(model, CacheConfig("f32", 16, budget=48, window=16, recent=8))  # type: ignore[arg-type]
    run.admit()
    got = run.feed(ids, 64)
    assert run.evictor is not None
    assert {layer.scale for layer in run.evictor.layers(request_of(ids), run.manager)} == {scale}
    other = tiny.build(kind)
    for layer in config.attention_layers:
        other.model.layers[layer].self_attn.scaling = scale
    assert logit_gap(tiny.reference_logits(other, ids), got) < found.bound
    assert logit_gap(tiny.reference_logits(found.model, ids), got) > 1e-2, "the scale did not matter"
