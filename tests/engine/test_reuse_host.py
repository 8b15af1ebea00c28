"""Prompts that begin with what has gone to the host: the bits of a cold run, the reasons, and copies that fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_v4
import torch
from interrupting import interrupted_at
from long_form import spread

from engine.driving import assert_nothing_held, count_tokens, prompt, run
from engine.reusing import ASK, Cold, apart, ask, check, drive_out, poison, same
from engine.test_tails import turn as end_turn
from hybridkv import LLM, CacheConfig
from hybridkv.cache import KVCacheManager, host_columns
from hybridkv.cache.host_columns import HostColumns
from hybridkv.cache.lookup import Asked
from hybridkv.cache.publishing import Reading, Staged
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier
from hybridkv.cache.worth import BELIEVED, ByWorth, policy_of
from hybridkv.engine.engine import Engine

BASE = prompt(300)
MARKS = [(at, "client") for at in (64, 128, 192, 256)]
CPU = torch.device("cpu")


def reuse_of(engine: Engine) -> Reuse:
    assert engine.manager.reuse is not None
    return engine.manager.reuse


def parting(shared: int, length: int, seed: int = 1) -> list[int]:
    rest = prompt(length, seed)
    if shared < length and rest[shared] == BASE[shared]:
        rest[shared] = (rest[shared] + 1) % 97
    return [*BASE[:shared], *rest[shared:]]


@pytest.fixture
def with_host(engine_of: Callable) -> Callable[..., Engine]:
    """`with_host("llama")`: exact, with room on the host for pages as on a GPU."""

    def build(kind: str, blocks: int = 400, **more: Any) -> Engine:
        settings = {"exact": True, "rows": 6, "step_tokens": 128} | more
        return engine_of(kind, host=HostTier(blocks * BLOCK, CPU, pages=True), **settings)

    return build


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_hit_from_the_host_gives_the_bits_of_a_cold_run(kind: str, with_host: Callable, engine_of: Callable) -> None:
    engine, cold = with_host(kind), Cold(lambda: engine_of(kind, exact=True))
    ask(engine, BASE, marks=MARKS)
    found = {"device": 0, "host": 0}
    for shared, length in ((256, 300), (133, 197), (192, 196), (300, 300), (200, 290)):
        drive_out(engine)
        tokens, counts = parting(shared, length), count_tokens(engine)
        warm = ask(engine, tokens)
        at = min(shared, length - 1)
        assert warm.cached_tokens == (at // 16 * 16 if kind == "llama" else at // 64 * 64), warm.reuse
        assert warm.reuse["tier"] == "host" and warm.reuse["load_ms"] >= 0
        assert sum(counts) == length - warm.cached_tokens + 3, "tokens were computed that had come back"
        assert same(warm, cold(tokens))
        again = ask(engine, tokens)
        assert again.reuse["tier"] == "device" and "load_ms" not in again.reuse and same(again, cold(tokens))
        found["host"] += warm.cached_tokens
        found["device"] += again.cached_tokens
        assert {tier: reuse_of(engine).counts[f"{tier}_hit_tokens"] for tier in found} == found
    assert_nothing_held(engine)
    reuse_of(engine).forget()
    assert not engine.manager.host.used


def test_what_went_down_comes_back_byte_for_byte(with_host: Callable) -> None:
    engine = with_host("qwen3_5")
    ask(engine, BASE, marks=MARKS)
    reuse = reuse_of(engine)
    for tail in [c for c in reuse.checkpoints.all.values() if c.position % 64]:
        reuse.checkpoints.drop(tail)
    whole = {c: c.end for c in reuse.columns if c.covers}

    def bytes_of() -> dict[int, list[torch.Tensor]]:
        found = {}
        for column, end in whole.items():
            parts = []
            for name, (begin, streams, per) in reuse.parts.items():
                ids = column.pages[begin : begin + streams * per]  # type: ignore[index]
                pools = engine.manager.tables[name].pool.tensors.values()
                parts += [pool[:, ids].clone().view(torch.uint8) for pool in pools]
            if column.checkpoint is not None:
                rows = engine.manager.state.snapshot(column.checkpoint.row).values()  # type: ignore[attr-defined]
                parts += [row.contiguous().view(torch.uint8) for row in rows]
            found[end] = parts
        return found

    before = bytes_of()
    drive_out(engine)
    for at in (64, 128, 192, 256):  # so that every state comes back
        assert ask(engine, [*BASE[:at], 5, 6], cache="read").cached_tokens == at
    after = bytes_of()
    assert len(before) == 4 and sum(len(parts) for parts in before.values()) > 12
    for end, parts in before.items():
        assert all(torch.equal(a, b) for a, b in zip(parts, after[end], strict=True)), end


def test_only_what_a_mark_or_a_used_checkpoint_needs_goes_down(with_host: Callable) -> None:
    engine = with_host("qwen3_5")
    ask(engine, BASE[:150], marks=[(64, "client")])
    reuse = reuse_of(engine)
    drive_out(engine)
    assert sorted(c.end for c in reuse.columns) == [64], "an end of a turn, or columns that no state needs, are kept"
    assert [s.kind for s in reuse.host.states.values()] == ["client"]
    reuse.forget()
    engine = with_host("qwen3_5", rows=0)
    ask(engine, BASE)
    drive_out(engine)
    assert not reuse_of(engine).columns.count and not engine.manager.host.used


def test_a_state_alone_comes_back_where_its_columns_stayed(with_host: Callable, engine_of: Callable) -> None:
    engine, cold = with_host("qwen3_5", rows=1), Cold(lambda: engine_of("qwen3_5", exact=True))
    for seed in (1, 2):
        ask(engine, prompt(200, seed), marks=[(128, "client")])
    assert reuse_of(engine).columns.away == 0 and len(reuse_of(engine).host.states) == 1
    tokens = [*prompt(200, 1)[:140], *prompt(20, 5)]
    poison(engine)
    warm = ask(engine, tokens)
    assert warm.cached_tokens == 128 and warm.reuse["tier"] == "host" and same(warm, cold(tokens))
    assert len(reuse_of(engine).host.states) == 2, "it came and made room for the other one"


def test_a_state_on_the_host_is_not_dropped_until_it_goes_from_there(with_host: Callable) -> None:
    """A policy learns from what becomes of states: one that comes back and is used was not dropped before."""
    engine = with_host("qwen3_5", rows=1)
    reuse, policy = reuse_of(engine), policy_of("value", engine.manager.schema)
    assert isinstance(policy, ByWorth)
    reuse.checkpoints.policy, fates = policy, policy.fates

    def chance(good: int, known: int) -> float:
        return (good + BELIEVED / 2) / (known + BELIEVED)

    for seed in (1, 2):
        ask(engine, prompt(200, seed), marks=[(128, "client")])
    assert len(reuse.host.states) == 1 and fates.chance("client", 0) == chance(0, 0)
    assert ask(engine, [*prompt(200, 1)[:140], 5, 6]).reuse["tier"] == "host"
    assert len(reuse.host.states) == 2 and fates.chance("client", 0) == chance(1, 1)
    reuse.host.make_room(engine.manager.host.blocks.total)
    assert not reuse.host.states and fates.chance("client", 0) == chance(1, 2)
    assert fates.chance("client", 1) == chance(0, 0), "the one that was used is on the device"
    ask(engine, prompt(200, 3), marks=[(128, "client")])
    assert [stored.uses for stored in reuse.host.states.values()] == [1] and fates.chance("client", 1) == chance(0, 0)
    reuse.host.resting = True
    drive_out(engine)  # columns find no place on the host, and the state there goes with those before it
    assert (
        not reuse.host.states
        and fates.chance("client", 1) == chance(0, 1)
        and fates.chance("client", 0) == chance(1, 3)
    )


def test_a_load_that_does_not_pay_is_left_and_said(with_host: Callable, engine_of: Callable) -> None:
    engine, cold = with_host("qwen3_5"), Cold(lambda: engine_of("qwen3_5", exact=True))
    ask(engine, BASE, marks=MARKS)
    drive_out(engine)
    host, tokens = reuse_of(engine).host, parting(256, 290)
    engine.manager.host._rate, engine.manager.host.speed = 1e6, 1e9  # a slow host, a quick model
    warm = ask(engine, tokens)
    assert warm.cached_tokens == 0 and warm.reuse["reason"] == "loading_slower" and "tier" not in warm.reuse
    assert "quicker" in warm.reuse["why"] and same(warm, cold(tokens))
    # its columns were read again: they are on the device, and what was on the host of them is not kept
    assert all(c.host is None for c in reuse_of(engine).columns if c.pages is not None)
    check(engine)
    nbytes = engine.manager.schema.slot_bytes + 4 * host.each * BLOCK
    for speed, pays in ((0.69 * 256 / (1e-3 + nbytes / 1e6), True), (0.71 * 256 / (1e-3 + nbytes / 1e6), False)):
        reuse_of(engine).forget()
        ask(engine, BASE, marks=MARKS)
        drive_out(engine)
        engine.manager.host.speed = speed
        assert (ask(engine, tokens).cached_tokens == 256) == pays


def test_reading_is_timed_on_long_prompts_alone(engine_of: Callable) -> None:
    engine = engine_of("llama", rows=0, context=2048, pool=4096)
    ask(engine, prompt(1000, 3))
    assert engine.manager.host.speed == 0
    ask(engine, prompt(1100, 4))
    assert engine.manager.host.speed > 0
    assert engine.manager.host.rate > 0 and engine.manager.host.rate == engine.manager.host.rate


def test_an_answer_that_waits_for_a_slot_does_not_count_as_reading(
    engine_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first token comes from the prompt that the first answer read, most of which was there."""
    engine, seen, saw = engine_of("llama", rows=0, slots=1), [], HostTier.saw_reading

    def see(self: HostTier, tokens: int, seconds: float) -> None:
        seen.append(tokens)
        saw(self, tokens, seconds)

    monkeypatch.setattr(HostTier, "saw_reading", see)
    ask(engine, BASE[:200])
    several = ask(engine, [*BASE[:192], 1, 2, 3], replace(ASK, n=3, temperature=1.0))
    assert several.cached_tokens == 192 and len(several.siblings) == 2 and all(s.generated for s in several.siblings)
    assert seen == [200, 3]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_copy_that_fails_costs_its_hit_alone(
    kind: str, failing: int, with_host: Callable, engine_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy of a load is one of pages, the second one, where there is state, of that."""
    engine, cold = with_host(kind), Cold(lambda: engine_of(kind, exact=True))
    other = prompt(200, 60)
    ask(engine, other, marks=[(128, "client")])
    ask(engine, BASE, marks=MARKS)
    drive_out(engine)
    up, copies, tokens = HostTier._up, [], parting(256, 290)

    def broken(self: HostTier, *args: Any) -> Any:
        copies.append(1)
        if len(copies) == (failing if kind == "qwen3_5" else 1):
            raise RuntimeError("a copy that was made to fail")
        return up(self, *args)

    monkeypatch.setattr(HostTier, "_up", broken)
    warm = ask(engine, tokens, marks=MARKS)
    assert warm.cached_tokens == 0 and same(warm, cold(tokens)) and engine.manager.host.failed == 1
    check(engine)
    assert ask(engine, tokens).reuse["tier"] == "device"
    found = ask(engine, [*other[:130], 3, 4])
    assert found.reuse["tier"] == "host" and found.cached_tokens == 128, "another hit was lost with it"
    assert reuse_of(engine).host.counts["loads failed"] == 1
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_where_the_device_has_no_memory_to_copy_with_the_prompt_is_read(
    kind: str, with_host: Callable, engine_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cold, tokens = with_host(kind), Cold(lambda: engine_of(kind, exact=True)), parting(256, 290)
    ask(engine, BASE, marks=MARKS)
    drive_out(engine)
    views = HostColumns._views

    def broken(self: HostColumns, *args: Any) -> Iterator[Any]:
        yield next(views(self, *args))  # some of it has been written
        raise torch.OutOfMemoryError("made to fail")

    monkeypatch.setattr(HostColumns, "_views", broken)
    warm = ask(engine, tokens, marks=MARKS)
    assert warm.cached_tokens == 0 and same(warm, cold(tokens))
    assert reuse_of(engine).host.counts["loads failed"] == 1 and not reuse_of(engine).columns.away
    assert ask(engine, tokens).reuse["tier"] == "device"
    assert_nothing_held(engine)


def test_copies_that_save_less_than_they_take_are_left_for_a_while(with_host: Callable) -> None:
    engine = with_host("llama")
    host, tier = reuse_of(engine).host, engine.manager.host
    tier.speed, tier._rate = 1e9, 1e6  # nothing is ever loaded
    ask(engine, BASE)
    drive_out(engine)
    assert host.counts["columns stored"] > 0
    host.look_at_costs(999)
    assert not host.resting
    host.look_at_costs(1000)
    assert host.resting and host.counts["rests"] == 1
    stored = host.counts["columns stored"]
    ask(engine, prompt(200, 7))
    drive_out(engine)
    assert host.counts["columns stored"] == stored and host.counts["columns dropped"] > 0
    host.look_at_costs(2000)  # nothing was copied since: it is tried again
    assert not host.resting
    tier.speed = 1.0
    assert ask(engine, BASE).reuse["tier"] == "host"
    host.look_at_costs(3000)
    assert not host.resting, "what was loaded saved more than it took"


def test_copies_of_conversations_are_no_cost_of_prefixes(with_host: Callable) -> None:
    engine = with_host("qwen3_5")
    host, tier = reuse_of(engine).host, engine.manager.host
    tier.speed, tier._rate = 1e9, 1e6
    blocks = tier.put([torch.zeros(BLOCK, dtype=torch.uint8)])  # as a conversation that is sent there
    assert blocks is not None and len(list(tier.get(blocks))) == 1
    host.look_at_costs(1000)
    assert not host.resting and not host.copied
    tier.drop(blocks)
    down, up = tier.copied_down, tier.copied_up
    ask(engine, BASE, marks=MARKS)
    drive_out(engine)
    assert host.copied == tier.copied_down - down > 0
    tier.speed = 0.0
    assert ask(engine, parting(256, 290)).reuse["tier"] == "host"
    assert host.copied == tier.copied_down - down + tier.copied_up - up > tier.copied_down - down


def test_more_than_may_be_in_flight_is_dropped(with_host: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_host("llama")
    ask(engine, BASE)
    monkeypatch.setattr(HostTier, "in_flight", property(lambda self: (256 << 20) + 1))
    drive_out(engine)
    assert not reuse_of(engine).columns.count and not engine.manager.host.used
    assert reuse_of(engine).host.counts["columns dropped"] > 0


def test_what_one_step_needs_goes_down_whole(with_host: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it fills what may be in flight: a column that is dropped half way takes those below it along."""
    engine = with_host("llama")
    ask(engine, BASE)
    monkeypatch.setattr(host_columns, "GROUP", BLOCK)
    monkeypatch.setattr(HostTier, "in_flight", property(lambda self: self.copied_down << 20))
    drive_out(engine)
    assert reuse_of(engine).columns.away == 18 and reuse_of(engine).host.counts["columns stored"] == 18
    ask(engine, prompt(100, 8))
    drive_out(engine)
    assert reuse_of(engine).columns.away == 18, "more went down than may be on its way"


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_full_host_gives_up_what_was_used_longest_ago(kind: str, with_host: Callable) -> None:
    engine = with_host(kind, blocks=30 if kind == "llama" else 8)
    prompts = [prompt(200, seed) for seed in range(5)]
    for tokens in prompts:
        ask(engine, tokens, marks=[(128, "client")])
        drive_out(engine)
    cached = [ask(engine, [*tokens[:140], 1, 2], cache="read").cached_tokens for tokens in reversed(prompts)]
    assert cached[0] >= 128 and cached[-1] == 0, cached
    assert sorted(cached, reverse=True) == cached
    check(engine)


def test_conversations_take_room_from_prefixes_and_not_the_other_way(with_host: Callable) -> None:
    engine = with_host("qwen3_5", blocks=8, slots=2, pool=1024, context=400)
    host = engine.manager.host
    held = ask(engine, prompt(60, 9), hold=True)
    ask(engine, BASE[:200], marks=[(64, "client"), (128, "client")])
    engine.scheduler.spare(held)
    assert engine.manager.frozen[held.key].exported is not None
    drive_out(engine)
    before = reuse_of(engine).host.nbytes
    assert before["pages"] > 0 and before["states"] > 0
    taken = host.used
    more = ask(engine, prompt(60, 10), hold=True)  # one more conversation, and no room beside the prefixes
    while host.blocks.free > 1:
        assert host.put([torch.zeros(BLOCK, dtype=torch.uint8)]) is not None
    fillers = host.blocks.refs.copy()
    engine.scheduler.spare(more)
    assert {held.key, more.key} <= engine.manager.frozen.keys(), "a conversation was given up before a prefix"
    after = reuse_of(engine).host.nbytes
    assert sum(after.values()) < sum(before.values()) and taken and fillers.sum()
    reuse_of(engine).check()


def test_what_makes_room_between_lookup_and_load_is_not_loaded(with_host: Callable, engine_of: Callable) -> None:
    """A conversation is sent to the host for the very request that was to begin with what lies there."""
    sizes = {"pool": 320, "context": 320, "slots": 3}
    engine = with_host("llama", blocks=12, **sizes)
    cold = Cold(lambda: engine_of("llama", exact=True, context=320))
    ask(engine, BASE[:200])
    drive_out(engine)
    assert reuse_of(engine).columns.away == 12
    held = ask(engine, prompt(180, 9), cache=False, hold=True)
    tokens = [*BASE[:199], *prompt(20, 3)]
    warm = ask(engine, tokens)
    assert held.key in engine.manager.frozen and same(warm, cold(tokens)), warm.reuse
    assert 128 <= warm.cached_tokens < 192 and warm.reuse["tier"] == "host", "its last columns made room"
    engine.abort(held)
    assert_nothing_held(engine)


def test_a_turn_that_waits_for_its_step_does_not_bring_what_is_being_loaded(
    with_host: Callable, engine_of: Callable
) -> None:
    """It ends where a column does that lies on the host; pages are short, so that it would be waited for half way."""
    engine, cold = with_host("qwen3_5"), Cold(lambda: engine_of("qwen3_5", exact=True))
    engine.launches_ahead, reuse = True, reuse_of(engine)
    goes_on = [*end_turn(engine, cold, 128).tokens, 5, 6]
    assert ask(engine, goes_on).cached_tokens == 128  # the end of the turn was used: it has a place on the host
    drive_out(engine)
    ask(engine, prompt(140, 40), marks=[(128, "client")])  # what goes only after all is settled
    end_turn(engine, cold, 128)  # its prompt ends before the state on the host, and is read
    [end] = [column for column in reuse.columns if column.stored is not None]
    assert reuse.publishing.late and end.end == 128 and end.pages is None
    nobody = Reading(b"", b"", True, 0, reuse.columns.root(b""))
    waits = Staged("one that runs", nobody, nobody.column, [], np.zeros((0, reuse.columns.width), np.int32), None, -1)
    reuse.publishing.staged.append(waits)
    taken = {table.allocator: table.allocator.acquire(table.allocator.free) for table in engine.manager.tables.values()}
    hit = reuse.load(Asked(b"", np.array(goes_on, np.int32), 129, 130))
    assert hit.cached == 128 and not hit.loaded and end.pages is not None and end.host is None
    assert reuse.publishing.staged == [waits], "what is not known to be sound is there for others"
    reuse.publish()
    for allocator, pages in taken.items():
        allocator.release(pages)
    check(engine)
    assert same(ask(engine, goes_on), cold(goes_on))


def test_a_request_with_a_budget_begins_with_what_comes_from_the_host(with_host: Callable, engine_of: Callable) -> None:
    config = CacheConfig("f32", 16, budget=96, window=24, recent=16)
    sizes = {"eviction": config, "step_tokens": 128, "context": 512}
    engine = with_host("qwen3_5", **sizes)
    cold = Cold(lambda: engine_of("qwen3_5", exact=True, **sizes))
    ask(engine, BASE, marks=MARKS)
    drive_out(engine)
    warm = ask(engine, parting(256, 290))
    assert warm.cached_tokens == 256 and warm.evictions and warm.reuse["tier"] == "host"
    assert same(warm, cold(parting(256, 290)))
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_several_prompts_at_once_load_what_they_share_once(kind: str, with_host: Callable, engine_of: Callable) -> None:
    engine, cold = with_host(kind), Cold(lambda: engine_of(kind, exact=True))
    engine.launches_ahead = True
    ask(engine, BASE, marks=MARKS)
    drive_out(engine)
    prompts = [parting(at, at + 20, seed) for seed, at in enumerate((256, 256, 192, 130))]
    asked = [engine.add(tokens, ASK) for tokens in prompts]
    run(engine)
    check(engine)
    assert [r.reuse["tier"] for r in asked].count("host") >= 1 and asked[1].reuse["tier"] == "device"
    assert all(same(r, cold(tokens)) for r, tokens in zip(asked, prompts, strict=True))
    assert_nothing_held(engine)


def test_where_pages_are_short_prompts_in_turn_live_on_the_host(
    with_host: Callable, engine_of: Callable, two_layers: Path
) -> None:
    """Five texts in room for one and a half: each is read once, and comes back for its next question."""
    sizes = {"exact": True, "context": 320, "folder": two_layers}
    engine = with_host("qwen3_5", pool=480, slots=2, rows=2, **sizes)
    cold = Cold(lambda: engine_of("qwen3_5", **sizes))
    texts = [prompt(260, 70 + i) for i in range(5)]
    for turn in range(3):
        for i, tokens in enumerate(texts):
            asked = [*tokens, *prompt(9, 10 * turn + i)]
            found = ask(engine, asked, marks=[(256, "client")])
            assert found.cached_tokens == (256 if turn else 0), (turn, i, found.reuse)
            assert same(found, cold(asked))
    assert reuse_of(engine).host.counts["loads"] >= 8 and reuse_of(engine).counts["host_hit_tokens"] >= 2048


# ---- interrupts


@spread("kind, what", ("llama", "qwen3_5"), ("down", "up"))
def test_an_interrupt_anywhere_loses_nothing_that_is_not_its_own(
    kind: str, what: str, with_host: Callable, engine_of: Callable
) -> None:
    engine, cold = with_host(kind, context=320, pool=640), Cold(lambda: engine_of(kind, exact=True))
    plain, tokens = replace(ASK, max_tokens=1), BASE[:140]
    line, times, rng = 0, 0, random.Random(5)
    while True:
        line += rng.randint(5, 120)
        ask(engine, tokens, plain, marks=[(64, "client"), (128, "client")])
        if what == "up":
            drive_out(engine)

        def go() -> None:
            if what == "up":
                engine.add([*tokens[:130], 7], plain)
                run(engine)
            else:
                drive_out(engine)

        if not interrupted_at(line, go, "/cache"):
            break
        times += 1
        if what == "down":
            engine.manager.rebuild()
            rows = reuse_of(engine).checkpoints
            assert not rows.reserved
        run(engine)
        check(engine)
        poison(engine)
        assert same(ask(engine, [*tokens[:130], 8], plain), cold([*tokens[:130], 8], plain))
        reuse_of(engine).forget()
        check(engine)
        assert not engine.manager.host.used
    assert times > 10


# ---- DeepSeek-V4


def test_v4_after_a_hit_from_the_host_is_as_near_to_cold_as_another_cut(tmp_path: Path) -> None:
    """Window rings and compressor state come back with the entries. It has no exact mode: see test_reuse_v4.py."""
    folder, params = tiny_v4.Oracle("mini", tmp_path).folder, replace(ASK, max_tokens=3)
    llm = LLM(str(folder), "cpu", "float32", cache=CacheConfig(kv_dtype="f32", block=16), max_context=320)

    def build(rows: int | None = None, step_tokens: int = 512) -> Engine:
        schema = llm.plan.schema
        host = HostTier(100 * BLOCK, CPU, pages=True)
        manager = KVCacheManager(schema, {s.name: 60 for s in schema.streams}, 4, 320, checkpoints=rows, host=host)
        if rows is not None:
            Reuse(manager)
        return Engine(llm.model, manager, step_tokens=step_tokens)

    engine, base, other = build(6), tiny_v4.token_ids(300), tiny_v4.token_ids(300, seed=5)
    ask(engine, base, params, marks=MARKS)
    for shared, length in ((256, 300), (133, 197), (200, 205)):
        tokens = [*base[:shared], *other[shared:length]]
        known = ask(build(), tokens, params)
        spread = max(apart(ask(build(step_tokens=n), tokens, params), known) for n in (64, 128))
        drive_out(engine)
        warm = ask(engine, tokens, params)
        assert warm.cached_tokens == shared // 64 * 64 and warm.reuse["tier"] == "host"
        assert warm.generated == known.generated
        assert apart(warm, known) <= max(2 * spread, 1e-5)  # f32: some units in the last place where cuts agree
    assert_nothing_held(engine)
