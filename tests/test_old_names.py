"""Public names that were renamed still work under their old names, one version long."""

import warnings

import pytest
import torch

from hybridkv import CacheConfig, cache, eviction
from hybridkv.cache import CacheSchema, KVCacheManager, StateSchema, StreamSchema, TensorSpec
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Policy


def test_rings_are_query_buffers() -> None:
    with pytest.warns(DeprecationWarning, match="query_buffers"):
        config = CacheConfig(budget=128, rings=3)
    assert config.query_buffers == 3 and config == CacheConfig(budget=128, query_buffers=3)
    assert eviction.rings_for is eviction.query_buffers_for
    entry = (TensorSpec("k", (4,), torch.float32),)
    queries = StateSchema("queries", (0,), (TensorSpec("queries", (64, 1, 4), torch.float32),), lent=True)
    schema = CacheSchema((StreamSchema("attention", (0,), entry, 4),), (queries,))
    manager = KVCacheManager(schema, {"attention": 8}, 2, 16, rings=1)
    assert manager.query_buffers.count == 1 and manager.rings is manager.query_buffers
    evictor = eviction.Evictor.make(CacheConfig(budget=128), manager, 16)  # a head dimension stood for the scale
    assert evictor is not None and evictor.scale == 0.25
    assert eviction.Evictor.reads is eviction.Evictor.needs_queries
    assert eviction.Evictor.cut is eviction.Evictor.after_step
    manager.admit_request("a")
    manager.admit_request("b")
    assert manager.take_ring("a") and not manager.take_ring("b")
    manager.drop_ring("a")
    assert manager.take_ring("b")


def test_steps_views_and_draining() -> None:
    assert cache.CompressedStep is cache.ForwardStep and cache.EntryView is cache.StreamView
    assert Engine.settle is Engine.drain


def test_a_policy_that_says_together_is_batchable() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Own(Policy):
            together = True

    assert Own.batchable and Own().batchable
