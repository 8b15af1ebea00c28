"""Which streams copy: measured once for a model, by reading a short text twice.

Few heads of a model find what stood somewhere in its past; most look at their neighbours or at the first tokens. When a
text is read a second time, a head that copies looks at the same place in the first reading. A stream's weight is the
largest attention that each entry of the first reading gets from the second, on average over the entries, relative to
the model's best stream. What a budget is shared by depends on it (policies `peak` and `heads`), and it is the same for
every request. Wu et al. 2024 (retrieval heads), https://arxiv.org/abs/2404.15574; Xiao et al. 2024 (DuoAttention),
https://arxiv.org/abs/2410.10819

The text is read in a cache of its own, which is dropped: no request, page or slot of the engine is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import torch
from torch import Tensor

from hybridkv.cache import KVCacheManager, LayerHandle
from hybridkv.devices import on_device
from hybridkv.engine.runner import Runner
from hybridkv.eviction.over_ranks import OverRanks
from hybridkv.eviction.sizes import STREAMS
from hybridkv.kernels.eviction.peak import peak_scores
from hybridkv.models.decoder import Model
from hybridkv.text.tokenizer import Tokenizer

TOKENS = 512  # of the text, which is read twice
SINKS = 4  # first entries, which every head looks at
LEAST = 1e-3  # of a stream that never copies


def calibration_tokens(tokenizer: Tokenizer | None, vocab: int, longest: int) -> list[int]:
    """The text in a model's own tokens; without a tokenizer tokens that no pattern joins."""
    count = min(TOKENS, longest // 2)
    if tokenizer is not None:
        text = files("hybridkv").joinpath("data/petrel_log.txt").read_text(encoding="utf-8")
        found = tokenizer.encode(text, bos=False)[:count]
        if found and max(found) < vocab:
            return found
    return [(i * 2654435761 % (1 << 32)) % vocab for i in range(1, count + 1)]


def copying_weights(
    model: Model, manager: KVCacheManager, tokens: Sequence[int], ranks: OverRanks | None = None
) -> Tensor:
    """[streams] f32 from LEAST to 1, on the device: how much each stream copies, relative to the best one.

    `manager`: whose schema, device and mode the model is read with; `ranks`: of which this one has some streams.
    """
    n, schema = len(tokens), manager.schema
    own = KVCacheManager(schema, schema.pool_pages(1, 2 * n), 1, 2 * n, manager.device, manager.exact, 0)
    own.admit_request("text")
    looking = _SecondReading(own, n, model.config.heads, model.config.attention_scale, ranks)
    runner = Runner(model, own)
    with on_device(manager.device), torch.inference_mode():
        for observer in (None, looking):
            step = own.prepare_forward([("text", n)])
            if observer is None:
                runner.forward(runner.inputs([list(tokens)], [n - 1], step))
            else:
                runner.observe(list(tokens), step, observer)
            own.commit([("text", n)])
        weights = torch.cat(looking.found)
        best = weights.max() if ranks is None else ranks.largest(weights.max())
        return (weights / best.clamp(min=1e-9)).clamp(min=LEAST)


class _SecondReading:
    """What the queries of the second reading look at in the first, layer by layer (an Observer)."""

    def __init__(self, manager: KVCacheManager, tokens: int, heads: int, scale: float, ranks: OverRanks | None) -> None:
        device, streams = manager.device, manager.tables[STREAMS].schema.heads
        self.tokens, self.scale, self.ranks = tokens, scale, ranks
        self.when = torch.arange(tokens, 2 * tokens, device=device)
        # exact attention leaves no sums: they are made again, over all that the queries see
        seen = 2 * tokens if manager.exact else tokens
        self.where = torch.arange(seen, device=device).expand(streams, -1)
        self.sums = None if manager.exact else torch.empty(tokens, heads, device=device)
        self.found: list[Tensor] = []  # of each layer [G]

    @property
    def lse_rows(self) -> tuple[Tensor, Tensor] | None:
        """Where the sums of softmax go."""
        return None if self.sums is None else (self.sums, torch.arange(self.tokens, device=self.sums.device))

    def __call__(self, handle: LayerHandle, queries: Tensor) -> None:
        sums = self.sums
        if self.ranks is not None:  # a KV head's other query heads may be elsewhere
            queries, sums = self.ranks.queries(queries, 1), None if sums is None else self.ranks.queries(sums, 1)
        scores = peak_scores(queries, self.when, handle.pages("k"), handle.table[0], self.where, self.scale, sums)
        self.found.append(scores[:, min(SINKS, self.tokens - 1) : self.tokens].mean(1))
