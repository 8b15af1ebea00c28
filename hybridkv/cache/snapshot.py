"""Snapshots: all that a request holds, taken out of the cache and brought back, in memory or through a file.

A snapshot is dense: the entries of all streams one after the other, without pages. It goes into any cache of the same
model whose schema stores the same, also one with other page ids or (except for compressed entries) another page size.
What is restored is what was taken, byte for byte: entries, lengths, position, which positions survived an eviction, and
state rows; last queries only if the request had a query buffer, and then it needs one again.

    file = a safetensors file with a checksum (snapshot_file.py); its metadata holds fingerprints of schema and model,
           and the position. A session file (session.py) is the same and holds the request beside its cache
    buffers = the same without a file, to be sent (buffers.py)
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.buffers import Buffers, pack, unpack
from hybridkv.cache.facts import Compaction
from hybridkv.cache.frozen import Frozen, begin_frozen, fill_frozen, finish_frozen, thaw_request
from hybridkv.cache.holding import holding
from hybridkv.cache.manager import KVCacheManager
from hybridkv.cache.schema import CacheSchema, StateSchema, StreamSchema
from hybridkv.cache.snapshot_file import FORMAT, SESSION_VERSION, VERSION, NotWellFormed, read_file, write_file
from hybridkv.errors import HybridKVError, RequestError

GROUPS = ("entries", "state", "lengths", "kept", "kept_lengths")
SESSION_GROUPS = ("session", "evicted", "evicted_lengths")  # of the request, in a session file
INTEGERS = (torch.int32, torch.int64)
MAX_POSITION = 1 << 48


@dataclass(frozen=True)
class Snapshot:
    """All that a request holds in the cache, outside it."""

    fingerprint: str  # of the schema it was taken from
    model: str  # fingerprint of the model that computed it; "" if the cache did not know
    position: int
    lengths: dict[str, np.ndarray]  # stream schema -> [streams] int64
    entries: dict[tuple[str, str], Tensor]  # (stream schema, tensor) -> [lanes, all entries, *shape]
    states: dict[tuple[str, str], Tensor]  # (state schema, tensor) -> [layers, *shape]
    compaction: Compaction | None

    @property
    def nbytes(self) -> int:
        """Of entries and state."""
        return sum(t.nbytes for t in (*self.entries.values(), *self.states.values()))

    def read(self, name: str, begin: np.ndarray, count: np.ndarray) -> dict[str, Tensor]:
        """As `Holding.read`."""
        lengths = self.lengths[name]
        first = (np.cumsum(lengths) - lengths + begin).tolist()
        runs = [slice(a, a + n) for a, n in zip(first, count.tolist(), strict=True)]
        return {key: torch.cat([t[:, run] for run in runs], 1) for (s, key), t in self.entries.items() if s == name}

    def save(self, path: str | Path) -> None:
        """Write a file: whole, or not at all."""
        tensors, meta = self.contents()
        write_file(Path(path), tensors, {"format": FORMAT, "version": VERSION} | meta)

    def to_buffers(self) -> Buffers:
        """A head and bytes, to be sent. Nothing is copied: they are the snapshot's own."""
        return pack("snapshot", *self.contents())

    @staticmethod
    def from_buffers(buffers: Buffers, room: int | None = None) -> Snapshot:
        """What was sent, on the same memory; what is damaged, truncated, foreign, of a newer version or of more than
        `room` bytes is refused.
        """
        tensors, meta = unpack(buffers, "snapshot", room=room)
        try:
            return snapshot_of(tensors, meta)
        except NotWellFormed as problem:
            raise HybridKVError(f"the buffers are not well-formed: {problem}") from None

    def contents(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and metadata of a file that holds it."""
        tensors = {f"entries/{a}/{b}": t.contiguous() for (a, b), t in self.entries.items()}
        tensors |= {f"state/{a}/{b}": t.contiguous() for (a, b), t in self.states.items()}
        tensors |= {f"lengths/{name}": torch.from_numpy(n) for name, n in self.lengths.items()}
        meta = {"fingerprint": self.fingerprint, "model": self.model, "position": str(self.position)}
        if self.compaction is not None:
            meta["compacted_at"] = str(self.compaction.position)
            for name, kept in self.compaction.kept.items():
                tensors[f"kept/{name}"] = torch.from_numpy(np.concatenate(kept))
                tensors[f"kept_lengths/{name}"] = torch.tensor([len(each) for each in kept])
        return tensors, meta

    @staticmethod
    def load(path: str | Path) -> Snapshot:
        """Read a file back; one that is truncated, altered, badly formed or of another format is refused.

        Of a session file, the cache alone.
        """
        path = Path(path)

        def check(meta: dict[str, str]) -> None:
            if meta["version"] == SESSION_VERSION and "fingerprint" not in meta:
                raise HybridKVError(f"{path.name} is a session without its cache: there is no snapshot in it")

        tensors, meta = read_file(path, check)
        try:
            return snapshot_of(without_session(tensors), meta)
        except NotWellFormed as problem:
            raise HybridKVError(f"snapshot {path.name} is not well-formed: {problem}") from None


def without_session(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those tensors of a file that belong to the cache."""
    return {name: t for name, t in tensors.items() if name.partition("/")[0] not in SESSION_GROUPS}


def snapshot_request(manager: KVCacheManager, request: Hashable, pinned: bool = False) -> Snapshot:
    """Everything the request holds, frozen or not, copied to the host. The request goes on unchanged.

    `pinned`: of a GPU, into memory that its copies run at full speed from and to.
    """
    held = holding(manager, request, pinned)
    manager.check_shareable(held.position)
    entries = {}
    for name in manager.tables:
        begin = np.zeros_like(held.lengths[name])
        entries |= {(name, key): t for key, t in held.read(name, begin, held.lengths[name]).items()}
    return Snapshot(
        fingerprint(manager.schema),
        manager.model_fingerprint(),
        held.position,
        held.lengths,
        entries,
        held.states(),
        held.compaction,
    )


def restore_request(manager: KVCacheManager, snapshot: Snapshot, request: Hashable) -> int:
    """Bring a snapshot back as a request; returns its slot. Without pages, slot and query buffer for all of it nothing
    changes.
    """
    check_restorable(manager, snapshot)
    if not manager.free_slots and request not in manager.slot_of:
        raise HybridKVError(f"all {manager.slots} request slots are taken; raise max_requests or wait")
    restore_frozen(manager, snapshot, request)
    try:
        return thaw_request(manager, request)
    except BaseException:
        manager.release_request(request)
        raise


def restore_frozen(manager: KVCacheManager, snapshot: Snapshot, request: Hashable) -> Frozen:
    """Bring a snapshot back as a frozen cache, which needs no slot. Without room for all of it nothing changes."""
    check_restorable(manager, snapshot)
    begin_frozen(manager, request, snapshot.position, snapshot.lengths, snapshot.compaction)
    try:
        for name, table in manager.tables.items():
            entries = {key: snapshot.entries[name, key] for key in table.pool.tensors}
            fill_frozen(manager, request, name, np.zeros_like(snapshot.lengths[name]), snapshot.lengths[name], entries)
        return finish_frozen(manager, request, snapshot.states)
    except BaseException:
        manager.release_request(request)
        raise


def stores_the_same(manager: KVCacheManager, snapshot: Snapshot) -> bool:
    """Whether the snapshot's cache stored what this one does."""
    schema = manager.schema
    return snapshot.fingerprint in (fingerprint(schema), fingerprint(schema, lent=True))  # the second: before 0.3


def lent_keys(manager: KVCacheManager) -> set[tuple[str, str]]:
    """Names of the state that a request has only while it has a query buffer."""
    return {(s.name, t.name) for s in manager.schema.states if s.lent for t in s.tensors}


def fingerprint(schema: CacheSchema, lent: bool = False) -> str:
    """What a schema stores, in 64 characters. Page sizes are no part of it, unless entries are laid out by pages.

    Nor is what is lent, which a snapshot may have or not (`lent`: it is, as before 0.3).
    """
    formats = [[c.kind, c.entries.name, c.index and c.index.name] for c in schema.compressed]
    pages = [s.entries_per_page for s in schema.streams] if formats else []

    def named(s: StreamSchema | StateSchema) -> list:
        return [[t.name, t.shape, f"torch.{t.dtype}"] for t in s.tensors]

    streams = [[s.name, s.layers, s.heads, s.shared, s.tokens_per_entry, named(s)] for s in schema.streams]
    states = [[s.name, s.layers, named(s)] for s in schema.states if lent or not s.lent]
    return hashlib.sha256(json.dumps([streams, states, formats, pages]).encode()).hexdigest()


def check_restorable(manager: KVCacheManager, snapshot: Snapshot) -> None:
    """Refuse what does not belong into this cache, before anything is taken."""
    try:
        _check_form(snapshot)
    except NotWellFormed as problem:
        raise RequestError(f"the snapshot is not well-formed: {problem}") from None
    _check_origin(manager, snapshot)
    manager.check_shareable(snapshot.position)
    if snapshot.position > manager.max_tokens:
        raise RequestError(
            f"the snapshot is at position {snapshot.position}, the context holds {manager.max_tokens} tokens"
        )
    past = snapshot.compaction
    for name, table in manager.tables.items():
        s = table.schema
        want = np.full(s.streams, s.entries(snapshot.position))
        if past is not None and name in past.kept:
            want = np.array([len(k) for k in past.kept[name]]) + snapshot.position - past.position
        found = snapshot.lengths.get(name)
        if found is None or not np.array_equal(found, want):
            raise RequestError(f"the snapshot's lengths in '{name}' do not agree with its position")
        for t in s.tensors:
            tensor = snapshot.entries.get((name, t.name))
            shape = (s.lanes, int(found.sum()), *t.shape)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != t.torch_dtype:
                raise RequestError(f"the snapshot's tensor '{t.name}' of '{name}' is not {shape} {t.dtype}")
    _check_states(manager, snapshot)


def _check_origin(manager: KVCacheManager, snapshot: Snapshot) -> None:
    if not stores_the_same(manager, snapshot):
        raise RequestError(
            "the snapshot was taken from a cache that stores other things (other layers or sizes, another KV dtype or "
            "eviction window)"
        )
    here = manager.model_fingerprint()
    if snapshot.model != here:
        raise RequestError(
            "the snapshot stores what this cache stores, but another model computed it: other weights, another dtype "
            f"of weights, or another rope (its fingerprint is {_short(snapshot.model)}, here it is {_short(here)}); "
            "restore it with the model it was taken from"
        )


def _short(fingerprint: str) -> str:
    return f"{fingerprint[:12]}..." if fingerprint else "not known"


def _check_states(manager: KVCacheManager, snapshot: Snapshot) -> None:
    for key in snapshot.states.keys() - manager.state.tensors.keys():
        raise RequestError(f"the snapshot stores other things than this cache: {_state(key)} has no place here; {HOW}")
    lent = lent_keys(manager)
    for key, t in manager.state.tensors.items():
        if key in lent and not lent & snapshot.states.keys():
            continue  # its last queries were no longer needed
        tensor = snapshot.states.get(key)
        if tensor is None or tensor.shape != (t.shape[0], *t.shape[2:]) or tensor.dtype != t.dtype:
            raise RequestError(f"the snapshot stores other things than this cache: {_state(key)} does not fit; {HOW}")


HOW = "open the model with the CacheConfig that it was saved with"


def _state(key: tuple[str, str]) -> str:
    return "what it keeps of its last queries" if key[0] == "queries" else f"its state {key[0]}/{key[1]}"


def _check_form(snapshot: Snapshot) -> None:
    """What must hold of any snapshot: integer vectors, counts that add up, positions in order."""
    if not 0 <= snapshot.position <= MAX_POSITION:
        raise NotWellFormed(f"position {snapshot.position} is not from 0 to {MAX_POSITION}")
    for name, lengths in snapshot.lengths.items():
        if lengths.ndim != 1 or lengths.dtype != np.int64:
            raise NotWellFormed(f"lengths of '{name}' are {lengths.dtype} {list(lengths.shape)}, not an int64 vector")
        if ((lengths < 0) | (lengths > MAX_POSITION)).any():
            raise NotWellFormed(f"a length in '{name}' is not from 0 to {MAX_POSITION}")
        if not any(key[0] == name for key in snapshot.entries):
            raise NotWellFormed(f"'{name}' has lengths and no entries")
    for (name, tensor), entries in snapshot.entries.items():
        lengths = snapshot.lengths.get(name)
        if lengths is None:
            raise NotWellFormed(f"'{name}' has entries and no lengths")
        if entries.ndim < 2 or entries.shape[1] != sum(lengths.tolist()):
            raise NotWellFormed(
                f"tensor '{tensor}' of '{name}' is {list(entries.shape)}, its lengths add up to {sum(lengths.tolist())}"
            )
    if snapshot.compaction is not None:
        _check_compaction(snapshot, snapshot.compaction)


def _check_compaction(snapshot: Snapshot, past: Compaction) -> None:
    if not 0 <= past.position <= snapshot.position:
        raise NotWellFormed(f"it was compacted at {past.position}, but is at position {snapshot.position}")
    for name, kept in past.kept.items():
        if name not in snapshot.lengths or len(kept) != len(snapshot.lengths[name]):
            raise NotWellFormed(f"the surviving positions of '{name}' are not those of its streams")
        for positions in kept:
            if positions.ndim != 1 or positions.dtype not in (np.int32, np.int64):
                raise NotWellFormed(f"surviving positions of '{name}' are not vectors of integers")
            ascending = (positions[1:] > positions[:-1]).all()
            if len(positions) and not (ascending and positions[0] >= 0 and positions[-1] < past.position):
                raise NotWellFormed(
                    f"surviving positions of '{name}' are not in ascending order from 0 to {past.position - 1}"
                )


def snapshot_of(tensors: dict[str, Tensor], meta: dict[str, str]) -> Snapshot:
    """The snapshot that a file holds, or NotWellFormed."""
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        if group not in GROUPS or not rest:
            raise NotWellFormed(f"tensor '{name[:80]}' has no place in a snapshot")
        groups[group][rest] = tensor
    past = None
    if "compacted_at" in meta:
        past = Compaction(whole_number(meta, "compacted_at"), _kept(groups["kept"], groups["kept_lengths"]))
    elif groups["kept"] or groups["kept_lengths"]:
        raise NotWellFormed("it has surviving positions, but does not say when it was compacted")
    for key in ("fingerprint", "model"):
        if key not in meta:
            raise NotWellFormed(f"its metadata has no '{key}'")
    snapshot = Snapshot(
        meta["fingerprint"],
        meta["model"],
        whole_number(meta, "position"),
        {name: vector(t, f"lengths of '{name}'").numpy() for name, t in groups["lengths"].items()},
        _by_schema(groups["entries"]),
        _by_schema(groups["state"]),
        past,
    )
    _check_form(snapshot)
    return snapshot


def _kept(kept: dict[str, Tensor], lengths: dict[str, Tensor]) -> dict[str, list[np.ndarray]]:
    """Surviving positions of each stream: one vector for all streams of a schema, split by how many each has."""
    if kept.keys() != lengths.keys():
        raise NotWellFormed("surviving positions and their counts are not for the same streams")
    found = {}
    for name in kept:
        positions = vector(kept[name], f"surviving positions of '{name}'")
        counts = vector(lengths[name], f"counts of surviving positions of '{name}'").tolist()
        if any(count < 0 for count in counts) or sum(counts) != len(positions):
            raise NotWellFormed(f"counts of surviving positions of '{name}' do not add up to {len(positions)}")
        found[name] = [part.numpy() for part in positions.split(counts)]
    return found


def vector(tensor: Tensor, what: str) -> Tensor:
    """The tensor as int64, if it is a vector of integers."""
    if tensor.ndim != 1 or tensor.dtype not in INTEGERS:
        raise NotWellFormed(f"{what} are {tensor.dtype} {list(tensor.shape)}, not a vector of integers")
    return tensor.long()


def whole_number(meta: dict[str, str], key: str) -> int:
    """A number of the metadata, or NotWellFormed."""
    text = meta.get(key, "")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise NotWellFormed(f"its metadata has {key} {text[:40]!r}, not a whole number")
    return int(text)


def _by_schema(tensors: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Names 'schema/tensor' as pairs."""
    found = {}
    for name, tensor in tensors.items():
        schema, _, part = name.rpartition("/")
        if not schema:
            raise NotWellFormed(f"tensor '{name[:80]}' does not say what it belongs to")
        found[schema, part] = tensor
    return found
