"""In which form an LLM holds its weights: what `weight_dtype` comes to with a device, a dtype and a model's files.

Which device computes with which form is said in kernels/linear, what a form takes in models/weight_forms.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.devices import resolve_half
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.block_linear import keeps_blocks
from hybridkv.kernels.linear.int4 import int4_pays
from hybridkv.kernels.linear.packed import keeps_packed
from hybridkv.models.config import ModelConfig
from hybridkv.settings import Settings


@dataclass(frozen=True)
class WeightChoice:
    """The form that was chosen. Where none of these holds, weights have the model's dtype."""

    fp8: bool  # E4M3 codes, a scale for each row
    packed: bool  # as a GGUF file has them
    released: bool  # FP8 and FP4 codes of the files, with their scales
    half: bool  # f16, multiplied with float32
    int4: frozenset[str]  # matrices beside these whose 4-bit codes of a GGUF file are kept, too
    could_pack: bool  # whether weight_dtype="auto" would leave those of a GGUF file packed

    def name(self, dtype: torch.dtype) -> str:
        """The form in a word, `dtype` being the model's."""
        plain = "int4" if self.int4 else "f16" if self.half else str(dtype).removeprefix("torch.")
        return "released" if self.released else "fp8" if self.fp8 else "packed" if self.packed else plain


def choose_weights(checkpoint: Checkpoint, config: ModelConfig, settings: Settings, dtype: torch.dtype) -> WeightChoice:
    """The form for a model of this dtype, or HybridKVError where what was asked for is not there."""
    asked, exact, name = settings.weight_dtype, settings.exact, checkpoint.path.name
    could_pack = not exact and keeps_packed(settings.device, dtype)
    if config.v4 is not None and asked in ("f16", "int4"):
        raise HybridKVError(f"weight_dtype='{asked}' is not there for DeepSeek-V4; use 'released', 'plain' or 'auto'")
    keeps = asked == "auto" and not exact and keeps_blocks(settings.device, dtype)
    released = asked == "released" or (keeps and bool(checkpoint.block_forms()))
    if released and exact:
        raise HybridKVError(
            "exact mode computes with plain weights, not with weight_dtype='released'; use 'auto' or 'plain'"
        )
    if released and not checkpoint.block_forms():
        raise HybridKVError(
            "weight_dtype='released' keeps FP8 and FP4 codes that have a scale for each block, and "
            f"{name} has none that are read; use 'auto' or 'plain'"
        )
    narrow = checkpoint.narrow and config.v4 is None
    half = resolve_half(asked, settings.dtype, settings.device, dtype, exact, narrow)
    takes4 = asked == "int4" or (asked == "auto" and int4_pays())
    takes4 = takes4 and settings.ranks is None
    int4 = checkpoint.codes4_names() if half and takes4 else frozenset()
    if asked == "int4" and not int4:
        raise HybridKVError(
            "weight_dtype='int4' takes the 4-bit codes of a GGUF file (Q4_0, Q4_1 or Q4_K), and "
            f"{name} has none; use 'f16', 'plain' or another file"
        )
    return WeightChoice(settings.fp8, asked == "auto" and could_pack, released, half, int4, could_pack)
