"""What of a server's conversations and documents outlives it, also where it is killed."""

import http.client
import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from hybridkv import LLM
from server.running import SECONDS
from server.test_command import port_of, started

CHAT, ROUTE = "/v1/chat/completions", "/v1/cache/sessions"
SAID = [{"role": "user", "content": "Hello, how are you? I am well, and so is the cat."}]
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, found
    return found


def turn(port: int, said: list[dict[str, str]], **more: Any) -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were there."""
    found = post(port, CHAT, {"messages": said, "temperature": 0, "max_tokens": 8, **more})
    content = found["choices"][0]["message"].get("content") or ""
    return content, found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
def test_what_was_saved_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.save("qwen3_5", model)
    write_tokenizer(model, TEMPLATE)
    with LLM(model, "cpu", "float32", True, max_context=512) as llm, llm.compress(TEXT, ratio=2) as document:
        document.save(tmp_path / "report.kv")
        tokens = len(document.tokens)
    how = ("-m", model, "--context", 512, "--dtype", "float32", "--exact", "--no-reuse")
    how = (*how, "--disk-cache", tmp_path / "store", "--document", tmp_path / "report.kv")
    with started(*how) as (process, lines):
        port = port_of(lines)
        about = turn(port, SAID, hybridkv={"prefix": "report"})
        assert about[1] == tokens
        answers = {name: turn(port, SAID, prompt_cache_key=name)[0] for name in ("saved", "not saved")}
        post(port, ROUTE, {"name": "saved", "action": "save"})
        process.kill()
        process.wait(SECONDS)
    with started(*how) as (_, lines):
        port, cached = port_of(lines), {}
        assert turn(port, SAID, hybridkv={"prefix": "report"}) == about
        for name, answer in answers.items():
            said = [*SAID, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
            cached[name] = turn(port, said, prompt_cache_key=name)[1]
    assert cached["saved"] > 0 == cached["not saved"]
