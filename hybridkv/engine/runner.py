"""Runner: a batch to tensors, and tensors through the model. Here alone token lists become device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hybridkv.cache import CompressedStep, ForwardStep, KVCacheManager
from hybridkv.cache.step import upload
from hybridkv.engine.graphs import DecodeGraphs, can_capture
from hybridkv.models.layers import Model


@dataclass(frozen=True)
class StepInputs:
    tokens: Tensor  # [T]
    positions: Tensor  # [T] absolute
    rows: Tensor  # [S] tokens whose logits are wanted
    step: ForwardStep


class Runner:
    def __init__(self, model: Model, manager: KVCacheManager) -> None:
        self.model, self.manager = model, manager
        self.graphs = DecodeGraphs(model, manager) if can_capture(manager) else None

    def inputs(
        self, tokens: Sequence[Sequence[int]], begins: Sequence[int], rows: Sequence[int], step: ForwardStep
    ) -> StepInputs:
        """Each request's tokens and first position, one request after the other; tokens of padding are 0."""
        spare = step.starts[-1] - sum(map(len, tokens))
        positions = [p for begin, part in zip(begins, tokens, strict=True) for p in range(begin, begin + len(part))]
        flat = [t for part in tokens for t in part]
        arrays = [np.array(x, np.int64) for x in (flat + [0] * spare, positions + [0] * spare, list(rows))]
        ids, at, wanted = upload(arrays, self.manager.device).split([len(x) for x in arrays])
        return StepInputs(ids, at, wanted, step)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits [S, vocab] f32. Pages and state of the step's requests are written."""
        step = inputs.step
        if self.graphs is not None and isinstance(step, CompressedStep) and self.graphs.ready(step):
            return self.graphs.replay(inputs.tokens, step)[inputs.rows]
        handles = self.manager.acquire(step)
        return self.model.forward(inputs.tokens, inputs.positions, handles, inputs.rows)
