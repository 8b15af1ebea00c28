"""How a server is opened, with every default and limit in one place."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from importlib.util import find_spec

from hybridkv.errors import HybridKVError
from hybridkv.text.call_formats import FORMATS

# Of one request. Each is tested at its limit and one above.
MAX_ANSWERS = 8  # n
MAX_PROMPTS = 16
MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 19  # of echo with logprobs: answers x prompt tokens x (1 + logprobs)
MAX_BIASES = 1024
MAX_MESSAGES = 1 << 16
MAX_PARTS = 1 << 12
MAX_TOOLS = 512
MAX_TOOL_BYTES = 256 << 10  # of all schemas of a request
MAX_NAME = 256  # characters of a model's name
BODY_BYTES_PER_TOKEN = 16  # of the context
LEAST_BODY = 2 << 20
MAX_HEADERS = 64 << 10  # bytes of all headers together
HEADER_SECONDS = 10.0  # for a request's headers, from its connection or its first byte on
ROLES = ("both", "prefill", "decode")
TRANSPORTS = ("tcp", "nixl")
PEER = re.compile(
    r"(?P<bare>[0-9a-fA-F]*:[0-9a-fA-F:]*:[0-9a-fA-F.:]*)|(\[(?P<six>[^]]+)\]|(?P<host>[^:\[\]\s]+))(:(?P<port>\d{1,5}))?"
)
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerSettings:
    """Who may ask, and how much at once.

    Args:
        host: the address to listen at.
        port: 0 takes one that is free.
        api_keys: without one only this machine may ask.
        names: what the model is called; empty: the name of its file. Those with * or ? are patterns.
        allowed_hosts: names besides the loopback ones by which clients may call this server; * is any. At a public
            address they also may by any address, and by the machine's name.
        allowed_origins: web pages that may ask, such as http://localhost:3000.
        queue: requests that may wait beside those that run.
        queue_seconds: that a request may wait; 0: for ever.
        request_seconds: that it may take in all; 0: for ever.
        shutdown_seconds: for answers to end, and named conversations to be saved, when the server is told to end.
        write_seconds: that a client may take to accept what is sent to it.
        body_seconds: that it may take to send its body.
        body_bytes: of all bodies that have come and are not read yet; one of the largest size always fits.
        keep_alive: seconds of silence in a stream after which a sign of life is sent.
        connections: open at once; one that has said nothing makes room for the next.
        metrics_prefix: of the names at /metrics.
        log_json: log lines as JSON.
        tool_format: how the model writes calls, by a name of text/call_formats.py; None: as its template says.
        role: prefill reads prompts for other servers, decode writes answers to prompts that others have read, both
            does either; all answer plain requests.
        kv_host: the address at which other servers fetch what was read; on a private network.
        kv_port: 0 takes one that is free, and so does None where the role is prefill; a server whose role is both opens
            none, and sends nothing, unless one is given.
        kv_peers: from which prompts are fetched, HOST or HOST:PORT. With API keys, whose holders may be elsewhere, each
            has its port; without, a server whose role is decode fetches from this machine as well.
        kv_bytes: of requests that wait to be fetched.
        kv_transport: how they are fetched, where both servers say the same: tcp, or nixl (from memory to memory, by
            RDMA). What is said about them goes over TCP in any case.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    queue: int = 128
    queue_seconds: float = 60.0
    request_seconds: float = 600.0
    shutdown_seconds: float = 30.0
    write_seconds: float = 60.0
    body_seconds: float = 30.0
    body_bytes: int = 256 << 20
    keep_alive: float = 5.0
    connections: int = 1024
    metrics_prefix: str = "hybridkv_"
    log_json: bool = False
    tool_format: str | None = None
    role: str = "both"
    kv_host: str = "127.0.0.1"
    kv_port: int | None = None
    kv_peers: tuple[str, ...] = ()
    kv_bytes: int = 4 << 30
    kv_transport: str = "tcp"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise HybridKVError(f"port must be from 0 (any that is free) to 65535, not {self.port}")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise HybridKVError("an API key must be printable ASCII without spaces, and not empty")
        if not self.api_keys and not self.is_loopback:
            raise HybridKVError(
                f"host {self.host} can be reached by other machines, and nobody needs a key; give an API key, or "
                "serve at 127.0.0.1"
            )
        if self.tool_format is not None and self.tool_format not in FORMATS:
            raise HybridKVError(f"tool_format must be one of {', '.join(FORMATS)}, not {self.tool_format!r}")
        if self.role not in ROLES:
            raise HybridKVError(f"role must be one of {', '.join(ROLES)}, not {self.role!r}")
        if self.kv_transport not in TRANSPORTS:
            raise HybridKVError(f"kv_transport must be one of {', '.join(TRANSPORTS)}, not {self.kv_transport!r}")
        if self.kv_transport == "nixl" and find_spec("nixl") is None:
            raise HybridKVError("kv_transport nixl needs the package nixl: pip install 'hybridkv[nixl]'")
        if self.kv_port is not None and not 0 <= self.kv_port <= 65535:
            raise HybridKVError(f"kv_port must be from 0 (any that is free) to 65535, not {self.kv_port}")
        if self.kv_host in ("", "0.0.0.0", "::"):
            raise HybridKVError("kv_host must be the address by which other servers reach this one, not all of them")
        for peer in self.kv_peers:
            if peer_of(peer)[1] is None and self.api_keys:
                raise HybridKVError(
                    f"kv_peers: {peer!r} has no port, and who has an API key could have this server connect to any of "
                    "its ports; give HOST:PORT, the kv_port of that server"
                )
        if self.queue < 0 or self.connections < 1:
            raise HybridKVError("queue must be 0 or more, and connections 1 or more")

    def may_fetch(self, host: str, port: int) -> bool:
        """Whether a client may have this server fetch from there."""
        if self.role == "decode" and not self.api_keys and host in LOOPBACK:
            return True
        return any(peer in ((host, None), (host, port)) for peer in map(peer_of, self.kv_peers))

    @property
    def sends(self) -> bool:
        """Whether a client may have its request kept for another server, which takes memory and a port."""
        return self.role == "prefill" or (self.role == "both" and self.kv_port is not None)

    @property
    def fetches(self) -> bool:
        """Whether there is a server from which it may fetch."""
        return self.role == "decode" or (self.role == "both" and bool(self.kv_peers))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return _is_here(self.host)

    @property
    def kv_is_loopback(self) -> bool:
        """Whether all servers that it sends to, or fetches from, are on this machine."""
        hosts = [self.kv_host] if self.sends else []
        hosts += [peer_of(peer)[0] for peer in self.kv_peers] if self.fetches else []
        return all(map(_is_here, hosts))


def _is_here(host: str) -> bool:
    if host in LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: who knows where it leads
        return False


def peer_of(text: str) -> tuple[str, int | None]:
    """HOST, HOST:PORT, IPv6 or [IPv6]:PORT -> (host, port); None: any of its ports."""
    found = PEER.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else None
    if not found or (port is not None and not 0 < port < 65536):
        raise HybridKVError(f"kv_peers: {text!r} is no HOST or HOST:PORT")
    return found["bare"] or found["six"] or found["host"], port
