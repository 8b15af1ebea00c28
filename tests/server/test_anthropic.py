"""Anthropic's dialect: what its client, and plain requests, get."""

import json
from typing import Any

import anthropic
import pytest

from hybridkv import LLM, SamplingParams
from hybridkv.server.anthropic_request import read_message_request
from hybridkv.server.fields import Fields
from server.running import HI, Running, serving
from server.test_life import failing_at, forward, slowly, streamed_late

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"


@pytest.fixture
def client(smol: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=smol.address, api_key="any", max_retries=0)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "smol", "max_tokens": 6, "temperature": 0, "messages": HI, **more}


def ask(running: Running, **more: Any) -> Any:
    status, found = running.post(PATH, body(**more))
    assert status == 200, found
    return found


def events_of(running: Running, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and data; every event says its name twice."""
    status, found = running.post(PATH, body(stream=True, **more))
    assert status == 200, found
    listed = [event.split("\n") for event in found.strip().split("\n\n")]
    pairs = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in listed]
    assert all(name == data["type"] for name, data in pairs)
    return pairs


def prompt_count(usage: dict[str, Any]) -> int:
    return sum(usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))


def test_one_turn_and_the_same_as_a_stream(client: anthropic.Anthropic, smol: Running) -> None:
    expected = smol.llm.chat(HI, SamplingParams(max_tokens=6, temperature=0))
    found = client.messages.create(model="smol", max_tokens=6, messages=HI, extra_body={"temperature": 0})  # type: ignore[arg-type]
    assert found.content[0].text == expected.text and found.stop_reason == "max_tokens"  # type: ignore[union-attr]
    assert found.id.startswith("msg_") and found.stop_sequence is None and found.usage.output_tokens == 6
    counted = client.messages.count_tokens(model="smol", messages=HI).input_tokens  # type: ignore[arg-type]
    assert prompt_count(found.usage.model_dump()) == counted == expected.prompt_tokens
    with client.messages.stream(model="smol", max_tokens=6, messages=HI, extra_body={"temperature": 0}) as stream:  # type: ignore[arg-type]
        assert "".join(stream.text_stream) == expected.text
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_the_order_of_events(smol: Running) -> None:
    pairs = events_of(smol)
    names = [name for name, _ in pairs]
    deltas = names.count("content_block_delta")
    assert deltas > 1 and names == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    first, last = pairs[0][1]["message"], pairs[-2][1]
    assert first["content"] == [] and first["stop_reason"] is None and "stop_sequence" in first
    assert prompt_count(first["usage"]) == prompt_count(last["usage"]) and last["usage"]["output_tokens"] == 6
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_a_stream_says_one_count_of_its_prompt(smol: Running) -> None:
    """Once for a text that is new, and kept for others, and once for one that is there."""
    text = "count " * 300
    for known in (False, True):
        pairs = events_of(smol, messages=[{"role": "user", "content": text}], ignore_eos=True)
        first, last = pairs[0][1]["message"]["usage"], pairs[-2][1]["usage"]
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "cache_creation")
        assert [first[name] for name in names] == [last[name] for name in names]
        counted = smol.post(COUNT, body(messages=[{"role": "user", "content": text}]))[1]["input_tokens"]
        assert prompt_count(first) == prompt_count(last) == counted
        assert (first["cache_read_input_tokens"] > 0) == known
        assert (last["hybridkv"]["reuse"]["written"] > 0) != known


def test_fields_that_ask_for_nothing_are_accepted(smol: Running) -> None:
    many = dict(metadata={"user_id": "x"}, context_management={}, service_tier="auto", container=None, unknown=[1],
                cache_control={"type": "ephemeral"}, tool_choice={"type": "auto"}, output_config={"effort": "high"},
                thinking={"type": "adaptive"}, tools=[])  # fmt: skip
    status, found = smol.post(
        f"{PATH}?beta=true", body(**many, max_tokens=1), anthropic_beta="x-2025", anthropic_version="1"
    )
    assert status == 200, found


def prompt_text(running: Running, **asked: Any) -> str:
    """The prompt that a request gives, as text."""
    tokens = read_message_request(Fields(body(**asked)), running.service).job.prompts[0].tokens
    assert running.llm.tokenizer is not None
    return running.llm.tokenizer.decode(tokens, skip_special=False)


def test_system_prompts(smol: Running) -> None:
    plain = prompt_text(smol, system="Be brief.")
    assert plain.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "Be", **mark}, {"type": "text", "text": "brief."}]
    assert "system\nBe\nbrief.<|im_end|>" in prompt_text(smol, system=blocks)
    for cch in ("1a2b", "ffff"):  # a line of another program that changes every time
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={cch};"}
        assert prompt_text(smol, system=[billing, {"type": "text", "text": "Be brief."}]) == plain


def test_a_later_system_message_stays_where_it_is(tiny_one: Running) -> None:
    turns = [*HI, {"role": "system", "content": "Loud."}, {"role": "user", "content": "Again."}]
    text = prompt_text(tiny_one, model="tiny", system="Brief.", messages=turns)
    assert text.startswith("<s>[system]Brief.</s>[user]Say hello.")
    assert text.index("Say hello.") < text.index("Loud.") < text.index("Again.")


def test_turns_of_one_role_are_one_turn(smol: Running) -> None:
    parts = [{"type": "text", "text": "hello."}]
    text = prompt_text(smol, messages=[{"role": "user", "content": "Say"}, {"role": "user", "content": parts}])
    assert text.count("<|im_start|>user") == 1 and "Say\nhello." in text


def test_a_last_message_of_the_model_is_continued(smol: Running) -> None:
    turns = [*HI, {"role": "assistant", "content": "Bonjour, je"}]
    found = ask(smol, messages=turns)
    assert not found["content"][0]["text"].startswith("Bonjour") and found["content"][0]["text"]
    assert prompt_text(smol, messages=turns).endswith("assistant\nBonjour, je")


def test_stop_sequences(smol: Running) -> None:
    found = ask(smol, stop_sequences=[" welcome"], max_tokens=20)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", " welcome")
    assert found["content"] == [{"type": "text", "text": "Hello there,"}]
    pairs = events_of(smol, stop_sequences=[" welcome"], max_tokens=20)
    assert pairs[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " welcome"}
    nothing = ask(smol, stop_sequences=["Hello"])
    assert nothing["content"] == [{"type": "text", "text": ""}]


def test_no_tokens_reads_the_prompt_alone(smol: Running) -> None:
    found = ask(smol, max_tokens=0)
    assert found["content"] == [] and found["usage"]["output_tokens"] == 0
    names = [name for name, _ in events_of(smol, max_tokens=0)]
    assert names == ["message_start", "message_delta", "message_stop"]


def test_the_context_is_the_limit(tiny_one: Running) -> None:
    turns = [{"role": "user", "content": "x" * 480}]
    found = ask(tiny_one, model="tiny", messages=turns, max_tokens=32000, ignore_eos=True)
    assert found["stop_reason"] == "model_context_window_exceeded"
    for stream in (False, True):
        status, said = tiny_one.post(
            PATH, body(model="tiny", messages=[{"role": "user", "content": "x" * 600}], stream=stream)
        )
        assert status == 400 and "prompt is too long: 6" in said["error"]["message"]
        assert "tokens > 511 maximum" in said["error"]["message"]


def test_thoughts_are_a_block_of_their_own(tiny_one: Running) -> None:
    asked = dict(model="tiny", thinking={"type": "enabled", "budget_tokens": 5}, max_tokens=20, ignore_eos=True)
    found = ask(tiny_one, **asked)
    thoughts, text = found["content"]
    assert thoughts["type"] == "thinking" and thoughts["signature"] and text["type"] == "text" and text["text"]
    assert len(thoughts["thinking"]) <= 5 < found["usage"]["output_tokens"] == 20  # a token is a character here
    pairs = events_of(tiny_one, **asked)
    kinds = [data["delta"]["type"] for name, data in pairs if name == "content_block_delta"]
    assert kinds.count("signature_delta") == 1 and kinds.index("signature_delta") < kinds.index("text_delta")
    assert [d["index"] for n, d in pairs if n == "content_block_start"] == [0, 1]
    hidden = ask(tiny_one, **asked | {"thinking": asked["thinking"] | {"display": "omitted"}})
    assert hidden["content"][0]["thinking"] == "" and hidden["content"][0]["signature"]
    off = ask(tiny_one, **asked | {"thinking": {"type": "disabled"}})
    assert [block["type"] for block in off["content"]] == ["text"]


def test_earlier_thoughts_calls_and_results_are_shown(tiny_one: Running) -> None:
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}},
    ]
    results = [
        {"type": "text", "text": "Go on."},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "two"},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_2",
            "is_error": True,
            "content": [{"type": "text", "text": "no"}],
        },
        {"type": "web_search_tool_result", "content": []},
    ]
    turns = [*HI, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    text = prompt_text(tiny_one, model="tiny", messages=turns)
    shown = ["I look.", "<function=f><parameter=a>1<", "<function=g>", "<tool_response>two<", "Error: no<", "Go on."]
    assert [text.count(part) for part in shown] == [1] * len(shown)
    assert sorted(shown, key=text.index) == shown


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 100}}


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_anthropics_shape(tiny_one: Running, wrong: dict[str, Any], path: str) -> None:
    status, headers, found = tiny_one.ask("POST", PATH, body(model="tiny", **wrong))
    assert status == 400 and found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert found["error"]["message"].startswith(f"{path}:") and "hot" not in found["error"]["message"]
    assert found["request_id"] == headers["request-id"]


def test_other_errors_have_that_shape_too(tiny_llm: LLM) -> None:
    with serving(tiny_llm, api_keys=("k",), names=("tiny",)) as running:
        for method, path, key, status, kind in (
            ("POST", PATH, "no", 401, "authentication_error"),
            ("POST", f"{PATH}/nowhere", "k", 404, "not_found_error"),
            ("GET", PATH, "k", 405, "invalid_request_error"),
            ("POST", PATH, "k", 404, "not_found_error"),
        ):
            found = running.ask(method, path, body(model="gpt"), {"x-api-key": key})
            assert found[0] == status and found[2]["error"]["type"] == kind and "request-id" in found[1], found
        assert running.ask("GET", PATH, None, {"x-api-key": "k"})[1]["allow"] == "POST"
        host = running.ask("POST", PATH, body(), {"host": "evil", "x-api-key": "k"})
        assert host[0] == 403 and host[2]["error"]["type"] == "permission_error"
        bad = running.ask("POST", PATH, b"{", {"x-api-key": "k"})
        assert bad[0] == 400 and bad[2]["error"]["type"] == "invalid_request_error"
        running.service.draining = True
        busy = running.ask("POST", PATH, body(), {"x-api-key": "k"})
        assert busy[0] == 529 and busy[2]["error"]["type"] == "overloaded_error" and "retry-after" in busy[1]
        running.service.draining = False


def test_a_fault_in_a_stream_is_an_error_event(tiny_one: Running) -> None:
    client = anthropic.Anthropic(base_url=tiny_one.address, api_key="any", max_retries=0)
    with forward(tiny_one.llm, failing_at(3)) as calls:
        more = {"temperature": 0, "ignore_eos": True}
        stream = client.messages.create(model="tiny", max_tokens=50, messages=HI, stream=True, extra_body=more)  # type: ignore[call-overload]
        with pytest.raises(anthropic.APIStatusError):
            for _ in stream:
                pass
    assert len(calls) == 4
    ask(tiny_one, model="tiny")


def test_pings_come_while_a_request_waits(tiny_llm: LLM) -> None:
    with serving(tiny_llm, names=("tiny",), keep_alive=0.1) as running:
        found = streamed_late(running, PATH, body(model="tiny", max_tokens=1), b"event: ping\n")
        assert found.index(b"event: ping") < found.index(b"event: message_start") < found.index(b"event: message_stop")
        client = anthropic.Anthropic(base_url=running.address, api_key="any", max_retries=0)
        with forward(tiny_llm, slowly(0.3)):
            stream = client.messages.create(model="tiny", max_tokens=1, messages=HI, stream=True)  # type: ignore[call-overload]
            assert [event.type for event in stream][-1] == "message_stop"


def test_models_in_its_own_form(client: anthropic.Anthropic) -> None:
    [model] = client.models.list()
    assert (model.id, model.type) == ("smol", "model") and client.models.retrieve("smol").display_name == "smol"
