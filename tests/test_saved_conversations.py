"""Conversations saved, loaded and forked: each goes on token for token as the one that was never touched."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from long_form import spread

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cache.session import Session
from hybridkv.config import EvictionConfig
from hybridkv.conversation import Conversation
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import Ada, SnapKV

GREEDY = SamplingParams(max_tokens=10)
SEEDED = SamplingParams(max_tokens=10, temperature=1.0, seed=3)
EVICTING = dict(budget=24, window=8, recent=8, page_size=8)
CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": dict(kv_dtype="fp8"),
    "evicted": EVICTING,
    "bounded fp8": EVICTING | dict(kv_dtype="fp8", bounded=True),
}
KINDS = ("llama", "qwen3_5")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder_of("llama")`: a tiny model with a character tokenizer and a chat template."""
    folders: dict[str, Path] = {}

    def build(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            tiny.save(kind, folders[kind])
            write_tokenizer(folders[kind], TEMPLATE)
        return folders[kind]

    return build


@pytest.fixture(scope="module")
def model(folder_of: Callable[[str], Path]) -> Callable[..., LLM]:
    """`model("llama", "evicted")`: opened once for each; `number` tells several alike apart."""
    opened: dict[Any, LLM] = {}

    def build(kind: str, cache: str = "plain", number: int = 0, **more: Any) -> LLM:
        key = (kind, cache, number, *sorted(more.items()))
        if key not in opened:
            config = CacheConfig(**{"kv_dtype": "f32", **CACHES[cache]})
            more = {"max_requests": 3, "max_context": 512, **more}
            opened[key] = LLM(folder_of(kind), device="cpu", dtype="float32", cache=config, **more)
        return opened[key]

    return build


def say(talk: Conversation, text: str, params: SamplingParams | None = None) -> list[int]:
    """The tokens of the answer."""
    talk.params = params or talk.params
    list(talk.send(text))
    assert talk.last is not None
    return talk.last.token_ids


def turns(talk: Conversation) -> list[list[int]]:
    return [say(talk, "And now?", SEEDED), say(talk, "Go on", GREEDY), say(talk, "More", SEEDED)]


def cached(talk: Conversation) -> int:
    assert talk._request is not None
    return talk._request.cached_tokens


def close(*talks: Conversation) -> None:
    for talk in talks:
        talk.close()
    for llm in {talk.llm for talk in talks}:
        assert_nothing_held(llm.engine)


@spread("kind, cache", KINDS, tuple(CACHES))
def test_a_loaded_conversation_goes_on_as_the_one_that_stayed(
    kind: str, cache: str, model: Callable, tmp_path: Path
) -> None:
    here, there = model(kind, cache), model(kind, cache, 1)
    talk = Conversation(here, "Be brief, but say all that there is to say of it.", GREEDY)
    say(talk, "Hello, how are you? I am well."), say(talk, "Really?")
    assert bool(talk._request and talk._request.evictions) == (cache in ("evicted", "bounded fp8"))
    before = [dict(m) for m in talk.messages]
    talk.save(tmp_path / "talk")
    assert talk.messages == before
    other = Conversation.load(there, tmp_path / "talk", GREEDY)
    assert other.messages == before and other.last is not None and other.last.text == before[-1]["content"]
    assert other.last.token_ids == talk.last.token_ids  # type: ignore[union-attr]
    want, found = turns(talk), turns(other)
    assert found == want and other.messages == talk.messages
    assert cached(other) == cached(talk) > 0, "the cache was computed again"
    close(talk, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_turn_after_loading_computes_only_what_is_new(kind: str, model: Callable, tmp_path: Path) -> None:
    here, there = model(kind), model(kind, "plain", 1)
    talk = Conversation(here, params=GREEDY)
    say(talk, "Hello, how are you?")
    held = here.manager.position(talk._request.key)  # type: ignore[union-attr]
    talk.save(tmp_path / "talk")
    other = Conversation.load(there, tmp_path / "talk", GREEDY)
    assert say(other, "Go on") == say(talk, "Go on") and cached(other) == cached(talk) == held
    close(talk, other)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_a_stop_string_ended(kind: str, model: Callable, tmp_path: Path) -> None:
    here, there = model(kind), model(kind, "plain", 1)
    talk = Conversation(here, params=GREEDY)
    list(talk.send("Hello there"))
    stop = talk.messages[-1]["content"][4:6]
    talk.close()
    talk = Conversation(here, params=SamplingParams(max_tokens=10, stop=stop))
    list(talk.send("Hello there"))
    assert talk._request is not None and talk._request.text.stopped == stop
    talk.save(tmp_path / "talk")
    other = Conversation.load(there, tmp_path / "talk")
    assert other._request is not None and other._request.text.stopped == stop
    assert turns(other) == turns(talk) and other.messages == talk.messages
    close(talk, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", (1, 4))
def test_an_answer_that_was_closed_early(kind: str, pieces: int, model: Callable, tmp_path: Path) -> None:
    here, there = model(kind), model(kind, "plain", 1)
    talk = Conversation(here, params=SamplingParams(max_tokens=200))
    stream: Any = talk.send("Tell me everything")
    for _ in range(pieces):
        next(stream)
    with pytest.raises(RequestError, match="still being answered"):
        talk.save(tmp_path / "talk")
    with pytest.raises(RequestError, match="still being answered"):
        talk.fork()
    stream.close()
    talk.save(tmp_path / "talk")
    other = Conversation.load(there, tmp_path / "talk")
    assert other.last is not None and other.last.finish_reason == "abort"
    assert turns(other) == turns(talk) and other.messages == talk.messages
    close(talk, other)


@pytest.mark.parametrize("cache", ("plain", "evicted"))
def test_a_conversation_whose_cache_was_given_up_is_saved_without_it(
    cache: str, model: Callable, tmp_path: Path
) -> None:
    here, there = model("qwen3_5", cache), model("qwen3_5", cache, 1)
    talk = Conversation(here, params=GREEDY)
    say(talk, "Hello, how are you? I am well."), say(talk, "Really?")
    here.owner.run(lambda engine: engine.scheduler.give_up(talk._request))
    assert not here.engine.scheduler.held
    talk.save(tmp_path / "talk")
    assert Session.load(tmp_path / "talk").snapshot is None
    other = Conversation.load(there, tmp_path / "talk")
    assert not there.engine.scheduler.held
    assert turns(other) == turns(talk) and other.messages == talk.messages
    close(talk, other)


def test_a_conversation_without_a_turn_and_one_that_was_closed(model: Callable, tmp_path: Path) -> None:
    here, there = model("llama"), model("llama", "plain", 1)
    talk = Conversation(here, "Be brief.", GREEDY)
    for _ in range(2):
        talk.save(tmp_path / "talk")
        other = Conversation.load(there, tmp_path / "talk", GREEDY)
        assert other.messages == talk.messages
        assert say(other, "Hello") == say(talk, "Hello") and other.messages == talk.messages
        close(talk, other)


CHILD = """
import json, sys
from hybridkv import LLM, CacheConfig, Conversation, SamplingParams
folder, path, cache = sys.argv[1:]
llm = LLM(folder, device="cpu", dtype="float32", cache=CacheConfig(**json.loads(cache)), max_context=512)
talk = Conversation.load(llm, path)
found = []
for text, more in (("And now?", dict(temperature=1.0, seed=3)), ("Go on", dict(temperature=0.0))):
    talk.params = SamplingParams(max_tokens=10, **more)
    list(talk.send(text))
    found.append(talk.last.token_ids)
print(json.dumps({"tokens": found, "cached": talk.last.stats["cached_tokens"], "messages": talk.messages}))
"""


@pytest.mark.parametrize(("kind", "cache"), (("llama", "bounded fp8"), ("qwen3_5", "evicted")))
def test_another_process_goes_on(
    kind: str, cache: str, model: Callable, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    talk = Conversation(model(kind, cache), params=GREEDY)
    say(talk, "Hello, how are you? I am well.")
    talk.save(tmp_path / "talk")
    config = json.dumps({"kv_dtype": "f32", **CACHES[cache]})
    command = [sys.executable, "-c", CHILD, str(folder_of(kind)), str(tmp_path / "talk"), config]
    surroundings = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == [say(talk, "And now?", SEEDED), say(talk, "Go on", GREEDY)]
    assert found["messages"] == talk.messages and found["cached"] == cached(talk) > 0
    close(talk)


# ---- forks


@spread("kind, cache", KINDS, tuple(CACHES))
def test_a_fork_and_its_origin_go_on_as_each_would_alone(kind: str, cache: str, model: Callable) -> None:
    here, there = model(kind, cache), model(kind, cache, 1)
    talk, alone = (Conversation(llm, "Be brief.", GREEDY) for llm in (here, there))
    for each in (talk, alone):
        say(each, "Hello, how are you? I am well.")
    free = here.manager.free_pages()
    fork = talk.fork()
    assert here.manager.free_pages() == free, "a fork takes no pages of its own"
    assert fork.messages == talk.messages and fork.messages is not talk.messages
    assert fork.last is talk.last and fork.params is talk.params
    assert say(fork, "Something else", SEEDED) and cached(fork) > 0
    assert turns(talk) == turns(alone) and cached(talk) == cached(alone) > 0
    assert talk.messages == alone.messages and fork.messages != talk.messages
    alone.close()
    alone = Conversation(there, "Be brief.", GREEDY)
    say(alone, "Hello, how are you? I am well.")
    say(alone, "Something else", SEEDED)
    assert turns(fork) == turns(alone) and fork.messages == alone.messages
    close(talk, fork, alone)


def test_forks_in_several_threads_do_not_mix(model: Callable) -> None:
    llm = model("qwen3_5", "plain", 2, max_requests=2)
    talk = Conversation(llm, params=GREEDY)
    say(talk, "Hello")
    forks = [talk.fork() for _ in range(4)]  # more than there are slots: some compute the past again
    found: dict[int, list[list[int]]] = {}

    def go_on(number: int) -> None:
        found[number] = turns(forks[number])

    threads = [threading.Thread(target=go_on, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = turns(talk)
    assert [found[n] for n in range(4)] == [want] * 4
    close(talk, *forks)


def test_saving_waits_for_the_answer_that_another_thread_reads(model: Callable, tmp_path: Path) -> None:
    llm, there = model("llama"), model("llama", "plain", 1)
    talk = Conversation(llm, params=SamplingParams(max_tokens=60))
    begun, go_on = threading.Event(), threading.Event()

    def answer() -> None:
        try:
            for n, _ in enumerate(talk.send("Hello")):
                if n == 2:
                    begun.set()
                    go_on.wait()
        finally:
            begun.set()

    reader = threading.Thread(target=answer)
    reader.start()
    begun.wait()
    saver = threading.Thread(target=talk.save, args=(tmp_path / "talk",))
    saver.start()
    assert not (tmp_path / "talk").exists()
    go_on.set()
    reader.join(), saver.join()
    other = Conversation.load(there, tmp_path / "talk")
    assert len(other.messages) == 2 and turns(other) == turns(talk)
    close(talk, other)


# ---- settings


def test_what_names_the_model_by_its_files_is_not_found_on_the_engines_thread(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of a large model gigabytes are read for it, and no answer is to wait for that."""
    with LLM(folder_of("llama"), device="cpu", dtype="float32", max_requests=2, max_context=256) as llm:
        plain, threads = llm.manager.model_files, []
        llm.manager.model_files = lambda: threads.append(threading.current_thread()) or plain()
        talk = Conversation(llm, params=GREEDY)
        say(talk, "Hello")
        talk.save(tmp_path / "talk")
        assert threads[0] is threading.current_thread() and Session.load(tmp_path / "talk").files == plain()
        threads.clear()
        document = llm.compress("A text of some words. " * 4, ratio=2, policy="keydiff")
        document.save(tmp_path / "text")
        assert threads[0] is threading.current_thread()
        document.close()
        talk.close()


def test_what_the_cache_keeps_is_saved_and_sampling_is_not(model: Callable, tmp_path: Path) -> None:
    here, there = model("llama", "evicted"), model("llama", "evicted", 1)
    tighter = EvictionConfig(16, window=8, recent=8, policy="tova", decode_every=4)
    for eviction in (tighter, None):
        talk = Conversation(here, params=SEEDED, eviction=eviction)
        say(talk, "Hello, how are you? I am well.")
        talk.save(tmp_path / "talk")
        other = Conversation.load(there, tmp_path / "talk")
        assert other.eviction == eviction and other.params is None
        assert turns(other) == turns(talk)
        close(talk, other)
        changed = Conversation.load(there, tmp_path / "talk", GREEDY, eviction=24)
        assert changed.eviction == 24 and changed.params is GREEDY
        close(changed)


def test_a_policy_of_ones_own_is_given_again(model: Callable, tmp_path: Path) -> None:
    here, there = model("llama", "evicted"), model("llama", "evicted", 1)
    own = EvictionConfig(24, window=8, recent=8, policy=Ada(SnapKV()))
    talk = Conversation(here, params=GREEDY, eviction=own)
    say(talk, "Hello, how are you? I am well.")
    talk.save(tmp_path / "talk")
    with pytest.raises(RequestError, match="give it again"):
        Conversation.load(there, tmp_path / "talk")
    other = Conversation.load(there, tmp_path / "talk", eviction=own)
    assert turns(other) == turns(talk)
    close(talk, other)


THINKING = (
    "{{ bos_token }}{{ tone }}{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{{ eos_token }}{% endfor %}[assistant]{{ '<think>' if enable_thinking else '<think></think>' }}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("thinking", (True, False, None))
def test_tools_thinking_and_variables_shape_the_next_prompt_as_before(thinking: bool | None, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    write_tokenizer(tmp_path, THINKING)
    with LLM(tmp_path, device="cpu", dtype="float32", max_requests=3, max_context=512) as llm:
        talk = Conversation(llm, "Be brief.", GREEDY, tools=TOOLS, thinking=thinking, tone="calm")
        say(talk, "Hello")
        talk.save(tmp_path / "talk")
        other, fork = Conversation.load(llm, tmp_path / "talk"), talk.fork()
        for each in (other, fork):
            assert (each.tools, each.thinking, each.template_variables) == (TOOLS, thinking, {"tone": "calm"})
            assert each.last is not None and talk.last is not None
            assert (each.last.text, each.last.reasoning) == (talk.last.text, talk.last.reasoning)
        assert (other.last.reasoning is not None) == bool(thinking)  # type: ignore[union-attr]
        want = turns(talk)
        assert turns(other) == want and turns(fork) == want
        assert other.messages == fork.messages == talk.messages and other._prompt == fork._prompt == talk._prompt
        close(talk, other, fork)


# ---- what is refused


def assert_refused(llm: LLM, path: Path, words: str) -> None:
    held = list(llm.engine.scheduler.held)
    with pytest.raises(HybridKVError, match=words) as problem:
        Conversation.load(llm, path)
    assert "\n" not in str(problem.value)
    assert llm.engine.scheduler.held == held


def test_another_model_or_cache_is_refused_with_what_differs(
    model: Callable, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    talk = Conversation(model("llama"), params=GREEDY)
    say(talk, "Hello")
    talk.save(tmp_path / "talk")
    assert_refused(model("qwen3_5"), tmp_path / "talk", "another model.*architecture llama there and qwen3_5 here")
    assert_refused(model("llama", "fp8"), tmp_path / "talk", "in f32 there and .* in fp8 here")
    close(Conversation.load(model("llama", "evicted"), tmp_path / "talk"))  # what is lent may be there or not
    assert_refused(model("llama", max_context=16), tmp_path / "talk", "the context here holds 16")
    bf16 = LLM(folder_of("llama"), device="cpu", dtype="bfloat16", max_context=512, max_requests=1)
    assert_refused(bf16, tmp_path / "talk", "weights float32 there and bfloat16 here")
    close(talk)


def test_a_damaged_or_foreign_file_is_refused(model: Callable, tmp_path: Path) -> None:
    llm = model("llama")
    talk = Conversation(llm, params=GREEDY)
    say(talk, "Hello")
    talk.save(tmp_path / "talk")
    data = bytearray((tmp_path / "talk").read_bytes())
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    data[len(data) // 2] ^= 1
    (tmp_path / "altered").write_bytes(data)
    (tmp_path / "text").write_text("hello, I am a text file")
    (tmp_path / "empty").write_bytes(b"")
    llm.engine.session(talk._request, {"other": 1}).save(tmp_path / "no conversation")
    for name, words in (
        ("cut", "damaged"), ("altered", "damaged"), ("text", "not a session"), ("empty", "not a session"),
        ("none", "No such file"), (".", "folder"), ("no conversation", "not well-formed"),
    ):  # fmt: skip
        assert_refused(llm, tmp_path / name, words)
    talk2 = Conversation.load(llm, tmp_path / "talk")
    close(talk, talk2)


BAD = (
    dict(messages=None), dict(messages=[1]), dict(messages=[{}]), dict(messages=[{"role": 3}]), dict(messages="x"),
    dict(prompt=None), dict(settings=None), dict(settings={"llm": 1}), dict(settings={"_request": None}),
    dict(settings={"tools": {}}), dict(settings={"thinking": 1}), dict(settings={"template_variables": []}),
    dict(settings={"template_variables": {"tools": []}}),
    dict(eviction="x"), dict(eviction={}), dict(eviction={"policy": "snapkv"}),
    dict(eviction={"policy": 3, "budget": 4}), dict(eviction={"policy": "snapkv", "budget": -4}),
    dict(eviction={"policy": "snapkv", "budget": 4, "x": 1}), dict(eviction=-5), dict(eviction=0), dict(eviction=True),
    dict(settings={"tools": [1, 2]}), dict(messages=[{"role": "user", "content": {"a": 1}}]),
)  # fmt: skip


@pytest.mark.parametrize("change", BAD, ids=str)
def test_a_file_with_an_odd_conversation_is_refused(change: dict, model: Callable, tmp_path: Path) -> None:
    llm = model("llama")
    good = {"messages": [], "prompt": "", "settings": {}}
    llm.engine.session(None, good).save(tmp_path / "talk")
    Conversation.load(llm, tmp_path / "talk")
    llm.engine.session(None, good | change).save(tmp_path / "talk")
    assert_refused(llm, tmp_path / "talk", "not well-formed")


def test_places_that_cannot_be_written_are_refused_in_a_line(model: Callable, tmp_path: Path) -> None:
    talk = Conversation(model("llama"), params=GREEDY)
    say(talk, "Hello")
    for place, words in ((tmp_path, "a folder has that name"), (tmp_path / "none" / "a", "there is no folder")):
        with pytest.raises(HybridKVError, match=words):
            talk.save(place)
    for odd in (3, None, ""):
        with pytest.raises(RequestError, match="name of a file"):
            talk.save(odd)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="name of a file"):
            Conversation.load(talk.llm, odd)  # type: ignore[arg-type]
    talk.messages[0]["when"] = object()  # type: ignore[assignment]
    with pytest.raises(RequestError, match="plain JSON"):
        talk.save(tmp_path / "a")
    del talk.messages[0]["when"]
    assert not list(tmp_path.iterdir())
    talk.save(tmp_path / "a")
    first = (tmp_path / "a").read_bytes()
    say(talk, "More")
    talk.save(str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() != first and (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    close(talk)


def test_a_read_only_folder_is_refused_in_a_line(
    model: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Conversation(model("llama"), params=GREEDY)
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root, whom nothing is denied
    with pytest.raises(HybridKVError, match="no permission"):
        talk.save(tmp_path / "a")


def test_loading_needs_no_slot(model: Callable, tmp_path: Path) -> None:
    llm = model("qwen3_5", "plain", 3, max_requests=1)
    talk = Conversation(llm, params=GREEDY)
    say(talk, "Hello")
    talk.save(tmp_path / "talk")
    other = Conversation.load(llm, tmp_path / "talk", GREEDY)
    assert llm.engine.scheduler.held == [talk._request, other._request]
    want = say(talk, "Go on")
    assert say(other, "Go on") == want and cached(other) == cached(talk) > 0
    running = llm.stream([5, 6, 7], SamplingParams(max_tokens=40))
    next(running)
    third = Conversation.load(llm, tmp_path / "talk", GREEDY)
    running.close()
    assert say(third, "Go on") == want and cached(third) > 0
    close(talk, other, third)


def test_an_interrupt_while_loading_or_forking_leaves_nothing_behind(
    model: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches the caller while the engine's thread does the work."""
    llm = model("llama")
    talk = Conversation(llm, params=GREEDY)
    say(talk, "Hello")
    talk.save(tmp_path / "talk")
    held = list(llm.engine.scheduler.held)
    run, left = llm.owner.run, 0

    def interrupted(work: Callable) -> Any:
        nonlocal left
        left -= 1
        found = run(work)
        if left == 0:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(llm.owner, "run", interrupted)
    for calls, call in ((2, lambda: Conversation.load(llm, tmp_path / "talk")), (1, talk.fork)):
        left = calls
        with pytest.raises(KeyboardInterrupt):
            call()
        assert llm.engine.scheduler.held == held
    monkeypatch.undo()
    assert say(talk.fork(), "Go on") == say(talk, "Go on")
