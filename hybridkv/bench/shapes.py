"""Which model a benchmark runs: the widths of a published one, cut to fewer layers if asked, or tiny ones for a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hybridkv.errors import HybridKVError
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.known import KNOWN, known_config
from hybridkv.models.random_weights import random_decoder

DENSE_SHAPE = "27b"  # what is measured if none is named
V4_SHAPE = "DeepSeek-V4-Flash"

TINY: dict[str, Any] = dict(
    model_type="qwen3_5_text", vocab_size=128, hidden_size=64, num_hidden_layers=4, intermediate_size=96,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, full_attention_interval=4, linear_conv_kernel_dim=4,
    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    max_position_embeddings=4096, rms_norm_eps=1e-6, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
)  # fmt: skip
TINY_V4: dict[str, Any] = dict(
    model_type="deepseek_v4", vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
    qk_rope_head_dim=8, q_lora_rank=24, o_groups=2, o_lora_rank=16, sliding_window=128, index_n_heads=24,
    index_head_dim=16, index_topk=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    routed_scaling_factor=1.5, num_hash_layers=2, compress_ratios=[0, 0, 4, 128], max_position_embeddings=4096,
    rms_norm_eps=1e-6, rope_theta=10000, compress_rope_theta=160000, rope_scaling=KNOWN[V4_SHAPE]["rope_scaling"],
)  # fmt: skip
SHORT = {"27b": "Qwen3.5-27B", "9b": "Qwen3.5-9B", "4b": "Qwen3.5-4B", "0.8b": "Qwen3.5-0.8B"}


@dataclass(frozen=True)
class Shape:
    name: str
    raw: dict[str, Any]  # in the words of a Hugging Face config.json
    config: ModelConfig
    device: str  # cuda | cpu
    dtype: torch.dtype

    @property
    def tiny(self) -> bool:
        return self.name == "tiny"

    def cut(self, layers: int) -> Shape:
        return make_shape(self.name, first_layers(self.raw, layers), self.device, self.dtype)


def random_model(shape: Shape, weight_dtype: str) -> Model:
    """With random weights; weight_dtype as a bench's option has it (WEIGHT_DTYPES)."""
    form = "" if weight_dtype in ("auto", "fp8") else weight_dtype
    return random_decoder(shape.config, shape.device, shape.dtype, weight_dtype == "fp8", form=form)


def find_shape(name: str | None, layers: int | None = None, device: str = "auto", v4: bool = False) -> Shape:
    """The shape and where it runs, or a reason why it cannot. `v4`: one of DeepSeek-V4."""
    if layers is not None and layers < 1:
        raise HybridKVError(f"layers must be a positive number, not {layers}")
    name = name or (V4_SHAPE if v4 else DENSE_SHAPE)
    if name == "tiny":
        found, raw = "tiny", TINY_V4 if v4 else TINY
    else:
        known = known_config(SHORT.get(name.lower(), name))
        if known is None:
            raise HybridKVError(f"there is no model shape {name!r}; choose {', '.join(('tiny', *SHORT, *KNOWN))}")
        found, raw = known
        if (raw["model_type"] == "deepseek_v4") != v4:
            benches = "kernels, decode, prefill, eviction, capacity and load" if v4 else "v4_kernels and v4_model"
            raise HybridKVError(f"{found} has benches of its own: {benches}")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = here if device == "auto" else device
    if device not in ("cpu", "cuda"):
        raise HybridKVError(f"device must be auto, cpu or cuda, not {device!r}")
    if device == "cuda" and here == "cpu":
        raise HybridKVError("there is no CUDA device here; --model-shape tiny runs on a CPU")
    if device == "cpu" and found != "tiny":
        raise HybridKVError(f"{found} needs a CUDA device to be measured; --model-shape tiny runs on a CPU")
    raw = raw if layers is None else first_layers(raw, layers)
    return make_shape(found, raw, device, torch.bfloat16 if device == "cuda" else torch.float32)


def first_layers(raw: dict[str, Any], layers: int) -> dict[str, Any]:
    changed: dict[str, Any] = {"num_hidden_layers": layers}
    if "compress_ratios" in raw:
        changed["compress_ratios"] = raw["compress_ratios"][:layers]
    return raw | changed


def make_shape(name: str, raw: dict[str, Any], device: str, dtype: torch.dtype) -> Shape:
    return Shape(name, raw, ModelConfig.from_dict(raw), device, dtype)
