"""uvicorn's HTTP/1.1 with what it lacks: a limit of time for headers, a limit of connections, errors as JSON, and a way
to drop a client that does not read.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from hybridkv.server.problems import ApiError
from hybridkv.server.settings import HEADER_SECONDS, ServerSettings

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
TOO_MANY = "too many connections are open"


class GuardedProtocol(H11Protocol):
    """One connection. `most`: connections open at once, of which one that has said nothing makes room for the next;
    `write_seconds`: after which a client that reads nothing is dropped, whether an answer is being written to it or
    lies here to the end.
    """

    most = 1024
    header_seconds = HEADER_SECONDS
    write_seconds = ServerSettings.write_seconds

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.app = self._with_abort(self.app)  # type: ignore[assignment,arg-type]
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None  # the next look at whether the client reads
        self._opened, self._silent = 0.0, True  # when, and whether nothing has come since

    def _with_abort(self, app: ASGIApp) -> ASGIApp:
        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            more = {"hybridkv.abort": self.transport.abort, "hybridkv.transport": self.transport}
            scope.setdefault("extensions", {}).update(more)
            await app(scope, receive, send)

        return run

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened = self.loop.time()
        if len(self.connections) > self.most and not self._make_room():
            self._refuse(503, TOO_MANY)
            return
        self._start_timer()

    def _make_room(self) -> bool:
        """Close the connection that has been silent for longest since it was opened: who opens many and says nothing
        must not keep others out."""
        silent = [each for each in self.connections if isinstance(each, GuardedProtocol) and each._silent]
        others = [each for each in silent if each is not self and not each.transport.is_closing()]
        if others:
            min(others, key=lambda each: each._opened)._refuse(503, TOO_MANY)
        return bool(others)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called by the transport: much lies unread."""
        super().pause_writing()
        self._watch_reading()

    def on_response_complete(self) -> None:
        """All of an answer was handed to the transport."""
        super().on_response_complete()
        self._watch_reading()

    def _watch_reading(self) -> None:
        if self._reading is None:
            self._look(-1)

    def _look(self, before: int) -> None:
        """Nothing else is written meanwhile, so the same number of bytes means that none was read."""
        unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self.write_seconds, self._look, unread) if unread else None
        if unread == before:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._silent = False
        if self._between_requests:
            self._start_timer()
        super().data_received(data)
        if not self._between_requests:
            self._stop_timer()

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._between_requests and not self.transport.is_closing():
            self._refuse(408, "the headers did not come in time")

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP request, or headers that are too large."""
        self._refuse(400, "this is not a valid HTTP/1.1 request, or its headers are too large")

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(ApiError(status, message).openai()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        try:
            for part in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(part) or b"")
        except h11.LocalProtocolError:  # an answer has begun already
            pass
        self.transport.close()
