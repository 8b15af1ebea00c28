"""A finished request between an engine and a store: saved with its cache, and brought back.

Files are read, hashed and written by the caller's thread and by others; the engine's own thread only reads or writes a
run of entries at a time, between two steps. While a cache is saved, a second owner holds its pages.

    save   engine: the request in words, its state, a second owner of its pages | run by run: entries -> part
    load   manifest, then small parts, all checked | engine: fresh pages | part -> its entries, in order | state, held

Over several ranks what is saved is the cache of all heads, in the same files. It is copied to the host of rank 0 at
once, as a session is, and its runs are read from that; it comes back the same way (restoring.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.convert import Key, check_key, check_schema
from hybridkv.cache.facts import Compaction
from hybridkv.cache.frozen import lend_pages
from hybridkv.cache.holding import Holding, holding
from hybridkv.cache.manifest import (
    Manifest,
    PartForm,
    Sizes,
    chains,
    parts_of,
    run_tokens,
    schema_of,
    schema_words,
)
from hybridkv.cache.schema import CacheSchema, StreamSchema
from hybridkv.cache.session import (
    Session,
    eviction_records,
    plain_json,
    record_tensors,
    request_words,
    session_of_words,
)
from hybridkv.cache.snapshot import Snapshot
from hybridkv.cache.snapshot_file import NotWellFormed
from hybridkv.cache.store import Store
from hybridkv.devices import on_device
from hybridkv.engine import held
from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import EngineOwner
from hybridkv.engine.rank_calls import NOT_OVER_RANKS
from hybridkv.engine.restoring import Restoring, RestoringOverRanks, places
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.request import Request, RequestKey

SMALL = ("tokens", "kept", "records")  # parts that are read and checked before memory is taken
LENT = -2  # the number of a key under which pages are lent


@dataclass(frozen=True)
class _Lent:
    """A request that is being saved."""

    session: Session
    key: RequestKey | None  # of the second owner of its pages; None: it has no cache, or a copy was made
    holding: Holding | Snapshot | None
    states: Mapping[tuple[str, str], Tensor]


# ---- saving


def save_request(
    owner: EngineOwner,
    store: Store,
    name: str,
    request: Request | None,
    conversation: Mapping[str, Any],
    key: Key,
    converted: tuple[str, ...] = (),
) -> int:
    """Save a finished request with its cache, if that is held; returns the bytes that were new on the disk.

    None: nothing was said yet. The request must not go on meanwhile.
    """
    words = plain_json(dict(conversation))
    schema, in_parts = owner.run(_schema)
    lent = _copied(owner, request, words) if in_parts else owner.run(lambda engine: _lend(engine, request, words))
    try:
        session = lent.session
        sizes = _sizes(schema, lent)
        about, now = dict(session.about), time.time()
        manifest = Manifest(
            dict(key), schema_words(schema), sizes, (), request_words(session), words, about, now, converted
        )
        return store.save(name, manifest, _parts(owner, schema, sizes, lent))
    finally:
        if lent.key is not None:
            owner.run(lambda engine: _take_back(engine, lent.key))


def _schema(engine: Engine) -> tuple[CacheSchema, bool]:
    """What all of the cache stores, and whether it lies on several ranks. RequestError: so it goes to no folder."""
    if engine.in_parts and engine.schema.compressed:  # a session has no whole pages of it
        raise RequestError(NOT_OVER_RANKS.format(what="a folder of saved caches of compressed entries"))
    return engine.schema, engine.in_parts


def _lend(engine: Engine, request: Request | None, words: dict[str, Any]) -> _Lent:
    with engine.changing():
        session = held.session_of(engine, request, words, cache=False)
        if request is None or request not in engine.scheduler.held or not engine.manager.position(request.key):
            return _Lent(session, None, None, {})
        key = RequestKey(LENT)
        states = holding(engine.manager, request.key).states()
        engine.scheduler.lent.add(key)
        lend_pages(engine.manager, request.key, key)
        return _Lent(session, key, holding(engine.manager, key), states)


def _copied(owner: EngineOwner, request: Request | None, words: dict[str, Any]) -> _Lent:
    """The request with the cache of all ranks on the host, which nothing has to be lent for."""
    session = owner.session(request, words)
    return _Lent(session, None, session.snapshot, {} if session.snapshot is None else session.snapshot.states)


def _take_back(engine: Engine, key: RequestKey) -> None:
    with engine.changing():
        engine.manager.release_request(key)
        engine.scheduler.lent.discard(key)


def _sizes(schema: CacheSchema, lent: _Lent) -> Sizes:
    tokens, run = len(lent.session.tokens), run_tokens(schema)
    if lent.holding is None:
        return Sizes(0, tokens, run)
    past = lent.holding.compaction
    kept = {} if past is None else {name: tuple(len(each) for each in lists) for name, lists in past.kept.items()}
    queries = any((s.name, t.name) in lent.states for s in schema.states if s.lent for t in s.tensors)
    return Sizes(lent.holding.position, tokens, run, past.position if past is not None else 0, kept, queries)


def _parts(
    owner: EngineOwner, schema: CacheSchema, sizes: Sizes, lent: _Lent
) -> Iterator[tuple[PartForm, Mapping[str, Tensor], str]]:
    tokens = np.array(lent.session.tokens, np.int32)
    streams = {s.name: s for s in schema.streams}
    forms = list(parts_of(schema, sizes))
    ends = [form.end for form in forms if form.what == "columns"]
    chain = dict(zip(ends, chains(tokens, sorted(ends)), strict=True)) if ends == sorted(set(ends)) else {}
    for form in forms:
        if form.what == "tokens":
            yield form, {"tokens": torch.from_numpy(tokens)}, ""
        elif form.what in ("state", "queries"):
            yield form, {t.name: _layers(lent.states, t.name) for t in form.tensors}, ""
        else:
            assert lent.holding is not None
            if form.what == "kept":
                [tensor] = form.tensors
                kept = lent.holding.compaction.kept[tensor.name.partition("/")[0]]  # type: ignore[union-attr]
                yield form, {tensor.name: torch.from_numpy(np.concatenate(kept).astype(np.int64))}, ""
            else:
                read = _reader(lent.holding, streams, sizes, form, bool(schema.compressed))
                yield form, owner.run(read), chain.get(form.end, "") if form.what == "columns" else ""
    if lent.session.evictions and lent.holding is not None:
        yield PartForm("records", 0, 0, ()), record_tensors(lent.session.evictions), ""


def _layers(states: Mapping[tuple[str, str], Tensor], name: str) -> Tensor:
    """Layers [a, b) of a state tensor, by the name that it has in a part: schema/tensor/a:b."""
    schema, tensor, layers = name.split("/")
    a, _, b = layers.partition(":")
    return states[schema, tensor][int(a) : int(b)]


def _reader(
    found: Holding | Snapshot, streams: Mapping[str, StreamSchema], sizes: Sizes, form: PartForm, whole_pages: bool
) -> Callable[[Engine], dict[str, Tensor]]:
    """What the engine's thread does to read the tensors of one part."""
    names = {t.name.partition("/")[0] for t in form.tensors}
    shapes = {t.name: t.shape for t in form.tensors}

    def read(engine: Engine) -> dict[str, Tensor]:
        tensors = {}
        with on_device(engine.manager.device):
            for name in sorted(names):
                begin, count = places(streams[name], sizes, form, whole_pages)
                for key, tensor in found.read(name, begin, count).items():
                    tensors[f"{name}/{key}"] = tensor.view(shapes[f"{name}/{key}"])
        return tensors

    return read


# ---- bringing back


def load_request(
    owner: EngineOwner, store: Store, name: str, key: Key, convert: bool = False
) -> tuple[Request | None, Manifest, tuple[str, ...]]:
    """The request that was saved under a name, finished, its cache held; None: nothing was said in it. Also what was
    saved beside it, and what has been converted, in words.

    Everything that can be checked is checked before memory is taken. Whatever is wrong, nothing of it stays.
    """
    manifest = store.manifest(name)
    with _naming(name):
        converted = (*manifest.converted, *check_key(manifest.key, key, convert))
        ours, in_parts = owner.run(_schema)
        schema = schema_of(manifest.schema, ours)
        if manifest.sizes.position:
            check_schema(schema, ours, convert)
        parts = manifest.check_parts(schema)
        store.check_sizes(name, manifest)
        read: dict[str, dict[str, Tensor]] = {what: {} for what in SMALL}
        store.read(name, [p for p in parts if p[0].what in SMALL], lambda f, p, t: read[f.what].update(t))
        session = _session(manifest, read)
        if not session.tokens:
            return None, manifest, converted
        _check_chains(manifest, session)
        kind = RestoringOverRanks if in_parts else Restoring
        restoring = kind(owner, manifest.sizes, schema, ours, session, _compaction(manifest.sizes, read["kept"]))
        try:
            owner.run(restoring.begin)
            store.read(name, [p for p in parts if p[0].what not in SMALL], lambda f, p, t: restoring.take(f, t))
            request = owner.run(restoring.finish)
        except BaseException:
            owner.run(restoring.give_back)
            raise
    return request, manifest, converted


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors say which saved cache they are of."""
    begin = f"saved cache {name!r}"
    try:
        yield
    except NotWellFormed as problem:
        raise HybridKVError(f"{begin} is not well-formed: {problem}") from None
    except HybridKVError as problem:
        if str(problem).startswith(begin):
            raise
        kind = RequestError if isinstance(problem, RequestError) else HybridKVError
        raise kind(f"{begin}: {problem}") from None


def _session(manifest: Manifest, read: dict[str, dict[str, Tensor]]) -> Session:
    """The request in a manifest and its parts, or NotWellFormed."""
    tokens = read["tokens"]["tokens"].tolist()
    records = eviction_records(read["records"], len(tokens))
    if records and not manifest.sizes.position:
        raise NotWellFormed("it has records of evictions, and no cache")
    return session_of_words(manifest.request, tokens, records, manifest.conversation, manifest.about)


def _check_chains(manifest: Manifest, session: Session) -> None:
    """Whether its columns are those of its tokens."""
    listed = [part for part in manifest.parts if part.what == "columns" and part.chain]
    ends = [part.end for part in listed]
    if ends != sorted(set(ends)) or chains(np.array(session.tokens, np.int32), ends) != [p.chain for p in listed]:
        raise NotWellFormed("its columns are not those of its tokens")


def _compaction(sizes: Sizes, kept: dict[str, Tensor]) -> Compaction | None:
    """Which positions survived, or NotWellFormed."""
    if not sizes.compacted_at:
        return None
    found = {}
    for name, counts in sizes.kept.items():
        lists = [part.numpy() for part in kept[f"{name}/kept"].split(list(counts))]
        for positions in lists:
            falls = (positions[1:] <= positions[:-1]).any()
            if len(positions) and (falls or positions[0] < 0 or positions[-1] >= sizes.compacted_at):
                raise NotWellFormed(f"surviving positions of '{name}' do not ascend from 0 to {sizes.compacted_at - 1}")
        found[name] = lists
    return Compaction(sizes.compacted_at, found)
