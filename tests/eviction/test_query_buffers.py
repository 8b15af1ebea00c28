"""Query buffers are lent to requests that read: who has one when, who waits, and that nobody notices."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tiny

from engine.driving import assert_nothing_held, run
from hybridkv import LLM
from hybridkv.cache.query_buffers import QueryBuffers
from hybridkv.cache.snapshot import restore_request, snapshot_request
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Evictor, query_buffers_for
from hybridkv.request import Request

SAY = SamplingParams(max_tokens=6, ignore_eos=True)
BUDGET, WINDOW = 40, 16
LENGTHS = (150, 30, 97, 64, 130, 57, 120)  # of prompts; 56 is the longest that is not cut


def ids(n: int) -> list[int]:
    return tiny.token_ids(n, seed=n)


def answers(engine: Engine, lengths: Sequence[int] = LENGTHS) -> list[Request]:
    requests = [engine.add(ids(n), SAY) for n in lengths]
    run(engine, lambda step: engine.manager.check_integrity())
    return requests


def assert_same(found: Request, want: Request) -> None:
    assert found.error is None and found.generated == want.generated
    assert found.evictions.keys() == want.evictions.keys()
    for at, keep in want.evictions.items():
        for a, b in zip(keep, found.evictions[at], strict=True):
            assert all(map(np.array_equal, a, b)), f"other entries were kept of {found.prompt_tokens} tokens"


@pytest.mark.parametrize("query_buffers", (1, 2))
@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_few_rings_keep_what_many_keep(kind: str, query_buffers: int, evicting: Callable) -> None:
    """Prompts side by side in one step, as far as there are query_buffers: each is cut as if it were alone."""
    engine = evicting(kind, budget=BUDGET, slots=7, step_tokens=256, query_buffers=query_buffers)
    for found, n in zip(answers(engine), LENGTHS, strict=True):
        [want] = answers(evicting(kind, budget=BUDGET, step_tokens=256), [n])
        assert_same(found, want)
        assert bool(want.evictions) == (n > BUDGET + WINDOW)
    assert_nothing_held(engine)


def broken_rings() -> dict[str, Callable[[pytest.MonkeyPatch], None]]:
    def one_for_all(patch: pytest.MonkeyPatch) -> None:
        def take(self: QueryBuffers, slot: int, position: int) -> bool:
            self.since[slot] = position if self.of[slot] < 0 else self.since[slot]
            self.of[slot] = 0
            return True

        patch.setattr(QueryBuffers, "take", take)
        patch.setattr(QueryBuffers, "drop", lambda self, slot: self.of.__setitem__(slot, -1))

    def back_too_early(patch: pytest.MonkeyPatch) -> None:
        needs = Evictor.needs_queries

        def only_at_first(evictor: Evictor, request: Any, manager: Any) -> bool:
            return needs(evictor, request, manager) and manager.position(request.key) < min(request.prompt_tokens, 64)

        patch.setattr(Evictor, "needs_queries", only_at_first)

    def taken_again(patch: pytest.MonkeyPatch) -> None:
        """And nobody looks since when it is there."""
        back_too_early(patch)
        patch.setattr(QueryBuffers, "whole", lambda self, slot, begin: 0)

    return {"one for all": one_for_all, "back too early": back_too_early, "and given to others": taken_again}


@pytest.mark.parametrize("how", broken_rings())
def test_rings_that_are_shared_or_given_back_too_early_are_noticed(
    how: str, evicting: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = answers(evicting("llama", budget=BUDGET, slots=7, step_tokens=128))
    broken_rings()[how](monkeypatch)
    engine = evicting("llama", budget=BUDGET, slots=7, step_tokens=128, query_buffers=2)
    requests = [engine.add(ids(n), SAY) for n in LENGTHS]
    run(engine)
    with pytest.raises(AssertionError):
        for found, each in zip(requests, want, strict=True):
            assert_same(found, each)


def test_a_ring_is_there_from_the_first_chunk_to_the_cut(evicting: Callable) -> None:
    engine = evicting("qwen3_5", budget=BUDGET, query_buffers=2)
    long, short = engine.add(ids(150), SAY), engine.add(ids(BUDGET + WINDOW), SAY)
    third, fourth = engine.add(ids(140), SAY), engine.add(ids(130), SAY)
    query_buffers, steps, prepare = engine.manager.query_buffers, [], engine.manager.prepare_forward

    def prepared(*args: Any, **more: Any) -> object:
        steps.append(prepare(*args, **more))
        return steps[-1]

    engine.manager.prepare_forward = prepared  # type: ignore[method-assign,assignment]
    had: dict[Request, set[bool]] = {r: set() for r in (long, short, third, fourth)}
    for _ in range(200):
        if engine.idle:
            break
        before = {r: len(r.evictions) for r in had}
        engine.step()
        for request in had.keys() & {*engine.scheduler.running}:
            slot, position = engine.manager.slot_of[request.key], engine.manager.position(request.key)
            has = query_buffers.of[slot] >= 0
            had[request].add(bool(has))
            assert has == (request is not short and 0 < position < request.prompt_tokens)
            assert not has or not before[request]
            kept = steps[-1].query_rows
            if position > request.prompt_tokens and slot in steps[-1].slots:  # a decode step keeps nothing
                assert kept is None or kept[steps[-1].query_start_loc[steps[-1].slots.index(slot)]] == -1
    else:
        pytest.fail("no end")
    assert had[short] == {False} and had[long] == had[third] == had[fourth] == {True, False}
    assert_nothing_held(engine)


@pytest.mark.parametrize("more", ({"decode_every": 4}, {"bounded": True}))
def test_a_request_that_is_cut_again_keeps_its_ring(more: dict, evicting: Callable) -> None:
    """And while all are taken, others wait."""
    requests = {}
    for query_buffers in (1, None):
        engine = evicting("llama", budget=BUDGET, query_buffers=query_buffers, **more)
        requests[query_buffers] = answers(engine, (150, 20, 90))
        assert_nothing_held(engine)
    for found, want in zip(requests[1], requests[None], strict=True):
        assert_same(found, want)
    assert len(requests[1][0].evictions) > 1


def test_a_conversation_keeps_its_ring_until_others_need_it(evicting: Callable) -> None:
    """The second turn is short: queries of the first answer vote, too."""
    turns = {}
    for query_buffers in (1, None):
        engine = evicting("qwen3_5", budget=BUDGET, query_buffers=query_buffers)
        first = engine.add(ids(54), SAY, hold=True)
        run(engine)
        second = engine.add([*first.tokens, 7, 8], SAY, hold=True, after=first)
        run(engine)
        assert second.cached_tokens == 59 and [*second.evictions] == [62]
        turns[query_buffers] = second
        other = engine.add(ids(100), SAY)
        run(engine)
        assert other.finish_reason == "length" and other.evictions
        frozen = second.key in engine.manager.frozen
        assert second in engine.scheduler.held and frozen == (query_buffers == 1), "it was frozen for the ring"
        third = engine.add([*second.tokens, 9], SAY, after=second)
        run(engine)
        assert third.finish_reason == "length" and third.cached_tokens > 0
        assert_nothing_held(engine)
    assert_same(turns[1], turns[None])


def test_a_preempted_request_gives_its_ring_to_the_next(evicting: Callable) -> None:
    [want] = answers(evicting("qwen3_5", budget=BUDGET), [150])
    for when in (1, 2, 4):  # in the prompt, and after it
        engine = evicting("qwen3_5", budget=BUDGET, query_buffers=1)
        request, other = engine.add(ids(150), SAY), engine.add(ids(100), SAY)
        for _ in range(when):
            engine.step()
        engine.scheduler.preempt(request)
        engine.manager.check_integrity()
        run(engine)
        assert request.preemptions == 1 and other.evictions and other.error is None
        assert_same(request, want)
        assert_nothing_held(engine)


def test_forks_and_snapshots_take_a_ring_only_if_their_origin_has_one(evicting: Callable) -> None:
    engine = evicting("qwen3_5", budget=BUDGET, query_buffers=2)
    manager = engine.manager
    request = engine.add(ids(150), SAY)
    engine.step()  # it reads
    saved = snapshot_request(manager, request.key)
    manager.fork_request(request.key, "fork")
    own, copied = (manager.query_buffers.of[manager.slot_of[key]] for key in (request.key, "fork"))
    assert own >= 0 and copied >= 0 and own != copied
    for key, t in manager.state.tensors.items():
        if key[0] == "queries":
            assert (t[:, own] == t[:, copied]).all() and t[:, own].any()
    before = manager.free_pages(), manager.free_slots
    with pytest.raises(HybridKVError, match="all 2 query buffers"):
        manager.fork_request(request.key, "third")
    with pytest.raises(HybridKVError, match="all 2 query buffers"):
        restore_request(manager, saved, "third")
    assert before == (manager.free_pages(), manager.free_slots)
    manager.check_integrity()
    manager.release_request("fork")
    restore_request(manager, saved, "back")
    back = manager.query_buffers.of[manager.slot_of["back"]]
    assert all((t[:, own] == t[:, back]).all() for key, t in manager.state.tensors.items() if key[0] == "queries")
    for _ in range(200):
        if request.evictions:
            break
        engine.step()
    else:
        pytest.fail("no end")
    assert manager.query_buffers.of[manager.slot_of[request.key]] < 0
    manager.fork_request(request.key, "fork")  # what was cut needs none
    restore_request(manager, snapshot_request(manager, request.key), "again")
    assert (manager.query_buffers.of >= 0).sum() == 1
    for key in ("fork", "back", "again"):
        manager.release_request(key)
    run(engine)
    assert_nothing_held(engine)


def test_prompts_do_not_wait_for_ever_for_rings_outside_the_engine(evicting: Callable) -> None:
    engine = evicting("llama", budget=BUDGET, slots=3, query_buffers=1)
    request = engine.add(ids(150), SAY)
    engine.step()
    saved = snapshot_request(engine.manager, request.key)
    engine.abort(request)
    restore_request(engine.manager, saved, "copy")
    other = engine.add(ids(120), SAY)
    for _ in range(2):
        with pytest.raises(HybridKVError, match="all 1 query buffers .* outside the engine; release"):
            engine.step()
    engine.manager.release_request("copy")
    run(engine)
    [want] = answers(evicting("llama", budget=BUDGET), [120])
    assert_same(other, want)


def test_what_needs_a_ring_and_has_none_is_said(evicting: Callable) -> None:
    engine = evicting("llama", budget=BUDGET, query_buffers=1)
    request = engine.add(ids(150), SAY)
    engine.step()
    engine.score(ids(50))  # is not evicted, and needs none
    assert request.preemptions == 0
    engine.score(ids(100))  # takes the buffer: the request is computed again
    assert request.preemptions == 1
    engine.manager.admit_request("outside")
    assert engine.manager.take_query_buffer("outside")
    with pytest.raises(HybridKVError, match="query buffers"):
        engine.score(ids(100))
    engine.manager.release_request("outside")
    engine.step()
    assert engine.evictor is not None
    engine.manager.drop_query_buffer(request.key)
    with pytest.raises(HybridKVError, match="were not kept"):
        engine.evictor.choose(request, engine.manager)
    assert engine.manager.take_query_buffer(request.key)  # too late for what was read: the window reaches further back
    with pytest.raises(HybridKVError, match="were not kept"):
        engine.evictor.choose(request, engine.manager)
    run(engine)
    assert request.finish_reason == "length" and request.evictions  # 86 tokens later the ring has the whole window
    assert_nothing_held(engine)


def test_as_many_rings_as_asked_for(oracle: Callable) -> None:
    for asked, made in ((None, 8), (1, 1), (11, 11), (30, 12)):
        config = CacheConfig(budget=BUDGET + 4096, window=WINDOW, recent=8, query_buffers=asked)
        assert query_buffers_for(config, 512, 12) == made
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(HybridKVError, match="query_buffers must be"):
            CacheConfig(budget=BUDGET, query_buffers=wrong)  # type: ignore[arg-type]
    cache = CacheConfig(budget=BUDGET, window=WINDOW, recent=8, query_buffers=2)
    llm = LLM(oracle("llama").folder, cache=cache, max_requests=4, max_context=256, dtype="float32")
    assert llm.engine.manager.query_buffers.count == 2


def test_more_requests_than_rings_run_as_planned(oracle: Callable) -> None:
    cache = CacheConfig("f32", page_size=16, budget=BUDGET, window=WINDOW, recent=8)
    llm = LLM(str(oracle("qwen3_5").folder), "cpu", "float32", cache=cache, max_requests=12, max_context=512)
    assert llm.plan.query_buffers == llm.manager.query_buffers.count == 512 // (BUDGET + WINDOW + 1) + 2 < 12
    assert llm.manager.memory_bytes() == llm.plan.nbytes
    prompts = [ids(60 + n) for n in range(14)]
    together = llm.generate(prompts, SAY)
    assert [out.error for out in together] == [None] * 14
    assert [out.token_ids for out in together] == [llm.generate([p], SAY)[0].token_ids for p in prompts]


def test_no_tokens_are_dealt_to_prompts_that_must_wait_for_one(evicting: Callable) -> None:
    """One buffer, many prompts: steps are as full as with one prompt alone."""
    engine = evicting("llama", budget=BUDGET, slots=6, step_tokens=128, query_buffers=1)
    say = SamplingParams(max_tokens=1, ignore_eos=True)  # nobody decodes beside them
    requests, whole = [engine.add(ids(200 + i), say) for i in range(6)], []
    reserve = engine.scheduler.reserve

    def noted(plan: list, *more: Any) -> Any:
        whole.append(sum(n for _, n in plan if n > 1))
        return reserve(plan, *more)

    engine.scheduler.reserve = noted  # type: ignore[method-assign]
    run(engine)
    assert whole.count(128) >= 6 and all(len(r.evictions) == 1 for r in requests)
