"""Runs over the tiny models, whose weights are loaded once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from eviction.harness import Run
from hybridkv.cache import KVCacheManager
from hybridkv.cache.reuse import Reuse
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.models import cache_schema


@pytest.fixture(scope="module", autouse=True)
def measured_once(weights_measured_once: None) -> None:
    """In every file of this folder."""


@pytest.fixture(scope="session")
def run_of(oracle: Callable, open_llm: Callable) -> Callable[..., Run]:
    """`run_of("llama", budget=64, window=16)`: an admitted request `"r"` in a cache of pages of 16 entries."""

    def build(kind: str, context: int = 512, slots: int = 3, pool: int | None = None, **config: Any) -> Run:
        config = {"kv_dtype": "f32", "page_size": 16, "window": 16, "recent": 8, **config}
        run = Run(open_llm(oracle(kind).folder).model, CacheConfig(**config), context, slots, pool)
        run.admit()
        return run

    return build


@pytest.fixture(scope="session")
def evicting(oracle: Callable, open_llm: Callable) -> Callable[..., Engine]:
    """`evicting("llama", budget=64)`: an engine in float32, pages of 16 entries, room for `pool` tokens."""

    def build(
        kind: str,
        pool: int = 2048,
        slots: int = 4,
        context: int = 512,
        step_tokens: int = 64,
        query_buffers: int | None = None,
        reuse: int | None = None,  # rows for checkpoints; None: nothing is kept for others
        **config: Any,
    ) -> Engine:
        settings = CacheConfig(**{"kv_dtype": "f32", "page_size": 16, "window": 16, "recent": 8, **config})
        if settings.budget is None:
            settings = replace(settings, query_buffers=query_buffers)
        model = open_llm(oracle(kind).folder).model
        schema = cache_schema(model.config, settings, torch.float32)
        manager = KVCacheManager(
            schema, schema.pool_pages(1, pool), slots, context, query_buffers=query_buffers, checkpoints=reuse
        )
        if reuse is not None:
            Reuse(manager)
        evictor = Evictor.make(settings, manager, scale=model.config.attention_scale)
        return Engine(model, manager, step_tokens=step_tokens, evictor=evictor)

    return build
