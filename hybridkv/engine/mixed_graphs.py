"""MixedGraphs: steps with prompt chunks, alone or beside decoding requests, captured once for each shape.

A step that is launched kernel by kernel takes as long as the host needs for that, which for a small model is ten times
what the card needs. Here its tokens are padded to the next of a few sizes and the whole step, up to the last hidden
state, is one launch. Missing requests and tokens are padding (`HostIndex.shaped`), which no op reads or writes for.

A graph is captured when its shape is asked for a second time; until then a step runs as it is. Captures are timed on
padding, and the times say what a step of any size costs (step_cost.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache import ForwardStep, KVCacheManager
from hybridkv.engine.capturing import ALONE, Consent, capture
from hybridkv.engine.step_cost import TIMED, StepCost, unlike_tokens
from hybridkv.engine.workspace import BESIDE, MOST_CHUNKS, chunk_rows, graph_bytes, mixed_sizes
from hybridkv.kernels.attention.dequantise import KEYS
from hybridkv.kernels.attention.prefill_plan import PIECE, fits_graph
from hybridkv.kernels.formats.kv_format import pool_format
from hybridkv.kernels.step_index import StepShape
from hybridkv.models.decoder import Model

ASKED = 2  # times that a shape must be asked for before it is captured
FEW_DECODES = 16  # decoding requests that a graph beside prompts has room for at least, then four times as many


@dataclass(frozen=True)
class CapturedMixed:
    """A graph and the tensors whose addresses it holds: they must live as long as it does."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # [T]
    rows: Tensor  # [S] tokens whose hidden state is wanted
    packed: Tensor
    hidden: Tensor  # [S, hidden]

    @torch.inference_mode()
    def replay(self, tokens: Tensor, rows: Tensor, step: ForwardStep) -> Tensor:
        """[len(rows), hidden]: what the head turns into logits; valid until the next replay of this graph."""
        self.tokens.copy_(tokens)
        self.rows[: len(rows)].copy_(rows)  # those behind name tokens of earlier steps: there are such tokens, always
        self.packed.copy_(step.packed)
        self.graph.replay()
        return self.hidden[: len(rows)]


class MixedGraphs:
    def __init__(self, model: Model, manager: KVCacheManager, step_tokens: int, cost: StepCost) -> None:
        self.model, self.manager, self.cost = model, manager, cost
        self.decodes = decode_sizes(manager.slots)
        # keys in other pages than tiles of bf16 are dequantised at once, or not in a graph
        formats = [pool_format(table.pool.tensors) for table in manager.tables.values()]
        tiled = all(table.schema.entries_per_page % KEYS == 0 for table in manager.tables.values())
        self.dequantises = not tiled or any(fmt is None or fmt.dot_dtype != torch.bfloat16 for fmt in formats)
        self.dequantises |= any(fmt is not None and fmt.quantised for fmt in formats)
        self.dequantises &= not manager.exact  # which reads all pages as they are
        self.itemsize: int = model.embedding.element_size()  # type: ignore[attr-defined]
        self.sizes = mixed_sizes(model.config, step_tokens, self.itemsize, self.dequantises)
        self.asked: dict[StepShape, int] = {}
        self.captured: dict[StepShape, CapturedMixed] = {}
        self.failed: set[StepShape] = set()
        self.pool = torch.cuda.graph_pool_handle()
        self.consent: Consent = ALONE
        self.by_position = False  # prompts count as if nothing of them were evicted: alike on all ranks

    def most_chunks(self, tokens: int) -> int:
        """Prompts for which a captured step of so many tokens has room."""
        size = next((size for size in self.sizes if size >= tokens), None)
        return MOST_CHUNKS if size is None else chunk_rows(size) - 1

    def shape(self, slots: Sequence[int], counts: Sequence[int]) -> StepShape | None:
        """The shape in which a step of these new tokens is replayed; None: it runs as it is."""
        decodes = sum(n == 1 for n in counts)
        chunks, tokens = len(counts) - decodes, sum(counts)
        rows = next(size for size in self.decodes if size >= decodes)
        size = next((s for s in self.sizes if s >= max(tokens, rows) and chunk_rows(s) > chunks), None)
        if size is None or not self._reads(slots[decodes:], counts[decodes:]):
            return None
        shape = StepShape(size, rows, chunk_rows(size))
        self.asked[shape] = self.asked.get(shape, 0) + 1
        return shape if shape not in self.failed and self.asked[shape] >= ASKED else None

    def _reads(self, slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether the keys of these prompts can be read by a graph."""
        if not self.dequantises:
            return True
        at, new = np.array(slots, np.int64), np.array(counts, np.int64)
        longest = self.manager.positions[at] + new if self.by_position else np.zeros(len(at), np.int64)
        for table in self.manager.tables.values() if not self.by_position else ():
            longest = np.maximum(longest, table.lengths[at].max(1) + new)
        return fits_graph(longest.tolist(), PIECE)

    def ready(self, step: ForwardStep, rows: int = 0) -> CapturedMixed | None:
        """The graph of a step that has its shape; None: it is no graph's, or could not be captured.

        `rows`: tokens whose logits are wanted; a graph gives those of one token of each request.
        """
        if step.shape is None or rows > step.shape.decodes + step.shape.chunks:
            return None
        if step.shape not in self.captured and step.shape not in self.failed:
            try:
                with torch.cuda.device(self.manager.device):
                    self.captured[step.shape] = self._capture(step.shape)
            except RuntimeError as problem:  # as a rule no memory is left
                self.failed.add(step.shape)
                self.pool = torch.cuda.graph_pool_handle()
                torch.cuda.empty_cache()
                warnings.warn(f"steps of {step.shape.tokens} tokens run without a CUDA graph: {problem}", stacklevel=2)
        return self.captured.get(step.shape)

    @torch.inference_mode()
    def _capture(self, shape: StepShape) -> CapturedMixed:
        """Run the step on padding alone, which changes nothing: to compile and to warm up, to record, to be timed."""
        step, device = self.manager.padding_of_shape(shape), self.manager.device
        tokens = unlike_tokens(shape.tokens, self.model.config.vocab, device)
        rows = torch.zeros(shape.decodes + shape.chunks, dtype=torch.int64, device=device)

        def forward() -> Tensor:
            own = step.again()  # what is found on the device is found inside the graph
            return self.model.hidden(tokens, own.index.positions, self.manager.acquire(own), rows)

        room = BESIDE * graph_bytes(self.model.config, shape.tokens, self.itemsize, self.dequantises)
        graph, hidden = capture(forward, self.pool, lambda _: room, device, self.consent)
        self.cost.measure(shape.tokens, graph.replay, TIMED)
        return CapturedMixed(graph, tokens, rows, step.packed, hidden)


def decode_sizes(slots: int) -> list[int]:
    """Decoding requests for which a step with prompts has room: none, few, four times as many and so on."""
    sizes, size = [0], FEW_DECODES
    while size < slots:
        sizes.append(size)
        size *= 4
    return [*sizes, slots]
