"""The list of families. A new model is two files and one line here (docs/add_a_model.md)."""

from __future__ import annotations

from collections.abc import Mapping

from hybridkv.checkpoint.config_reader import Raw, Reader
from hybridkv.checkpoint.layouts import Layouts
from hybridkv.errors import UnsupportedModel
from hybridkv.models import deepseek_family, llama_family, qwen3_5_family, qwen3_family
from hybridkv.models.config import ModelConfig
from hybridkv.models.family import Family

ALL: tuple[Family, ...] = (
    llama_family.FAMILY,
    qwen3_family.FAMILY,
    qwen3_5_family.DENSE,
    qwen3_5_family.MOE,
    qwen3_5_family.NEXT,
    deepseek_family.FAMILY,
)

FAMILIES = {family.name: family for family in ALL}
BY_MODEL_TYPE = {model_type: family for family in ALL for model_type in family.model_types}
LAYOUTS = Layouts(
    gguf={arch.name: arch for family in ALL for arch in family.gguf},
    folders={t: family.folder for family in ALL if family.folder is not None for t in family.model_types},
)


def family_of(config: ModelConfig) -> Family:
    """The config's family."""
    return FAMILIES[config.architecture]


def parse_config(raw: Raw) -> ModelConfig:
    """The config of a checkpoint's text model, or ModelFileError."""
    model_type = raw.get("model_type")
    family = BY_MODEL_TYPE.get(str(model_type))
    if family is None:
        raise UnsupportedModel(
            f"model type {str(model_type)[:80]!r} is not supported; supported are {', '.join(sorted(BY_MODEL_TYPE))}"
        )
    nested = raw.get("text_config")
    if isinstance(nested, Mapping):
        tied = nested.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))
        raw = {**nested, "tie_word_embeddings": tied}
    return family.parse(Reader(raw))
