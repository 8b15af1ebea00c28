"""An engine around a model with random weights (hybridkv/models/random_weights.py), sized by tokens."""

import torch

from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.models import cache_schema
from hybridkv.models.decoder import Decoder
from hybridkv.models.random_weights import RandomLoader, random_decoder
from hybridkv.planner import plan_cache

__all__ = ["RandomLoader", "engine_for", "random_decoder"]


def engine_for(
    model: Decoder, cache: CacheConfig, device: str, dtype: torch.dtype, pool: int, slots: int, context: int
) -> Engine:
    """An engine whose pools hold `pool` tokens in all."""
    schema = cache_schema(model.config, cache, dtype)
    plan = plan_cache(schema, 1, pool, None)
    manager = KVCacheManager(schema, plan.pages, slots, context, device)
    return Engine(
        model, manager, step_tokens=2048, evictor=Evictor.make(cache, manager, scale=model.config.attention_scale)
    )
