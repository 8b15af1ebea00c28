"""The cache: what is stored (schema), where (pools, state), and who holds it (allocator, manager)."""

from hybridkv.cache.allocator import PageAllocator
from hybridkv.cache.compressed_handle import CompressedHandle
from hybridkv.cache.compressed_schema import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    CompressedSpec,
    compressed_schema,
    compute_block_budget,
)
from hybridkv.cache.handle import LayerHandle
from hybridkv.cache.manager import KVCacheManager
from hybridkv.cache.pools import PagedPool
from hybridkv.cache.schema import CacheSchema, CompressedLayer, StateSchema, StreamSchema, TensorSpec
from hybridkv.cache.session import Session
from hybridkv.cache.snapshot import Snapshot, restore_request, snapshot_request
from hybridkv.cache.state import StatePool
from hybridkv.cache.step import ForwardStep, StreamView
from hybridkv.errors import OutOfPages

CompressedStep, EntryView = ForwardStep, StreamView  # their names for DeepSeek-V4 before 0.2

__all__ = [
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "CacheSchema",
    "CompressedHandle",
    "CompressedLayer",
    "CompressedSpec",
    "CompressedStep",
    "EntryView",
    "ForwardStep",
    "KVCacheManager",
    "LayerHandle",
    "OutOfPages",
    "PageAllocator",
    "PagedPool",
    "Session",
    "Snapshot",
    "StatePool",
    "StateSchema",
    "StreamSchema",
    "StreamView",
    "TensorSpec",
    "compressed_schema",
    "compute_block_budget",
    "restore_request",
    "snapshot_request",
]
