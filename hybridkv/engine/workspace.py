"""Workspace: device memory that steps take for a while beside weights and cache, at most. All of it is bounded.

    logits     of the rows that are sampled, and of every captured graph, which keeps its own
    sampling   temporaries of filters and noise, and the tokens seen, for penalties
    eviction   scores of one request's streams, and the temporaries of choosing among them
    index      scores of a prompt chunk's tokens over the index keys of DeepSeek-V4

Activations of a step come on top: they depend on the kernels that run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from hybridkv.cache import CacheSchema
from hybridkv.config import CacheConfig, EngineConfig
from hybridkv.engine.sampler import sampling_bytes
from hybridkv.eviction.evict import SCORE_BYTES, max_held_tokens
from hybridkv.kernels.eviction.select import select_bytes
from hybridkv.models.config import ModelConfig

INDEX_SCORE_BYTES = 4 << 26  # models/v4_attention.py holds this many bytes of index scores at once


@dataclass(frozen=True)
class Workspace:
    logits: int = 0
    sampling: int = 0
    eviction: int = 0
    index: int = 0

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def workspace(
    config: ModelConfig,
    schema: CacheSchema,
    cache: CacheConfig,
    limits: EngineConfig,
    context: int,  # tokens of the longest request
    dtype: torch.dtype,  # of the weights, and so of logits
    captures: bool,  # whether decode steps are captured as graphs
) -> Workspace:
    rows = limits.max_requests
    kept = 2 * rows - 1 if captures else 0  # graphs of 1, 2, 4, ... rows
    return Workspace(
        logits=(rows + kept) * config.vocab * dtype.itemsize,
        sampling=sampling_bytes(rows, config.vocab),
        eviction=_eviction(config, schema, cache, limits.step_tokens, context, captures),
        index=min(INDEX_SCORE_BYTES, 4 * limits.step_tokens * context) if schema.compressed else 0,
    )


def _eviction(
    config: ModelConfig, schema: CacheSchema, cache: CacheConfig, step_tokens: int, context: int, gpu: bool
) -> int:
    """Of one request: its scores, f32 for each stream, those of the query heads scored at once, and choosing."""
    if cache.eviction is None:
        return 0
    held = max_held_tokens(cache.eviction, step_tokens, cache.page_size)
    length = context if held is None else min(held, context)
    streams = sum(s.streams for s in schema.streams if s.tokens_per_entry == 1)
    scores = 4 * streams * length
    of_heads = min(SCORE_BYTES, 4 * config.heads * len(config.attention_layers) * length)
    return scores + of_heads + select_bytes(streams, length, min(cache.eviction.budget, length), gpu)
