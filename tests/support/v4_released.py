"""A tiny DeepSeek-V4 of transformers, rounded to what FP8 and FP4 hold, and the folder that stores it as codes."""

import copy
import json
from pathlib import Path
from typing import Any

import tiny_v4
import torch
from block_cases import FP4, FP8, encode
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel
from v4_files import QUANTISED

from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.kernels.linear.block_scaled import dequantise_ref
from hybridkv.models.deepseek_family import _RELEASED_FP8


def round_and_store(stored: dict[str, Tensor], name: str, matrix: Tensor, form: BlockForm) -> Tensor:
    """Codes and scales under their names; the values that they stand for."""
    coded = encode(matrix, form)
    codes = coded.codes.view(torch.float8_e4m3fn if form.bits == 8 else torch.int8)
    stored |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": coded.scales.view(torch.float8_e8m0fnu)}
    return dequantise_ref(coded, torch.float32)


def write_released(model: PreTrainedModel, folder: Path, experts: BlockForm = FP4) -> None:
    """Rounds the model's matrices in place, and writes the folder."""
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if _RELEASED_FP8.fullmatch(name):
                tensor.copy_(round_and_store(stored, name.removesuffix(".weight"), tensor, FP8))
            elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                of, kind = name.rsplit(".", 1)
                for e, matrix in enumerate(tensor):
                    parts = {"down": matrix}
                    if kind == "gate_up_proj":
                        parts = dict(zip(("gate", "up"), matrix.chunk(2)))
                    for part, rows in parts.items():
                        rows.copy_(round_and_store(stored, f"{of}.{e}.{part}_proj", rows, experts))
            else:
                stored[name] = tensor
    save_file({name: tensor.clone().contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string())
    config |= {"quantization_config": QUANTISED}
    (folder / "config.json").write_text(json.dumps(config))


def released_model(folder: Path, experts: BlockForm = FP4, **changes: Any) -> PreTrainedModel:
    """tiny_v4's mini model with these changes, as it is after rounding; the folder has its codes."""
    tiny_v4.KINDS["released"] = copy.deepcopy({**tiny_v4.KINDS["mini"], **changes})
    try:
        model = tiny_v4.build("released")
    finally:
        del tiny_v4.KINDS["released"]
    assert isinstance(model, DeepseekV4ForCausalLM) and isinstance(model.config, DeepseekV4Config)
    write_released(model, folder, experts)
    return model
