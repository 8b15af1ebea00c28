"""OpenAI's Responses: what its client, and plain requests, get; the order of events; what agents send."""

import json
from typing import Any

import openai
import pytest

from hybridkv import LLM, SamplingParams
from hybridkv.server.fields import Fields
from hybridkv.server.responses_request import read_response_request
from server.running import HI, Running, post_bytes, read_all, serving
from server.saying import CALL, FUNCTION, saying
from server.test_life import failing_at, forward, slowly, streamed_late
from server.test_tools import ANSWER, CITIES, QUESTION, RESULT, token_server  # noqa: F401

PATH = "/v1/responses"
TOOL = {"type": "function", **FUNCTION, "strict": False}


@pytest.fixture
def client(smol: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smol.address}/v1", api_key="any", max_retries=0)


def body(**more: Any) -> dict[str, Any]:
    return {"input": "Say hello.", "temperature": 0, "max_output_tokens": 6, **more}


def ask(running: Running, **more: Any) -> Any:
    status, found = running.post(PATH, body(**more))
    assert status == 200, found
    return found


def events_in(text: str) -> list[dict[str, Any]]:
    """Every event says its name twice; numbers rise by one from 0."""
    listed = [event.split("\n") for event in text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in listed]
    assert [name.removeprefix("event: ") for name, _ in listed] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def unchunked(raw: bytes) -> list[dict[str, Any]]:
    """The events in the bytes of an answer."""
    chunks = raw.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]
    return events_in(b"".join(chunks).decode())


def events_of(running: Running, **more: Any) -> list[dict[str, Any]]:
    status, found = running.post(PATH, body(stream=True, **more))
    assert status == 200, found
    return events_in(found)


def names_of(events: list[dict[str, Any]]) -> list[str]:
    """Names without their prefix; deltas in a row are one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if not name.endswith("delta") or names[i - 1] != name]


def prompt_text(running: Running, **asked: Any) -> str:
    """The prompt that a request gives, as text."""
    tokens = read_response_request(Fields(body(**asked)), running.service).job.prompts[0].tokens
    assert running.llm.tokenizer is not None
    return running.llm.tokenizer.decode(tokens, skip_special=False)


def items() -> list[dict[str, Any]]:
    """Three calls and their results, then a question."""
    found: list[dict[str, Any]] = []
    for i, city in enumerate(CITIES):
        arguments = json.dumps({"city": city, "days": 1})
        found += [
            {"role": "user", "content": QUESTION.format(city)},
            {"type": "function_call", "call_id": f"c{i}", "name": "get_weather", "arguments": arguments},
            {"type": "function_call_output", "call_id": f"c{i}", "output": [{"type": "input_text", "text": RESULT}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ANSWER.format(city)}]},
        ]
    return [*found, {"role": "user", "content": QUESTION.format("Paris")}]


# ---- answers


def test_one_turn_and_the_same_as_a_stream(client: openai.OpenAI, smol: Running) -> None:
    expected = smol.llm.chat(HI, SamplingParams(temperature=0))
    given: dict[str, Any] = dict(model="smol", input="Say hello.", temperature=0)
    cut = client.responses.create(**given, max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]
    assert expected.text.startswith(cut.output_text) and cut.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert cut.id.startswith("resp_") and cut.output[0].id.startswith("msg_") and cut.error is None  # type: ignore[union-attr]
    with client.responses.stream(**given) as stream:
        events = list(stream)
        whole = stream.get_final_response()
    assert whole.output_text == expected.text and whole.status == "completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(deltas) == whole.output_text
    usage = whole.usage
    assert usage is not None and (usage.input_tokens, usage.output_tokens) == (
        expected.prompt_tokens, len(expected.token_ids)
    )  # fmt: skip
    assert usage.input_tokens_details.cached_tokens >= 0 and usage.output_tokens_details.reasoning_tokens == 0


def test_the_order_of_events(smol: Running) -> None:
    events = events_of(smol)
    assert names_of(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert last["id"] == first["id"] and last["usage"]["output_tokens"] == 6
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    done = events[-2]["item"]
    assert last["output"] == [done] and done["content"][0]["text"] == events[-4]["text"]
    assert {e["item_id"] for e in events if "item_id" in e} == {done["id"]}
    assert {e["output_index"] for e in events if "output_index" in e} == {0}
    assert {e["content_index"] for e in events if "content_index" in e} == {0}


def test_the_embedded_model_calls_a_function(client: openai.OpenAI, smol: Running) -> None:
    given: dict[str, Any] = dict(model="smol", input=items(), tools=[TOOL], temperature=0)
    with client.responses.stream(**given) as stream:
        names = [event.type.removeprefix("response.") for event in stream]
        found = stream.get_final_response()
    [call] = found.output
    assert call.type == "function_call" and call.call_id.startswith("call_") and call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris", "days": 1} and found.usage is not None
    deltas = names.count("function_call_arguments.delta")
    assert names == [
        "created", "in_progress", "output_item.added", *["function_call_arguments.delta"] * deltas,
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert found.usage.output_tokens > 20 and found.usage.input_tokens_details.cached_tokens >= 0


def test_thoughts_text_and_calls_are_items(token_server: Running) -> None:  # noqa: F811
    with saying(token_server, f"Hm.</think>So:{CALL}{CALL}"):
        events = events_of(token_server, tools=[TOOL], max_output_tokens=400)
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert names_of(events) == [
        "created", "in_progress", "output_item.added", "reasoning_text.delta", "reasoning_text.done",
        "output_item.done", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", *call, *call, "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}] and output[0]["summary"] == []
    assert len({item["id"] for item in output}) == 4 and json.loads(output[2]["arguments"]) == {"days": 3}
    with saying(token_server, f"Hm.</think>So:{CALL}{CALL}"):
        whole = ask(token_server, tools=[TOOL], max_output_tokens=400)

    def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]

    assert plain(whole["output"]) == plain(output) and whole["status"] == "completed"
    assert [tool["name"] for tool in whole["tools"]] == ["get_weather"]
    indices = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert indices == [0, 1, 2, 3]


def test_an_answer_by_a_schema_and_a_forced_call(tiny_one: Running, smol: Running) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    form = {"format": {"type": "json_schema", "name": "place", "schema": schema | {"additionalProperties": False}}}
    found = ask(tiny_one, text=form, reasoning={"effort": "none"}, max_output_tokens=40)
    assert found["status"] == "completed" and found["text"]["format"]["type"] == "json_schema"
    assert json.loads(found["output"][0]["content"][0]["text"])["city"] in ("Rome", "Oslo")
    parameters = schema | {"additionalProperties": False}
    tool = {"type": "function", "name": "go", "parameters": parameters, "strict": True}
    found = ask(smol, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=60)
    [call] = found["output"]
    assert (call["type"], call["name"]) == ("function_call", "go") and found["tools"][0]["strict"] is True
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")


def test_a_call_that_the_limit_cuts_is_never_done(token_server: Running) -> None:  # noqa: F811
    """Codex runs what is done, whatever its status is."""
    with saying(token_server, f"</think>So:{CALL}"):
        events = events_of(token_server, tools=[TOOL], max_output_tokens=60)
    done = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert "function_call_arguments.done" not in names_of(events) and done == ["message"]
    last = events[-1]
    assert last["type"] == "response.incomplete" and [i["type"] for i in last["response"]["output"]] == ["message"]


# ---- requests


def test_items_are_turns(tiny_one: Running) -> None:
    turns = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Look."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}],
         "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "two"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "three"}]},
        {"type": "item_of_tomorrow", "x": 1},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "no"}]},
    ]  # fmt: skip
    text = prompt_text(tiny_one, input=turns, instructions="Always.")
    assert text.startswith("<s>[system]Always.Be brief.</s>[user]Look.</s>[assistant]<think>Hm.</think>I look.")
    assert text.count("[assistant]") == 2 and "tomorrow" not in text  # one turn, and the one that begins
    shown = ["<function=f><parameter=a>1<", "<function=g>", "<tool_response>two<", "<tool_response>three<"]
    assert sorted(shown, key=text.index) == shown
    found = ask(tiny_one, input=turns, instructions="Always.", max_output_tokens=2)
    assert (
        found["output"][0]["type"] == "reasoning" and found["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    )
    again = turns[:2] + [{"role": "user", "content": "Now."}, {"role": "developer", "content": "Loud."}, turns[1]]
    text = prompt_text(tiny_one, input=again)
    assert text.index("Now.") < text.index("Loud.") < text.rindex("Look.") and text.startswith(
        "<s>[system]Be brief.</s>"
    )


def test_the_mixture_of_tools_that_codex_sends(smol: Running) -> None:
    others = [
        {"type": "namespace", "name": "multi_agent_v1", "description": "x", "tools": []},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "image_generation"},
        {"type": "mcp", "server_label": "x"},
        {"type": "local_shell"},
    ]
    ignored = dict(
        store=False, include=["reasoning.encrypted_content"], prompt_cache_key="k", client_metadata={"a": "b"},
        service_tier="auto", truncation="auto", tool_choice="auto", parallel_tool_calls=True, metadata={},
        reasoning={"summary": "auto", "effort": "low"}, text={"verbosity": "low"}, background=False, user="me",
    )  # fmt: skip
    text = prompt_text(smol, tools=[*others, TOOL], **ignored)
    assert "get_weather" in text and "apply_patch" not in text and "multi_agent" not in text
    found = ask(smol, tools=[*others, TOOL], **ignored, max_output_tokens=1)
    assert [tool["name"] for tool in found["tools"]] == ["get_weather"]


def test_thinking_can_be_switched_off(tiny_one: Running) -> None:
    assert prompt_text(tiny_one, reasoning={"effort": "none"}).endswith("<think></think>")
    assert prompt_text(tiny_one, reasoning={"effort": "high"}).endswith("<think>")
    assert [item["type"] for item in ask(tiny_one, reasoning={"effort": "none"})["output"]] == ["message"]


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_of_tomorrow"}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_named(tiny_one: Running, wrong: dict[str, Any], path: str) -> None:
    status, found = tiny_one.post(PATH, body(**wrong))
    assert status == 400 and found["error"]["param"] == path, found
    assert set(found["error"]) == {"message", "type", "param", "code"} and "hot" not in found["error"]["message"]


# ---- limits and faults


def test_a_prompt_that_is_too_long_is_refused_before_the_first_event(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as problem:
            client.responses.create(model="smol", input="word " * 3000, stream=stream)  # type: ignore[call-overload]
        assert problem.value.code == "context_length_exceeded"


def test_a_full_context_is_incomplete(tiny_one: Running) -> None:
    events = events_of(tiny_one, input="x" * 480, max_output_tokens=None, ignore_eos=True)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["usage"]["total_tokens"] == 512


def test_a_fault_in_a_stream_is_a_failed_response(tiny_one: Running) -> None:
    with forward(tiny_one.llm, failing_at(3)) as calls:
        events = events_of(tiny_one, max_output_tokens=50, ignore_eos=True)
    assert len(calls) == 4 and events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert "secret" not in str(failed) and len(events) > 4
    ask(tiny_one)


def test_signs_of_life_are_events(tiny_llm: LLM) -> None:
    with serving(tiny_llm, names=("tiny",), keep_alive=0.1) as running:
        raw = streamed_late(running, PATH, body(max_output_tokens=2), b"event: response.in_progress\n")
        names = names_of(unchunked(raw))
        assert names[0] == "created" and names[1:4].count("in_progress") >= 2 and names[-1] == "incomplete"
        client = openai.OpenAI(base_url=f"{running.address}/v1", api_key="any", max_retries=0)
        with forward(tiny_llm, slowly(0.3)):
            given: dict[str, Any] = dict(model="tiny", input="Hi", max_output_tokens=2)
            kinds = [event.type for event in client.responses.create(**given, stream=True)]
        assert kinds.count("response.in_progress") > 1 and kinds[-1] == "response.incomplete"


def test_what_a_server_cuts_at_its_end_is_overloaded(tiny_llm: LLM) -> None:
    with serving(tiny_llm, shutdown_seconds=0.1) as running, forward(tiny_llm, slowly(0.05)):
        with running.connect() as held:
            held.sendall(post_bytes(PATH, body(stream=True, max_output_tokens=400, ignore_eos=True)))
            first = held.recv(1)  # it has begun
            running.server.stop()
            events = unchunked(first + read_all(held))
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_is_overloaded"
        running.idle()
