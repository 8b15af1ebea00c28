"""Store: saved caches in a folder. Parts are immutable and named by their content; manifests name them.

    DIR/parts/<sha256>.safetensors     written once, shared by all manifests that name them
    DIR/index/<name>.json              one saved cache each; replaced by one rename
    DIR/.lock                          whoever writes or collects holds it alone, whoever reads holds it with others

Writing: parts under temporary names, each to the disk, each renamed; the folder; then the manifest, the same way.
Killed at any moment there is the old manifest or the new one, and all parts that it names. What is left over is
collected by the next one that writes. Folders have mode 0700, files 0600: prompts are in them. No link is followed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from hybridkv.cache.manifest import MANIFEST_BYTES, MOST_PART_BYTES, Manifest, Part, PartForm
from hybridkv.cache.part_file import (
    SUFFIX,
    TEMPORARY,
    Damaged,
    as_bytes,
    bytes_of,
    digest_of,
    read_checked,
    read_part,
    read_whole,
    size_on_disk,
    write_new,
)
from hybridkv.errors import HybridKVError
from hybridkv.files import parse_json

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
THREADS = 4  # that read, hash and write parts
SPOILT = ".damaged"  # what the name of a part gets whose bytes are not its own any more


Use = Callable[[PartForm, Part, dict[str, Tensor]], None]


@dataclass(frozen=True)
class Saved:
    """A saved cache in a list."""

    name: str
    manifest: Manifest | None
    problem: str = ""  # why there is no manifest


class Store:
    """A folder of saved caches.

    Args:
        path: the folder; made when something is saved.
        limit: bytes that all parts together may have; None: what the disk holds.
    """

    def __init__(self, path: str | Path, limit: int | None = None) -> None:
        self.path, self.limit = Path(path).expanduser(), limit

    # ---- saving

    def save(self, name: str, manifest: Manifest, parts: Iterator[tuple[PartForm, Mapping[str, Tensor], str]]) -> int:
        """Write parts and then the manifest with their list; returns how many bytes were new.

        `parts` gives the form of each, its tensors on the host and its chain, in order. Whatever fails, what was saved
        under the name before is still there, and nothing of the new is.
        """
        check_name(name)
        certain = "what was saved before is as it was"
        try:
            with self._folders(write=True) as (folder, index):
                try:
                    listed, new = self._write_parts(folder, parts)
                    os.fsync(folder)
                    self._write_manifest(index, name, replace(manifest, parts=tuple(listed)))
                    certain = "that it is on the disk is not certain"  # it has its name
                    os.fsync(index)
                finally:
                    with suppress(OSError, HybridKVError):
                        self._collect(folder, index)
                return new
        except OSError as problem:
            raise HybridKVError(
                f"{name!r} cannot be saved in {str(self.path)!r}: {problem.strerror or problem}; {certain}"
            ) from None

    def _write_parts(
        self, folder: int, parts: Iterator[tuple[PartForm, Mapping[str, Tensor], str]]
    ) -> tuple[list[Part], int]:
        used = sum(size for _, size in _files(folder)) if self.limit is not None else 0
        new, waiting = 0, []

        def write(form: PartForm, tensors: Mapping[str, Tensor], chain: str) -> tuple[Part, int]:
            pieces = (
                bytes_of(form.tensors, tensors) if form.tensors else [memoryview(safetensors.torch.save(dict(tensors)))]
            )
            size, digest = sum(len(piece) for piece in pieces), digest_of(pieces)
            if size > MOST_PART_BYTES:
                raise HybridKVError(f"a part '{form.what}' of {size} bytes is larger than {MOST_PART_BYTES}")
            part = Part(form.what, form.begin, form.end, size, digest, chain)
            if size_on_disk(folder, digest + SUFFIX) == size:
                return part, 0
            write_new(folder, digest + SUFFIX, pieces)
            return part, size

        def ended(future: Future[tuple[Part, int]]) -> Part:
            nonlocal new
            part, size = future.result()
            new += size
            if self.limit is not None and used + new > self.limit:
                raise HybridKVError(
                    f"{str(self.path)!r} holds {used} bytes and may hold {self.limit}: what is saved does not fit; "
                    "remove something (hybridkv cache rm), or raise the limit"
                )
            return part

        listed: list[Part] = []
        with ThreadPoolExecutor(THREADS, "hybridkv-store") as pool:
            try:
                for form, tensors, chain in parts:
                    waiting.append(pool.submit(write, form, tensors, chain))
                    if len(waiting) > THREADS:  # no more than so many in memory
                        listed.append(ended(waiting.pop(0)))
                listed += [ended(future) for future in waiting]
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise
        return listed, new

    def _write_manifest(self, index: int, name: str, manifest: Manifest) -> None:
        data = json.dumps(manifest.as_json(), allow_nan=False, separators=(",", ":")).encode()
        if len(data) > MANIFEST_BYTES:
            raise HybridKVError(f"{name!r} cannot be saved: its texts take more than {MANIFEST_BYTES} bytes")
        write_new(index, name + ".json", [memoryview(data)])

    # ---- reading

    def manifest(self, name: str) -> Manifest:
        """What is saved under a name, or HybridKVError."""
        check_name(name)
        with self._folders() as (_, index):
            return self._manifest(index, name)

    def _manifest(self, index: int, name: str) -> Manifest:
        size = size_on_disk(index, name + ".json")
        if size is None:
            there = ", ".join(repr(each) for each in sorted(_names(index))[:8]) or "nothing"
            raise HybridKVError(f"{str(self.path)!r} has no saved cache {name!r}; there is {there}")
        if size > MANIFEST_BYTES:
            raise HybridKVError(
                f"saved cache {name!r}: its manifest has {size} bytes; at most {MANIFEST_BYTES} are read"
            )
        try:
            data = bytes(as_bytes(read_whole(index, name + ".json", size)))
            return Manifest.of(parse_json(data, f"saved cache {name!r}"))
        except OSError as problem:
            raise HybridKVError(f"saved cache {name!r} cannot be read: {problem.strerror or problem}") from None
        except HybridKVError as problem:
            raise HybridKVError(_once(f"saved cache {name!r}: ", str(problem))) from None

    def check_sizes(self, name: str, manifest: Manifest) -> None:
        """Whether every part is there with as many bytes as the manifest says, or HybridKVError."""
        with self._folders() as (folder, _):
            for part in manifest.parts:
                found = size_on_disk(folder, part.sha256 + SUFFIX)
                if found != part.bytes:
                    what = "is missing" if found is None else f"has {found} bytes, not {part.bytes}"
                    raise HybridKVError(f"saved cache {name!r}: its part {_part_name(part)} {what}")

    def read(
        self,
        name: str,
        parts: Sequence[tuple[PartForm, Part]],
        use: Callable[[PartForm, Part, dict[str, Tensor]], None],
    ) -> None:
        """Read parts, several at a time, and hand each to `use`, in order, once its bytes were found to be its own.

        One that is damaged is refused, by its name, and set aside, so that saving again writes it anew.
        """
        with self._folders() as (folder, _), ThreadPoolExecutor(THREADS, "hybridkv-store") as pool:

            def load(form: PartForm, part: Part) -> dict[str, Tensor]:
                if form.tensors:
                    return read_part(folder, part.sha256, form.tensors)
                data = read_checked(folder, part.sha256, part.bytes)
                try:
                    return safetensors.torch.load(bytes(as_bytes(data)))
                except Exception as problem:
                    raise HybridKVError(f"it is not well-formed: {problem}") from None

            waiting: list[tuple[PartForm, Part, Future[dict[str, Tensor]]]] = []
            rest = iter(parts)
            try:
                while True:
                    for form, part in rest:
                        waiting.append((form, part, pool.submit(load, form, part)))
                        if len(waiting) > THREADS:
                            break
                    if not waiting:
                        return
                    form, part, future = waiting.pop(0)
                    try:
                        tensors = future.result()
                    except HybridKVError as problem:
                        if isinstance(problem, Damaged):
                            self._set_aside(folder, part)
                        raise HybridKVError(f"saved cache {name!r}: its part {_part_name(part)}: {problem}") from None
                    use(form, part, tensors)
            finally:
                for _, _, future in waiting:
                    future.cancel()

    def _set_aside(self, folder: int, part: Part) -> None:
        with suppress(OSError):
            os.rename(part.sha256 + SUFFIX, part.sha256 + SPOILT, src_dir_fd=folder, dst_dir_fd=folder)

    # ---- what there is

    def saved(self) -> list[Saved]:
        """All saved caches, by name; a manifest that cannot be read is there with the reason."""
        if not (self.path / "index").is_dir():  # nothing was saved yet
            return []
        with self._folders() as (_, index):
            return [self._saved(index, name) for name in sorted(_names(index))]

    def _saved(self, index: int, name: str) -> Saved:
        try:
            return Saved(name, self._manifest(index, name))
        except HybridKVError as problem:
            return Saved(name, None, str(problem))

    @property
    def bytes(self) -> int:
        """Of all parts on the disk."""
        if not (self.path / "parts").is_dir():
            return 0
        with self._folders() as (folder, _):
            return sum(size for _, size in _files(folder))

    def remove(self, name: str) -> int:
        """Forget a saved cache; returns the bytes of parts that nothing else names, which are gone."""
        check_name(name)
        with self._folders(write=True) as (folder, index):
            if size_on_disk(index, name + ".json") is None:
                self._manifest(index, name)  # says what there is
            os.unlink(name + ".json", dir_fd=index)
            os.fsync(index)
            return self._collect(folder, index)

    def verify(self, name: str) -> list[str]:
        """Read every part of a saved cache; what is wrong, in words. Nothing is changed."""
        manifest, wrong = self.manifest(name), []
        with self._folders() as (folder, _):
            for part in manifest.parts:
                try:
                    read_checked(folder, part.sha256, part.bytes)
                except Damaged as problem:
                    wrong.append(f"part {_part_name(part)}: {problem}")
        return wrong

    def _collect(self, folder: int, index: int) -> int:
        """Remove parts that no manifest names, and what was never finished. Nothing, if a manifest cannot be read."""
        named: set[str] = set()
        for name in _names(index):
            found = self._saved(index, name).manifest
            if found is None:
                return 0
            named |= {part.sha256 + SUFFIX for part in found.parts}
        freed = 0
        for name, size in [*_files(folder)]:
            if name not in named:
                os.unlink(name, dir_fd=folder)
                freed += size
        for name, _ in [*_files(index)]:
            if name.startswith(TEMPORARY):
                os.unlink(name, dir_fd=index)
        return freed

    # ---- folders

    @contextmanager
    def _folders(self, write: bool = False) -> Iterator[tuple[int, int]]:
        """Open parts/ and index/, made if need be, and locked: alone for those who write, else with other readers."""
        opened: list[int] = []
        try:
            if write:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                for name in ("parts", "index"):
                    with suppress(FileExistsError):
                        os.mkdir(self.path / name, 0o700)
            opened.append(self._lock(write))
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            opened += [os.open(self.path / name, flags) for name in ("parts", "index")]
        except OSError as problem:
            for file in opened:
                _close(file)
            raise HybridKVError(
                f"{str(self.path)!r} is no store of saved caches: {problem.strerror or problem}"
            ) from None
        try:
            yield opened[1], opened[2]
        finally:
            for file in reversed(opened):
                _close(file)

    def _lock(self, write: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        try:
            file = os.open(self.path / ".lock", flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a folder that can only be read, or is no store
            return -1
        try:
            fcntl.flock(file, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        except BaseException:
            os.close(file)
            raise
        return file


def _close(file: int) -> None:
    if file >= 0:
        os.close(file)


def _files(folder: int) -> list[tuple[str, int]]:
    """(name, bytes) of the plain files of an open folder."""
    with os.scandir(folder) as found:
        return [(e.name, e.stat(follow_symlinks=False).st_size) for e in found if e.is_file(follow_symlinks=False)]


def _names(index: int) -> list[str]:
    names = [name.removesuffix(".json") for name, _ in _files(index) if name.endswith(".json")]
    return [name for name in names if NAME.match(name)]


def check_name(name: Any) -> None:
    """Whether a saved cache can have this name, or HybridKVError."""
    if not isinstance(name, str) or not NAME.match(name):
        raise HybridKVError(
            f"a saved cache cannot be called {str(name)[:120]!r}: letters, digits, '.', '_' and '-', up to 100 "
            "of them, a letter or digit first"
        )


def _part_name(part: Part) -> str:
    return f"{part.what} {part.begin} to {part.end} ({part.sha256[:12]}...)"


def _once(prefix: str, text: str) -> str:
    return text if text.startswith(prefix) else prefix + text


def age(manifest: Manifest) -> float:
    """Seconds since it was saved."""
    return max(0.0, time.time() - manifest.saved_at)
