"""How large a JSON schema may be that a grammar is made from. Nothing that it names is fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybridkv.errors import RequestError

MAX_SCHEMA_BYTES = 64 << 10  # of one schema, and of a grammar
MAX_TOOL_BYTES = 256 << 10  # of all tools of a request
MAX_DEPTH = 64  # of objects and lists in each other
MAX_ENUM = 4096


def checked_schema(schema: Any, what: str, most: int = MAX_SCHEMA_BYTES) -> dict[str, Any]:
    """The schema itself, or RequestError: `what` is too large, is no schema, or refers to something outside."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"{what}: a JSON schema is an object")
    left: list[tuple[Any, int]] = [(schema, 1)]
    while left:  # not by calling itself: a schema may be deeper than Python's stack
        value, depth = left.pop()
        if depth > MAX_DEPTH:
            raise RequestError(f"{what}: the schema is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            _check_object(value, what)
        inner = value.values() if isinstance(value, Mapping) else value
        left += [(part, depth + 1) for part in inner if isinstance(part, Mapping | list | tuple)]
    try:
        size = len(json.dumps(schema).encode())
    except (TypeError, ValueError) as problem:
        raise RequestError(f"{what}: a JSON schema has plain JSON values alone: {problem}") from None
    if size > most:
        raise RequestError(f"{what}: the schema has {size} bytes, at most {most} are taken")
    return dict(schema)


def _check_object(value: Mapping[Any, Any], what: str) -> None:
    listed, reference = value.get("enum"), value.get("$ref")
    if isinstance(listed, list | tuple) and len(listed) > MAX_ENUM:
        raise RequestError(f"{what}: an enum has {len(listed)} values, at most {MAX_ENUM} are taken")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise RequestError(f"{what}: $ref may point inside the schema alone (#/...); nothing is fetched")
