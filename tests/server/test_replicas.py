"""`hybridkv serve --replicas 2`: two servers and a router, asked through the router; one is killed, all are drained."""

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from hybridkv.errors import HybridKVError
from hybridkv.server.replicas import RESTART_SECONDS, Replicas, choose_ports, deal_cards, get
from server.running import HI, SECONDS, post_bytes, read_all, until
from server.test_command import own_log, refused  # noqa: F401

CHAT = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]
needs_router = pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not here")


class Started:
    """The launcher's process, and the processes that it has started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.lines = [process.stdout.readline().rstrip() for _ in range(2)]
        found = re.search(r"at http://127\.0\.0\.1:(\d+) \(replicas at ports (\d+), (\d+);", self.lines[0])
        assert found is not None, self.lines
        self.router, *self.servers = map(int, found.groups())

    @property
    def children(self) -> dict[int, int]:
        """Port -> process id, of those that run."""
        return {port: pid for pid, port in children_of(self.process.pid).items()}

    def ask(self, session: str, **asked: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.router, timeout=SECONDS)
        body = {"model": "tiny", "messages": HI, "max_tokens": 4, "temperature": 0, **asked}
        headers = {"content-type": "application/json", "x-session-id": session}
        try:
            connection.request("POST", CHAT, json.dumps(body), headers)
            answer = connection.getresponse()
            raw = answer.read()
            return answer.status, json.loads(raw) if raw[:1] == b"{" else raw.decode()
        finally:
            connection.close()

    def held(self, port: int) -> set[str]:
        """Names of the conversations of a server."""
        found = get(port, "/v1/cache/sessions")[1]
        assert isinstance(found, dict)
        return {each["name"] for each in found["data"]}


def children_of(parent: int) -> dict[int, int]:
    """Process id -> the last port on its command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat, words = (folder / "stat").read_text(), (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        state, mother = stat.rpartition(") ")[2].split()[:2]
        if int(mother) == parent and state != "Z" and b"--port" in words:
            at = len(words) - 1 - words[::-1].index(b"--port")
            found[int(folder.name)] = int(words[at + 1])
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    if importlib.util.find_spec("vllm_router") is None:
        pytest.skip("vllm-router is not here")
    if not os.environ.get("HYBRIDKV_REPLICAS"):  # the tests go on from each other, so one process runs them, in order
        pytest.skip("make test-replicas runs it")
    model = tmp_path_factory.mktemp("model")
    tiny.save("qwen3_5", model)
    write_tokenizer(model, TEMPLATE)
    arguments = ["-m", model, "--context", 4096, "--alias", "tiny", "--dtype", "float32", "--replicas", 2]
    arguments += ["--budget", 96, "--window", 16, "--recent", 16, "--device", "cpu", "--exact", "--disk-cache"]
    arguments += [tmp_path_factory.mktemp("store"), "--port", 0, "--drain", 30]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridkv", "serve", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    drained: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: drained.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
    reader.start()
    timer = threading.Timer(5 * SECONDS, process.kill)
    timer.start()
    try:
        yield Started(process)
    finally:
        timer.cancel()
        mine = children_of(process.pid)
        process.kill()
        process.wait(SECONDS)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in mine))  # they end with their launcher


# In this order: the last ones end what the first ones ask.


def test_openais_client_is_answered_whole_and_streaming(two: Started) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{two.router}/v1", api_key="any", max_retries=0)
    ask: Any = {"model": "tiny", "messages": HI, "max_tokens": 8, "temperature": 0}
    named: Any = {"extra_headers": {"x-session-id": "client"}, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask, **named)
    chunks = list(client.chat.completions.create(**ask, **named, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.usage is not None and whole.usage.completion_tokens == 8 and len(chunks) > 2
    assert text == whole.choices[0].message.content


def test_conversations_of_six_turns_stay_and_read_only_what_is_new(two: Started) -> None:
    """Each in one server, and between them in both."""
    names = [f"talk {i}" for i in range(8)]
    for name in names[2:]:
        assert two.ask(name)[0] == 200
    # where a name goes depends on the servers' ports, which are any: eight may all be in one, sixty are not
    while len(homes := {port for port in two.servers if "talk" in " ".join(two.held(port))}) < 2 and len(names) < 60:
        names.append(f"talk {len(names)}")
        assert two.ask(names[-1])[0] == 200
    assert homes == set(two.servers), "the router has used one server alone"
    for name in names[:2]:
        said, before = list(HI), 0
        for number in range(6):
            status, found = two.ask(name, messages=said, max_tokens=3)
            assert status == 200, found
            usage = found["usage"]
            cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
            # all that was there, but for its last token, which is not in a cache before it is read
            assert cached == 0 if not number else prompt > cached >= before - 1 > 0, (number, usage)
            before = prompt + usage["completion_tokens"]
            answer = found["choices"][0]["message"]["content"]
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"And {number}?"}]
    for name in names:
        assert sum(name in two.held(port) for port in two.servers) == 1


def test_a_server_that_is_killed_takes_its_answer_along_and_nothing_else(two: Started) -> None:
    victim, other = two.servers
    at = {name: port for port in two.servers for name in two.held(port) if name.startswith("talk")}
    name = next(name for name, port in at.items() if port == victim)
    stays = next(name for name, port in at.items() if port == other)
    pid = two.children[victim]
    # more than is written before it is killed, however quick the machine
    ask = {"model": "tiny", "messages": HI, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with socket.create_connection(("127.0.0.1", two.router), timeout=SECONDS) as connection:
        connection.sendall(post_bytes(CHAT, ask, x_session_id=name))
        begun = connection.recv(4000)
        while b"data: " not in begun:
            more = connection.recv(4000)
            assert more, begun
            begun += more
        os.kill(pid, signal.SIGKILL)
        found = begun + read_all(connection)
    # the router has no event for it: it breaks off the transfer, which every client of HTTP takes for an error
    assert b"[DONE]" not in found and not found.endswith(b"0\r\n\r\n"), "the answer looks whole"
    for number in range(12):
        status, answer = two.ask((name, stays)[number % 2])
        assert status == 200, (number, answer)
    assert stays in two.held(other)
    until(lambda: two.children.get(victim, pid) != pid and get(victim, "/health")[0] == 200)
    until(lambda: get(two.router, "/health")[0] == 200)
    # the router keeps away from it for a while after it is back; until then there is one server alone
    until(lambda: two.ask(name)[0] == 200 and name in two.held(victim))


def test_one_server_can_be_drained_and_comes_back(two: Started) -> None:
    """As for an update: no request is lost, neither those that run nor those that come."""
    port = two.servers[1]
    pid = two.children[port]
    wrong: list[Any] = []
    answered: list[int] = []
    go = threading.Event()

    def client(number: int) -> None:
        while not go.is_set():
            status, found = two.ask(f"client {number}", max_tokens=6, ignore_eos=True)
            if status != 200 or found["usage"]["completion_tokens"] != 6:
                wrong.append((status, found))
            answered.append(number)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(answered) >= 4)
        os.kill(pid, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{pid}").exists())
        before = len(answered)
        until(lambda: len(answered) >= before + 8)  # while it is not there
    finally:
        go.set()
        for thread in threads:
            thread.join(SECONDS)
    assert wrong == []


def test_all_are_drained_together_and_no_answer_is_lost(two: Started) -> None:
    mine = children_of(two.process.pid)
    held = []
    for number in range(4):
        held.append(socket.create_connection(("127.0.0.1", two.router), timeout=SECONDS))
        ask = {"model": "tiny", "messages": HI, "max_tokens": 30, "ignore_eos": True, "stream": True}
        held[-1].sendall(post_bytes(CHAT, ask, x_session_id=f"last {number}"))
    begun = [connection.recv(1) for connection in held]
    assert begun == [b"H"] * 4
    two.process.send_signal(signal.SIGTERM)
    for connection in held:
        found = read_all(connection)
        assert b"data: [DONE]" in found and b'"error"' not in found, "an answer was cut"
        connection.close()
    assert two.process.wait(SECONDS) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in mine), "a process is left"


# ---- processes, without models


def made(*codes: str) -> Replicas:
    """Servers that are programs of one line."""
    found = Replicas(["serve"], [{} for _ in codes], choose_ports(0, len(codes)), drain=0.0)
    for child, code in zip(found.servers, codes, strict=True):
        child.command = [sys.executable, "-c", code]
    return found


def test_one_that_does_not_come_up_ends_the_others() -> None:
    replicas = made("import time; time.sleep(600)", "raise SystemExit(3)")
    with pytest.raises(HybridKVError, match="replica 1 ended with status 3 before it served"):
        replicas.run(lambda _: None)
    assert [child.code for child in replicas.servers] == [-signal.SIGKILL, 3] and replicas.router.process is None


def test_what_dies_is_started_again_at_once_and_then_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = made("pass")
    [child] = replicas.servers
    starts = []
    start = child.start
    monkeypatch.setattr(child, "start", lambda: (starts.append(1), start()))
    child.start()
    for expected in (2, 2, 2):
        assert child.process is not None
        child.process.wait(SECONDS)
        replicas._look()
        assert len(starts) == expected
    child.restarted -= RESTART_SECONDS  # a minute later
    replicas._look()
    assert len(starts) == 3
    replicas._kill()


def test_processes_end_with_the_one_that_started_them() -> None:
    code = (
        "from hybridkv.server.replicas import Child; import os, time; "
        "child = Child('replica', ['sleep', '600'], dict(os.environ), 1); child.start(); "
        "print(child.process.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        child = Path(f"/proc/{int(process.stdout.readline())}")
        assert child.exists()
    finally:
        process.kill()
        process.communicate()

    def gone() -> bool:  # a zombie has ended, whoever is to reap it
        return not child.exists() or ") Z " in (child / "stat").read_text()

    until(gone)


# ---- before anything is started


@needs_router
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "0"], "--replicas must be from 1 to 64, not 0"),
        (["--replicas", "65"], "--replicas must be from 1 to 64, not 65"),
        (["--replicas", "2", "--host", "0.0.0.0", "--api-key", "k"], "docs/deploy/nginx.conf"),
        (["--replicas", "2", "--port", "65533", "--device", "cpu"], "take 4 ports"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hybridkv", "serve", *arguments])
    assert said in refused(capsys, *arguments)


def test_without_the_router_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'hybridkv[replicas]'" in refused(capsys, "--replicas", "2")


def test_cards_are_dealt_out() -> None:
    cards = ["0", "1", "2", "3", "4"]
    assert [hand["CUDA_VISIBLE_DEVICES"] for hand in deal_cards(cards, 2)] == ["0", "1"]
    assert [hand["CUDA_VISIBLE_DEVICES"] for hand in deal_cards(cards, 2, each=2)] == ["0,1", "2,3"]
    assert [hand["CUDA_VISIBLE_DEVICES"] for hand in deal_cards(["7"], 2)] == ["7", "7"]
    assert deal_cards([], 2) == [{}, {}]
    with pytest.raises(HybridKVError, match="4 cards was asked for, and there are 2"):
        deal_cards(["0", "1"], 1, each=4)


def test_ports_follow_each_other_and_must_be_free() -> None:
    free = choose_ports(0, 3)
    assert len({free.router, *free.servers, free.metrics}) == 5
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HybridKVError, match=f"port {port}"):
            choose_ports(port - 1, 2)
