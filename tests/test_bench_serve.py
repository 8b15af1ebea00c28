"""The benchmarks of a running server in their short forms: counts and pools, and that what is wrong is seen."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from hybridkv.bench import serve, soak
from hybridkv.bench.http_client import Answer
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.serve import Tally, wishes
from hybridkv.bench.suite import run_bench
from hybridkv.server.service import Service


def rows_of(result: dict[str, Any]) -> dict[str, Any]:
    assert result["failures"] == [], result["notes"]
    return {f"{row['op']}, {row['case']}": row for row in result["rows"]}


def test_a_server_under_load_gives_every_client_its_tokens() -> None:
    result = run_bench("serve", BenchOptions(clients=6, requests=8))
    rows = rows_of(result)
    every = rows["serve, all"]
    assert (every["requests"], every["failed"]) == (48, 0)
    assert sum(row["requests"] for name, row in rows.items() if name.startswith("serve, ")) == 2 * 48
    assert (result["left_over"], result["exit_code"]) == ({}, 0)
    assert rows["health, GET /health"]["failed"] == 0 and rows["event loop, late by at most"]["requests"] > 0


@pytest.mark.slow
def test_a_soak_in_short() -> None:
    result = run_bench("soak", BenchOptions(seconds=4, clients=4))
    rows = rows_of(result)
    counts = {name: row["count"] for name, row in rows.items()}
    assert all(counts.values()) and result["left_over"] == {}
    assert [row["wrong"] for row in rows.values() if "wrong" in row] == [0] * 5


def test_the_same_requests_by_clients_in_process() -> None:
    options = BenchOptions(model_shape="tiny", device="cpu", only="clients", requests=5, quick=True, skip_peers=True)
    result = run_bench("load", options)
    assert [row["op"] for row in result["rows"]] == ["engine alone", "clients"] and result["failures"] == []
    assert result["rows"][1]["pieces"] > 10 and result["clients_share"] > 0


# ---- what is wrong is seen


def answer(prompt: int = 7, tokens: int = 3, status: int = 200) -> Answer:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
    return Answer(status, json.dumps({"choices": [], "usage": usage}).encode(), 0.1, 0.1, 1)


def test_answers_that_are_not_exact_are_failures() -> None:
    wish = next(wish for wish in wishes(100, 0) if wish.kind == "text, whole")
    tally = Tally()
    tally.add(wish, answer(tokens=wish.answer))
    assert tally.failures == 0
    for wrong in (
        answer(tokens=wish.answer + 1),
        answer(prompt=8, tokens=wish.answer),
        answer(tokens=wish.answer, status=500),
        Answer(200, b"{}"),
        Answer(200, b"hello"),
    ):
        tally.add(wish, wrong)
    assert tally.failures == 5 and len(tally.problems) == 5


@pytest.mark.slow
def test_a_canary_that_drifts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original, heard = soak.canary, []

    async def canary(connection: Any, text: str) -> list[int]:
        heard.append(text)
        found = await original(connection, text)
        return [*found[:-1], found[-1] ^ 1] if len(heard) == 12 else found

    monkeypatch.setattr(soak, "canary", canary)
    result = run_bench("soak", BenchOptions(seconds=3, clients=1))
    [failure] = result["failures"]
    assert "1 answers drifted" in failure["problem"] and len(heard) >= 12


def test_memory_that_grows_is_seen() -> None:
    flat, growing = soak.Soaked(), soak.Soaked()
    for second in range(600):
        flat.memory.append((second, 400 + second % 3 + (0 if second > 100 else second - 100)))  # it settles
        growing.memory.append((second, 400 + second / 30))
    assert abs(flat.slope()) < 1 < soak.FLAT < 19 < growing.slope() < 21
    assert abs(flat.grown()) < 1 and growing.grown() > 10


@pytest.mark.slow
def test_memory_that_grows_for_long_enough_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = itertools.count(400)
    monkeypatch.setattr(soak, "resident", lambda: float(next(seen)))
    short = run_bench("soak", BenchOptions(seconds=3, clients=1))
    assert "memory grew" not in str(short["failures"]), "three seconds cannot tell"
    monkeypatch.setattr(soak, "SECONDS", 3.0)
    [failure] = run_bench("soak", BenchOptions(seconds=3, clients=1))["failures"]
    assert "memory grew by" in failure["problem"]


@pytest.mark.slow
def test_requests_that_stay_in_memory_are_a_failure_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original, leak = Service.end, []

    def end(self: Service, generation: Any) -> None:
        leak.append(generation)
        original(self, generation)

    monkeypatch.setattr(Service, "end", end)
    result = run_bench("soak", BenchOptions(seconds=3, clients=1))
    [failure] = result["failures"]
    assert "requests in memory" in failure["problem"]
    assert result["left_over"]["requests in memory"] >= len(leak) > 0


@pytest.mark.slow
def test_a_slow_server_is_a_failure_where_it_ran_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.too_slow([0.1, 0.2], 20.0) == ""
    for health, lag in (([0.1, 1.2], 20.0), ([0.1], 251.0), ([], 0.0)):
        assert "slower" in serve.too_slow(health, lag)
    monkeypatch.setattr(serve, "too_slow", lambda health, lag: "slower than it should be")
    few = run_bench("serve", BenchOptions(clients=1, requests=2))
    assert few["failures"] == [] and "slower than it should be" in few["notes"]
    monkeypatch.setattr(serve, "REQUESTS", 2)
    monkeypatch.setattr(serve, "CLIENTS", 1)
    [failure] = run_bench("serve", BenchOptions(clients=1, requests=2))["failures"]
    assert "slower than it should be" in failure["problem"]


def test_what_is_left_over_is_told() -> None:
    from hybridkv.bench.served import ServerProcess

    lines = 'hybridkv_cache_pages{kind="a",state="used"} 2\nhybridkv_cache_pages{kind="a",state="kept"} 5\n'
    server = ServerProcess(None, 0, None)  # type: ignore[arg-type]
    server.get = lambda path: (200, lines + 'hybridkv_num_requests_running{m="x"} 0\n')  # type: ignore[method-assign]
    assert server.held() == {'hybridkv_cache_pages{kind="a",state="used"}': 2.0}


# ---- news of requests to an event loop


def test_news_of_a_step_wake_a_loop_once_and_keep_their_order() -> None:
    from hybridkv.engine.loop_mail import gathered, loop_mail

    async def main() -> tuple[int, list[Any]]:
        loop, got, woken = asyncio.get_running_loop(), [], []
        original = loop.call_soon_threadsafe

        def counted(*given: Any, **more: Any) -> Any:
            woken.append(1)
            return original(*given, **more)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        loop.set_exception_handler(lambda _, context: got.append(type(context["exception"])))
        mail = loop_mail()
        assert mail is loop_mail()

        def send() -> None:
            with gathered():
                for number in range(100):
                    mail.send(got.append, number)
                    if number == 50:
                        mail.send(int, "no number")  # the others come all the same
                assert not woken

        await asyncio.to_thread(send)
        calls = len(woken)
        mail.send(got.append, "last")
        while got[-1:] != ["last"]:
            await asyncio.sleep(0)
        return calls, got

    calls, got = asyncio.run(main())
    assert calls <= 2 and got == [*range(51), ValueError, *range(51, 100), "last"]  # one may be of to_thread itself


def test_a_closed_loop_is_told_to_whoever_sends() -> None:
    from hybridkv.engine.loop_mail import loop_mail

    async def main() -> Any:
        return loop_mail()

    mail = asyncio.run(main())
    with pytest.raises(RuntimeError, match="closed"):
        mail.send(print, "x")
