"""`hybridkv serve` as a process: what it prints, how it ends."""

import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hybridkv import LLM
from hybridkv.cli import main
from hybridkv.server.record import log
from server.running import HI, SECONDS, post_bytes, read_all, until

ROOT = Path(__file__).parents[2]
LONG = {"messages": HI, "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(autouse=True)
def own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does to the log is undone."""
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(logging.getLogger("asyncio"), "handlers", [])
    monkeypatch.setattr(log, "propagate", log.propagate)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What it says where it does not begin to serve."""
    with pytest.raises(SystemExit) as leaving:
        main(["serve", *arguments])
    said = capsys.readouterr()
    assert leaving.value.code == 2 and said.out == "" and len(said.err.splitlines()) == 1, said
    return said.err


@contextmanager
def started(*arguments: object, **more: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that serves, and the two lines it prints; it is killed at the end if it still runs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridkv", "serve", "--port", "0", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        yield process, [process.stdout.readline().rstrip() for _ in range(2)]
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def port_of(lines: list[str]) -> int:
    found = re.search(r"at http://127\.0\.0\.1:(\d+) ", lines[0])
    assert found is not None, lines
    return int(found[1])


def test_sigterm_lets_answers_come_to_their_end(tiny_llm: LLM) -> None:
    settings = ("--context", 512, "--alias", "tiny", "--dtype", "float32", "--temperature", 0)
    with started("-m", tiny_llm.path, *settings) as (process, lines):
        port = port_of(lines)
        assert _get(port, "/props")[1]["default_generation_settings"]["params"]["temperature"] == 0
        done = subprocess.run(["bash", "-c", lines[1]], capture_output=True, text=True, timeout=SECONDS)
        assert '"object":"chat.completion"' in done.stdout, (lines, done)
        held = [socket.create_connection(("127.0.0.1", port), timeout=SECONDS) for _ in range(4)]
        for connection in held:
            connection.sendall(post_bytes("/v1/chat/completions", LONG | {"max_tokens": 60}))
        first = [connection.recv(1) for connection in held]
        assert first == [b"H"] * 4
        process.send_signal(signal.SIGTERM)
        for connection in held:
            assert b"data: [DONE]" in read_all(connection), "an answer was cut"
            connection.close()
        assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        assert len(re.findall(r"code=200", process.stderr.read())) == 6


def test_a_second_signal_ends_at_once(tiny_llm: LLM) -> None:
    with started("-m", tiny_llm.path, "--context", 2048, HYBRIDKV_API_KEY="k") as (process, lines):
        assert "Bearer $HYBRIDKV_API_KEY" in lines[1]
        with socket.create_connection(("127.0.0.1", port_of(lines)), timeout=SECONDS) as connection:
            connection.sendall(post_bytes("/v1/chat/completions", LONG, x_api_key="k"))
            assert connection.recv(1) == b"H"
            process.send_signal(signal.SIGINT)
            until(lambda: _get(port_of(lines), "/health")[0] == 503)
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 130
            assert b"[DONE]" not in read_all(connection)


def _get(port: int, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--port", "70000"], "65535"),
        (["--port", "x"], "whole number"),
        (["--host", "no.such.host.invalid", "--api-key", "k"], "cannot listen"),
        (["--api-key", "a b"], "--api-key must be printable"),
        (["--api-key-file", "/no/such/file"], "--api-key-file"),
        (["-m", "/no/such/model", "--port", "0"], "/no/such/model"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *arguments)


def test_ranks_that_would_each_open_the_whole_model_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = refused(capsys, "-m", "/no/such/model", "--port", "0")
    assert "this is process 1 of 2" in said and "--tp 2" in said
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert "/no/such/model" in refused(capsys, "-m", "/no/such/model", "--port", "0")


def test_without_its_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "hybridkv.server.run", raising=False)
    assert "pip install 'hybridkv[server]'" in refused(capsys)


def test_the_other_commands_do_not_load_them() -> None:
    names = "'starlette', 'uvicorn', 'prometheus_client', 'torch'"
    code = f"import sys, hybridkv.cli; print({{{names}}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout.strip() == "set()"
