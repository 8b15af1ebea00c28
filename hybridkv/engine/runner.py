"""Runner: a batch to tensors, and tensors through the model. Here alone token lists become device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache import ForwardStep, KVCacheManager
from hybridkv.cache.step import upload
from hybridkv.engine.graphs import DecodeGraphs, can_capture
from hybridkv.models.decoder import Model


@dataclass(frozen=True)
class StepInputs:
    tokens: Tensor  # [T]
    positions: Tensor  # [T] absolute
    rows: Tensor  # [S] tokens whose logits are wanted
    first: bool  # these are the first S tokens
    step: ForwardStep


class Runner:
    def __init__(self, model: Model, manager: KVCacheManager) -> None:
        self.model, self.manager = model, manager
        self.graphs = DecodeGraphs(model, manager) if can_capture(manager) else None
        self.numbers = torch.arange(manager.slots, device=manager.device)

    def inputs(
        self, tokens: Sequence[Sequence[int]], begins: Sequence[int], rows: Sequence[int], step: ForwardStep
    ) -> StepInputs:
        """Each request's tokens and first position, one request after the other; tokens of padding are 0."""
        spare = step.query_start_loc[-1] - sum(map(len, tokens))
        positions = [np.arange(begin, begin + len(part)) for begin, part in zip(begins, tokens, strict=True)]
        padding = np.zeros(spare, np.int64)
        flat = [np.concatenate([*(np.asarray(x, np.int64) for x in parts), padding]) for parts in (tokens, positions)]
        arrays = [*flat, np.array(list(rows), np.int64)]
        if step.num_decodes < len(step.slots):
            ends = np.array(step.query_start_loc[1:])
            step = replace(step, tail=int((ends[np.searchsorted(ends, arrays[2], "right")] - arrays[2]).max(initial=0)))
        ids, at, wanted = upload(arrays, self.manager.device).split([len(x) for x in arrays])
        return StepInputs(ids, at, wanted, list(rows) == list(range(len(rows))), step)

    def next_inputs(self, tokens: Tensor, step: ForwardStep) -> StepInputs:
        """One token of each request that is on the device already, [S]."""
        S, rows = len(tokens), len(step.slots)
        return StepInputs(F.pad(tokens, (0, rows - S)), step.index.positions, self.numbers[:S], True, step)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits [S, vocab], good until the next step. Pages and state of the step's requests are written."""
        step = inputs.step
        if self.graphs is not None and self.graphs.ready(step):
            logits = self.graphs.replay(inputs.tokens, step)
            return logits[: len(inputs.rows)] if inputs.first else logits[inputs.rows]
        self.manager.begin(step)
        handles = self.manager.acquire(step)
        return self.model.forward(inputs.tokens, inputs.positions, handles, inputs.rows)
