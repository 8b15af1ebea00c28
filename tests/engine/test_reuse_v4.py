"""Reuse over DeepSeek-V4's cache: window rings, compressor state and entries of a prompt that others have read.

It has no exact mode, so a hit is compared with what the same prompt gives cut into other chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_v4
import torch

from engine.driving import assert_nothing_held, run
from engine.reusing import ASK, apart, ask, check, poison
from engine.test_warm import read
from hybridkv import LLM, CacheConfig
from hybridkv.cache import KVCacheManager
from hybridkv.cache.reuse import Reuse
from hybridkv.engine.engine import Engine
from hybridkv.engine.warm import WarmReader

BASE = tiny_v4.token_ids(300)
MARKS = [(at, "client") for at in (64, 128, 192, 256)]
PARAMS = replace(ASK, max_tokens=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tiny_v4.Oracle("mini", tmp_path_factory.mktemp("mini")).folder
    return LLM(str(folder), "cpu", "float32", cache=CacheConfig(kv_dtype="f32", block=16), max_context=320)


@pytest.fixture
def engine_of(llm: LLM) -> Callable[..., Engine]:
    def build(rows: int | None = None, step_tokens: int = 512, pages: int = 60) -> Engine:
        schema = llm.plan.schema
        manager = KVCacheManager(schema, {s.name: pages for s in schema.streams}, 4, 320, checkpoints=rows)
        if rows is not None:
            Reuse(manager)
        return Engine(llm.model, manager, step_tokens=step_tokens)

    return build


@pytest.mark.slow
def test_a_hit_of_any_length_is_as_near_to_cold_as_another_cut(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(6)
    assert engine.manager.reuse is not None and engine.manager.reuse.q == 64
    ask(engine, BASE, PARAMS, marks=MARKS)
    other = tiny_v4.token_ids(300, seed=5)
    for shared, length in ((256, 300), (200, 205), (133, 197), (64, 75), (290, 300)):
        tokens = [*BASE[:shared], *other[shared:length]]
        known = ask(engine_of(), tokens, PARAMS)
        spread = max(apart(ask(engine_of(step_tokens=n), tokens, PARAMS), known) for n in (64, 128))
        poison(engine)
        warm = ask(engine, tokens, PARAMS)
        assert warm.cached_tokens == shared // 64 * 64 - (64 if shared // 64 * 64 > length - 1 else 0)
        assert warm.generated == known.generated
        assert apart(warm, known) <= max(2 * spread, 1e-5)  # f32: some units in the last place where cuts agree
    assert_nothing_held(engine)


def test_a_state_that_is_not_its_own_shows(engine_of: Callable[..., Engine]) -> None:
    engine, tokens = engine_of(6), [*BASE[:256], *tiny_v4.token_ids(30, seed=5)]
    ask(engine, BASE, PARAMS, marks=MARKS)
    known = ask(engine_of(), tokens, PARAMS)
    assert engine.manager.reuse is not None
    deep = next(c for c in engine.manager.reuse.checkpoints.all.values() if c.position == 256)
    engine.manager.state.reset(deep.row)
    assert apart(ask(engine, tokens, PARAMS), known) > 1e-3


def test_what_lies_behind_a_checkpoint_is_read_without_being_stored(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(6)
    ask(engine, BASE, PARAMS, marks=[(64, "client")])
    tokens = [*BASE[:290], *tiny_v4.token_ids(9, seed=6)]
    reuse = engine.manager.reuse
    assert reuse is not None
    poison(engine)
    named = {name: reuse.pages(name) for name in reuse.parts}
    pools = {name: engine.manager.tables[name].pool.tensors for name in named}
    before = {name: {k: t[:, named[name]].clone() for k, t in pools[name].items()} for name in named}
    warm = ask(engine, tokens, PARAMS)
    assert warm.cached_tokens == 64 and warm.reuse["matched"] == 256
    for name, kept in before.items():
        for k, old in kept.items():
            new = pools[name][k][:, named[name]]
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), "shared pages were written"
    known = ask(engine_of(), tokens, PARAMS)
    assert warm.generated == known.generated and apart(warm, known) < 1e-4  # f32, replayed in one chunk of 192


@pytest.mark.slow
def test_requests_that_crowd_give_what_they_give_alone(engine_of: Callable[..., Engine]) -> None:
    engine, other = engine_of(2, step_tokens=64, pages=26), tiny_v4.token_ids(300, seed=8)
    prompts = [[*BASE[:at], *other[at : at + 40]] for at in (30, 100, 64, 130, 128, 70)]
    asked = [engine.add(tokens, replace(PARAMS, max_tokens=20), marks=[(64, "client")]) for tokens in prompts]
    run(engine)
    check(engine)
    assert sum(r.cached_tokens > 0 for r in asked) >= 2
    for request, tokens in zip(asked, prompts, strict=True):
        assert request.error is None
        assert request.generated == ask(engine_of(step_tokens=64), tokens, replace(PARAMS, max_tokens=20)).generated
    assert_nothing_held(engine)


@pytest.mark.parametrize("stops", [0, 1])
def test_a_view_that_was_read_ahead_is_as_near_to_cold_as_another_cut(
    engine_of: Callable[..., Engine], stops: int
) -> None:
    engine, view = engine_of(6), [*BASE[:100], *tiny_v4.token_ids(170, seed=5)]
    ask(engine, BASE[:200], PARAMS)
    read(engine, WarmReader(0), BASE[:200], view, stops, salt=b"")
    poison(engine)
    tokens = [*view, *tiny_v4.token_ids(9, seed=6)]
    known = ask(engine_of(), tokens, PARAMS)
    spread = max(apart(ask(engine_of(step_tokens=n), tokens, PARAMS), known) for n in (64, 128))
    found = ask(engine, tokens, PARAMS)
    assert found.cached_tokens == 256 and found.generated == known.generated
    assert apart(found, known) <= max(2 * spread, 1e-5)  # f32: some units in the last place where cuts agree
    assert_nothing_held(engine)
