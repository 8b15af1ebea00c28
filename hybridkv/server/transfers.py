"""A request whose prompt one server reads and whose answer another writes, by vLLM's two legs of HTTP.

    leg 1   to a server that reads: max_tokens 1 and kv_transfer_params.do_remote_decode. Its answer has
            kv_transfer_params: where the request waits, its key, digest and for how long
    leg 2   the same request to a server that writes, with these kv_transfer_params. It fetches what waits, and goes on
            with its first token; where it cannot, it reads the prompt itself

The prompt of leg 2 must be the one that was read, token for token. So what comes from another server can save time and
cannot show anybody a text that he does not have.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridkv.cache.manifest import DIGEST
from hybridkv.cache.nixl_agents import Agents
from hybridkv.cache.session import RECORD_BYTES, Session
from hybridkv.cache.shelf_server import Address, RemoteShelf, ShelfServer
from hybridkv.cache.shelves import KEY, SECONDS, RamShelf, new_key
from hybridkv.config import SamplingParams
from hybridkv.errors import HybridKVError
from hybridkv.llm import LLM
from hybridkv.request import Request
from hybridkv.server.fields import Fields
from hybridkv.server.settings import ServerSettings

ENGINE = "hybridkv"  # whose parameters they are

log = logging.getLogger("hybridkv.server")


@dataclass(frozen=True)
class Waiting:
    """A request that waits at another server."""

    address: Address
    key: str
    digest: str
    nixl: bool = False  # whether it may be read so, too


@dataclass(frozen=True)
class Transfer:
    """What `kv_transfer_params` ask for."""

    sends: bool = False  # another server is to go on with the answer
    waiting: Waiting | None = None  # where its prompt was read


def read_transfer(asked: Fields) -> Transfer | None:
    """`kv_transfer_params`; those of others' servers ask for nothing."""
    given = asked.object("kv_transfer_params")
    if given is None:
        return None
    sends, fetches = given.flag("do_remote_decode"), given.flag("do_remote_prefill")
    if sends and asked.flag("stream"):
        raise given.wrong("do_remote_decode", "the answer that says where the request waits is not streamed")
    own = asked.object("hybridkv")
    if sends and own is not None and own.text("prefix", 256):
        why = "what goes on from a document is not sent to another server: leave this out, or hybridkv.prefix"
        raise given.wrong("do_remote_decode", why)
    return Transfer(sends, _waiting(given) if fetches else None)


def _waiting(given: Fields) -> Waiting | None:
    port, own = given.raw("remote_port"), given.raw(ENGINE)
    found = own if isinstance(own, dict) else {}
    host, key, digest = given.raw("remote_host"), found.get("key"), found.get("digest")
    if not isinstance(host, str) or not isinstance(key, str) or not isinstance(digest, str):
        return None
    good = type(port) is int and 0 < port < 65536 and KEY.match(key) and DIGEST.match(digest)
    return Waiting((host, port), key, digest, found.get("transport") == "nixl") if good else None


class Transfers:
    """What a server sends and fetches, as far as its role goes. All but `may_send` runs on worker threads."""

    def __init__(self, llm: LLM, settings: ServerSettings, count: Callable[[str], None] = lambda what: None) -> None:
        self._llm, self._settings, self._count = llm, settings, count
        self.shelf = RamShelf(settings.kv_bytes)
        self._lock = threading.Lock()
        self._server: ShelfServer | None = None
        self.agents: Agents | None = None
        if settings.sends or settings.fetches:
            llm.manager.model_files()  # it is found in the files, for which no step is to wait later
        if settings.kv_transport == "nixl" and (settings.sends or settings.fetches):
            self.agents = Agents(settings.kv_is_loopback)
        if settings.role == "prefill":
            self._open()

    def may_send(self, transfer: Transfer | None, choices: int) -> bool:
        """Whether a request is kept for another server."""
        return transfer is not None and transfer.sends and choices == 1 and self._settings.sends

    def send(self, request: Request) -> dict[str, Any] | None:
        """Lay down a request that has ended with its first token; returns what leg 2 is to say. None: it cannot be
        sent, and is to be read again there.
        """
        try:
            session = self._llm.owner.run(lambda engine: engine.export(request), drained=True)
            if session.snapshot is None:  # it was given up, or stands where it cannot be shared
                return None
            buffers, key, server = session.to_buffers().seal(), new_key(), self._open()
            self.shelf.put(key, buffers)
        except HybridKVError as problem:
            log.warning("a prompt was read and cannot be sent: %s", problem)
            return None
        self._count("sent")
        host, port = server.address
        own = {"key": key, "digest": buffers.digest, "bytes": buffers.nbytes, "expires": time.time() + SECONDS}
        own["transport"] = self._settings.kv_transport
        asked = {"do_remote_prefill": True, "do_remote_decode": False}
        where = {"remote_host": host, "remote_port": port, "remote_engine_id": ENGINE, "remote_block_ids": []}
        return asked | where | {ENGINE: own}

    def fetch(self, transfer: Transfer, prompt: list[int], params: SamplingParams) -> Session | None:
        """What another server has read of a prompt; None: it is read here."""
        waiting = transfer.waiting
        if waiting is None or self._settings.role == "prefill":
            return None
        try:
            found = self._fetch(waiting, prompt, params)
        except HybridKVError as problem:
            log.warning("a prompt that was read elsewhere is read again: %s", problem)
            found = None
        self._count("missed" if found is None else "fetched")
        return found

    def _fetch(self, waiting: Waiting, prompt: list[int], params: SamplingParams) -> Session:
        llm = self._llm
        if not self._settings.may_fetch(*waiting.address):
            raise HybridKVError("its server is none of this one's peers; name it with --kv-peer HOST:PORT")
        room = llm.manager.memory_bytes() * (1 if llm.ranks is None else llm.ranks.group.size) + RECORD_BYTES
        agents = self.agents if waiting.nixl else None
        remote = RemoteShelf(waiting.address, room, pinned=llm.device.type == "cuda", agents=agents)
        buffers = remote.get(waiting.key, waiting.digest)
        if buffers is None:
            raise HybridKVError("it does not wait there any more")
        session = Session.from_buffers(buffers, llm.owner.check_session_model, room)
        if session.tokens[: session.prompt_tokens] != prompt:
            raise HybridKVError("it is another prompt")
        answer = session.tokens[session.prompt_tokens :]
        if params.min_tokens and llm.engine.eos_ids.union(params.stop_token_ids).intersection(answer):
            raise HybridKVError("its first token ends the answer, which may not end there")
        return session

    def _open(self) -> ShelfServer:
        with self._lock:
            if self._server is None:
                host, port = self._settings.kv_host, self._settings.kv_port or 0
                self._server = ShelfServer(self.shelf, host, port, agents=self.agents)
            return self._server

    def close(self) -> None:
        """Nobody fetches anything any more."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()
        if self.agents is not None:
            self.agents.close()
