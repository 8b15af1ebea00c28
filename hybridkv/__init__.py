"""hybridkv: a paged KV-cache engine, and the inference runtime around it, for hybrid-attention language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = ["LLM", "CacheConfig", "EvictionConfig", "SamplingParams"]

if TYPE_CHECKING:
    from hybridkv.config import CacheConfig, EvictionConfig, SamplingParams
    from hybridkv.llm import LLM


def __getattr__(name: str) -> object:
    """torch takes a second to import; `hybridkv --help` should not."""
    if name == "LLM":
        from hybridkv.llm import LLM

        return LLM
    if name in ("CacheConfig", "EvictionConfig", "SamplingParams"):
        from hybridkv import config

        return getattr(config, name)
    raise AttributeError(f"module 'hybridkv' has no attribute {name!r}")
