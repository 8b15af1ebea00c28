"""Runner: a batch to tensors, and tensors through the model. Here alone token lists become device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.cache import ForwardStep, KVCacheManager
from hybridkv.models.layers import Decoder


@dataclass(frozen=True)
class StepInputs:
    tokens: Tensor  # [T]
    positions: Tensor  # [T] absolute
    rows: Tensor  # [S] tokens whose logits are wanted
    step: ForwardStep


class Runner:
    def __init__(self, model: Decoder, manager: KVCacheManager) -> None:
        self.model, self.manager = model, manager

    def inputs(
        self, tokens: Sequence[Sequence[int]], begins: Sequence[int], rows: Sequence[int], step: ForwardStep
    ) -> StepInputs:
        """Each request's tokens and first position, one request after the other."""
        positions = [p for begin, part in zip(begins, tokens, strict=True) for p in range(begin, begin + len(part))]
        flat = [t for part in tokens for t in part]
        to = self.manager.device
        ids, at, wanted = (torch.tensor(x, dtype=torch.int64, device=to) for x in (flat, positions, list(rows)))
        return StepInputs(ids, at, wanted, step)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits [S, vocab] f32. Pages and state of the step's requests are written."""
        handles = self.manager.acquire(inputs.step)
        return self.model.forward(inputs.tokens, inputs.positions, handles, inputs.rows)
