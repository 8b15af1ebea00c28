"""A saved cache on its way back into an engine: its parts, one after the other, become a request whose cache is held.

    one process       fresh pages first, then every part to its place in them: no more than a run is copied at a time
    several ranks     gathered on the host of rank 0 as a whole session, which every rank takes its part of at the end

Whatever fails, nothing of it stays. What is read and checked before is storing.py's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.convert import converted_entries
from hybridkv.cache.facts import Compaction
from hybridkv.cache.frozen import begin_frozen, fill_frozen, finish_frozen
from hybridkv.cache.manifest import PartForm, Sizes, columns_entries
from hybridkv.cache.schema import CacheSchema, StreamSchema, ceil_div
from hybridkv.cache.session import Session, check_records
from hybridkv.cache.snapshot import Snapshot, fingerprint
from hybridkv.config import SamplingParams
from hybridkv.devices import on_device
from hybridkv.engine import held
from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import EngineOwner
from hybridkv.errors import RequestError
from hybridkv.request import Request, RequestKey
from hybridkv.text.stream import TextStream


def places(s: StreamSchema, sizes: Sizes, form: PartForm, whole_pages: bool) -> tuple[np.ndarray, np.ndarray]:
    """[streams] first entry, and entries, of each stream that a part holds."""
    kept = np.array(sizes.kept.get(s.name, (0,) * s.streams), np.int64)
    if form.what.startswith("base/"):
        inside = (np.arange(s.streams) >= form.begin) & (np.arange(s.streams) < form.end)
        return np.zeros(s.streams, np.int64), np.where(inside, kept, 0)
    first, count = columns_entries(s, form.begin, form.end, whole_pages)
    return kept + first - s.entries(sizes.first(s)), np.full(s.streams, count)


class Restoring:
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
            tokens = self._checked_tokens(engine)
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

    def _checked_tokens(self, engine: Engine) -> list[int]:
        tokens = engine.check_tokens(self.session.tokens)
        if len(tokens) > engine.manager.max_tokens:
            raise RequestError(
                f"it has {len(tokens)} tokens, the context here holds {engine.manager.max_tokens}; raise max_context"
            )
        if self.session.evictions and engine.evictor is None:
            raise RequestError("its cache was evicted, and this model was opened without a budget")
        return tokens

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
                    begin, count = places(self.theirs[name], self.sizes, form, self.whole_pages)
                    lanes, total = self.theirs[name].lanes, int(count.sum())
                    specs = self.theirs[name].tensors
                    entries = {t.name: tensors[f"{name}/{t.name}"].view(lanes, total, *t.shape) for t in specs}
                    if {key: t.dtype for key, t in entries.items()} != self._dtypes(engine, name):
                        entries = converted_entries(entries, engine.manager.tables[name].pool.tensors)
                    self._put(engine, name, begin, count, entries)

        self.owner.run(fill)

    def _put(self, engine: Engine, name: str, begin: np.ndarray, count: np.ndarray, entries: dict[str, Tensor]) -> None:
        """`count` [streams] entries of each stream from `begin` on."""
        fill_frozen(engine.manager, self._key, name, begin, count, entries)

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


class RestoringOverRanks(Restoring):
    """The same on rank 0 of several: until the end the other ranks know nothing of it."""

    def begin(self, engine: Engine) -> None:
        """Checks that need the engine, and room on the host."""
        self._checked_tokens(engine)
        self.lengths = {name: self.sizes.lengths(s) for name, s in self.streams.items()}
        shapes = {
            (s.name, t.name): ((s.lanes, int(self.lengths[s.name].sum()), *t.shape), t.torch_dtype)
            for s in self.streams.values()
            for t in s.tensors
        }
        size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())
        if size > engine.cache_bytes:
            raise RequestError(
                f"its cache takes {size} bytes, and that of all ranks has {engine.cache_bytes}; give more memory"
            )
        self.entries = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in shapes.items()}

    def _put(self, engine: Engine, name: str, begin: np.ndarray, count: np.ndarray, entries: dict[str, Tensor]) -> None:
        lengths = self.lengths[name]
        first = (np.cumsum(lengths) - lengths + begin).tolist()
        for key, tensor in entries.items():
            for a, part in zip(first, tensor.split(count.tolist(), 1), strict=True):
                self.entries[name, key][:, a : a + part.shape[1]] = part

    def finish(self, engine: Engine) -> Request:
        """All ranks take their parts, or none does; from here on the request is held."""
        model, position, snapshot = engine.manager.model_fingerprint(), self.sizes.position, None
        if position:
            cache = self.lengths, self.entries, self.states, self.compaction
            snapshot = Snapshot(fingerprint(engine.schema), model, position, *cache)
        return engine.restore_held(replace(self.session, model=model, snapshot=snapshot))

    def give_back(self, engine: Engine) -> None:
        """Nothing was taken."""
