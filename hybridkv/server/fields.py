"""The body of a request: JSON, strictly read, then field by field. Every list and every number has a limit.

A value is never repeated in a message: it may be large, or a secret.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hybridkv.server.problems import ApiError, bad
from hybridkv.text.messages import MAX_LEVELS, nests_too_deeply

MAX_TEXT = 1 << 26  # characters of one text; the body has its own limit
INT64 = 2**63 - 1
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # an even number of backslashes before it is text


def parse_object(raw: bytes) -> Fields:
    """The body as an object, or ApiError. NaN, doubled keys, half surrogates and NUL are refused."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise bad("the body must be JSON in UTF-8, and has bytes that are no UTF-8") from None
    if not text.strip():
        raise bad("the body is empty; it must be a JSON object")
    try:
        found = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as problem:  # JSONDecodeError, and whole numbers of thousands of digits
        where = f" (line {problem.lineno}, column {problem.colno})" if isinstance(problem, json.JSONDecodeError) else ""
        raise bad(f"the body is not valid JSON{where}") from None
    if not isinstance(found, dict):
        raise bad("the body must be a JSON object")
    if nests_too_deeply(found):
        raise _too_deep()
    if _NUL.search(text):
        raise bad("the body has a NUL character (\\u0000), which no text has")
    if "\\ud" in text.lower():
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise bad("the body has half a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    return Fields(found)


def _too_deep() -> ApiError:
    return bad(f"the body is nested too deeply: objects and lists in each other may have {MAX_LEVELS} levels")


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise bad("the body has an object with the same key twice")
    return found


class Fields:
    """An object of a request. `path` says where it stands, for messages. null is the same as a missing field."""

    def __init__(self, data: dict[str, Any], path: str = "") -> None:
        self.data, self.path = data, path
        self.salt = b""  # of the key that a whole body came with
        self.session = ""  # that its header names

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def where(self, name: str) -> str:
        """The field's name in messages."""
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, what: str) -> ApiError:
        """What is wrong with a field."""
        return bad(f"{self.where(name)}: {what}", self.where(name))

    def raw(self, name: str) -> Any:
        """The value, unchecked; None: it is missing."""
        return self.data.get(name)

    def whole(self, name: str, low: int, high: int = INT64) -> int | None:
        """A whole number; true, 1.0 and "1" are none."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"it must be a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, above: bool = False) -> float | None:
        """A number; `above`: `low` itself is not in the range."""
        value = self.data.get(name)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e308
        if not good or not math.isfinite(value) or not low <= value <= high or (above and value == low):
            range_ = f"above {low:g}, at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise self.wrong(name, f"it must be a number {range_}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "it must be true or false")
        return value

    def text(self, name: str, longest: int = MAX_TEXT) -> str | None:
        """A text."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, "it must be text")
        if len(value) > longest:
            raise self.wrong(name, f"it has {len(value)} characters, at most {longest} are taken")
        return value

    def needed_text(self, name: str, longest: int = MAX_TEXT) -> str:
        """A text that has to be there."""
        found = self.text(name, longest)
        if found is None:
            raise self.wrong(name, "it is missing")
        return found

    def choice(self, name: str, options: Sequence[str]) -> str | None:
        """One of a few words."""
        value = self.data.get(name)
        if value is not None and (not isinstance(value, str) or value not in options):
            raise self.wrong(name, f"it must be one of {', '.join(options)}")
        return value

    def object(self, name: str) -> Fields | None:
        """An object, to be read in its turn."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "it must be an object")
        return Fields(value, self.where(name))

    def items(self, name: str, most: int) -> list[Any] | None:
        """A list of at most so many."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "it must be a list")
        if len(value) > most:
            raise self.wrong(name, f"it has {len(value)} entries, at most {most} are taken")
        return value

    def objects(self, name: str, most: int) -> Iterator[Fields]:
        """The objects of a list; none where it is missing."""
        for i, value in enumerate(self.items(name, most) or ()):
            where = f"{self.where(name)}[{i}]"
            if not isinstance(value, dict):
                raise bad(f"{where}: it must be an object", where)
            yield Fields(value, where)

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """A text or a list of them, none empty."""
        value = self.data.get(name)
        listed = [value] if isinstance(value, str) else self.items(name, most) or []
        if not all(isinstance(text, str) and 0 < len(text) <= longest for text in listed):
            raise self.wrong(name, f"it must be texts of 1 to {longest} characters")
        return tuple(listed)
