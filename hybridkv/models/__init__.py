"""Models: a config, a declaration of what is cached, and a forward pass, for each architecture."""

from __future__ import annotations

from types import ModuleType

import torch

from hybridkv.cache import CacheSchema
from hybridkv.models import llama, qwen3_5
from hybridkv.models.config import ModelConfig
from hybridkv.models.layers import Decoder
from hybridkv.models.loader import Loader, Progress
from hybridkv.models.weights import Checkpoint

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_next": qwen3_5,
}


def cache_schema(config: ModelConfig, kv_dtype: torch.dtype, page_size: int) -> CacheSchema:
    return FAMILIES[config.architecture].cache_schema(config, kv_dtype, page_size)


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Decoder:
    loader = Loader(checkpoint, device, dtype, progress)
    model: Decoder = FAMILIES[config.architecture].load(config, loader)
    loader.finish()
    return model
