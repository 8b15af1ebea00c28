"""The counted floor of a set of requests: the shortest time in which this machine could serve them.

The schedule is an ideal one: all prompts at the matmul rate, then decode steps of all requests that are still there.
A step reads every weight once, the entries that its requests hold, and reads and writes their recurrent state, at the
copy rate, or multiplies at the matmul rate, whichever takes longer (decode.py). Sampling and activations are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.bench.decode import StepWork
from hybridkv.bench.load_workload import Asked
from hybridkv.bench.prefill import prefill_flops
from hybridkv.bench.timing import Ceilings
from hybridkv.cache import CacheSchema
from hybridkv.models.decoder import Model


@dataclass(frozen=True)
class Floor:
    prompts_s: float
    decode_s: float
    steps: int  # of decoding

    @property
    def seconds(self) -> float:
        return self.prompts_s + self.decode_s


def counted_floor(
    model: Model, schema: CacheSchema, ceilings: Ceilings, asked: Sequence[Asked], budget: int | None = None
) -> Floor:
    """`budget`: tokens of a prompt that stay once it has been read."""
    flops = sum(prefill_flops(model.config, len(a.prompt)) for a in asked)
    work, streams = StepWork.of(model, schema), sum(s.streams for s in schema.streams)
    held = np.array([len(a.prompt) if budget is None else min(len(a.prompt), budget) for a in asked])
    answers = np.array([a.answer for a in asked])
    steps = int(answers.max()) - 1  # the first token comes with the prompt
    decode_us = 0.0
    for k in range(1, steps + 1):  # the step that reads token k of each answer
        there = answers > k
        entries = float((held[there] + k).sum()) * streams
        decode_us += work.floor_us(ceilings, int(there.sum()), entries)
    return Floor(ceilings.floor_us(0, flops) / 1e6, decode_us / 1e6, steps)
