"""Workspace: device memory that steps take for a while beside weights and cache, at most. All of it is bounded.

    logits     of the rows that are sampled, and of every captured graph, which keeps its own
    sampling   temporaries of sampling and of logprobs; tokens seen, for penalties; biases
    eviction   scores of one request's streams, and the temporaries of choosing among them
    index      scores of a prompt chunk's tokens over the index keys of DeepSeek-V4

Activations of a step come on top: they depend on the kernels that run. Those of captured steps with prompts stay
allocated, `captured_bytes`, GRAPH_BYTES at the most, in memory that all of their graphs share. Both lie in what a plan
leaves in reserve. The cache in which is measured which streams copy (copying.py) is there between steps, when there are
none.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from hybridkv.cache.schema import CacheSchema
from hybridkv.config import CacheConfig, EngineConfig
from hybridkv.dtypes import itemsize
from hybridkv.eviction.sizes import SCORE_BYTES
from hybridkv.kernels.eviction.select_sizes import select_bytes
from hybridkv.kernels.linear.block_form import WRITTEN
from hybridkv.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

FEW_ROWS = 4  # rows up to which attention over short streams is launched in another way
STREAM_SCORE_BYTES = 12  # f32 as the policy gave it, again joined with the others, and the masks of the NaN check
PEAK_SCORES = 6  # f32 of each stream that `peak` holds while it scores some layers: peaks, differences, places, norms
INDEX_SCORE_BYTES = 4 << 26  # models/v4_attention.py holds this many bytes of index scores at once

GRAPH_BYTES = 1 << 30  # that captured steps with prompt chunks keep, at the most
BESIDE = 2  # times what a step holds at once: blocks of several sizes lie beside each other (H200: 574 MiB for 299)
AT_ONCE = 1 << 15  # tokens, and keys, that the ops of a captured step take at once (kernels/gdn and attention: PIECE)
PART, KEYS = 64, 64  # tokens that the delta rule takes at once; keys of a dequantised tile
MOST_CHUNKS = 32  # prompts in a captured step
CHUNK_TOKENS = 32  # tokens of a step for each prompt that it has room for, but no fewer than MIN_CHUNKS
MIN_CHUNKS = 4

BLOCK_BYTES = 256 << 20  # temporaries of one block of rows
# Bytes that a row needs for each of its logits: a copy in f32 for logprobs, or for a hook and what that makes of it. On
# a CPU rows are sampled one after the other, in the memory that rows of a prompt have.
LOGIT_BYTES = 8
ROW_BYTES = 64 << 10  # that a sampled row needs whatever its width: its list of candidates, and what its pieces found
PROMPT_ROWS = 8  # of a prompt that are scored at once, at least
PROMPT_LOGIT_BYTES = 24  # that such a row needs for each of its logits, these included


def graph_sizes(slots: int) -> list[int]:
    """Rows of the graphs for up to `slots` requests: powers of two, and one that holds all."""
    powers = [1 << i for i in range(slots.bit_length())]
    return powers if powers[-1] == slots else [*powers, slots]


def mixed_sizes(config: ModelConfig, step_tokens: int, itemsize: int = 2, dequantises: bool = False) -> list[int]:
    """Tokens of the graphs for steps with prompt chunks: a step is padded to the next of these sizes.

    Multiples of 64, then four sizes from a power of two to the next. None where such steps are not captured.

    Args:
        config: of the model.
        step_tokens: of the largest step.
        itemsize: bytes of a number that a step computes with.
        dequantises: whether keys of prompts are dequantised before they are read.
    """
    if config.v4 is not None:
        return []
    most = min(step_tokens, AT_ONCE)
    sizes = [64, 128, 192]
    while sizes[-1] < most:
        power = 1 << sizes[-1].bit_length()
        sizes += [power + i * (power // 4) for i in range(4)]
    fits = (size for size in sizes if BESIDE * graph_bytes(config, size, itemsize, dequantises) <= GRAPH_BYTES)
    return [size for size in fits if size <= most]


def chunk_rows(tokens: int) -> int:
    """Prompts for which a captured step of so many tokens has room, that of padding included."""
    return min(MOST_CHUNKS, max(MIN_CHUNKS, tokens // CHUNK_TOKENS)) + 1


def graph_bytes(config: ModelConfig, tokens: int, itemsize: int = 2, dequantises: bool = False) -> int:
    """Bytes that a captured step of so many tokens holds at once, about: the widest of its parts."""
    c, gdn, moe = config, config.gdn, config.moe
    feed = 3 * c.intermediate
    if moe is not None:
        feed = max(feed, moe.per_token * (2 * moe.intermediate + c.hidden) + 3 * moe.shared_intermediate)
    mixer = 2 * (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    most = tokens * itemsize * (4 * c.hidden + max(feed, mixer))
    chunks = chunk_rows(tokens)
    if gdn is not None:
        values = gdn.value_heads * gdn.value_dim
        rows = tokens + PART * chunks  # of parts, of which every prompt may have one that is not full
        each = gdn.channels + 2 * PART * gdn.value_heads
        mixed = tokens * itemsize * (4 * c.hidden + gdn.channels + 2 * values)
        most = max(most, mixed + rows * (itemsize * each + 8 * gdn.value_heads))
    tiles = 2 * c.kv_heads * (AT_ONCE + KEYS * chunks) * c.head_dim * 2 if dequantises else 0
    return most + tiles


def captured_bytes(config: ModelConfig, schema: CacheSchema, step_tokens: int, itemsize: int) -> int:
    """Bytes that captured steps with prompts keep, at the most."""
    plain = all(
        s.entries_per_page % KEYS == 0 and all(t.dtype == "bfloat16" for t in s.tensors) for s in schema.streams
    )
    sizes = mixed_sizes(config, step_tokens, itemsize, not plain)
    return max((BESIDE * graph_bytes(config, size, itemsize, not plain) for size in sizes), default=0)


def sampling_bytes(rows: int, vocab: int) -> int:
    """The most memory that sampling takes besides the logits: temporaries, and what is kept for every row."""
    state = 8 * vocab + 4 * ((vocab + 31) // 32)  # how often each token came, biases, and a bit for those seen
    return _temporary_bytes(rows, vocab) + rows * (ROW_BYTES + state)


def _temporary_bytes(rows: int, vocab: int) -> int:
    return vocab * max(min(rows, block_rows(vocab)) * LOGIT_BYTES, PROMPT_ROWS * PROMPT_LOGIT_BYTES)


def prompt_rows_at_once(rows: int, vocab: int) -> int:
    """Rows of a prompt's logits that may be scored at once, in the memory that sampling `rows` requests has."""
    return _temporary_bytes(rows, vocab) // (vocab * PROMPT_LOGIT_BYTES)


def block_rows(vocab: int) -> int:
    """Rows of logits whose logprobs are computed at once."""
    return max(1, BLOCK_BYTES // (vocab * LOGIT_BYTES))


@dataclass(frozen=True)
class Workspace:
    logits: int = 0
    sampling: int = 0
    eviction: int = 0
    index: int = 0
    written: int = 0  # a part of a matrix in codes, for many rows

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def workspace(
    config: ModelConfig,
    schema: CacheSchema,
    cache: CacheConfig,
    limits: EngineConfig,
    context: int,  # tokens of the longest request
    dtype: str | torch.dtype,  # of the weights, and so of logits
    captures: bool,  # whether steps are captured as graphs
    codes: bool = False,  # whether matrices are codes with a scale for each block, on a GPU
) -> Workspace:
    rows = limits.max_requests
    sizes = graph_sizes(rows) if captures else []
    kept = sum(sizes) + sum(size for size in sizes if size <= FEW_ROWS)  # few rows of FP8 keys have two graphs
    return Workspace(
        logits=(rows + kept) * config.vocab * itemsize(dtype),
        sampling=sampling_bytes(rows, config.vocab),
        eviction=_eviction(config, cache, context, captures),
        index=min(INDEX_SCORE_BYTES, 4 * limits.step_tokens * context) if schema.compressed else 0,
        written=2 * WRITTEN * itemsize(dtype) if codes else 0,  # one in captured steps, one in others
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
    of_heads = max(of_heads, of_heads * PEAK_SCORES * config.kv_heads // config.heads)
    by_stream = select_bytes(streams, context, width, gpu)
    by_layer = select_bytes(layers, config.kv_heads * context, config.kv_heads * width, gpu)
    return scores + of_heads + max(by_stream, by_layer)
