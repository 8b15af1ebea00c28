"""Shelves: where buffers (buffers.py) wait for one who knows their key. `put(key, buffers)` and `get(key)`, wherever
they lie.

    RamShelf      memory of this process, so many bytes; pinned where the buffers are
    DiskShelf     a folder, so many bytes; each is a snapshot's or session's file, written whole
    RemoteShelf   that of another process (shelf_server.py)

Keys cannot be guessed, and who has one may read what it names. What nobody fetches goes after some seconds; where there
is no room, what was put there first goes first. Nothing depends on finding anything: what is gone is computed again.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hybridkv.cache.buffers import Buffers, pack, unpack
from hybridkv.cache.snapshot_file import FORMAT, SESSION_VERSION, VERSION, read_file, write_file
from hybridkv.errors import HybridKVError

KEY = re.compile(r"[0-9a-f]{64}\Z")
SECONDS = 60.0  # that something waits
VERSIONS = {"snapshot": VERSION, "session": SESSION_VERSION}  # of files
SUFFIX = ".safetensors"


class Shelf(Protocol):
    """Where buffers wait."""

    def put(self, key: str, buffers: Buffers) -> None:
        """Lay something down under a key of `new_key`, or HybridKVError: there is no room for it."""
        ...

    def get(self, key: str) -> Buffers | None:
        """What lies under a key, and stays there; None: nothing does, any more."""
        ...

    def drop(self, key: str) -> None:
        """It is not needed any more."""
        ...


def new_key() -> str:
    """64 characters that nobody can guess."""
    return secrets.token_hex(32)


def check_key(key: object) -> str:
    """Whether this is a key, or HybridKVError."""
    if not isinstance(key, str) or not KEY.match(key):
        raise HybridKVError("that is no key: it must have 64 characters, 0 to 9 and a to f")
    return key


class RamShelf:
    """In memory. Any thread may use it.

    Args:
        limit: bytes of all that lies there.
        seconds: that something waits.
        clock: what seconds are counted by.
    """

    def __init__(self, limit: int, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.seconds, self._clock = limit, seconds, clock
        self._found: dict[str, tuple[Buffers, float]] = {}  # what was put there first stands first
        self._lock = threading.Lock()
        self.dropped = 0  # that nobody has fetched

    @property
    def used(self) -> int:
        """Bytes of what lies there."""
        with self._lock:
            self._expire()
            return self._used

    def put(self, key: str, buffers: Buffers) -> None:
        """Lay something down; what was put there first makes room."""
        check_key(key)
        size = buffers.nbytes
        if size > self.limit:
            raise HybridKVError(f"{size} bytes do not fit where {self.limit} may wait")
        with self._lock:
            self._found.pop(key, None)
            self._expire()
            while self._used + size > self.limit:
                del self._found[next(iter(self._found))]
                self.dropped += 1
            self._found[key] = buffers, self._clock()

    def get(self, key: str) -> Buffers | None:
        """What lies there."""
        with self._lock:
            self._expire()
            found = self._found.get(key)
            return None if found is None else found[0]

    def drop(self, key: str) -> None:
        """It was fetched."""
        with self._lock:
            self._found.pop(key, None)

    @property
    def _used(self) -> int:
        return sum(buffers.nbytes for buffers, _ in self._found.values())

    def _expire(self) -> None:
        late = self._clock() - self.seconds
        for key in [key for key, (_, at) in self._found.items() if at <= late]:
            del self._found[key]
            self.dropped += 1


class DiskShelf:
    """In a folder, mode 0700: prompts are in it. Its files are snapshots and sessions as any others.

    Args:
        path: the folder; made when something is put there.
        limit: bytes of all files.
        seconds: that something waits; None: for ever.
        clock: what seconds are counted by, in the time of files.
    """

    def __init__(
        self,
        path: str | Path,
        limit: int,
        seconds: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path, self.limit, self.seconds, self._clock = Path(path).expanduser(), limit, seconds, clock
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def put(self, key: str, buffers: Buffers) -> None:
        """Write a file; the oldest ones make room."""
        path = self._path(key)
        tensors, meta = unpack(buffers, buffers.head["kind"])
        if buffers.nbytes > self.limit:
            raise HybridKVError(f"{buffers.nbytes} bytes do not fit where {self.limit} may wait")
        with self._lock:
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as problem:
                raise HybridKVError(f"{str(self.path)!r} cannot be made: {problem.strerror or problem}") from None
            kind = buffers.head["kind"]
            write_file(path, tensors, meta | {"format": FORMAT, "version": VERSIONS[kind]}, kind)
            self._expire(but=path)

    def get(self, key: str) -> Buffers | None:
        """Read a file; one that is damaged is removed, and is not there."""
        path = self._path(key)
        with self._lock:
            self._expire(but=None)
            try:
                if not path.is_file() or path.is_symlink():
                    return None
                tensors, meta = read_file(path, lambda meta: None, room=2 * self.limit)
            except HybridKVError:
                with suppress(OSError):
                    path.unlink()
                return None
        version = meta.pop("version")
        kind = next(kind for kind, number in VERSIONS.items() if number == version)
        return pack(kind, tensors, {name: x for name, x in meta.items() if name not in ("format", "sha256")})

    def drop(self, key: str) -> None:
        """Remove its file."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.path / (check_key(key) + SUFFIX)

    def _files(self) -> list[tuple[Path, int, float]]:
        """(file, bytes, when it was written), the oldest first."""
        found = []
        with suppress(FileNotFoundError), os.scandir(self.path) as listed:
            for entry in listed:
                if entry.is_file(follow_symlinks=False) and KEY.match(entry.name.removesuffix(SUFFIX)):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((Path(entry.path), status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: file[2])

    def _expire(self, but: Path | None) -> None:
        """Remove what has waited too long, and the oldest where there is no room; but not what was just written."""
        files = self._files()
        total = sum(size for _, size, _ in files)
        for path, size, written in files:
            late = self.seconds is not None and self._clock() - written >= self.seconds
            if path != but and (late or total > self.limit):
                with suppress(OSError):
                    path.unlink()
                total -= size
