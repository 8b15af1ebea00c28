"""hybridkv: a paged KV-cache engine, and the inference runtime around it, for hybrid-attention language models."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.3.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "Completion",
    "Conversation",
    "Document",
    "EvictionConfig",
    "HybridKVError",
    "Prefix",
    "ReuseConfig",
    "SamplingParams",
    "Stream",
    "StructuredOutputs",
]

if TYPE_CHECKING:
    from hybridkv.answers import Completion, Stream
    from hybridkv.async_llm import AsyncLLM
    from hybridkv.config import CacheConfig, EvictionConfig, ReuseConfig, SamplingParams, StructuredOutputs
    from hybridkv.conversation import Conversation
    from hybridkv.document import Document
    from hybridkv.errors import HybridKVError
    from hybridkv.llm import LLM
    from hybridkv.prefix import Prefix

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CacheConfig": "config",
    "Completion": "answers",
    "Conversation": "conversation",
    "Document": "document",
    "EvictionConfig": "config",
    "ReuseConfig": "config",
    "HybridKVError": "errors",
    "Prefix": "prefix",
    "SamplingParams": "config",
    "Stream": "answers",
    "StructuredOutputs": "config",
}

# OpenMP's threads that wait for each other sleep soon instead of spinning: on a busy machine an answer is several times
# faster, on a quiet one as fast (docs/facts.md). libgomp reads this once, when torch is imported.
if "torch" not in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ["GOMP_SPINCOUNT"] = "10000"


def __getattr__(name: str) -> object:
    """torch takes a second to import; `hybridkv --help` should not."""
    if name in _HOMES:
        return getattr(import_module(f"hybridkv.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hybridkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
