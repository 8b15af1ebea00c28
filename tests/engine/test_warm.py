"""Reading ahead of a next turn: whatever stops it, and wherever, who goes on from it answers as cold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.driving import assert_nothing_held, prompt
from engine.reusing import Cold, ask, check, poison, same
from hybridkv.cache.lookup import Asked
from hybridkv.cache.reuse import Reuse
from hybridkv.engine.engine import Engine
from hybridkv.engine.warm import WarmReader
from hybridkv.errors import HybridKVError

SALT = b"mine"
SECONDS = 60.0


def reuse_of(engine: Engine) -> Reuse:
    assert engine.manager.reuse is not None
    return engine.manager.reuse


def read(
    engine: Engine, reader: WarmReader, said: Sequence[int], view: Sequence[int], stops: int = 0, salt: bytes = SALT
) -> int:
    """Have a view read, stopped after so many chunks each time (0: never), with all else hostile; chunks it took."""
    reader.offer(salt, said, len(said) - 1, lambda: (list(view), []))
    end, chunks = time.monotonic() + SECONDS, 0
    while reader.busy:
        assert time.monotonic() < end
        step = reader.step(engine)
        chunks += step
        if step and stops and chunks % stops == 0:
            reader.pause(engine)
            check(engine)
            poison(engine)
    check(engine)
    assert not engine.manager.slot_of
    return chunks


@pytest.fixture(scope="module")
def build(engine_of: Callable, two_layers: Path) -> Callable[..., Engine]:
    """Exact engines; the hybrid has two layers."""
    return lambda kind, **how: engine_of(kind, exact=True, folder=two_layers if kind == "qwen3_5" else None, **how)


@pytest.fixture(scope="module")
def cold(build: Callable) -> Callable[[str], Cold]:
    made: dict[str, Cold] = {}
    return lambda kind: made.setdefault(kind, Cold(lambda: build(kind)))


@pytest.mark.parametrize("stops", [0, 1])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_view_of_any_length_stopped_anywhere_gives_the_bits_of_a_cold_run(
    kind: str, stops: int, build: Callable, cold: Callable
) -> None:
    engine = build(kind, rows=4)
    q = reuse_of(engine).q
    for i, (parts, length) in enumerate(((q + 5, 4 * q + 1), (2 * q - 1, 5 * q - 1), (2 * q, 3 * q))):
        said = prompt(3 * q + 9, seed=10 * i)
        view = [*said[:parts], *prompt(length - parts, seed=10 * i + 1)]
        view[parts] = (said[parts] + 1) % 90 + 3
        ask(engine, said, salt=SALT)
        before = dict(reuse_of(engine).counts)
        read(engine, WarmReader(0), said, view, stops)
        poison(engine)
        there = length // q * q
        asked = [*view, *prompt(7, seed=10 * i + 2)]
        cut = ask(engine, asked, salt=b"other")
        assert cut.cached_tokens == 0 and same(cut, cold(kind)(asked)), "another salt has it"
        found = ask(engine, asked, salt=SALT)
        assert found.cached_tokens == there and same(found, cold(kind)(asked))
        counts = reuse_of(engine).counts
        assert counts["warm_hits"] == before["warm_hits"] + 1
        assert counts["warm_hit_tokens"] - before["warm_hit_tokens"] == there - parts // q * q
        assert counts["lookups"] == before["lookups"] + 2, "reading ahead is no prompt"
    assert_nothing_held(engine)


def test_a_state_that_is_not_its_own_shows(build: Callable, cold: Callable) -> None:
    engine, said = build("qwen3_5", rows=4), prompt(200)
    view = [*said[:70], *prompt(130, seed=4)]
    ask(engine, said)
    read(engine, WarmReader(0), said, view, salt=b"")
    [deep] = [c for c in reuse_of(engine).checkpoints.all.values() if c.kind == "warm"]
    engine.manager.state.reset(deep.row)
    found = ask(engine, [*view, 5, 6, 7])
    assert found.cached_tokens == deep.position == 192 and not same(found, cold("qwen3_5")([*view, 5, 6, 7]))


def test_a_state_that_cannot_be_kept_stops_nobody(build: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, said, reader = build("qwen3_5", rows=4, step_tokens=64), prompt(100), WarmReader(0)
    ask(engine, said)
    view, end = [*said[:70], *prompt(400, seed=4)], time.monotonic() + SECONDS
    reader.offer(b"", said, len(said) - 1, lambda: (view, []))
    while not reader.step(engine):
        assert time.monotonic() < end

    def fails(*_: object) -> None:
        raise HybridKVError("planted")

    monkeypatch.setattr("hybridkv.engine.warm.keep_state", fails)
    reader.pause(engine)
    assert not reader.busy and not engine.manager.slot_of
    ask(engine, [*view, 5])
    assert_nothing_held(engine)


def test_stopping_keeps_one_state_and_reads_nothing_twice(build: Callable) -> None:
    taken = {}
    for stops in (0, 1):
        engine, said = build("qwen3_5", rows=4, step_tokens=64), prompt(100)
        ask(engine, said)
        read(engine, WarmReader(0), said, [*said[:70], *prompt(400, seed=4)], stops, salt=b"")
        taken[stops] = reuse_of(engine).counts["warm_tokens"]
        assert sorted(c.kind for c in reuse_of(engine).checkpoints.all.values() if c.kind == "warm") == ["warm"]
        assert not any(column.lost for column in reuse_of(engine).columns), "nothing had to make room"
    assert taken[0] == taken[1] > 0


def test_what_somebody_else_has_read_meanwhile_is_not_read_on(build: Callable) -> None:
    """The next turn came before its view was read to the end."""
    engine, said = build("llama", rows=0), prompt(100)
    reader, view = WarmReader(0), [*said[:70], *prompt(330, seed=4)]
    ask(engine, said)
    reader.offer(b"", said, 99, lambda: (view, []))
    end = time.monotonic() + SECONDS
    while not reuse_of(engine).counts["warm_tokens"]:
        assert time.monotonic() < end
        reader.step(engine)
    reader.pause(engine)
    ask(engine, [*view, *prompt(20, seed=8)])
    done = reuse_of(engine).counts["warm_tokens"]
    while reader.busy:
        reader.step(engine)
    assert reuse_of(engine).counts["warm_tokens"] == done < 300
    check(engine)


def test_only_what_is_new_and_long_enough_is_read(build: Callable) -> None:
    engine, said = build("llama", rows=0), prompt(200)
    q = reuse_of(engine).q
    ask(engine, said)
    for least, view in ((0, [*said, 5, 6]), (0, said[:150]), (4 * q, [*said[:100], *prompt(3 * q, seed=4)])):
        read(engine, WarmReader(least), said, view, salt=b"")
        assert not reuse_of(engine).counts["warm_tokens"], (least, len(view))
    for parts in (5, 32):
        read(engine, WarmReader(4 * q), prompt(64, seed=9), [*prompt(parts, seed=9), *prompt(300, seed=4)], salt=b"")
        assert not reuse_of(engine).counts["warm_tokens"], "its conversation is not kept"
    read(engine, WarmReader(4 * q), said, [*said[:100], *prompt(7 * q, seed=4)], salt=b"")
    assert reuse_of(engine).counts["warm_tokens"] > 4 * q


def test_what_goes_on_as_it_was_computed_is_not_read_again(build: Callable) -> None:
    """Its conversation has a cache of its own, or a tail; there is no other state here."""
    engine, said = build("qwen3_5", rows=4), prompt(200)
    reuse_of(engine).tails = False
    ask(engine, said)
    read(engine, WarmReader(0), said, [*said, 5, 6, 7], salt=b"")
    assert not reuse_of(engine).counts["warm_tokens"]


def test_of_many_the_oldest_are_passed_over_and_those_that_were_closed(build: Callable) -> None:
    engine, said = build("llama", rows=0), prompt(100)
    ask(engine, said)
    reader, made = WarmReader(0), list[int]()

    def make(number: int) -> Callable[[], tuple[list[int], list[tuple[int, str]]]]:
        def tokens() -> tuple[list[int], list[tuple[int, str]]]:
            made.append(number)
            raise ValueError("this one cannot be shown")

        return tokens

    for number in range(20):
        reader.offer(b"", said, 99, make(number))
    end = time.monotonic() + SECONDS
    while reader.busy:
        assert time.monotonic() < end
        reader.step(engine)
    assert sorted(made) == list(range(4, 20)) and made[0] == 19
    reader.close()
    reader.offer(b"", said, 99, make(20))
    assert not reader.step(engine) and not reader.busy and len(made) == 16


@pytest.mark.parametrize("known", [False, True], ids=["before it is made", "after it"])
def test_a_view_whose_conversation_has_gone_on_is_not_read_once_that_is_forgotten(build: Callable, known: bool) -> None:
    engine, said, reader = build("llama", rows=0), prompt(200), WarmReader(0)
    reuse, view = reuse_of(engine), [*said[:70], *prompt(230, seed=4)]
    turn = [*view, *prompt(20, seed=5)]
    ask(engine, said)
    may, made = threading.Event(), threading.Event()

    def make() -> tuple[list[int], list[tuple[int, str]]]:
        assert may.wait(SECONDS)
        return view, []

    reader.wake = made.set
    reader.offer(b"", said, 199, make)
    made.clear()
    assert not reader.step(engine)  # from here on it is made
    if known:
        may.set()
        assert made.wait(SECONDS)
    text = ask(engine, turn).tokens  # the next turn comes before anything is read, and then all of it is forgotten
    reader.forget(b"", text)
    reuse.forget_text(b"", np.array(text, np.int32))
    may.set()
    assert made.wait(SECONDS)
    assert not reader.step(engine) and not reader.busy and not reuse.counts["warm_tokens"]
    assert reuse.lookup(Asked(b"", np.array(view, np.int32), 300, 300)).cached <= 70
    check(engine)


def test_a_long_chunk_makes_the_next_ones_shorter(build: Callable) -> None:
    engine, reader = build("llama", rows=0), WarmReader(0)
    reuse = reuse_of(engine)
    chunks = []
    for seconds in (0.01, 0.01, 0.01, 0.01, 0.2, 1.0, 1.0, 1.0):
        chunks.append(reader._next(reuse, 0, 1 << 20, 512))
        reader._learn(reuse, chunks[-1], seconds, 512)
    assert chunks == [64, 128, 256, 512, 512, 512, 256, 128]


def test_an_interrupt_in_a_chunk_leaves_nothing(build: Callable, cold: Callable) -> None:
    engine, said = build("qwen3_5", rows=4), prompt(200)
    view, reader = [*said[:70], *prompt(230, seed=4)], WarmReader(0)
    ask(engine, said)
    forward, calls = engine.runner.forward, []

    def torn(inputs: object) -> torch.Tensor:
        calls.append(inputs)
        logits = forward(inputs)  # type: ignore[arg-type]
        if len(calls) == 2:  # its state is ahead of its position
            raise KeyboardInterrupt
        return logits

    engine.runner.forward = torn  # type: ignore[method-assign]
    reader.offer(b"", said, 199, lambda: (view, []))
    end = time.monotonic() + SECONDS
    with pytest.raises(KeyboardInterrupt):
        while reader.busy:
            assert time.monotonic() < end
            reader.step(engine)
    while reader.busy:  # it is taken up again
        reader.step(engine)
    engine.runner.forward = forward  # type: ignore[method-assign]
    check(engine)
    assert_nothing_held(engine)
    found = ask(engine, [*view, 5, 6, 7])
    assert same(found, cold("qwen3_5")([*view, 5, 6, 7]))
