"""Several API keys at one server: whoever floods it, the others get their turn."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hybridkv import LLM
from hybridkv.server.service import TEXT_THREADS
from server.running import HI, SECONDS, Running, forward, serving, until

CHAT = "/v1/chat/completions"
KEYS = ("first-key", "second-key", "third-key")
ASK = {"messages": HI, "temperature": 0, "ignore_eos": True, "max_tokens": 6}


def asking(running: Running, key: str) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    return lambda body: running.post(CHAT, body, x_api_key=key)


def test_keys_take_turns_whoever_floods(tiny_llm: LLM) -> None:
    """Four slots and six places to wait; one key asks for all ten, then two others come."""
    go, started, first = threading.Event(), [], []

    def look(number: int) -> None:
        started.extend(request for request in tiny_llm.engine.scheduler.running if request not in started)
        if not number:
            first.extend(started)
            assert go.wait(SECONDS)

    with (
        serving(tiny_llm, api_keys=KEYS, queue=6) as running,
        forward(tiny_llm, look),
        ThreadPoolExecutor(12) as pool,
    ):
        scheduler, slots = tiny_llm.engine.scheduler, tiny_llm.plan.slots
        try:
            salted = [ASK | {"cache_salt": f"salt {i}"} for i in range(slots + 6)]  # which give it no more turns
            flood = [pool.submit(asking(running, KEYS[0]), body) for body in salted]
            until(lambda: sum(answer.done() for answer in flood) == 5)  # of which half may come in
            assert {answer.result()[0] for answer in flood if answer.done()} == {429}
            others = [pool.submit(asking(running, key), ASK) for key in KEYS[1:]]
            arrived = tiny_llm.owner._inbox  # at the engine, which is held
            until(lambda: len(scheduler.running) + len(scheduler.waiting) + arrived.qsize() == 7)
        finally:
            go.set()
        assert [answer.result()[0] for answer in others] == [200, 200]
        assert sorted(answer.result()[0] for answer in flood) == [200] * 5 + [429] * 5
        assert not scheduler.waiting
        salts = [request.whose for request in started]
        assert len(salts) == 7 and len(set(salts)) == 3 and len({request.salt for request in started}) == 7
        n = len(first)  # of the flood, that ran before the others came
        assert len(set(salts[:n])) == 1 and {*salts[n : n + 2]} == {*salts} - {salts[0]}, "the flood went first"
        status, found = asking(running, KEYS[1])(ASK | {"n": 8})
        assert status == 200 and len(found["choices"]) == 8, "a key that has nothing running may ask for more than half"
        running.idle()


def test_one_key_has_all_the_room(tiny_llm: LLM) -> None:
    go = threading.Event()
    with (
        serving(tiny_llm, api_keys=KEYS[:1], queue=2) as running,
        forward(tiny_llm, lambda number: go.wait(SECONDS) and None),
        ThreadPoolExecutor(8) as pool,
    ):
        room = tiny_llm.plan.slots + 2
        answers = [pool.submit(asking(running, KEYS[0]), ASK) for _ in range(room)]
        until(lambda: running.service.answers == room)
        assert asking(running, KEYS[0])(ASK)[0] == 429
        go.set()
        assert [answer.result()[0] for answer in answers] == [200] * room
        running.idle()


def test_a_key_whose_requests_take_long_to_read_leaves_others_a_thread(tiny_llm: LLM) -> None:
    template = tiny_llm.chat_template
    assert template is not None
    many = 3 * TEXT_THREADS
    with serving(tiny_llm, api_keys=KEYS) as running, ThreadPoolExecutor(many + 1) as pool:
        size = running.service.bodies.held + many * len(json.dumps(ASK))
        with template._lock:  # one chat is rendered at a time; now none is
            flood = [pool.submit(asking(running, KEYS[0]), ASK) for _ in range(many)]
            until(lambda: running.service.bodies.held == size)  # all have come
            other = pool.submit(running.post, "/tokenize", {"prompt": "Hi"}, x_api_key=KEYS[1])
            assert other.result(SECONDS)[0] == 200
            assert not any(answer.done() for answer in flood)
        assert {answer.result()[0] for answer in flood} <= {200, 429}
        running.idle()
