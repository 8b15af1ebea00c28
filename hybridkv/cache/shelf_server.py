"""A shelf that other processes reach: buffers over a private TCP port. Nothing is encrypted, and there is no pickle.

    client   HKV1 | what: G or P | key, 64 characters
    G, get   server: 1 | head's length, 4 bytes | head | parts, in order; or 0. client: 1 once it has all: then the
             server drops it
    N, get   by NIXL (nixl_agents.py). server: 1 | head's length | head | length | where the parts lie; or 0. client: +
             for each piece that it has read, 1 once it has all: then the server drops it
    P, put   client: head's length | head. server: 1, if the key is expected and the sizes fit; or 0. client: parts.
             server: 1 once it lies there

All sizes follow from the head, and are checked before memory is taken. Who stops in the middle, or says something else,
is left after some seconds, with nothing taken. Only keys that were made known by `expect` can be put: so whoever finds
the port can neither read nor store anything.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import closing, suppress

import torch
from torch import Tensor

from hybridkv.cache.buffers import HEAD_BYTES, Buffers, check_head, parse_head
from hybridkv.cache.nixl_agents import PIECE as READ_AT_ONCE
from hybridkv.cache.nixl_agents import Agent, Agents
from hybridkv.cache.part_file import TensorForm, as_bytes
from hybridkv.cache.shelves import SECONDS, Shelf, check_key
from hybridkv.errors import HybridKVError

MAGIC = b"HKV1"
YES, NO, MORE = b"1", b"0", b"+"
LOOK = 0.5  # milliseconds between two looks at a transfer by NIXL
SILENCE = 10.0  # seconds that a peer may say nothing
CONNECTIONS = 16  # at once
PIECE = 1 << 20  # bytes
Address = tuple[str, int]


class ShelfServer:
    """Others reach a shelf at an address, until it is closed.

    Args:
        shelf: what is served; its buffers are sealed.
        host: where to listen. Keys are all that guards it, so it belongs on a private network.
        port: 0 takes one that is free.
        room: bytes that somebody may put at the most.
        silence: seconds that a peer may say nothing.
        agents: by which peers may read, too; None: NIXL is not offered. They are closed by who has made them.
    """

    def __init__(
        self,
        shelf: Shelf,
        host: str = "127.0.0.1",
        port: int = 0,
        room: int = 0,
        silence: float = SILENCE,
        agents: Agents | None = None,
    ) -> None:
        self.shelf, self.room, self.silence, self.agents = shelf, room, silence, agents
        self.sent = self.received = 0  # buffers
        self._expected: dict[str, float] = {}
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=CONNECTIONS)
        except OSError as problem:
            raise HybridKVError(f"cannot listen at host {host}, port {port}: {problem.strerror or problem}") from None
        self._thread = threading.Thread(target=self._accept, name="hybridkv-shelf", daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        """Host and port."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def expect(self, key: str) -> None:
        """Somebody may put something under this key, once, within a minute."""
        now = time.monotonic()
        with self._lock:
            self._expected = {k: at for k, at in self._expected.items() if now - at < SECONDS}
            self._expected[check_key(key)] = now

    def close(self) -> None:
        """Leave all peers, and end the threads."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for connections
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for connection in left:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(self.silence)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # no file is left, as it may be for a moment
                continue
            with self._lock:
                full = len(self._open) >= CONNECTIONS or self._closed
                if not full:
                    self._open.add(connection)
            if full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="hybridkv-shelf", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(self.silence)
            asked = _read(connection, len(MAGIC) + 1 + 64)
            what, key = asked[len(MAGIC) : len(MAGIC) + 1], asked[len(MAGIC) + 1 :].decode("ascii", "replace")
            if asked.startswith(MAGIC) and what == b"G":
                self._give(connection, check_key(key))
            elif asked.startswith(MAGIC) and what == b"N":
                self._offer(connection, check_key(key))
            elif asked.startswith(MAGIC) and what == b"P":
                self._take(connection, check_key(key))
        except (OSError, HybridKVError):  # it has stopped, or is none of ours
            pass
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _give(self, connection: socket.socket, key: str) -> None:
        found = self.shelf.get(key)
        if found is None or not found.sealed:
            connection.sendall(NO)
            return
        connection.sendall(YES)
        _send(connection, found)
        if _read(connection, 1) == YES:
            self.shelf.drop(key)
            self.sent += 1

    def _offer(self, connection: socket.socket, key: str) -> None:
        found = self.shelf.get(key)
        if self.agents is None or found is None or not found.sealed:
            connection.sendall(NO)
            return
        with self.agents.one() as agent, agent.offered(found.parts) as place:
            connection.sendall(YES)
            for data in (found.head_bytes, place):
                connection.sendall(len(data).to_bytes(4, "big") + data)
            pieces = sum(part.nbytes for part in found.parts) // READ_AT_ONCE + 1
            last = time.monotonic() + self.silence * (pieces + 1)
            while (said := self._hear(connection, agent)) == MORE:
                if time.monotonic() > last:
                    raise TimeoutError("it says that it goes on for longer than all of it may take")
            if said != YES:
                raise ConnectionError("it has not read all of it")
        self.shelf.drop(key)
        self.sent += 1

    def _hear(self, connection: socket.socket, agent: Agent) -> bytes:
        """What the peer says next; meanwhile it reads."""
        until, waiting = time.monotonic() + self.silence, select.poll()
        waiting.register(connection, select.POLLIN)
        while not waiting.poll(LOOK):
            agent.drive()
            if time.monotonic() > until:
                raise TimeoutError("it reads nothing any more")
        return connection.recv(1)

    def _take(self, connection: socket.socket, key: str) -> None:
        head = parse_head(_read(connection, _length(connection)))
        with self._lock:
            expected = time.monotonic() - self._expected.pop(key, -SECONDS) < SECONDS
        try:
            forms = check_head(head, self.room)
            if not expected or "sha256" not in head:
                raise HybridKVError("nobody expects it, or it has no checksums")
            connection.sendall(YES)
            self.shelf.put(key, Buffers(head, [_part(connection, form.nbytes) for form in forms]))
        except HybridKVError:
            connection.sendall(NO)
            raise
        self.received += 1
        connection.sendall(YES)


class RemoteShelf:
    """A shelf in another process.

    Args:
        address: host and port of its ShelfServer.
        room: bytes that are taken at the most.
        pinned: whether what comes is to lie in pinned memory, for a GPU.
        silence: seconds that the peer may say nothing.
        agents: by which parts are read, if the peer offers that; None: they come over TCP.
    """

    def __init__(
        self,
        address: Address,
        room: int,
        pinned: bool = False,
        silence: float = SILENCE,
        agents: Agents | None = None,
    ) -> None:
        self.address, self.room, self.pinned, self.silence, self.agents = address, room, pinned, silence, agents

    def get(self, key: str, digest: str | None = None) -> Buffers | None:
        """What lies there, which is gone there then; None: nothing does. HybridKVError: the peer cannot be reached, or
        stops, or sends what is not well-formed, too large, or has another `digest` than was said.
        """
        with self._asking(b"G" if self.agents is None else b"N", key) as connection:
            try:
                if _read(connection, 1) != YES:
                    return None
                data = _read(connection, _length(connection))
                found = Buffers(parse_head(data), [])
                if digest is not None and found.digest != digest:
                    raise HybridKVError("the peer sends something else than was said: its digest differs")
                if not found.sealed:
                    raise HybridKVError("the peer sends buffers without checksums")
                forms = check_head(found.head, self.room)
                if self.agents is not None:
                    found.parts.extend(self._read_parts(connection, forms, self.agents))
                else:
                    found.parts.extend(_part(connection, form.nbytes, self.pinned) for form in forms)
                connection.sendall(YES)
                return found
            except OSError as problem:
                raise self._stopped(problem) from None

    def _read_parts(self, connection: socket.socket, forms: list[TensorForm], agents: Agents) -> list[Tensor]:
        place = _read(connection, _length(connection))
        parts = [torch.empty(form.nbytes, dtype=torch.uint8, pin_memory=self.pinned) for form in forms]
        with agents.one() as agent:
            agent.read(place, parts, self.silence, lambda: connection.sendall(MORE))
        return parts

    def put(self, key: str, buffers: Buffers) -> None:
        """Send something, over TCP; it lies there when this returns. Its key was expected there."""
        buffers = buffers.seal()
        with self._asking(b"P", key) as connection:
            try:
                data = buffers.head_bytes
                connection.sendall(len(data).to_bytes(4, "big") + data)
                if _read(connection, 1) != YES:
                    raise HybridKVError("the peer does not take it: it does not expect this key, or it is too large")
                _send_parts(connection, buffers)
                if _read(connection, 1) != YES:
                    raise HybridKVError("the peer has no room for it")
            except OSError as problem:
                raise self._stopped(problem) from None

    def drop(self, key: str) -> None:
        """Nothing: what is fetched is dropped there, and all else goes after some time."""

    def _asking(self, what: bytes, key: str) -> closing[socket.socket]:
        asked = MAGIC + what + check_key(key).encode()
        try:
            connection = socket.create_connection(self.address, timeout=self.silence)
            connection.sendall(asked)
        except OSError as problem:
            raise self._stopped(problem) from None
        return closing(connection)

    def _stopped(self, problem: OSError) -> HybridKVError:
        host, port = self.address
        return HybridKVError(f"the peer at {host}, port {port} does not answer: {problem.strerror or problem}")


def _send(connection: socket.socket, buffers: Buffers) -> None:
    data = buffers.head_bytes
    connection.sendall(len(data).to_bytes(4, "big") + data)
    _send_parts(connection, buffers)


def _send_parts(connection: socket.socket, buffers: Buffers) -> None:
    for part in buffers.parts:
        view = as_bytes(part)
        for at in range(0, len(view), PIECE):  # the limit of silence is of each piece
            connection.sendall(view[at : at + PIECE])


def _length(connection: socket.socket) -> int:
    """Of the head that follows."""
    found = int.from_bytes(_read(connection, 4), "big")
    if found > HEAD_BYTES:
        raise HybridKVError(f"the peer sends a head of {found} bytes; at most {HEAD_BYTES} are read")
    return found


def _part(connection: socket.socket, size: int, pinned: bool = False) -> Tensor:
    data = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    _fill(connection, as_bytes(data))
    return data


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        count = connection.recv_into(view[at:])
        if not count:
            raise ConnectionError(f"it closed the connection after {at} of {len(view)} bytes")
        at += count
