"""The list of families. A new model is one file and one line here (docs/add_a_model.md)."""

from __future__ import annotations

from collections.abc import Mapping

from hybridkv.checkpoint.checkpoint import Layouts
from hybridkv.checkpoint.config_reader import Raw, Reader
from hybridkv.errors import UnsupportedModel
from hybridkv.models import deepseek_v4, llama, qwen3, qwen3_5
from hybridkv.models.config import ModelConfig
from hybridkv.models.family import Family

ALL: tuple[Family, ...] = (
    llama.FAMILY,
    qwen3.FAMILY,
    qwen3_5.DENSE,
    qwen3_5.MOE,
    qwen3_5.NEXT,
    deepseek_v4.FAMILY,
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
