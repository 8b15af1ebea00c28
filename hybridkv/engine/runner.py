"""Runner: a batch to tensors, and tensors through the model. Here alone token lists become device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache import ForwardStep, KVCacheManager
from hybridkv.cache.handle import Observer
from hybridkv.cache.step import upload
from hybridkv.config import EngineConfig
from hybridkv.engine.graphs import DecodeGraphs, can_capture
from hybridkv.engine.mixed_graphs import MixedGraphs
from hybridkv.engine.step_cost import StepCost
from hybridkv.models.decoder import Model


@dataclass(frozen=True)
class StepInputs:
    tokens: Tensor  # [T]
    rows: Tensor  # [S] tokens whose logits are wanted
    first: bool  # these are the first S tokens
    step: ForwardStep


class Runner:
    def __init__(
        self,
        model: Model,
        manager: KVCacheManager,
        step_tokens: int = EngineConfig.step_tokens,
        captures: bool = True,  # steps as CUDA graphs, where there can be any
    ) -> None:
        self.model, self.manager = model, manager
        self.logits = model.logits  # of what a replayed step with prompts gives
        self.cost = StepCost.of(model)
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None
        if captures and can_capture(manager):
            self.graphs = DecodeGraphs(model, manager, self.cost)
            self.mixed = MixedGraphs(model, manager, step_tokens, self.cost)
        self.numbers = torch.arange(manager.slots, device=manager.device)

    def inputs(
        self,
        tokens: Sequence[Sequence[int]],
        rows: Sequence[int],
        step: ForwardStep,
        sampled: Tensor | None = None,
        sources: Sequence[tuple[int, int]] = (),
    ) -> StepInputs:
        """Each request's tokens, one request after the other, and the tokens whose logits are wanted, ascending.

        Tokens of padding are 0. `sources`: (token of the step, its place in `sampled`) of those that only the device
        knows; what `tokens` has there is not looked at.
        """
        padding = np.zeros(step.query_start_loc[-1] - sum(map(len, tokens)), np.int64)
        ids = np.concatenate([*(np.asarray(part, np.int64) for part in tokens), padding])
        wanted = np.array(list(rows), np.int64)
        if step.num_decodes < len(step.slots):
            ends = step.host.query_start_loc[1:]
            to_end = ends[np.searchsorted(ends, wanted, "right")] - wanted  # 1: the last token of its request
            step = replace(step, tail=int(to_end.max(initial=0)))
        places = np.array(list(sources), np.int64).reshape(-1, 2).T
        sent = upload([ids, wanted, places.ravel()], self.manager.device)
        first = bool((wanted == np.arange(len(wanted))).all())
        found, rest = sent[: len(ids)], sent[len(ids) :]
        if sampled is not None and sources:
            to, source = rest[len(wanted) :].view(2, -1)
            found[to] = sampled[source]
        return StepInputs(found, rest[: len(wanted)], first, step)

    def next_inputs(self, tokens: Tensor, step: ForwardStep) -> StepInputs:
        """One token of each request, [S], which is on the device already."""
        S, rows = len(tokens), len(step.host.slots)
        return StepInputs(F.pad(tokens, (0, rows - S)), self.numbers[:S], True, step)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits [S, vocab], good until the next step. Pages and state of the step's requests are written."""
        step = inputs.step
        graph = self.graphs.ready(step) if self.graphs is not None else None
        mixed = self.mixed.ready(step, len(inputs.rows)) if self.mixed is not None else None
        self.manager.begin(step)
        if graph is not None:
            logits = graph.replay(inputs.tokens, step)
            return logits[: len(inputs.rows)] if inputs.first else logits[inputs.rows]
        if mixed is not None:
            return self.logits(mixed.replay(inputs.tokens, inputs.rows, step))
        handles = self.manager.acquire(step)
        return self.model.forward(inputs.tokens, step.index.positions, handles, inputs.rows)

    def observe(self, tokens: Sequence[int], step: ForwardStep, observer: Observer) -> None:
        """Run one request's tokens for what they look at: `observer` sees the queries of every attention layer."""
        inputs = self.inputs([tokens], [len(tokens) - 1], step)
        step = replace(inputs.step, tail=None)  # the last layer attends for all of them too
        self.manager.begin(step)
        handles = self.manager.acquire(step)
        for handle in handles.values():
            handle.observer = observer
        self.model.hidden(inputs.tokens, step.index.positions, handles, inputs.rows)

    def hidden(self, inputs: StepInputs) -> Tensor:
        """`forward` without its last part: [S, hidden], for `model.logits` to turn into logits, all or some."""
        self.manager.begin(inputs.step)
        handles = self.manager.acquire(inputs.step)
        return self.model.hidden(inputs.tokens, inputs.step.index.positions, handles, inputs.rows)
