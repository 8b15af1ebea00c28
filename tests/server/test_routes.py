"""Routes beside the dialects: text to tokens and back, templates, what is served and what runs, names."""

import threading
from typing import Any

import pytest

from hybridkv import LLM
from server.running import HI, Running, serving, until
from server.test_life import forward, slowly

CHAT = "/v1/chat/completions"


def test_text_to_tokens_and_back(smol: Running) -> None:
    text = "Hello there <|im_end|>"
    _, found = smol.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["tokens"] == smol.llm.encode(text) and found["count"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == text and found["max_model_len"] == 2048
    _, back = smol.post("/detokenize", {"tokens": found["tokens"]})
    assert back["prompt"] == back["content"] == text
    for path, wrong in (("/tokenize", {}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {})):
        assert smol.post(path, wrong)[0] == 400


def test_tokens_as_llama_server_asks_for_them(smol: Running, tiny_one: Running) -> None:
    _, pieces = smol.post("/tokenize", {"content": "Hi 😀", "with_pieces": True})
    assert pieces["tokens"][0]["piece"] == "Hi"
    raw = [t["piece"] if isinstance(t["piece"], list) else list(t["piece"].encode()) for t in pieces["tokens"]]
    assert bytes(sum(raw, [])).decode() == "Hi 😀" and any(isinstance(t["piece"], list) for t in pieces["tokens"])
    real, text = (
        smol.post("/tokenize", {"content": "<|im_end|>", "parse_special": special})[1]["tokens"]
        for special in (True, False)
    )
    assert len(real) == 1 < len(text)
    with_first, without = (
        tiny_one.post("/tokenize", {"content": "a", "add_special": special})[1]["tokens"] for special in (True, False)
    )
    assert with_first == [tiny_one.llm.tokenizer.bos_id, *without]  # type: ignore[union-attr]


def test_a_chat_as_text(smol: Running, tiny_one: Running) -> None:
    turns = [{"role": "user", "content": "Say <|im_end|>."}]
    status, found = smol.post("/apply-template", {"messages": turns})
    assert status == 200 and found["prompt"].endswith("user\nSay <|im_end|>.<|im_end|>\n<|im_start|>assistant\n")
    _, off = tiny_one.post("/apply-template", {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}})
    assert off["prompt"] == "<s>[user]Say hello.</s>[assistant]<think></think>"
    status, found = smol.post("/apply-template", {"messages": []})
    assert status == 400 and found["error"]["param"] == "messages"


def test_what_is_served_is_told(tiny_one: Running, smol: Running) -> None:
    _, _, found = tiny_one.ask("GET", "/props")
    llm = tiny_one.llm
    assert (found["model_alias"], found["n_ctx"], found["total_slots"]) == ("tiny", 512, 4)
    assert found["default_generation_settings"]["params"]["temperature"] == 1.0
    assert found["eos"] == sorted(llm.engine.eos_ids) and found["tool_format"] == "qwen_xml"
    assert found["reasoning_format"] == ["<think>", "</think>"] and "add_generation_prompt" in found["chat_template"]
    kinds, states = found["cache"]["kinds"], found["cache"]["states"]
    assert {name: kind["pages"] for name, kind in kinds.items()} == llm.plan.pages and "gdn" in states
    assert sum(k["pages"] * k["page_bytes"] for k in kinds.values()) == sum(llm.plan.pool_bytes.values())
    assert sum(state["bytes"] for state in states.values()) == llm.plan.schema.slot_bytes
    _, _, plain = smol.ask("GET", "/props")
    assert plain["tool_format"] == "plain" and plain["reasoning_format"] is None


def test_what_runs_is_told_without_its_text(tiny_llm: LLM) -> None:
    asked: dict[str, Any] = {"messages": HI, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    with serving(tiny_llm, names=("tiny",)) as running, forward(tiny_llm, slowly(0.005)):
        assert running.ask("GET", "/slots")[2] == []
        threads = [threading.Thread(target=running.post, args=(CHAT, asked)) for _ in range(4)]
        threads.append(threading.Thread(target=running.post, args=("/v1/completions", {"prompt": "late", **asked})))
        for thread in threads[:4]:
            thread.start()
        until(lambda: sum(slot["generated_tokens"] > 1 for slot in running.ask("GET", "/slots")[2]) == 4)
        threads[4].start()
        until(lambda: len(running.ask("GET", "/slots")[2]) == 5)
        _, _, found = running.ask("GET", "/slots")
        prompt = len(tiny_llm.encode_chat(HI))
        first, last = found[0], found[-1]
        assert [slot["state"] for slot in found] == ["answering"] * 4 + ["waiting"] and not last["is_processing"]
        assert (first["prompt_tokens"], first["cached_tokens"], first["n_ctx"]) == (prompt, 0, 512)
        assert 0 < first["kept_bytes"] <= first["full_bytes"] + 10_000 and last["kept_bytes"] == 0
        assert "hello" not in str(found) and "late" not in str(found)
        for generation in list(running.service.generations):
            running.server._loop.call_soon_threadsafe(generation.cancel)  # type: ignore[union-attr]
        for thread in threads:
            thread.join()
        running.idle()


@pytest.mark.parametrize(
    ("asked", "served"),
    [("qwen", True), ("claude-opus-4", True), ("claude-", True), ("gpt-5x", True), ("Claude-x", False), ("qwe", False)],
)
def test_names_may_be_patterns(tiny_llm: LLM, asked: str, served: bool) -> None:
    with serving(tiny_llm, names=("qwen", "claude-*", "gpt-?x")) as running:
        status, found = running.post(CHAT, {"model": asked, "messages": HI, "max_tokens": 1})
        assert (status, found.get("model")) == ((200, asked) if served else (404, None))
        assert [model["id"] for model in running.ask("GET", "/v1/models")[2]["data"]] == ["qwen"]
        if not served:
            assert "claude-*" in found["error"]["message"]


def test_the_root_is_there_for_who_looks_first(tiny_one: Running) -> None:
    for method in ("HEAD", "GET"):
        assert tiny_one.ask(method, "/")[0] == 200
    assert tiny_one.ask("POST", "/api/event_logging/batch", {})[0] == 404
    assert list(tiny_one.ask("GET", "/version")[2]) == ["version"]
