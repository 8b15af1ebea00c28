"""Conversations that clients name: kept for the next turn, saved when a server ends, restored by the next one."""

import threading
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
from hybridkv.engine.engine import Engine
from hybridkv.errors import RequestError
from hybridkv.server import sessions
from server.running import SECONDS, Running, forward, post_bytes, serving, until

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
    more: dict[str, Any] = {"max_requests": 2, "max_context": 512, "exact": True, "reuse": None, "step_tokens": 64}
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


def act(server: Running, action: str, name: str = "talk", **more: str) -> tuple[int, Any]:
    return server.post(ROUTE, {"action": action, "name": name, **more}, authorization="Bearer one")


def listed(server: Running) -> dict[str, Any]:
    """What the server says of each conversation, by name."""
    found = server.ask("GET", ROUTE, headers={"authorization": "Bearer one"})[2]["data"]
    return {each["name"]: each for each in found}


def give_up(server: Running) -> None:
    """All held caches go, as they do where running requests need their pages."""

    def give(engine: Engine) -> None:
        for request in list(engine.scheduler.held):
            engine.scheduler.give_up(request)

    server.llm.owner.run(give)


def test_forget_takes_a_restored_conversation_off_the_disk(llm: LLM, tmp_path: Path) -> None:
    with one_server(llm, tmp_path, **KEYS) as running:
        first, _ = turn(running, FIRST)
    second = then(FIRST, first, "And now?")
    with one_server(llm, tmp_path, **KEYS) as running:
        assert turn(running, second)[1] > 0, "it came back"
        assert act(running, "forget")[0] == 200 and not llm.open_store().saved()
    with one_server(llm, tmp_path, **KEYS) as running:
        assert turn(running, second)[1] == 0


def test_a_saved_conversation_that_was_given_up_is_restored(server: Running) -> None:
    first, _ = turn(server, FIRST)
    second = then(FIRST, first, "And now?")
    assert act(server, "save")[0] == 200
    want = server.llm.owner.run(lambda engine: engine.manager.position(engine.scheduler.held[0].key))
    for _ in range(2):
        give_up(server)
        assert listed(server)["talk"]["where"] == "given up"
        assert act(server, "save")[0] == 409, "there is nothing to save, and what is on the disk stays"
        assert act(server, "restore")[0] == 200
        assert listed(server)["talk"]["cached_tokens"] == want
    give_up(server)
    assert turn(server, second)[1] == want, "a turn restores it, too"


def test_what_was_not_saved_or_is_damaged_is_not_restored(server: Running, tmp_path: Path) -> None:
    turn(server, FIRST)
    assert act(server, "restore")[0] == 200, "it is here"
    give_up(server)
    status, said = act(server, "restore")
    assert status == 404 and "not saved" in said["error"]["message"]
    turn(server, FIRST)
    assert act(server, "save")[0] == 200
    give_up(server)
    for path in (tmp_path / "store" / "parts").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert act(server, "restore")[0] == 409
    assert turn(server, FIRST)[1] == 0


@pytest.mark.parametrize("name", ["talk", None])
def test_a_client_that_left_while_its_prompt_was_read_goes_on_there(server: Running, name: str | None) -> None:
    long = [{"role": "user", "content": " ".join(f"Day {day}: {day * 7 % 17} miles." for day in range(12))}]
    named = {} if name is None else {"prompt_cache_key": name}
    asked = {"messages": long, "temperature": 0, "max_tokens": 8, **named}
    begun, go_on = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 2:  # of its prompt, whose first parts are read
            begun.set()
            assert go_on.wait(SECONDS)

    with forward(server.llm, before):
        with server.connect() as connection:
            connection.sendall(post_bytes(CHAT, asked, authorization="Bearer one"))
            assert begun.wait(SECONDS)
        until(lambda: not server.llm.owner._inbox.empty())  # it is cancelled after this step
        go_on.set()
        until(lambda: not server.service.generations)
    held = server.llm.owner.run(lambda engine: [engine.manager.position(r.key) for r in engine.scheduler.held])
    assert held == ([] if name is None else [192]), "after three steps of 64"
    answer, cached = turn(server, long, name)
    assert cached == sum(held)
    assert answer == turn(server, long, "another")[0]


def test_store_false_is_not_saved_by_an_action_either(server: Running) -> None:
    turn(server, FIRST, store=False)
    status, said = act(server, "save")
    assert status == 409 and "store" in said["error"]["message"] and not server.llm.open_store().saved()
    assert act(server, "fork", to="copy")[0] == 200 and act(server, "save", "copy")[0] == 409
    assert listed(server).keys() == {"talk", "copy"}


def test_forget_drops_what_is_kept_of_its_text_and_of_no_other(smol_llm: LLM, tmp_path: Path) -> None:
    smol_llm.forget()
    text = " ".join(f"Item {i} of the list costs {3 * i} coins." for i in range(18))
    said = {each: [{"role": "user", "content": f"{text} What is it? {each * 90}"}] for each in ("a ", "b ")}
    smol_llm.store = Store(tmp_path)
    try:
        with serving(smol_llm, **KEYS) as running:
            for each, first in said.items():
                turn(running, first, name=each)
            known, later = len(smol_llm.chat_memory.texts), then(said["a "], "x", "And now?")
            before = turn(running, later, name=None)[1]
            assert known == 2 and act(running, "forget", "b ")[0] == 200
            assert len(smol_llm.chat_memory.texts) == known - 1 + 1  # and the answer just now
            assert turn(running, later, name=None)[1] >= before
            assert 0 < turn(running, said["b "], name=None)[1] < before - 64, "what both begin with"
    finally:
        smol_llm.store = None
        smol_llm.forget()
    assert not smol_llm.chat_memory.texts.nbytes
    smol_llm.owner.run(assert_nothing_held)
    with pytest.raises(RequestError, match="salt is bytes"):
        smol_llm.forget("me")  # type: ignore[arg-type]


def test_an_answer_that_forgetting_ends_is_not_remembered(smol: Running) -> None:
    """It may come to its end on the event loop after its text was forgotten."""
    engine, texts = smol.llm.engine, smol.llm.chat_memory.texts
    smol.llm.forget()

    def abort(number: int) -> None:  # on the engine's thread, as `forget` has it
        for request in list(engine.scheduler.running) if number == 6 else ():
            assert request.answer_tokens
            engine.abort(request)

    with forward(smol.llm, abort):
        said, _ = turn(smol, FIRST, max_tokens=30, ignore_eos=True)
    assert said and not len(texts)
    turn(smol, FIRST, max_tokens=30)
    assert len(texts) == 1, "one that came to its end is"
    smol.llm.forget()


def test_forget_ends_the_turn_that_has_the_name_by_then(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another turn ends while a client forgets the conversation."""
    kept, file_name = server.service.sessions, server.service.sessions.file_name
    turn(server, FIRST)
    other = [{"role": "user", "content": "Something else altogether, if you please."}]

    def interrupted(name: sessions.Name) -> str:
        monkeypatch.setattr(kept, "file_name", file_name)
        turn(server, other)
        return file_name(name)

    monkeypatch.setattr(kept, "file_name", interrupted)
    assert act(server, "forget")[0] == 200 and kept.file_name != interrupted
    assert not server.llm.owner.run(lambda engine: len(engine.scheduler.held)), "no name leads to it"
    assert not listed(server)


def test_no_cache_is_held_without_a_name(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def held() -> int:
        return server.llm.owner.run(lambda engine: len(engine.scheduler.held))

    turn(server, FIRST)
    turn(server, [{"role": "user", "content": "Something else altogether, if you please."}], name="other")
    assert held() == 2 and act(server, "save")[0] == 200
    assert act(server, "fork", to="other")[0] == 200
    assert held() == 2, "the fork has the name, and the cache that had it is gone"
    assert act(server, "fork", to="talk")[0] == 200 and held() == 2, "onto itself"
    give_up(server)
    turn(server, FIRST, name="other")
    monkeypatch.setattr(sessions, "MOST", 1)
    assert act(server, "restore")[0] == 200
    assert listed(server).keys() == {"talk"} and held() == 1


def test_a_damaged_conversation_is_read_again(llm: LLM, tmp_path: Path) -> None:
    with one_server(llm, tmp_path, **KEYS) as running:
        first, _ = turn(running, FIRST)
    for path in (tmp_path / "parts").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with one_server(llm, tmp_path, **KEYS) as running:
        assert turn(running, then(FIRST, first, "And now?"))[1] == 0
