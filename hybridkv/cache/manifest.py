"""What a saved cache consists of: a manifest in plain JSON, and parts whose tensors follow from it.

    kept      positions that survived an eviction, stream after stream          only after an eviction
    base      entries of those positions                                        only after an eviction
    columns   entries of tokens [from, to): [lanes, streams, entries, ...]      runs that begin at multiples of `run`
    state     rows of all state, layers [a, b) of a tensor
    queries   the same of what is lent: its last queries, if it had them all
    tokens    of the request, prompt and answer
    records   what each eviction kept (eviction_record.py)                      only after an eviction

Entries lie one after the other, without pages, so a cache of another page size takes them as they are (DeepSeek-V4's
lie in whole pages: there the page size must be the same). Runs of a conversation that grows stay the same files.

All sizes follow from a few numbers of the manifest and from the schema in it. A reader makes the list of parts anew
and compares it with what is listed, before it takes any memory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import lcm
from typing import Any

import numpy as np

from hybridkv.cache.part_file import TensorForm, size_of
from hybridkv.cache.schema import CacheSchema, StateSchema, StreamSchema, TensorSpec, ceil_div
from hybridkv.dtypes import ITEMSIZE
from hybridkv.errors import HybridKVError

FORMAT, VERSION = "hybridkv-cache", 2
PART_BYTES = 32 << 20  # that a part is cut at; a part has 256 MiB at the most
MOST_PART_BYTES = 256 << 20
MOST_RUN = 1024  # tokens
MANIFEST_BYTES = 16 << 20
MOST = 1 << 40  # of any number
DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class BadManifest(HybridKVError):
    """A manifest that is not what this program writes."""


@dataclass(frozen=True)
class PartForm:
    """A part that a cache of some sizes has."""

    what: str
    begin: int  # of its tokens, entries or layers
    end: int
    tensors: tuple[TensorForm, ...]  # the widest numbers first, so that all lie where they can be read; none: records

    @property
    def nbytes(self) -> int:
        """Of its file."""
        return size_of(self.tensors)


@dataclass(frozen=True)
class Part:
    """A part as a manifest lists it."""

    what: str
    begin: int
    end: int
    bytes: int
    sha256: str
    chain: str = ""  # of columns: digest of all tokens up to its end


@dataclass(frozen=True)
class Sizes:
    """The numbers from which all sizes of a saved cache follow, beside its schema."""

    position: int  # tokens that the cache has seen; 0: there is no cache
    tokens: int  # of the request
    run: int  # tokens of a run of columns
    compacted_at: int = 0  # the position of the last eviction; 0: there was none
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)  # stream schema -> entries that each stream kept
    queries: bool = False  # whether its last queries are there

    def lengths(self, schema: StreamSchema) -> np.ndarray:
        """[streams] entries that each stream has."""
        if schema.name in self.kept:
            return np.array(self.kept[schema.name], np.int64) + self.position - self.compacted_at
        return np.full(schema.streams, schema.entries(self.position), np.int64)

    def first(self, schema: StreamSchema) -> int:
        """The token from which on the streams have an entry for every token."""
        return self.compacted_at if schema.name in self.kept else 0


def run_tokens(schema: CacheSchema) -> int:
    """Tokens of a run of columns: as many as PART_BYTES hold, a power of two of what no page is cut by."""
    paged = [s.tokens_per_entry * s.entries_per_page for s in schema.streams if schema.compressed]
    least = lcm(64, *(s.tokens_per_entry for s in schema.streams), *paged)
    bytes_of_one = sum(s.streams * s.lanes * _entry_bytes(s) // s.tokens_per_entry for s in schema.streams) or 1
    found = least
    while found * 2 <= MOST_RUN and found * 2 * bytes_of_one <= PART_BYTES:
        found *= 2
    return found


def parts_of(schema: CacheSchema, sizes: Sizes) -> Iterator[PartForm]:
    """All parts of a cache, in order, but for its records."""
    yield PartForm("tokens", 0, sizes.tokens, (TensorForm("tokens", "int32", (sizes.tokens,)),))
    if not sizes.position:
        return
    for s in schema.streams:
        if s.name in sizes.kept:
            total = sum(sizes.kept[s.name])
            yield PartForm("kept", 0, total, (TensorForm(f"{s.name}/kept", "int64", (total,)),))
            yield from _base(s, sizes.kept[s.name])
    for first in sorted({sizes.first(s) for s in schema.streams}):
        streams = [s for s in schema.streams if sizes.first(s) == first]
        begin = first
        while begin < sizes.position:
            end = min(begin - begin % sizes.run + sizes.run, sizes.position)
            tensors = [form for s in streams for form in _columns(s, begin, end, bool(schema.compressed))]
            yield PartForm("columns", begin, end, _ordered(tensors))
            begin = end
    yield from _states("state", [s for s in schema.states if not s.lent])
    if sizes.queries:
        yield from _states("queries", [s for s in schema.states if s.lent])


def columns_entries(schema: StreamSchema, begin: int, end: int, whole_pages: bool) -> tuple[int, int]:
    """(first entry, entries) of a stream in the columns of tokens [begin, end); whole pages, where asked for."""
    first, last = schema.entries(begin), schema.entries(end)
    if whole_pages:
        last = ceil_div(last, schema.entries_per_page) * schema.entries_per_page
    return first, last - first


def _columns(s: StreamSchema, begin: int, end: int, whole_pages: bool) -> Iterator[TensorForm]:
    count = columns_entries(s, begin, end, whole_pages)[1]
    for t in s.tensors:
        yield TensorForm(f"{s.name}/{t.name}", t.dtype, (s.lanes, s.streams, count, *t.shape))


def _base(s: StreamSchema, kept: Sequence[int]) -> Iterator[PartForm]:
    """Surviving entries of streams [begin, end), as many as a part holds."""
    begin, most = 0, max(1, PART_BYTES // (s.lanes * _entry_bytes(s)))
    while begin < len(kept):
        end, count = begin + 1, kept[begin]
        while end < len(kept) and count + kept[end] <= most:
            count += kept[end]
            end += 1
        forms = [TensorForm(f"{s.name}/{t.name}", t.dtype, (s.lanes, count, *t.shape)) for t in s.tensors]
        yield PartForm(f"base/{s.name}", begin, end, _ordered(forms))
        begin = end


def _states(what: str, states: Sequence[StateSchema]) -> Iterator[PartForm]:
    """Rows of state in parts: whole tensors together, or layers of one that is larger than a part."""
    forms: list[TensorForm] = []
    size = number = 0
    for s in states:
        for t in s.tensors:
            each = max(1, PART_BYTES // max(1, t.nbytes))
            for a in range(0, len(s.layers), each):
                b = min(a + each, len(s.layers))
                form = TensorForm(f"{s.name}/{t.name}/{a}:{b}", t.dtype, (b - a, *t.shape))
                if forms and size + form.nbytes > PART_BYTES:
                    yield PartForm(what, number, number + len(forms), _ordered(forms))
                    number, size, forms = number + len(forms), 0, []
                forms.append(form)
                size += form.nbytes
    if forms:
        yield PartForm(what, number, number + len(forms), _ordered(forms))


def _ordered(forms: Sequence[TensorForm]) -> tuple[TensorForm, ...]:
    return tuple(sorted(forms, key=lambda form: -ITEMSIZE[form.dtype]))


def _entry_bytes(s: StreamSchema) -> int:
    return sum(t.nbytes for t in s.tensors)


def chains(tokens: np.ndarray, ends: Sequence[int]) -> list[str]:
    """For each end, the digest of all tokens before it: what columns are of."""
    found, digest, at = [], hashlib.sha256(b"hybridkv columns"), 0
    data = tokens.astype("<i4")
    for end in ends:
        digest.update(data[at:end].tobytes())
        found.append(digest.hexdigest())
        at = end
    return found


# ---- schemas in words


def schema_words(schema: CacheSchema) -> dict[str, Any]:
    """What a cache stores, in plain JSON values."""

    def tensors(s: StreamSchema | StateSchema) -> list[list[Any]]:
        return [[t.name, t.dtype, list(t.shape)] for t in s.tensors]

    streams = [
        {
            "name": s.name, "layers": list(s.layers), "tensors": tensors(s), "entries_per_page": s.entries_per_page,
            "heads": s.heads, "shared": s.shared, "tokens_per_entry": s.tokens_per_entry,
        }
        for s in schema.streams
    ]  # fmt: skip
    states = [{"name": s.name, "layers": list(s.layers), "tensors": tensors(s), "lent": s.lent} for s in schema.states]
    formats = [[c.kind, c.entries.name, c.index.name if c.index else None] for c in schema.compressed]
    return {"streams": streams, "states": states, "formats": formats}


def schema_of(words: object, like: CacheSchema) -> CacheSchema:
    """The schema that a manifest describes, as far as sizes go; `like`: this cache's, for what words do not say."""
    found = _object(words, "its schema", ("streams", "states", "formats"))
    streams = [_stream(each) for each in _list(found["streams"], "its streams", 64)]
    states = [_state(each) for each in _list(found["states"], "its states", 64)]
    _list(found["formats"], "its formats", 4096)
    names = [s.name for s in (*streams, *states)]
    if len(set(names)) != len(names):
        raise BadManifest("names in its schema are not all different")
    compressed = like.compressed if found["formats"] == schema_words(like)["formats"] else ()
    return CacheSchema(tuple(streams), tuple(states), compressed, like.share_every, like.rewind)


def _stream(words: object) -> StreamSchema:
    names = ("name", "layers", "tensors", "entries_per_page", "heads", "shared", "tokens_per_entry")
    found = _object(words, "a stream of its schema", names)
    if type(found["shared"]) is not bool:
        raise BadManifest("a stream of its schema is neither shared nor not")
    return StreamSchema(
        _name(found["name"]),
        _layers(found["layers"]),
        _tensors(found["tensors"]),
        number(found["entries_per_page"], "entries of a page", 1, 1 << 20),
        number(found["heads"], "heads", 1, 1 << 16),
        found["shared"],
        number(found["tokens_per_entry"], "tokens of an entry", 1, 1 << 16),
    )


def _state(words: object) -> StateSchema:
    found = _object(words, "a state of its schema", ("name", "layers", "tensors", "lent"))
    if type(found["lent"]) is not bool:
        raise BadManifest("a state of its schema is neither lent nor not")
    return StateSchema(_name(found["name"]), _layers(found["layers"]), _tensors(found["tensors"]), found["lent"])


def _layers(found: object) -> tuple[int, ...]:
    layers = tuple(number(each, "a layer", 0, 1 << 16) for each in _list(found, "layers", 1 << 16))
    if not layers or list(layers) != sorted(set(layers)):
        raise BadManifest("layers in its schema are not in order, each once")
    return layers


def _tensors(found: object) -> tuple[TensorSpec, ...]:
    specs = []
    for each in _list(found, "tensors", 64):
        name, dtype, shape = _list(each, "a tensor", 3, exactly=True)
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise BadManifest(f"a tensor in its schema is of dtype {str(dtype)[:40]!r}")
        sizes = tuple(number(n, "a size", 0, 1 << 30) for n in _list(shape, "a shape", 8))
        specs.append(TensorSpec(_name(name), sizes, dtype))
    if not specs:
        raise BadManifest("a part of its schema has no tensors")
    return tuple(specs)


# ---- plain values, checked


def number(value: object, what: str, least: int = 0, most: int = MOST) -> int:
    """A whole number in range, or BadManifest."""
    if type(value) is not int or not least <= value <= most:
        raise BadManifest(f"{what} is {str(value)[:40]!r}, not a whole number from {least} to {most}")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_]{1,64}", value):
        raise BadManifest(f"{str(value)[:40]!r} is no name of a stream, state or tensor")
    return value


def _object(value: object, what: str, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or sorted(value) != sorted(names):
        raise BadManifest(f"{what} does not have {', '.join(names)}")
    return value


def _list(value: object, what: str, most: int, exactly: bool = False) -> list[Any]:
    if not isinstance(value, list) or len(value) > most or (exactly and len(value) != most):
        raise BadManifest(f"{what}: not a list of {'' if exactly else 'up to '}{most}")
    return value


@dataclass(frozen=True)
class Manifest:
    """A saved cache, and the request that it is of."""

    key: dict[str, str]  # what must be the same where it is restored
    schema: dict[str, Any]  # in words
    sizes: Sizes
    parts: tuple[Part, ...]
    request: dict[str, Any]
    conversation: dict[str, Any]
    about: dict[str, str]  # model and cache in words
    saved_at: float = 0.0  # seconds since 1970
    converted: tuple[str, ...] = ()  # from what, where it was restored into another dtype before

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        found["sizes"]["kept"] = {name: list(counts) for name, counts in self.sizes.kept.items()}
        return found

    @property
    def bytes(self) -> int:
        """Of all its parts."""
        return sum(part.bytes for part in self.parts)

    @staticmethod
    def of(found: Mapping[str, Any]) -> Manifest:
        """A manifest out of plain values, or BadManifest. What belongs to a schema is checked by `check_parts`."""
        if found.get("format") != FORMAT:
            raise BadManifest(f"its format is not {FORMAT}")
        version = found.get("version")
        if type(version) is not int or version != VERSION:
            newer = type(version) is int and version > VERSION
            why = "a newer program wrote it" if newer else "it cannot be read"
            raise BadManifest(f"it is of version {str(version)[:20]}, this program reads version {VERSION}: {why}")
        sizes = found.get("sizes")
        sizes = _object(sizes, "its sizes", ("position", "tokens", "run", "compacted_at", "kept", "queries"))
        if type(sizes["queries"]) is not bool or not isinstance(sizes["kept"], dict):
            raise BadManifest("its sizes are not what they should be")
        kept = {
            _name(name): tuple(number(n, "kept entries") for n in _list(counts, "kept entries", 1 << 20))
            for name, counts in sizes["kept"].items()
        }
        parts = [_part(each) for each in _list(found.get("parts"), "its parts", 1 << 16)]
        request, conversation = found.get("request"), found.get("conversation")
        if not isinstance(request, dict) or not isinstance(conversation, dict):
            raise BadManifest("it has no request, or no conversation")
        saved_at, converted = found.get("saved_at"), found.get("converted")
        if type(saved_at) not in (int, float):
            raise BadManifest("it does not say when it was saved")
        return Manifest(
            _words(found.get("key"), "its key"),
            found.get("schema"),  # type: ignore[arg-type]  # checked by schema_of
            Sizes(
                number(sizes["position"], "its position"),
                number(sizes["tokens"], "its tokens"),
                number(sizes["run"], "the tokens of its runs", 1, 1 << 30),
                number(sizes["compacted_at"], "the position of its eviction"),
                kept,
                sizes["queries"],
            ),
            tuple(parts),
            request,
            conversation,
            _words(found.get("about"), "what it is about"),
            float(saved_at),  # type: ignore[arg-type]
            tuple(str(each)[:200] for each in _list(converted, "its conversions", 64)),
        )

    def check_parts(self, schema: CacheSchema) -> list[tuple[PartForm, Part]]:
        """Its parts with their forms, if they are those that its sizes ask for, or BadManifest."""
        sizes, at = self.sizes, 0
        if sizes.position > sizes.tokens or sizes.compacted_at > sizes.position:
            raise BadManifest("its cache is further than its tokens, or was evicted further than it is")
        if bool(sizes.kept) != bool(sizes.compacted_at):
            raise BadManifest("it does not say what its eviction kept")
        names = {s.name: s for s in schema.streams}
        for name, counts in sizes.kept.items():
            s = names.get(name)
            if s is None or s.shared or s.tokens_per_entry > 1 or len(counts) != s.streams:
                raise BadManifest(f"it kept entries of '{name}', which has no such streams")
            if max(counts, default=0) > sizes.compacted_at:
                raise BadManifest(f"it kept more entries of '{name}' than there were")
        if sizes.position > sizes.run * (1 << 16):
            raise BadManifest(f"runs of {sizes.run} tokens would be too many")
        found = []
        for form in parts_of(schema, sizes):
            part = self.parts[at] if at < len(self.parts) else None
            if part is None or (part.what, part.begin, part.end) != (form.what, form.begin, form.end):
                raise BadManifest(f"it has no part '{form.what}' of {form.begin} to {form.end}, where it should be")
            if part.bytes != form.nbytes or form.nbytes > MOST_PART_BYTES:
                raise BadManifest(
                    f"its part '{form.what}' of {form.begin} to {form.end} has {part.bytes} bytes, not {form.nbytes}"
                )
            found.append((form, part))
            at += 1
        if rest := self.parts[at:]:
            if [part.what for part in rest] != ["records"] or rest[0].bytes > MOST_PART_BYTES:
                raise BadManifest(f"its part '{rest[0].what[:40]}' has no place in it")
            found.append((PartForm("records", 0, 0, ()), rest[0]))
        return found


def _part(words: object) -> Part:
    found = _object(words, "one of its parts", ("what", "begin", "end", "bytes", "sha256", "chain"))
    for name, may_be_empty in (("sha256", False), ("chain", True)):
        if not isinstance(found[name], str) or not (DIGEST.match(found[name]) or (may_be_empty and not found[name])):
            raise BadManifest(f"one of its parts has the {name} {str(found[name])[:80]!r}")
    if not isinstance(found["what"], str) or len(found["what"]) > 80:
        raise BadManifest("one of its parts does not say what it is")
    begin, end = number(found["begin"], "where a part begins"), number(found["end"], "where a part ends")
    size = number(found["bytes"], "bytes of a part", 1, MOST_PART_BYTES)
    return Part(found["what"], begin, end, size, found["sha256"], found["chain"])


def _words(value: object, what: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()) or len(value) > 256:
        raise BadManifest(f"{what} is not an object of texts")
    return value
