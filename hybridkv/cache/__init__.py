"""The cache: what is stored (schema), where (pools, state), and who holds it (allocator, manager)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hybridkv.cache.compressed_schema import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    CompressedSpec,
    compressed_schema,
    compute_block_budget,
)
from hybridkv.cache.schema import CacheSchema, CompressedLayer, StateSchema, StreamSchema, TensorSpec
from hybridkv.errors import OutOfPages

if TYPE_CHECKING:
    from hybridkv.cache.allocator import PageAllocator
    from hybridkv.cache.compressed_handle import CompressedHandle
    from hybridkv.cache.handle import LayerHandle
    from hybridkv.cache.manager import KVCacheManager
    from hybridkv.cache.pools import PagedPool
    from hybridkv.cache.session import Session
    from hybridkv.cache.snapshot import Snapshot, restore_request, snapshot_request
    from hybridkv.cache.state import StatePool
    from hybridkv.cache.step import ForwardStep, StreamView
    from hybridkv.cache.step import ForwardStep as CompressedStep
    from hybridkv.cache.step import StreamView as EntryView

_HOME = {
    "hybridkv.cache.allocator": ("PageAllocator",),
    "hybridkv.cache.compressed_handle": ("CompressedHandle",),
    "hybridkv.cache.handle": ("LayerHandle",),
    "hybridkv.cache.manager": ("KVCacheManager",),
    "hybridkv.cache.pools": ("PagedPool",),
    "hybridkv.cache.session": ("Session",),
    "hybridkv.cache.snapshot": ("Snapshot", "restore_request", "snapshot_request"),
    "hybridkv.cache.state": ("StatePool",),
    "hybridkv.cache.step": ("ForwardStep", "StreamView"),
}

_RENAMED = {"CompressedStep": "ForwardStep", "EntryView": "StreamView"}  # for DeepSeek-V4 before 0.2

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


def __getattr__(name: str) -> object:
    """What computes is imported when it is first asked for: the schemas, which count bytes, need no torch."""
    name = _RENAMED.get(name, name)
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
