"""Session: a finished request that a next turn can go on with, taken out of an engine and brought into another.

    request        tokens, how many of them were the prompt, how the answer ended, and its text
    cache          a Snapshot; None where the cache was given up: then the next turn computes all of it again
    evictions      what each eviction kept, so that a turn that is preempted later is computed again as it was
    conversation   plain JSON values of whoever talks: messages, tools, settings. Nothing in it is ever run
    going          only of an answer that is not at its end: what it takes to go on with it (engine/moving.py)

    file = a snapshot's file of version 3. Its metadata has three JSON objects more: session (the request),
           conversation, and about (model and cache in words, for errors). It has more tensors: session/tokens [T],
           evicted_lengths/POSITION [layers, G] and evicted/POSITION/FORM [n] (eviction_record.py); and a text, files,
           where the model is known by its files
    buffers = the same without a file, to be sent (buffers.py)

Loading checks the file by itself, and takes no more memory than a few times its size. What must hold of it in one cache
is checked by `check_session`, before anything is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.buffers import Buffers, pack, unpack
from hybridkv.cache.facts import Compaction
from hybridkv.cache.manager import KVCacheManager
from hybridkv.cache.schema import CacheSchema, TensorSpec
from hybridkv.cache.snapshot import Snapshot, check_restorable, snapshot_of, stores_the_same, vector, without_session
from hybridkv.cache.snapshot_file import FORMAT, SESSION_VERSION, NotWellFormed, read_file, write_file
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction_record import EvictionRecord
from hybridkv.kernels.formats.kv_format import pool_format

ENDS = ("stop", "length", "abort")  # finish reasons after which there is a next turn
RECORD_BYTES = 1 << 30  # room for eviction records, tokens and texts beside the cache when a file is read


@dataclass(frozen=True)
class Session:
    """A finished request, with its cache where that was kept; or one that was taken out in the middle of its answer."""

    model: str  # fingerprint of the model; "" if it was not known
    about: dict[str, str]  # model and cache in words, to say what differs where they do
    tokens: list[int] = field(default_factory=list)  # prompt, then answer; none: nothing was said yet
    prompt_tokens: int = 0
    finish_reason: str = "stop"
    text: str = ""  # of the answer
    stopped: str | None = None  # the stop string that ended it
    evictions: dict[int, EvictionRecord] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    conversation: dict[str, Any] = field(default_factory=dict)  # plain JSON values
    policy: str | None = None  # by which it was evicted last
    going: dict[str, Any] | None = None  # plain JSON values: how it goes on; None: it has ended
    files: str = ""  # the model's name by its files, the same over any number of ranks; "" if it is not known

    @property
    def nbytes(self) -> int:
        """Bytes of the cache in it."""
        return self.snapshot.nbytes if self.snapshot is not None else 0

    def save(self, path: str | Path) -> None:
        """Write a file: whole, or not at all. It needs no engine, so any thread may do it."""
        tensors, meta = self.contents()
        write_file(Path(path), tensors, {"format": FORMAT, "version": SESSION_VERSION} | meta, "session")

    def contents(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and metadata of a file that holds it."""
        meta = {"model": self.model, "session": _json(request_words(self))}
        meta |= {"conversation": _json(self.conversation), "about": _json(self.about)}
        if self.going is not None:
            meta["going"] = _json(self.going)
        if self.files:
            meta["files"] = self.files
        tensors: dict[str, Tensor] = {"session/tokens": torch.tensor(self.tokens, dtype=torch.int32)}
        tensors |= record_tensors(self.evictions)
        if self.snapshot is not None:
            cache, of_cache = self.snapshot.contents()
            tensors, meta = cache | tensors, of_cache | meta
        return tensors, meta

    def to_buffers(self) -> Buffers:
        """A head and bytes, to be sent. Of the cache nothing is copied: the bytes are the session's own."""
        return pack("session", *self.contents())

    @staticmethod
    def from_buffers(
        buffers: Buffers, check: Callable[[str, dict[str, str], str], None] | None = None, room: int | None = None
    ) -> Session:
        """What was sent, on the same memory; what is damaged, truncated, foreign or of a newer version is refused.

        `check` and `room` as in `load`.
        """

        def check_meta(meta: dict[str, str]) -> None:
            if check is not None:
                check(meta.get("model", ""), _about(meta), meta.get("files", ""))

        try:
            return _session(*unpack(buffers, "session", check_meta, room))
        except NotWellFormed as problem:
            raise HybridKVError(f"the buffers are not well-formed: {problem}") from None

    @staticmethod
    def load(
        path: str | Path, check: Callable[[str, dict[str, str], str], None] | None = None, room: int | None = None
    ) -> Session:
        """Read a file back; one that is truncated, altered, badly formed or of another format is refused.

        `check(model, about, files)` may refuse a file by the model it is of, and `room` limits its bytes, before it is
        read.
        """
        path = Path(path)

        def check_header(meta: dict[str, str]) -> None:
            if meta["version"] != SESSION_VERSION:
                raise HybridKVError(f"{path.name} is a snapshot of a cache alone, without its request: not a session")
            if check is not None:
                try:
                    check(meta.get("model", ""), _about(meta), meta.get("files", ""))
                except NotWellFormed as problem:
                    raise HybridKVError(f"session {path.name} is not well-formed: {problem}") from None

        tensors, meta = read_file(path, check_header, "session", room)
        try:
            return _session(tensors, meta)
        except NotWellFormed as problem:
            raise HybridKVError(f"session {path.name} is not well-formed: {problem}") from None


def request_words(session: Session) -> dict[str, Any]:
    """What is saved of a request beside its tokens, in plain JSON values."""
    names = ("prompt_tokens", "finish_reason", "text", "stopped", "policy")
    return {name: getattr(session, name) for name in names}


def record_tensors(evictions: Mapping[int, EvictionRecord]) -> dict[str, Tensor]:
    """Records of evictions as tensors of a file."""
    tensors: dict[str, Tensor] = {}
    for at, record in evictions.items():
        lengths, form, data = record.packed()
        tensors[f"evicted_lengths/{at}"] = torch.from_numpy(lengths.astype(np.int64))
        tensors[f"evicted/{at}/{form}"] = torch.from_numpy(data if form == "mask" else _signed(data))
    return tensors


def check_model(
    manager: KVCacheManager, about: dict[str, str], model: str, its: dict[str, str], files: str = ""
) -> None:
    """Whether a session was computed by this model, or RequestError: what differs.

    `about`: this model and cache in words; `model`, `its` and `files`: fingerprint, words and name by files of the
    session's. A fingerprint is that of one number of ranks; over another number the files say that it is the model.
    """
    here = manager.model_fingerprint()
    if model == here:
        return
    ours = manager.model_files()
    if files and ours:
        if files == ours:
            return
        its, about = ({key: said for key, said in each.items() if key != "ranks"} for each in (its, about))
    weights = f"other weights (fingerprint {_shown(model[:12] or '-')} there and {here[:12] or '-'} here)"
    raise RequestError(
        f"the session was saved with another model: {_different(its, about) or weights}; open the model that it "
        "was saved with, in the same form"
    )


def as_own(manager: KVCacheManager, session: Session) -> Session:
    """A session of this model (`check_model`) by the fingerprint that it has here, as if it had been saved here."""
    here, snapshot = manager.model_fingerprint(), session.snapshot
    if snapshot is not None and snapshot.model == session.model:
        snapshot = replace(snapshot, model=here)
    return replace(session, model=here, snapshot=snapshot)


def _different(its: dict[str, str], about: dict[str, str]) -> str:
    """What of a session's words and ours is not the same; "": nothing."""
    keys = [key for key in dict.fromkeys([*about, *its]) if its.get(key) != about.get(key)]
    words = [f"{_shown(key)} {_shown(its.get(key, 'none'))} there and {about.get(key, 'none')} here" for key in keys]
    return "; ".join(words[:4])


def check_session(manager: KVCacheManager, session: Session, about: dict[str, str]) -> Session:
    """The session as this model's own, if it can go on in this cache, but for room, or RequestError. Takes nothing."""
    check_model(manager, about, session.model, session.about, session.files)
    session = as_own(manager, session)
    if not session.tokens:
        raise RequestError("the session holds no request: nothing was said in it yet")
    if len(session.tokens) > manager.max_tokens:
        raise RequestError(
            f"the session has {len(session.tokens)} tokens, the context here holds {manager.max_tokens}; raise "
            "max_context"
        )
    snapshot = session.snapshot
    if snapshot is None:
        return session
    if not stores_the_same(manager, snapshot):
        what = _different(session.about, about) or "other layers or sizes"
        raise RequestError(
            f"the session's cache stores other things than this one: {what}; open the model with the CacheConfig that "
            "it was saved with"
        )
    check_restorable(manager, snapshot)
    if not 0 < snapshot.position <= len(session.tokens):
        raise RequestError(
            f"the session's cache is at position {snapshot.position}, and its request has {len(session.tokens)} tokens"
        )
    check_records(manager, session, snapshot.position, snapshot.compaction)
    return session


def check_records(manager: KVCacheManager, session: Session, position: int, past: Compaction | None) -> None:
    """Whether the records, one after the other, lead to as many entries of each stream as the cache holds."""
    name = next(iter(past.kept if past is not None else manager.tables), None)
    at, counts = 0, None  # the last eviction before the cache's position, and what it left
    if session.evictions and name is not None:
        schema = manager.tables[name].schema
        held, before = np.zeros((len(schema.layers), schema.streams // len(schema.layers)), np.int64), 0
        for here, record in session.evictions.items():
            if record.lengths.shape != held.shape or (record.lengths != held + here - before).any():
                raise RequestError(f"the session's record of the eviction at {here} does not fit what was held then")
            held, before = record.counts(), here
            if here <= position:
                at, counts = here, held
    kept = [len(each) for each in past.kept[name]] if past is not None and name is not None else None
    if kept != (counts.ravel().tolist() if counts is not None else None) or (past.position if past else 0) != at:
        raise RequestError("the session's records of evictions do not lead to what its cache holds")


def about_cache(manager: KVCacheManager, schema: CacheSchema) -> dict[str, str]:
    """What a cache stores, in words. `schema`: of all of it, where the manager's is one rank's part."""
    found = {}
    for stream in schema.streams:
        form = pool_format(manager.tables[stream.name].pool.tensors)
        layers = f"{len(stream.layers)} layers of {stream.heads} heads"
        found[stream.name] = f"{layers} in {form.name}" if form is not None else f"{layers}, {_tensors(stream.tensors)}"
    for s in schema.states:
        found[s.name] = f"{len(s.layers)} layers, {_tensors(s.tensors)}"
    return found


def _tensors(specs: Sequence[TensorSpec]) -> str:
    return " + ".join(f"{t.name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in specs)


def _session(tensors: dict[str, Tensor], meta: dict[str, str]) -> Session:
    """The session that a file holds, or NotWellFormed."""
    request, conversation = _object(meta, "session"), _object(meta, "conversation")
    for name in [name for name in tensors if name.startswith("session/") and name != "session/tokens"]:
        raise NotWellFormed(f"tensor '{name[:80]}' has no place in a session")
    if "session/tokens" not in tensors:
        raise NotWellFormed("it has no tokens")
    tokens = vector(tensors["session/tokens"], "tokens").tolist()
    cache, snapshot = without_session(tensors), None
    if "fingerprint" in meta:
        snapshot = snapshot_of(cache, meta)
    elif cache:
        raise NotWellFormed("it holds entries, and does not say of what cache")
    elif "model" not in meta:
        raise NotWellFormed("its metadata has no 'model'")
    evictions = eviction_records(tensors, len(tokens))
    going = _object(meta, "going") if "going" in meta else None
    if evictions and snapshot is None and going is None:
        raise NotWellFormed("it has records of evictions, and no cache")
    plain = session_of_words(request, tokens, evictions, conversation, _about(meta))
    return replace(plain, model=meta["model"], snapshot=snapshot, going=going, files=meta.get("files", ""))


def session_of_words(
    request: Mapping[str, Any],
    tokens: list[int],
    evictions: dict[int, EvictionRecord],
    conversation: dict[str, Any],
    about: dict[str, str],
) -> Session:
    """The session that `request_words` are of, without cache and model, or NotWellFormed."""
    prompt, end = request.get("prompt_tokens"), request.get("finish_reason")
    if type(prompt) is not int or not min(1, len(tokens)) <= prompt <= len(tokens):
        raise NotWellFormed(f"{_shown(prompt)} of its {len(tokens)} tokens are said to be the prompt")
    text, stopped, policy = request.get("text"), request.get("stopped"), request.get("policy")
    if end not in ENDS or not isinstance(text, str) or not isinstance(stopped, str | None):
        raise NotWellFormed("how its answer ended is not known")
    if not isinstance(policy, str | None):
        raise NotWellFormed("the policy of its evictions is not a name")
    return Session("", about, tokens, prompt, end, text, stopped, evictions, None, conversation, policy)


def eviction_records(tensors: dict[str, Tensor], tokens: int) -> dict[int, EvictionRecord]:
    """Records by position, in order."""
    data: dict[int, tuple[str, Tensor]] = {}
    lengths: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        if group not in ("evicted", "evicted_lengths"):
            continue
        place, _, form = rest.partition("/")
        if not (place.isascii() and place.isdigit() and len(place) < 16 and 0 < int(place) <= tokens):
            raise NotWellFormed(f"'{name[:80]}' is no eviction at one of its {tokens} tokens")
        if group == "evicted_lengths" and not form:
            lengths[int(place)] = tensor
        elif group == "evicted" and int(place) not in data:
            data[int(place)] = (form, tensor)
        else:
            raise NotWellFormed(f"tensor '{name[:80]}' has no place in a session")
    if data.keys() != lengths.keys():
        raise NotWellFormed("records of evictions and their lengths are not for the same positions")
    return {at: _record(at, lengths[at], *data[at]) for at in sorted(data)}


def _record(at: int, lengths: Tensor, form: str, data: Tensor) -> EvictionRecord:
    if lengths.ndim != 2 or lengths.dtype != torch.int64 or ((lengths < 0) | (lengths > at)).any():
        raise NotWellFormed(f"the lengths at the eviction at {at} are not counts up to {at}")
    if data.dtype not in (torch.uint8, torch.int32, torch.int64) or (form == "mask") != (data.dtype == torch.uint8):
        raise NotWellFormed(f"the record of the eviction at {at} is of {data.dtype}")
    try:
        return EvictionRecord.of_packed(lengths.numpy(), form, data.numpy())
    except ValueError as problem:
        raise NotWellFormed(f"the record of the eviction at {at}: {problem}") from None


def _about(meta: Mapping[str, str]) -> dict[str, str]:
    return {str(key): str(value) for key, value in _object(meta, "about").items()}


def _object(meta: Mapping[str, str], key: str) -> dict[str, Any]:
    """A JSON object of the metadata."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        found = json.loads(meta.get(key, ""), parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        raise NotWellFormed(f"its '{key}' cannot be read: {problem}"[:200]) from None
    if not isinstance(found, dict):
        raise NotWellFormed(f"its '{key}' is not a JSON object")
    return found


def plain_json(value: Any) -> Any:
    """A copy, if it is made of texts, numbers, lists and dicts alone, or RequestError."""
    return json.loads(_json(value))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise RequestError(
            f"only plain JSON values can be saved (texts, numbers, lists, dicts) in messages, tools and template "
            f"variables: {problem}"
        ) from None


def _signed(numbers: np.ndarray) -> np.ndarray:
    """Entry numbers in a type that every safetensors reader knows."""
    return numbers.astype(np.int32 if not len(numbers) or numbers[-1] < 1 << 31 else np.int64)


def _shown(value: object) -> str:
    """A value out of a file, in one line."""
    text = str(value)
    return text if text.isprintable() and len(text) <= 120 else repr(text)[:120]
