"""A bad line between client and server: slow, in single bytes, cut off at some byte. What arrives is right, or the
client sees that it is not whole; the server keeps nothing of it.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from server.running import HI, Running, forward, post_bytes, read_all, slowly, until

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": HI, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
RESET = struct.pack("ii", 1, 0)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Line:
    """How bytes travel, each way alike; `cut_up` and `cut_down` bytes are passed on, then the connection is reset."""

    piece: int = 1 << 16
    wait: float = 0.0  # seconds before each piece
    cut_up: int | None = None
    cut_down: int | None = None


def carry(source: socket.socket, target: socket.socket, line: Line, left: int | None) -> None:
    """Pass bytes on until there are no more, or until the line is cut."""
    with suppress(OSError):
        while data := source.recv(line.piece):
            time.sleep(line.wait)
            target.sendall(data if left is None else data[:left])
            left = None if left is None else left - len(data)
            if left is not None and left <= 0:
                for end in (source, target):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    end.shutdown(socket.SHUT_RD)  # wakes the other direction
                    end.close()
                return
        target.shutdown(socket.SHUT_WR)


@contextmanager
def through(running: Running, line: Line) -> Iterator[socket.socket]:
    """A connection to the server over such a line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=240)
        near, _ = listener.accept()
    far = running.connect()
    ways = ((near, far, line.cut_up), (far, near, line.cut_down))
    threads = [threading.Thread(target=carry, args=(*ends, line, cut), daemon=True) for *ends, cut in ways]
    for thread in threads:
        thread.start()
    try:
        yield client
    finally:
        client.close()
        for thread in threads:
            thread.join(240)
        for end in (near, far):
            end.close()


def text_of(raw: bytes) -> str:
    """What a stream says; its last event must be there."""
    body = raw.partition(b"\r\n\r\n")[2]
    events = [part.partition(b"\n\n")[0] for part in body.split(b"data: ")[1:]]
    assert events[-1] == b"[DONE]"
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join((delta.get("reasoning") or "") + (delta.get("content") or "") for delta in deltas)


@pytest.mark.parametrize("line", [Line(piece=1), Line(piece=7), Line(wait=0.05), Line(piece=200, wait=0.01)], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_line_changes_nothing(tiny_one: Running, line: Line, stream: bool) -> None:
    message = tiny_one.chat(**ASKED)["choices"][0]["message"]
    with through(tiny_one, line) as connection:
        connection.sendall(post_bytes(CHAT, ASKED | {"stream": stream}))
        raw = read_all(connection)
    if stream:
        assert text_of(raw) == (message["reasoning"] or "") + (message["content"] or "")
    else:
        assert json.loads(raw.partition(b"\r\n\r\n")[2])["choices"][0]["message"] == message


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_line_that_is_cut_leaves_nothing(tiny_one: Running, way: str, share: float) -> None:
    asked = post_bytes(CHAT, ASKED | {"stream": True, "max_tokens": 100, "user": "x" * 9000})  # most of it is the body
    whole = tiny_one.raw(asked)
    at = int(share * len(asked if way == "up" else whole))
    with forward(tiny_one.llm, slowly(0.01)) as calls:
        with through(tiny_one, Line(cut_up=at) if way == "up" else Line(cut_down=at)) as connection:
            connection.sendall(asked)
            got = read_all(connection)
        until(lambda: tiny_one.service.bodies.held == 0)
        tiny_one.idle()
    assert b"[DONE]" not in got and len(got) <= (0 if way == "up" else at)
    assert len(calls) < (1 if way == "up" else 90 if share < 0.9 else 200), "it was written for nobody"
    assert text_of(tiny_one.raw(asked)) == text_of(whole)
