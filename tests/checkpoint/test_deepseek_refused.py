"""DeepSeek-V4 checkpoints that are refused, and in which words."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from v4_files import CONFIG, QUANTISED, Made, Tensors, write

from hybridkv import LLM
from hybridkv.checkpoint.quantisation import stored_as
from hybridkv.errors import HybridKVError, ModelFileError, UnsupportedModel
from hybridkv.models import open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.deepseek_family import check_schedule


@pytest.fixture(scope="module")
def released() -> Made:
    return Made()


WQ, W1 = "layers.1.attn.wq_b", "layers.1.ffn.experts.1.w1"


def without(*names: str) -> Callable[[Tensors], None]:
    def change(stored: Tensors) -> None:
        for name in names:
            del stored[name]

    return change


def put(name: str, make: Callable[[Tensor], Tensor], source: str | None = None) -> Callable[[Tensors], None]:
    def change(stored: Tensors) -> None:
        stored[name] = make(stored[source or name])

    return change


def nan_scale(scale: Tensor) -> Tensor:
    return torch.full(scale.shape, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def nan_code(weight: Tensor) -> Tensor:
    codes = weight.view(torch.uint8).clone()
    codes[3, 5] = 0x7F
    return codes.view(torch.float8_e4m3fn)


AT_ONCE = {
    "no scale": (without(f"{WQ}.scale"), ModelFileError, "wq_b.weight' is F8_E4M3 and its scales are missing"),
    "no expert scale": (without(f"{W1}.scale"), ModelFileError, "w1.weight' is I8 and its scales are missing"),
    "scale alone": (without(f"{WQ}.weight"), ModelFileError, "wq_b.scale' are the scales of a tensor that is missing"),
    "scale of a norm": (
        put("layers.1.attn.q_norm.scale", torch.clone, f"{WQ}.scale"), ModelFileError, "q_norm.weight' is F32 and has",
    ),
    "two scales": (put(f"{WQ}.weight_scale_inv", torch.clone, f"{WQ}.scale"), ModelFileError, "two tensors of scales"),
    "scale shape": (
        put(f"{WQ}.scale", lambda s: s.repeat(2, 1)), ModelFileError,
        r"wq_b.weight' of \[64, 24\] needs scales of \[1, 1\], not \[2, 1\]",
    ),
    "expert scale shape": (
        put(f"{W1}.scale", lambda s: s[:, :2]), ModelFileError,
        r"of \[40, 144\] needs scales of \[40, 5\], not \[40, 2\]",
    ),
    "scale dtype": (put(f"{WQ}.scale", lambda s: s.float().half()), ModelFileError, "has scales in F16"),
    "scaled vector": (
        put(f"{WQ}.weight", lambda w: w.flatten()), ModelFileError, r"shape \[1536\]; with scales it must be a matrix",
    ),
    "weight dtype": (put("norm.weight", torch.Tensor.double), UnsupportedModel, "norm.weight' is F64"),
    "integer weight": (put("norm.weight", torch.Tensor.long), UnsupportedModel, "norm.weight' is I64"),
    "float indices": (
        put("layers.0.ffn.gate.tid2eid", torch.Tensor.float), ModelFileError, "tid2eid' is F32; it must be I64 or I32",
    ),
    "no expert": (
        without(f"{W1}.weight", f"{W1}.scale"), ModelFileError,
        "mlp.experts.1.gate_proj.weight' is missing, of 3 experts",
    ),
    "twice": (
        put("model.layers.1.self_attn.kv_norm.weight", torch.clone, "layers.1.attn.kv_norm.weight"), ModelFileError,
        "two tensors stand for 'model.layers.1.self_attn.kv_norm.weight'",
    ),
}  # fmt: skip


def test_a_head_that_is_missing_is_not_the_embedding(tmp_path: Path, released: Made) -> None:
    stored = dict(released.stored)
    del stored["head.weight"]
    with pytest.raises(ModelFileError, match="lm_head.weight is missing"):
        LLM(str(write(tmp_path, stored)), "cpu", "float32", max_context=64)


@pytest.mark.parametrize("case", AT_ONCE)
def test_a_bad_file_is_refused_at_once(tmp_path: Path, released: Made, case: str) -> None:
    change, error, words = AT_ONCE[case]
    stored = dict(released.stored)
    change(stored)
    with pytest.raises(error, match=words):
        open_checkpoint(write(tmp_path, stored))


@pytest.mark.parametrize(
    ("stored_name", "make", "name"),
    [
        (f"{WQ}.scale", nan_scale, "model.layers.1.self_attn.q_b_proj.weight"),
        (f"{WQ}.weight", nan_code, "model.layers.1.self_attn.q_b_proj.weight"),
        (f"{W1}.scale", nan_scale, "model.layers.1.mlp.experts.gate_up_proj"),
    ],
)
def test_what_is_not_a_number_is_refused(
    tmp_path: Path, released: Made, stored_name: str, make: Callable[[Tensor], Tensor], name: str
) -> None:
    stored = {**released.stored, stored_name: make(released.stored[stored_name])}
    with open_checkpoint(write(tmp_path, stored)) as checkpoint, pytest.raises(ModelFileError, match="holds NaN"):
        checkpoint.read(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(compress_ratios=[0, 128, 128]), "layer 1 is HCA by the config .* but has the weights of CSA"),
        (dict(compress_ratios=[0, 4, 4]), "layer 2 is CSA by the config .* but has the weights of HCA"),
        (dict(compress_ratios=[0, 0, 128]), "layer 1 is WINDOW by the config .* but has the weights of CSA"),
        (dict(compress_ratios=[4, 4, 128]), "layer 0 is CSA by the config .* but has the weights of WINDOW"),
        (dict(num_hash_layers=0), r"layer 0 needs mlp.gate.e_score_correction_bias"),
        (dict(num_hash_layers=2), r"layer 1 needs mlp.gate.tid2eid"),
    ],
)
def test_a_schedule_that_is_not_the_checkpoints(released: Made, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        check_schedule(ModelConfig.from_dict(CONFIG | changes), released.values.__contains__)


@pytest.mark.parametrize(
    ("quantised", "words"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq'; only fp8"),
        ("fp8", "only fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
    ],
)
def test_a_quantisation_that_is_not_read(tmp_path: Path, released: Made, quantised: object, words: str) -> None:
    with pytest.raises(HybridKVError, match=words):
        open_checkpoint(write(tmp_path, released.stored, {"quantization_config": quantised}))


def test_the_block_size_is_the_configs() -> None:
    assert stored_as(QUANTISED, ("fp8",)).block == (128, 128)
    assert stored_as({"quant_method": "fp8", "weight_block_size": [32, 64]}, ("fp8",)).block == (32, 64)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(1)
    yield
