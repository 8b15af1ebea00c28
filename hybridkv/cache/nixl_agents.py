"""NIXL: a shelf's buffers go from memory to memory of another process, by RDMA where there is any (extra: nixl).

What is said stays on the shelf's TCP connection (shelf_server.py): the key, the head, where the parts lie, that all has
arrived. So nothing of it goes through clients, and only the bytes of the parts take another way:

    server   registers the parts of one request, for as long as one peer reads them: `offered`
    client   takes memory of the sizes that the head has named, and reads it full in pieces: `read`

An agent serves one transfer at a time. After one that went wrong it is closed before any memory is given back: a peer
that comes late finds nobody who reads or writes for it. After some transfers it is closed, too: each leaves an open
file behind. Agents have no threads, which would look for work all the time; whoever waits for a transfer drives it.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from torch import Tensor

from hybridkv.errors import HybridKVError
from hybridkv.files import parse_json

PIECE = 8 << 20  # bytes that are read at once; the limit of silence is of each
LOOK = 2e-4  # seconds between two looks at one
USES = 16  # transfers of an agent
IDLE = 4  # agents that wait for more
WHERE = "where it lies"  # of what a peer says


class Agents:
    """The agents of this process. Any thread may use it.

    Args:
        loopback: whether all peers are on this machine. If so UCX, which NIXL sends by, listens there alone. If not, it
            may not use TCP: it only imitates such reads over that, and a process whose peer went silent meanwhile was
            seen to be ended by UCX.
    """

    def __init__(self, loopback: bool) -> None:
        name, value = ("UCX_NET_DEVICES", "lo") if loopback else ("UCX_TLS", "^tcp")
        os.environ.setdefault(name, value)
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        self._idle: list[Agent] = []
        self._lock = threading.Lock()
        self._closed = False
        self.made = 0
        self._give_back(self._new())  # what does not work is said now

    @contextmanager
    def one(self) -> Iterator[Agent]:
        """An agent for one transfer."""
        with self._lock:
            agent = self._idle.pop() if self._idle else None
        agent = agent or self._new()
        try:
            yield agent
        except BaseException:
            agent.close()
            raise
        self._give_back(agent)

    def close(self) -> None:
        """None are left but those at work, which are closed when they have done it."""
        with self._lock:
            self._closed, idle = True, self._idle
            self._idle = []
        for agent in idle:
            agent.close()

    def _new(self) -> Agent:
        self.made += 1
        return Agent()

    def _give_back(self, agent: Agent) -> None:
        with self._lock:
            keep = not self._closed and agent.uses < USES and len(self._idle) < IDLE
            if keep:
                self._idle.append(agent)
        if not keep:
            agent.close()


class Agent:
    """One NIXL agent, on the host's memory."""

    def __init__(self) -> None:
        nixl = _nixl()
        self.uses = 0
        config = nixl.nixl_agent_config(
            enable_prog_thread=False, sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            self._nixl: Any = nixl.nixl_agent(secrets.token_hex(16), config)
        except Exception as problem:
            raise HybridKVError(
                f"NIXL cannot begin ({problem}): between machines it needs a device for RDMA (UCX_NET_DEVICES names "
                "one); without one use --kv-transport tcp"
            ) from None
        if "UCX" not in self._nixl.backends:
            raise HybridKVError("this NIXL has no UCX, by which it would send; install the package nixl of PyPI")
        self._registered: Any = None
        self._peer: Any = None
        self._reading: Any = None

    # ---- who has it

    @contextmanager
    def offered(self, parts: Sequence[Tensor]) -> Iterator[bytes]:
        """Others may read these parts meanwhile; how, is what the peer is told."""
        self.uses += 1
        try:
            self._register(parts)
            metadata = self._nixl.get_partial_agent_metadata(self._registered, True) if self._registered else b""
        except Exception as problem:
            raise HybridKVError(f"NIXL cannot offer {sum(part.nbytes for part in parts)} bytes: {problem}") from None
        said = {"metadata": base64.b64encode(metadata).decode(), "addresses": [part.data_ptr() for part in parts]}
        yield json.dumps(said).encode()
        try:
            self._forget()
        except Exception as problem:
            raise HybridKVError(f"NIXL cannot end what it offered: {problem}") from None

    def drive(self) -> None:
        """Do what the peer's reading needs of this end: nothing where a device does it."""
        try:
            self._nixl.get_new_notifs()
        except Exception as problem:
            raise HybridKVError(f"NIXL cannot go on: {problem}") from None

    # ---- who wants it

    def read(self, place: bytes, parts: Sequence[Tensor], silence: float, alive: Callable[[], None]) -> None:
        """Fill parts with what lies at `place`, as `offered` has said it. `alive` is called after each piece, none of
        which may take longer than `silence` seconds. HybridKVError: they are not what is there.
        """
        self.uses += 1
        metadata, addresses = _place(place, len(parts))
        try:
            self._register(parts)
            if self._registered:
                self._peer = self._nixl.add_remote_agent(metadata)
            for piece in _pieces(parts, addresses):
                self._read(piece, silence)
                alive()
            self._forget()
        except (HybridKVError, OSError):
            raise
        except Exception as problem:
            raise HybridKVError(f"NIXL could not read what the peer offers: {problem}") from None

    def _read(self, piece: list[tuple[int, int, int]], silence: float) -> None:
        nixl = self._nixl
        here = nixl.get_xfer_descs([(to, size, 0) for to, _, size in piece], "DRAM")
        there = nixl.get_xfer_descs([(at, size, 0) for _, at, size in piece], "DRAM")
        self._reading = nixl.initialize_xfer("READ", here, there, self._peer)
        until = time.monotonic() + silence
        state = nixl.transfer(self._reading)
        while state == "PROC":
            if time.monotonic() > until:
                raise HybridKVError(f"the peer does not answer: NIXL has read nothing for {silence:g} s")
            time.sleep(LOOK)
            state = nixl.check_xfer_state(self._reading)
        if state != "DONE":
            raise HybridKVError(f"NIXL could not read what the peer offers: its state is {state}")
        self._reading.release()
        self._reading = None

    # ---- both

    def _register(self, parts: Sequence[Tensor]) -> None:
        found = [(part.data_ptr(), part.nbytes, 0, "") for part in parts if part.nbytes]
        self._registered = self._nixl.register_memory(found, "DRAM") if found else None

    def _forget(self) -> None:
        """The transfer has ended well."""
        if self._peer is not None:
            self._nixl.remove_remote_agent(self._peer)
        if self._registered is not None:
            self._nixl.deregister_memory(self._registered)
        self._peer = self._registered = None

    def close(self) -> None:
        """Whatever it was doing ends, and nobody reaches any memory by it from here on."""
        if self._reading is not None:
            with suppress(Exception):  # it may say that it had not ended
                self._reading.release()
            self._reading = None
        with suppress(Exception):  # nothing can be done about it, and what follows ends it
            self._forget()
        self._peer = self._registered = self._nixl = None  # the last of these ends it


def _pieces(parts: Sequence[Tensor], addresses: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """(address here, address there, bytes) of all parts, so many bytes at once."""
    piece: list[tuple[int, int, int]] = []
    room = PIECE
    for part, there in zip(parts, addresses, strict=True):
        at = 0
        while at < part.nbytes:
            size = min(room, part.nbytes - at)
            piece.append((part.data_ptr() + at, there + at, size))
            at, room = at + size, room - size
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


def _place(data: bytes, count: int) -> tuple[bytes, list[int]]:
    """Metadata and the address of each part, or HybridKVError."""
    said = parse_json(data, WHERE)
    text, addresses = said.get("metadata"), said.get("addresses")
    good = isinstance(text, str) and isinstance(addresses, list) and len(addresses) == count
    if not good or not all(type(at) is int and 0 <= at < 1 << 63 for at in addresses):
        raise HybridKVError("the peer does not say where each part lies")
    try:
        return base64.b64decode(text, validate=True), addresses
    except ValueError:
        raise HybridKVError("the peer does not say how its memory is reached") from None


def _nixl() -> Any:
    """NIXL's module, whose words go to the log and not to stdout."""
    raises = logging.raiseExceptions
    try:
        found = import_module("nixl._api")
    except ImportError as problem:
        raise HybridKVError(f"NIXL is not here ({problem}): pip install 'hybridkv[nixl]'") from None
    finally:
        logging.raiseExceptions = raises
    said = logging.getLogger("nixl")
    said.handlers.clear()
    said.propagate = True
    return found
