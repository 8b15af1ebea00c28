"""A server in this process, on a thread of its own, and plain ways to talk to it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.driving import assert_nothing_held
from hybridkv import LLM
from hybridkv.server.run import Server
from hybridkv.server.settings import ServerSettings

SECONDS = 240.0  # that anything here may take, on a busy machine too
QUIET = 600.0  # seconds before a sign of life, where events are compared: however slow the machine is, none comes
HI = [{"role": "user", "content": "Say hello."}]


class Running:
    """A server that runs."""

    def __init__(self, server: Server) -> None:
        self.server, self.service = server, server.service
        self.address = server.address
        self.host, self.port = server.socket.getsockname()[:2]
        self.thread: threading.Thread | None = None

    @property
    def llm(self) -> LLM:
        return self.service.llm

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and the body: an object where it is JSON, else text."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        try:
            connection.request(method, path, raw, sent)
            answer = connection.getresponse()
            data = answer.read().decode()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        is_json = found.get("content-type", "").startswith("application/json")
        return answer.status, found, json.loads(data) if is_json and data else data

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, found = self.ask("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        return status, found

    def chat(self, **asked: Any) -> Any:
        """A chat that is served, whole."""
        status, found = self.post("/v1/chat/completions", {"messages": HI, "temperature": 0, "max_tokens": 4, **asked})
        assert status == 200, found
        return found

    def stream(self, path: str, body: Any) -> list[str]:
        """The data of each server-sent event, or the whole line of a comment."""
        status, found = self.post(path, {**body, "stream": True})
        assert status == 200, found
        return [line.removeprefix("data: ") for line in found.splitlines() if line.startswith(("data: ", ":"))]

    def raw(self, data: bytes, seconds: float = SECONDS) -> bytes:
        """All that comes back for these bytes until the connection is closed."""
        with self.connect(seconds) as connection:
            connection.sendall(data)
            return read_all(connection)

    def connect(self, seconds: float = SECONDS) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=seconds)

    def idle(self) -> None:
        """Until nothing runs; then every page and slot is back."""
        until(lambda: not self.service.generations)
        until(lambda: self.llm.owner.run(lambda engine: engine.idle))
        self.llm.owner.run(assert_nothing_held)  # on the engine's thread, between steps


def until(true: Callable[[], bool]) -> None:
    """Wait until something holds, within the limit."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found


def post_bytes(path: str, body: Any, **headers: str) -> bytes:
    """A request as bytes, whose connection is closed after the answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "localhost", "content-type": "application/json", "content-length": str(len(raw))}
    lines |= {"connection": "close", **{k.replace("_", "-"): v for k, v in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + raw


@contextmanager
def serving(llm: LLM | Callable[[], LLM], wait: bool = True, **settings: Any) -> Iterator[Running]:
    """A server around a model that stays open, drained at the end."""
    server = Server(ServerSettings(**{"port": 0, **settings}))
    ready, problems = threading.Event(), []

    def run() -> None:
        try:
            server.run(llm if callable(llm) else lambda: llm, lambda _: ready.set(), signals=False)
        except BaseException as problem:
            problems.append(problem)
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if wait:
        assert ready.wait(SECONDS) and not problems, problems
    running = Running(server)
    running.thread = thread
    try:
        yield running
    finally:
        server.stop()
        thread.join(SECONDS)
        assert not thread.is_alive() and not problems, problems


@contextmanager
def forward(llm: LLM, before: Callable[[int], None]) -> Iterator[list[int]]:
    """`before(number)` is called before each forward pass; its number is listed."""
    runner, calls = llm.engine.runner, []
    original = runner.forward

    def called(inputs: Any) -> Any:
        calls.append(len(calls))
        before(calls[-1])
        return original(inputs)

    runner.forward = called  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        runner.forward = original  # type: ignore[method-assign]


def slowly(seconds: float) -> Callable[[int], None]:
    return lambda number: time.sleep(seconds)


def failing_at(*steps: int) -> Callable[[int], None]:
    def fail(number: int) -> None:
        if number in steps:
            raise RuntimeError("injected at /secret/path 0xdeadbeef")

    return fail
