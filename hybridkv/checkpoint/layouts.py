"""Layouts: what is special about the files of a model family, which the reader of checkpoints is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridkv.checkpoint.gguf_architecture import GgufArchitecture

if TYPE_CHECKING:
    from hybridkv.checkpoint.safetensors_file import SafetensorsFile
    from hybridkv.checkpoint.safetensors_store import SafetensorsStore


@dataclass(frozen=True)
class FolderLayout:
    """How a family's safetensors folders differ from Hugging Face's own."""

    rename: Callable[[str], str]  # stored name -> canonical name
    # the files and the config's quantization_config -> the tensors
    open_store: Callable[[list[SafetensorsFile], object], SafetensorsStore]


@dataclass(frozen=True)
class Layouts:
    """What is known about the files of all model families."""

    gguf: Mapping[str, GgufArchitecture] = field(default_factory=dict)  # by general.architecture
    folders: Mapping[str, FolderLayout] = field(default_factory=dict)  # by model_type; others are Hugging Face's own
