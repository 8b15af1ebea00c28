"""Snapshots: all that a request holds, taken out of the cache and brought back, in memory or through a file.

A snapshot is dense: entries of all streams one after the other, without pages. It goes into any cache whose schema
stores the same, also one with other page ids or (but for compressed entries) another page size. What is restored is
what was taken, byte for byte: entries, lengths, position, which positions survived an eviction, and state rows; last
queries only if the request had a ring for them, and then it needs one again.

    file = a safetensors file; its metadata holds format, version, schema fingerprint, position and a SHA-256 of the
           whole file with the digest's own place filled with zeros
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from hybridkv.cache.manager import Compaction, KVCacheManager
from hybridkv.cache.page_table import PageTable
from hybridkv.cache.schema import CacheSchema
from hybridkv.errors import HybridKVError, RequestError

FORMAT, VERSION = "hybridkv-snapshot", "1"
NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Snapshot:
    fingerprint: str  # of the schema it was taken from
    position: int
    lengths: dict[str, np.ndarray]  # stream schema -> [streams]
    entries: dict[tuple[str, str], Tensor]  # (stream schema, tensor) -> [lanes, all entries, *shape]
    states: dict[tuple[str, str], Tensor]  # (state schema, tensor) -> [layers, *shape]
    compaction: Compaction | None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.entries.values(), *self.states.values()))

    def save(self, path: str | Path) -> None:
        """Write a file: whole, or not at all."""
        tensors = {f"entries/{a}/{b}": t.contiguous() for (a, b), t in self.entries.items()}
        tensors |= {f"state/{a}/{b}": t.contiguous() for (a, b), t in self.states.items()}
        tensors |= {f"lengths/{name}": torch.from_numpy(n) for name, n in self.lengths.items()}
        meta = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint, "position": str(self.position)}
        if self.compaction is not None:
            meta["compacted_at"] = str(self.compaction.position)
            for name, kept in self.compaction.kept.items():
                tensors[f"kept/{name}"] = torch.from_numpy(np.concatenate(kept))
                tensors[f"kept_lengths/{name}"] = torch.tensor([len(each) for each in kept])
        data = safetensors.torch.save(tensors, meta | {"sha256": NO_DIGEST})
        digest = hashlib.sha256(data).hexdigest()
        _write_whole(Path(path), data.replace(NO_DIGEST.encode(), digest.encode(), 1))

    @staticmethod
    def load(path: str | Path) -> Snapshot:
        """Read a file back; one that is truncated, altered or of another format is refused."""
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as problem:
            raise HybridKVError(f"snapshot {path.name} cannot be read: {problem.strerror}") from None
        meta = _metadata(data, path.name)
        if meta.get("format") != FORMAT or meta.get("version") != VERSION:
            raise HybridKVError(f"{path.name} is not a snapshot of version {VERSION}")
        digest = meta.get("sha256", "")
        plain = data.replace(digest.encode(), NO_DIGEST.encode(), 1)
        if len(digest) != 64 or hashlib.sha256(plain).hexdigest() != digest:
            raise HybridKVError(f"snapshot {path.name} is damaged: its checksum does not agree; take it again")
        try:
            return _from_tensors(safetensors.torch.load(data), meta)
        except (SafetensorError, KeyError, ValueError) as problem:
            raise HybridKVError(f"snapshot {path.name} is not well-formed: {problem}") from None


def snapshot_request(manager: KVCacheManager, request: Hashable) -> Snapshot:
    """Everything the request holds, copied to the host. The request goes on unchanged."""
    slot = manager.slot_of.get(request)
    if slot is None:
        raise RequestError(f"request {request!r} is not resident; it was released or never admitted")
    manager.check_settled(slot)
    manager.check_shareable(int(manager.positions[slot]))
    entries, lengths = {}, {}
    for name, table in manager.tables.items():
        lengths[name] = table.lengths[slot].copy()
        at = _places(table, table.pages[slot], lengths[name]).to(manager.device)
        for key, pool in table.pool.tensors.items():
            flat = pool.view(pool.shape[0], -1, *pool.shape[3:])
            entries[name, key] = flat[:, at].cpu()
    ring = manager.query_buffers.whole(slot, max(0, int(manager.positions[slot]) - (manager.schema.query_window or 0)))
    states = {key: t.cpu() for key, t in manager.state.snapshot(slot, ring).items()}
    return Snapshot(
        fingerprint(manager.schema),
        int(manager.positions[slot]),
        lengths,
        entries,
        states,
        manager.compactions.get(slot),
    )


def restore_request(manager: KVCacheManager, snapshot: Snapshot, request: Hashable) -> int:
    """Bring a snapshot back as a request; returns its slot. Without pages for all of it nothing changes."""
    _check(manager, snapshot)
    need = {name: _pages(table, snapshot.lengths[name]) for name, table in manager.tables.items()}
    for name, table in manager.tables.items():
        table.allocator.require(int(need[name].sum()))
    slot = manager.admit_request(request)
    try:
        manager.query_buffers.drop(slot)
        if lent_keys(manager) & snapshot.states.keys():
            manager.query_buffers.require(slot, 0)
        for name, table in manager.tables.items():
            table.take(slot, need[name], np.zeros(len(need[name]), bool))
            at = _places(table, table.pages[slot], snapshot.lengths[name]).to(manager.device)
            for key, pool in table.pool.tensors.items():
                flat = pool.view(pool.shape[0], -1, *pool.shape[3:])
                flat[:, at] = snapshot.entries[name, key].to(manager.device)
            table.lengths[slot] = snapshot.lengths[name]
        manager.state.restore(slot, snapshot.states, int(manager.query_buffers.of[slot]))
        manager.positions[slot] = snapshot.position
        manager.reached[slot] = snapshot.position + manager.schema.rewind  # what lies before it cannot come back
        if snapshot.compaction is not None:
            manager.compactions[slot] = snapshot.compaction
    except BaseException:
        manager.release_request(request)
        raise
    return slot


def lent_keys(manager: KVCacheManager) -> set[tuple[str, str]]:
    """Names of the state that a request has only while it has a ring."""
    return {(s.name, t.name) for s in manager.schema.states if s.lent for t in s.tensors}


def fingerprint(schema: CacheSchema) -> str:
    """What a schema stores, in 64 characters. Page sizes are no part of it, unless entries are laid out by pages."""
    formats = [[c.kind, c.entries.name, c.index and c.index.name] for c in schema.compressed]
    pages = [s.entries_per_page for s in schema.streams] if formats else []
    streams = [
        [s.name, s.layers, s.heads, s.shared, s.tokens_per_entry, [[t.name, t.shape, str(t.dtype)] for t in s.tensors]]
        for s in schema.streams
    ]
    states = [[s.name, s.layers, [[t.name, t.shape, str(t.dtype)] for t in s.tensors]] for s in schema.states]
    return hashlib.sha256(json.dumps([streams, states, formats, pages]).encode()).hexdigest()


def _pages(table: PageTable, lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // table.schema.entries_per_page)


def _places(table: PageTable, rows: np.ndarray, lengths: np.ndarray) -> Tensor:
    """Flat pool numbers of all entries, stream after stream."""
    parts = [table.flat(row, np.arange(n)) for row, n in zip(rows, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(parts))


def _check(manager: KVCacheManager, snapshot: Snapshot) -> None:
    """Refuse what does not belong into this cache, before anything is taken."""
    if snapshot.fingerprint != fingerprint(manager.schema):
        raise RequestError(
            "the snapshot was taken from a cache that stores other things (another model, KV dtype or eviction window)"
        )
    manager.check_shareable(snapshot.position)
    if not 0 <= snapshot.position <= manager.max_tokens:
        raise RequestError(
            f"the snapshot is at position {snapshot.position}, the context holds {manager.max_tokens} tokens"
        )
    past = snapshot.compaction
    for name, table in manager.tables.items():
        s, found = table.schema, snapshot.lengths.get(name)
        want = np.full(s.streams, s.entries(snapshot.position))
        if past is not None and name in past.kept:
            kept = past.kept[name]
            good = len(kept) == s.streams and 0 <= past.position <= snapshot.position
            if not good or any((np.diff(k, prepend=-1) <= 0).any() or (k >= past.position).any() for k in kept):
                raise RequestError(f"the snapshot's list of surviving entries in '{name}' is not well-formed")
            want = np.array([len(k) for k in kept]) + snapshot.position - past.position
        if found is None or not np.array_equal(found, want):
            raise RequestError(f"the snapshot's lengths in '{name}' do not agree with its position")
        for t in s.tensors:
            tensor = snapshot.entries.get((name, t.name))
            shape = (s.lanes, int(found.sum()), *t.shape)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != t.dtype:
                raise RequestError(f"the snapshot's tensor '{t.name}' of '{name}' is not {shape} {t.dtype}")
    lent = lent_keys(manager)
    for key, t in manager.state.tensors.items():
        if key in lent and not lent & snapshot.states.keys():
            continue  # its last queries were no longer needed
        tensor = snapshot.states.get(key)
        if tensor is None or tensor.shape != (t.shape[0], *t.shape[2:]) or tensor.dtype != t.dtype:
            raise RequestError(f"the snapshot's state {key} does not fit this cache")


def _metadata(data: bytes, name: str) -> dict[str, str]:
    """The metadata of a safetensors file: eight bytes of header length, then JSON."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise HybridKVError(f"{name} is not a snapshot, or it is truncated")
    try:
        meta = json.loads(data[8 : 8 + size])["__metadata__"]
        return {str(key): str(value) for key, value in meta.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise HybridKVError(f"{name} is not a snapshot, or its header is damaged") from None


def _from_tensors(tensors: dict[str, Tensor], meta: dict[str, str]) -> Snapshot:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        groups.setdefault(group, {})[rest] = tensor

    def pairs(group: str) -> dict[tuple[str, str], Tensor]:
        return {(a, b): t for name, t in groups.get(group, {}).items() for a, _, b in [name.rpartition("/")]}

    past = None
    if "compacted_at" in meta:
        counts = {name: n.tolist() for name, n in groups.get("kept_lengths", {}).items()}
        kept = {name: [k.numpy() for k in groups["kept"][name].split(n)] for name, n in counts.items()}
        past = Compaction(int(meta["compacted_at"]), kept)
    lengths = {name: t.numpy() for name, t in groups.get("lengths", {}).items()}
    return Snapshot(meta["fingerprint"], int(meta["position"]), lengths, pairs("entries"), pairs("state"), past)


def _write_whole(path: Path, data: bytes) -> None:
    """A temporary file beside the target, then one rename: readers see the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
