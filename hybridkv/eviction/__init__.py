"""Eviction: a policy scores the entries of a request, the best within the budget stay, and their pages close up."""

from hybridkv.eviction.evict import Evictor, most_held, query_buffers_for
from hybridkv.eviction.policies import POLICIES, Ada, Pyramid, SnapKV
from hybridkv.eviction.policy import LayerCache, Policy

__all__ = ["POLICIES", "Ada", "Evictor", "LayerCache", "Policy", "Pyramid", "SnapKV", "most_held", "query_buffers_for"]
