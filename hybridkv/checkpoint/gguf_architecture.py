"""GgufArchitecture: what a model family says about its GGUF files. `models/registry.py` hands them to the reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from hybridkv.checkpoint.gguf_config import Keys
    from hybridkv.checkpoint.gguf_map import Table

Config = dict[str, Any]  # in the words of a Hugging Face config.json


@dataclass(frozen=True)
class GgufArchitecture:
    name: str  # the file's general.architecture
    model_type: str  # what transformers calls it
    config: Callable[[Keys], Config]  # what its config has beside the keys that every decoder has
    add_layer: Callable[[Table, Config, int], None]  # add the recipes of one layer's tensors to the table
    sizes: Callable[[Config], dict[str, int]] = lambda config: {}  # letters for shapes beside those of every decoder
    undo_norm: Callable[[Tensor], Tensor] | None = None  # what undoes the converter's change to the output norm
    partial_rotary: bool = False  # whether a part of each head may be rotated
    rope_factors: bool = False  # whether rope_freqs.weight divides the rotation frequencies
