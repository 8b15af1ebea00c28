"""What routers in front of several servers rely on: names of conversations, health, what is sent twice, draining."""

import time
from pathlib import Path
from typing import Any

import openai
import pytest

from hybridkv import LLM
from hybridkv.cache.store import Store
from hybridkv.server import service
from hybridkv.server.problems import AGAIN, ApiError
from hybridkv.server.warm import TOKENS, capture_graphs
from server.running import HI, Running, failing_at, forward, post_bytes, read_all, serving, slowly, until
from server.test_metrics import values_of
from server.test_sessions import CHAT, FIRST, llm, one_server, then, turn  # noqa: F401

LONG = {"messages": HI, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


# ---- names of conversations


def test_a_name_that_is_unknown_here_is_read_from_its_beginning(llm: LLM, tmp_path: Path) -> None:  # noqa: F811
    """As after another replica was lost, or the ring has changed."""
    with one_server(llm, tmp_path / "one") as running:
        first, cached = turn(running, FIRST, key="-")
        second = then(FIRST, first, "And now?")
        want = turn(running, second, key="-")
        assert cached == 0 and want[1] > 0
    with one_server(llm, tmp_path / "two") as running:
        asked = {"messages": second, "temperature": 0, "max_tokens": 8}
        for name in ("talk", "nobody", "x" * 256):
            status, _, found = running.ask("POST", CHAT, asked, {"x-session-id": name})
            assert status == 200 and found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = then(second, found["choices"][0]["message"]["content"], "Go on")
        status, _, found = running.ask("POST", CHAT, {**asked, "messages": again}, {"x-session-id": name})
        assert status == 200 and found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


# ---- health


def test_it_is_not_healthy_when_the_engine_is_gone(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny_llm) as running:
        assert running.ask("GET", "/health")[0] == 200
        with monkeypatch.context() as patch:
            patch.setattr(tiny_llm.owner._state, "closed", True)
            status, _, found = running.ask("GET", "/health")
            assert (status, found["status"]) == (503, "dead") and running.post(CHAT, LONG)[0] == 503
        assert running.ask("GET", "/health")[0] == 200


def test_steps_of_every_size_run_before_it_is_ready(tiny_llm: LLM) -> None:
    with forward(tiny_llm, lambda number: None) as calls:
        capture_graphs(tiny_llm)
        assert not calls, "a CPU captures nothing"
    rows: list[int] = []
    before = tiny_llm.engine.pipeline.on_launch
    tiny_llm.engine.pipeline.on_launch = rows.append
    try:
        capture_graphs(tiny_llm, (1, 2, 4, 8))
    finally:
        tiny_llm.engine.pipeline.on_launch = before
    assert rows == [size for size in (1, 2, 4) for _ in range(TOKENS)]  # four slots: 8 is none of its sizes


# ---- what is sent twice


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 413, 415, 422, 500])
def test_what_would_fail_again_is_not_sent_again(status: int) -> None:
    assert not ApiError(status, "x").again and status not in AGAIN


def attempts(running: Running, make: Any) -> int:
    """How often OpenAI's client asked for one answer that it did not get."""
    name = 'hybridkv_http_requests_total{code="%s",route="/v1/chat/completions"}'
    codes = ("400", "408", "429", "500", "503")
    before = values_of(running)
    client = openai.OpenAI(base_url=f"{running.address}/v1", api_key="x", max_retries=2)
    with pytest.raises(openai.APIStatusError):
        make(client.chat.completions.create)
    after = values_of(running)
    return int(sum(after.get(name % code, 0) - before.get(name % code, 0) for code in codes))


@pytest.mark.slow
def test_clients_do_not_send_again_what_must_not_be_sent_twice(tiny_llm: LLM) -> None:
    ask: Any = {"model": "tiny", "messages": HI}
    with serving(tiny_llm, names=("tiny",), request_seconds=0.3) as running:
        assert running.ask("POST", CHAT, {"messages": HI, "n": 99})[1]["x-should-retry"] == "false"
        with forward(tiny_llm, failing_at(0, 1, 2)) as calls:
            assert attempts(running, lambda create: create(**ask)) == 1 and len(calls) == 1
        with forward(tiny_llm, slowly(0.02)):
            more = {"ignore_eos": True}
            assert attempts(running, lambda create: create(**ask, max_tokens=400, extra_body=more)) == 1
        running.idle()
        running.service.draining = True  # what another replica would answer is asked for again
        assert "x-should-retry" not in running.ask("POST", CHAT, LONG)[1]
        assert attempts(running, lambda create: create(**ask)) == 3
        running.service.draining = False


# ---- numbers


def test_conversations_that_are_held_are_counted_by_where_they_lie(llm: LLM, tmp_path: Path) -> None:  # noqa: F811
    with one_server(llm, tmp_path, names=("tiny",)) as running:

        def held() -> dict[str, float]:
            name = 'hybridkv_held_conversations{model_name="tiny",where="%s"}'
            return {where: values_of(running)[name % where] for where in ("slot", "frozen", "host")}

        assert held() == {"slot": 0, "frozen": 0, "host": 0}
        for number in range(3):  # there are two slots
            turn(running, FIRST, name=f"talk {number}")
        found = held()
        assert sum(found.values()) == 3 and found["slot"] == 2, found
        kinds = [name for name in values_of(running) if name.startswith("hybridkv_cache_pages")]
        assert any('state="used"' in name for name in kinds)


# ---- ending


def test_draining_ends_in_time_and_loses_nothing(llm: LLM, tmp_path: Path) -> None:  # noqa: F811
    """Answers that run come to their end, those that are refused are told where to go, conversations are saved."""
    with one_server(llm, tmp_path, shutdown_seconds=60) as running:
        turn(running, FIRST, name="before")
        held = []
        with forward(llm, slowly(0.01)):
            for number in range(2):
                held.append(running.connect())
                asked = {"messages": FIRST, "max_tokens": 30, "stream": True, "ignore_eos": True}
                held[-1].sendall(post_bytes(CHAT, asked, x_session_id=f"during {number}"))
            until(lambda: len(running.service.generations) == 2)
            running.server.stop()
            until(lambda: running.service.draining)
            status, headers, _ = running.ask("POST", CHAT, LONG)
            assert status == 503 and "retry-after" in headers and "x-should-retry" not in headers
            ends = [read_all(connection) for connection in held]
        assert all(b"data: [DONE]" in end and b'"error"' not in end for end in ends)
        assert running.thread is not None
        running.thread.join(60)
        assert not running.thread.is_alive()
    assert len(Store(tmp_path).saved()) == 3


def test_time_to_save_is_kept_back_from_answers_that_take_too_long(
    llm: LLM,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "SAVE_SECONDS", 59.0)
    monkeypatch.setattr(service, "SAVE_SHARE", 1.0)
    with one_server(llm, tmp_path, shutdown_seconds=60.0) as running:
        turn(running, FIRST, name="before")
        with forward(llm, slowly(0.1)), running.connect() as held:
            held.sendall(post_bytes(CHAT, LONG | {"stream": True}))
            until(lambda: bool(running.service.generations))
            begun = time.monotonic()
            running.server.stop()
            assert b"shutting down" in read_all(held)
        assert time.monotonic() - begun >= 1.0, "the answer was cut before its time"
    assert len(Store(tmp_path).saved()) == 1
