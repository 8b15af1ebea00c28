"""A finished request between an engine and a store: saved with its cache, and brought back.

Files are read, hashed and written by the caller's thread and by others; the engine's own thread only reads or writes a
run of entries at a time, between two steps. While a cache is saved, a second owner holds its pages.

    save   engine: the request in words, its state, a second owner of its pages | run by run: entries -> part
    load   manifest, then small parts, all checked | engine: fresh pages | part -> its entries, in order | state, held
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

from hybridkv.cache.convert import Key, check_key, check_schema, converted_entries
from hybridkv.cache.facts import Compaction
from hybridkv.cache.frozen import begin_frozen, fill_frozen, finish_frozen, lend_pages
from hybridkv.cache.holding import Holding, holding
from hybridkv.cache.manifest import (
    Manifest,
    PartForm,
    Sizes,
    chains,
    columns_entries,
    parts_of,
    run_tokens,
    schema_of,
    schema_words,
)
from hybridkv.cache.schema import CacheSchema, StreamSchema, ceil_div
from hybridkv.cache.session import (
    Session,
    check_records,
    eviction_records,
    plain_json,
    record_tensors,
    request_words,
    session_of_words,
)
from hybridkv.cache.snapshot_file import NotWellFormed
from hybridkv.cache.store import Store
from hybridkv.config import SamplingParams
from hybridkv.devices import on_device
from hybridkv.engine import held
from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import EngineOwner
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.request import Request, RequestKey
from hybridkv.text.stream import TextStream

SMALL = ("tokens", "kept", "records")  # parts that are read and checked before memory is taken
LENT = -2  # the number of a key under which pages are lent


@dataclass(frozen=True)
class _Lent:
    """A request that is being saved."""

    session: Session
    key: RequestKey | None  # of the second owner of its pages; None: it has no cache
    holding: Holding | None
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
    lent = owner.run(lambda engine: _lend(engine, request, words))
    try:
        schema, session = owner.run(lambda engine: engine.manager.schema), lent.session
        sizes = _sizes(schema, lent)
        about, now = dict(session.about), time.time()
        manifest = Manifest(
            dict(key), schema_words(schema), sizes, (), request_words(session), words, about, now, converted
        )
        return store.save(name, manifest, _parts(owner, schema, sizes, lent))
    finally:
        if lent.key is not None:
            owner.run(lambda engine: _take_back(engine, lent.key))


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
    found: Holding, streams: Mapping[str, StreamSchema], sizes: Sizes, form: PartForm, whole_pages: bool
) -> Callable[[Engine], dict[str, Tensor]]:
    """What the engine's thread does to read the tensors of one part."""
    names = {t.name.partition("/")[0] for t in form.tensors}
    shapes = {t.name: t.shape for t in form.tensors}

    def read(engine: Engine) -> dict[str, Tensor]:
        tensors = {}
        with on_device(engine.manager.device):
            for name in sorted(names):
                begin, count = _places(streams[name], sizes, form, whole_pages)
                for key, tensor in found.read(name, begin, count).items():
                    tensors[f"{name}/{key}"] = tensor.view(shapes[f"{name}/{key}"])
        return tensors

    return read


def _places(s: StreamSchema, sizes: Sizes, form: PartForm, whole_pages: bool) -> tuple[np.ndarray, np.ndarray]:
    """[streams] first entry, and entries, of each stream that a part holds."""
    kept = np.array(sizes.kept.get(s.name, (0,) * s.streams), np.int64)
    if form.what.startswith("base/"):
        inside = (np.arange(s.streams) >= form.begin) & (np.arange(s.streams) < form.end)
        return np.zeros(s.streams, np.int64), np.where(inside, kept, 0)
    first, count = columns_entries(s, form.begin, form.end, whole_pages)
    return kept + first - s.entries(sizes.first(s)), np.full(s.streams, count)


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
        ours = owner.run(lambda engine: engine.manager.schema)
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
        restoring = _Restoring(owner, manifest.sizes, schema, ours, session, _compaction(manifest.sizes, read["kept"]))
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


class _Restoring:
    """A saved request on its way into an engine. All but `take` runs on the engine's thread."""

    def __init__(
        self,
        owner: EngineOwner,
        sizes: Sizes,
        theirs: CacheSchema,
        ours: CacheSchema,
        session: Session,
        compaction: Compaction | None,
    ) -> None:
        self.owner, self.sizes, self.session, self.compaction = owner, sizes, session, compaction
        self.streams = {s.name: s for s in ours.streams}
        self.specs = {(s.name, t.name): (s, t) for s in ours.states for t in s.tensors}
        self.theirs = {s.name: s for s in theirs.streams}
        self.whole_pages = bool(ours.compressed)
        self.states: dict[tuple[str, str], Tensor] = {}
        self.request: Request | None = None

    def begin(self, engine: Engine) -> None:
        """Checks that need the engine, room, and fresh pages."""
        with engine.changing():
            manager, sizes, session = engine.manager, self.sizes, self.session
            tokens = engine.check_tokens(session.tokens)
            if len(tokens) > manager.max_tokens:
                raise RequestError(
                    f"it has {len(tokens)} tokens, the context here holds {manager.max_tokens}; raise max_context"
                )
            if session.evictions and engine.evictor is None:
                raise RequestError("its cache was evicted, and this model was opened without a budget")
            request = held.ended_request(engine, tokens, session.prompt_tokens, session.finish_reason, SamplingParams())
            request.text = TextStream.ended(session.text, session.stopped)
            self.request = request
            if not sizes.position:
                return
            check_records(manager, session, sizes.position, self.compaction)
            request.evictions, request.policy = dict(session.evictions), session.policy
            lengths = {name: sizes.lengths(s) for name, s in self.streams.items()}
            need = {n: int(ceil_div(lengths[n], s.entries_per_page).sum()) for n, s in self.streams.items()}
            held.make_room(engine, need, self._state_bytes())
            engine.scheduler.lent.add(request.key)
            begin_frozen(manager, request.key, sizes.position, lengths, self.compaction)

    def _state_bytes(self) -> int:
        return sum(len(s.layers) * t.nbytes for s, t in self.specs.values() if self.sizes.queries or not s.lent)

    def take(self, form: PartForm, tensors: dict[str, Tensor]) -> None:
        """One part: entries go to their places, state is kept until the end."""
        if form.what in ("state", "queries"):
            for name, tensor in tensors.items():
                self._take_state(name, tensor)
            return

        def fill(engine: Engine) -> None:
            with on_device(engine.manager.device):
                for name in sorted({key.partition("/")[0] for key in tensors}):
                    begin, count = _places(self.theirs[name], self.sizes, form, self.whole_pages)
                    lanes, total = self.theirs[name].lanes, int(count.sum())
                    specs = self.theirs[name].tensors
                    entries = {t.name: tensors[f"{name}/{t.name}"].view(lanes, total, *t.shape) for t in specs}
                    if {key: t.dtype for key, t in entries.items()} != self._dtypes(engine, name):
                        entries = converted_entries(entries, engine.manager.tables[name].pool.tensors)
                    fill_frozen(engine.manager, self._key, name, begin, count, entries)

        self.owner.run(fill)

    @property
    def _key(self) -> RequestKey:
        assert self.request is not None
        return self.request.key

    def _dtypes(self, engine: Engine, name: str) -> dict[str, torch.dtype]:
        return {key: pool.dtype for key, pool in engine.manager.tables[name].pool.tensors.items()}

    def _take_state(self, name: str, tensor: Tensor) -> None:
        schema, part, layers = name.split("/")
        if (schema, part) not in self.specs:  # last queries, which this cache does not keep
            return
        home, spec = self.specs[schema, part]
        finite = tensor.isfinite() if np.isfinite(spec.init) else ~tensor.isnan()
        if tensor.is_floating_point() and not bool(finite.all()):
            raise RequestError(f"its state {schema}/{part} holds numbers that are not finite")
        a, _, b = layers.partition(":")
        whole = self.states.get((schema, part))
        if whole is None:
            whole = self.states[schema, part] = torch.empty((len(home.layers), *spec.shape), dtype=spec.torch_dtype)
        whole[int(a) : int(b)] = tensor  # rounded once, where the dtype is another

    def finish(self, engine: Engine) -> Request:
        """The state; from here on the request is held."""
        assert self.request is not None
        with engine.changing():
            if self.sizes.position:
                finish_frozen(engine.manager, self._key, self.states)
                engine.scheduler.held.append(self.request)
                engine.scheduler.lent.discard(self._key)
        return self.request

    def give_back(self, engine: Engine) -> None:
        """It failed: nothing of it stays."""
        with engine.changing():
            if self.request is not None and self.request not in engine.scheduler.held:
                engine.scheduler.lent.discard(self._key)
                if self._key in engine.manager.frozen:
                    engine.manager.release_request(self._key)
