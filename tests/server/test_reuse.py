"""What a server says of prompts that it has read before, and who sees what of whom."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hybridkv import LLM
from hybridkv.engine.engine import Engine
from server.running import Running, forward, serving, until

TEXT = " ".join(f"Item {i} of the list costs {3 * i} coins." for i in range(18))


def messages(question: str, text: str = TEXT) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{text} {question}"}]


def usage(running: Running, question: str, **asked: Any) -> dict[str, Any]:
    return running.chat(**{"messages": messages(question), "max_tokens": 2, **asked})["usage"]


@pytest.fixture
def fresh(smol_server: Running) -> Iterator[Running]:
    """The embedded model's server, which has read nothing."""
    forget(smol_server)
    yield smol_server
    smol_server.idle()


def forget(running: Running) -> None:
    running.llm.owner.run(lambda engine: engine.manager.reuse.forget())


def test_a_second_prompt_says_how_much_was_there_and_why_not_more(fresh: Running) -> None:
    first, second = usage(fresh, "Which is cheap?"), usage(fresh, "What is item 3?")
    assert first["prompt_tokens_details"] == {"cached_tokens": 0} and first["hybridkv"]["reuse"]["reason"] == "cold"
    found = second["hybridkv"]["reuse"]
    assert found["cached"] == second["prompt_tokens_details"]["cached_tokens"] >= 128 and found["cached"] % 64 == 0
    assert found["cached"] + found["read"] == second["prompt_tokens"]
    assert found["reason"] in ("full", "diverged")
    again = usage(fresh, "What is item 3?", hybridkv={"cache": False})
    assert again["prompt_tokens_details"]["cached_tokens"] == 0 and again["hybridkv"]["reuse"]["reason"] == "off"
    status, said = fresh.post("/v1/chat/completions", {"messages": messages("?"), "hybridkv": {"cache": "some"}})
    assert status == 400 and "cache must be true" in said["error"]["message"]


def test_a_preempted_request_says_how_it_began(fresh: Running) -> None:
    usage(fresh, "What is it?")
    owner, preempted = fresh.llm.owner, []

    def preempt(engine: Engine) -> None:
        with engine.changing():
            [request] = engine.scheduler.running
            engine.scheduler.preempt(request)
            preempted.append(request)

    def before(number: int) -> None:
        if number == 2:  # its prompt is read
            threading.Thread(target=owner.run, args=(preempt,), daemon=True).start()
            until(lambda: not owner._inbox.empty())

    with forward(fresh.llm, before):
        found = usage(fresh, "What is it?", max_tokens=6, ignore_eos=True)
    assert [request.preemptions for request in preempted] == [1]
    said, cached = found["hybridkv"]["reuse"], found["prompt_tokens_details"]["cached_tokens"]
    assert cached == said["cached"] == found["prompt_tokens"] - said["read"] > 0


def test_a_stream_says_the_same(fresh: Running) -> None:
    usage(fresh, "Which is cheap?")
    body = {"messages": messages("What is item 4?"), "max_tokens": 2, "stream_options": {"include_usage": True}}
    events = fresh.stream("/v1/chat/completions", body)
    assert json.loads(events[-2])["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128


def test_anthropics_three_counts_add_up_and_come_with_the_first_event(fresh: Running) -> None:
    def ask(question: str, **more: Any) -> Any:
        return fresh.post("/v1/messages", {"model": "smol", "max_tokens": 2, "messages": messages(question), **more})[1]

    def counts(found: dict[str, Any]) -> tuple[int, int, int]:
        return found["cache_read_input_tokens"], found["cache_creation_input_tokens"], found["input_tokens"]

    read, kept, rest = counts(ask("Which is cheap?")["usage"])
    assert read == 0 and kept >= 128 and rest < 64
    again, more, left = counts(ask("Which is cheap?")["usage"])
    assert again == kept and more == 0 and left == rest
    events = ask("What is item 6?", stream=True).split("\n\n")
    start = json.loads(events[0].partition("data: ")[2])
    assert start["message"]["usage"]["cache_read_input_tokens"] == again


def test_keys_and_salts_see_nothing_of_each_other(smol_llm: LLM) -> None:
    with serving(smol_llm, api_keys=("sesame", "other"), names=("smol",)) as running:
        forget(running)

        def cached(key: str, **asked: Any) -> tuple[int, dict[str, Any]]:
            body = {"messages": messages("Which is cheap?"), "max_tokens": 1, **asked}
            found = running.post("/v1/chat/completions", body, x_api_key=key)[1]["usage"]
            return found["prompt_tokens_details"]["cached_tokens"], found["hybridkv"]["reuse"]

        none, cold = cached("sesame")
        assert none == 0 and cached("sesame")[0] >= 128
        others, said = cached("other")
        assert others == 0 and said == cold, "another key's prompts show"
        assert cached("sesame", cache_salt="mine") == (0, cold)
        assert cached("sesame", cache_salt="mine")[0] >= 128 and cached("other", cache_salt="mine")[0] == 0
        running.idle()
