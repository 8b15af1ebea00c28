"""Opening untrusted model files: regular files only, and JSON with every limit set before it is parsed.

What the bytes mean is left to the readers of weights (`models/`) and of tokenizers (`text/`).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from hybridkv.errors import ModelFileError

JSON_LIMIT = 16 << 20  # bytes; a config.json has a few KiB, the index of a model of 100 000 tensors about 10 MiB


class OpenFile:
    """A regular file held open, so that a change under a mapping is noticed before the mapping is touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # looked at before it is opened: opening a FIFO waits for a writer, and opening a device may do anything
        try:
            self._refuse_special(os.stat(path))
            self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            raise ModelFileError(f"{str(path)!r}: there is no such file") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            if isinstance(error, ModelFileError):
                raise
            raise ModelFileError(f"{str(path)!r}: cannot be opened: {error}") from None
        try:
            first = os.fstat(self.fd)
            self._refuse_special(first)
        except BaseException:
            self.close()
            raise
        self.size = first.st_size
        self._stamp = (first.st_size, first.st_mtime_ns)

    def _refuse_special(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
            kind = next((text for test, text in kinds if test(found.st_mode)), "a device")
            raise ModelFileError(f"{str(self.path)!r} is {kind}, not a regular file")

    def check_unchanged(self) -> None:
        """Raise if the file was cut or rewritten since it was opened (a mapping of a cut file kills the process)."""
        if self.fd < 0:
            raise ModelFileError(f"{str(self.path)!r} was closed; open the model again to read from it")
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != self._stamp:
            raise ModelFileError(
                f"{str(self.path)!r} changed while it was in use ({self._stamp[0]} bytes at first, {now.st_size} now); "
                "open the model again"
            )

    def read_at(self, offset: int, count: int) -> bytes:
        parts = []
        while count:
            part = os.pread(self.fd, min(count, 1 << 26), offset)
            if not part:
                raise ModelFileError(f"{str(self.path)!r} ends {count} bytes early; was it cut while being read?")
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object, or ModelFileError: no NaN or infinity, no key twice, no nesting deep enough to hurt."""

    def refuse_constant(text: str) -> NoReturn:
        raise ModelFileError(f"{where}: {text} is not a number that JSON allows")

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ModelFileError(f"{where}: the number {text[:40]} is too large")
        return value

    def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ModelFileError(f"{where}: the key {twice[:80]!r} stands there twice")
        return found

    try:
        value = json.loads(
            data.decode("utf-8"), parse_constant=refuse_constant, parse_float=finite, object_pairs_hook=no_key_twice
        )
    except ModelFileError:
        raise
    except RecursionError:
        raise ModelFileError(f"{where}: the JSON is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise ModelFileError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: holds a JSON {type(value).__name__}, expected an object")
    return value


def read_bytes(path: Path, limit: int) -> bytes:
    file = OpenFile(path)
    try:
        if file.size > limit:
            raise ModelFileError(f"{str(path)!r} has {file.size} bytes; at most {limit} are read")
        return file.read_at(0, file.size)
    finally:
        file.close()


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    return parse_json(read_bytes(path, limit), repr(str(path)))


def read_json_if_any(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A file that need not be there: empty then."""
    return read_json(path, limit) if os.path.lexists(path) else {}
