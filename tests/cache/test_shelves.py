"""Shelves: what is put comes back byte for byte, in memory, on the disk, and from another process; what is wrong, too
large or too late does not, and nothing hangs.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from transports import TRANSPORTS

from hybridkv.cache import shelf_server
from hybridkv.cache.buffers import HEAD_BYTES, Buffers, pack, unpack
from hybridkv.cache.nixl_agents import Agents
from hybridkv.cache.shelf_server import MAGIC, RemoteShelf, ShelfServer
from hybridkv.cache.shelves import DiskShelf, RamShelf, Shelf, new_key
from hybridkv.errors import HybridKVError

ROOT = Path(__file__).parents[2]
ROOM = 1 << 20
META = {"model": "m", "position": "3"}


def some(size: int = 5000, seed: int = 0) -> Buffers:
    made = torch.Generator().manual_seed(seed)
    tensors = {
        "entries/a/k": torch.randn(3, size // 12, generator=made),
        "state/b/s": torch.randint(0, 9, (7,), generator=made).to(torch.float8_e4m3fn),
        "lengths/a": torch.zeros(0, dtype=torch.int64),
    }
    return pack("snapshot", tensors, META)


def same(a: Buffers | None, b: Buffers) -> None:
    assert a is not None
    mine, others = unpack(a, "snapshot"), unpack(b, "snapshot")
    assert mine[1] == others[1] and mine[0].keys() == others[0].keys()
    for name, tensor in mine[0].items():
        assert torch.equal(tensor.view(torch.uint8), others[0][name].view(torch.uint8))


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module", params=TRANSPORTS)
def agents(request: pytest.FixtureRequest) -> Iterator[Agents | None]:
    """What both ends fetch by; None: TCP."""
    found = Agents(loopback=True) if request.param == "nixl" else None
    yield found
    if found is not None:
        found.close()


@contextmanager
def served(shelf: Shelf, silence: float = 5.0, agents: Agents | None = None) -> Iterator[ShelfServer]:
    server = ShelfServer(shelf, room=ROOM, silence=silence, agents=agents)
    try:
        yield server
    finally:
        server.close()
        assert not server._thread.is_alive()


@pytest.mark.parametrize("kind", ("ram", "disk", "remote"))
def test_what_is_put_comes_back(kind: str, agents: Agents | None, tmp_path: Path) -> None:
    ram = RamShelf(ROOM)
    with served(ram, agents=agents) as server:
        remote = RemoteShelf(server.address, ROOM, agents=agents)
        shelf: Shelf = {"ram": ram, "disk": DiskShelf(tmp_path / "shelf", ROOM), "remote": remote}[kind]
        first, second = some(seed=1), some(70_000, seed=2)
        keys = [new_key(), new_key()]
        for key, buffers in zip(keys, (first, second), strict=True):
            server.expect(key)
            shelf.put(key, buffers)
        assert shelf.get(new_key()) is None
        same(shelf.get(keys[1]), second)
        same(shelf.get(keys[0]), first)
        shelf.drop(keys[0])
        assert shelf.get(keys[0]) is None
        with pytest.raises(HybridKVError, match="no key"):
            shelf.put("../../etc/passwd", first)


def test_memory_and_disk_hold_so_many_bytes_and_no_longer_than_they_may(tmp_path: Path) -> None:
    clock = Clock()
    one, size = some(30_000), some(30_000).nbytes
    ram = RamShelf(2 * size + 100, seconds=60.0, clock=clock)
    disk = DiskShelf(tmp_path / "shelf", 2 * size + 8000, seconds=60.0, clock=clock)
    for shelf in (ram, disk):
        keys = [new_key() for _ in range(3)]
        for i, key in enumerate(keys):
            clock.now += 1
            shelf.put(key, one)
            if shelf is disk:
                os.utime(disk.path / f"{key}.safetensors", (clock.now, clock.now))
            assert shelf.used <= shelf.limit and shelf.get(key) is not None, i
        assert shelf.get(keys[0]) is None, "the first one made room"
        clock.now += 58
        assert shelf.get(keys[1]) is not None
        clock.now += 1
        assert shelf.get(keys[1]) is None and shelf.get(keys[2]) is not None
        clock.now += 1
        assert shelf.get(keys[2]) is None and shelf.used == 0
        with pytest.raises(HybridKVError, match="do not fit"):
            shelf.put(keys[0], some(10 * size))
        assert shelf.used == 0
    assert disk.path.stat().st_mode & 0o777 == 0o700


def test_a_damaged_file_is_not_there(tmp_path: Path) -> None:
    shelf, key = DiskShelf(tmp_path, ROOM), new_key()
    shelf.put(key, some())
    file = tmp_path / f"{key}.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert shelf.get(key) is None and not file.exists()


def test_what_was_fetched_is_gone_there_and_what_was_not_stays(agents: Agents | None) -> None:
    ram, key = RamShelf(ROOM), new_key()
    ram.put(key, some().seal())
    with served(ram, agents=agents) as server:
        raw = socket.create_connection(server.address, timeout=5)
        raw.sendall(MAGIC + (b"N" if agents else b"G") + key.encode())
        assert raw.recv(1) == b"1"
        raw.close()  # in the middle
        remote = RemoteShelf(server.address, ROOM, agents=agents)
        same(remote.get(key), some())
        until(lambda: ram.get(key) is None)
        assert remote.get(key) is None


def until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen in time")


def test_nobody_puts_what_is_not_expected_or_too_large() -> None:
    ram, key = RamShelf(ROOM), new_key()
    with served(ram) as server:
        remote = RemoteShelf(server.address, ROOM)
        with pytest.raises(HybridKVError, match="does not expect"):
            remote.put(key, some())
        server.expect(key)
        with pytest.raises(HybridKVError, match="too large"):
            remote.put(key, some(2 * ROOM))
        server.expect(key)
        remote.put(key, some())
        with pytest.raises(HybridKVError, match="does not expect"):  # once
            remote.put(key, some())
        same(ram.get(key), some())


def answering(data: bytes, hold: bool = False) -> tuple[shelf_server.Address, threading.Event]:
    """A peer that says these bytes to whoever asks, and then leaves, or says nothing more."""
    listener, end = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def run() -> None:
        connection, _ = listener.accept()
        connection.recv(200)
        connection.sendall(data)
        if hold:
            end.wait(20)
        connection.close()
        listener.close()

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()[:2], end


def test_a_peer_that_stops_lies_or_sends_too_much_is_left_with_nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    good = some().seal()
    taken: list[int] = []
    plain = shelf_server._part

    def counted(connection: socket.socket, size: int, pinned: bool = False) -> torch.Tensor:
        taken.append(size)
        return plain(connection, size, pinned)

    monkeypatch.setattr(shelf_server, "_part", counted)

    def said(buffers: Buffers, cut: int | None = None) -> bytes:
        parts = b"".join(part.numpy().tobytes() for part in buffers.parts)[:cut]
        return b"1" + len(buffers.head_bytes).to_bytes(4, "big") + buffers.head_bytes + parts

    huge = Buffers(good.head | {"tensors": [["a", "uint8", [1 << 45]]], "sha256": ["0" * 64]}, [])
    for data, hold, words, parts in (
        (said(good, 100), False, "after 100 of", 1),  # it is gone in the middle
        (said(good, 100), True, "timed out", 1),  # or silent
        (b"", False, "does not answer", 0),
        (b"1" + (HEAD_BYTES + 1).to_bytes(4, "big"), False, "at most", 0),
        (b"1\0\0\0\4{]]]", False, "head of what was sent", 0),
        (said(huge), False, "can belong to a request", 0),
        (said(some()), False, "without checksums", 0),
        (said(Buffers(good.head | {"version": 9}, good.parts)), False, "version", 0),
    ):
        taken.clear()
        address, end = answering(data, hold)
        with pytest.raises(HybridKVError, match=words):
            RemoteShelf(address, ROOM, silence=0.5 if hold else 5.0).get(new_key())
        end.set()
        assert len(taken) == parts, data[:80]
    address, _ = answering(said(good))
    with pytest.raises(HybridKVError, match="digest differs"):
        RemoteShelf(address, ROOM).get(new_key(), digest="0" * 64)
    address, _ = answering(said(good))
    found = RemoteShelf(address, ROOM).get(new_key(), digest=good.digest)
    same(found, good)
    closed = socket.create_server(("127.0.0.1", 0))
    address = closed.getsockname()[:2]
    closed.close()
    with pytest.raises(HybridKVError, match="does not answer"):
        RemoteShelf(address, ROOM).get(new_key())


def was_left(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it had not read all of it
        return True


def test_a_server_leaves_who_says_nothing_or_nonsense_and_serves_the_others() -> None:
    ram, key = RamShelf(ROOM), new_key()
    ram.put(key, some().seal())
    with served(ram, silence=0.2) as server, socket.create_connection(server.address, timeout=20) as silent:
        assert was_left(silent)
    with served(ram, silence=20.0) as server:
        many = [socket.create_connection(server.address, timeout=20) for _ in range(shelf_server.CONNECTIONS)]
        until(lambda: len(server._open) == shelf_server.CONNECTIONS)
        with socket.create_connection(server.address, timeout=20) as one_more:
            assert was_left(one_more)
        for connection in many:
            connection.close()
        until(lambda: not server._open)
        for data in (b"GET / HTTP/1.1\r\n\r\n" + b" " * 60, MAGIC + b"X" + key.encode(), MAGIC + b"G" + b"/" * 64):
            with socket.create_connection(server.address, timeout=20) as connection:
                connection.sendall(data)
                assert was_left(connection)
        same(RemoteShelf(server.address, ROOM).get(key), some())


FETCH = """
import sys
from hybridkv.cache.nixl_agents import Agents
from hybridkv.cache.shelf_server import RemoteShelf
agents = Agents(loopback=True) if sys.argv[5] == "nixl" else None
found = RemoteShelf(("127.0.0.1", int(sys.argv[1])), 1 << 20, agents=agents).get(sys.argv[2], sys.argv[3])
RemoteShelf(("127.0.0.1", int(sys.argv[1])), 1 << 20).put(sys.argv[4], found)
"""


def test_another_process_fetches_and_sends_back(agents: Agents | None) -> None:
    ram, key, back = RamShelf(ROOM), new_key(), new_key()
    sent = some(90_000).seal()
    ram.put(key, sent)
    with served(ram, agents=agents) as server:
        server.expect(back)
        arguments = [str(server.address[1]), key, sent.digest, back, "nixl" if agents else "tcp"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", FETCH, *arguments], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        same(ram.get(back), sent)
        assert ram.get(key) is None


class Patient:
    """Stands in for Agents: whoever says so reads."""

    @contextmanager
    def one(self) -> Iterator["Patient"]:
        yield self

    @contextmanager
    def offered(self, parts: object) -> Iterator[bytes]:
        yield b"{}"

    def drive(self) -> None:
        """Nothing to do."""


def test_a_peer_that_says_for_ever_that_it_goes_on_is_left() -> None:
    """So long as each piece may take is all that it has."""
    ram, key = RamShelf(ROOM), new_key()
    ram.put(key, some().seal())
    with served(ram, silence=0.2, agents=Patient()) as server:  # type: ignore[arg-type]
        with socket.create_connection(server.address, timeout=20) as connection:
            connection.sendall(MAGIC + b"N" + key.encode())
            assert connection.recv(1) == b"1"
            end = time.monotonic() + 10
            with suppress(OSError):
                while server._open:
                    assert time.monotonic() < end, "it holds a place as long as it likes"
                    connection.sendall(b"+")
                    time.sleep(0.05)
        assert server.sent == 0 and ram.get(key) is not None
