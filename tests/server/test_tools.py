"""Calls of functions: real ones by the embedded model, in both dialects, and what is shown of them in prompts."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import tiny
from thinking_template import THINKING_TEMPLATE
from tokenizers import AddedToken, Tokenizer

from engine.ascii_tokenizer import write_tokenizer
from hybridkv import LLM
from hybridkv.server.tools import _one_call_a_turn
from server.running import HI, QUIET, Running, serving
from server.saying import CALL, FUNCTION, SCHEMA, TOOL, saying
from server.test_anthropic import ask as ask_anthropic
from server.test_anthropic import body, events_of, prompt_count, prompt_text

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ANTHROPIC_TOOL = {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}
CITIES = ("Rome", "Oslo", "Lima")
QUESTION, RESULT, ANSWER = "What is the weather in {}?", "sunny, 20 degrees", "It is sunny in {}, 20 degrees."


def openai_turns() -> list[dict[str, Any]]:
    """Three calls and their results, then a question."""
    found: list[dict[str, Any]] = []
    for i, city in enumerate(CITIES):
        arguments = json.dumps({"city": city, "days": 1})
        call = {"id": f"call_{i}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        found += [
            {"role": "user", "content": QUESTION.format(city)},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{i}", "content": RESULT},
            {"role": "assistant", "content": ANSWER.format(city)},
        ]
    return [*found, {"role": "user", "content": QUESTION.format("Paris")}]


def anthropic_turns() -> list[dict[str, Any]]:
    """The same."""
    found: list[dict[str, Any]] = []
    for i, city in enumerate(CITIES):
        use = {"type": "tool_use", "id": f"t{i}", "name": "get_weather", "input": {"city": city, "days": 1}}
        found += [
            {"role": "user", "content": QUESTION.format(city)},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{i}", "content": RESULT}]},
            {"role": "assistant", "content": ANSWER.format(city)},
        ]
    return [*found, {"role": "user", "content": QUESTION.format("Paris")}]


def asked(**more: Any) -> dict[str, Any]:
    return {"messages": openai_turns(), "tools": [TOOL], "temperature": 0, "max_tokens": 48, **more}


def test_the_embedded_model_calls_a_function_for_openais_client(smol: Running) -> None:
    client = openai.OpenAI(base_url=f"{smol.address}/v1", api_key="any", max_retries=0)
    deltas, reasons = [], []
    for chunk in client.chat.completions.create(model="smol", **asked(), stream=True):
        deltas += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
        assert not chunk.choices[0].delta.content
    first = deltas[0]
    assert first.id.startswith("call_") and len(first.id) == 29
    assert (first.function.name, first.type) == ("get_weather", "function")
    assert all(d.id is None and d.function.name is None and d.index == 0 for d in deltas[1:])
    assert json.loads("".join(d.function.arguments for d in deltas)) == {"city": "Paris", "days": 1}
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


def test_the_embedded_model_calls_a_function_for_anthropics_client(smol: Running) -> None:
    client = anthropic.Anthropic(base_url=smol.address, api_key="any", max_retries=0)
    given: dict[str, Any] = dict(model="smol", messages=anthropic_turns(), tools=[ANTHROPIC_TOOL])
    with client.messages.stream(**given, max_tokens=48, extra_body={"temperature": 0}) as stream:
        found = stream.get_final_message()
    [block] = found.content
    assert block.type == "tool_use" and block.id.startswith("toolu_") and found.stop_reason == "tool_use"
    assert block.input == {"city": "Paris", "days": 1}
    assert client.messages.count_tokens(**given).input_tokens == prompt_count(found.usage.model_dump())


def test_no_calls_where_none_are_wanted(smol: Running) -> None:
    status, found = smol.post(CHAT, asked(tool_choice="none", max_tokens=8))
    message = found["choices"][0]["message"]
    assert status == 200 and "tool_calls" not in message and "<tool_call>" not in message["content"]
    assert found["choices"][0]["finish_reason"] in ("stop", "length")
    tools = {"messages": HI, "tools": [TOOL], "return_token_strs": True}
    prompts = [smol.post("/tokenize", tools | {"tool_choice": choice})[1]["tokens"] for choice in ("none", "auto")]
    assert prompts[0] == prompts[1], "the prompt is another one, and no cache would fit"


def test_a_template_without_tools_gets_them_described(smol: Running) -> None:
    text = prompt_text(smol, messages=anthropic_turns(), tools=[ANTHROPIC_TOOL], system="Be brief.")
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and '"name": "get_weather"' in text
    assert (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call><|im_end|>' in text
    )
    assert text.count(f"<|im_start|>user\n<observation>\n{RESULT}\n</observation><|im_end|>") == 3
    parallel = [
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
    ]
    results = [{"type": "tool_result", "tool_use_id": i, "content": f"result {i}"} for i in "ab"]
    turns = [*HI, {"role": "assistant", "content": parallel}, {"role": "user", "content": results}]
    text = prompt_text(smol, messages=turns)
    assert text.index("result a") < text.index("result b") and text.count("<|im_start|>user") == 2


def test_a_template_with_tools_gets_them_itself(tiny_one: Running) -> None:
    text = prompt_text(tiny_one, model="tiny", tools=[ANTHROPIC_TOOL])
    assert text.startswith("<s>[system]<tools>{") and "get_weather" in text and "# Tools" not in text


def test_tools_of_other_servers_are_left_out(smol: Running) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, ANTHROPIC_TOOL | {"type": "custom"}]
    text = prompt_text(smol, tools=tools)
    assert "web_search" not in text and "get_weather" in text


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        (CHAT, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "get_news"}}}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (CHAT, {"tool_choice": "perhaps"}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        (CHAT, {"tools": [TOOL] * 513}, "tools"),
        (CHAT, {"tools": [{"type": "function", "function": FUNCTION | {"description": "x" * (256 << 10)}}]}, "tools"),
        (MESSAGES, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (MESSAGES, {"tools": [], "tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"tools": [{"name": 5}]}, "tools[0].name"),
    ],
)
def test_what_cannot_be_served_is_named(tiny_one: Running, path: str, wrong: dict[str, Any], param: str) -> None:
    status, found = tiny_one.post(path, {"tools": [TOOL], **body(model="tiny"), **wrong})
    assert status == 400 and found["error"]["message"].startswith(f"{param}:"), found


def test_llama_gets_one_call_a_turn() -> None:
    calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in "ab"]
    turns = [*HI, {"role": "assistant", "content": "Yes.", "tool_calls": calls}]
    turns += [{"role": "tool", "tool_call_id": i, "content": i} for i in "ab"]
    found = _one_call_a_turn(turns)
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [m["content"] for m in found] == ["Say hello.", "Yes.", "a", None, "b"]


# ---- a tag that is a token


@pytest.fixture(scope="module")
def token_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny model whose vocabulary has <tool_call> as one token, in the place of "~"."""
    folder = tmp_path_factory.mktemp("tags")
    tiny.save("llama", folder)
    write_tokenizer(folder, THINKING_TEMPLATE)
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    vocab["<tool_call>"] = vocab.pop("~")
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    llm = LLM(folder, device="cpu", dtype="float32", max_requests=2, max_context=512)
    with llm, serving(llm, names=("tags",), keep_alive=QUIET) as running:
        yield running


def scripted(running: Running, text: str | list[int], **more: Any) -> Any:
    """The choice that a chat gets for an answer of this text."""
    with saying(running, text):
        status, found = running.post(CHAT, {"messages": HI, "tools": [TOOL], "temperature": 0, **more})
    assert status == 200, found
    return found["choices"][0]


def test_only_the_token_opens_a_call(token_server: Running) -> None:
    tokenizer = token_server.llm.tokenizer
    assert tokenizer is not None
    letters = [tokenizer.encode(c, bos=False)[0] for c in "<tool_call>"]
    [tag] = tokenizer.encode("<tool_call>", bos=False)
    assert tag not in letters
    ids = [*tokenizer.encode("Hm.</think>", bos=False), *letters, *tokenizer.encode(CALL, bos=False)]
    choice = scripted(token_server, ids)
    assert scripted(token_server, f"</think>{CALL}")["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls", choice
    assert choice["message"]["content"] == "<tool_call>" and choice["message"]["reasoning"] == "Hm."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"days": 3}
    unclosed = scripted(token_server, f"Hm.{CALL}")
    assert unclosed["message"]["reasoning"] == "Hm." and len(unclosed["message"]["tool_calls"]) == 1


def test_several_calls_and_at_most_one(token_server: Running) -> None:
    calls = scripted(token_server, f"</think>{CALL}{CALL}")["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    one = scripted(token_server, f"</think>{CALL}{CALL}", parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1 and one["finish_reason"] == "tool_calls"


def test_the_events_of_a_call(token_server: Running) -> None:
    with saying(token_server, f"Hm.</think>So:{CALL}{CALL}"):
        pairs = events_of(token_server, model="tags", tools=[ANTHROPIC_TOOL], max_tokens=400)
    starts = [data for name, data in pairs if name == "content_block_start"]
    assert [(s["index"], s["content_block"]["type"]) for s in starts] == [
        (0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")
    ]  # fmt: skip
    assert starts[2]["content_block"]["input"] == {} and starts[2]["content_block"]["id"].startswith("toolu_")
    parts = [d["delta"]["partial_json"] for n, d in pairs if n == "content_block_delta" and d["index"] == 2]
    assert json.loads("".join(parts)) == {"days": 3}
    stops = [data["index"] for name, data in pairs if name == "content_block_stop"]
    assert stops == [0, 1, 2, 3] and pairs[-2][1]["delta"]["stop_reason"] == "tool_use"


def streamed(smol: Running, *pieces: str) -> tuple[list[str], str]:
    """Parts of arguments, and why the answer ended, where the model says these pieces: "{}" is one of its tokens."""
    tokenizer = smol.llm.tokenizer
    assert tokenizer is not None and len(tokenizer.encode("{}", bos=False)) == 1
    ids = [token for piece in pieces for token in tokenizer.encode(piece, bos=False)]
    with saying(smol, ids):
        pairs = events_of(smol, tools=[ANTHROPIC_TOOL], max_tokens=200)
    deltas = [d["delta"] for n, d in pairs if n == "content_block_delta"]
    return [d["partial_json"] for d in deltas if d["type"] == "input_json_delta"], pairs[-2][1]["delta"]["stop_reason"]


BEGIN, END = '<tool_call>\n{"name": "get_weather", "arguments": ', "}\n</tool_call>"


def test_empty_objects_inside_arguments_reach_a_stream(smol: Running) -> None:
    parts, reason = streamed(smol, BEGIN, '{"a": ', "{}", ', "b": [', "{}", ", ", "{}", "]", "}", END)
    assert "{}" in parts and json.loads("".join(parts)) == {"a": {}, "b": [{}, {}]} and reason == "tool_use"


@pytest.mark.slow
def test_empty_arguments_are_said_when_their_block_begins(smol: Running) -> None:
    assert streamed(smol, BEGIN, "{}", END) == ([], "tool_use")
    parts, _ = streamed(smol, BEGIN, "{}", END, "\n", BEGIN, '{"a":', "{}", "}", END)
    assert json.loads("".join(parts)) == {"a": {}}


def test_a_call_that_the_limit_cuts_is_none(token_server: Running) -> None:
    text = f"</think>So:{CALL}"
    choice = scripted(token_server, text, max_tokens=60)
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == "So:"
    assert "tool_calls" not in choice["message"]
    given: dict[str, Any] = dict(model="tags", tools=[ANTHROPIC_TOOL], max_tokens=60)
    with saying(token_server, text):
        plain = ask_anthropic(token_server, **given)
    assert plain["stop_reason"] == "max_tokens" and plain["content"] == [{"type": "text", "text": "So:"}]
    with saying(token_server, text):
        pairs = events_of(token_server, **given)
    names = [name for name, _ in pairs]
    assert names.count("content_block_start") == names.count("content_block_stop") == 2
    assert pairs[-2][1]["delta"]["stop_reason"] == "max_tokens"


def test_the_token_is_masked_where_no_calls_are_wanted(token_server: Running) -> None:
    llm = token_server.llm
    assert llm.tokenizer is not None
    [tag] = llm.tokenizer.encode("<tool_call>", bos=False)
    given = dict(
        messages=HI, tools=[TOOL], temperature=0, max_tokens=3, logit_bias={str(tag): 90}, return_token_ids=True
    )
    assert tag in token_server.chat(**given | {"max_tokens": 1})["choices"][0]["token_ids"]
    assert tag not in token_server.chat(**given, tool_choice="none")["choices"][0]["token_ids"]
