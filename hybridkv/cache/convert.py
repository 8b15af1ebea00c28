"""What must agree for a saved cache to go on here, and how entries and state become those of another dtype.

A key names, part by part, what a cache depends on beside its tokens. A refusal names the part that differs. Dtypes of
entries and state may differ where the caller says so, in fast mode: entries are decoded and encoded again, state is
rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from hybridkv.cache.schema import CacheSchema, StateSchema, StreamSchema, TensorSpec
from hybridkv.errors import RequestError
from hybridkv.kernels.formats.kv_format import KVFormat, pool_format

MAY_DIFFER = ("kv_dtype", "state_dtype")  # with convert=True
Key = dict[str, str]


def check_key(theirs: Mapping[str, str], ours: Mapping[str, str], convert: bool = False) -> list[str]:
    """What is to be converted, in words; or RequestError: the parts of the key that differ."""
    differ = [name for name in dict.fromkeys([*ours, *theirs]) if theirs.get(name, "") != ours.get(name, "")]
    can = convert and ours.get("mode") == "fast"
    refused = [name for name in differ if not (can and name in MAY_DIFFER)]
    if refused:
        both = [(_shown(n), _shown(theirs.get(n, "") or "none"), ours.get(n, "") or "none") for n in refused]
        words = "; ".join(f"{name}: {there} there, {here} here" for name, there, here in both)
        hint = ""
        if all(name in MAY_DIFFER for name in refused):
            hint = "; open the model with that dtype, or convert it (convert=True, in fast mode)"
        raise RequestError(f"it was computed with another {', another '.join(map(_shown, refused))} ({words}){hint}")
    return [f"{name} {theirs.get(name)} to {ours.get(name)}" for name in differ]


def check_schema(theirs: CacheSchema, ours: CacheSchema, convert: bool = False) -> None:
    """Whether entries and state saved from one schema go into the other, or RequestError. Page sizes may differ, except
    where entries lie in whole pages.
    """
    if theirs.compressed != ours.compressed:
        raise RequestError("its entries are compressed in another form")
    _same("streams", *([_stream(s, ours, convert) for s in each.streams] for each in (theirs, ours)))
    kept = [[s for s in schema.states if not s.lent] for schema in (theirs, ours)]
    _same("states", *([_state(s, convert) for s in states] for states in kept))
    lent = [[s for s in schema.states if s.lent] for schema in (theirs, ours)]
    if lent[0] and lent[1]:
        _same("last queries", *([_state(s, False) for s in states] for states in lent))


def _same(what: str, theirs: list[str], ours: list[str]) -> None:
    if theirs != ours:
        there, here = ("; ".join(sorted(set(a) - set(b)))[:300] for a, b in ((theirs, ours), (ours, theirs)))
        raise RequestError(f"its {what} are others: {there or 'none'} there, {here or 'none'} here")


def _stream(s: StreamSchema, ours: CacheSchema, convert: bool) -> str:
    page = f", pages of {s.entries_per_page}" if ours.compressed else ""
    tensors = "any dtype" if convert and s.name == "attention" else _tensors(s.tensors)
    heads = f"{s.heads} heads, shared" if s.shared else f"{s.heads} heads"
    return f"{s.name}, layers {list(s.layers)}, {heads}, {s.tokens_per_entry} tokens an entry, {tensors}{page}"


def _state(s: StateSchema, convert: bool) -> str:
    specs = [replace(t, dtype="float32") for t in s.tensors] if convert else s.tensors
    return f"{s.name}, layers {list(s.layers)}, {_tensors(specs)}"


def _tensors(specs: tuple[TensorSpec, ...] | list[TensorSpec]) -> str:
    return " + ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in specs)


def converted_entries(entries: dict[str, Tensor], to: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keys and values [..., D] of one format as those of another; `to`: a pool of it."""
    source, target = pool_format(entries), pool_format(to)
    if source is None or target is None:
        raise RequestError("only keys and values of full attention can be converted")
    if source is target:
        return entries
    found: dict[str, Tensor] = {}
    for name in ("k", "v"):
        stored = [entries[key] for key in (name, f"{name}_scale") if key in entries]
        found |= _encoded(name, source.decode(*stored), target)
    return found


def _encoded(name: str, values: Tensor, target: KVFormat) -> dict[str, Tensor]:
    return dict(zip((name, f"{name}_scale"), target.encode(values.float())))


def _shown(text: str) -> str:
    return text if text.isprintable() and len(text) <= 120 else repr(text)[:120]
