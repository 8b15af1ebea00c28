"""Eviction: a policy scores the entries of a request, the best within the budget stay, and their pages close up."""

from hybridkv.eviction.evict import Evictor, max_held_tokens, most_held, query_buffers_for
from hybridkv.eviction.policies import POLICIES, Ada, Pyramid, SnapKV
from hybridkv.eviction.policy import LayerCache, Policy

rings_for = query_buffers_for  # its name before 0.2

__all__ = [
    "POLICIES",
    "Ada",
    "Evictor",
    "LayerCache",
    "Policy",
    "Pyramid",
    "SnapKV",
    "max_held_tokens",
    "most_held",
    "query_buffers_for",
    "rings_for",
]
