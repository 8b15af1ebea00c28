"""The cache: what is stored (schema), where (pools, state), and who holds it (allocator, manager)."""

from hybridkv.cache.allocator import PageAllocator
from hybridkv.cache.handle import ForwardStep, LayerHandle, StreamView
from hybridkv.cache.manager import KVCacheManager
from hybridkv.cache.pools import PagedPool
from hybridkv.cache.schema import CacheSchema, StateSchema, StreamSchema, TensorSpec
from hybridkv.cache.state import StatePool
from hybridkv.errors import OutOfPages

__all__ = [
    "CacheSchema",
    "ForwardStep",
    "KVCacheManager",
    "LayerHandle",
    "OutOfPages",
    "PageAllocator",
    "PagedPool",
    "StatePool",
    "StateSchema",
    "StreamSchema",
    "StreamView",
    "TensorSpec",
]
