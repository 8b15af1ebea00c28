"""Bodies that come slowly, many at once: all of them together have a limit, and whatever becomes of a request, nothing
of its body is held afterwards.
"""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from hybridkv import LLM
from hybridkv.server import settings
from server.running import HI, Running, post_bytes, read_all, serving, until
from server.test_life import end_all, forward, slowly

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
LIMIT = 64_000  # of one body
LARGE = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 60_000}).encode()


@pytest.fixture
def small(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Bodies of 64 kB, of which two and a half fit."""
    monkeypatch.setattr(settings, "LEAST_BODY", LIMIT)
    with serving(tiny_llm, names=("tiny",), body_bytes=160_000, body_seconds=60) as running:
        assert running.service.body_limit == LIMIT
        yield running
        running.idle()
        until(lambda: running.service.bodies.held == 0)
        assert not running.service.bodies._held


def held_back(running: Running, body: bytes = LARGE, **headers: str) -> socket.socket:
    """A request whose last byte is still to come."""
    connection = running.connect()
    before = running.service.bodies.held
    connection.sendall(post_bytes(TEXT, body, **headers)[:-1])
    until(lambda: running.service.bodies.held == before + len(body) - 1)
    return connection


def status_of(raw: bytes) -> int:
    return int(raw.split()[1])


def test_bodies_that_come_slowly_cannot_fill_the_memory(small: Running) -> None:
    slow = [held_back(small) for _ in range(2)]
    raw = small.raw(post_bytes(TEXT, LARGE))
    assert status_of(raw) == 503 and b"retry-after: 2" in raw and b"ask again" in raw and b"x-should-retry" not in raw
    chunked = post_bytes(TEXT, b"").replace(b"content-length: 0\r\n", b"transfer-encoding: chunked\r\n")
    piece = b"%x\r\n" % 15_000 + b" " * 15_000 + b"\r\n"
    assert status_of(small.raw(chunked + piece * 4 + b"0\r\n\r\n")) == 503, "its length was not announced"
    anthropic = json.loads(LARGE) | {"model": "tiny", "messages": HI}
    raw = small.raw(post_bytes(MESSAGES, anthropic))
    assert status_of(raw) == 529 and b"overloaded_error" in raw
    assert small.service.bodies.held == 2 * (len(LARGE) - 1), "what was refused is still held"
    small.chat(max_tokens=1)  # a small one fits
    for connection in slow:  # and those that were there come to their end
        connection.sendall(LARGE[-1:])
        assert status_of(read_all(connection)) == 200
        connection.close()
    assert status_of(small.raw(post_bytes(TEXT, LARGE))) == 200


@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_who_leaves_in_the_middle_of_a_body_gives_its_room_back(small: Running, how: str) -> None:
    for _ in range(3):
        slow = [held_back(small) for _ in range(2)]
        for connection in slow:
            if how == "RST":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        until(lambda: small.service.bodies.held == 0)
    assert status_of(small.raw(post_bytes(TEXT, LARGE))) == 200


def test_a_length_that_is_only_announced_takes_no_room(small: Running) -> None:
    waiting = [small.connect() for _ in range(8)]
    for connection in waiting:
        connection.sendall(post_bytes(TEXT, LARGE)[: -len(LARGE)])
    assert status_of(small.raw(post_bytes(TEXT, LARGE))) == 200
    for connection in waiting:
        connection.close()


@pytest.mark.parametrize(
    "body",
    [b"{" * 60_000, json.dumps({"prompt": ["a"] * 17, "user": "x" * 60_000}).encode(), b" " * (LIMIT + 1)],
    ids=["no JSON", "refused", "too large"],
)
def test_refused_bodies_are_given_back(small: Running, body: bytes) -> None:
    for _ in range(3):
        assert status_of(small.raw(post_bytes(TEXT, body))) in (400, 413)
    until(lambda: small.service.bodies.held == 0)


def test_a_body_that_was_read_takes_no_room_while_its_answer_is_written(small: Running) -> None:
    asked: dict[str, Any] = json.loads(LARGE) | {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with forward(small.llm, slowly(0.02)) as calls, small.connect() as connection:
        connection.sendall(post_bytes(TEXT, asked))
        until(lambda: len(calls) > 2)
        assert small.service.generations and small.service.bodies.held == 0
        end_all(small)
        read_all(connection)


def test_one_key_has_at_most_half(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LEAST_BODY", LIMIT)
    with serving(tiny_llm, body_bytes=160_000, body_seconds=60, api_keys=("one", "two")) as running:
        slow = held_back(running, x_api_key="one")
        assert status_of(running.raw(post_bytes(TEXT, LARGE, x_api_key="one"))) == 503
        assert status_of(running.raw(post_bytes(TEXT, LARGE, x_api_key="two"))) == 200
        slow.close()
        until(lambda: not running.service.bodies._held)


def test_bodies_without_a_key_are_not_read(tiny_llm: LLM) -> None:
    with serving(tiny_llm, api_keys=("one",)) as running:
        for path, status in ((TEXT, 401), ("/health", 405), ("/", 405)):
            with running.connect() as connection:
                connection.sendall(post_bytes(path, LARGE)[:-1])
                assert status_of(connection.recv(1 << 16)) == status
                assert running.service.bodies.held == 0
