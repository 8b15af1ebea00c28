"""A safetensors file with a checksum: written whole or not at all, and read only once its header was found good.

    metadata: format, version, what the file is about, and sha256: of the whole file with zeros in the digest's place

The checksum finds damage, not malice: who reads a file checks the form of everything in it as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from hybridkv.errors import HybridKVError

FORMAT = "hybridkv-snapshot"
VERSION = "2"
SESSION_VERSION = "3"  # version 2, and the request beside its cache (session.py)
NO_DIGEST = "0" * 64
MAX_HEADER = 100_000_000  # bytes; safetensors reads no longer one


class NotWellFormed(Exception):
    """Says what is wrong with a file's contents by themselves, whatever cache they are for."""


def write_file(path: Path, tensors: dict[str, Tensor], meta: dict[str, str], what: str = "snapshot") -> None:
    """Write a file: whole, or not at all. `what` names its kind in errors."""
    parts = with_checksum(tensors, meta)
    if int.from_bytes(bytes(parts[0][:8]), "little") > MAX_HEADER:
        raise HybridKVError(f"{what} {path.name} cannot be written: its texts take more than {MAX_HEADER} bytes")
    check_place(path, what)
    try:
        _write_whole(path, parts)
    except (OSError, ValueError) as problem:
        raise HybridKVError(f"{what} {path.name} cannot be written: {_reason(problem)}") from None


def check_place(path: Path, what: str) -> None:
    """Whether a file can be made there, as far as can be seen beforehand, or HybridKVError."""
    try:
        if path.is_dir():
            problem = "a folder has that name; give the name of a file"
        elif not path.parent.is_dir():
            problem = f"there is no folder {str(path.parent)!r}; make it first"
        elif not os.access(path.parent, os.W_OK | os.X_OK):
            problem = f"no permission to write in {str(path.parent)!r}"
        else:
            return
    except (OSError, ValueError) as error:
        problem = _reason(error)
    raise HybridKVError(f"{what} {path.name!r} cannot be written: {problem}")


def read_file(
    path: Path, check: Callable[[dict[str, str]], None], what: str = "snapshot", room: int | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file. One that is truncated, altered or of another format is refused.

    `check` refuses metadata, and `room` says how many bytes may be read, before anything but the header is.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            problem = "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a plain file"
            raise HybridKVError(f"{what} {path.name!r} cannot be read: {problem}")
        size = status.st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > min(size - 8, MAX_HEADER):
                raise HybridKVError(f"{path.name} is not a {what}, or it is truncated")
            header = first + file.read(length)
            meta = _metadata(header, path.name, what)
            _check_version(meta, path.name, what)
            check(meta)
            if room is not None and size > room:
                raise HybridKVError(
                    f"{what} {path.name} has {size} bytes, and no more than {room} can belong to a request here"
                )
            file.seek(0)
            data = file.read(size)
    except HybridKVError:
        raise
    except (OSError, ValueError) as problem:
        raise HybridKVError(f"{what} {path.name!r} cannot be read: {_reason(problem)}") from None
    if not data.startswith(header) or not _agrees(data, len(header), meta.get("sha256", "")):
        raise HybridKVError(f"{what} {path.name} is damaged: its checksum does not agree; save it again")
    try:
        return safetensors.torch.load(data), meta
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise HybridKVError(f"{what} {path.name} is not well-formed: {problem}") from None


def with_checksum(tensors: dict[str, Tensor], meta: dict[str, str]) -> list[memoryview]:
    """A file in three parts, the second of which is its digest: nothing large is copied to put that in its place."""
    data = memoryview(safetensors.torch.save(tensors, meta | {"sha256": NO_DIGEST}))
    header = 8 + int.from_bytes(bytes(data[:8]), "little")
    at = _digest_place(bytes(data[:header]), NO_DIGEST)
    digest = hashlib.sha256(data).hexdigest()
    return [data[:at], memoryview(digest.encode()), data[at + len(digest) :]]


def _digest_place(header: bytes, digest: str) -> int:
    """Where the digest stands; -1: nowhere. A text in the metadata cannot look like this, its quotes are escaped."""
    key = b'"sha256":"'
    at = header.find(key + digest.encode() + b'"')
    return at + len(key) if at >= 0 else -1


def _agrees(data: bytes, header: int, digest: str) -> bool:
    at = _digest_place(data[:header], digest)
    if len(digest) != 64 or at < 0:
        return False
    view = memoryview(data)
    found = hashlib.sha256(view[:at])
    found.update(NO_DIGEST.encode())
    found.update(view[at + 64 :])
    return found.hexdigest() == digest


def _check_version(meta: dict[str, str], name: str, what: str) -> None:
    if meta.get("format") != FORMAT:
        raise HybridKVError(f"{name} is not a {what}: its format is not {FORMAT}")
    found = meta.get("version")
    if found == "1":
        raise HybridKVError(
            f"{name} is a snapshot of version 1, which does not say which model it was taken from, so it cannot be "
            f"trusted; this program reads versions {VERSION} and {SESSION_VERSION}: take it again"
        )
    if found not in (VERSION, SESSION_VERSION):
        raise HybridKVError(
            f"{name} is a snapshot of version {str(found)[:20]!r}; this program reads versions {VERSION} and "
            f"{SESSION_VERSION}"
        )


def _metadata(header: bytes, name: str, what: str) -> dict[str, str]:
    """The metadata of a safetensors file: eight bytes of header length, then JSON."""
    try:
        meta = json.loads(header[8:])["__metadata__"]
        return {str(key): str(value) for key, value in meta.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise HybridKVError(f"{name} is not a {what}, or its header is damaged") from None


def _write_whole(path: Path, parts: Sequence[memoryview]) -> None:
    """A temporary file beside the target, then one rename: readers see the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _reason(problem: Exception) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
