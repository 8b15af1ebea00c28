"""Several servers of one model on this machine, and a router in front of them that keeps conversations where they are.

    clients -> router (vllm-router, consistent hash of x-session-id) -> server 0, server 1, ...

The router is not ours (extra `replicas`). Ours is to start all of them, to start again what dies, and to end them in
an order that loses nothing: the servers drain while the router still carries their answers, then the router ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridkv.errors import HybridKVError

LOOK_EVERY = 0.1  # seconds between two looks at the processes
RESTART_SECONDS = 60.0  # a process is started again at once, and then once in so many seconds at most
LATER_SECONDS = 15.0  # that processes get beyond the time for draining, before they are killed
HEALTH_SECONDS = 5.0  # for an answer of /health
ROUTER = "vllm_router.launch_router"
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl

# Attempts and failures: a dead server fails a request's first two attempts, which closes it off, and the third goes
# elsewhere. A request that fails wherever it goes closes off one server, for some seconds, and not all of them.
ROUTER_OPTIONS = {
    "policy": "consistent_hash",
    "retry-max-retries": 3,
    "cb-failure-threshold": 2,
    "cb-timeout-duration-secs": 5,
    "cb-window-duration-secs": 10,
    "health-check-interval-secs": 1,
    "health-check-timeout-secs": int(HEALTH_SECONDS),
    "health-failure-threshold": 2,
    "health-success-threshold": 1,
    "worker-startup-check-interval": 1,
    "log-level": "warning",
}


@dataclass(frozen=True)
class Ports:
    """The router's, the servers', and that of the router's own metrics: one after the other, or any that are free."""

    router: int
    servers: tuple[int, ...]
    metrics: int


@dataclass
class Child:
    """A process that is to run, and the one that does."""

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int
    process: subprocess.Popen[bytes] | None = None
    restarted: float = field(default=-RESTART_SECONDS)  # when it was last started again
    failed: bool = False  # it has ended, and was not started again yet

    def start(self) -> None:
        """Begin. It gets no signal of the terminal's, and ends if this process does."""
        # its standard output says where it serves, which is nowhere that clients should ask
        out = subprocess.DEVNULL if self.name != "router" else sys.stderr.fileno()
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            start_new_session=True,
            preexec_fn=_with_parent(os.getpid()),
        )
        self.failed = False

    @property
    def code(self) -> int | None:
        """Its exit status; None: it runs, or has not begun."""
        return None if self.process is None else self.process.poll()

    def send(self, number: int) -> None:
        """A signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    @property
    def healthy(self) -> bool:
        """Whether its /health is 200."""
        return get(self.port, "/health", seconds=HEALTH_SECONDS)[0] == 200


class Replicas:
    """The servers and their router. `run` is their whole life.

    Args:
        arguments: of one server, as `hybridkv` takes them, without --host and --port.
        environments: what each server has besides this process' own.
        ports: see Ports.
        drain: seconds that servers get to end.
        origins: web pages that may ask.
        more: further arguments, of each server.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        ports: Ports,
        drain: float,
        origins: Sequence[str] = (),
        more: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.ports, self._drain = ports, drain
        self.stopped_by: int | None = None
        self._signals = 0
        self._wake = threading.Event()
        self.servers = []
        for i, (port, own) in enumerate(zip(ports.servers, environments, strict=True)):
            place = ("--replicas", "1", "--host", "127.0.0.1", "--port", str(port))  # the last ones count
            command = [sys.executable, "-m", "hybridkv", *arguments, *(more[i] if more else ()), *place]
            self.servers.append(Child(f"replica {i}", command, {**os.environ, **own}, port))
        self.router = Child("router", _router_command(ports, origins), dict(os.environ), ports.router)

    def run(self, ready: Callable[[Replicas], None]) -> None:
        """Start all, wait until they serve, watch them until a signal comes, end all of them."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for child in self.servers:
                child.start()
            for child in self.servers:
                self._until_healthy(child)
            if not self._signals:
                self.router.start()
                self._until_healthy(self.router)
            if not self._signals:
                ready(self)
            while not self._signals:
                self._look()
                self._wake.wait(LOOK_EVERY)
            self._end()
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        self.stopped_by = number
        self._wake.set()

    def _until_healthy(self, child: Child) -> None:
        """Until it serves; HybridKVError if any of them ends instead. How long a model takes to load, nobody knows."""
        while not self._signals:
            for each in (*self.servers, self.router):
                if each.code is not None:
                    raise HybridKVError(f"{each.name} ended with status {each.code} before it served")
            if child.healthy:
                return
            self._wake.wait(LOOK_EVERY)

    def _look(self) -> None:
        """Start again what has ended, each at most once in RESTART_SECONDS."""
        for child in (*self.servers, self.router):
            if child.code is None:
                continue
            if not child.failed:
                child.failed = True
                _say(f"{child.name} ended with status {child.code}; it is started again")
            if time.monotonic() - child.restarted >= RESTART_SECONDS:
                child.restarted = time.monotonic()
                child.start()

    def _end(self) -> None:
        """Servers first: answers that run go through the router. A second signal leaves the rest to `_kill`."""
        until = time.monotonic() + self._drain + LATER_SECONDS
        for children in (self.servers, [self.router]):
            for child in children:
                child.send(signal.SIGTERM)
            while any(child.code is None and child.process is not None for child in children):
                if self._signals > 1 or time.monotonic() > until:
                    return
                self._wake.clear()
                self._wake.wait(LOOK_EVERY)

    def _kill(self) -> None:
        for child in (*self.servers, self.router):
            child.send(signal.SIGKILL)
        for child in (*self.servers, self.router):
            if child.process is not None:
                child.process.wait()


def check_extra() -> None:
    """HybridKVError where there is no router."""
    if importlib.util.find_spec(ROUTER.partition(".")[0]) is None:
        raise HybridKVError("replicas need vllm-router: pip install 'hybridkv[replicas]'")


def choose_ports(first: int, servers: int) -> Ports:
    """`first` for the router and the next ones for the rest, if all are free; 0: any that are."""
    count = servers + 2
    if first and first + count - 1 > 65535:
        raise HybridKVError(
            f"port {first} leaves no room: the router, {servers} servers and metrics take {count} ports"
        )
    with contextlib.ExitStack() as bound:
        found = []
        for port in range(first, first + count) if first else [0] * count:
            listener = bound.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError as problem:
                reason = problem.strerror or str(problem)
                raise HybridKVError(f"cannot listen at host 127.0.0.1, port {port}: {reason}") from None
            found.append(listener.getsockname()[1])
    return Ports(found[0], tuple(found[1:-1]), found[-1])


def deal_cards(cards: Sequence[str], servers: int, each: int = 1) -> list[dict[str, str]]:
    """What each server's environment has so that it sees `each` cards of its own; nothing where there are none. Where
    servers outnumber cards they share them in turn.
    """
    if not cards:
        return [{} for _ in range(servers)]
    if each > len(cards):
        raise HybridKVError(f"a replica of {each} cards was asked for, and there are {len(cards)}")
    hands = [cards[i : i + each] for i in range(0, len(cards) - each + 1, each)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(hands[i % len(hands)])} for i in range(servers)]


def get(port: int, path: str, key: str | None = None, seconds: float = 30.0) -> tuple[int, object]:
    """Status and JSON of a route of this machine's; status 0: nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        raw = answer.read()
        return answer.status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw
    except (OSError, http.client.HTTPException, ValueError):
        return 0, None
    finally:
        connection.close()


def _router_command(ports: Ports, origins: Sequence[str]) -> list[str]:
    own = [f"http://{name}:{ports.router}" for name in ("127.0.0.1", "localhost")]  # without any it would allow all
    command = [sys.executable, "-m", ROUTER, "--host", "127.0.0.1", "--port", str(ports.router)]
    command += ["--worker-urls", *(f"http://127.0.0.1:{port}" for port in ports.servers)]
    command += ["--prometheus-port", str(ports.metrics), "--cors-allowed-origins", *own, *origins]
    return command + [word for name, value in ROUTER_OPTIONS.items() for word in (f"--{name}", str(value))]


def _with_parent(parent: int) -> Callable[[], None]:
    """Runs in a new process before its program: a server whose launcher is gone drains and ends."""
    libc = ctypes.CDLL(None)

    def tie() -> None:
        libc.prctl(DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return tie


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"hybridkv: {line}", file=sys.stderr, flush=True)
