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
from hybridkv.engine.graphs import graph_sizes
from hybridkv.engine.sampler import sampling_bytes
from hybridkv.eviction.evict import SCORE_BYTES
from hybridkv.kernels.eviction.select import select_bytes
from hybridkv.models.config import ModelConfig

FEW_ROWS = 4  # rows up to which attention over short streams is launched in another way
STREAM_SCORE_BYTES = 12  # f32 as the policy gave it, again joined with the others, and the masks of the NaN check
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
    sizes = graph_sizes(rows) if captures else []
    kept = sum(sizes) + sum(size for size in sizes if size <= FEW_ROWS)  # few rows of FP8 keys have two graphs
    return Workspace(
        logits=(rows + kept) * config.vocab * dtype.itemsize,
        sampling=sampling_bytes(rows, config.vocab),
        eviction=_eviction(config, cache, context, captures),
        index=min(INDEX_SCORE_BYTES, 4 * limits.step_tokens * context) if schema.compressed else 0,
    )


def _eviction(config: ModelConfig, cache: CacheConfig, context: int, gpu: bool) -> int:
    """Scores of one request's streams, those of the query heads that are scored at once, and choosing among them.

    Of the largest request that may be asked for: a request brings its own settings, so it may be as long as the context
    and share a budget between the heads of a layer, which then compete in one row.
    """
    if cache.budget is None and not cache.query_buffers:
        return 0
    layers = len(config.attention_layers)
    streams = layers * config.kv_heads
    width = context if cache.budget is None else min(cache.budget, context)
    scores = STREAM_SCORE_BYTES * streams * context
    of_heads = min(SCORE_BYTES, 4 * config.heads * layers * context)
    by_stream = select_bytes(streams, context, width, gpu)
    by_layer = select_bytes(layers, config.kv_heads * context, config.kv_heads * width, gpu)
    return scores + of_heads + max(by_stream, by_layer)
