"""Running requests that make room and come back from the host: the bits of each alone, and nothing computed twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from long_form import more

from engine.driving import count_tokens, prompt, run
from engine.preempting import (
    SETTINGS,
    TEXT,
    alone,
    assert_back,
    builder,
    came_back,
    computed,
    halfway,
    params,
    two,
    ways,
)
from engine.reusing import ASK, check, poison, same
from hybridkv import LLM, SamplingParams
from hybridkv.cache.away import leave_columns
from hybridkv.engine.engine import Engine
from hybridkv.errors import OutOfPages

LENGTHS = (70, 41, 96, 17)


@pytest.fixture(scope="module")
def built(engine_of: Callable) -> Callable[..., Engine]:
    return builder(engine_of)


CASES = [
    pytest.param("llama", "f32", "whole", marks=pytest.mark.slow),
    ("llama", "fp8", "again"),
    ("qwen3", "bf16", "budget"),
    pytest.param("qwen3_5", "f32", "budget", marks=pytest.mark.slow),
    ("qwen3_5", "bf16", "whole"),
    ("qwen3_5", "fp8", "bounded"),
    ("qwen3_5_moe", "fp8", "whole"),
    pytest.param("qwen3_next", "f32", "again", marks=pytest.mark.slow),
    *more(*(
        (kind, kv, setting)
        for kind in ("llama", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next")
        for kv in ("f32", "bf16", "fp8")
        for setting in SETTINGS
    )),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("kind", "kv", "setting"), CASES)
def test_a_crowd_that_is_preempted_comes_back_from_the_host(kind: str, kv: str, setting: str, built: Callable) -> None:
    lonely = built(kind, kv, setting, pool=512)
    want = [alone(lonely, prompt(n, i), params(i)) for i, n in enumerate(LENGTHS)]
    engine = built(kind, kv, setting, pool=176)
    counts = count_tokens(engine)
    asked = [engine.add(prompt(n, i), params(i)) for i, n in enumerate(LENGTHS)]

    def look(step: int) -> None:
        poison(engine)
        if step % 7 == 6 and len(engine.scheduler.running) > 1:  # also where pages have not run out
            engine.scheduler.preempt(max(engine.scheduler.running, key=lambda r: r.order))
            check(engine)

    run(engine, look)
    assert [r.error for r in asked] == [None] * len(asked)
    assert came_back(asked) > 3 and sum(counts) == computed(asked), "tokens were computed again"
    for mine, its in zip(asked, want, strict=True):
        assert same(mine, its) and list(mine.evictions) == list(its.evictions), mine.stats
    assert ways(engine) == (came_back(asked), came_back(asked), 0)
    assert_back(engine)


@pytest.mark.parametrize(("kind", "setting"), [("llama", "budget"), ("qwen3_5", "whole"), ("qwen3_5", "bounded")])
def test_preempted_at_every_step_it_gives_what_it_gives_undisturbed(kind: str, setting: str, built: Callable) -> None:
    """In the middle of its prompt too, which 64 tokens a step make two parts of."""
    want = alone(built(kind, "f32", setting), prompt(110, 3), params(1, 12))
    engine = built(kind, "f32", setting)
    counts = count_tokens(engine)
    mine = engine.add(prompt(110, 3), params(1, 12))
    while not engine.idle:
        engine.step()
        if mine in engine.scheduler.running:
            engine.scheduler.preempt(mine)
            poison(engine)
    assert mine.error is None, mine.error
    assert mine.restored == mine.preemptions == len(counts) - 1 and sum(counts) == computed([mine])
    assert same(mine, want) and mine.stats["restored"] == mine.restored
    assert_back(engine)


def test_a_step_that_was_prepared_is_not_run_on_pages_that_were_given_away(built: Callable) -> None:
    """It comes back to the position that the step is for, and has other pages."""
    want = alone(built("llama"), prompt(50, 4), params(0))
    engine = built("llama")
    request = engine.add(prompt(50, 4), params(0))
    halfway(engine, request)
    assert engine.pipeline.prepared is not None
    engine.scheduler.preempt(request)
    pages = engine.manager.tables["attention"].allocator
    others = pages.acquire(40)  # its own go to somebody else
    poison(engine)
    for _ in range(3):
        engine.step()
    pages.release(others)
    run(engine)
    assert request.restored == 1 and same(request, want)
    assert_back(engine)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_pages_that_others_run_on_are_not_sent_and_shared_again(kind: str, built: Callable) -> None:
    """Two begin alike. What comes back shares these columns, and takes no more pages than it had."""
    want = [alone(built(kind), [*TEXT, *prompt(20, i)], params(1)) for i in (6, 7)]
    engine = built(kind, rows=6)
    first, second = two(engine)
    manager, reuse = engine.manager, engine.manager.reuse
    assert reuse is not None
    held, counts = manager.held_pages(second.key), count_tokens(engine)
    left = computed(want) - computed([first, second])
    engine.scheduler.preempt(second)
    [away] = manager.away.values()
    assert away.begin == 128 and away.host_bytes < manager.schema.kv_bytes(64) + manager.schema.slot_bytes
    assert away.column is not None and away.column.live == 2
    check(engine)
    poison(engine)
    before = manager.free_pages()
    engine.step()
    assert second.restored == 1 and away.column.live == 2
    whole = away.position // reuse.q * reuse.q
    shared = {name: whole // 16 * table.schema.streams for name, table in manager.tables.items()}
    now = manager.held_pages(second.key)
    assert {n: before[n] - free for n, free in manager.free_pages().items()} == {n: now[n] - shared[n] for n in now}
    assert all(now[n] <= held[n] for n in now)
    check(engine)
    run(engine)
    assert sum(counts) == left, "tokens were computed again"
    assert same(first, want[0]) and same(second, want[1])
    assert_back(engine)


def test_columns_that_others_no_longer_run_on_wait_for_it_until_they_are_needed(built: Callable) -> None:
    want = alone(built("qwen3_5"), [*TEXT, *prompt(20, 7)], params(1))
    for needed in (False, True):
        engine = built("qwen3_5", rows=6)
        first, second = two(engine)
        engine.scheduler.preempt(second)
        engine.abort(first)
        pages = engine.manager.tables["attention"].allocator
        with pytest.raises(OutOfPages):
            pages.acquire(pages.total)
        check(engine)
        if needed:
            assert leave_columns(engine.manager) and not leave_columns(engine.manager)
            pages.release(pages.acquire(pages.total))
            check(engine)
        run(engine)
        assert same(second, want) and second.restored == 1 - needed
        assert ways(engine) == (1, 1 - needed, needed)
        assert_back(engine)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("rows", [None, 6])
def test_answers_to_one_prompt_are_preempted_each_by_itself(kind: str, rows: int | None, built: Callable) -> None:
    how = SamplingParams(max_tokens=16, temperature=1.0, seed=3, n=3, logprobs=ASK.logprobs, ignore_eos=True)
    lonely = alone(built(kind), prompt(90, 8), how)
    engine = built(kind, rows=rows)
    counts, mine = count_tokens(engine), engine.add(prompt(90, 8), how)

    def look(step: int) -> None:
        poison(engine)
        if step in (1, 2, 4, 5, 7) and engine.scheduler.running:  # in its prompt, and in the answers
            engine.scheduler.preempt(engine.scheduler.running[-1])
            check(engine)

    run(engine, look)
    for one, other in zip((mine, *mine.siblings), (lonely, *lonely.siblings), strict=True):
        assert same(one, other)
    assert came_back([mine, *mine.siblings]) == 5 and sum(counts) == 90 + 3 * 15
    assert_back(engine)


def test_a_held_turn_that_is_preempted_goes_on_in_its_own_cache(built: Callable) -> None:
    """And says of its prompt what it said at first."""
    found = []
    for preempts in (False, True):
        engine = built("qwen3_5", setting="budget")
        first = alone(engine, prompt(90, 1), params(0, 6), hold=True)
        turn = engine.add([*first.tokens, *prompt(20, 2)], params(2), after=first, hold=True)
        halfway(engine, turn)
        if preempts:
            engine.scheduler.preempt(turn)
        run(engine)
        assert turn.restored == preempts and turn.stats["cached_tokens"] == 90 + 5
        assert turn.stats.get("restored_tokens", 0) == preempts * (len(first.tokens) + 20 + 3)
        found.append((turn.generated, list(turn.evictions), turn.stats["kept_tokens"]))
        engine.abort(turn)
        assert_back(engine)
    assert found[0] == found[1]


@pytest.mark.parametrize("keep", (False, True))
def test_an_llm_keeps_them_where_it_was_asked_to(keep: bool) -> None:
    with LLM("tiny-hybrid", device="cpu", max_requests=2, max_context=256, keep_preempted=keep) as llm:
        assert llm.manager.host.preempted is keep
