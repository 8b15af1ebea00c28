"""Qwen3.5 and Qwen3-Next from folders in MXFP4, as two writers store them: what is read, kept, planned and refused."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from numerics import assert_same_bytes, logit_gap
from qwen_mxfp4 import COMPRESSED, QUARK, WRITERS, mxfp4_model
from safetensors.torch import save_file
from tiny_ranks import fixed_bytes
from torch import Tensor

from hybridkv import LLM
from hybridkv.checkpoint.quantisation import stored_as
from hybridkv.errors import HybridKVError, ModelFileError, UnsupportedModel
from hybridkv.kernels.linear.block_form import RELEASED_FP4
from hybridkv.kernels.linear.block_linear import BlockLinear
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.models import open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.qwen3_5_config import NEXT_QUANTISED, QUANTISED
from hybridkv.planner import model_bytes

BOUND = 1e-4  # of the logits' scale, in f32
HOW: dict[str, Any] = dict(device="cpu", dtype="float32", max_requests=2, max_context=128, reuse=None)
# in the last one all rows of DeltaNet's fused projections change places
CASES = (("compressed-tensors", "qwen3_5_moe"), ("quark", "qwen3_5_moe"), ("compressed-tensors", "qwen3_next"))


@pytest.mark.parametrize(("writer", "kind"), CASES)
def test_logits_codes_and_bytes(writer: str, kind: str, tmp_path: Path) -> None:
    (model, stored), ids = mxfp4_model(tmp_path, writer, kind, num_hidden_layers=4), tiny.token_ids(30, seed=5)
    want, codes = tiny.reference_logits(model, ids), WRITERS[writer][1]
    for form in ("released", "auto"):  # on a CPU: widened
        llm = LLM(tmp_path, weight_dtype=form, **HOW)
        assert logit_gap(want, llm.logits(ids, prefill=21, chunk=17)) <= BOUND
        layers: Any = llm.model.layers
        kept = form == "released"
        assert isinstance(layers[0].feed.gate_up, BlockScaled) == kept
        assert isinstance(layers[0].mixer.inputs, BlockLinear) == (kept and codes == "weight_packed")
        if not kept:
            continue
        gate_up: BlockScaled = layers[0].feed.gate_up
        assert gate_up.form == layers[0].feed.down.form == RELEASED_FP4
        name = "model.layers.0.mlp.experts.5"
        for last, found in ((codes, gate_up.codes[5]), ("weight_scale", gate_up.scales[5])):
            assert_same_bytes(torch.cat([stored[f"{name}.{part}_proj.{last}"] for part in ("gate", "up")]), found)
        with open_checkpoint(tmp_path) as checkpoint:
            planned = model_bytes(
                llm.config, checkpoint.__contains__, "float32", "cpu", blocks=checkpoint.block_forms()
            )
        assert llm.model.nbytes - fixed_bytes(llm.model) == planned


def test_a_wrong_scale_shows(tmp_path: Path) -> None:
    """The comparison above reads the scales of experts."""
    (model, _), ids = mxfp4_model(tmp_path, "quark"), tiny.token_ids(30, seed=5)
    llm = LLM(tmp_path, weight_dtype="released", **HOW)
    layer: Any = llm.model.layers[2]
    layer.feed.down.scales[:] += 1
    assert logit_gap(tiny.reference_logits(model, ids), llm.logits(ids)) > 10 * BOUND


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with one value put in, at keys with dots between."""
    found = deepcopy(config)
    *parents, last = path.split(".")
    inner = found
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return found


WEIGHTS, GLOBAL = "config_groups.group_0.weights", "global_quant_config"
FP8_LAYER = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}
REFUSED: tuple[tuple[dict[str, Any], str, object, str], ...] = (
    (COMPRESSED, "config_groups.group_0.format", "nvfp4-pack-quantized", "'nvfp4-.*; only format mxfp4-pack-quantized"),
    (COMPRESSED, "config_groups.group_0.format", "mxfp8-quantized", "format 'mxfp8-quantized'"),
    (COMPRESSED, f"{WEIGHTS}.num_bits", 8, "weights has num_bits 8; only num_bits 4, type float"),
    (COMPRESSED, f"{WEIGHTS}.type", "int", "type 'int'"),
    (COMPRESSED, f"{WEIGHTS}.group_size", 16, "group_size 16; .*group_size 32"),
    (COMPRESSED, f"{WEIGHTS}.symmetric", False, "symmetric False"),
    (COMPRESSED, "config_groups.group_0.weights", None, "weights is None"),
    (COMPRESSED, "config_groups.group_0.input_activations.dynamic", False, "input_activations has dynamic False; only"),
    (COMPRESSED, "config_groups.group_0", ["Linear"], "group_0' is .'Linear'"),
    (COMPRESSED, "config_groups", {}, "must name its config_groups"),
    (COMPRESSED, "kv_cache_scheme", {"num_bits": 8}, "has kv_cache_scheme .* only files without it"),
    (COMPRESSED, "transform_config", {"config_groups": {"R1": {}}}, "has transform_config"),
    (QUARK, f"{GLOBAL}.weight.dtype", "fp6_e3m2", "dtype 'fp6_e3m2'; only dtype fp4, qscheme per_group"),
    (QUARK, f"{GLOBAL}.weight.group_size", 16, "group_size 16"),
    (QUARK, f"{GLOBAL}.weight.scale_format", "e4m3", "scale_format 'e4m3'"),
    (QUARK, f"{GLOBAL}.weight", [{"dtype": "fp4"}, {"dtype": "fp8_e4m3"}], "weight is .*; one object"),
    (QUARK, f"{GLOBAL}.input_tensors.is_dynamic", False, "input_tensors has is_dynamic False"),
    (QUARK, "global_quant_config", None, "says of no layer"),
    (QUARK, "layer_quant_config", {"*self_attn*": FP8_LAYER}, r"layer_quant_config '\*self_attn\*': .*'fp8_e4m3'"),
    (QUARK, "export.kv_cache_group", ["*k_proj"], "has kv_cache_group"),
    (QUARK, "export.weight_format", "fake_quantized", "weight_format 'fake_quantized'"),
    (QUARK, "algo_config", [{"name": "rotation"}], "names 'rotation'; only awq, gptq"),
    (QUARK, "algo_config", {"rotation": {}}, "names None"),
    (QUARK, "pre_quant_opt_config", [{"name": "quarot"}], "has pre_quant_opt_config"),
    (QUARK, "quant_method", "mxfp4", "'mxfp4'; only fp8, compressed-tensors and quark are read"),
)


@pytest.mark.parametrize(("config", "path", "value", "words"), REFUSED)
def test_other_quantisations_are_refused_in_one_line(
    config: dict[str, Any], path: str, value: object, words: str
) -> None:
    assert stored_as(config, QUANTISED).block is None
    with pytest.raises((UnsupportedModel, ModelFileError), match=words) as refused:
        stored_as(changed(config, path, value), QUANTISED)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 250


def test_configs_and_folders_refuse_alike(tmp_path: Path) -> None:
    """Qwen3-Next in FP8, whose fused rows change places, and another group size."""
    for kind, quantised, words in (
        ("qwen3_next", {"quant_method": "fp8"}, "'fp8'; only compressed-tensors and quark are read"),
        ("qwen3_5_moe_text", changed(COMPRESSED, f"{WEIGHTS}.group_size", 16), "group_size 16"),
    ):
        config = {"model_type": kind, "quantization_config": quantised}
        with pytest.raises(UnsupportedModel, match=words):
            ModelConfig.from_dict(config)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=words):
            open_checkpoint(tmp_path)
    assert stored_as(COMPRESSED, NEXT_QUANTISED).scales == ("weight_scale",)


E3 = "model.layers.1.mlp.experts.3.up_proj"
Change = Callable[[dict[str, Tensor]], object]
FILES: dict[str, tuple[Change, str]] = {
    "no scales": (lambda t: t.pop(f"{E3}.weight_scale"), "up_proj.weight_packed' is U8 and its scales are missing"),
    "no codes": (lambda t: t.pop(f"{E3}.weight_packed"), "weight_scale' are the scales of a tensor that is missing"),
    "a group of 16": (
        lambda t: t.update({f"{E3}.weight_scale": t[f"{E3}.weight_scale"].repeat(1, 2)}),
        r"of \[32, 64\] needs scales of \[32, 2\], not \[32, 4\]",
    ),
    "scales of NVFP4": (
        lambda t: t.update({f"{E3}.weight_scale": t[f"{E3}.weight_scale"].view(torch.float8_e4m3fn)}),
        "has scales in F8_E4M3; they must be F8_E8M0 or U8",
    ),
    "FP8 codes": (
        lambda t: t.update({f"{E3}.weight_packed": torch.zeros(32, 64).to(torch.float8_e4m3fn)}),
        "is F8_E4M3 and has scales; packed FP4",
    ),
    "both": (lambda t: t.update({f"{E3}.weight": torch.ones(32, 64)}), "two tensors stand for"),
    "a narrow expert": (
        lambda t: t.update({f"{E3}.{part}": t[f"{E3}.{part}"][:16] for part in ("weight_packed", "weight_scale")}),
        "gate/up matrices of 'model.layers.1.mlp.experts' differ in shape",
    ),
}
LOADED: dict[str, tuple[Change, str]] = {
    "NaN": (lambda t: t[f"{E3}.weight_scale"][3:4, 1:].fill_(255), "experts.gate_up_proj'? holds NaN"),
    "a global scale": (lambda t: t.update({f"{E3}.weight_global_scale": torch.ones(1)}), "have no place in this model"),
}


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    _, stored = mxfp4_model(tmp_path)
    for change, words in (*FILES.values(), *LOADED.values()):
        tensors = {name: tensor.clone() for name, tensor in stored.items()}
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        if (change, words) in FILES.values():
            with pytest.raises(ModelFileError, match=words):
                open_checkpoint(tmp_path)
            continue
        for form in ("released", "plain"):
            with pytest.raises(HybridKVError, match=words):
                LLM(tmp_path, weight_dtype=form, **HOW)
