"""Eviction: a policy scores the entries of a request, the best within the budget stay, and their pages close up."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridkv.eviction.evict import Evictor
    from hybridkv.eviction.named import POLICIES, find_policy
    from hybridkv.eviction.policies import Peak, SnapKV
    from hybridkv.eviction.policy import LayerCache, Policy
    from hybridkv.eviction.sizes import max_held_tokens, most_held, query_buffers_for
    from hybridkv.eviction.sizes import query_buffers_for as rings_for
    from hybridkv.eviction.spread import Ada, All, Pyramid

_HOME = {
    "hybridkv.eviction.evict": ("Evictor",),
    "hybridkv.eviction.named": ("POLICIES", "find_policy"),
    "hybridkv.eviction.policies": ("Peak", "SnapKV"),
    "hybridkv.eviction.spread": ("Ada", "All", "Pyramid"),
    "hybridkv.eviction.policy": ("LayerCache", "Policy"),
    "hybridkv.eviction.sizes": ("max_held_tokens", "most_held", "query_buffers_for"),
}

_RENAMED = {"rings_for": "query_buffers_for"}  # before 0.2

__all__ = [
    "POLICIES",
    "Ada",
    "All",
    "Evictor",
    "LayerCache",
    "Peak",
    "Policy",
    "Pyramid",
    "SnapKV",
    "find_policy",
    "max_held_tokens",
    "most_held",
    "query_buffers_for",
    "rings_for",
]


def __getattr__(name: str) -> object:
    """A name is imported when it is first asked for: `sizes`, which counts bytes, needs no torch."""
    name = _RENAMED.get(name, name)
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
