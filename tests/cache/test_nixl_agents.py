"""What NIXL carries between shelves, and what becomes of a transfer that goes wrong: an error, and nothing left over.
What TCP carries too is tested in test_shelves.py, by both. `make test-nixl` has NIXL.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("nixl", reason="NIXL is not here: make test-nixl")

from cache.test_shelves import ROOM, ROOT, same, served, some, until
from hybridkv.cache import nixl_agents, shelf_server
from hybridkv.cache.buffers import Buffers
from hybridkv.cache.nixl_agents import USES, Agents
from hybridkv.cache.shelf_server import MAGIC, RemoteShelf
from hybridkv.cache.shelves import RamShelf, new_key
from hybridkv.errors import HybridKVError

SMALL = 1 << 12  # bytes of a piece, so that there are many


@pytest.fixture(scope="module")
def agents() -> Iterator[Agents]:
    found = Agents(loopback=True)
    yield found
    found.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_parts_go_by_nixl_in_pieces_and_leave_nothing_behind(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agents, "PIECE", SMALL)
    for name in ("_send_parts", "_part"):  # over TCP none may come
        monkeypatch.setattr(shelf_server, name, None)
    ram, counts = RamShelf(ROOM), []
    with served(ram, agents=agents) as server:
        remote = RemoteShelf(server.address, ROOM, agents=agents)
        for turn in range(2 * USES + 3):
            key, sent = new_key(), some(9_000 + 1003 * turn, seed=turn).seal()
            ram.put(key, sent)
            same(remote.get(key, sent.digest), sent)
            until(lambda key=key: ram.get(key) is None)
            counts.append(open_files())
        assert ram.used == 0 and server.sent == len(counts)
    assert 4 <= agents.made <= 8, "each serves some transfers, and no more"
    assert max(counts[USES:]) <= max(counts[:USES]) + 3


def test_what_is_empty_comes_too(agents: Agents) -> None:
    ram, key = RamShelf(ROOM), new_key()
    sent = Buffers(some().head | {"tensors": [["a", "float32", [0, 3]]]}, [torch.empty(0, dtype=torch.uint8)]).seal()
    ram.put(key, sent)
    with served(ram, agents=agents) as server:
        same(RemoteShelf(server.address, ROOM, agents=agents).get(key), sent)


def test_a_server_without_nixl_says_that_nothing_is_there_and_gives_it_over_tcp(agents: Agents) -> None:
    ram, key = RamShelf(ROOM), new_key()
    ram.put(key, some().seal())
    with served(ram) as server:
        assert RemoteShelf(server.address, ROOM, agents=agents).get(key) is None
        same(RemoteShelf(server.address, ROOM).get(key), some())


@pytest.mark.parametrize("how", ("says nothing", "leaves", "says something else"))
def test_a_peer_that_stops_reading_costs_an_agent_and_the_next_one_is_served(how: str, agents: Agents) -> None:
    ram, key = RamShelf(ROOM), new_key()
    ram.put(key, some().seal())
    closed: list[int] = []
    plain = nixl_agents.Agent.close

    def close(self: nixl_agents.Agent) -> None:
        closed.append(id(self))
        plain(self)

    with pytest.MonkeyPatch.context() as patch, served(ram, silence=0.3, agents=agents) as server:
        patch.setattr(nixl_agents.Agent, "close", close)
        with socket.create_connection(server.address, timeout=20) as connection:
            connection.sendall(MAGIC + b"N" + key.encode())
            assert connection.recv(1) == b"1"
            connection.sendall({"says something else": b"+?"}.get(how, b""))
            if how == "leaves":
                connection.close()
            until(lambda: not server._open)
        assert len(closed) == 1 and closed[0] not in map(id, agents._idle)
    with served(ram, agents=agents) as server:
        same(RemoteShelf(server.address, ROOM, agents=agents).get(key), some())


SERVE = """
import sys, time
from hybridkv.cache.nixl_agents import Agents
from hybridkv.cache.shelf_server import ShelfServer
from hybridkv.cache.shelves import RamShelf
from cache.test_shelves import ROOM, some
ram = RamShelf(ROOM)
ram.put(sys.argv[1], some(90_000).seal())
print(ShelfServer(ram, agents=Agents(loopback=True)).address[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", (signal.SIGKILL, signal.SIGSTOP))
def test_a_server_that_ends_or_stops_in_the_middle_is_an_error_or_does_no_harm(
    how: signal.Signals, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stops does not hinder a device, or a kernel, from reading its memory."""
    monkeypatch.setattr(nixl_agents, "PIECE", SMALL)
    key, pieces = new_key(), []
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", "tests", "tests/support"))
    command, pipe = [sys.executable, "-c", SERVE, key], subprocess.PIPE
    peer = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdin=pipe, stdout=pipe, text=True)
    plain = nixl_agents.Agent._read

    def read(self: nixl_agents.Agent, piece: list[tuple[int, int, int]], silence: float) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            peer.send_signal(how)
            if how == signal.SIGKILL:
                peer.wait()
        plain(self, piece, silence)

    monkeypatch.setattr(nixl_agents.Agent, "_read", read)
    try:
        assert peer.stdout is not None
        remote = RemoteShelf(("127.0.0.1", int(peer.stdout.readline())), ROOM, silence=2.0, agents=agents)
        before, taken = len(agents._idle), agents.made
        try:
            found = remote.get(key)
            assert how == signal.SIGSTOP
            same(found, some(90_000))
        except HybridKVError as problem:
            assert "NIXL" in str(problem) or "does not answer" in str(problem)
            assert len(agents._idle) <= max(0, before - 1), "what went wrong is not used again"
        assert len(pieces) >= 3 and agents.made <= taken + 1
    finally:
        peer.kill()
        peer.communicate()
    ram = RamShelf(ROOM)
    ram.put(key, some().seal())
    with served(ram, agents=agents) as server:  # others are none the worse
        same(RemoteShelf(server.address, ROOM, agents=agents).get(key), some())


def test_a_peer_that_does_not_drive_its_end_is_left_after_the_limit(agents: Agents) -> None:
    sent, got = torch.arange(5000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    with agents.one() as here, here.offered([sent]) as place:
        with pytest.raises(HybridKVError, match="NIXL has read nothing for 0.3 s"), agents.one() as there:
            there.read(place, [got], 0.3, lambda: None)
        assert there._nixl is None and there not in agents._idle


def test_a_peer_that_lies_about_where_parts_are_is_an_error(agents: Agents) -> None:
    sent, other = torch.arange(5000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    with agents.one() as here, here.offered([sent]) as place:
        said = json.loads(place)
        metadata = bytearray(base64.b64decode(said["metadata"]))
        metadata[len(metadata) // 3 : len(metadata) // 3 + 60] = bytes(60)
        for change, words in (
            ({"addresses": []}, "where each part lies"),
            ({"addresses": [-1]}, "where each part lies"),
            ({"addresses": [other.data_ptr()]}, "NIXL could not read"),  # which nobody has offered
            ({"metadata": "*"}, "how its memory is reached"),
            ({"metadata": base64.b64encode(b"x" * 300).decode()}, "NIXL could not read"),
            ({"metadata": base64.b64encode(metadata).decode()}, "NIXL could not read"),
        ):
            with pytest.raises(HybridKVError, match=words), agents.one() as there:
                there.read(
                    json.dumps(said | change).encode(), [torch.zeros(5000, dtype=torch.uint8)], 1.0, lambda: None
                )
        for data in (b"[]", b"{", b"\xff"):
            with pytest.raises(HybridKVError), agents.one() as there:
                there.read(data, [torch.zeros(5000, dtype=torch.uint8)], 1.0, lambda: None)


def test_no_memory_is_taken_before_the_sizes_are_known_to_fit(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    ram, key = RamShelf(8 * ROOM), new_key()
    ram.put(key, some(2 * ROOM).seal())
    monkeypatch.setattr(RemoteShelf, "_read_parts", None)
    with served(ram, agents=agents) as server, pytest.raises(HybridKVError, match="no more than"):
        RemoteShelf(server.address, ROOM, agents=agents).get(key)


def test_between_machines_it_begins_only_where_there_is_rdma() -> None:
    """In a process of its own: UCX reads its settings once."""
    script = "from hybridkv.cache.nixl_agents import Agents; Agents(loopback=False); print('began')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCX_LOG_LEVEL": "fatal"}
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    if Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()):
        assert done.stdout == "began\n"
    else:
        assert done.returncode == 1 and "without one use --kv-transport tcp" in done.stderr
