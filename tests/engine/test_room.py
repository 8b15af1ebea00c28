"""Slots and pages between requests that wait, run and are only held: nothing is lost, and nothing given up in vain."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.driving import assert_nothing_held, prompt
from hybridkv.config import SamplingParams
from hybridkv.errors import RequestError

ASK = SamplingParams(max_tokens=12)


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_slot_is_not_lost_when_admission_is_interrupted(kind: str, engine_of: Callable, monkeypatch: Any) -> None:
    engine = engine_of(kind, pool=400)
    request = engine.add(prompt(20), ASK)

    def interrupted(slot: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.manager.state, "reset", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.manager.free_slots == engine.manager.slots and engine.scheduler.waiting[0] is request
    while not engine.idle:
        engine.step()
    assert request.finish_reason == "length"
    assert_nothing_held(engine)


def test_held_caches_stay_when_giving_them_up_would_not_help(engine_of: Callable) -> None:
    engine = engine_of("llama", pool=400)
    held = [engine.add(prompt(40), ASK, hold=True) for _ in range(2)]
    while not engine.idle:
        engine.step()
    running = engine.add(prompt(200), SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(3):
        engine.step()
    big = engine.add(prompt(300), ASK)
    engine.step()
    assert big in engine.scheduler.waiting and engine.scheduler.held == held  # 400 tokens never hold both
    while not engine.idle:
        engine.step()
    assert big.finish_reason == "length" and running.finish_reason == "length"
    assert engine.scheduler.held == held[1:]  # as few as would do: one gave its pages


def test_scoring_takes_the_place_of_held_caches(engine_of: Callable) -> None:
    engine = engine_of("llama", pool=400, slots=1)
    held = engine.add(prompt(300), ASK, hold=True)
    while not engine.idle:
        engine.step()
    assert engine.scheduler.held == [held]
    assert engine.score(prompt(350)).shape[0] == 350
    assert not engine.scheduler.held


@pytest.mark.parametrize("make", (np.array, torch.tensor, lambda ids: [np.int64(i) for i in ids]))
def test_token_ids_of_any_whole_number_kind_are_taken(make: Any, engine_of: Callable) -> None:
    engine = engine_of("llama", pool=400)
    assert engine.check_tokens(make([1, 2, 3])) == [1, 2, 3]
    for bad in ([1.5], [True], ["1"], [[1]], [None]):
        with pytest.raises(RequestError, match="whole numbers"):
            engine.check_tokens(bad)
