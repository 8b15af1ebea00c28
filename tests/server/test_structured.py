"""Structured answers through a server: schemas, forced calls, thoughts, hostile schemas and a grammar that fails."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
import tiny
from thinking_template import THINKING_TEMPLATE
from tokenizers import AddedToken, Tokenizer

from engine.ascii_tokenizer import write_tokenizer
from hybridkv import LLM
from hybridkv.text import grammar
from server.running import HI, SECONDS, Running, serving, until
from server.test_anthropic import body, events_of

pytest.importorskip("llguidance")
CHAT, MESSAGES, TEXT, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 1, "maximum": 14},
        "l": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
    },
    "required": ["s", "n", "l"],
    "additionalProperties": False,
}
SHORT = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": SHORT}
OTHER = {"name": "time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": each} for each in (FUNCTION, OTHER)]
ANTHROPIC_TOOLS = [{"name": each["name"], "input_schema": each["parameters"]} for each in (FUNCTION, OTHER)]
PLACES = ("Paris", "Rome?", "the sea", "", "27")


def fits(found: Any) -> bool:
    return (
        found.keys() == {"s", "n", "l"}
        and len(found["s"]) <= 6
        and isinstance(found["n"], int)
        and 1 <= found["n"] <= 14
        and len(found["l"]) <= 2
        and all(each in ("C", "F") for each in found["l"])
    )


@pytest.fixture(scope="module")
def lined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The tiny model that thinks, whose tokenizer has the opening tag as a token, and line breaks, which calls have."""
    folder = tmp_path_factory.mktemp("lined")
    tiny.save("llama", folder)
    write_tokenizer(folder, THINKING_TEMPLATE)
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    vocab["<tool_call>"], vocab["\u010a"] = vocab.pop("~"), vocab.pop("`")
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    llm = LLM(folder, device="cpu", dtype="float32", max_requests=2, max_context=1024)
    with llm, serving(llm, names=("lined",)) as running:
        yield running


def opening(running: Running) -> int:
    [token] = running.llm.tokenizer.encode("<tool_call>", bos=False)  # type: ignore[union-attr]
    return token


def called(name: str, given: Any) -> bool:
    """Whether these are arguments of the function."""
    if name == "time":
        return given == {}
    good = name == "weather" and {"city"} <= given.keys() <= {"city", "days"}
    return good and len(given["city"]) <= 6 and given.get("days", 1) in range(1, 10)


def question(place: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Weather in {place}"}]


def schema_format(schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}


# ---- JSON by a schema


@pytest.mark.slow
def test_twenty_seeds_at_temperature_1_all_fit(smol: Running) -> None:
    def ask(seed: int) -> list[dict[str, Any]]:
        return smol.chat(
            messages=question("Oslo"), response_format=schema_format(), temperature=1, seed=seed, n=5, max_tokens=40
        )["choices"]

    with ThreadPoolExecutor(4) as pool:
        choices = [choice for answer in pool.map(ask, (0, 5, 10, 15)) for choice in answer]
    assert len(choices) == 20
    for choice in choices:
        assert choice["finish_reason"] == "stop" and fits(json.loads(choice["message"]["content"])), choice
    assert len({choice["message"]["content"] for choice in choices}) > 10


def test_the_same_through_the_clients(smol: Running) -> None:
    with openai.OpenAI(base_url=f"{smol.address}/v1", api_key="any", max_retries=0) as client:
        form: Any = {"type": "json_schema", "name": "x", "schema": SCHEMA}
        answer = client.responses.create(
            model="smol", input="Weather?", text={"format": form}, max_output_tokens=60, temperature=0
        )
        assert answer.status == "completed" and fits(json.loads(answer.output_text))
    with anthropic.Anthropic(base_url=smol.address, api_key="any", max_retries=0) as client:
        config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        extra = {"temperature": 0, "output_config": config}
        message = client.messages.create(
            model="claude-x", max_tokens=40, messages=question("Rome"), extra_body=extra  # type: ignore[arg-type]
        )  # fmt: skip
        assert message.stop_reason == "end_turn" and fits(json.loads(message.content[0].text))  # type: ignore[union-attr]


def test_a_stop_token_does_not_cut_an_object(smol: Running) -> None:
    brace = smol.llm.tokenizer.encode("}", bos=False)  # type: ignore[union-attr]
    choice = smol.chat(
        messages=question("Bern"), response_format=schema_format(), stop_token_ids=brace, max_tokens=60, logprobs=True
    )["choices"][0]
    assert choice["finish_reason"] == "stop" and fits(json.loads(choice["message"]["content"]))
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]


@pytest.mark.parametrize(
    "asked",
    [{"response_format": {"type": "json_object"}}, {"response_format": schema_format({"type": "object"})},
     {"guided_json": {"type": "object"}}, {"structured_outputs": {"json_object": True}}],
)  # fmt: skip
def test_each_field_that_asks_for_json(tiny_one: Running, asked: dict[str, Any]) -> None:
    for path, what in ((CHAT, {"messages": HI, "reasoning_effort": "none"}), (TEXT, {"prompt": "ab"})):
        sampling = {"temperature": 1, "seed": 3, "max_tokens": 30}
        status, found = tiny_one.post(path, {**what, **asked, **sampling})
        choice = found["choices"][0]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert status == 200 and text.startswith("{")
        assert choice["finish_reason"] == "length" or isinstance(json.loads(text), dict)


def test_choices_and_patterns(tiny_one: Running) -> None:
    for asked, good in (
        ({"structured_outputs": {"choice": ["north", "south"]}}, {"north", "south"}),
        ({"guided_choice": ["up", "down"]}, {"up", "down"}),
        ({"guided_regex": "[ab]c"}, {"ac", "bc"}),
        ({"guided_grammar": 'start: "x" | "yz"'}, {"x", "yz"}),
    ):
        status, found = tiny_one.post(TEXT, {"prompt": "to the", "temperature": 1, "seed": 2, **asked})
        assert status == 200 and found["choices"][0]["text"] in good
        assert found["choices"][0]["finish_reason"] == "stop"


# ---- thoughts


def test_thoughts_are_free_and_the_answer_fits(tiny_one: Running) -> None:
    """The prompt opens the thoughts; a budget ends them."""
    asked = body(model="tiny", max_tokens=200, thinking={"type": "enabled", "budget_tokens": 20}, temperature=1, seed=3)
    asked["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    status, found = tiny_one.post(MESSAGES, asked)
    assert status == 200, found
    thoughts, answer = found["content"]
    assert thoughts["type"] == "thinking" and 0 < len(thoughts["thinking"]) <= 20
    assert fits(json.loads(answer["text"])) and found["stop_reason"] == "end_turn"
    pieces = [event["delta"].get("text", "") for name, event in events_of(tiny_one, **asked) if name.endswith("_delta")]
    assert "".join(pieces) == answer["text"]


# ---- calls


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_a_required_call_comes_at_once(smol: Running) -> None:
    def ask(place: str) -> Any:
        asked = {"model": "claude-x", "messages": question(place), "max_tokens": 60, "temperature": 0}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        return smol.post(MESSAGES, asked | {"tools": ANTHROPIC_TOOLS[:1], "tool_choice": choice})

    with ThreadPoolExecutor(4) as pool:
        for status, found in pool.map(ask, PLACES):
            assert status == 200 and found["stop_reason"] == "tool_use", found
            [call] = found["content"]
            assert call["type"] == "tool_use" and call["name"] == "weather" and called("weather", call["input"])


def test_one_call_and_no_more(smol: Running) -> None:
    asked = {"messages": question("Paris"), "tools": TOOLS, "tool_choice": "required", "max_tokens": 60}
    found = smol.chat(**asked, parallel_tool_calls=False)["choices"][0]
    [call] = calls_of(found)
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None and called(*call)


def test_a_named_call_in_a_stream_and_in_a_response(lined: Running) -> None:
    with openai.OpenAI(base_url=f"{lined.address}/v1", api_key="any", max_retries=0) as client:
        deltas, reasons = [], []
        tools: Any = TOOLS[1:]
        choice: Any = {"type": "function", "function": {"name": "time"}}
        asked: Any = {"messages": HI, "tools": tools, "tool_choice": choice, "reasoning_effort": "none"}
        for chunk in client.chat.completions.create(model="lined", stream=True, temperature=0, **asked):
            deltas += chunk.choices[0].delta.tool_calls or []
            reasons.append(chunk.choices[0].finish_reason)
        assert deltas[0].function.name == "time" and reasons[-1] == "tool_calls"
        assert "".join(delta.function.arguments or "" for delta in deltas) == "{}"
        listed: Any = [{"type": "function", **OTHER}]
        off: Any = {"effort": "none"}
        named: Any = {"type": "function", "name": "time"}
        answer = client.responses.create(model="lined", input="Now?", tools=listed, tool_choice=named, reasoning=off)
        assert [(item.type, item.name) for item in answer.output] == [("function_call", "time")]  # type: ignore


def test_a_required_call_that_the_limit_cuts_is_none(lined: Running) -> None:
    asked = body(model="lined", max_tokens=50, thinking={"type": "disabled"}, temperature=1, seed=1)
    asked |= {"tools": ANTHROPIC_TOOLS[:1], "tool_choice": {"type": "any"}}
    status, found = lined.post(MESSAGES, asked)
    assert status == 200 and found["stop_reason"] == "max_tokens"
    assert all(block["type"] != "tool_use" for block in found["content"])
    pairs = events_of(lined, **asked)
    names = [name for name, _ in pairs]
    assert names.count("content_block_start") == names.count("content_block_stop") == 1
    assert pairs[-2][1]["delta"]["stop_reason"] == "max_tokens"


def test_no_call_where_none_is_wanted(lined: Running) -> None:
    """The opening token is masked, whatever the model would like best; the tools stay in the prompt."""
    asked = {"messages": HI, "tools": TOOLS, "max_tokens": 12, "return_token_ids": True, "reasoning_effort": "none"}
    asked["logit_bias"] = {str(opening(lined)): 100}
    called, barred = lined.chat(**asked), lined.chat(**asked, tool_choice="none")
    assert opening(lined) in called["choices"][0]["token_ids"]
    assert opening(lined) not in barred["choices"][0]["token_ids"]
    assert barred["choices"][0]["finish_reason"] == "length" and barred["choices"][0]["message"]["content"]
    assert called["prompt_token_ids"] == barred["prompt_token_ids"]


def test_a_strict_function_is_bound_from_its_tag_on(lined: Running) -> None:
    """Where the model opens a call it is one, though none was asked for; without its tag the answer is free."""
    strict = [{"type": "function", "function": FUNCTION | {"strict": True}}]
    asked = {"messages": HI, "tools": strict, "reasoning_effort": "none", "temperature": 1, "seed": 2}
    free = lined.chat(**asked, max_tokens=20, ignore_eos=True)["choices"][0]
    assert free["message"]["content"] and not calls_of(free)
    bias = {"logit_bias": {str(opening(lined)): 100}, "max_tokens": 300, "parallel_tool_calls": False}
    bound = lined.chat(**asked, **bias)["choices"][0]
    [call] = calls_of(bound)
    assert call[0] == "weather" and called(*call)


def test_calls_of_the_tagged_form_after_thoughts(lined: Running) -> None:
    """Qwen3.5's form: thoughts end at their budget, then the call comes at once, its values by the schema."""
    thinking = {"type": "enabled", "budget_tokens": 12}
    asked = body(model="lined", max_tokens=300, thinking=thinking, temperature=1, seed=5)
    asked |= {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}
    status, found = lined.post(MESSAGES, asked)
    assert status == 200, found
    thoughts, call = found["content"]
    assert thoughts["type"] == "thinking" and len(thoughts["thinking"]) <= 12
    assert call["name"] == "weather" and called("weather", call["input"]) and found["stop_reason"] == "tool_use"


def test_json_beside_tools_is_json_or_a_call(lined: Running) -> None:
    asked = {"messages": HI, "tools": TOOLS, "response_format": schema_format(), "reasoning_effort": "none"}
    asked |= {"temperature": 1, "seed": 4, "max_tokens": 300, "parallel_tool_calls": False}
    plain = lined.chat(**asked, tool_choice="none")["choices"][0]
    assert fits(json.loads(plain["message"]["content"]))
    bound = lined.chat(**asked, logit_bias={str(opening(lined)): 100})["choices"][0]
    [call] = calls_of(bound)
    assert bound["finish_reason"] == "tool_calls" and called(*call)


# ---- what is refused, and what fails


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth - 1):
        found = {"items": found}
    return found


HOSTILE = {
    "not": {"not": {"type": "string"}},
    "remote": {"$ref": "http://127.0.0.1:9/schema.json"},
    "large": {"description": "x" * (65 << 10)},
    "enum": {"enum": list(range(5000))},
    "deep": nested(65),
    "look-ahead": {"type": "string", "pattern": "^(?=a)b$"},
    "unknown reference": {"$ref": "#/$defs/nobody"},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_schema_is_refused_before_anything_runs(tiny_one: Running, case: str) -> None:
    schema = HOSTILE[case]
    parameters = {"type": "object", "properties": {"a": schema}}
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    form = {"type": "json_schema", "schema": schema}
    requests: list[tuple[str, dict[str, Any], str | tuple[str, ...]]] = [
        (CHAT, {"messages": HI, "response_format": schema_format(schema)}, "response_format"),
        (MESSAGES, body(model="tiny", output_config={"format": form}), "output_config"),
        (RESPONSES, {"input": "x", "stream": True, "text": {"format": form}}, "text.format"),
        (TEXT, {"prompt": "x", "guided_json": schema}, "guided_json"),
    ]
    if case != "large":  # all tools of a request together may have more
        said = ("tool", "prompt is too long")  # it stands in the prompt, too
        requests.append((CHAT, {"messages": HI, "tool_choice": "required", "tools": [function]}, said))
    for path, asked, said in requests:
        status, found = tiny_one.post(path, asked)
        assert status == 400 and found["error"]["message"].startswith(said), (path, found)
        assert len(found["error"]["message"]) < 500


def test_grammars_that_take_long_keep_nobody_else_waiting(tiny_one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go, compiling, in_time = threading.Event(), [], []
    original = grammar.Grammars.compile

    def compile_slowly(self: grammar.Grammars, *given: Any) -> Any:
        compiling.append(1)
        in_time.append(go.wait(SECONDS / 2))
        return original(self, *given)

    monkeypatch.setattr(grammar.Grammars, "compile", compile_slowly)
    asked = {"messages": HI, "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}}
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(tiny_one.post, CHAT, asked) for _ in range(6)]
        until(lambda: len(compiling) >= 4)
        assert tiny_one.post("/tokenize", {"prompt": "a"})[0] == 200
        tiny_one.chat()
        go.set()
        assert [answer.result()[0] for answer in answers] == [200] * 6
    assert len(in_time) == 6 and all(in_time), "the others waited for them"


def test_openais_client_gets_what_its_schema_says(smol: Running) -> None:
    client = openai.OpenAI(base_url=f"{smol.address}/v1", api_key="any", max_retries=0)
    form: Any = {"type": "json_schema", "json_schema": {"name": "all", "schema": SCHEMA, "strict": True}}
    given: dict[str, Any] = dict(model="smol", messages=HI, response_format=form, max_tokens=60, temperature=0)
    whole = client.chat.completions.create(**given).choices[0]
    assert whole.finish_reason == "stop" and fits(json.loads(whole.message.content or ""))
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**given, stream=True)]
    assert len(pieces) > 3 and "".join(pieces) == whole.message.content


def test_a_schema_without_end_is_given_up(tiny_one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "SECONDS", 0.5)
    schema = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(60)]}
    with ThreadPoolExecutor(3) as pool:
        bad = [
            pool.submit(tiny_one.post, CHAT, {"messages": HI, "response_format": schema_format(schema)}) for _ in "ab"
        ]
        assert tiny_one.chat()["choices"]  # others are served meanwhile
        assert [each.result()[0] for each in bad] == [400, 400]


def test_a_grammar_that_fails_is_its_own_requests_error(tiny_one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    original, fired = grammar.Grammar.matcher, []

    class Broken:
        def __init__(self, matcher: Any) -> None:
            self._matcher, self._left = matcher, 5

        def __getattr__(self, name: str) -> Any:
            if name == "unsafe_compute_mask_ptr":
                self._left -= 1
                if not self._left:
                    fired.append(name)
                    raise RuntimeError("injected")
            return getattr(self._matcher, name)

    def matcher(self: grammar.Grammar) -> Any:
        return original(self) if fired else Broken(original(self))

    asked = {"messages": HI, "response_format": schema_format(), "reasoning_effort": "none"}
    plain = tiny_one.chat(max_tokens=40, ignore_eos=True)["choices"][0]["message"]
    monkeypatch.setattr(grammar.Grammar, "matcher", matcher)
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(tiny_one.chat, max_tokens=40, ignore_eos=True)
        status, found = tiny_one.post(CHAT, asked)
        assert beside.result()["choices"][0]["message"] == plain
    assert status == 500 and fired and "injected" not in str(found)
    sampling = {"temperature": 1, "seed": 1, "max_tokens": 90}
    status, found = tiny_one.post(CHAT, asked | sampling)
    assert status == 200 and fits(json.loads(found["choices"][0]["message"]["content"]))


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"response_format": {"type": "json_schema"}}, "response_format.schema"),
     ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
     ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
     ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"), ({"guided_regex": 5}, "structured_outputs"),
     ({"grammar": "root ::= x"}, "grammar")],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tiny_one: Running, asked: dict[str, Any], said: str) -> None:
    for path, what in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "a"})):
        status, found = tiny_one.post(path, what | asked)
        assert status == 400 and found["error"]["message"].startswith(f"{said}:"), found


def test_its_seconds_are_counted(tiny_one: Running) -> None:
    tiny_one.post(
        CHAT, {"messages": HI, "structured_outputs": {"choice": ["counted", "once"]}, "reasoning_effort": "none"}
    )
    _, _, text = tiny_one.ask("GET", "/metrics")
    counts = [line for line in text.splitlines() if line.startswith("hybridkv_grammar_seconds_count")]
    assert len(counts) == 2 and all(float(line.split()[-1]) > 0 for line in counts)
