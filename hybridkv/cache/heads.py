"""Heads over ranks: which part of a cache each of n ranks holds. Index arithmetic alone; it needs neither torch nor
numpy. Caches are cut and joined by it in shards.py.

    attention streams      by (layer, KV head): rank r of n has KV heads [r G / n, (r + 1) G / n); where there are fewer
                           heads than ranks, head r G // n, so that several ranks have the same one
    gdn/recurrent          rows by V head
    gdn/conv               channels lie as q | k | v: each section by its heads
    queries/queries, lse   by query head, also where KV heads are on several ranks
    all else               whole on every rank: DeepSeek-V4, whose heads share one latent

Heads of a rank are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridkv.cache.schema import CacheSchema, StateSchema, StreamSchema
from hybridkv.errors import HybridKVError

STREAMS = "attention"  # the streams that are cut by head


@dataclass(frozen=True)
class HeadCounts:
    """How many heads a whole model has.

    Args:
        heads: query heads of an attention layer.
        kv_heads: its KV heads.
        key_heads: of a Gated DeltaNet layer; 0: there is none.
        value_heads: of a Gated DeltaNet layer.
        key_dim: channels of one of its key heads.
        value_dim: channels of one of its value heads.
    """

    heads: int
    kv_heads: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    def fits(self, ranks: int) -> bool:
        """Whether the heads can be dealt out to so many ranks."""
        whole = (self.heads, self.key_heads, self.value_heads)
        return not any(n % ranks for n in whole) and not (self.kv_heads % ranks and ranks % self.kv_heads)


@dataclass(frozen=True)
class Shard:
    """One rank of several."""

    rank: int = 0
    ranks: int = 1

    def part(self, n: int) -> range:
        """Which of `n` things, that are dealt out in order, are this rank's."""
        return range(self.rank * n // self.ranks, (self.rank + 1) * n // self.ranks)

    def kv_heads(self, n: int) -> range:
        """Which of `n` KV heads it has; where there are more ranks than heads, one that others have, too."""
        first = self.rank * n // self.ranks
        return self.part(n) if n >= self.ranks else range(first, first + 1)

    def is_first(self, n: int) -> bool:
        """Whether no rank before it has the same KV heads."""
        return not self.rank or Shard(self.rank - 1, self.ranks).kv_heads(n)[0] != self.kv_heads(n)[0]


def check_ranks(counts: HeadCounts, ranks: int) -> None:
    """Whether so many ranks can share the heads, or HybridKVError: how many can."""
    if ranks < 1 or not counts.fits(ranks):
        good = ", ".join(str(n) for n in range(1, counts.heads + 1) if counts.fits(n))
        raise HybridKVError(f"{counts.heads} heads ({counts.kv_heads} KV heads) cannot be on {ranks} ranks; {good} can")


def cut_schema(schema: CacheSchema, counts: HeadCounts, ranks: int) -> CacheSchema:
    """What each of so many ranks stores of a whole schema."""
    if ranks == 1 or schema.compressed:
        return schema
    check_ranks(counts, ranks)
    shard = Shard(0, ranks)

    def stream(s: StreamSchema) -> StreamSchema:
        return replace(s, heads=len(shard.kv_heads(s.heads))) if s.name == STREAMS else s

    def state(s: StateSchema) -> StateSchema:
        tensors = []
        for t in s.tensors:
            axis, places = state_places(s.name, t.name, counts, shard)
            shape = [len(places) if i == axis else n for i, n in enumerate(t.shape)]
            tensors.append(replace(t, shape=tuple(shape)))
        return replace(s, tensors=tuple(tensors))

    return replace(schema, streams=tuple(map(stream, schema.streams)), states=tuple(map(state, schema.states)))


def state_places(schema: str, tensor: str, counts: HeadCounts, shard: Shard) -> tuple[int, Sequence[int]]:
    """(axis of a state tensor without its layers, indices on it that are the shard's); axis -1: it is not cut."""
    if (schema, tensor) == ("gdn", "recurrent"):
        return 0, shard.part(counts.value_heads)
    if (schema, tensor) == ("gdn", "conv"):
        keys, values = counts.key_heads * counts.key_dim, counts.value_heads * counts.value_dim
        k, v = shard.part(keys), shard.part(values)
        return 1, [*k, *(keys + i for i in k), *(2 * keys + i for i in v)]
    if schema == "queries":
        return 1, shard.part(counts.heads)
    return -1, ()
