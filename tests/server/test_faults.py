"""Faults on purpose, each shown to have come: who is hurt is told, all others get what they get without it, nothing is
kept, and the server goes on.
"""

import logging
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hybridkv import LLM
from hybridkv.engine import pipeline
from hybridkv.server import service
from hybridkv.server.openai_chat import ChatFormat
from hybridkv.server.record import log
from hybridkv.text.stream import TextStream
from server.running import HI, SECONDS, Running, failing_at, forward, post_bytes, read_all, serving, slowly, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": HI, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
LONG = ASK | {"max_tokens": 400}


@pytest.fixture(scope="module")
def before(tiny_server: Running) -> Any:
    """What the server answers before all faults."""
    return tiny_server.chat(**ASK)["choices"]


@pytest.fixture
def same_after(before: Any, tiny_one: Running) -> Iterator[Running]:
    """The server; after the fault it answers as before."""
    yield tiny_one
    assert tiny_one.chat(**ASK)["choices"] == before


def together(running: Running, *asked: dict[str, Any]) -> list[tuple[int, Any]]:
    """The answers to requests that are sent at the same time."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda body: running.post(CHAT if "messages" in body else TEXT, body), asked))


# ---- in a step


def test_every_waiter_is_answered_when_steps_fail(same_after: Running) -> None:
    with forward(same_after.llm, failing_at(3, 9)) as calls:
        found = together(same_after, *[ASK] * 9)  # of which four have a slot
    assert len(calls) > 9, "the second fault did not come"
    codes = [status for status, _ in found]
    assert set(codes) == {200, 500} and len(codes) == 9
    assert all(answer["usage"]["completion_tokens"] == 12 for status, answer in found if status == 200)


@pytest.mark.parametrize("kind", [MemoryError, SystemExit, KeyboardInterrupt, AssertionError, OSError])
def test_no_kind_of_exception_ends_the_engine(same_after: Running, kind: type[BaseException]) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise kind("injected")

    with forward(same_after.llm, fail) as calls:
        status, found = same_after.post(CHAT, ASK)
    assert len(calls) == 3 and status == 500 and "injected" not in str(found)


def test_a_fault_in_the_sampler_ends_the_step_it_is_in(same_after: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = pipeline.sample, []

    def sample(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("injected at /secret/path")
        return original(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "sample", sample)
        found = together(same_after, *[ASK] * 6)
    assert len(calls) > 4 and {status for status, _ in found} == {200, 500} and "secret" not in str(found)


def test_a_tokenizer_that_cannot_write_a_token_hurts_its_own_request_alone(
    same_after: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, fired = TextStream.push, []

    def push(self: TextStream, token: int, may_stop: bool = True) -> str:
        if self._stops:  # the request with a stop string
            fired.append(token)
            raise ValueError("injected")
        return original(self, token, may_stop)

    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push", push)
        found = together(same_after, ASK, ASK | {"stop": "~~"}, ASK)
    assert [status for status, _ in found] == [200, 500, 200] and len(fired) == 1
    assert [answer["usage"]["completion_tokens"] for status, answer in found if status == 200] == [12, 12]


@pytest.mark.parametrize("said", ["CUDA error", "Triton Error [CUDA]"])
def test_a_device_that_has_failed_is_told(tiny_llm: LLM, said: str) -> None:
    def fail(number: int) -> None:
        raise RuntimeError(f"{said}: an illegal memory access was encountered")

    with serving(tiny_llm) as running:
        with forward(tiny_llm, fail):
            assert running.post(CHAT, ASK)[0] == 500
        status, _, found = running.ask("GET", "/health")
        assert (status, found["status"]) == (503, "dead") and running.post(CHAT, ASK)[0] == 503
        assert running.ask("GET", "/live")[0] == 200
        running.idle()


def test_an_engine_that_does_not_move_is_told(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    with serving(tiny_llm) as running, forward(tiny_llm, lambda number: go.wait(240) and None) as calls:
        asking = threading.Thread(target=running.post, args=(CHAT, ASK))
        asking.start()
        until(lambda: len(calls) == 1)
        assert running.ask("GET", "/health")[0] == 200
        monkeypatch.setitem(service.DEAD_SECONDS, "cpu", 0.0)
        status, _, found = running.ask("GET", "/health")
        assert (status, found["status"]) == (503, "dead") and running.post(CHAT, ASK)[0] == 503
        go.set()
        asking.join()
        until(lambda: running.ask("GET", "/health")[0] == 200)  # it moves again, and rests
        running.idle()


def test_an_engine_that_does_not_move_is_told_whoever_comes_meanwhile(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    with (
        serving(tiny_llm, queue_seconds=0.2) as running,
        forward(tiny_llm, lambda number: go.wait(240) and None) as calls,
    ):
        asking = threading.Thread(target=running.post, args=(CHAT, ASK))
        asking.start()
        until(lambda: len(calls) == 1)
        monkeypatch.setitem(service.DEAD_SECONDS, "cpu", 0.5)
        try:
            for _ in range(6):  # each waits in vain for 0.2 s; together that is longer than the engine has
                assert running.post(CHAT, ASK)[0] == 503
            status, _, found = running.ask("GET", "/health")
            assert (status, found["status"]) == (503, "dead")
        finally:
            go.set()
            asking.join()
        until(lambda: running.ask("GET", "/health")[0] == 200)
        running.idle()


def test_an_engine_that_somebody_else_uses_is_an_error_of_the_request(
    same_after: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def owned() -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(same_after.llm.engine, "owned", owned)
        assert same_after.post(CHAT, ASK)[0] == 500


# ---- around it


def test_a_template_that_fails_hurts_its_own_request_alone(
    same_after: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = same_after.llm.chat_template
    assert template is not None

    def fail(*_: Any, **__: Any) -> str:
        raise RuntimeError("injected at /secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(template, "render", fail)
        found = together(same_after, ASK, {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    assert [status for status, _ in found] == [500, 200] and "secret" not in str(found)


def test_the_process_that_renders_templates_may_be_killed(same_after: Running) -> None:
    worker = same_after.llm.chat_template._worker  # type: ignore[union-attr]
    assert worker is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert same_after.post(CHAT, ASK)[0] == 200
    assert same_after.llm.chat_template._worker is not worker  # type: ignore[union-attr]


@pytest.mark.parametrize("at", [0, 3])
def test_a_fault_in_a_streams_own_words_is_told(same_after: Running, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = ChatFormat.chunks, []

    def chunks(self: ChatFormat, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == at + 1:
            raise RuntimeError("injected at /secret/path")
        return original(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(ChatFormat, "chunks", chunks)
        found = same_after.raw(post_bytes(CHAT, ASK | {"stream": True}))
    assert (b" 500 " if at == 0 else b" 200 ") in found[:20]
    assert b'"error"' in found and b"[DONE]" not in found and b"secret" not in found


def test_a_log_that_fails_hurts_nobody(same_after: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(logging.Handler):
        tried = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.tried += 1
            raise OSError("injected")

    broken = Broken()
    monkeypatch.setattr(log, "handlers", [broken])
    before = log.level
    log.setLevel(logging.INFO)
    try:
        for _ in range(3):
            assert same_after.post(CHAT, ASK)[0] == 200
        until(lambda: broken.tried >= 3)
    finally:
        log.setLevel(before)


# ---- pages


def test_requests_that_do_not_all_fit_take_turns(tiny_llm: LLM) -> None:
    plan = tiny_llm.plan
    pages = sum(plan.pool_bytes.values())
    whole = tiny_llm.model.nbytes + plan.nbytes - plan.checkpoint_bytes + plan.workspace
    memory = whole - pages // 2  # pages for two of four requests
    with (
        LLM(tiny_llm.path, "cpu", "float32", exact=True, max_requests=4, max_context=512, memory=memory) as small,
        serving(small, names=("tiny",)) as running,
    ):
        assert small.plan.pages["attention"] <= plan.pages["attention"] // 2
        more = {"max_tokens": 30, "ignore_eos": True, "temperature": 0}
        asked = [{"prompt": [5 + i] * 250, **more} for i in range(4)]
        alone = [running.post(TEXT, each)[1]["choices"] for each in asked]
        found = together(running, *asked)
        assert [status for status, _ in found] == [200] * 4
        assert all(answer["usage"]["completion_tokens"] == 30 for _, answer in found)
        assert [answer["choices"] for _, answer in found] == alone
        _, _, text = running.ask("GET", "/metrics")
        [line] = [line for line in text.splitlines() if line.startswith("hybridkv_num_preemptions_total{")]
        assert float(line.split()[-1]) > 0, "nobody had to wait"
        long = more | {"prompt": [9] * 511}
        [(status, answer), (other, _)] = together(running, long, asked[0])
        assert (status, other) == (200, 200) and answer["usage"]["completion_tokens"] == 1
        running.idle()


# ---- clients that leave


def leave(connection: socket.socket, how: str) -> None:
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)
    if how == "RST":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def at_step(number: int, reached: threading.Event, go: threading.Event) -> Callable[[int], None]:
    """Stops the engine before a step until it may go on."""

    def wait(step: int) -> None:
        if step == number:
            reached.set()
            assert go.wait(2 * SECONDS)  # longer than a test waits for the server to see that its client is gone

    return wait


STAGES = {"reading": 0, "first token": 1, "last token": 11}  # the step before which they leave


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("how", ["FIN", "RST", "half"])
@pytest.mark.parametrize("stage", STAGES)
def test_who_leaves_leaves_nothing(same_after: Running, stage: str, how: str, stream: bool) -> None:
    reached, go = threading.Event(), threading.Event()
    with forward(same_after.llm, at_step(STAGES[stage], reached, go)):
        connection = same_after.connect()
        connection.sendall(post_bytes(CHAT, ASK | {"stream": stream}))
        assert reached.wait(240)
        leave(connection, how)
        try:
            until(lambda: not same_after.service.generations)  # seen before the step has ended
        finally:
            go.set()
        same_after.idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_who_leaves_while_waiting_for_a_slot_leaves_nothing(same_after: Running, stream: bool) -> None:
    with forward(same_after.llm, slowly(0.002)):
        held = [same_after.connect() for _ in range(4)]
        for connection in held:
            connection.sendall(post_bytes(CHAT, LONG))
        until(lambda: len(same_after.llm.engine.scheduler.running) == 4)
        waiting = same_after.connect()
        waiting.sendall(post_bytes(CHAT, LONG | {"stream": stream}))
        until(lambda: len(same_after.llm.engine.scheduler.waiting) == 1)
        leave(waiting, "RST")
        until(lambda: not same_after.llm.engine.scheduler.waiting)
        assert len(same_after.service.generations) == 4, "the others go on"
        for connection in held:
            leave(connection, "FIN")
        same_after.idle()


def test_clients_that_leave_by_tens_do_not_disturb_the_others(same_after: Running) -> None:
    """Of 40 clients every second leaves at a random moment: all the others get all of theirs."""

    def client(number: int) -> int | None:
        with same_after.connect() as connection:
            connection.sendall(post_bytes(CHAT, ASK | {"stream": True}))
            if number % 2:
                connection.recv(1 + 97 * number)
                leave(connection, ("FIN", "RST")[number // 2 % 2])
                return None
            return read_all(connection).count(b'"reasoning":')

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(client, range(40)))
    assert len(set(found[::2])) == 1 and found[0] and set(found[1::2]) == {None}
    same_after.idle()
