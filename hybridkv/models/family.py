"""Family: all that the engine, the planner and the command line need to know about one kind of model.

A family is declared in a file that needs no torch, so that a plan needs none (`llama_family.py`), and listed in
`registry.py`. Its forward pass is a module of its own (`llama.py`). docs/add_a_model.md goes through one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from hybridkv.cache.schema import CacheSchema
from hybridkv.checkpoint.config_reader import Reader
from hybridkv.checkpoint.gguf_architecture import GgufArchitecture
from hybridkv.checkpoint.layouts import FolderLayout
from hybridkv.config import CacheConfig
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.models.config import ModelConfig
from hybridkv.models.inventory import Has, Weight

if TYPE_CHECKING:
    import torch

    from hybridkv.checkpoint.loader import Loader
    from hybridkv.models.decoder import Model

OPTIONS = ("exact", "fp8", "budget", "state_dtype", "index_dtype")  # what a family may refuse
# what a model of plain attention layers refuses
NO_STATE = "state_dtype is for recurrent state, which {name} does not have"
NO_INDEX = "index_dtype is for deepseek_v4: {name} has no index keys"


def _plain_refusals() -> dict[str, str]:
    return {"state_dtype": NO_STATE, "index_dtype": NO_INDEX}


@dataclass(frozen=True)
class Family:
    """A family of models: how its configs are read, what it stores, how it is loaded, what it refuses."""

    name: str  # ModelConfig.architecture
    model_types: tuple[str, ...]  # of a config.json; a vision-language checkpoint runs as its text model
    parse: Callable[[Reader], ModelConfig]
    # the dtype, or its name, is the activations'
    cache_schema: Callable[[ModelConfig, CacheConfig, str | torch.dtype], CacheSchema]
    weights: Callable[[ModelConfig, Has], Iterator[Weight]]  # every tensor that is loaded
    module: str  # where `load(config, loader)` builds the model
    # whether a checkpoint, which answers if it has a tensor, is one of this config; ModelFileError if not
    check_weights: Callable[[ModelConfig, Has], None] = lambda config, has: None
    gguf: tuple[GgufArchitecture, ...] = ()  # how its GGUF files are read
    folder: FolderLayout | None = None  # how its safetensors folders are read; None: as Hugging Face writes them
    # how released checkpoints store a tensor as codes with a scale for each block; None: they store values
    released: Callable[[Weight], BlockForm | None] = lambda weight: None
    refuses: Mapping[str, str] = field(default_factory=_plain_refusals)  # option -> what to say to who asks for it

    def __post_init__(self) -> None:
        unknown = set(self.refuses) - set(OPTIONS)
        if unknown:
            raise ValueError(f"family {self.name} refuses {sorted(unknown)}; options are {OPTIONS}")

    def load(self, config: ModelConfig, loader: Loader) -> Model:
        """The model, its weights taken from the loader."""
        return import_module(self.module).load(config, loader)

    def supports(self, option: str) -> bool:
        """Whether the family has an option: exact, fp8, budget, state_dtype or index_dtype."""
        return option not in self.refuses

    def check(self, option: str, asked: bool) -> None:
        """HybridKVError if an option is asked for that the family does not have."""
        if asked and not self.supports(option):
            raise HybridKVError(self.refuses[option].format(name=self.name))
