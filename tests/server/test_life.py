"""A server's life: loading, faults, clients that leave or stall, limits of time and number, draining."""

import gc
import json
import socket
import struct
import threading
import time
from typing import Any

import openai
import pytest

from hybridkv import LLM
from hybridkv.engine.owner import Ticket
from hybridkv.server import app
from hybridkv.server.generation import Generation
from hybridkv.server.openai_chat import ChatFormat
from hybridkv.server.openai_completions import CompletionFormat
from hybridkv.server.protocol import GuardedProtocol
from server.running import HI, Running, failing_at, forward, post_bytes, read_all, serving, slowly, until
from server.saying import CALL, TOOL, saying

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHORT = {"messages": HI, "max_tokens": 2, "temperature": 0}
LONG = {"messages": HI, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


# ---- faults


def test_a_fault_in_a_stream_is_an_error_event(tiny_one: Running) -> None:
    before = tiny_one.chat()["choices"]
    client = openai.OpenAI(base_url=f"{tiny_one.address}/v1", api_key="x", max_retries=0)
    with forward(tiny_one.llm, failing_at(3)) as calls:
        got = []
        with pytest.raises(openai.APIError, match="failed while it answered"):
            more = {"temperature": 0, "ignore_eos": True}
            for chunk in client.chat.completions.create(model="tiny", stream=True, messages=HI, extra_body=more):
                got.append(chunk)
    assert len(calls) == 4 and got, "the fault did not come in the middle"
    assert tiny_one.chat()["choices"] == before


def test_a_fault_in_a_step_is_a_500_without_its_details(tiny_one: Running) -> None:
    with forward(tiny_one.llm, failing_at(0, 2)) as calls:
        first, second = (tiny_one.post(CHAT, LONG) for _ in range(2))
    assert len(calls) == 3
    for status, found in (first, second):
        assert status == 500 and found["error"]["type"] == "server_error"
        assert "secret" not in str(found) and "0xdead" not in str(found)
    tiny_one.chat()


def test_a_fault_in_the_tokenizer_is_a_500(tiny_one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected at /secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(tiny_one.llm.tokenizer, "encode", fail)
        for path, body in ((CHAT, LONG), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            status, found = tiny_one.post(path, body)
            assert status == 500 and "secret" not in str(found)
    tiny_one.chat()


# ---- clients that leave or stall


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_who_leaves_is_forgotten(tiny_one: Running, stream: bool, how: str) -> None:
    with forward(tiny_one.llm, slowly(0.01)) as calls:
        connection = tiny_one.connect()
        connection.sendall(post_bytes(CHAT, {**LONG, "stream": stream}))
        until(lambda: len(calls) > 3)
        if how == "RST":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        tiny_one.idle()
        assert len(calls) < 100, "the answer was written to its end"


@pytest.mark.parametrize("sent", [0, 30, -5])
def test_who_leaves_in_the_middle_of_a_request_is_forgotten(tiny_one: Running, sent: int) -> None:
    connection = tiny_one.connect()
    connection.sendall(post_bytes(CHAT, LONG)[:sent])
    connection.close()
    tiny_one.chat(max_tokens=1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_reads_nothing_is_dropped(tiny_llm: LLM, stream: bool) -> None:
    with serving(tiny_llm, write_seconds=0.3) as running:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((running.host, running.port))
        body = {"prompt": [[5] * 500] * 16, "n": 3, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
        connection.sendall(post_bytes(TEXT, body))  # more comes back than the system holds
        until(lambda: bool(running.service.generations))
        running.idle()
        until(lambda: not running.server._http.server_state.connections)  # type: ignore[union-attr]
        connection.close()


def test_a_client_that_sends_slowly_is_cut_off(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "header_seconds", 0.3)
    with serving(tiny_llm, body_seconds=0.3) as running:
        for part in (b"", b"POST /v1/comp", post_bytes(CHAT, LONG)[:-5]):
            with running.connect() as connection:
                connection.sendall(part)
                assert b" 408 " in read_all(connection)[:20]


def test_connections_are_limited(tiny_llm: LLM) -> None:
    with serving(tiny_llm, connections=3) as running:
        held = [running.connect() for _ in range(3)]
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in connection.recv(1000)
        assert b" 503 " in running.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")[:20]
        for connection in held:
            connection.close()
        until(lambda: b" 200 " in running.raw(post_bytes(TEXT, {"prompt": "a", "max_tokens": 1}))[:20])


def test_many_idle_connections_do_not_matter(tiny_one: Running) -> None:
    held = [tiny_one.connect() for _ in range(300)]
    assert tiny_one.ask("GET", "/health")[0] == 200
    for connection in held:
        connection.close()


# ---- the event loop


class Slow(dict[str, Any]):
    """An answer that takes its time to be written as JSON."""

    def __init__(self, written: threading.Event, go: threading.Event) -> None:
        super().__init__(x=1)
        self._written, self._go = written, go

    def items(self) -> Any:
        self._written.set()
        assert self._go.wait(20), "nobody else was answered meanwhile"
        return super().items()


@pytest.mark.parametrize("route", ["chat", "tokenize"])
def test_answers_are_written_beside_the_event_loop(
    tiny_one: Running, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    written, go, statuses = threading.Event(), threading.Event(), []
    slow = Slow(written, go)
    monkeypatch.setattr(ChatFormat, "whole", lambda *given: slow)
    monkeypatch.setattr(app, "read_tokenize", lambda *given: slow)
    path, body = {"chat": (CHAT, SHORT), "tokenize": ("/tokenize", {"prompt": "a"})}[route]
    asking = threading.Thread(target=lambda: statuses.append(tiny_one.post(path, body)))
    asking.start()
    assert written.wait(240)
    assert tiny_one.ask("GET", "/live")[0] == 200
    go.set()
    asking.join()
    assert statuses == [(200, {"x": 1})]


def test_a_prompt_that_a_stream_repeats_is_written_beside_the_event_loop(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, go, found = threading.Event(), threading.Event(), []
    original = CompletionFormat._echoed

    def echoed(*given: Any) -> Any:
        written.set()
        assert go.wait(240), "nobody else was answered meanwhile"
        return original(*given)

    body = {"prompt": "a b c d", "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0}
    with serving(tiny_llm, names=("tiny",), keep_alive=0.1) as running:
        _, whole = running.post(TEXT, body)
        monkeypatch.setattr(CompletionFormat, "_echoed", echoed)
        asking = threading.Thread(target=lambda: found.extend(running.stream(TEXT, body)))
        asking.start()
        assert written.wait(240)
        for _ in range(3):
            assert running.ask("GET", "/live")[0] == 200
        time.sleep(0.3)  # long enough for signs of life
        go.set()
        asking.join()
        running.idle()
    said = [json.loads(line)["choices"][0] for line in found if line[0] == "{"]
    assert "".join(choice["text"] for choice in said) == whole["choices"][0]["text"]
    scores = [score for choice in said if choice["logprobs"] for score in choice["logprobs"]["token_logprobs"]]
    assert scores == whole["choices"][0]["logprobs"]["token_logprobs"]
    assert found[0] == ": keep-alive" and found[-1] == "[DONE]"


# ---- limits


def streamed_late(running: Running, path: str, body: Any, sign: bytes) -> bytes:
    """A stream whose first step is held up until two signs of life have come."""
    go, found = threading.Event(), b""
    with forward(running.llm, lambda number: go.wait(240) and None), running.connect() as connection:
        connection.sendall(post_bytes(path, {**body, "stream": True}))
        while found.count(sign) < 2:
            found += connection.recv(1 << 16)
        go.set()
        return found + read_all(connection)


def test_signs_of_life_come_while_a_request_waits(tiny_llm: LLM) -> None:
    with serving(tiny_llm, keep_alive=0.1) as running:
        found = streamed_late(running, CHAT, {**LONG, "max_tokens": 2}, b": keep-alive\n\n")
    assert found.index(b": keep-alive") < found.index(b'"role":"assistant"') and b"data: [DONE]" in found


HIDDEN = {
    "thoughts of a chat": (CHAT, {"include_reasoning": False}, "{}</think>Yes."),
    "thoughts of a message": (
        "/v1/messages",
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        "{}</think>Yes.",
    ),
    "a number": (CHAT, {"tools": [TOOL]}, f"</think>{CALL}".replace("3", "{}")),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind.startswith("thoughts") else pytest.mark.slow) for kind in HIDDEN]
)
def test_signs_of_life_come_while_tokens_come_that_show_nothing(tiny_llm: LLM, kind: str) -> None:
    path, more, text = HIDDEN[kind]
    body = {"model": "tiny", "messages": HI, "max_tokens": 300, "temperature": 0, "stream": True, **more}
    with serving(tiny_llm, names=("tiny",), keep_alive=0.4) as running, forward(tiny_llm, slowly(0.02)):
        with saying(running, text.format("1" * 60)):  # more than a second
            _, found = running.post(path, body)
        running.idle()
    events = [event for event in found.split("\n\n") if event]
    signs = [i for i, event in enumerate(events) if event.startswith((": keep-alive", "event: ping"))]
    shown = max(i for i, event in enumerate(events) if '"Y"' in event or "111" in event)
    first = min(i for i, event in enumerate(events) if i not in signs)
    assert any(first < sign < shown for sign in signs), found


def test_those_that_are_prepared_count_in_the_queue(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    with serving(tiny_llm, queue=1) as running:
        running.post(CHAT, SHORT)
        restore = running.service.sessions.restore
        monkeypatch.setattr(running.service.sessions, "restore", lambda sharing: go_on.wait() and restore(sharing))
        room, statuses = tiny_llm.plan.slots + 1, []
        asked = {**SHORT, "prompt_cache_key": "mine"}
        threads = [
            threading.Thread(target=lambda: statuses.append(running.post(CHAT, asked)[0])) for _ in range(room + 2)
        ]
        try:
            for thread in threads:
                thread.start()
            until(lambda: len(statuses) == 2)  # those that found no room, while nobody has begun
            assert statuses == [429, 429] and not running.service.generations
        finally:
            go_on.set()
            for thread in threads:
                thread.join()
        assert sorted(statuses) == [200] * room + [429, 429]
        running.idle()


def test_a_full_queue_is_a_429(tiny_llm: LLM) -> None:
    with serving(tiny_llm, queue=1) as running, forward(tiny_llm, slowly(0.01)):
        room = tiny_llm.plan.slots + 1
        threads = [threading.Thread(target=running.post, args=(CHAT, LONG)) for _ in range(room)]
        for thread in threads:
            thread.start()
        until(lambda: running.service.answers == room)
        status, headers, found = running.ask("POST", CHAT, LONG)
        assert (status, found["error"]["type"]) == (429, "rate_limit_error") and int(headers["retry-after"]) > 0
        assert running.post(TEXT, {"prompt": ["a"] * 6})[0] == 429
        start = time.monotonic()
        assert running.ask("GET", "/health")[0] == running.ask("GET", "/metrics")[0] == 200
        assert time.monotonic() - start < 20  # not "until the engine has time"
        end_all(running)
        for thread in threads:
            thread.join()
        running.idle()


def test_waiting_and_answering_have_limits_of_time(tiny_llm: LLM) -> None:
    with serving(tiny_llm, queue_seconds=0.5) as running, forward(tiny_llm, slowly(0.02)):
        threads = [threading.Thread(target=running.post, args=(CHAT, LONG)) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: len(tiny_llm.engine.scheduler.running) == 4)
        status, found = running.post(CHAT, LONG)
        assert status == 503 and "waited" in found["error"]["message"]
        end_all(running)
        for thread in threads:
            thread.join()
        running.idle()
    with serving(tiny_llm, request_seconds=0.3) as running, forward(tiny_llm, slowly(0.02)):
        assert running.post(CHAT, LONG)[0] == 408
        running.idle()


def test_an_engine_that_stands_still_keeps_nobody_waiting_for_ever(tiny_llm: LLM) -> None:
    go = threading.Event()
    with (
        serving(tiny_llm, queue_seconds=0.3) as running,
        forward(tiny_llm, lambda number: go.wait(240) and None) as calls,
    ):
        first = threading.Thread(target=running.post, args=(CHAT, LONG | {"max_tokens": 1}))
        first.start()
        until(lambda: len(calls) == 1)
        assert running.post(CHAT, LONG)[0] == 503
        go.set()
        first.join()
        running.idle()


def end_all(running: Running) -> None:
    """End what runs, as a client that leaves does."""
    for generation in list(running.service.generations):
        running.server._loop.call_soon_threadsafe(generation.cancel)  # type: ignore[union-attr]


# ---- loading and ending


def test_health_tells_loading_serving_draining_and_dead(tiny_llm: LLM) -> None:
    go = threading.Event()

    def load() -> LLM:
        assert go.wait(240)
        return tiny_llm

    with serving(load, wait=False, shutdown_seconds=30) as running:
        until(lambda: running.ask("GET", "/live")[0] == 200)
        status, _, found = running.ask("GET", "/health")
        assert (status, found["status"]) == (503, "loading")
        assert running.post(CHAT, LONG)[0] == running.ask("GET", "/v1/models")[0] == 503
        go.set()
        until(lambda: running.ask("GET", "/ready")[0] == 200)
        running.service.fatal = "the device has failed"
        status, _, found = running.ask("GET", "/health")
        assert (status, found["status"], found["error"]["message"]) == (503, "dead", "the device has failed")
        assert running.post(CHAT, LONG)[0] == 503
        running.service.fatal = None
        told = threading.Event()
        with forward(tiny_llm, lambda number: told.wait(240) and None if number == 3 else None):
            held = running.connect()
            held.sendall(post_bytes(CHAT, LONG | {"stream": True, "max_tokens": 9}))
            until(lambda: bool(running.service.generations))
            running.server.stop()
            until(lambda: running.service.draining)
            status, _, found = running.ask("GET", "/ready")
            assert (status, found["status"]) == (503, "draining")
            status, headers, found = running.ask("POST", CHAT, LONG)
            assert status == 503 and "retry-after" in headers
            assert running.ask("GET", "/live")[0] == 200
            told.set()
            assert b"data: [DONE]" in read_all(held), "the answer was cut"
            held.close()


def test_what_takes_too_long_to_end_is_told(tiny_llm: LLM) -> None:
    with serving(tiny_llm, shutdown_seconds=0.2) as running, forward(tiny_llm, slowly(0.05)):
        held = running.connect()
        held.sendall(post_bytes(CHAT, LONG | {"stream": True}))
        until(lambda: bool(running.service.generations))
        running.server.stop()
        found = read_all(held)
        held.close()
        assert b"shutting down" in found and b"[DONE]" not in found
        running.idle()


def test_a_model_that_cannot_be_opened_ends_the_server() -> None:
    def load() -> LLM:
        raise ValueError("no such model")

    with pytest.raises(AssertionError, match="no such model"), serving(load):
        pass


# ---- all together


def test_many_clients_at_once_get_exactly_what_they_ask_for(tiny_one: Running) -> None:
    wrong: list[Any] = []
    alone = tiny_one.chat(max_tokens=9, ignore_eos=True)["choices"][0]["message"]

    def client(number: int) -> None:
        for i in range(5):
            count = 1 + (number + 3 * i) % 9
            asked = {"messages": HI, "max_tokens": count, "ignore_eos": True, "temperature": 0}
            if (number + i) % 2:
                events = tiny_one.stream(CHAT, asked | {"stream_options": {"include_usage": True}})
                usage = json.loads(events[-2])["usage"]
                deltas = [json.loads(event)["choices"] for event in events[:-2]]
                text = "".join(d[0]["delta"].get("reasoning", "") for d in deltas)
            else:
                found = tiny_one.chat(**asked)
                usage, text = found["usage"], found["choices"][0]["message"]["reasoning"]
            if usage["completion_tokens"] != count or not alone["reasoning"].startswith(text.rstrip()):
                wrong.append((number, i, usage, text))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    tiny_one.idle()
    until(lambda: not _referred_to())  # the last answers' tasks come to their end after their clients have them


def _referred_to() -> list[Any]:
    """Requests that have ended, and that something still holds."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in (Generation, Ticket)]
