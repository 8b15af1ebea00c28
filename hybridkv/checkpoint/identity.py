"""WeightsIdentity: a name for the weights in some files, so that a saved cache goes back to the model it came from.

Of each file: its size, and the SHA-256 of its header and of 64 blocks of 1 MiB, spread evenly over it; a file that is
no larger is hashed whole, and so are all where `whole` is asked for. 51 GB in blocks take a second, whole they take
forty. Other files have other weights in some block unless somebody made them to agree: it finds mistakes, not malice.

`glance` reads a few pages of all files, for what must not take a second: it tells one model's files from another's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from hybridkv.errors import HybridKVError

BLOCK, BLOCKS = 1 << 20, 64
PAGE, PAGES, LEAST = 4096, 256, 4  # bytes; pages of all files together, and of one at the least
MOST_HEADER = 100_000_000
Stamp = tuple[int, int, int, int]  # device, inode, size and time of change of a file

_KNOWN: dict[tuple[Stamp, bool], str] = {}


class WeightsIdentity:
    """The identity of the files that a model is opened from. They are looked at when it is first asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._stamps = [_stamp(os.stat(path)) for path in self.files]

    def digest(self, whole: bool = False) -> str:
        """64 characters. A file that was changed since the model was opened is an error: it is not that model's."""
        found = hashlib.sha256()
        for path, stamp in zip(self.files, self._stamps, strict=True):
            found.update(_digest(path, stamp, whole).encode())
        return found.hexdigest()

    def glance(self) -> str:
        """64 characters, from the sizes of the files and pages spread evenly over each."""
        found, pages = hashlib.sha256(), max(LEAST, PAGES // len(self.files))
        for path, stamp in zip(self.files, self._stamps, strict=True):
            found.update(stamp[2].to_bytes(8, "little"))
            try:
                with path.open("rb") as file:
                    for i in range(pages):
                        file.seek(i * max(0, stamp[2] - PAGE) // (pages - 1))
                        found.update(file.read(PAGE))
            except OSError as problem:
                raise _unreadable(path, problem) from None
        return found.hexdigest()


def _digest(path: Path, stamp: Stamp, whole: bool) -> str:
    if (stamp, whole) in _KNOWN:
        return _KNOWN[stamp, whole]
    size, found = stamp[2], hashlib.sha256()
    try:
        with path.open("rb") as file:
            if _stamp(os.fstat(file.fileno())) != stamp:
                raise HybridKVError(f"{str(path)!r} was changed since the model was opened; open it again")
            found.update(size.to_bytes(8, "little"))
            if whole or size <= BLOCK * BLOCKS:
                while data := file.read(BLOCK):
                    found.update(data)
            else:
                header = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 0
                found.update(file.read(min(header, MOST_HEADER)))
                for i in range(BLOCKS):
                    file.seek(i * (size - BLOCK) // (BLOCKS - 1))
                    found.update(file.read(BLOCK))
    except OSError as problem:
        raise _unreadable(path, problem) from None
    _KNOWN[stamp, whole] = found.hexdigest()
    return _KNOWN[stamp, whole]


def _unreadable(path: Path, problem: OSError) -> HybridKVError:
    return HybridKVError(f"{str(path)!r} cannot be read: {problem.strerror or problem}")


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
