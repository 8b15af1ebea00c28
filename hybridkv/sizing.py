"""Sizes of a cache, decided before any weight is read: what weights and a step's workspace leave of the memory.

The arithmetic is planner.py's, which knows no device; here it gets what this machine has and an LLM was asked for.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from hybridkv.cache import CacheSchema
from hybridkv.cache.rounded_states import checkpoint_dtype_of, why_not_rounded, with_checkpoint_dtype
from hybridkv.cache.schema import check_column
from hybridkv.cache.tier_sizes import staging_bytes
from hybridkv.cards import HEADROOM
from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.config import ReuseConfig
from hybridkv.devices import free_memory
from hybridkv.engine.workspace import workspace
from hybridkv.errors import HybridKVError
from hybridkv.eviction import most_held, query_buffers_for
from hybridkv.kernels.linear.fp8 import keeps_codes
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.planner import CachePlan, fewer_checkpoints, human, model_bytes, plan_cache
from hybridkv.settings import REUSE, Settings
from hybridkv.weight_choice import WeightChoice


def size_cache(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, choice: WeightChoice, settings: Settings
) -> tuple[CachePlan, ReuseConfig | None]:
    """(sizes, what is reused: None where its columns are impossible), or HybridKVError where there is no room.

    `config`: of this rank's part, where there are several.
    """
    limits, ranks = settings.limits, settings.ranks
    asked = checkpoint_dtype_of(settings.reuse)
    schema = with_checkpoint_dtype(cache_schema(config, settings.cache, dtype), asked)
    memory, weights = _memory_and_weights(checkpoint, config, dtype, choice, settings)
    context = limits.max_context or config.max_positions
    if context > config.max_positions:
        raise HybridKVError(f"max_context {context} exceeds the model's own limit of {config.max_positions} tokens")
    held = most_held(settings.cache, limits.step_tokens, 1 if ranks is None else ranks.parts)
    query_buffers = query_buffers_for(settings.cache, limits.step_tokens, limits.max_requests)
    captures = settings.device.type == "cuda"
    codes = captures and choice.released
    beside = workspace(config, schema, settings.cache, limits, context, dtype, captures, codes)
    room_beside = beside.nbytes if ranks is None else ranks.largest(beside.nbytes)
    reuse = _possible(settings.reuse, schema)
    note = why_not_rounded(schema, asked)
    if note is not None and (ranks is None or ranks.group.rank == 0):
        print(f"hybridkv: {note}", file=sys.stderr)
    rows = 0 if reuse is None else reuse.rows(schema.checkpoint_bytes, memory, settings.device.type == "cpu")
    least = 0 if reuse is None or reuse.checkpoints == "auto" else rows

    def plan(rows: int, room: int | None = memory - weights) -> CachePlan:
        return plan_cache(
            schema,
            limits.max_requests,
            context,
            room,
            shrink_context=limits.max_context is None,
            held=held,
            query_buffers=query_buffers,
            workspace=room_beside,
            checkpoints=rows,
            staging=staging_bytes(captures, limits.host_bytes),
        )

    found: CachePlan | None = None  # the one with most checkpoints, of those that are less than what is asked for
    for fewer in fewer_checkpoints(rows, least):
        try:
            made = plan(fewer)
        except HybridKVError:
            if fewer == least and found is None:
                raise
            continue
        if made == plan(fewer, None):
            return made, reuse
        found = found or made
    assert found is not None
    return found, reuse


def _memory_and_weights(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, choice: WeightChoice, settings: Settings
) -> tuple[int, int]:
    """Bytes that there are for all, and those that weights take of them; HybridKVError if these leave nothing."""
    limits, ranks, exact = settings.limits, settings.ranks, settings.exact
    has, device = checkpoint.__contains__, settings.device.type
    fp8 = choice.fp8 and not exact and keeps_codes(settings.device, dtype)
    plain = packed = model_bytes(config, has, dtype, device, fp8, half=choice.half, int4=choice.int4)
    if choice.released:
        plain = packed = model_bytes(config, has, dtype, device, blocks=checkpoint.block_forms())
    if choice.could_pack:
        packed = model_bytes(config, has, dtype, device, packed=checkpoint.packed_bytes())
    weights = packed if choice.packed else plain
    if ranks is not None:
        weights = ranks.weight_bytes(checkpoint, dtype, fp8, choice.packed, choice.half)
    memory = limits.memory_bytes or int(free_memory(settings.device) * HEADROOM)
    if ranks is not None:
        memory, weights = ranks.agree(memory, weights, shared=limits.memory_bytes is None)
    if weights < memory:
        return memory, weights
    given = "the limit" if limits.memory_bytes else "free memory"
    form = "fp8" if fp8 else "f16" if choice.half else str(dtype).removeprefix("torch.")
    form = "their released form" if choice.released else form
    form += " and 4 bits" if choice.int4 else ""
    form = "packed" if weights < plain else f"in {form}"
    less = "dtype='bfloat16', " if dtype == torch.float32 and not choice.half else ""
    less = "weight_dtype='released', " if not (choice.released or exact) and checkpoint.block_forms() else less
    less = "weight_dtype='auto', " if packed < weights else less
    raise HybridKVError(
        f"the weights take {human(weights)} {form}, {given} is {human(memory)}; use {less}a smaller model or "
        "more memory"
    )


def _possible(reuse: ReuseConfig | None, schema: CacheSchema) -> ReuseConfig | None:
    """What is reused; None where columns are impossible, and nothing of it was asked for."""
    if reuse is None:
        return None
    try:
        check_column(schema)
    except HybridKVError as problem:
        if replace(reuse, warm=REUSE.warm, warm_least=REUSE.warm_least) != REUSE:
            raise
        print(f"hybridkv: nothing is reused: {problem}", file=sys.stderr)
        return None
    return reuse
