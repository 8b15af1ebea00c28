"""One LLM in many threads: each caller gets what it gets alone, in the same steps, and who leaves leaves nothing."""

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from many_callers import ASK, CALLS, THREADS, count_rows, open_tiny, settle, tokens, wishes

from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, Conversation, SamplingParams
from hybridkv.engine.owner import Ticket
from hybridkv.errors import HybridKVError, RequestError


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Exact mode: the bits of an answer do not depend on who runs beside it, on any CPU."""
    with open_tiny(request.param, tmp_path_factory.mktemp("threads")) as opened:
        yield opened


@pytest.mark.slow
def test_eight_threads_get_each_what_they_get_alone(llm: LLM) -> None:
    alone = {seed: tokens(llm, *wishes(seed)) for seed in range(40)}
    talked = talk(llm, "Hello")
    rows = count_rows(llm)

    def work(thread: int) -> None:
        rng = random.Random(1000 + thread)
        for _ in range(CALLS):
            seeds = [rng.randrange(40) for _ in range(3)]
            asked = [wishes(seed) for seed in seeds]
            match rng.choice(["one", "several", "stream", "left", "talk", "as they end", "logits"]):
                case "one":
                    assert tokens(llm, *asked[0]) == alone[seeds[0]]
                case "several":
                    found = llm.generate([ids for ids, _ in asked], [params for _, params in asked])
                    assert [each.token_ids for each in found] == [alone[seed] for seed in seeds]
                case "stream":
                    stream = llm.stream(*asked[0])
                    text = "".join(stream)
                    assert stream.completion is not None and stream.completion.token_ids == alone[seeds[0]]
                    assert text == stream.completion.text
                case "left":
                    stream = llm.stream(*asked[0])
                    next(stream, None)
                    stream.close()
                    assert stream.completion is not None
                    assert stream.completion.token_ids == alone[seeds[0]][: len(stream.completion.token_ids)]
                case "talk":
                    assert talk(llm, "Hello") == talked
                case "as they end":
                    ended = dict(llm.as_completed([ids for ids, _ in asked], [params for _, params in asked]))
                    assert [ended[i].token_ids for i in range(3)] == [alone[seed] for seed in seeds]
                case "logits":
                    assert llm.logits(asked[0][0]).shape[0] == len(asked[0][0])

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, i) for i in range(THREADS)]:
            done.result()
    assert max(rows) > 3, "the threads' requests did not run together"
    settle(llm)
    assert_nothing_held(llm.engine)


def talk(llm: LLM, words: str) -> list[str]:
    conversation = Conversation(llm, params=ASK)
    try:
        return ["".join(conversation.send(text)) for text in (words, "Go on")]
    finally:
        conversation.close()


def test_one_conversation_in_two_threads_takes_its_turns_one_after_the_other(llm: LLM) -> None:
    conversation = Conversation(llm, params=ASK)
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda i: "".join(conversation.send(f"word {i}")), range(8)))
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant"] * 8
    assert sorted(m["content"] for m in conversation.messages if m["role"] == "assistant") == sorted(said)
    conversation.close()
    assert_nothing_held(llm.engine)


def test_a_second_turn_inside_a_first_is_refused_and_not_waited_for(llm: LLM) -> None:
    conversation = Conversation(llm, params=ASK)
    first = conversation.send("Hello")
    next(first)
    with pytest.raises(RequestError, match="still being answered"):
        next(conversation.send("And now?"))
    assert [m["role"] for m in conversation.messages] == ["user"]
    list(first)
    assert len("".join(conversation.send("Go on"))) > 0
    conversation.close()
    assert_nothing_held(llm.engine)


def test_a_stream_that_is_dropped_stops_and_leaves_nothing(llm: LLM) -> None:
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    gc.disable()  # it stops when it is dropped, not when the collector comes by
    try:
        for piece in llm.stream(prompt(30), long):
            assert piece
            break
        next(llm.chat_stream([{"role": "user", "content": "Hello"}], long))
        next(llm.as_completed([prompt(5), prompt(9)], [ASK, long]))
        llm.as_completed([prompt(5), prompt(9)], long)  # never looked at
        settle(llm)
        assert_nothing_held(llm.engine)
    finally:
        gc.enable()


def test_a_step_that_asks_its_own_model_is_told_and_nobody_waits_for_ever(llm: LLM) -> None:
    found: list[object] = []

    def ask(generated: list[int], logits: Any) -> None:
        for call in (llm.generate, llm.stream, llm.logits):
            try:
                found.append(call(prompt(3)))
            except RequestError as problem:
                found.append(problem)

    want = tokens(llm, prompt(9), ASK)
    out = llm.generate(prompt(9), replace(ASK, logits_hook=ask))[0]
    assert out.token_ids == want and len(found) == 18
    assert all(isinstance(each, RequestError) for each in found) and "one of its own steps" in str(found[0])
    assert_nothing_held(llm.engine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_to_open_its_own_model(llm: LLM) -> None:
    tokens(llm, prompt(9), ASK)  # the thread runs
    child = os.fork()
    if child == 0:
        code = 1
        try:
            llm.generate(prompt(9), ASK)
        except RequestError as problem:
            code = 0 if "fork" in str(problem) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tokens(llm, prompt(9), ASK)


def test_a_stream_refuses_at_the_call_and_says_why_it_ended(llm: LLM) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.stream([5000])
    with llm.stream(prompt(9), ASK) as stream:
        assert "".join(stream)
        assert stream.completion is not None and stream.completion.finish_reason == "length"
        assert stream.progress == (9, 9)
    with llm.stream(prompt(9), replace(ASK, max_tokens=1)) as short:
        assert "".join(short) and short.progress == (9, 9)
    gate = threading.Event()
    with llm.stream(prompt(9), gated(gate)) as left:
        next(left)
        assert left.completion is None
        llm.owner.cancel([left._ticket], wait=False)
        gate.set()
    assert left.completion is not None and left.completion.finish_reason == "abort"
    assert_nothing_held(llm.engine)


def test_an_interrupted_reader_may_read_on(llm: LLM) -> None:
    """Ctrl-C in `next` that the caller survives: no text is lost, and the end is not mistaken for one."""
    for stream in (llm.stream(prompt(9), ASK), llm.chat_stream([{"role": "user", "content": "Hello"}], ASK)):
        interrupt_once(getattr(stream, "_stream", stream))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        heard = [getattr(piece, "text", piece) for piece in stream]
        assert stream.completion is not None and stream.completion.finish_reason == "length"
        assert "".join(heard) == stream.completion.text != ""


def interrupt_once(stream: Any) -> None:
    """The next wait for a piece is interrupted."""
    pieces = stream._pieces

    class Interrupted:
        def get(self) -> None:
            stream._pieces = pieces
            raise KeyboardInterrupt

    stream._pieces = Interrupted()


def test_a_turn_interrupted_twice_did_not_happen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(llm, params=ASK)
    first = "".join(conversation.send("Hello"))
    wait = Ticket.wait
    monkeypatch.setattr(Ticket, "wait", lambda ticket: (_ for _ in ()).throw(KeyboardInterrupt))
    gate = threading.Event()
    conversation.params = gated(gate)
    answer = conversation.send("And now?")
    next(answer)
    threading.Timer(0.05, gate.set).start()  # the step goes on when the second interrupt has come
    with pytest.raises(KeyboardInterrupt):
        answer.close()  # type: ignore[attr-defined]
    monkeypatch.setattr(Ticket, "wait", wait)
    gate.set()
    roles = [message["role"] for message in conversation.messages]
    assert roles in (["user", "assistant"], ["user", "assistant"] * 2)  # never a question without its answer
    conversation.params = ASK
    assert "".join(conversation.send("Go on")) and first
    conversation.close()
    settle(llm)
    assert_nothing_held(llm.engine)


def gated(gate: threading.Event, began: threading.Event | None = None) -> SamplingParams:
    """A long answer whose third token waits for the gate, however fast the engine is."""

    def wait(generated: list[int], logits: Any) -> None:
        if len(generated) >= 2:
            if began is not None:
                began.set()
            gate.wait()

    return SamplingParams(max_tokens=200, ignore_eos=True, logits_hook=wait)


def test_an_interrupt_while_waiting_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Ticket.wait
    hit: list[Ticket] = []

    def interrupted(ticket: Ticket) -> None:
        if not hit:
            hit.append(ticket)
            raise KeyboardInterrupt
        wait(ticket)

    monkeypatch.setattr(Ticket, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(20), prompt(30)], SamplingParams(max_tokens=200, ignore_eos=True))
    assert hit and hit[0].cancelled and hit[0].ended
    assert_nothing_held(llm.engine)


def test_a_ticket_cancelled_before_it_is_added_never_is(llm: LLM) -> None:
    added: list[int] = []

    def add(engine: Any) -> Any:
        added.append(1)
        return engine.add(prompt(9), ASK)

    ticket = Ticket(add)
    llm.owner.cancel([ticket])
    llm.owner.submit([ticket])
    assert ticket.ended and not added
    with pytest.raises(RequestError, match="cancelled before it began"):
        ticket.result()


def test_a_step_that_fails_reaches_the_callers_in_it_and_nobody_after(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = tokens(llm, prompt(9), ASK)
    forward = llm.engine.runner.forward
    calls = 0

    def fail(inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the card fell out")
        return forward(inputs)

    monkeypatch.setattr(llm.engine.runner, "forward", fail)
    with pytest.raises(RuntimeError, match="the card fell out"):
        llm.generate([prompt(9), prompt(12)], ASK)
    assert tokens(llm, prompt(9), ASK) == want
    assert_nothing_held(llm.engine)


def test_a_failure_that_ends_no_request_does_not_repeat_for_ever(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.scheduler, "_admit", lambda preempted: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        llm.generate(prompt(9), ASK)
    monkeypatch.undo()
    assert_nothing_held(llm.engine)


def test_who_is_inside_the_engine_keeps_it_and_the_other_is_told(llm: LLM) -> None:
    """The engine may still be used by the thread that opened the model, between the calls of others."""
    request = llm.engine.add(prompt(9), ASK)
    want = tokens(llm, prompt(12), ASK)  # runs the first one along
    while not request.finished:
        llm.engine.step()
    assert request.generated == tokens(llm, prompt(9), ASK) and want == tokens(llm, prompt(12), ASK)
    refused: list[BaseException] = []
    forward = llm.engine.runner.forward

    def ask_meanwhile(inputs: Any) -> Any:
        def other() -> None:
            try:
                llm.generate(prompt(9), ASK)
            except HybridKVError as problem:
                refused.append(problem)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        llm.engine.runner.forward = forward  # type: ignore[method-assign]
        return forward(inputs)

    llm.engine.runner.forward = ask_meanwhile  # type: ignore[method-assign]
    llm.engine.add(prompt(9), ASK)
    while not llm.engine.idle:
        llm.engine.step()
    assert len(refused) == 1 and "in the middle of a call" in str(refused[0])
    assert_nothing_held(llm.engine)


def test_a_closed_model_refuses_and_ends_what_waits(tmp_path: Path) -> None:
    llm = open_tiny("llama", tmp_path)
    talk = Conversation(llm, params=ASK)
    list(talk.send("Hello"))
    ended: list[BaseException] = []
    gate, began = threading.Event(), threading.Event()

    def long() -> None:
        try:
            llm.generate(prompt(9), gated(gate, began))
        except RequestError as problem:
            ended.append(problem)

    thread = threading.Thread(target=long)
    thread.start()
    began.wait()
    closing = threading.Thread(target=llm.close)
    closing.start()
    while not llm.owner._state.closed:
        time.sleep(0.001)
    gate.set()
    closing.join()
    thread.join()
    assert len(ended) == 1 and "closed while" in str(ended[0])
    for ask in (lambda: llm.generate(prompt(3), ASK), lambda: llm.stream(prompt(3), ASK), lambda: llm.logits([1])):
        with pytest.raises(RequestError, match="closed"):
            ask()
    assert_nothing_held(llm.engine)
    llm.close()
    talk.close()  # has nothing left to give back


def test_a_model_that_nobody_uses_goes_away_with_its_thread(tmp_path: Path) -> None:
    llm = open_tiny("llama", tmp_path)
    llm.generate(prompt(3), ASK)
    engine, thread = weakref.ref(llm.engine), llm.owner._thread
    assert thread is not None and thread.is_alive()
    del llm
    gc.collect()
    assert engine() is None
    thread.join()


def test_callers_of_a_busy_model_are_served_in_fair_turns(tmp_path: Path) -> None:
    """A thread that asks again and again does not keep another from its answer."""
    with open_tiny("llama", tmp_path, max_requests=1) as llm:
        stop, served = threading.Event(), [0, 0]

        def ask(who: int) -> None:
            while not stop.is_set():
                llm.generate(prompt(5), ASK)
                served[who] += 1

        threads = [threading.Thread(target=ask, args=(who,)) for who in range(2)]
        for thread in threads:
            thread.start()
        while min(served) < 5:
            time.sleep(0.001)
        stop.set()
        for thread in threads:
            thread.join()
