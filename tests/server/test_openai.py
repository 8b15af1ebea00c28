"""OpenAI's dialect: what its client, and plain requests, get from the embedded model and from a tiny one."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from hybridkv import LLM, SamplingParams
from hybridkv.server import settings
from hybridkv.server.service import Service
from hybridkv.server.settings import ServerSettings
from server.running import HI, Running
from server.saying import TOOL, saying

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def client(smol: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smol.address}/v1", api_key="any", max_retries=0)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "smol", "messages": HI, "temperature": 0, "max_tokens": 6, **more}
    )


# ---- chat


def test_one_turn_and_the_same_as_a_stream(client: openai.OpenAI, smol: Running) -> None:
    whole = ask(client)
    expected = smol.llm.chat(HI, SamplingParams(max_tokens=6, temperature=0))
    [choice] = whole.choices
    assert choice.message.content == expected.text and choice.finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (expected.prompt_tokens, 6)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0 and whole.id.startswith("chatcmpl-")
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert not chunks[-1].choices and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_once(smol: Running) -> None:
    events = smol.stream(CHAT, {"messages": HI, "max_tokens": 3, "temperature": 0})
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    objects = [json.loads(event) for event in events[:-1]]
    assert sum(o["choices"][0]["finish_reason"] is not None for o in objects) == 1
    assert all("usage" not in o for o in objects)
    usage = smol.stream(
        CHAT, {"messages": HI, "max_tokens": 2, "temperature": 0, "stream_options": {"continuous_usage_stats": True}}
    )
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in usage[:-1]]
    assert counts == sorted(counts) and counts[-1] == 2


def test_a_stop_text_ends_the_answer_and_is_cut(client: openai.OpenAI) -> None:
    [choice] = ask(client, stop=["!", " welcome"], max_tokens=20).choices
    assert choice.finish_reason == "stop" and choice.message.content == "Hello there,"
    assert choice.model_dump()["stop_reason"] == " welcome"
    chunks = list(ask(client, stop=" welcome", max_tokens=20, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello there,"


def test_logprobs_are_the_models_own(client: openai.OpenAI, smol: Running) -> None:
    asked = dict(logprobs=True, top_logprobs=3, logit_bias={"30": 5})
    [choice] = ask(client, **asked, extra_body={"return_token_ids": True}).choices
    ids = choice.model_dump()["token_ids"]
    prompt = smol.llm.encode_chat(HI)
    scores = smol.llm.logits([*prompt, *ids]).log_softmax(-1)
    for i, entry in enumerate(choice.logprobs.content):
        row = scores[len(prompt) - 1 + i]
        # f32 logits of two paths (steps of one token, one chunk) differ by some 1e-5
        assert entry.logprob == pytest.approx(float(row[ids[i]]), abs=1e-4)
        best = row.topk(3)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
    chunks = list(ask(client, **asked, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in choice.logprobs.content], abs=1e-4)
    for wrong in (dict(logprobs=True, top_logprobs=21), dict(top_logprobs=2)):
        with pytest.raises(openai.BadRequestError) as problem:
            ask(client, **wrong)
        assert problem.value.param == "top_logprobs"


def test_several_answers_with_a_seed_are_the_same_twice(tiny_one: Running) -> None:
    asked = dict(n=3, seed=7, temperature=1, max_tokens=12, ignore_eos=True)
    first, again = tiny_one.chat(**asked), tiny_one.chat(**asked)
    texts = [choice["message"] for choice in first["choices"]]
    assert texts == [choice["message"] for choice in again["choices"]] and len({str(t) for t in texts}) == 3
    assert first["usage"]["completion_tokens"] == 36
    assert first["usage"]["prompt_tokens"] == len(tiny_one.llm.encode_chat(HI))
    one = tiny_one.chat(**asked | {"n": 1, "seed": 9})  # answer i draws with seed + i
    assert one["choices"][0]["message"] == texts[2]


def test_several_answers_can_be_streamed(tiny_one: Running) -> None:
    asked = dict(messages=HI, n=3, seed=7, temperature=1, max_tokens=12, ignore_eos=True)
    whole = tiny_one.chat(**asked)
    objects = [json.loads(event) for event in tiny_one.stream(CHAT, asked)[:-1]]
    for i, choice in enumerate(whole["choices"]):
        deltas = [o["choices"][0]["delta"] for o in objects if o["choices"][0]["index"] == i]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == choice["message"]["reasoning_content"]


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 1.3},
        {"logit_bias": {"40": 100}},
        {"logit_bias": {"40": -100}, "temperature": 1, "seed": 3},
        {"top_k": 5, "min_p": 0.1, "temperature": 1, "seed": 3},
        {"min_tokens": 8, "stop_token_ids": [40, 41, 42]},
    ],
)
def test_sampling_is_the_engines(tiny_one: Running, asked: dict[str, Any]) -> None:
    asked = {"temperature": 0, "max_tokens": 10, **asked}
    found = tiny_one.chat(**asked, return_token_ids=True)
    if "logit_bias" in asked:
        asked = asked | {"logit_bias": {int(k): v for k, v in asked["logit_bias"].items()}}
    expected = tiny_one.llm.generate(tiny_one.llm.encode_chat(HI), SamplingParams(**asked))[0]
    ids = found["choices"][0]["token_ids"]
    ends = expected.finish_reason == "stop"
    assert ids == (expected.token_ids[:-1] if ends else expected.token_ids)
    if asked.get("logit_bias") == {40: 100}:
        assert set(ids) == {40}


def test_thoughts_are_apart_and_have_both_names(tiny_one: Running) -> None:
    found = tiny_one.chat(max_tokens=8)
    message = found["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning"] == message["reasoning_content"] != ""
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8
    hidden = tiny_one.chat(max_tokens=8, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in hidden
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = tiny_one.chat(max_tokens=8, **off)["choices"][0]["message"]
        assert message["content"] != "" and "reasoning" not in message


def test_fields_that_ask_for_nothing_are_accepted(smol: Running) -> None:
    many = dict(
        min_p=0.1, top_k=5, ignore_eos=True, min_tokens=2, chat_template_kwargs={"x": 1}, user="me", store=False,
        metadata={"a": "b"}, service_tier="auto", prompt_cache_key="k", cache_salt="s", reasoning_effort="low",
        unknown={"deep": [1]}, tools=[], functions=None, response_format={"type": "text"}, modalities=["text"],
        logprobs=False, parallel_tool_calls=True,
    )  # fmt: skip
    assert smol.chat(**many, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_the_model_continues_a_last_message(smol: Running) -> None:
    begun = [*HI, {"role": "assistant", "content": "Bonjour, je m'appelle"}]
    found = smol.chat(messages=begun, add_generation_prompt=False, continue_final_message=True, max_tokens=6)
    text = found["choices"][0]["message"]["content"]
    assert text and not text.startswith("Bonjour")
    _, tokens = smol.post("/tokenize", {"messages": begun, "continue_final_message": True,
                                        "add_generation_prompt": False, "return_token_strs": True})  # fmt: skip
    assert "".join(tokens["token_strs"]).endswith("<|im_start|>assistant\nBonjour, je m'appelle")
    assert found["usage"]["prompt_tokens"] == tokens["count"]


def test_a_prompt_that_is_too_long_is_refused_before_the_first_byte(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as problem:
            ask(client, messages=long, stream=stream)
        assert problem.value.code == "context_length_exceeded" and "> 2047 maximum" in str(problem.value)


def test_more_tokens_than_the_context_holds_are_not_an_error(tiny_one: Running) -> None:
    messages = [{"role": "user", "content": "x" * 480}]
    found = tiny_one.chat(messages=messages, max_tokens=32000, ignore_eos=True)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["total_tokens"] == 512


def test_developer_messages_are_system_messages(tiny_one: Running) -> None:
    """The tiny model's template, as Qwen3.5's, takes a system message first or not at all."""
    first = [{"role": "developer", "content": "Be brief."}, *HI]
    assert prompt_of(tiny_one, first).startswith("<s>[system]Be brief.</s>[user]Say hello.")
    later = [*first, {"role": "developer", "content": "Now loud."}, {"role": "user", "content": "Again."}]
    text = prompt_of(tiny_one, later)
    assert text.index("Say hello.") < text.index("Now loud.") < text.index("Again.")
    assert text.startswith("<s>[system]Be brief.</s>")
    last = prompt_of(tiny_one, [*first, {"role": "system", "content": "Now loud."}])
    assert last.index("Say hello.") < last.index("Now loud.")
    tiny_one.chat(messages=later, max_tokens=1)


def test_a_template_that_shows_later_system_messages_gets_them(smol: Running) -> None:
    text = prompt_of(smol, [*HI, {"role": "system", "content": "Loud."}, {"role": "user", "content": "Again."}])
    assert "<|im_start|>system\nLoud.<|im_end|>" in text


def test_thoughts_of_earlier_turns_have_two_names(tiny_one: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        [*HI, {"role": "assistant", "content": None, name: "Hm.", "tool_calls": [call]},
         {"role": "tool", "tool_call_id": "call_1", "content": "2"}]
        for name in ("reasoning_content", "reasoning")
    ]  # fmt: skip
    first, second = (prompt_of(tiny_one, messages) for messages in turns)
    assert first == second and "Hm." in first and "<parameter=a>1</parameter>" in first


def prompt_of(running: Running, messages: list[dict[str, Any]]) -> str:
    status, found = running.post("/tokenize", {"messages": messages, "return_token_strs": True})
    assert status == 200, found
    return "".join(found["token_strs"])


def test_a_budget_of_its_own_is_kept_and_reported(tiny_one: Running) -> None:
    messages = [{"role": "user", "content": "a long text " * 30}]
    found = tiny_one.chat(messages=messages, hybridkv={"budget": 96, "policy": "snapkv"}, max_tokens=4)
    usage = found["usage"]
    kept = usage["hybridkv"]
    assert usage["prompt_tokens"] > 300 and kept["kept_tokens"] <= 96 + 4
    assert kept["kv_bytes"] < kept["full_bytes"] and (kept["budget"], kept["policy"]) == (96, "snapkv")
    full = tiny_one.chat(messages=messages, max_tokens=4)["usage"]["hybridkv"]
    assert full["kv_bytes"] == full["full_bytes"] == kept["full_bytes"] and "policy" not in full


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"hybridkv": {"budget": 0}}, "hybridkv.budget"),
        ({"hybridkv": {"budgte": 1}}, "hybridkv.budgte"),
        ({"hybridkv": {"budget": 100, "policy": "nonsense"}}, "hybridkv"),
        ({"hybridkv": {"policy": "snapkv"}}, "hybridkv.budget"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stream_options": {}}, "stream_options"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"97": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_named(tiny_one: Running, wrong: dict[str, Any], path: str) -> None:
    status, found = tiny_one.post(CHAT, {"messages": HI, "max_tokens": 1, **wrong})
    assert status == 400 and found["error"]["param"] == path, found
    assert set(found["error"]) == {"message", "type", "param", "code"}


def test_limits_are_served_at_their_end(tiny_one: Running) -> None:
    tiny_one.chat(n=8, stop=["zq"] * 16, logit_bias={"1": -100}, logprobs=True, top_logprobs=20, max_tokens=1)


# ---- completions


def test_echo_with_logprobs_and_no_answer(smol: Running) -> None:
    """What lm-eval asks for."""
    asked = {"prompt": "The capital of France is Paris", "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    status, found = smol.post(TEXT, asked)
    assert status == 200, found
    [choice] = found["choices"]
    ids = smol.llm.encode(asked["prompt"])
    scores = smol.llm.logits(ids).log_softmax(-1)
    logprobs = choice["logprobs"]
    assert choice["text"] == asked["prompt"] == "".join(logprobs["tokens"])
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = [float(scores[i, token]) for i, token in enumerate(ids[1:])]
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)  # as above
    assert [choice["text"][a:].startswith(t) for a, t in zip(logprobs["text_offset"], logprobs["tokens"])]
    assert logprobs["text_offset"][0] == 0 and found["usage"]["completion_tokens"] == 0
    status, by_ids = smol.post(TEXT, asked | {"prompt": ids})
    assert by_ids["choices"] == found["choices"]


def test_openais_client_gets_completions(client: openai.OpenAI, smol: Running) -> None:
    given: dict[str, Any] = dict(model="smol", prompt="The capital of France is", max_tokens=5, temperature=0)
    expected = smol.llm.generate(given["prompt"], SamplingParams(max_tokens=5, temperature=0))[0]
    whole = client.completions.create(**given, logprobs=1)
    [choice] = whole.choices
    assert choice.text == expected.text and choice.finish_reason in ("stop", "length")
    assert whole.usage is not None and whole.usage.completion_tokens == len(expected.token_ids)
    assert choice.logprobs is not None and "".join(choice.logprobs.tokens or []) == choice.text
    chunks = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    several = client.completions.create(**given | {"prompt": [given["prompt"], "One, two,"], "n": 2})
    assert [each.index for each in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == expected.text


def test_logprobs_of_prompts_have_a_limit(tiny_one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_PROMPT_LOGPROBS", 2 * 10 * 3)
    asked = {"max_tokens": 1, "echo": True, "logprobs": 2, "n": 2}
    assert tiny_one.post("/v1/completions", asked | {"prompt": [5] * 10})[0] == 200
    status, found = tiny_one.post("/v1/completions", asked | {"prompt": [5] * 11})
    assert status == 400 and found["error"]["param"] == "logprobs" and "66 logprobs" in found["error"]["message"]
    assert tiny_one.post("/v1/completions", asked | {"prompt": [5] * 11, "echo": False})[0] == 200


def test_tokens_whose_text_is_held_back_reach_a_stream(tiny_one: Running) -> None:
    """Two tokens that may begin a stop text, which then does not come."""
    tokenizer = tiny_one.llm.tokenizer
    assert tokenizer is not None
    asked = {"prompt": "a", "max_tokens": 6, "temperature": 0, "stop": "~~~", "return_token_ids": True}
    with saying(tiny_one, "b~~c~d"):
        events = tiny_one.stream("/v1/completions", asked)
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == "b~~c~d"
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    assert ids == tokenizer.encode("b~~c~d", bos=False)


def test_tokens_of_thoughts_are_all_counted(tiny_one: Running) -> None:
    """White space and the mark that ends them, too, with tools and without."""
    tokenizer = tiny_one.llm.tokenizer
    assert tokenizer is not None
    thought = "Hm, so.   </think>"
    for tools in ([], [TOOL]):
        with saying(tiny_one, thought + "Yes."):
            usage = tiny_one.chat(max_tokens=60, tools=tools)["usage"]
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert counted == len(tokenizer.encode(thought, bos=False)) < usage["completion_tokens"]


def test_a_list_of_prompts_gives_choices_in_order(smol: Running) -> None:
    prompts = ["One, two, three,", "The sky is"]
    asked = {"prompt": prompts, "max_tokens": 3, "temperature": 0, "logprobs": 0}
    _, found = smol.post(TEXT, asked)
    expected = smol.llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0))
    assert [c["text"] for c in found["choices"]] == [e.text for e in expected]
    assert found["usage"]["prompt_tokens"] == sum(e.prompt_tokens for e in expected)
    texts = {0: "", 1: ""}
    for event in smol.stream(TEXT, asked)[:-1]:
        [choice] = json.loads(event)["choices"]
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [e.text for e in expected]


def test_a_completion_without_a_limit_has_16_tokens(tiny_one: Running) -> None:
    _, found = tiny_one.post(TEXT, {"prompt": [5, 6, 7], "ignore_eos": True, "echo": True, "return_token_ids": True})
    assert found["usage"] == found["usage"] | {"prompt_tokens": 3, "completion_tokens": 16}
    [choice] = found["choices"]
    assert choice["text"].startswith(tiny_one.llm.tokenizer.decode([5, 6, 7])) and len(choice["token_ids"]) == 16


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": [97]},
        {"prompt": [-1]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [[1], [2, [3]]]},
        {"prompt": ["x"] * 17},
        {"prompt": None},
        {"prompt": "x", "suffix": "y"},
        {"prompt": "x", "best_of": 2},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "logprobs": 21},
        {"prompt": "\ud800"},
        {"prompt": ""},
    ],
)
def test_prompts_that_are_none_are_refused(tiny_one: Running, wrong: dict[str, Any]) -> None:
    status, found = tiny_one.post(TEXT, wrong)
    # the tiny model puts a first token before a text, so that an empty one is a prompt
    assert (
        (status, found["error"]["type"]) == (400, "invalid_request_error") if wrong["prompt"] != "" else status == 200
    )


# ---- the rest


def test_models_are_listed_and_found_by_name(client: openai.OpenAI, smol: Running) -> None:
    assert [model.id for model in client.models.list()] == ["smol"]
    model = client.models.retrieve("smol")
    assert model.owned_by == "hybridkv" and model.model_dump()["max_model_len"] == 2048
    assert ask(client, model="claude-anything", max_tokens=1).model == "claude-anything"
    for call in (lambda: ask(client, model="gpt-5"), lambda: client.models.retrieve("gpt-5")):
        with pytest.raises(openai.NotFoundError) as problem:
            call()
        assert problem.value.code == "model_not_found" and "smol" in str(problem.value)


@pytest.mark.parametrize(("path", "name"), [("x/Qwen3.5-4B", "Qwen3.5-4B"), ("x/a.Q4_1.gguf", "a.Q4_1")])
def test_a_model_is_called_as_its_file(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> None:
    monkeypatch.setattr(tiny_llm, "path", Path(path))
    service = Service(ServerSettings(names=("claude-*",)))
    service.open(tiny_llm)
    assert service.names == [name] and service.model_name("claude-x") == "claude-x"
    service.close()


def test_what_is_not_there_says_so(smol: Running) -> None:
    status, headers, found = smol.ask("GET", "/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST") and found["error"]["code"] is None
    assert smol.ask("GET", "/nowhere")[0] == 404
