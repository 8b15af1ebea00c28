"""A tiny model as files: random weights, and the tokenizer and chat template of the tiny model that comes with the
package. What a server does beside computing is most of what it then does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridkv.bench.shapes import TINY
from hybridkv.embedded import TINY_HYBRID, shipped_model
from hybridkv.models import FAMILIES
from hybridkv.models.config import ModelConfig
from hybridkv.models.random_weights import RandomLoader

# a layer of Gated DeltaNet and one of attention; as many tokens as the tokenizer has
SERVED: dict[str, Any] = TINY | dict(vocab_size=2048, num_hidden_layers=2, full_attention_interval=2, eos_token_id=0)


class _Noted(RandomLoader):
    """Keeps what a model asks for, by its name in files."""

    def __init__(self) -> None:
        super().__init__("cpu", torch.float32)
        self.tensors: dict[str, Tensor] = {}

    def raw(self, name: str, *shape: int) -> Tensor:
        self.tensors[name] = super().raw(name, *shape)
        return self.tensors[name].clone()


def write_tiny(folder: Path) -> Path:
    """The files of the model in this folder, which is returned."""
    config, loader = ModelConfig.from_dict(SERVED), _Noted()
    FAMILIES[config.architecture].load(config, loader)
    save_file(loader.tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SERVED))
    shipped = shipped_model(TINY_HYBRID)
    assert shipped is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, folder / name)
    return folder
