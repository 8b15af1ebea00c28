"""Models: a config, a declaration of what is cached, and a forward pass, for each architecture."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch

from hybridkv.cache import CacheSchema, StateSchema, TensorSpec
from hybridkv.config import KV_DTYPES, CacheConfig
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


def cache_schema(config: ModelConfig, cache: CacheConfig, model_dtype: torch.dtype) -> CacheSchema:
    """What a model stores for a request, in the precision asked for."""
    kv_dtype = model_dtype if cache.kv_dtype == "auto" else getattr(torch, KV_DTYPES[cache.kv_dtype])
    schema: CacheSchema = FAMILIES[config.architecture].cache_schema(config, kv_dtype, cache.page_size)
    if cache.budget is None or not config.attention_layers:
        return schema
    # who evicts needs the last queries of every attention layer
    ring = TensorSpec("queries", (cache.window, config.heads, config.head_dim), model_dtype)
    return replace(schema, states=(*schema.states, StateSchema("queries", config.attention_layers, (ring,))))


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    exact: bool = False,
) -> Decoder:
    loader = Loader(checkpoint, device, dtype, progress, exact)
    model: Decoder = FAMILIES[config.architecture].load(config, loader)
    loader.finish()
    return model
