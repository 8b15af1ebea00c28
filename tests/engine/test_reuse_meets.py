"""Reuse where it meets other parts: prefixes pinned at once, evictions that find no page, broken ends of turns, turns
that do not go on in their cache, requests that are computed again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.driving import assert_nothing_held, prompt, run
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.errors import OutOfPages
from hybridkv.prefix import _begin

SAY = SamplingParams(max_tokens=4, ignore_eos=True)


def test_two_prefixes_that_do_not_fit_together_end_no_other_answer(engine_of: Callable) -> None:
    """Both may be pinned when they begin; the second finds no room when it ends."""
    engine = engine_of("qwen3_5", pool=512, rows=8)
    engine.launches_ahead = True
    other = engine.add(prompt(20, 9), SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    prefixes = [_begin(engine, prompt(192, seed), True) for seed in (1, 2)]
    run(engine)
    assert other.error is None and len(other.generated) == 40
    assert [each.error for each in prefixes] == [None, None]
    assert sum(each.pinned is not None for each in prefixes) == 1
    engine.manager.reuse.forget()
    assert_nothing_held(engine)


@pytest.mark.parametrize("deferred", (False, True))
def test_an_eviction_that_found_no_page_is_made_up_for(
    deferred: bool, engine_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is preempted with its first token. Computed again it has more than its prompt to read, and is evicted
    at the prompt's end all the same.
    """
    found = []
    for fails in (0, 1):
        engine = engine_of("qwen3_5", rows=8, eviction=CacheConfig("f32", 16, budget=40, window=8, recent=8))
        engine.evictor = engine.scheduler.evictor = replace(engine.evictor, deferred=deferred)
        engine.launches_ahead = deferred
        engine.add(prompt(20, 9), SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(3):
            engine.step()
        manager, left = engine.manager, [fails]
        compact, start = manager.compact_request, manager.start_compaction

        def compacting(*args: Any, left: list[int] = left, compact: Any = compact) -> int:
            if left[0]:
                left[0] -= 1
                raise OutOfPages(9, 0, 100, "attention")
            return compact(*args)

        def starting(*args: Any, left: list[int] = left, start: Any = start) -> Any:
            if left[0]:
                raise OutOfPages(9, 0, 100, "attention")
            return start(*args)

        monkeypatch.setattr(manager, "compact_request", compacting)
        monkeypatch.setattr(manager, "start_compaction", starting)
        request = engine.add(prompt(200, 1), SamplingParams(max_tokens=20, ignore_eos=True))
        run(engine)
        assert request.preemptions == fails and list(request.evictions) == [200]
        assert request.reuse["cached"] == 0, "what it had read itself counts as cached"
        found.append((request.generated, request.stats["kept_tokens"], request.policy))
        manager.check_integrity()
    assert found[0] == found[1]


@pytest.mark.parametrize("tokens", (30, 100))
def test_the_broken_end_of_a_turn_fails_once(tokens: int, engine_of: Callable) -> None:
    """Also where no column stands above it: what a request that failed has read is kept no longer."""
    engine = engine_of("qwen3_5", rows=8)
    first = engine.add(prompt(tokens, 1), SAY)
    run(engine)
    manager = engine.manager
    for checkpoint in manager.reuse.checkpoints.all.values():
        for (name, _), state in manager.state.tensors.items():
            if name != "queries" and state.is_floating_point():
                state[:, checkpoint.row] = float("nan")
    tries = []
    for _ in range(2):
        tries.append(engine.add([*first.tokens, *prompt(30, 2)], SAY))
        run(engine)
    assert [request.error is None for request in tries] == [False, True] and tries[0].cached_tokens > 0


def test_a_turn_that_cannot_go_on_in_its_cache_begins_with_what_is_kept(engine_of: Callable) -> None:
    """As where a template drops thoughts of the turn before: recurrent state cannot go back to where they part."""
    engine, said = engine_of("qwen3_5", rows=8), prompt(400, 1)
    first = engine.add(said, SAY, hold=True, marks=[(384, "client")])
    run(engine)
    second = engine.add([*said[:390], *prompt(20, 2)], SAY, hold=True, after=first)
    run(engine)
    assert second.cached_tokens == 384 and second.reuse["reason"] != "off"
    engine.abort(second)
    engine.manager.reuse.forget()
    assert_nothing_held(engine)
