"""Replay as a policy: its settings. Its scores come from steps of the model, which engine/replay.py runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hybridkv.errors import HybridKVError
from hybridkv.eviction.policy import LayerCache, Policy

# Last entries that stay whatever their score. Heads that look at the tokens just before their own need them when a
# question begins; while a text is repeated they look at what has been repeated of it, and never there.
RECENT = 8


@dataclass(frozen=True)
class Replay(Policy):
    """The strongest attention that the model pays to an entry while it repeats the text. Kim et al. 2025 (KVzip),
    https://arxiv.org/abs/2505.23416

    It needs no question, and reads the text a second time, `chunk` tokens at once at the most: for documents
    (`LLM.compress`) and for conversations, at the end of a turn.
    """

    chunk: int = 2048
    needs_replay: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= 1 << 20:
            raise HybridKVError(f"replay's chunk must be a number of tokens from 1 on, not {self.chunk}")

    def score(self, layer: LayerCache) -> Tensor:
        raise HybridKVError(
            "replay scores a text by reading it once more, and this one was not; compress it (LLM.compress, hybridkv "
            "compress), or choose another policy"
        )
