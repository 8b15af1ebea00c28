"""What a plan is made for: a known model, a config.json, or the header of a GGUF file. Nothing heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from hybridkv.embedded import shipped_model
from hybridkv.errors import ModelFileError
from hybridkv.files import read_json
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.models.config import ModelConfig
from hybridkv.models.inventory import Weight
from hybridkv.models.known import KNOWN, known_config, unknown_model
from hybridkv.models.weight_forms import form_bytes
from hybridkv.parallel.shard import Shard
from hybridkv.planner import model_bytes, planned_tensors

PackedCut = tuple[tuple[int, int], int]  # bits and columns for one d; the columns at whose multiples it can be cut
EMBEDDED = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Source:
    """A model that may not be here."""

    name: str
    config: ModelConfig
    has: Callable[[str], bool]  # whether it has a tensor that not every model has
    packed: dict[str, int] = field(default_factory=dict)  # bytes of the matrices of a GGUF file that can stay packed
    codes4: frozenset[str] = frozenset()  # matrices of a GGUF file whose 4-bit codes a CPU can multiply
    is_gguf: bool = False
    narrow: bool = False  # a GGUF file most of whose values have 16 bits or fewer
    ffn_layer_bytes: int | None = None  # the largest FFN layer of a GGUF file, as stored
    cuts: Mapping[str, PackedCut] = field(default_factory=dict)  # where its packed matrices can be cut
    blocks: dict[str, BlockForm] = field(default_factory=dict)  # what a folder's files have in FP8 or FP4 codes
    # one rank of several (plan_parallel.py): `config` is the rank's then
    whole: ModelConfig | None = None  # the model that is cut
    share: Callable[[Weight], Weight] | None = None  # what the rank has of a tensor of it
    shard: Shard | None = None  # which rank it is

    def model_bytes(self, dtype: str, device: str, **how: Any) -> int:
        """`planner.model_bytes` of it, or of the rank's part."""
        return model_bytes(self.whole or self.config, self.has, dtype, device, share=self.share, **how)

    def form_bytes(self, form: str, experts: bool = True) -> int:
        """`weight_forms.form_bytes` of it, or of the rank's part."""
        return form_bytes(self.whole or self.config, self.has, form, experts, self.share)


def find_source(model: str | None) -> Source:
    """The model of that name, folder or file; None: the embedded one. Never reaches for the network."""
    if model is None:
        return _from_config(EMBEDDED, KNOWN[EMBEDDED])
    path = shipped_model(model) or Path(model).expanduser()
    if path.is_dir() and (path / "config.json").exists():
        return _from_folder(path)
    if path.suffix == ".json" and path.is_file():
        return _from_config(path.resolve().parent.name, read_json(path))
    inside = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _from_gguf(path)
    if len(inside) == 1:
        return _from_gguf(inside[0])
    if path.exists():
        from hybridkv.models import open_checkpoint

        with open_checkpoint(path) as checkpoint:  # which says what is wrong with it
            return _from_config(path.stem, checkpoint.config)
    found = known_config(model)
    if found is None:
        raise ModelFileError(unknown_model(model))
    return _from_config(*found)


def _from_config(name: str, raw: dict[str, Any]) -> Source:
    config = ModelConfig.from_dict(raw)
    return Source(name, config, planned_tensors(config, raw))


def _from_folder(path: Path) -> Source:
    """A folder with a config.json, and with weights or without. What of them are codes the files say."""
    raw = read_json(path / "config.json")
    found = _from_config(path.resolve().name, raw)
    text = raw.get("text_config")
    coded = raw.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if not coded or not any(path.glob("*.safetensors")):
        return found
    from hybridkv.models import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        names = frozenset(checkpoint.names())  # which say how projections are stored
        return replace(found, has=names.__contains__, blocks=checkpoint.block_forms())


def _from_gguf(path: Path) -> Source:
    from hybridkv.checkpoint.gguf_file import GgufFile
    from hybridkv.checkpoint.gguf_map import map_gguf
    from hybridkv.checkpoint.gguf_planes import codes4_form, column_steps, packed_bytes
    from hybridkv.models.registry import LAYOUTS

    with GgufFile(path) as file:
        found = map_gguf(file, LAYOUTS.gguf)
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items()}
        packed = packed_bytes(found.recipes, kinds.__getitem__)
        cuts = column_steps(found.recipes, kinds.__getitem__)
        codes4 = frozenset(name for name, recipe in found.recipes.items() if codes4_form(recipe, kinds.__getitem__))
        layers: dict[str, int] = {}
        for name, tensor in file.tensors.items():
            if match := re.fullmatch(r"blk\.(\d+)\.ffn_(?!norm).*", name):
                layers[match[1]] = layers.get(match[1], 0) + tensor.nbytes
    names = frozenset(found.recipes)
    config = ModelConfig.from_dict(found.config)
    stored = file.tensors.values()
    narrow = sum(tensor.nbytes for tensor in stored) < 3 * sum(prod(tensor.shape) for tensor in stored)
    ffn_layer = max(layers.values(), default=None)
    return Source(path.stem, config, names.__contains__, packed, codes4, True, narrow, ffn_layer, cuts)
