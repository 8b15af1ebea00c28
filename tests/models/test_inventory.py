"""The list of weights that a family declares is what its loading code asks for, tensor by tensor, and what is held."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from asked_for import AskedFor

from hybridkv.config import CacheConfig
from hybridkv.dtypes import torch_dtype
from hybridkv.models import FAMILIES, family_of
from hybridkv.models.config import ModelConfig
from hybridkv.models.inventory import Weight
from hybridkv.models.known import KNOWN
from hybridkv.models.weight_forms import FORMS, form_bytes, held_today, weight_bytes
from hybridkv.planner import model_bytes, planned_tensors
from models.test_packed_models import CHANGES, only, written

FUSED = ("in_proj_qkvz.weight", "in_proj_ba.weight")


def compare(config: ModelConfig, has: Callable[[str], bool], dtype: torch.dtype, device: str) -> list[Weight]:
    loader = AskedFor(has, dtype, device)
    family_of(config).load(config, loader)
    listed = list(family_of(config).weights(config, has))
    name = str(dtype).removeprefix("torch.")
    assert [w.name for w in listed] == list(dict.fromkeys(w.name for w in listed)), "a tensor is listed twice"
    assert {w.name: w.shape for w in listed} == {n: shape for n, (shape, _, _) in loader.tensors.items()}
    for weight in listed:
        shape, held, matrix = loader.tensors[weight.name]
        assert weight_bytes(weight, name, device == "cuda") == prod(shape) * held.itemsize, weight
        assert (weight.kind == "matrix") == matrix, weight
        assert (weight.kind == "experts") == (".experts." in weight.name), weight
    return listed


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_known_models_list_what_is_loaded(name: str, dtype: torch.dtype, device: str) -> None:
    config = ModelConfig.from_dict(KNOWN[name])
    short = replace(config, layers=min(config.layers, 8))  # two rounds of every pattern of layers
    if config.v4 is not None:
        short = replace(short, v4=replace(config.v4, kinds=config.v4.kinds[:8]))
    elif config.attention_layers:
        short = replace(short, attention_layers=tuple(i for i in config.attention_layers if i < 8))
    compare(short, planned_tensors(config, KNOWN[name]), dtype, device)


@pytest.mark.parametrize("kind", sorted(tiny.KINDS))
@pytest.mark.parametrize("fused", [False, True])
def test_tiny_models_list_what_is_loaded(kind: str, fused: bool) -> None:
    """With biases, tied heads, and the fused projections of Qwen3-Next, as each checkpoint has them."""
    model = tiny.build(kind)
    names = {name for name in model.state_dict() if not tiny._is_tied_head(model, name)}
    if fused:
        names = {n for n in names if "in_proj" not in n} | {
            n.replace("in_proj_z.weight", f) for n in names for f in FUSED
        }
    compare(ModelConfig.from_dict(model.config.to_dict()), names.__contains__, torch.float32, "cpu")


def test_the_comparison_sees_a_tensor_that_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dict(KNOWN["Qwen3-8B"])
    family = FAMILIES["qwen3"]
    without = replace(
        family, weights=lambda c, has: (w for w in family.weights(c, has) if "layers.3.self_attn.k_norm" not in w.name)
    )
    monkeypatch.setitem(FAMILIES, "qwen3", without)
    with pytest.raises(AssertionError):
        compare(config, planned_tensors(config, KNOWN["Qwen3-8B"]), torch.bfloat16, "cuda")


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("form", ["q8_0", "q6_k", "q5_k", "q4_k"])
def test_a_form_without_a_file_takes_what_the_file_takes(
    kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF file of one format, its matrices kept packed, its experts dequantised: as `LLM` loads it on a GPU."""
    from hybridkv import LLM
    from hybridkv.models import open_checkpoint

    path = written(kind, tmp_path, only(form.upper()), monkeypatch)
    monkeypatch.setattr("hybridkv.weight_choice.keeps_packed", lambda device, dtype: True)
    model: Any = LLM(path, dtype="bfloat16", device="cpu", max_requests=1, max_context=256).model
    with open_checkpoint(path) as checkpoint:
        config, has = ModelConfig.from_dict(checkpoint.config), checkpoint.__contains__
        assert form_bytes(config, has, form, experts=False) == model.nbytes - model.inv_freq.nbytes
    assert (form_bytes(config, has, form) < form_bytes(config, has, form, experts=False)) == (config.moe is not None)
    assert held_today(config, form) == (config.moe is None)


@pytest.mark.parametrize("name", KNOWN)
def test_forms_grow_with_their_bits_and_agree_with_the_plan(name: str) -> None:
    config = ModelConfig.from_dict(KNOWN[name])
    has = planned_tensors(config, KNOWN[name])
    sizes = {form: form_bytes(config, has, form) for form in FORMS}
    assert sizes["q6_k"] < sizes["q8_0"] < sizes["bf16"] < sizes["f32"] and sizes["q4_k"] < sizes["q5_k"]
    if name != "SmolLM2-135M-Instruct":  # whose rows are not whole blocks
        assert sizes["q5_k"] < sizes["q6_k"]
    assert sizes["bf16"] == model_bytes(config, has, "bfloat16", "cuda")
    assert sizes["f32"] == model_bytes(config, has, "float32", "cuda")
    assert sizes["fp8"] == model_bytes(config, has, "bfloat16", "cuda", fp8=True)
    experts = sum(prod(w.shape) for w in family_of(config).weights(config, has) if w.kind == "experts")
    assert sizes["bf16"] - sizes["mxfp4"] == experts * 2 - experts * 17 // 32


def test_rows_that_are_not_whole_blocks_go_as_llama_cpp_has_them() -> None:
    """SmolLM2's rows of 576 and 1536: Q6_K becomes Q8_0, Q4_K a format that is dequantised."""
    config = ModelConfig.from_dict(KNOWN["SmolLM2-135M-Instruct"])
    has = planned_tensors(config, KNOWN["SmolLM2-135M-Instruct"])
    matrices = [w.shape for w in family_of(config).weights(config, has) if w.kind == "matrix"]
    narrow, wide = (sum(prod(shape) for shape in matrices if shape[1] == columns) for columns in (576, 1536))
    rest = form_bytes(config, has, "bf16") - 2 * (narrow + wide)
    assert form_bytes(config, has, "q4_k") == rest + 2 * narrow + wide * 148 // 256
    assert form_bytes(config, has, "q6_k") == rest + narrow * 34 // 32 + wide * 212 // 256


def test_dtypes_have_their_sizes_and_schemas_torchs_dtypes() -> None:
    from hybridkv.dtypes import ITEMSIZE
    from hybridkv.models import cache_schema

    for name, size in ITEMSIZE.items():
        assert torch_dtype(name).itemsize == size
    by_name, by_dtype = (
        cache_schema(ModelConfig.from_dict(KNOWN["Qwen3.5-27B"]), CacheConfig("fp8"), dtype)
        for dtype in ("bfloat16", torch.bfloat16)
    )
    assert by_name == by_dtype
