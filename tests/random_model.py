"""A model of any known shape with random weights, made where it runs: for what needs real widths, not real weights."""

import torch
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.models import FAMILIES, cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.layers import Decoder
from hybridkv.models.loader import Loader
from hybridkv.planner import plan_cache


class RandomLoader(Loader):
    """Gives weights of the size that keeps activations near 1, from a seed."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.used: set[str] = set()
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return name in ("lm_head.weight",)

    def raw(self, name: str, *shape: int) -> Tensor:
        wide = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return wide * (shape[-1] ** -0.5) if len(shape) > 1 else wide * 0.1

    def fill(self, out: Tensor, name: str) -> None:
        out.copy_(self.raw(name, *out.shape))

    def vector(self, name: str, *shape: int, plus: float = 0.0) -> Tensor:
        return self.raw(name, *shape).float() + (plus or (1.0 if name.endswith("norm.weight") else 0.0))


def random_decoder(config: ModelConfig, device: str, dtype: torch.dtype) -> Decoder:
    return FAMILIES[config.architecture].load(config, RandomLoader(device, dtype))


def engine_for(
    model: Decoder, cache: CacheConfig, device: str, dtype: torch.dtype, pool: int, slots: int, context: int
) -> Engine:
    """An engine whose pools hold `pool` tokens in all."""
    schema = cache_schema(model.config, cache, dtype)
    plan = plan_cache(schema, 1, pool, None)
    manager = KVCacheManager(schema, plan.pages, slots, context, device)
    return Engine(model, manager, step_tokens=2048, evictor=Evictor.make(cache, manager, model.config.head_dim))
