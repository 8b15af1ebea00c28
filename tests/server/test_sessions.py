"""Conversations that clients name: kept for the next turn, saved when a server ends, restored by the next one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig
from hybridkv.cache.store import Store
from server.running import Running, serving

ROUTE = "/v1/cache/sessions"
CHAT = "/v1/chat/completions"
FIRST = [{"role": "user", "content": "Hello, how are you? I am well, and so is the cat."}]
KEYS = {"api_keys": ("one", "two")}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model that evicts, and keeps nothing for others: what is cached was named."""
    model = tmp_path_factory.mktemp("model")
    tiny.save("qwen3_5", model)
    write_tokenizer(model, TEMPLATE)
    cache = CacheConfig(kv_dtype="f32", budget=24, window=8, recent=8, page_size=8)
    more: dict[str, Any] = {"max_requests": 2, "max_context": 512, "exact": True, "reuse": None}
    with LLM(model, device="cpu", dtype="float32", cache=cache, **more) as opened:
        yield opened


@contextmanager
def one_server(llm: LLM, folder: Path, **settings: Any) -> Iterator[Running]:
    """A server that begins with nothing but what is in the folder, and ends with nothing held."""
    llm.store = Store(folder)
    with serving(llm, **settings) as running:
        yield running
    llm.owner.run(assert_nothing_held)


def turn(
    server: Running, said: list[dict], name: str | None = "talk", key: str = "one", **more: Any
) -> tuple[str, int]:
    """The answer, and the tokens that were not computed for it."""
    named = {} if name is None else {"prompt_cache_key": name}
    asked = {"messages": said, "temperature": 0, "max_tokens": 8, **named, **more}
    status, found = server.post(CHAT, asked, authorization=f"Bearer {key}")
    assert status == 200, found
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def then(said: list[dict], answer: str, text: str) -> list[dict]:
    return [*said, {"role": "assistant", "content": answer}, {"role": "user", "content": text}]


@pytest.fixture
def server(llm: LLM, tmp_path: Path) -> Iterator[Running]:
    with one_server(llm, tmp_path / "store", **KEYS) as running:
        yield running


def test_a_named_conversation_survives_the_server(llm: LLM, tmp_path: Path) -> None:
    with one_server(llm, tmp_path / "a", **KEYS) as running:
        first, _ = turn(running, FIRST)
        second = then(FIRST, first, "And now?")
        want, cached = turn(running, second)
        assert cached > 0
    with one_server(llm, tmp_path / "b", **KEYS) as running:
        assert turn(running, FIRST) == (first, 0)
    assert [each.name[:7] for each in llm.open_store().saved()] == ["served-"]
    with one_server(llm, tmp_path / "b", **KEYS) as running:
        assert turn(running, second, key="two")[1] == 0, "another key's conversation"
        assert turn(running, second) == (want, cached)


def test_another_beginning_is_read_as_any_prompt_is(server: Running) -> None:
    first, _ = turn(server, FIRST)
    other = [{"role": "user", "content": "Something else altogether, if you please."}]
    assert turn(server, other) == (turn(server, other, name=None)[0], 0)
    assert turn(server, then(FIRST, first, "Go on"), name=None)[0]
    [listed] = server.ask("GET", ROUTE, headers={"authorization": "Bearer one"})[2]["data"]
    assert listed["name"] == "talk" and listed["cached_tokens"] > 0


def test_a_header_names_a_conversation_too_and_store_false_keeps_it_off_the_disk(llm: LLM, tmp_path: Path) -> None:
    with one_server(llm, tmp_path) as running:
        asked = {"messages": FIRST, "temperature": 0, "max_tokens": 8, "store": False}
        assert running.post(CHAT, asked, x_session_id="mine")[0] == 200
        assert running.ask("GET", ROUTE)[2]["data"][0]["name"] == "mine"
        assert running.post(CHAT, asked, x_session_id="m" * 257)[0] == 400
    assert not llm.open_store().saved()


def test_saved_forked_forgotten_by_name(server: Running) -> None:
    def act(action: str, name: str = "talk", key: str = "one", **more: str) -> tuple[int, Any]:
        return server.post(ROUTE, {"action": action, "name": name, **more}, authorization=f"Bearer {key}")

    first, _ = turn(server, FIRST)
    second = then(FIRST, first, "And now?")
    assert act("fork", to="other")[1]["name"] == "other"
    want = turn(server, second)
    assert turn(server, second, name="other") == want and want[1] > 0
    assert act("save", "other")[0] == 200 and len(server.llm.open_store().saved()) == 1
    assert act("save", "other", key="two")[0] == 404, "another key's"
    assert act("forget", "other")[0] == 200 and not server.llm.open_store().saved()
    for wrong in (act("forget", "other"), act("fork", "nobody", to="x"), act("restore", "nobody")):
        assert wrong[0] == 404
    assert act("fork")[0] == 400 and act("break")[0] == 400 and act("save", "")[0] == 400
    assert act("save", "n" * 300)[0] == 400


def test_a_damaged_conversation_is_read_again(llm: LLM, tmp_path: Path) -> None:
    with one_server(llm, tmp_path, **KEYS) as running:
        first, _ = turn(running, FIRST)
    for path in (tmp_path / "parts").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with one_server(llm, tmp_path, **KEYS) as running:
        assert turn(running, then(FIRST, first, "And now?"))[1] == 0
