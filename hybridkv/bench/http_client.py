"""HTTP/1.1 for load: one connection, kept open, and answers read as they come. Requests are bytes that were made
before, so that a client costs little beside the server that it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What came back, and when: seconds since the request was sent."""

    status: int
    body: bytes = b""
    first: float = 0.0  # until its first byte after the headers
    seconds: float = 0.0
    pieces: int = 0  # that it came in

    def json(self) -> Any:
        """The body of an answer that is JSON."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of server-sent events, without the word that ends them."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


def request_bytes(path: str, body: Any = None, method: str = "POST", host: str = "localhost") -> bytes:
    """A request, ready to be sent."""
    raw = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(raw)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + raw


@dataclass
class Connection:
    """One client's connection; opened by the first request, and again after it was closed."""

    host: str
    port: int
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = field(default=None, repr=False)

    async def ask(self, request: bytes) -> Answer:
        """Send a request and read its answer to the end."""
        begin = time.perf_counter()
        reader, _ = await self.send(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        answer = Answer(int(head.split(b" ", 2)[1]))
        if b"\r\ntransfer-encoding: chunked\r\n" in head:
            await self._read_chunks(reader, answer, begin)
        else:
            length = int(head.partition(b"\r\ncontent-length: ")[2].split(b"\r\n", 1)[0] or b"0")
            answer.body, answer.pieces = await reader.readexactly(length), 1
            answer.first = time.perf_counter() - begin
        answer.seconds = time.perf_counter() - begin
        if b"\r\nconnection: close\r\n" in head:
            self.close()
        return answer

    async def send(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request and read nothing of its answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self.host, self.port)
        self._streams[1].write(request)
        await self._streams[1].drain()
        return self._streams

    @staticmethod
    async def _read_chunks(reader: asyncio.StreamReader, answer: Answer, begin: float) -> None:
        found = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            found.append((await reader.readexactly(size + 2))[:-2])
            if len(found) == 1:
                answer.first = time.perf_counter() - begin
        await reader.readexactly(2)
        answer.body, answer.pieces = b"".join(found), len(found)

    def close(self) -> None:
        """Leave, whatever is still to come."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
