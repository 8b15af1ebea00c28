"""Tiny Qwen3.5 models rounded to FP8 with block scales, and the folder that stores them as Qwen's FP8 releases do: each
expert's matrices by themselves, scales in BF16 that are no powers of two, small projections and the router in values.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from block_cases import FP8, encode
from safetensors.torch import save_file
from tiny_ranks import build
from torch import Tensor
from v4_files import QUANTISED

from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.kernels.linear.block_scaled import BlockScaled, dequantise_ref

CODED = re.compile(
    r".*(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|mlp\.(shared_expert\.)?\w+_proj)\.weight"
)
BASE = BlockForm(8, 128, 128, 4)


def stored_codes(stored: dict[str, Tensor], name: str, matrix: Tensor) -> Tensor:
    """Codes and scales under their names; the values that they stand for."""
    coded = encode(matrix / 1.5, FP8)
    scales = 1.5 * 2.0 ** (coded.scales.float() - 127)
    stored |= {f"{name}.weight": coded.codes.view(torch.float8_e4m3fn)}
    stored |= {f"{name}.weight_scale_inv": scales.to(torch.bfloat16)}
    return dequantise_ref(BlockScaled(coded.codes, scales, BASE), torch.float32)


def coded_model(
    folder: Path,
    kind: str,
    coded: re.Pattern[str],  # of names: matrices that are stored in codes, beside the experts
    store: Callable[[dict[str, Tensor], str, Tensor], Tensor],  # as stored_codes
    quantised: dict[str, Any],  # for the config
    **changes: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """The model as it is after rounding, and what the folder stores: its codes."""
    model, stored = build(kind, 3, **changes), {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if coded.fullmatch(name):
                tensor.copy_(store(stored, name.removesuffix(".weight"), tensor))
            elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                of, kind_of = name.rsplit(".", 1)
                for e, matrix in enumerate(tensor):
                    parts = {"down": matrix}
                    if kind_of == "gate_up_proj":
                        parts = dict(zip(("gate", "up"), matrix.chunk(2)))
                    for part, rows in parts.items():
                        rows.copy_(store(stored, f"{of}.{e}.{part}_proj", rows))
            else:
                stored[name] = tensor
    save_file({name: tensor.clone().contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string()) | {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(config))
    return model, stored


def fp8_model(folder: Path, kind: str = "qwen3_5_moe", **changes: Any) -> Any:
    """The model as it is after rounding; the folder has its codes."""
    return coded_model(folder, kind, CODED, stored_codes, QUANTISED, **changes)[0]
