"""The server's life: bind, load the model while `/health` says so, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

import uvicorn

from hybridkv.errors import HybridKVError
from hybridkv.llm import LLM
from hybridkv.server.app import make_app
from hybridkv.server.protocol import GuardedProtocol
from hybridkv.server.record import log
from hybridkv.server.service import Service
from hybridkv.server.settings import MAX_HEADERS, ServerSettings

LAG_EVERY = 0.25  # seconds between two looks at how late the event loop is
IDLE_SECONDS = 75  # that a connection may be kept without a request
END_SECONDS = 5  # for answers to errors to be sent at the very end


class Server:
    """One HTTP server around one model. `run` is its whole life, `stop` its end, from any thread."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.service = Service(settings)
        self.socket = _bind(settings)
        self.stopped_by: int | None = None  # the signal
        self._signals = 0
        self._http: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def address(self) -> str:
        """Where clients find it, such as http://127.0.0.1:8000."""
        host, port = self.socket.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, load: Callable[[], LLM], ready: Callable[[Server], None], signals: bool = True) -> None:
        """Serve until told to end. `load` runs on a thread of its own; what it raises is raised here. The model that it
        gives is not closed.
        """
        asyncio.run(self._run(load, ready, signals))

    def stop(self) -> None:
        """Drain, then end."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(stopping.set)

    async def _run(self, load: Callable[[], LLM], ready: Callable[[Server], None], signals: bool) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._on_signal, number)
        limits = {"most": self.settings.connections, "write_seconds": self.settings.write_seconds}
        protocol = type("Protocol", (GuardedProtocol,), limits)
        config = uvicorn.Config(
            make_app(self.service),
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=END_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADERS,
        )
        self._http = _Uvicorn(config)
        serving = asyncio.create_task(self._http.serve(sockets=[self.socket]))
        lag = asyncio.create_task(self._measure_lag())
        try:
            self.service.open(await asyncio.to_thread(load))
            ready(self)
            await self._stopping.wait()
            await self.service.drain()
        finally:
            lag.cancel()
            self._http.should_exit = True
            await serving
            self.service.close()

    def _on_signal(self, number: int) -> None:
        """The first one drains; a second one, or one while the model is loaded, ends at once."""
        self._signals += 1
        self.stopped_by = number
        if self._signals > 1 or self.service.status == "loading":
            for handler in log.handlers:
                handler.flush()
            os._exit(128 + number if number == signal.SIGINT or self._signals > 1 else 0)
        assert self._stopping is not None
        self._stopping.set()

    async def _measure_lag(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(LAG_EVERY)
            self.service.metrics.lag.observe(max(0.0, time.monotonic() - before - LAG_EVERY))


class _Uvicorn(uvicorn.Server):
    """Signals are ours: the listening socket stays open while requests drain, so that new ones are told."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _bind(settings: ServerSettings) -> socket.socket:
    """The listening socket, or HybridKVError: before a model is read in vain."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise HybridKVError(f"cannot listen at host {settings.host}, port {settings.port}: {reason}") from None
