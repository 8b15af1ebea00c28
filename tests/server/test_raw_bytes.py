"""Bytes on the socket, one table for each layer: what is HTTP and what is not, how bodies are framed, who a request
says it is for. Each case gets its status or a closed connection, and the next good request is served.
"""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hybridkv import LLM
from hybridkv.server.protocol import GuardedProtocol
from server.running import HI, Running, post_bytes, read_all, serving, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = b'{"prompt": "a", "max_tokens": 1}'
STATUS = re.compile(rb"HTTP/1\.1 (\d+)")


@pytest.fixture
def next_good(tiny_one: Running) -> Iterator[Running]:
    """The server; after each case it answers, and holds nothing."""
    yield tiny_one
    assert b"HTTP/1.1 200" in tiny_one.raw(post_bytes(TEXT, BODY))


def statuses(raw: bytes) -> list[int]:
    """Of all answers; the bodies of those that are refused are JSON in OpenAI's shape."""
    return [int(n) for n in STATUS.findall(raw)]


def get(path: str, *headers: str, version: str = "1.1", method: str = "GET", host: str = "localhost") -> bytes:
    """A request without a body, after which the connection is closed."""
    lines = [f"{method} {path} HTTP/{version}", *([f"Host: {host}"] if host else []), *headers, "Connection: close"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def framed(*headers: str, body: bytes = BODY, host: str = "localhost") -> bytes:
    """A completion whose framing is the case's own."""
    lines = [f"POST {TEXT} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def measured(body: bytes) -> bytes:
    return framed(f"Content-Length: {len(body)}", body=body)


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


# ---- the request line and headers

HEADS = {
    "only line ends": (b"\r\n\r\n\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 400),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/3.7": (get("/health", version="3.7"), 505),
    "no version": (b"GET /health HTTP/\r\nhost: localhost\r\n\r\n", 400),
    "a method in brackets": (get("/health", method="G(T"), 400),
    "a method of its own": (get("/health", method="BREW"), 405),
    "TRACE": (get("/health", method="TRACE"), 405),
    "the whole server": (get("*", method="OPTIONS"), 404),
    "a tunnel": (get("localhost:22", method="CONNECT"), 404),
    "two spaces": (b"GET  /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "NUL in the path": (b"GET /he\0alth HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "NUL, escaped": (get("/%00"), 404),
    "a line end, escaped": (get("/v1/models/%0d%0ax"), 404),
    "no UTF-8, escaped": (get("/%ff%fe"), 404),
    "dots": (get("/v1/../health"), 404),
    "two slashes": (get("//health"), 404),
    "a path of 50 KB": (get("/" + "a" * 50_000), 404),
    "a path of 100 KB": (get("/" + "a" * 100_000), 400),
    "a query of 50 KB": (get("/health?" + "a=b&" * 12_000), 200),
    "a space before the colon": (get("/health", "x : y"), 400),
    "no colon": (get("/health", "xy"), 400),
    "an empty name": (get("/health", ": y"), 400),
    "a folded line": (get("/health", "x: a", " b"), 200),
    "NUL in a value": (get("/health", "x: a\0b"), 400),
    "a lone CR in a value": (get("/health", "x: a\rb"), 400),
    "latin-1 in a value": (get("/health", "x: \xe9\xff"), 200),
    "no host": (get("/health", host=""), 400),
    "two hosts": (get("/health", "Host: localhost"), 400),
    "bare line feeds": (get("/health").replace(b"\r\n", b"\n"), 200),
    "an upgrade nobody knows": (get("/health", "Upgrade: h2c", "Connection: upgrade"), 200),
    "an upgrade to WebSocket": (get("/health", "Upgrade: websocket", "Sec-WebSocket-Key: x"), 200),
    "a range": (get("/health", "Range: bytes=0-0,1-1"), 200),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "status"), HEADS.values(), ids=HEADS.keys())
def test_heads(next_good: Running, raw: bytes, status: int) -> None:
    assert statuses(next_good.raw(raw)) == [status]


def test_head_has_no_body_and_old_clients_are_served(next_good: Running) -> None:
    head, _, body = next_good.raw(get("/health", method="HEAD")).partition(b"\r\n\r\n")
    assert statuses(head) == [200] and body == b"" and b"content-length: 15" in head.lower()
    assert statuses(next_good.raw(get("/health", version="1.0"))) == [200]
    old = post_bytes(CHAT, {"messages": HI, "max_tokens": 3, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    found = next_good.raw(old)  # no chunks: the end is where the connection ends
    assert b"transfer-encoding" not in found.lower() and found.endswith(b"data: [DONE]\n\n")


# ---- bodies and where they end

BODIES = {
    "chunks": (framed("Transfer-Encoding: chunked", body=chunked(BODY[:5], BODY[5:])), [200]),
    "a chunk for each byte": (framed("Transfer-Encoding: chunked", body=chunked(*(bytes([b]) for b in BODY))), [200]),
    "a chunk's extension": (
        framed("Transfer-Encoding: chunked", body=b"20;a=b\r\n" + BODY + b"\r\n0\r\n\r\n"), [200]
    ),
    "a trailer": (framed("Transfer-Encoding: chunked", body=chunked(BODY)[:-2] + b"x: y\r\n\r\n"), [200]),
    "a negative chunk": (framed("Transfer-Encoding: chunked", body=b"-5\r\nhello\r\n0\r\n\r\n"), [400]),
    "a chunk of 2^64": (framed("Transfer-Encoding: chunked", body=b"1" + b"0" * 16 + b"\r\n"), [408]),
    "a size of 100 digits": (framed("Transfer-Encoding: chunked", body=b"1" * 100 + b"\r\n"), [400]),
    "a size that never ends": (framed("Transfer-Encoding: chunked", body=b"1" * 200_000), [400]),
    "no line end after a chunk": (framed("Transfer-Encoding: chunked", body=b"5\r\nhelloXX0\r\n\r\n"), [400]),
    "gzip and chunks": (framed("Transfer-Encoding: gzip, chunked", body=chunked(BODY)), [400]),
    "a length twice, alike": (framed(f"Content-Length: {len(BODY)}", f"Content-Length: {len(BODY)}"), [200]),
    "a length twice, otherwise": (framed(f"Content-Length: {len(BODY)}", "Content-Length: 5"), [400]),
    "a length in words": (framed("Content-Length: five"), [400]),
    "a length with a sign": (framed(f"Content-Length: +{len(BODY)}"), [400]),
    "a length in hex": (framed("Content-Length: 0x20"), [400]),
    "length and chunks": (framed("Content-Length: 5", "Transfer-Encoding: chunked", body=chunked(BODY)), [400]),
    "no length": (framed(), [400]),
    "a length that is too short": (framed("Content-Length: 5"), [400]),
    "two types": (framed(f"Content-Length: {len(BODY)}", "Content-Type: text/plain"), [400]),
    "two keys": (framed(f"Content-Length: {len(BODY)}", "x-api-key: a", "x-api-key: b"), [400]),
    "two origins": (framed(f"Content-Length: {len(BODY)}", "origin: http://evil", "origin: http://localhost"), [400]),
    "UTF-16": (measured('{"a":'.encode("utf-16-le")), [400]),
    "an overlong slash": (measured(b'{"prompt": "\xc0\xaf\xc0"}'), [400]),
    "a surrogate as bytes": (measured(b'{"prompt": "\xed\xa0\x80"}'), [400]),
    "two objects": (measured(b"{} {}\n"), [400]),
    "a comment": (measured(b"{/*no*/ }\n"), [400]),
    "single quotes": (measured(b"{'prompt': 'a'}"), [400]),
    "a control character": (measured(b'{"prompt": "\x01a"}'), [400]),
    "a doubled key inside": (measured(b'{"prompt": "a", "x": {"b":1,"b":2}}'), [400]),
}  # fmt: skip


@pytest.fixture(scope="module")
def hasty(tiny_llm: LLM) -> Iterator[Running]:
    """A server that does not wait long for bodies."""
    with serving(tiny_llm, body_seconds=0.5, names=("tiny",)) as running:
        yield running


@pytest.mark.parametrize(("raw", "expected"), BODIES.values(), ids=BODIES.keys())
def test_bodies(hasty: Running, raw: bytes, expected: list[int]) -> None:
    assert statuses(hasty.raw(raw)) == expected
    assert b"HTTP/1.1 200" in hasty.raw(post_bytes(TEXT, BODY))
    hasty.idle()


def test_a_client_may_wait_to_be_asked_for_its_body(next_good: Running) -> None:
    with next_good.connect() as connection:
        connection.sendall(framed(f"Content-Length: {len(BODY)}", "Expect: 100-continue", body=b""))
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert statuses(read_all(connection)) == [200]
    with next_good.connect() as connection:  # one that is refused is not asked
        connection.sendall(framed("Content-Length: 999999999", "Expect: 100-continue", body=b"", host="evil"))
        assert statuses(read_all(connection)) == [403]


def test_a_get_with_a_body_does_not_disturb_what_follows_it(next_good: Running) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello"
    assert statuses(next_good.raw(first + get("/live"))) == [200, 200]


def test_a_hundred_requests_at_once_on_one_connection(next_good: Running) -> None:
    one = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert statuses(next_good.raw(one * 99 + get("/health"))) == [200] * 100


# ---- time


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_drip_of_bytes_is_cut_off(tiny_llm: LLM, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes soon after the last, and the request never ends: its time counts from its beginning."""
    monkeypatch.setattr(GuardedProtocol, "header_seconds", 0.5)
    with serving(tiny_llm, body_seconds=0.5) as running, running.connect() as connection:
        connection.sendall(get("/health")[:-2] if part == "headers" else framed("Content-Length: 1000000", body=b""))
        over, sent = threading.Event(), []

        def drip() -> None:
            while not over.wait(0.02):
                try:
                    connection.sendall(b"a")
                except OSError:
                    return
                sent.append(1)

        thread = threading.Thread(target=drip)
        thread.start()
        found = read_all(connection)
        over.set()
        thread.join()
        assert statuses(found) == [408] and sent
        running.idle()


def test_a_slow_reader_gets_all_of_its_answer(next_good: Running) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((next_good.host, next_good.port))
        connection.settimeout(60)
        body = {"prompt": [[5] * 60] * 8, "max_tokens": 2, "echo": True, "logprobs": 5, "stream": True}
        connection.sendall(post_bytes(TEXT, body))
        found = b""
        while data := connection.recv(512):
            found += data
            time.sleep(0.0002)
        assert found.rstrip().endswith(b"0") and b"data: [DONE]" in found and len(found) > 50_000


# ---- who it is for


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/health", "localhost", 200),
        ("HTTP://127.0.0.1:80/health", "localhost", 200),
        ("http://localhost", "localhost", 200),
        ("http://evil.example/health", "localhost", 403),  # the target's host counts, not the header's
        ("http://localhost/health", "evil.example", 200),
        ("http://localhost@evil.example/health", "localhost", 403),
        ("ftp://localhost/health", "localhost", 404),
    ],
)
def test_targets_with_a_host(next_good: Running, target: str, host: str, status: int) -> None:
    assert statuses(next_good.raw(get(target, host=host))) == [status]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil.example:80", "127.0.0.1.nip.io", "0.0.0.0", "[::2]", "local host",
     "localhost:80:80", "127.1", "2130706433", ""],
)  # fmt: skip
def test_names_that_lead_here_by_dns_are_refused(next_good: Running, host: str) -> None:
    for raw in (get("/health", host=host or " "), framed("Content-Length: 0", body=b"", host=host or " ")):
        assert statuses(next_good.raw(raw))[0] in (400, 403)


PREFLIGHT = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, content-type")


def test_pages_of_other_origins_are_answered_only_if_allowed(tiny_llm: LLM) -> None:
    with serving(tiny_llm, api_keys=("k",), allowed_origins=("http://page.example",), names=("tiny",)) as running:
        for origin in ("http://evil.example", "null", "http://page.example.evil", "HTTP://page.example"):
            found = running.raw(get(CHAT, f"Origin: {origin}", *PREFLIGHT, method="OPTIONS")).lower()
            assert statuses(found.upper()) == [403] and b"access-control" not in found
        found = running.raw(get(CHAT, "Origin: http://page.example", *PREFLIGHT, method="OPTIONS")).lower()
        assert found.startswith(b"http/1.1 204") and b"access-control-allow-origin: http://page.example\r\n" in found
        assert b"access-control-allow-headers: authorization, content-type\r\n" in found and b"vary: origin" in found
        for key, status in (("k", 200), ("wrong", 401)):  # the page reads both
            body = post_bytes(TEXT, BODY, origin="http://page.example", authorization=f"Bearer {key}")
            found = running.raw(body)
            assert statuses(found) == [status]
            assert found.lower().count(b"access-control-allow-origin: http://page.example\r\n") == 1
        assert statuses(running.raw(get(CHAT, method="OPTIONS"))) == [401]  # no browser asks so


# ---- how many


def connections(running: Running) -> set[GuardedProtocol]:
    assert running.server._http is not None
    return running.server._http.server_state.connections  # type: ignore[return-value]


def test_who_opens_connections_and_says_nothing_keeps_nobody_out(tiny_llm: LLM) -> None:
    with serving(tiny_llm, connections=8) as running, ExitStack() as closing:
        opened = connections(running)

        def open_one() -> socket.socket:
            before = len(opened)
            found = closing.enter_context(running.connect())
            until(lambda: len(opened) > before)
            return found

        silent = [open_one() for _ in range(8)]
        for _ in range(3):
            assert running.ask("GET", "/health")[0] == 200
            until(lambda: len(opened) == 7)
        assert statuses(read_all(silent[0])) == [503], "the one that was opened first"
        for connection in silent[1:]:
            connection.sendall(get("/health"))
            assert statuses(read_all(connection)) == [200], "the others may still ask"


def test_connections_that_have_said_something_are_not_closed_for_others(tiny_llm: LLM) -> None:
    with serving(tiny_llm, connections=4) as running, ExitStack() as closing:
        opened = connections(running)
        half = [closing.enter_context(running.connect()) for _ in range(4)]
        for connection in half:
            connection.sendall(get("/health")[:30])
        until(lambda: sum(bool(each.conn.trailing_data[0]) for each in opened) == 4)  # it was read
        assert statuses(read_all(closing.enter_context(running.connect()))) == [503]
        for connection in half:
            connection.sendall(get("/health")[30:])
            assert statuses(read_all(connection)) == [200]
