"""Values that a model wrote as bare text, turned into what the function's JSON schema says. What does not convert stays
a text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_WHOLE = re.compile(r"[+-]?[0-9]{1,400}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,4})?|[+-]?\.[0-9]{1,400}")
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
DEPTH = 32  # of references and alternatives


def convert(text: str, schema: Any, root: Any = None) -> Any:
    """The value of a parameter. `root`: the schema of all parameters, in which references point."""
    types = schema_types(schema, schema if root is None else root, DEPTH)
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return None
    if types & {"object", "array"} and bare[:1] in ("{", "["):
        found = _parsed(bare)
        if isinstance(found, dict | list) and _NAMES[type(found)] in types:
            return found
    if "string" in types or not types:
        return text
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    if "integer" in types and _WHOLE.fullmatch(bare):
        return int(bare)
    if types & {"number", "integer"} and _NUMBER.fullmatch(bare):
        value = float(bare)
        if "number" in types and math.isfinite(value):
            return int(bare) if _WHOLE.fullmatch(bare) else value
        if value.is_integer():
            return int(value)
    return text


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def schema_types(schema: Any, root: Any, depth: int) -> set[str]:
    """The JSON types that a schema allows; empty: it does not say."""
    if not isinstance(schema, Mapping) or depth <= 0:
        return set()
    found: set[str] = set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found |= schema_types(_pointed(reference, root), root, depth - 1)
    named = schema.get("type")
    found |= {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    for part in (part for name in ("anyOf", "oneOf", "allOf") for part in _list(schema, name)):
        found |= schema_types(part, root, depth - 1)
    if not found:
        values = [*_list(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
        found |= {_NAMES.get(type(value), "null") for value in values}
    if schema.get("nullable") is True:
        found.add("null")
    return found


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _pointed(reference: str, root: Any) -> Any:
    """What `#/$defs/Name` points at inside the schema; nothing is fetched."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in filter(None, reference[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
