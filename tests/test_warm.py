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

SECONDS = 120.0  # that anything here may take, on a busy machine too
ASK = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=list(range(3, 97, 2)))  # ends soon, by itself
LEAST = 100
KEEPS = THINKING_TEMPLATE.replace("preserve_thinking is true or loop.index0 > asked.last", "true")
CALL = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}]
LOOP: list[dict[str, Any]] = [
    {"role": "system", "content": " ".join(f"Rule {i}: be brief." for i in range(30))},
    {"role": "user", "content": "How deep is it?"},
    {"role": "assistant", "content": "", "reasoning_content": "I have to look.", "tool_calls": CALL},
    {"role": "tool", "tool_call_id": "c1", "content": " ".join(f"At {i} m it is dark." for i in range(12))},
]
MORE = {"role": "user", "content": "And how wide?"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Of models with three layers, some of them recurrent or none."""
    made: dict[tuple[str, str], Path] = {}

    def folder(kind: str, template: str = THINKING_TEMPLATE) -> Path:
        if (kind, template) not in made:
            made[kind, template] = path = tmp_path_factory.mktemp(kind)
            config, model, settings = tiny.KINDS[kind]
            if kind == "qwen3_5":
                layers = ["linear_attention", "linear_attention", "full_attention"]
                settings = {**settings, "num_hidden_layers": len(layers), "layer_types": layers}
            torch.manual_seed(5)
            model(config(**settings)).save_pretrained(path)
            write_tokenizer(path, template)
        return made[kind, template]

    return folder


@pytest.fixture(scope="module")
def opened(folders: Callable[..., Path]) -> Iterator[Callable[..., LLM]]:
    """A model that has read nothing; those with the same settings are one."""
    llms: dict[str, LLM] = {}

    def open_llm(kind: str = "qwen3_5", template: str = THINKING_TEMPLATE, warm: bool = True, **given: Any) -> LLM:
        name = str((kind, template, warm, given))
        if name not in llms or llms[name].owner.closed:
            reuse = ReuseConfig(checkpoints=1 << 24, warm=warm, warm_least=LEAST)
            settings = {"exact": True, "max_requests": 2, "max_context": 2048, "reuse": reuse, **given}
            llms[name] = LLM(folders(kind, template), device="cpu", dtype="float32", **settings)
        llm = llms[name]
        llm.forget()
        counts(llm).update(dict.fromkeys(counts(llm), 0))
        return llm

    yield open_llm
    for llm in llms.values():
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


@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("llama", marks=pytest.mark.slow)])
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
    view = len(llm.encode_chat(following(first))) - len(f"{MORE['content']}</s>[assistant]<think>") + len("/s>")
    assert with_it == view // q * q, "it was not read to where the user speaks"
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
    llm = opened(step_tokens=64)
    tickets, came, beside = [], [], []

    def come(number: int, tokens: int) -> None:
        if tokens == 30:
            beside.append(len(llm.manager.slot_of))
        if llm.warm._now is not None and not came and counts(llm)["warm_tokens"]:  # type: ignore[union-attr]
            came.append(number)
            tickets.append(Ticket(lambda engine: engine.add([5] * 30, SamplingParams(max_tokens=2, ignore_eos=True))))
            llm.owner.post(tickets)

    with forwards(llm, come) as passes:
        first = llm.chat(LOOP, ASK)
        until(lambda: bool(came))
        tickets[0].wait()
        settled(llm)
    assert tickets[0].result().error is None and beside == [1], "the reading kept its slot"
    assert passes[came[0] : came[0] + 3] == [64, 30, 1], "it waited for more than the chunk in hand"
    assert passes[came[0] + 3 :].count(64) > 1, "it was not gone on with"
    assert [c.kind for c in llm.manager.reuse.checkpoints.all.values()].count("warm") == 1  # type: ignore[union-attr]
    read, second = counts(llm)["warm_tokens"], llm.chat(following(first), ASK)
    llm = opened(step_tokens=64)
    llm.chat(LOOP, ASK)
    settled(llm)
    assert counts(llm)["warm_tokens"] == read, "what was read was read again"
    unstopped = llm.chat(following(first), ASK)
    assert second.stats["cached_tokens"] == unstopped.stats["cached_tokens"] > 512 + LEAST
    assert second.token_ids == unstopped.token_ids == llm.chat(following(first), ASK, cache=False).token_ids


@pytest.mark.parametrize("what", ["all", "salt", "text"])
def test_what_is_forgotten_is_not_read_any_further(what: str, opened: Callable[..., LLM]) -> None:
    llm, reading, go = opened(step_tokens=64), threading.Event(), threading.Event()  # it takes several chunks

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
    found = llm.chat(following(first), ASK, cache="read")
    assert found.stats["cached_tokens"] == 0


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
    assert llm.chat(following(first), ASK).stats["cached_tokens"] > 512


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


def test_a_reading_that_fails_costs_nobody_anything(
    opened: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
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


def test_it_takes_no_page_that_somebody_holds(opened: Callable[..., LLM]) -> None:
    """A conversation's cache is held and a text is pinned; the other pages do not do for what is to be read."""
    llm = opened()
    pinned, kept = llm.prefix("P" * 200), Conversation(llm, params=ASK)
    list(kept.send("Remember this. " * 8))
    first = llm.chat(LOOP, ASK)
    settled(llm)
    read = counts(llm)["warm_tokens"]
    assert read > LEAST
    said = [*llm.encode_chat(LOOP), *first.token_ids]
    view = [*said[:600], *[9] * 1400]

    def take(engine: Engine) -> list[tuple[Any, Any]]:
        """All pages but those of two columns, beside what is read."""
        reuse, found = engine.manager.reuse, []
        assert reuse is not None
        for name, table in engine.manager.tables.items():
            _, streams, per = reuse.parts[name]
            pages = table.allocator.acquire(table.allocator.free - 2 * streams * per)
            table.other_owners.append(lambda pages=pages: pages)
            found.append((table, pages))
        return found

    def give(engine: Engine) -> None:
        for table, pages in taken:
            table.other_owners.pop()
            table.allocator.release(pages)

    def state(engine: Engine) -> tuple[list[Any], int, int]:
        reuse = engine.manager.reuse
        assert reuse is not None
        return list(engine.scheduler.held), reuse.columns.count, len(reuse.pins)

    before, taken = llm.owner.run(state), llm.owner.run(take)
    try:
        llm.warm.offer(b"", said, len(said) - 1, lambda: (view, []))  # type: ignore[union-attr]
        settled(llm)
        assert llm.owner.run(state) == before and len(before[0]) == 1 and counts(llm)["warm_tokens"] == read
    finally:
        llm.owner.run(give)
    llm.warm.offer(b"", said, len(said) - 1, lambda: (view, []))  # type: ignore[union-attr]
    settled(llm)
    assert llm.owner.run(state)[0] == before[0] and counts(llm)["warm_tokens"] > read + 1024
    kept.close()
    pinned.drop()


def test_a_conversation_in_the_only_slot_is_read_ahead_too(opened: Callable[..., LLM]) -> None:
    """As `hybridkv chat` has it: its held cache leaves the slot, and goes on from there if it fits."""
    llm = opened(max_requests=1)
    said = "I have to think. " * 3 + "</think>" + "It is deep there. " * 8
    script = [*llm.tokenizer.encode(said, bos=False), 2]  # type: ignore[union-attr]

    def follow(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -100.0).index_fill(0, torch.tensor(script[len(ids)]), 100.0)

    talk = Conversation(llm, LOOP[0]["content"], SamplingParams(temperature=0, logits_hook=follow))
    list(talk.send("How deep is it?"))
    assert talk.last is not None and talk.last.finish_reason == "stop" and talk.last.text == said[-18 * 8 :]
    settled(llm)
    assert counts(llm)["warm_tokens"] > LEAST
    assert llm.owner.run(lambda engine: [held.key in engine.manager.frozen for held in engine.scheduler.held]) == [True]
    talk.params = ASK
    list(talk.send("And how wide?"))
    second, messages = talk.last, talk.messages[:-1]
    assert second is not None and second.stats["cached_tokens"] > len(llm.encode_chat(messages[:2])) + 64
    assert second.token_ids == llm.chat(messages, ASK, cache=False).token_ids
    talk.close()
    settled(llm)
    llm.owner.run(assert_nothing_held)


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
