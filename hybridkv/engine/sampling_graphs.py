"""SamplingGraphs: how the tokens of a decode step are drawn in one launch.

sample_rows is up to nine launches, which take the host longer than a small model's decode step takes the card. The
logits of a captured decode step lie where they always do, so its sampling is captured too: once for each such place and
each set of things that its rows ask for. Rows that are missing ask for nothing, and every kernel leaves them at once.

What is not like that takes the launches one by one: steps with prompts, forbidden tokens, logits hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.engine.capturing import capture
from hybridkv.engine.graphs import DecodeGraphs
from hybridkv.engine.workspace import ROW_BYTES
from hybridkv.kernels.sampling.launch import launch_rows
from hybridkv.kernels.sampling.rows import PLACE, WORDS, SampleRow, fill_table
from hybridkv.kernels.sampling.sample import sample_rows

ASKED = 2  # times that sampling of a kind must be asked for before it is captured
MOST = 64  # graphs; the rest is launched one by one


@dataclass(frozen=True)
class CapturedSampling:
    """A graph and the tensors whose addresses it holds: they must live as long as it does."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [R, vocab]
    table: Tensor  # [R, words] int64
    found: Tensor  # [2, R + 1] int64: the last is for rows that are missing

    @torch.inference_mode()
    def replay(self, table: Tensor, found: Tensor) -> None:
        """Choose the tokens of rows as `table` [R, words] says, on the host; found [2, n], replaced."""
        self.table.copy_(table, non_blocking=True)
        mine = self.found[:, : found.shape[1]]
        mine.copy_(found)
        self.graph.replay()
        found.copy_(mine)


class SamplingGraphs:
    def __init__(self, decode: DecodeGraphs) -> None:
        self.decode = decode
        self.asked: dict[tuple[int, int], int] = {}  # by address of the logits, and flags
        self.captured: dict[tuple[int, int], CapturedSampling] = {}
        self.failed = False
        self.places: dict[int, Tensor] = {}  # logits of decode graphs, by address
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow], found: Tensor) -> None:
        """As sample_rows: logits [S, vocab], found [2, n] int64."""
        whole = self._whole(logits)
        if whole is None or not rows or any(row.forbidden or row.own is not None for row in rows):
            return sample_rows(logits, rows, found)
        count = len(whole)
        if max(len(rows), found.shape[1]) > count:
            return sample_rows(logits, rows, found)
        sent = torch.zeros((count, len(WORDS)), dtype=torch.int64, device="cpu", pin_memory=True)
        table = sent.numpy()
        flags = fill_table(table[: len(rows)], rows, whole.shape[1])
        table[len(rows) :, PLACE["OUT"]] = count  # nobody's
        graph = self._ready(whole, flags)
        if graph is None:
            return sample_rows(logits, rows, found)
        graph.replay(sent, found)

    def _whole(self, logits: Tensor) -> Tensor | None:
        """All logits of the decode graph that these are the first of; None: they are of none."""
        at = logits.data_ptr()
        if at not in self.places and logits.stride(-1) == 1:
            self.places = {graph.logits.data_ptr(): graph.logits for graph in self.decode.captured.values()}
        found = self.places.get(at)
        return found if found is not None and found.stride() == logits.stride() else None

    def _ready(self, logits: Tensor, flags: int) -> CapturedSampling | None:
        key = logits.data_ptr(), flags
        if key not in self.captured:
            self.asked[key] = self.asked.get(key, 0) + 1
            if self.failed or self.asked[key] < ASKED or len(self.captured) >= MOST:
                return None
            try:
                with torch.cuda.device(logits.device):
                    self.captured[key] = self._capture(logits, flags)
            except RuntimeError as problem:  # as a rule no memory is left
                self.failed, self.pool = True, torch.cuda.graph_pool_handle()
                torch.cuda.empty_cache()
                warnings.warn(f"sampling runs without CUDA graphs: {problem}", stacklevel=2)
        return self.captured.get(key)

    @torch.inference_mode()
    def _capture(self, logits: Tensor, flags: int) -> CapturedSampling:
        """Run it on rows that ask for nothing: once to compile, once to record."""
        count = len(logits)
        table = torch.zeros((count, len(WORDS)), dtype=torch.int64, device=logits.device)
        table[:, PLACE["OUT"]] = count
        found = torch.zeros((2, count + 1), dtype=torch.int64, device=logits.device)

        def run() -> None:
            launch_rows(logits, table.view(-1), flags, count, found)

        graph, _ = capture(run, self.pool, lambda _: count * ROW_BYTES, logits.device)
        return CapturedSampling(graph, logits, table, found)
