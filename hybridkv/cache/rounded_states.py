"""Recurrent state of checkpoints in bf16: half the bytes of f32, so twice as many checkpoints in the same memory.

A state is rounded once, when it is kept. Whoever goes on from it computes in f32 again, and what they keep later is
rounded from that: nothing that was rounded is encoded a second time. The convolution's inputs, last queries and all
that is not the delta rule's sum stay as they are stored. Needs no torch.
"""

from __future__ import annotations

from dataclasses import replace

from hybridkv.cache.schema import CacheSchema, StateSchema
from hybridkv.config import ReuseConfig

RECURRENT = ("gdn", "recurrent")  # state and tensor: the only ones that are rounded
ROUNDED = {"bf16": "bfloat16"}  # ReuseConfig.checkpoint_dtype -> dtype; "auto" has none: as stored


def checkpoint_dtype_of(reuse: ReuseConfig | None) -> str:
    """What is asked for; where nothing is reused, what asks for nothing."""
    return ReuseConfig.checkpoint_dtype if reuse is None else reuse.checkpoint_dtype


def with_checkpoint_dtype(schema: CacheSchema, asked: str) -> CacheSchema:
    """The schema whose checkpoints are kept as `ReuseConfig.checkpoint_dtype` asks, where that is narrower."""
    if asked not in ROUNDED:
        return schema

    def state(s: StateSchema) -> StateSchema:
        tensors = (
            replace(t, checkpoint_dtype=ROUNDED[asked]) if (s.name, t.name) == RECURRENT and t.dtype == "float32" else t
            for t in s.tensors
        )
        return replace(s, tensors=tuple(tensors))

    return replace(schema, states=tuple(map(state, schema.states)))


def why_not_rounded(schema: CacheSchema, asked: str) -> str | None:
    """A sentence, if a dtype of checkpoints was asked for and changes nothing; `schema`: `with_checkpoint_dtype`."""
    if asked not in ROUNDED or any(t.checkpoint_dtype for s in schema.states for t in s.tensors):
        return None
    there = any((s.name, t.name) == RECURRENT for s in schema.states for t in s.tensors)
    why = "its recurrent state is stored in bf16 already" if there else "the model has no Gated DeltaNet state"
    return f"checkpoint_dtype='{asked}' changes nothing: {why}"
