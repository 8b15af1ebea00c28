"""AsyncLLM: tasks get what callers get alone, a cancelled one leaves nothing, and the event loop is never blocked."""

import asyncio
import random
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from many_callers import ASK, CALLS, THREADS, count_rows, open_tiny, settle, tokens, wishes

from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, AsyncLLM, SamplingParams
from hybridkv.errors import HybridKVError, RequestError

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with open_tiny(request.param, tmp_path_factory.mktemp("async")) as opened:
        yield opened


@pytest.mark.slow
def test_tasks_with_cancellations_get_each_what_they_get_alone(llm: LLM) -> None:
    alone = {seed: tokens(llm, *wishes(seed)) for seed in range(40)}
    rows, cancelled = count_rows(llm), 0

    async def work(served: AsyncLLM, task: int) -> None:
        nonlocal cancelled
        rng = random.Random(task)
        for call in range(CALLS):
            seed = rng.randrange(40)
            ids, params = wishes(seed)
            match rng.choice(["one", "several", "stream", "left", "cancelled", "aborted"]):
                case "one":
                    [found] = await served.generate(ids, params)
                    assert found.token_ids == alone[seed]
                case "several":
                    found_all = await served.generate([ids, prompt(5)], [params, ASK])
                    assert found_all[0].token_ids == alone[seed] and len(found_all[1].token_ids) == 6
                case "stream":
                    stream = served.stream(ids, params)
                    text = "".join([piece async for piece in stream])
                    assert stream.completion is not None and stream.completion.token_ids == alone[seed]
                    assert stream.completion.text == text
                case "left":
                    async with served.stream(ids, LONG) as stream:
                        async for _ in stream:
                            break
                    assert stream.completion is not None and stream.completion.finish_reason == "abort"
                case "cancelled":
                    asked = asyncio.create_task(served.generate([ids, ids], LONG))
                    await asyncio.sleep(rng.random() * 0.02)
                    asked.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await asked
                    cancelled += 1
                case "aborted":
                    name = f"{task}-{call}"
                    asked = asyncio.create_task(served.generate(ids, LONG, request_id=name))
                    while not await served.abort(name):
                        await asyncio.sleep(0.001)
                    assert (await asked)[0].finish_reason in ("abort", "length")

    async def main() -> None:
        served = AsyncLLM(llm)
        await asyncio.gather(*(work(served, task) for task in range(THREADS)))
        assert not served._named

    asyncio.run(main())
    assert cancelled > 10 and max(rows) > 3
    settle(llm)
    assert_nothing_held(llm.engine)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_threads_and_tasks_share_one_model(llm: LLM) -> None:
    want = tokens(llm, prompt(9), ASK)

    async def main() -> None:
        served = AsyncLLM(llm)
        from_threads = [asyncio.to_thread(tokens, llm, prompt(9), ASK) for _ in range(4)]
        from_tasks = [served.generate(prompt(9), ASK) for _ in range(4)]
        found = await asyncio.gather(*from_threads, *from_tasks)
        assert found[:4] == [want] * 4 and [f[0].token_ids for f in found[4:]] == [want] * 4

    run(main())


def test_the_event_loop_goes_on_while_an_answer_is_computed(llm: LLM) -> None:
    async def main() -> int:
        turns, asked = 0, asyncio.create_task(AsyncLLM(llm).generate(prompt(90), LONG))
        while not asked.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert run(main()) > 10  # one that was blocked would turn once or twice


def test_bad_requests_are_refused_and_the_next_is_served(llm: LLM) -> None:
    async def main() -> None:
        served = AsyncLLM(llm)
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await served.generate([prompt(5), [5000]], ASK)
        with pytest.raises(RequestError, match="outside the vocabulary"):
            async for _ in served.stream([5000]):
                pass
        asked = asyncio.create_task(served.generate(prompt(9), LONG, request_id="mine"))
        while "mine" not in served._named:
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="'mine' is running"):
            await served.generate(prompt(9), ASK, request_id="mine")
        asked.cancel()
        assert await served.abort("no such") is False
        assert len((await served.generate(prompt(9), ASK))[0].token_ids) == 6
        assert await served.generate([], ASK) == []

    run(main())
    settle(llm)
    assert_nothing_held(llm.engine)
    with pytest.raises(HybridKVError, match="open already: max_requests"):
        AsyncLLM(llm, max_requests=3)


def test_an_abort_at_any_moment_ends_the_request(llm: LLM) -> None:
    """While the prompt is tokenised, between posting and adding, while it runs: always an answer that says abort."""

    async def main() -> None:
        served = AsyncLLM(llm)
        for turns in (0, 1, 2, 5, 20):
            asked = asyncio.create_task(served.generate([prompt(9), prompt(5)], LONG, request_id="it"))
            pieces = served.stream(prompt(9), LONG, request_id="stream")
            first = asyncio.create_task(anext(pieces, None))
            for _ in range(1 + turns):
                await asyncio.sleep(0)
            assert await served.abort("it") and await served.abort("stream")
            assert [each.finish_reason for each in await asked] == ["abort", "abort"]
            await first
            assert [piece async for piece in pieces] == [] or pieces.completion is not None
            assert not served._named

    run(main())
    settle(llm)
    assert_nothing_held(llm.engine)


def test_closing_a_stream_ends_the_wait_of_another_task(llm: LLM) -> None:
    async def main() -> None:
        stream = AsyncLLM(llm).stream(prompt(90), LONG)
        waiting = [asyncio.create_task(anext(stream, "over")) for _ in range(2)]
        await asyncio.sleep(0)
        await stream.aclose()
        assert len(await asyncio.gather(*waiting)) == 2
        assert await anext(stream, "over") == "over"

    run(main())
    settle(llm)
    assert_nothing_held(llm.engine)


def test_a_loop_that_ends_in_the_middle_leaves_nothing(llm: LLM) -> None:
    async def main() -> None:
        stream = AsyncLLM(llm).stream(prompt(9), LONG)
        await anext(stream)
        loose.append(stream)  # still there when the loop is closed

    loose: list[Any] = []
    run(main())
    loose.clear()
    settle(llm)
    assert_nothing_held(llm.engine)
