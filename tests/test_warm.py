"""Next turns that are read before they come: what they save, and that nobody else notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from thinking_template import THINKING_TEMPLATE

from engine.ascii_tokenizer import write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, Conversation, ReuseConfig, SamplingParams
from hybridkv.cache.reuse import Reuse
from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import Ticket
from hybridkv.errors import HybridKVError
from hybridkv.request import Request

SECONDS = 120.0  # that anything here may take, on a busy machine too
ASK = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=list(range(3, 97, 2)))  # ends soon, by itself
LEAST = 100
KEEPS = THINKING_TEMPLATE.replace("preserve_thinking is true or loop.index0 > asked.last", "true")
CALL = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}]
LOOP: list[dict[str, Any]] = [
    {"role": "system", "content": " ".join(f"Rule {i}: be brief." for i in range(8))},
    {"role": "user", "content": "How deep is it?"},
    {"role": "assistant", "content": "", "reasoning_content": "I have to look.", "tool_calls": CALL},
    {"role": "tool", "tool_call_id": "c1", "content": " ".join(f"At {i} m it is dark." for i in range(18))},
]
MORE = {"role": "user", "content": "And how wide?"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, str], Path] = {}

    def folder(kind: str, template: str = THINKING_TEMPLATE) -> Path:
        if (kind, template) not in made:
            made[kind, template] = path = tmp_path_factory.mktemp(kind)
            tiny.save(kind, path)
            write_tokenizer(path, template)
        return made[kind, template]

    return folder


@pytest.fixture
def opened(folders: Callable[..., Path]) -> Iterator[Callable[..., LLM]]:
    llms: list[LLM] = []

    def open_llm(
        kind: str = "qwen3_5", template: str = THINKING_TEMPLATE, warm: bool = True, **given: Any
    ) -> LLM:
        reuse = ReuseConfig(checkpoints=1 << 24, warm=warm, warm_least=LEAST)
        settings = {"exact": True, "max_requests": 2, "max_context": 1024, "reuse": reuse, **given}
        llms.append(LLM(folders(kind, template), device="cpu", dtype="float32", **settings))
        return llms[-1]

    yield open_llm
    for llm in llms:
        llm.close()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def settled(llm: LLM) -> None:
    """Until all that is read ahead was read; then nothing is held, and every count is true."""
    if llm.warm is not None:
        until(lambda: not llm.warm.busy)  # type: ignore[union-attr]
    llm.owner.run(check)


def check(engine: Engine) -> None:
    assert not any(key.number == -3 for key in engine.manager.slot_of), "a reading still holds its slot"
    engine.manager.check_integrity()
    if engine.manager.reuse is not None:
        engine.manager.reuse.check()


def counts(llm: LLM) -> dict[str, int]:
    assert llm.manager.reuse is not None
    return llm.manager.reuse.counts


def following(answer: Any) -> list[dict[str, Any]]:
    """The next turn's messages."""
    said = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning or ""}
    return [*LOOP, said, MORE]


@contextmanager
def forwards(llm: LLM, before: Callable[[int, int], None] = lambda number, tokens: None) -> Iterator[list[int]]:
    """Tokens of each forward pass; `before(number, tokens)` is called first, on the engine's thread."""
    runner, passes = llm.engine.runner, []
    original = runner.forward

    def called(inputs: Any) -> Any:
        passes.append(len(inputs.tokens))
        before(len(passes) - 1, passes[-1])
        return original(inputs)

    runner.forward = called  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        runner.forward = original  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["qwen3_5", "llama"])
def test_a_next_turn_was_read_before_it_came_and_answers_as_cold(kind: str, opened: Callable[..., LLM]) -> None:
    found = {}
    for warm in (True, False):
        llm = opened(kind, warm=warm)
        first = llm.chat(LOOP, ASK)
        assert first.finish_reason == "stop"
        settled(llm)
        second = llm.chat(following(first), ASK)
        settled(llm)
        found[warm] = second
        cold = llm.chat(following(first), ASK, cache=False)
        assert second.token_ids == cold.token_ids and cold.stats["cached_tokens"] == 0
    q = llm.manager.reuse.q  # type: ignore[union-attr]
    with_it, without = (found[warm].stats["cached_tokens"] for warm in (True, False))
    assert with_it - without > LEAST and with_it % q == 0
    view = len(llm.encode_chat([*following(first)[:-1], {"role": "user", "content": ""}], ))
    assert view - q - 40 < with_it <= view, "it was not read to where the user speaks"
    assert found[True].reuse["cached"] == with_it and found[True].reuse["tier"] == "device"
    assert found[True].reuse["cached"] + found[True].reuse["read"] == found[True].prompt_tokens


def test_what_was_read_ahead_is_counted_once_and_is_no_prompt(opened: Callable[..., LLM]) -> None:
    llm = opened()
    first = llm.chat(LOOP, ASK)
    before = dict(counts(llm))
    settled(llm)
    after = counts(llm)
    read = after["warm_tokens"]
    assert read > LEAST and after["warm_hits"] == 0
    assert {name: after[name] for name in before if not name.startswith("warm")} | {"cuts": 0} == {
        name: value for name, value in before.items() if not name.startswith("warm")
    } | {"cuts": 0}
    assert [c.kind for c in llm.manager.reuse.checkpoints.all.values()].count("warm") == 1  # type: ignore[union-attr]
    for _ in range(2):
        llm.chat(following(first), ASK)
        settled(llm)
    assert counts(llm)["warm_hits"] == 1 and LEAST < counts(llm)["warm_hit_tokens"] <= read


def test_a_request_that_comes_is_served_at_the_next_chunk_and_what_was_read_stays(opened: Callable[..., LLM]) -> None:
    llm, came = opened(), threading.Event()
    tickets: list[Ticket] = []

    def come(number: int, tokens: int) -> None:
        if llm.warm._now is not None and not came.is_set() and counts(llm)["warm_tokens"]:  # type: ignore[union-attr]
            tickets.append(Ticket(lambda engine: engine.add([5] * 30, SamplingParams(max_tokens=2, ignore_eos=True))))
            llm.owner.post(tickets)
            came.set()

    with forwards(llm, come) as passes:
        first = llm.chat(LOOP, ASK)
        begin = len(passes)
        assert came.wait(SECONDS)
        tickets[0].wait()
        request = tickets[0].result()
        settled(llm)
    others = [i for i in range(begin, len(passes)) if passes[i] == 30]
    assert request.error is None and len(others) == 1
    assert others[0] == begin + 2, "it waited for more than the chunk in hand"
    assert sum(passes[others[0] + 2 :]) > 0, "it was not gone on with"
    again = opened(warm=True)
    again.chat(LOOP, ASK)
    settled(again)
    assert counts(llm)["warm_tokens"] == counts(again)["warm_tokens"], "what was read was read again"
    assert [c.kind for c in llm.manager.reuse.checkpoints.all.values()].count("warm") == 1  # type: ignore[union-attr]
    second, unstopped = (each.chat(following(first), ASK) for each in (llm, again))
    assert second.stats["cached_tokens"] == unstopped.stats["cached_tokens"]
    assert second.token_ids == unstopped.token_ids == llm.chat(following(first), ASK, cache=False).token_ids


@pytest.mark.parametrize("what", ["all", "salt", "text"])
def test_what_is_forgotten_is_not_read_any_further(what: str, opened: Callable[..., LLM]) -> None:
    llm, reading, go = opened(), threading.Event(), threading.Event()

    def wait(number: int, tokens: int) -> None:
        if llm.warm._now is not None and counts(llm)["warm_tokens"]:  # type: ignore[union-attr]
            reading.set()
            assert go.wait(SECONDS)

    with forwards(llm, wait) as passes:
        first = llm.chat(LOOP, ASK)
        assert reading.wait(SECONDS)
        text = [*llm.encode_chat(LOOP), *first.token_ids]
        asked = {"all": {}, "salt": {"salt": b""}, "text": {"text": text}}[what]
        read, forgetting = len(passes), threading.Thread(target=llm.forget, kwargs=asked)
        forgetting.start()
        until(lambda: not llm.warm.busy)  # type: ignore[union-attr]
        go.set()
        forgetting.join(SECONDS)
        settled(llm)
        assert len(passes) == read, "it was read on"
    reuse = llm.manager.reuse
    assert reuse is not None and not reuse.columns.count and not reuse.checkpoints.all
    assert llm.chat(following(first), ASK).stats["cached_tokens"] == 0
    settled(llm)


def test_a_forgotten_text_takes_what_was_read_ahead_with_it_and_nothing_of_others(opened: Callable[..., LLM]) -> None:
    llm = opened()
    other = [*LOOP[:-1], LOOP[-1] | {"content": "Nobody knows. " * 20}]
    first, second = llm.chat(LOOP, ASK), llm.chat(other, ASK)
    settled(llm)
    llm.forget(text=[*llm.encode_chat(LOOP), *first.token_ids])
    settled(llm)
    assert llm.chat([*other, *following(second)[-2:]], ASK).stats["cached_tokens"] > 300
    shared = llm.chat(following(first), ASK, cache="read").stats["cached_tokens"]
    assert shared <= len(llm.encode_chat(LOOP[:2])), "its next turn was still there"


def test_nothing_is_read_ahead_where_the_template_keeps_everything(opened: Callable[..., LLM]) -> None:
    llm = opened(template=KEEPS)
    with forwards(llm) as passes:
        first = llm.chat(LOOP, ASK)
        told = len(passes)
        settled(llm)
        assert len(passes) == told and counts(llm)["warm_tokens"] == 0
    assert llm.chat(following(first), ASK).stats["cached_tokens"] > len(llm.encode_chat(LOOP)) - 3


@pytest.mark.parametrize(
    "given",
    [
        {"cache": False}, {"cache": "read"}, {"cache": "write"}, {"params": SamplingParams(max_tokens=2)},
        {"params": SamplingParams(max_tokens=40, n=2, stop_token_ids=ASK.stop_token_ids)}, {"eviction": 64},
    ],
    ids=["off", "read", "write", "cut", "two answers", "budget"],
)  # fmt: skip
def test_some_turns_are_not_read_ahead(given: dict[str, Any], opened: Callable[..., LLM]) -> None:
    llm = opened()
    llm.chat(LOOP, **{"params": ASK, **given})
    settled(llm)
    assert counts(llm)["warm_tokens"] == 0
    llm.chat([LOOP[0] | {"content": "S" * 200}, *LOOP[1:]], ASK)  # but this one is
    settled(llm)
    assert counts(llm)["warm_tokens"] > LEAST


def test_a_template_that_fails_costs_the_reading_alone(opened: Callable[..., LLM]) -> None:
    fails = "{%- if messages[-1].content == 'a' %}{{- raise_exception('No.') }}{% endif %}" + THINKING_TEMPLATE
    llm = opened(template=fails)
    first = llm.chat(LOOP, ASK)
    settled(llm)
    assert counts(llm)["warm_tokens"] == 0
    assert llm.chat(following(first), ASK).finish_reason == "stop"


def test_a_reading_that_fails_costs_nobody_anything(opened: Callable[..., LLM], caplog: pytest.LogCaptureFixture) -> None:
    llm = opened()

    def fail(number: int, tokens: int) -> None:
        if llm.warm._now is not None:  # type: ignore[union-attr]
            raise RuntimeError("injected")

    with forwards(llm, fail):
        first = llm.chat(LOOP, ASK)
        settled(llm)
    assert "injected" in caplog.text and counts(llm)["warm_tokens"] == 0
    assert llm.chat(following(first), ASK).finish_reason == "stop"
    settled(llm)
    llm.owner.run(assert_nothing_held)


def test_numbers_that_are_none_are_not_kept(opened: Callable[..., LLM]) -> None:
    llm = opened()
    original = llm.engine.runner.forward

    def broken(inputs: Any) -> Any:
        logits = original(inputs)
        return logits if llm.warm._now is None else torch.full_like(logits, float("nan"))  # type: ignore[union-attr]

    llm.engine.runner.forward = broken  # type: ignore[method-assign]
    first = llm.chat(LOOP, ASK)
    settled(llm)
    llm.engine.runner.forward = original  # type: ignore[method-assign]
    assert counts(llm)["warm_tokens"] == 0 and not any(c.warm for c in llm.manager.reuse.columns)  # type: ignore[union-attr]
    cold = llm.chat(following(first), ASK, cache=False)
    assert llm.chat(following(first), ASK).token_ids == cold.token_ids


def test_no_held_cache_and_no_pinned_text_makes_room(opened: Callable[..., LLM]) -> None:
    """A turn that fits beside them, and whose next one does not."""
    llm = opened(max_context=640, memory=tiny_memory(640))
    kept = Conversation(llm, params=ASK)
    list(kept.send("Remember this. " * 8))
    settled(llm)
    held = kept._request
    assert held is not None

    def fill(engine: Engine) -> Request:
        """Somebody takes all pages but those of a hundred tokens."""
        free = engine.manager.pages_to_be_had()
        for name, table in engine.manager.tables.items():
            taken.append((table, table.allocator.acquire(free[name] - free[name] // 4)))
        return held

    taken: list[Any] = []
    llm.owner.run(fill)
    before = llm.owner.run(lambda engine: list(engine.scheduler.held))
    llm.chat(LOOP[:2], ASK)
    settled(llm)
    llm.warm.offer(b"", [3] * 80, 70, lambda: ([3] * 64 + [4] * 500, []))  # type: ignore[union-attr]
    llm.owner.run(lambda engine: [table.allocator.release(pages) for table, pages in taken])
    settled(llm)
    assert llm.owner.run(lambda engine: list(engine.scheduler.held)) == before == [held]


def tiny_memory(tokens: int) -> int | None:
    return None


def test_a_conversation_in_the_only_slot_is_read_ahead_too(opened: Callable[..., LLM]) -> None:
    """As `hybridkv chat` has it: its held cache leaves the slot, and loses nothing by that."""
    cached = {}
    for warm in (True, False):
        llm = opened(max_requests=1, warm=warm)
        talk = Conversation(llm, params=ASK)
        talk.messages = [dict(message) for message in LOOP[:1]]
        params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True, stop_token_ids=[])
        talk.params = params
        list(talk.send("How deep? " * 30))
        settled(llm)
        cached[warm] = counts(llm)["warm_tokens"]
    assert cached == {True: 0, False: 0}, "an answer that was cut is no whole turn"


def test_closing_ends_a_reading(opened: Callable[..., LLM]) -> None:
    llm, reading = opened(), threading.Event()

    def tell(number: int, tokens: int) -> None:
        if llm.warm._now is not None:  # type: ignore[union-attr]
            reading.set()

    with forwards(llm, tell):
        llm.chat(LOOP, ASK)
        assert reading.wait(SECONDS)
        llm.close()
    reuse = llm.manager.reuse
    assert isinstance(reuse, Reuse) and not llm.manager.slot_of
    llm.warm.offer(b"", [1, 2, 3], 2, lambda: ([1], []))  # type: ignore[union-attr]
    assert not llm.warm.busy  # type: ignore[union-attr]


def test_settings_are_checked() -> None:
    with pytest.raises(HybridKVError, match="warm must be True or False, not 1"):
        ReuseConfig(warm=1)  # type: ignore[arg-type]
    with pytest.raises(HybridKVError, match="warm_least must be a number of tokens"):
        ReuseConfig(warm_least=-1)
    assert not ReuseConfig().warm and ReuseConfig().warm_least == 2048
