"""Caches cut into parts by head, and joined: so a request of n ranks goes on at any other n (heads.py says what is
whose). Bytes are moved, nothing is computed.

A snapshot of a rank has the fingerprint of the rank's schema, a joined one that of the whole schema. All ranks name
the same model: the whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.facts import Compaction
from hybridkv.cache.heads import STREAMS, HeadCounts, Shard, check_ranks, cut_schema, state_places
from hybridkv.cache.schema import CacheSchema, StreamSchema
from hybridkv.cache.session import Session
from hybridkv.cache.snapshot import Snapshot, fingerprint
from hybridkv.errors import RequestError
from hybridkv.eviction_record import EvictionRecord

# ---- one rank's part


def cut(snapshot: Snapshot, schema: CacheSchema, counts: HeadCounts, shard: Shard) -> Snapshot:
    """What one rank holds of a whole snapshot, whose schema is given; or RequestError."""
    _check_of(snapshot, schema, "the whole schema")
    for s in schema.streams:
        if len(snapshot.lengths.get(s.name, ())) != s.streams:
            raise RequestError(f"the snapshot does not have the {s.streams} streams of '{s.name}'")
    if shard.ranks == 1 or schema.compressed:
        return snapshot
    local, heads = cut_schema(schema, counts, shard.ranks), shard.kv_heads(counts.kv_heads)
    lengths, entries, past = dict(snapshot.lengths), dict(snapshot.entries), snapshot.compaction
    for s in schema.streams:
        if s.name == STREAMS:
            rows = _rows(s, heads)
            at = _entries_of(snapshot.lengths[s.name], rows)
            lengths[s.name] = snapshot.lengths[s.name][rows]
            entries |= {key: t.index_select(1, at) for key, t in snapshot.entries.items() if key[0] == s.name}
            if past is not None and s.name in past.kept:
                past = Compaction(past.position, past.kept | {s.name: [past.kept[s.name][i] for i in rows]})
    states = {}
    for (name, tensor), t in snapshot.states.items():
        axis, places = state_places(name, tensor, counts, shard)
        states[name, tensor] = t if axis < 0 else t.index_select(axis + 1, torch.tensor(places))
    return Snapshot(fingerprint(local), snapshot.model, snapshot.position, lengths, entries, states, past)


def to_send(part: Snapshot, counts: HeadCounts, shard: Shard) -> Snapshot:
    """A rank's part without KV heads that a rank before it has, and sends."""
    if STREAMS not in part.lengths or shard.is_first(counts.kv_heads):
        return part
    past = part.compaction
    return replace(
        part,
        lengths={name: n for name, n in part.lengths.items() if name != STREAMS},
        entries={key: t for key, t in part.entries.items() if key[0] != STREAMS},
        compaction=past and Compaction(past.position, {n: k for n, k in past.kept.items() if n != STREAMS}),
    )


def cut_session(session: Session, schema: CacheSchema, counts: HeadCounts, shard: Shard) -> Session:
    """What one rank holds of a whole session: cache, and records of evictions."""
    if shard.ranks == 1 or schema.compressed:
        return session
    heads = shard.kv_heads(counts.kv_heads)
    records = {}
    layers = next((len(s.layers) for s in schema.streams if s.name == STREAMS), 0)
    for at, record in session.evictions.items():
        if record.lengths.shape != (layers, counts.kv_heads):
            raise RequestError(f"the session's record of the eviction at {at} is of other layers or heads")
        keep = [[layer[g] for g in heads] for layer in record.lists()]
        records[at] = EvictionRecord(keep, record.lengths[:, list(heads)])
    snapshot = session.snapshot and cut(session.snapshot, schema, counts, shard)
    return replace(session, evictions=records, snapshot=snapshot)


# ---- the whole


def join(parts: Sequence[Snapshot], schema: CacheSchema, counts: HeadCounts) -> Snapshot:
    """The whole snapshot that ranks hold together, in order of rank; or RequestError: they do not belong together. Of
    KV heads that several ranks have the first one's are taken; others may have been left out (`to_send`).
    """
    ranks, first = len(parts), parts[0]
    local = cut_schema(schema, counts, ranks)
    for rank, part in enumerate(parts):
        _check_of(part, local, f"rank {rank} of {ranks}")
        if (part.position, part.model, part.states.keys()) != (first.position, first.model, first.states.keys()):
            raise _elsewhere(rank)
    if ranks == 1 or schema.compressed:
        return first
    parts = _compacted_alike(parts)
    first = parts[0]
    lengths, entries, past = dict(first.lengths), dict(first.entries), first.compaction
    for s in schema.streams:
        if s.name == STREAMS:
            source = _sources(s, counts, ranks)
            _check_parts(parts, s, counts)
            lengths[s.name] = np.array([parts[rank].lengths[s.name][i] for rank, i in source], np.int64)
            for t in s.tensors:
                streams = {rank: _by_stream(parts[rank], s.name, t.name) for rank in {rank for rank, _ in source}}
                entries[s.name, t.name] = torch.cat([streams[rank][i] for rank, i in source], 1)
            if past is not None and s.name in past.kept:
                kept = [parts[rank].compaction.kept[s.name][i] for rank, i in source]  # type: ignore[union-attr]
                past = Compaction(past.position, past.kept | {s.name: kept})
    states = {key: _joined(key, parts, counts) for key in first.states}
    return Snapshot(fingerprint(schema), first.model, first.position, lengths, entries, states, past)


def join_sessions(parts: Sequence[Session], schema: CacheSchema, counts: HeadCounts) -> Session:
    """The whole session that ranks hold together, in order of rank; or RequestError."""
    ranks, first = len(parts), parts[0]
    for rank, part in enumerate(parts):
        if part.tokens != first.tokens or part.going != first.going or part.evictions.keys() != first.evictions.keys():
            raise RequestError(f"rank {rank} holds another request than rank 0, or another part of its answer")
    found = [part.snapshot for part in parts if part.snapshot is not None]
    if len(found) not in (0, ranks):
        raise RequestError(f"{len(found)} of {ranks} ranks have the request's cache")
    if ranks == 1 or schema.compressed:
        return first
    check_ranks(counts, ranks)
    snapshot = join(found, schema, counts) if found else None
    return replace(first, evictions=_records([part.evictions for part in parts], counts), snapshot=snapshot)


def _records(parts: Sequence[Mapping[int, EvictionRecord]], counts: HeadCounts) -> dict[int, EvictionRecord]:
    ranks, found = len(parts), {}
    by_head = [_home(g, counts, ranks) for g in range(counts.kv_heads)]  # (rank, head of it)
    for at in parts[0]:
        lists = [part[at].lists() for part in parts]
        keep = [[lists[rank][layer][i] for rank, i in by_head] for layer in range(len(lists[0]))]
        lengths = np.stack([parts[rank][at].lengths[:, i] for rank, i in by_head], 1)
        found[at] = EvictionRecord(keep, lengths)
    return found


# ---- inside


def _elsewhere(rank: int) -> RequestError:
    return RequestError(f"rank {rank} holds another request than rank 0, or stands elsewhere in it")


def _compacted_alike(parts: Sequence[Snapshot]) -> Sequence[Snapshot]:
    """The same, all compacted at the position where the last of them was: a rank that had nothing to drop there knows
    of an earlier compaction, or of none.
    """
    past = [part.compaction for part in parts if part.compaction is not None]
    if not past:
        return parts
    at, names = max(each.position for each in past), {name for each in past for name in each.kept}
    return [_compacted_at(part, rank, at, names) for rank, part in enumerate(parts)]


def _compacted_at(part: Snapshot, rank: int, at: int, names: Iterable[str]) -> Snapshot:
    past, kept = part.compaction, {}
    if past is not None and past.position == at:
        return part
    for name in part.lengths.keys() & names:
        lengths = part.lengths[name]
        earlier = past is not None and name in past.kept
        kept[name] = past.positions(name, at) if earlier else [np.arange(at)] * len(lengths)  # type: ignore[union-attr]
        if [len(each) + part.position - at for each in kept[name]] != lengths.tolist():
            raise _elsewhere(rank)  # it has dropped entries at a position that it does not name
    return replace(part, compaction=Compaction(at, kept))


def _rows(s: StreamSchema, heads: Sequence[int]) -> np.ndarray:
    """Streams of these KV heads, layer by layer."""
    return (np.arange(len(s.layers))[:, None] * s.heads + np.array(heads)).ravel()


def _entries_of(lengths: np.ndarray, rows: np.ndarray) -> Tensor:
    """Where the entries of these streams lie, stream after stream, among those of all."""
    begins = np.cumsum(lengths) - lengths
    found = [np.arange(begins[i], begins[i] + lengths[i]) for i in rows]
    return torch.from_numpy(np.concatenate(found) if found else np.zeros(0, np.int64))


def _by_stream(part: Snapshot, name: str, tensor: str) -> Sequence[Tensor]:
    """[lanes, entries, ...] of each stream."""
    return part.entries[name, tensor].split(part.lengths[name].tolist(), 1)


def _home(head: int, counts: HeadCounts, ranks: int) -> tuple[int, int]:
    """(first rank that has a KV head, which of its heads that is)."""
    for rank in range(ranks):
        mine = Shard(rank, ranks).kv_heads(counts.kv_heads)
        if head in mine:
            return rank, head - mine[0]
    raise AssertionError(f"no rank has KV head {head}")


def _sources(s: StreamSchema, counts: HeadCounts, ranks: int) -> list[tuple[int, int]]:
    """(rank, its stream) of each stream of the whole."""
    local = len(Shard(0, ranks).kv_heads(s.heads))
    homes = [_home(g, counts, ranks) for g in range(s.heads)]
    return [(rank, layer * local + i) for layer in range(len(s.layers)) for rank, i in homes]


def _joined(key: tuple[str, str], parts: Sequence[Snapshot], counts: HeadCounts) -> Tensor:
    """A state tensor [layers, *shape] of all ranks."""
    held = [state_places(*key, counts, Shard(rank, len(parts))) for rank in range(len(parts))]
    axis = held[0][0] + 1
    if not axis:
        return parts[0].states[key]
    whole = torch.cat([part.states[key] for part in parts], axis)
    order = np.argsort(np.concatenate([np.array(places) for _, places in held]))  # every index is one rank's
    return whole.index_select(axis, torch.from_numpy(order))


def _check_of(snapshot: Snapshot, schema: CacheSchema, whose: str) -> None:
    specs = {(s.name, t.name): (len(s.layers), t) for s in schema.states for t in s.tensors}
    fits = snapshot.fingerprint == fingerprint(schema) and snapshot.states.keys() <= specs.keys()
    for key, tensor in snapshot.states.items() if fits else ():
        layers, t = specs[key]
        fits &= tuple(tensor.shape) == (layers, *t.shape) and tensor.dtype == t.torch_dtype
    if not fits:
        raise RequestError(f"the snapshot is not one of {whose}: it stores other heads, layers, sizes or dtypes")


def _check_parts(parts: Sequence[Snapshot], s: StreamSchema, counts: HeadCounts) -> None:
    """Whether every KV head was sent by its first rank, and its copies are of the same entries."""
    ranks = len(parts)
    streams = len(s.layers) * len(Shard(0, ranks).kv_heads(s.heads))
    for rank, part in enumerate(parts):
        found, home = part.lengths.get(s.name), _home(Shard(rank, ranks).kv_heads(s.heads)[0], counts, ranks)[0]
        if found is None and home == rank:
            raise RequestError(f"rank {rank} of {ranks} has sent no entries of '{s.name}', and no other has its heads")
        if found is not None and len(found) != streams:
            raise RequestError(f"rank {rank} of {ranks} has {len(found)} streams of '{s.name}', not {streams}")
        if found is not None and not np.array_equal(found, parts[home].lengths[s.name]):
            raise RequestError(f"ranks {home} and {rank} have the same KV head, and not the same entries of it")
