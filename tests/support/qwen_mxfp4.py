"""Tiny Qwen3.5 and Qwen3-Next models rounded to MXFP4, and the folders that store them as two writers do. Of one all
matrices are codes but the router and the head; of the other the experts alone.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from block_cases import FP4, encode
from qwen_fp8 import coded_model
from torch import Tensor

from hybridkv.kernels.linear.block_scaled import dequantise_ref

COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None, "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "targets": ["Linear"], "output_activations": None,
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
                    "dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": None, "observer": "minmax"},
        "input_activations": {"num_bits": 4, "type": "float", "group_size": 32, "dynamic": True},
    }},
}  # fmt: skip
_FP4 = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "symmetric": None,
        "round_method": "half_even", "scale_type": "float", "scale_format": "e8m0"}  # fmt: skip
QUARK: dict[str, Any] = {
    "quant_method": "quark", "exclude": ["lm_head", "re:.*self_attn.*"], "algo_config": None,
    "layer_quant_config": {}, "layer_type_quant_config": {}, "kv_cache_quant_config": {},
    "global_quant_config": {"weight": {**_FP4, "is_dynamic": False}, "input_tensors": {**_FP4, "is_dynamic": True},
                            "output_tensors": None, "bias": None},
    "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
}  # fmt: skip
# writer -> its config, the last part of the name of codes, the matrices beside experts that are codes
WRITERS: dict[str, tuple[dict[str, Any], str, re.Pattern[str]]] = {
    "compressed-tensors": (COMPRESSED, "weight_packed", re.compile(r".*(_proj\w*|shared_expert_gate)\.weight")),
    "quark": (QUARK, "weight", re.compile("none")),
}


def stored_codes(stored: dict[str, Tensor], name: str, matrix: Tensor, codes: str) -> Tensor:
    """Codes and scales under their names; the values that they stand for."""
    coded = encode(matrix, FP4)
    stored |= {f"{name}.{codes}": coded.codes, f"{name}.weight_scale": coded.scales}
    return dequantise_ref(coded, torch.float32)


def mxfp4_model(
    folder: Path, writer: str = "compressed-tensors", kind: str = "qwen3_5_moe", **changes: Any
) -> tuple[Any, dict[str, Tensor]]:
    """The model as it is after rounding, and what the folder stores."""
    config, codes, coded = WRITERS[writer]
    return coded_model(folder, kind, coded, partial(stored_codes, codes=codes), config, **changes)
