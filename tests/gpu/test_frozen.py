"""Caches without a slot on a GPU: state and pages on the host, copies that are late, and other requests meanwhile."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, CacheConfig, Conversation, SamplingParams
from hybridkv.cache.frozen import export_frozen

pytestmark = pytest.mark.gpu
ASK = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
WORDS = ("Hello, how are you?", "And now?", "Go on, then.", "Is that all there is?")


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, path)
    write_tokenizer(path, TEMPLATE)
    return path


def opened(folder: Path, requests: int, budget: int | None = None, **more: object) -> LLM:
    cache = CacheConfig("f32", 16, budget=budget, window=8, recent=8)
    return LLM(
        folder, device="cuda", dtype="float32", exact=True, cache=cache, max_requests=requests, max_context=512, **more
    )


def late(llm: LLM) -> Callable[[], None]:
    """Every copy to or from the host comes milliseconds late."""
    times = itertools.cycle((1, 30, 5))

    def delay() -> None:
        with torch.cuda.stream(llm.manager.host._side):
            torch.cuda._sleep(next(times) * 1_000_000)

    return delay


def talk_in_turns(llm: LLM, rest: Callable[[Conversation], None] = lambda talk: None) -> list[list[int]]:
    """Four conversations whose turns take turns, beside a request that goes on all the while."""
    talks = [Conversation(llm, f"Be brief, number {i}.", ASK) for i in range(4)]
    other, found = llm.stream(prompt(9), SamplingParams(max_tokens=400, ignore_eos=True)), []
    next(other)
    for i, word in enumerate(WORDS):
        for talk in talks:
            list(talk.send(word))
            assert talk.last is not None
            found.append(talk.last.token_ids)
            assert not i or talk.last.stats["cached_tokens"] > 0, "the cache was computed again"
            rest(talk)
    other.close()
    for talk in talks:
        talk.close()
    assert_nothing_held(llm.engine)
    llm.manager.check_integrity()
    return found


@pytest.mark.parametrize("budget", [None, 24])
def test_four_conversations_in_two_slots_answer_as_in_eight(folder: Path, budget: int | None) -> None:
    with opened(folder, 8, budget) as llm:
        want = talk_in_turns(llm)
        assert not llm.engine.scheduler.counts["frozen"]
    with opened(folder, 2, budget) as llm:
        delay, put, get = late(llm), llm.manager.host.put, llm.manager.host.get
        llm.manager.host.put = lambda chunks: (delay(), put(chunks))[1]  # type: ignore[method-assign]
        llm.manager.host.get = lambda blocks: (delay(), get(blocks))[1]  # type: ignore[method-assign]
        assert talk_in_turns(llm) == want
        counts = llm.engine.scheduler.counts
        assert counts["frozen"] > 4 and counts["thawed"] > 4 and not counts["given_up"]


def test_pages_that_were_on_the_host_come_back_with_their_bits(folder: Path) -> None:
    with opened(folder, 8) as llm:
        want = talk_in_turns(llm)

        def rest(talk: Conversation) -> None:
            request = talk._request
            assert request is not None

            def export(engine) -> None:
                delay()
                engine.scheduler.freeze(request)
                assert export_frozen(engine.manager, request.key)
                for table in engine.manager.tables.values():  # whoever gets the pages writes to them at once
                    free = torch.from_numpy((table.allocator.refs == 0).nonzero()[0]).cuda()
                    for pool in table.pool.tensors.values():
                        pool[:, free] = float("nan")

            llm.owner.run(export)

        delay = late(llm)
        assert talk_in_turns(llm, rest) == want and llm.engine.scheduler.counts["imported"] > 4
        assert llm.manager.host.staging == llm.plan.staging > 0


@pytest.mark.parametrize("budget", [None, 24])
def test_a_stored_conversation_goes_on_in_another_model(folder: Path, budget: int | None, tmp_path: Path) -> None:
    with opened(folder, 2, budget, disk_cache=tmp_path) as llm:
        talk = Conversation(llm, "Be brief.", ASK)
        list(talk.send(WORDS[0]))
        llm.save(talk, "talk")
        list(talk.send(WORDS[1]))
        want = talk.last
    with opened(folder, 3, budget, disk_cache=tmp_path) as llm:
        back = llm.load("talk", ASK)
        list(back.send(WORDS[1]))
        assert want is not None and back.last.token_ids == want.token_ids
        assert back.last.stats["cached_tokens"] == want.stats["cached_tokens"] > 0
