"""DecodeGraphs: a whole decode step captured once for each batch size, then replayed whatever the positions are.

Few requests with FP8 keys have two graphs, for short streams and for all, since the kernels are launched differently.

A graph reads two buffers that never move: the tokens, and what `prepare_forward` packed. A replay is two small copies
and one launch; it allocates nothing and waits for nothing. Rows that a batch does not fill are padding (slot -1), which
no op reads or writes for.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.cache import ForwardStep, KVCacheManager
from hybridkv.engine.capturing import ALONE, Consent, capture
from hybridkv.engine.step_cost import TIMED, StepCost, unlike_tokens
from hybridkv.engine.workspace import graph_sizes
from hybridkv.kernels.attention.decode_tuning import same_shape_up_to
from hybridkv.kernels.backend import HAS_TRITON
from hybridkv.kernels.formats.kv_format import pool_format
from hybridkv.models.decoder import Model


def can_capture(manager: KVCacheManager) -> bool:
    """Whether a decode step has no host branch and no wait in it."""
    return HAS_TRITON and manager.device.type == "cuda"


@dataclass(frozen=True)
class Captured:
    """A graph and the tensors whose addresses it holds: they must live as long as it does."""

    reach: int  # entries of a stream up to which it is replayed
    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # [B]
    packed: Tensor
    logits: Tensor  # [B, vocab]

    @torch.inference_mode()
    def replay(self, tokens: Tensor, step: ForwardStep) -> Tensor:
        """Logits [B, vocab] of a step of one token a row; valid until the next replay of any size."""
        self.tokens.copy_(tokens)
        self.packed.copy_(step.packed)
        self.graph.replay()
        return self.logits


class DecodeGraphs:
    def __init__(self, model: Model, manager: KVCacheManager, cost: StepCost | None = None) -> None:
        self.model, self.manager, self.cost = model, manager, cost
        self.sizes = graph_sizes(manager.slots)
        formats = [pool_format(table.pool.tensors) for table in manager.tables.values()]
        self.quantised = not manager.exact and any(fmt is not None and fmt.quantised for fmt in formats)
        self.captured: dict[tuple[int, int], Captured] = {}  # by rows and reach
        self.failed: set[tuple[int, int]] = set()
        self.pool = torch.cuda.graph_pool_handle()
        self.consent: Consent = ALONE
        self.longest = 0  # entries of a stream that the step's graph must reach at least: those of another rank's

    def rows(self, requests: int) -> int:
        """Rows of the smallest graph that holds this many requests."""
        return next(size for size in self.sizes if size >= requests)

    def key(self, rows: int, max_entries: int) -> tuple[int, int]:
        """Rows and reach of the graph for `rows` rows whose streams hold up to `max_entries` entries."""
        return rows, same_shape_up_to(rows, max_entries, self.manager.max_tokens, self.quantised)

    def ready(self, step: ForwardStep) -> Captured | None:
        """The graph of the step. The first of its kind is captured; if that fails, they all run without: None."""
        rows = len(step.host.slots)
        if step.num_decodes < rows or rows not in self.sizes:
            return None
        entries = max(step.max_entries, self.longest)
        key = self.key(rows, entries)
        if key not in self.captured and key not in self.failed:
            try:
                with torch.cuda.device(self.manager.device):
                    self.captured[key] = self._capture(*key)
            except RuntimeError as problem:  # as a rule no memory is left
                self.failed.add(key)
                self.pool = torch.cuda.graph_pool_handle()
                torch.cuda.empty_cache()
                which = f"{rows} rows with up to {key[1]} entries a stream"
                warnings.warn(f"decode steps of {which} run without a CUDA graph: {problem}", stacklevel=2)
        found = self.captured.get(key)
        if found is not None and entries > found.reach:
            raise AssertionError(f"a graph for {found.reach} entries a stream was asked to read {entries}")
        return found

    @torch.inference_mode()
    def _capture(self, rows: int, reach: int) -> Captured:
        """Run the step on padding alone, which changes nothing: once to compile and to warm up, once to record."""
        step = self.manager.padding_step(rows, reach)
        tokens = unlike_tokens(rows, self.model.config.vocab, self.manager.device)
        handles = self.manager.acquire(step)

        def forward() -> Tensor:
            return self.model.forward(tokens, step.index.positions, handles, None)

        # the logits are most of what it takes
        graph, logits = capture(forward, self.pool, lambda found: 2 * found.nbytes, self.manager.device, self.consent)
        if self.cost is not None:
            self.cost.measure(rows, graph.replay, TIMED)
        return Captured(reach, graph, tokens, step.packed, logits)
