"""A server's process from outside: stopped and continued, killed, and with a log that nobody reads."""

import http.client
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from hybridkv import LLM
from server.running import SECONDS, post_bytes, read_all
from server.test_command import LONG, ROOT, port_of, started

CHAT = "/v1/chat/completions"
PIPE = 1 << 16  # bytes that a pipe holds


def ask(port: int, body: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    connection.sendall(body)
    return connection


def flood(port: int, count: int) -> None:
    """So many requests, each of which makes a line of some hundred bytes, are all answered."""
    one = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with ask(port, one * (count - 1) + one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")) as connection:
        assert len(re.findall(rb"HTTP/1\.1 200", read_all(connection))) == count


def health(port: int, seconds: float) -> int | None:
    """The status; None: nobody answers in time."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except TimeoutError:
        return None
    finally:
        connection.close()


@pytest.mark.slow
def test_it_can_be_stopped_and_go_on_with_a_log_that_nobody_reads(tiny_llm: LLM) -> None:
    with started("-m", tiny_llm.path, "--context", 512, "--alias", "tiny", "--dtype", "float32") as (process, lines):
        port = port_of(lines)
        flood(port, 2 * PIPE // 100)  # standard error is a pipe, and full
        assert health(port, SECONDS) == 200
        with ask(port, post_bytes(CHAT, LONG | {"max_tokens": 60})) as connection:
            found = connection.recv(1000)
            process.send_signal(signal.SIGSTOP)
            assert health(port, 0.5) is None
            process.send_signal(signal.SIGCONT)
            found += read_all(connection)
        assert b"data: [DONE]" in found and b'"error"' not in found
        assert health(port, SECONDS) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0


def test_clients_of_a_process_that_is_killed_see_that_at_once(tiny_llm: LLM) -> None:
    with started("-m", tiny_llm.path, "--context", 512, "--alias", "tiny", "--dtype", "float32") as (process, lines):
        port = port_of(lines)
        with ask(port, post_bytes(CHAT, LONG)) as connection:
            assert connection.recv(1000)
            process.kill()
            assert not read_all(connection).endswith(b"0\r\n\r\n"), "the answer looks whole"
        process.wait(SECONDS)
        with socket.socket() as again:  # the port is free for the next one
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))


FAILING = """
import sys

if "serve" in sys.orig_argv:  # and not a worker process of it
    from hybridkv.engine.runner import Runner

    def forward(*given):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    Runner.forward = forward
"""


def test_a_process_whose_device_has_failed_ends_with_an_error(tiny_llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    more = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    arguments = ("-m", tiny_llm.path, "--context", 512, "--alias", "tiny", "--dtype", "float32")
    with started(*arguments, **more) as (process, lines):
        port = port_of(lines)
        with ask(port, post_bytes(CHAT, LONG)) as connection:
            assert b" 500 " in read_all(connection)[:20]
        assert health(port, SECONDS) == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) not in (0, None)
        assert process.stderr is not None and "the device has failed" in process.stderr.read()
