"""Next turns that a running server reads before they come: what clients see of it, and who sees nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from thinking_template import THINKING_TEMPLATE

from engine.ascii_tokenizer import write_tokenizer
from hybridkv import LLM, ReuseConfig
from server.running import Running, forward, serving, until

LEAST = 100
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
LOOP: list[dict[str, Any]] = [
    {"role": "system", "content": " ".join(f"Rule {i}: be brief." for i in range(30))},
    {"role": "user", "content": "How deep is it?"},
    {"role": "assistant", "content": "", "reasoning_content": "I have to look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": " ".join(f"At {i} m it is dark." for i in range(12))},
]
ASK: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "stop_token_ids": list(range(3, 97, 2)), "tools": [TOOL]}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """In fast mode, where answers keep their tokens; with a folder for conversations that are named."""
    folder = tmp_path_factory.mktemp("warm")
    tiny.save("qwen3_5", folder)
    write_tokenizer(folder, THINKING_TEMPLATE)
    settings: dict[str, Any] = {"max_requests": 2, "max_context": 2048, "step_tokens": 64}
    reuse = ReuseConfig(checkpoints=1 << 24, warm=True, warm_least=LEAST)
    store: Path = tmp_path_factory.mktemp("store")
    with LLM(folder, device="cpu", dtype="float32", reuse=reuse, disk_cache=store, **settings) as llm:
        yield llm


@pytest.fixture
def served(llm: LLM) -> Iterator[Running]:
    llm.forget()
    with serving(llm, api_keys=("sesame", "other"), names=("tiny",)) as running:
        yield running


def ask(running: Running, messages: list[dict[str, Any]], key: str = "sesame", **more: Any) -> dict[str, Any]:
    status, found = running.post("/v1/chat/completions", {**ASK, "messages": messages, **more}, x_api_key=key)
    assert status == 200, found
    return found


def following(answer: dict[str, Any], question: str = "And how wide?") -> list[dict[str, Any]]:
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    said = {name: choice["message"].get(name) for name in ("role", "content", "reasoning_content")}
    return [*LOOP, said, {"role": "user", "content": question}]


def read_ahead(running: Running) -> int:
    """Tokens, once nothing is read any more."""
    warm = running.llm.warm
    assert warm is not None
    until(lambda: not running.service.generations and not warm.busy)
    return warm_tokens(running.llm)


def warm_tokens(llm: LLM) -> int:
    assert llm.manager.reuse is not None
    return llm.manager.reuse.counts["warm_tokens"]


def cached(answer: dict[str, Any]) -> int:
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found == answer["usage"]["hybridkv"]["reuse"]["cached"]
    assert found + answer["usage"]["hybridkv"]["reuse"]["read"] == answer["usage"]["prompt_tokens"]
    return found


def test_a_next_turn_is_there_before_it_comes_for_its_key_alone(served: Running) -> None:
    before = warm_tokens(served.llm)
    first = ask(served, LOOP)
    assert read_ahead(served) - before > LEAST
    others = ask(served, following(first), "other")
    assert cached(others) == 0 and others["usage"]["hybridkv"]["reuse"]["reason"] == "cold"
    read_ahead(served)
    second = ask(served, following(first))
    assert cached(second) > 512 + LEAST and second["usage"]["hybridkv"]["reuse"]["tier"] == "device"
    status, _, text = served.ask("GET", "/metrics", headers={"x-api-key": "sesame"})
    assert status == 200
    values = {
        line.split("{")[0]: float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("hybridkv_reuse_warm")
    }
    assert values["hybridkv_reuse_warm_hits_total"] >= 1 and values["hybridkv_reuse_warm_tokens_total"] > LEAST
    assert values["hybridkv_reuse_warm_hit_tokens_total"] > LEAST
    read_ahead(served)
    served.idle()


def test_anthropics_clients_have_it_too(served: Running) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sea"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": LOOP[3]["content"]}
    messages = [
        {"role": "user", "content": "How deep is it?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "I have to look.", "signature": "s"}, use]},
        {"role": "user", "content": [result]},
    ]
    asked = {"model": "tiny", "max_tokens": 60, "temperature": 0, "system": LOOP[0]["content"]}
    asked["tools"] = [{"name": "look", "input_schema": {"type": "object"}}]
    asked |= {"stop_token_ids": ASK["stop_token_ids"]}
    status, first = served.post("/v1/messages", {**asked, "messages": messages}, x_api_key="sesame")
    assert status == 200 and first["stop_reason"] == "end_turn", first
    read_ahead(served)
    more = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And how wide?"}]
    status, second = served.post("/v1/messages", {**asked, "messages": [*messages, *more]}, x_api_key="sesame")
    assert status == 200 and second["usage"]["cache_read_input_tokens"] > 512 + LEAST, second
    read_ahead(served)


@pytest.mark.parametrize(
    "more",
    [{"hybridkv": more} for more in ({"cache": False}, {"cache": "read"}, {"cache": "write"}, {"budget": 256})],
    ids=["off", "read", "write", "budget"],
)
def test_what_is_not_kept_is_not_read_ahead(served: Running, more: dict[str, Any]) -> None:
    before = warm_tokens(served.llm)
    ask(served, LOOP, **more)
    assert read_ahead(served) == before
    ask(served, LOOP, store=False)  # which keeps it off the disk: nothing of this goes there
    assert read_ahead(served) - before > LEAST


def test_a_conversation_that_is_forgotten_is_not_read_on(served: Running) -> None:
    held, warm = [], served.llm.warm
    assert warm is not None

    def forget(number: int) -> None:
        if warm._now is not None and not held:
            held.append(number)
            warm.forget(warm._now.salt, [*warm._now.said.tolist(), 5])  # as the route does first

    with forward(served.llm, forget) as passes:
        first = ask(served, LOOP, prompt_cache_key="mine")
        until(lambda: bool(held) and not warm.busy)
        body = {"action": "forget", "name": "mine"}
        status, said = served.post("/v1/cache/sessions", body, x_api_key="sesame")
        assert status == 200, said
        assert len(passes) == held[0] + 1, "it was read on"
    assert cached(ask(served, following(first), hybridkv={"cache": "read"})) == 0
    ask(served, LOOP, prompt_cache_key="mine")  # and what was read ahead goes with it
    read_ahead(served)
    assert served.post("/v1/cache/sessions", body, x_api_key="sesame")[0] == 200
    assert cached(ask(served, following(first), hybridkv={"cache": "read"})) == 0


def test_a_server_that_drains_reads_nothing_ahead(llm: LLM) -> None:
    llm.forget()
    warm, reading = llm.warm, []
    assert warm is not None

    def note(number: int) -> None:
        if warm._now is not None:
            reading.append(number)

    with forward(llm, note) as passes:
        with serving(llm, names=("tiny",)) as running:
            assert warm.on
            running.chat(messages=LOOP, **ASK)
            until(lambda: bool(reading))
        left = len(passes)
        assert not warm.on and not warm.busy, "it was drained, and goes on"
        llm.owner.run(lambda engine: None)
        assert len(passes) == left and not llm.manager.slot_of
    warm.offer(b"", [1, 2, 3], 2, lambda: ([1], []))
    assert not warm.busy
