"""Models: for each family a config, a declaration of what is cached, and a forward pass."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridkv.cache.schema import CacheSchema
from hybridkv.config import CacheConfig, ReuseConfig
from hybridkv.errors import HybridKVError
from hybridkv.models.config import ModelConfig
from hybridkv.models.family import Family
from hybridkv.models.registry import FAMILIES, LAYOUTS, family_of

if TYPE_CHECKING:
    import torch

    from hybridkv.checkpoint.checkpoint import Checkpoint
    from hybridkv.checkpoint.in_memory import InMemory
    from hybridkv.checkpoint.loader import Progress
    from hybridkv.models.decoder import Model

__all__ = [
    "FAMILIES",
    "Family",
    "cache_schema",
    "check_exact",
    "check_fp8",
    "family_of",
    "load_model",
    "open_checkpoint",
    "with_query_buffer",
]


def open_checkpoint(model: str | Path) -> Checkpoint:
    """A model's files, opened and checked: a safetensors folder, a .gguf file, or a folder with one .gguf file."""
    from hybridkv.checkpoint import checkpoint as files  # reads tensors, and so needs torch

    return files.open_checkpoint(model, LAYOUTS)


def cache_schema(config: ModelConfig, cache: CacheConfig, model_dtype: str | torch.dtype) -> CacheSchema:
    """What a model stores for a request, in the precision asked for."""
    family = family_of(config)
    family.check("state_dtype", cache.state_dtype != "f32")
    family.check("budget", cache.budget is not None or cache.keep_turns is not None)
    family.check("index_dtype", cache.index_dtype != "auto")
    return family.cache_schema(config, cache, model_dtype)


def with_query_buffer(config: ModelConfig, cache: CacheConfig) -> CacheConfig:
    """How a model is opened: without a budget one query buffer, so that a request may bring a budget of its own."""
    evicts = family_of(config).supports("budget") and bool(config.attention_layers)
    return replace(cache, query_buffers=1) if evicts and cache.budget is cache.query_buffers is None else cache


def check_exact(
    config: ModelConfig, exact: bool, state_dtype: str = "f32", checkpoint_dtype: str = ReuseConfig.checkpoint_dtype
) -> None:
    """Whether the model has the mode that was asked for, or HybridKVError."""
    if exact and state_dtype != "f32":
        raise HybridKVError("exact mode keeps recurrent state in f32: leave out state_dtype='bf16', or exact")
    if exact and checkpoint_dtype != ReuseConfig.checkpoint_dtype:
        raise HybridKVError(
            "exact mode resumes prompts from states as they were, and a checkpoint in "
            f"{checkpoint_dtype} is rounded: leave out checkpoint_dtype='{checkpoint_dtype}', or exact"
        )
    family_of(config).check("exact", exact)


def check_fp8(config: ModelConfig, fp8: bool) -> None:
    """Whether the model takes its matrices in FP8, or HybridKVError."""
    family_of(config).check("fp8", fp8)


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint | InMemory,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    exact: bool = False,
    fp8: bool = False,
    packed: bool = False,  # keep what a GGUF file has packed
    half: bool = False,  # matrices in f16 on a CPU
    int4: Container[str] = (),  # and these in 4 bits beside that
    released: bool = False,  # keep the codes and scales of a folder
) -> Model:
    """Read all weights, in `dtype` onto `device`, and put the model together."""
    from hybridkv.checkpoint.loader import Loader

    check_exact(config, exact)
    check_fp8(config, fp8)
    family = family_of(config)
    family.check_weights(config, checkpoint.__contains__)
    loader = Loader(checkpoint, device, dtype, progress, exact, fp8, packed, half, int4, released)
    model = family.load(config, loader)
    loader.finish()
    return model
