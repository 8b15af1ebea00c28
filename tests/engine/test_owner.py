"""One thread owns an engine, and it runs on its own device whatever the current one is."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from engine.driving import alone, assert_nothing_held, prompt, run
from hybridkv.config import SamplingParams
from hybridkv.devices import on_device, resolve_device
from hybridkv.engine import calls
from hybridkv.engine import engine as engine_file
from hybridkv.errors import HybridKVError, RequestError

ASK = SamplingParams(max_tokens=6)


def in_thread(call: Callable[[], object]) -> object:
    """What the call gives, or raises, in another thread."""
    found: list[object] = []

    def run_it() -> None:
        try:
            found.append(call())
        except Exception as problem:
            found.append(problem)

    thread = threading.Thread(target=run_it)
    thread.start()
    thread.join()
    return found[0]


def test_a_call_from_another_thread_is_an_error_and_changes_nothing(engine_of: Callable) -> None:
    engine = engine_of("llama")
    request = engine.add(prompt(9), ASK)
    engine.step()
    calls = (
        lambda: engine.add(prompt(3), ASK),
        engine.step,
        engine.drain,
        lambda: engine.abort(request),
        lambda: engine.stop(request),
        lambda: engine.score(prompt(3)),
    )
    for call in calls:
        refused = in_thread(call)
        assert isinstance(refused, RequestError) and "belongs to another thread" in str(refused)
    run(engine)
    assert request.generated == alone(engine_of("llama"), prompt(9), ASK).generated
    assert_nothing_held(engine)


def test_an_engine_can_be_handed_over(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5")
    want = alone(engine_of("qwen3_5"), prompt(9), ASK).generated

    def work() -> list[int]:
        engine.take_ownership()
        return alone(engine, prompt(9), ASK).generated

    assert in_thread(work) == want
    with pytest.raises(RequestError, match="take_ownership"):
        engine.step()
    engine.take_ownership()
    assert alone(engine, prompt(9), ASK).generated == want


def test_who_lent_an_engine_goes_on_as_soon_as_it_is_back(engine_of: Callable) -> None:
    """An answer is there a moment before the thread that wrote it has let go of the engine."""
    engine = engine_of("llama")
    want = alone(engine_of("llama"), prompt(9), ASK).generated
    lent, answered = threading.Event(), threading.Event()

    def work() -> None:
        with engine.owned():
            lent.set()
            answered.wait(60)
            time.sleep(0.1)  # by then the call below waits

    thread = threading.Thread(target=work)
    thread.start()
    assert lent.wait(60)
    answered.set()
    assert alone(engine, prompt(9), ASK).generated == want
    thread.join()


def test_who_lent_an_engine_is_refused_while_it_is_not_given_back(
    engine_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "GIVEN_BACK", 0.01)
    engine = engine_of("llama")
    lent, over = threading.Event(), threading.Event()

    def work() -> None:
        with engine.owned():
            lent.set()
            over.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert lent.wait(60)
    with pytest.raises(RequestError, match="belongs to another thread"):
        engine.step()
    over.set()
    thread.join()
    engine.step()


def test_many_threads_without_an_agreement_are_all_refused_and_the_owner_is_right(engine_of: Callable) -> None:
    """As it was tried: four threads that add and step at the same time."""
    engine = engine_of("llama")
    refused: list[object] = []

    def work() -> None:
        for i in range(20):
            try:
                engine.add(prompt(5 + i), ASK)
                engine.step()
            except RequestError as problem:
                refused.append(problem)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    mine = alone(engine, prompt(9), ASK)
    for thread in threads:
        thread.join()
    assert len(refused) == 80 and mine.generated == alone(engine_of("llama"), prompt(9), ASK).generated
    assert_nothing_held(engine)


def test_a_step_makes_its_device_the_current_one(engine_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device: a model on cuda:1 must not run its kernels on cuda:0."""
    engine = engine_of("llama")
    entered: list[object] = []

    def device(which: object) -> object:
        entered.append(which)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    engine.add(prompt(9), ASK)
    engine.step()
    assert not entered  # on a CPU there is nothing to choose
    second = torch.device("cuda", 1)
    monkeypatch.setattr(engine_file, "on_device", lambda given: on_device(second))
    engine.step()
    engine.score(prompt(3))
    assert entered == [second, second]


def test_a_gpu_is_named_with_its_number_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda") == resolve_device("auto") == torch.device("cuda", 1)
    assert resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(HybridKVError, match="'cuda:2' was asked for, but torch sees 2 GPUs"):
        resolve_device("cuda:2")
