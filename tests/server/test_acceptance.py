"""What a server promises its clients, as one list: ROWS says which test holds which promise. What the other files have
no test for is here.
"""

import ast
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch

from engine.driving import count_tokens
from hybridkv import LLM
from hybridkv.server import service, settings
from server.running import HI, Running, post_bytes, serving, until
from server.test_anthropic import ask as ask_anthropic
from server.test_anthropic import body, prompt_count
from server.test_life import forward
from server.test_tools import ANTHROPIC_TOOL, anthropic_turns

CHAT, MESSAGES, COUNT, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
TESTS = Path(__file__).parents[1]
OPENAI, ANTHROPIC, TOOLS = "server/test_openai.py", "server/test_anthropic.py", "server/test_tools.py"
HERE, LIFE, ACCESS = "server/test_acceptance.py", "server/test_life.py", "server/test_access.py"
REPLY, CALLS, COMMAND = "server/test_responses.py", "text/test_calls.py", "server/test_command.py"

ROWS: dict[str, list[tuple[str, str]]] = {
    # Messages
    "one turn; counts add up": [(ANTHROPIC, "test_one_turn_and_the_same_as_a_stream")],
    "the same as a stream": [
        (ANTHROPIC, "test_the_order_of_events"),
        (ANTHROPIC, "test_one_turn_and_the_same_as_a_stream"),
    ],
    "keys in either form": [(HERE, "test_either_key_is_taken_and_none_is_refused_in_anthropics_shape")],
    "fields that ask for nothing": [(ANTHROPIC, "test_fields_that_ask_for_nothing_are_accepted")],
    "system prompts": [(ANTHROPIC, "test_system_prompts")],
    "a system message in the middle": [
        (ANTHROPIC, "test_a_later_system_message_stays_where_it_is"),
        (HERE, "test_a_system_message_in_the_middle_is_served"),
    ],
    "a last assistant message is continued": [(ANTHROPIC, "test_a_last_message_of_the_model_is_continued")],
    "stop sequences": [(ANTHROPIC, "test_stop_sequences")],
    "no tokens": [(ANTHROPIC, "test_no_tokens_reads_the_prompt_alone")],
    "more tokens than the context; a prompt that is too long": [(ANTHROPIC, "test_the_context_is_the_limit")],
    "what is wrong is named": [(ANTHROPIC, "test_what_is_wrong_is_named_in_anthropics_shape")],
    "other errors": [
        (ANTHROPIC, "test_other_errors_have_that_shape_too"),
        (HERE, "test_a_model_that_is_not_served_is_told_what_is"),
    ],
    "images": [(HERE, "test_a_large_image_is_refused_and_leaves_nothing")],
    "a call": [(TOOLS, "test_the_embedded_model_calls_a_function_for_anthropics_client")],
    "a call as a stream": [(TOOLS, "test_the_events_of_a_call")],
    "results of calls": [
        (ANTHROPIC, "test_earlier_thoughts_calls_and_results_are_shown"),
        (TOOLS, "test_a_template_without_tools_gets_them_described"),
    ],
    "tools of other servers": [(TOOLS, "test_tools_of_other_servers_are_left_out")],
    "thinking with a budget": [(ANTHROPIC, "test_thoughts_are_a_block_of_their_own")],
    "counting tokens": [(HERE, "test_tokens_are_counted_as_the_call_reports_them")],
    "signs of life behind a queue": [
        (HERE, "test_signs_of_life_come_behind_a_step_that_takes_long"),
        (LIFE, "test_signs_of_life_come_while_a_request_waits"),
        (ANTHROPIC, "test_pings_come_while_a_request_waits"),
        (REPLY, "test_signs_of_life_are_events"),
    ],
    "a fault in a stream": [
        (ANTHROPIC, "test_a_fault_in_a_stream_is_an_error_event"),
        (LIFE, "test_a_fault_in_a_stream_is_an_error_event"),
        (REPLY, "test_a_fault_in_a_stream_is_a_failed_response"),
    ],
    # Chat Completions and Completions
    "a chat": [(OPENAI, "test_one_turn_and_the_same_as_a_stream")],
    "a call in a chat": [
        (TOOLS, "test_the_embedded_model_calls_a_function_for_openais_client"),
        (TOOLS, "test_only_the_token_opens_a_call"),
    ],
    "several answers": [
        (OPENAI, "test_several_answers_with_a_seed_are_the_same_twice"),
        (HERE, "test_a_prompt_is_read_once_for_several_answers"),
    ],
    "bias and penalties": [
        (OPENAI, "test_sampling_is_the_engines"),
        (HERE, "test_penalties_are_those_of_a_plain_sampler"),
    ],
    "logprobs": [(OPENAI, "test_logprobs_are_the_models_own")],
    "further fields; reserved template variables": [
        (OPENAI, "test_fields_that_ask_for_nothing_are_accepted"),
        (OPENAI, "test_what_cannot_be_served_is_named"),
    ],
    "developer messages": [(OPENAI, "test_developer_messages_are_system_messages")],
    "thoughts of earlier turns": [(OPENAI, "test_thoughts_of_earlier_turns_have_two_names")],
    "a budget of its own": [
        (OPENAI, "test_a_budget_of_its_own_is_kept_and_reported"),
        (HERE, "test_the_bytes_that_a_budget_keeps_are_those_of_its_pages"),
    ],
    "echo, ids and lists of prompts": [
        (OPENAI, "test_echo_with_logprobs_and_no_answer"),
        (OPENAI, "test_a_list_of_prompts_gives_choices_in_order"),
        (OPENAI, "test_prompts_that_are_none_are_refused"),
    ],
    # Responses
    "a response": [(REPLY, "test_one_turn_and_the_same_as_a_stream"), (REPLY, "test_items_are_turns")],
    "its events": [(REPLY, "test_the_order_of_events")],
    "a call in a response": [(REPLY, "test_the_embedded_model_calls_a_function")],
    "a mixture of tools": [
        (REPLY, "test_the_mixture_of_tools_that_codex_sends"),
        (REPLY, "test_what_cannot_be_served_is_named"),
    ],
    "a response that is too long or cut": [
        (REPLY, "test_a_prompt_that_is_too_long_is_refused_before_the_first_event"),
        (REPLY, "test_a_full_context_is_incomplete"),
    ],
    # parsers, operation
    "calls in any pieces": [(CALLS, "test_any_text_in_any_pieces_gives_the_same")],
    "calls in random text": [(CALLS, "test_ten_thousand_texts_of_tags_and_quotes")],
    "metrics": [("server/test_metrics.py", "test_ten_requests_are_counted_exactly")],
    "health": [
        (LIFE, "test_health_tells_loading_serving_draining_and_dead"),
        (HERE, "test_an_engine_that_stands_still_is_dead"),
    ],
    "SIGTERM": [
        (COMMAND, "test_sigterm_lets_answers_come_to_their_end"),
        (COMMAND, "test_a_second_signal_ends_at_once"),
    ],
    "request ids": [(ACCESS, "test_ids_are_kept_or_made"), (HERE, "test_an_id_that_is_no_id_is_replaced")],
}  # fmt: skip


def test_every_promise_has_its_tests() -> None:
    found: dict[str, set[str]] = {}
    for file in {file for tests in ROWS.values() for file, _ in tests}:
        tree = ast.parse((TESTS / file).read_text())
        found[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [(row, *test) for row, tests in ROWS.items() for test in tests if test[1] not in found[test[0]]] == []


# ---- Messages


def test_either_key_is_taken_and_none_is_refused_in_anthropics_shape(tiny_llm: LLM) -> None:
    bearer, other = {"authorization": "Bearer k"}, {"x-api-key": "k"}
    with serving(tiny_llm, api_keys=("k",), names=("tiny",)) as running:
        for headers in (bearer, other, bearer | other):
            assert running.ask("POST", MESSAGES, body(model="tiny", max_tokens=1), headers)[0] == 200
        for headers in ({}, {"x-api-key": "no"}, {"authorization": "Bearer no"}):
            status, sent, found = running.ask("POST", MESSAGES, body(model="tiny"), headers)
            assert (status, found["type"], found["error"]["type"]) == (401, "error", "authentication_error")
            assert found["request_id"] == sent["request-id"]
        client = anthropic.Anthropic(base_url=running.address, api_key="k", max_retries=0)
        assert client.messages.create(model="tiny", max_tokens=1, messages=HI).usage.output_tokens == 1  # type: ignore[arg-type]


def test_a_system_message_in_the_middle_is_served(tiny_one: Running) -> None:
    turns = [*HI, {"role": "system", "content": "Loud."}, {"role": "user", "content": "Again."}]
    found = ask_anthropic(tiny_one, model="tiny", messages=turns, max_tokens=2)
    assert found["usage"]["output_tokens"] == 2
    tiny_one.chat(messages=[*turns, {"role": "developer", "content": "Louder."}], max_tokens=2)


def test_a_model_that_is_not_served_is_told_what_is(smol: Running) -> None:
    status, found = smol.post(MESSAGES, body(model="gpt"))
    assert status == 404 and "smol, claude-*" in found["error"]["message"]
    assert found["error"]["type"] == "not_found_error"


def test_a_large_image_is_refused_and_leaves_nothing(tiny_one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LEAST_BODY", 32 << 20)
    source = {"type": "base64", "media_type": "image/png", "data": "A" * (20 << 20)}
    content = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
    asked = body(model="tiny", messages=[{"role": "user", "content": content}])

    def images() -> int:
        return sum(type(thing) is dict and thing.get("type") == "image" for thing in gc.get_objects())

    gc.collect()
    before = images()
    gc.disable()  # nothing may wait for the collector
    try:
        status, found = tiny_one.post(MESSAGES, asked)
        assert status == 400 and found["error"]["message"].startswith("messages[0].content[1].type:")
        until(lambda: images() == before)
    finally:
        gc.enable()


def test_tokens_are_counted_as_the_call_reports_them(smol: Running) -> None:
    asked = dict(
        system="Be brief.", tools=[ANTHROPIC_TOOL], messages=anthropic_turns()[-5:], tool_choice={"type": "none"}
    )
    found = ask_anthropic(smol, **asked, max_tokens=1)
    status, counted = smol.post(COUNT, {"model": "smol", **asked})
    assert status == 200 and prompt_count(found["usage"]) == counted["input_tokens"]


# ---- behind a queue


def _anthropic_text(address: str) -> str:
    client = anthropic.Anthropic(base_url=address, api_key="any", max_retries=0)
    more: dict[str, Any] = dict(
        model="tiny", max_tokens=3, messages=HI, extra_body={"temperature": 0, "ignore_eos": True}
    )
    with client.messages.stream(**more) as stream:
        block = stream.get_final_message().content[0]
    return block.thinking if block.type == "thinking" else ""


def _chat_text(address: str) -> str:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    more: dict[str, Any] = dict(model="tiny", max_tokens=3, temperature=0, extra_body={"ignore_eos": True})
    chunks = client.chat.completions.create(messages=HI, stream=True, **more)  # type: ignore[call-overload]
    return "".join(getattr(chunk.choices[0].delta, "reasoning", None) or "" for chunk in chunks)


def _response_text(address: str) -> str:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    more: dict[str, Any] = dict(model="tiny", max_output_tokens=3, temperature=0, extra_body={"ignore_eos": True})
    events = list(client.responses.create(input="Say hello.", stream=True, **more))
    return "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")


@pytest.mark.parametrize(
    ("path", "asked", "sign"),
    [
        (MESSAGES, body(model="tiny"), b"event: ping\n"),
        (CHAT, {"messages": HI}, b": keep-alive\n"),
        (RESPONSES, {"input": "Say hello."}, b"event: response.in_progress\n"),
    ],
)
def test_signs_of_life_come_behind_a_step_that_takes_long(
    tiny_llm: LLM, path: str, asked: dict[str, Any], sign: bytes
) -> None:
    """The step is another request's, and the engine takes nothing before it ends."""
    texts: dict[str, Callable[[str], str]] = {
        MESSAGES: _anthropic_text, CHAT: _chat_text, RESPONSES: _response_text
    }  # fmt: skip
    go, found, read = threading.Event(), [], b""
    with serving(tiny_llm, names=("tiny",), keep_alive=0.1) as running:
        expected = running.chat(max_tokens=3, ignore_eos=True)["choices"][0]["message"]["reasoning"]
        with forward(tiny_llm, lambda number: go.wait(240) and None) as calls:
            first = threading.Thread(target=running.post, args=(CHAT, {"messages": HI, "max_tokens": 1}))
            first.start()
            until(lambda: len(calls) == 1)
            second = threading.Thread(target=lambda: found.append(texts[path](running.address)))
            second.start()
            with running.connect() as connection:
                connection.sendall(post_bytes(path, {**asked, "stream": True}))
                while read.count(sign) < 2:
                    data = connection.recv(1 << 16)
                    assert data, read
                    read += data
                until(lambda: len(running.service.generations) == 3)
                go.set()
            second.join()
            first.join()
        running.idle()
    assert found == [expected]


def test_an_engine_that_stands_still_is_dead(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "DEAD_SECONDS", {"cpu": 0.2})
    go = threading.Event()
    with serving(tiny_llm) as running, forward(tiny_llm, lambda number: go.wait(240) and None):
        held = threading.Thread(target=running.post, args=(CHAT, {"messages": HI, "max_tokens": 1}))
        held.start()
        until(lambda: running.ask("GET", "/health")[0] == 503)
        assert running.ask("GET", "/ready")[2]["status"] == "dead" and running.ask("GET", "/live")[0] == 200
        assert running.post(CHAT, {"messages": HI})[0] == 503
        go.set()
        held.join()
        until(lambda: running.ask("GET", "/health")[0] == 200)  # it was only slow
        running.idle()


# ---- Chat Completions


def test_a_prompt_is_read_once_for_several_answers(tiny_one: Running) -> None:
    messages = [{"role": "user", "content": "a long text " * 30}]
    asked: dict[str, Any] = dict(messages=messages, n=3, seed=7, temperature=1, max_tokens=4, ignore_eos=True)
    engine = tiny_one.llm.engine
    original = engine.runner.forward
    try:
        ran = count_tokens(engine)
        found = tiny_one.chat(**asked)
    finally:
        engine.runner.forward = original  # type: ignore[method-assign]
    prompt = len(tiny_one.llm.encode_chat(messages))
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 12) and prompt > 350
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert sum(ran) == prompt - cached + 3 * 3  # of each answer all tokens but the last are run
    again = tiny_one.chat(**asked)
    assert [c["message"] for c in found["choices"]] == [c["message"] for c in again["choices"]]


@pytest.mark.parametrize(
    "asked", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.3}, {"logit_bias": {"40": 3}}]
)
def test_penalties_are_those_of_a_plain_sampler(tiny_one: Running, asked: dict[str, Any]) -> None:
    prompt = tiny_one.llm.encode_chat(HI)
    found = tiny_one.chat(**asked, max_tokens=40, ignore_eos=True, return_token_ids=True)
    ids: list[int] = []
    plain: list[int] = []
    for _ in range(40):
        logits = tiny_one.llm.logits([*prompt, *ids])[-1].clone()
        plain.append(int(logits.argmax()))
        for token, value in asked.get("logit_bias", {}).items():
            logits[int(token)] += value
        seen = torch.tensor(sorted({*prompt, *ids}))
        values, factor = logits[seen], asked.get("repetition_penalty", 1.0)
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
        counts = torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=len(logits)).float()
        logits -= asked.get("frequency_penalty", 0) * counts + asked.get("presence_penalty", 0) * (counts > 0)
        ids.append(int(logits.argmax()))
    assert found["choices"][0]["token_ids"] == ids != plain


def test_the_bytes_that_a_budget_keeps_are_those_of_its_pages(tiny_one: Running) -> None:
    messages = [{"role": "user", "content": "a long text " * 30}]
    found = tiny_one.chat(messages=messages, hybridkv={"budget": 256, "policy": "snapkv"}, max_tokens=1)["usage"]
    kept, schema = found["hybridkv"], tiny_one.llm.plan.schema
    assert found["prompt_tokens"] > 350 and kept["kept_tokens"] <= 256
    assert kept["kv_bytes"] == schema.kv_bytes(256) and kept["full_bytes"] == schema.kv_bytes(found["prompt_tokens"])


# ---- ids


def test_an_id_that_is_no_id_is_replaced(tiny_one: Running) -> None:
    for sent in ("x" * 10_000, "a\tb", "a/b"):
        status, headers, _ = tiny_one.ask("GET", "/version", None, {"x-request-id": sent})
        assert status == 200 and headers["x-request-id"].startswith("req_")
    raw = tiny_one.raw(
        b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: a\r\n b\r\n\r\n"
    )
    # a line break inside a header folds it, or is refused; it never comes back
    assert b"x-request-id: a" not in raw and b"\r\n b" not in raw
