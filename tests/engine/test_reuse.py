"""Reuse in the engine: a prompt that begins with what others have read gives what it would give cold.

Exact mode: the same bits. Fast mode: no further from cold than cold is from itself, read in other chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.driving import assert_nothing_held, count_tokens, prompt, run
from engine.reusing import ASK, Cold, apart, ask, ask_only, check, logprobs, poison, same
from hybridkv.cache import checkpoints
from hybridkv.cache.reuse import Reuse
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.beginnings import asked_of
from hybridkv.engine.engine import Engine
from hybridkv.errors import RequestError

KINDS = ("llama", "qwen3_5", "qwen3_5_moe", "qwen3_next")
CUTS = (64, 128, 192, 256)
MARKS = [(at, "client") for at in CUTS]
BASE = prompt(300)


@pytest.fixture(scope="module")
def cold(engine_of: Callable) -> Callable[..., Cold]:
    """`cold(kind, ...)`: answers without reuse."""
    made: dict[tuple, Cold] = {}

    def build(kind: str, exact: bool = True, **how: object) -> Cold:
        key = (kind, exact, *how.items())
        if key not in made:
            made[key] = Cold(lambda: engine_of(kind, exact=exact, **how))
        return made[key]

    return build


def parting(shared: int, length: int, seed: int = 1) -> list[int]:
    """The base's first `shared` tokens, then others: never the base's own next one."""
    rest = prompt(length, seed)
    if shared < length and rest[shared] == BASE[shared]:
        rest[shared] = (rest[shared] + 1) % 97
    return [*BASE[:shared], *rest[shared:]]


def reuse_of(engine: Engine) -> Reuse:
    assert engine.manager.reuse is not None
    return engine.manager.reuse


# ---- the same as cold


@pytest.mark.parametrize(
    ("kind", "step"), [("llama", 128), ("qwen3_5", 64), ("qwen3_5", 128), ("qwen3_5_moe", 512), ("qwen3_next", 128)]
)
def test_a_hit_of_any_length_gives_the_bits_of_a_cold_run(
    kind: str, step: int, engine_of: Callable, cold: Callable
) -> None:
    """The donor's slot, and every page and row that nobody has, are hostile before each prompt."""
    engine = engine_of(kind, exact=True, rows=6, step_tokens=step)
    ask(engine, BASE, marks=MARKS)
    q = reuse_of(engine).q
    lengths = [(128, 192), (129, 193), (130, 194), (133, 197), (191, 204), (192, 196), (256, 257), (63, 70), (300, 300)]
    if kind in KINDS[2:] or step == 64:
        lengths = lengths[::3]
    for shared, length in lengths:
        poison(engine)
        tokens = parting(shared, length)
        warm = ask(engine, tokens)
        kept = [at for at in (CUTS if kind != "llama" else range(0, 300, q)) if at <= min(shared, length - 1)]
        assert warm.cached_tokens == max(kept, default=0), warm.reuse
        assert warm.reuse["cached"] + warm.reuse["read"] == length
        assert same(warm, cold(kind)(tokens))
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_identical_prompt_computes_its_end_alone(kind: str, engine_of: Callable, cold: Callable) -> None:
    engine, counts = engine_of(kind, exact=True, rows=6), []
    for length in (256, 257, 268, 320):
        tokens = [*BASE, *prompt(20, 3)][:length]
        ask(engine, tokens, marks=MARKS)
        poison(engine)
        counts = count_tokens(engine)
        free = engine.manager.free_pages()
        again = ask(engine, tokens)
        most = (length - 1) // 64 * 64 if kind != "llama" else min(length - 1, length // 16 * 16)
        most = min(most, 256) if kind != "llama" else most
        assert again.cached_tokens == most and sum(counts[:-3]) == length - most
        assert again.reuse["reason"] in ("full", "no_checkpoint") and same(again, cold(kind)(tokens))
        assert engine.manager.free_pages() == free, "what was there already was stored again"


def test_tokens_between_a_checkpoint_and_the_columns_end_take_no_page(engine_of: Callable, cold: Callable) -> None:
    engine = engine_of("qwen3_5", exact=True, rows=6)
    ask(engine, BASE, marks=[(64, "client")])
    poison(engine)
    before = [pool.clone() for table in engine.manager.tables.values() for pool in table.pool.tensors.values()]
    tokens, named = parting(250, 260), reuse_of(engine).pages("attention")
    warm = ask(engine, tokens)
    assert warm.cached_tokens == 64 and warm.reuse["matched"] == 192 and warm.reuse["reason"] == "no_checkpoint"
    assert same(warm, cold("qwen3_5")(tokens))
    after = [pool for table in engine.manager.tables.values() for pool in table.pool.tensors.values()]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, named].view(torch.uint8), new[:, named].view(torch.uint8)), (
            "shared pages were written"
        )


def test_the_second_reader_leaves_a_checkpoint_where_prompts_part(
    engine_of: Callable, cold: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "NEAR", 64)  # so that short prompts do
    engine = engine_of("qwen3_5", exact=True, rows=6)
    long = prompt(300, 9)
    first, second, third = ([*long[:270], *prompt(20, seed)] for seed in (11, 12, 13))
    assert ask(engine, first).reuse["reason"] == "cold"
    found = ask(engine, second)
    assert found.cached_tokens == 0 and found.reuse["matched"] == 256 and "taken at 256" in found.reuse["why"]
    hit = ask(engine, third)
    assert hit.cached_tokens == 256 and hit.reuse["reason"] == "full"
    assert same(hit, cold("qwen3_5")(third))
    assert sorted({c.kind for c in reuse_of(engine).checkpoints.all.values()}) == ["branch", "turn"]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_several_at_once_and_beside_others_that_answer(kind: str, engine_of: Callable, cold: Callable) -> None:
    engine = engine_of(kind, exact=True, rows=6, slots=4)
    ask(engine, BASE, marks=MARKS)
    long = engine.add(prompt(70, 8), replace(ASK, max_tokens=12))
    for _ in range(3):
        engine.step()
    poison(engine)
    prompts = [parting(at, at + 9, seed) for seed, at in enumerate((256, 256, 192, 130))]
    asked = [engine.add(tokens, ASK) for tokens in prompts]
    run(engine)
    check(engine)
    assert all(r.cached_tokens >= 128 for r in asked)
    assert all(same(r, cold(kind)(tokens)) for r, tokens in zip(asked, prompts, strict=True))
    assert same(long, cold(kind)(prompt(70, 8), replace(ASK, max_tokens=12)))


@pytest.mark.parametrize("kind", KINDS[1:2])
def test_preempted_requests_go_on_from_what_is_kept(kind: str, engine_of: Callable, cold: Callable) -> None:
    engine = engine_of(kind, exact=True, rows=3, slots=3, pool=304, context=300, step_tokens=64)
    prompts = [parting(100, 130, seed) for seed in range(5)]
    asked = [engine.add(tokens, replace(ASK, max_tokens=20), marks=[(64, "client")]) for tokens in prompts]
    run(engine)
    check(engine)
    assert sum(r.preemptions for r in asked) > 0, "nothing was preempted"
    for request, tokens in zip(asked, prompts, strict=True):
        assert same(request, cold(kind)(tokens, replace(ASK, max_tokens=20)))
    assert_nothing_held(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"), [("llama", "plain"), ("qwen3_5", "plain"), ("qwen3_5", "bounded"), ("qwen3_5", "again")]
)
def test_a_request_with_a_budget_begins_with_a_plain_prefix(
    kind: str, how: str, engine_of: Callable, cold: Callable
) -> None:
    """The plain prefix stays for others, and what survived does not enter it."""
    settings = {"plain": {}, "bounded": {"bounded": True}, "again": {"decode_every": 3}}[how]
    config = CacheConfig("f32", 16, budget=96, window=24, recent=16, **settings)  # type: ignore[arg-type]
    sizes = {"eviction": config, "step_tokens": 128, "context": 512}
    engine = engine_of(kind, exact=True, rows=6, **sizes)
    params = replace(ASK, max_tokens=8)
    ask(engine, BASE, params, marks=MARKS)
    for shared, length in ((256, 290), (256, 262), (300, 300)):
        poison(engine)
        tokens = parting(shared, length)
        warm = ask(engine, tokens, params)
        first = min(length, 256 if how == "bounded" else length)
        assert warm.cached_tokens <= first - 24 and warm.evictions
        assert warm.cached_tokens >= (64 if how == "bounded" else 128)
        assert warm.reuse["reason"] in ("window", "bounded", "diverged", "full", "no_checkpoint")
        assert same(warm, cold(kind, **sizes)(tokens, params))
    plain = ask(engine, parting(256, 270), params, eviction=None)
    assert plain.cached_tokens >= 192 and same(plain, cold(kind, **sizes)(parting(256, 270), params, eviction=None))


def test_where_pages_are_short_a_request_with_a_budget_gives_up_its_own_columns(
    engine_of: Callable, cold: Callable
) -> None:
    config = CacheConfig("f32", 16, budget=96, window=24, recent=16)
    sizes = {"eviction": config, "step_tokens": 128, "context": 512, "pool": 320, "slots": 2}
    engine = engine_of("qwen3_5", exact=True, rows=2, **sizes)
    for seed in range(3):
        tokens = prompt(300, 40 + seed)
        assert same(ask(engine, tokens), cold("qwen3_5", **sizes)(tokens))
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_several_answers_to_one_prompt_that_was_there(kind: str, engine_of: Callable, cold: Callable) -> None:
    engine = engine_of(kind, exact=True, rows=6)
    ask(engine, BASE, marks=MARKS)
    poison(engine)
    params = replace(ASK, n=3, temperature=1.0, seed=5)
    warm, known = ask(engine, parting(256, 270), params), cold(kind)(parting(256, 270), params)
    assert same(warm, known) and warm.cached_tokens == 256
    assert all(same(a, b) for a, b in zip(warm.siblings, known.siblings, strict=True))
    assert_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_held_conversation_adds_to_what_is_kept_and_goes_on(kind: str, engine_of: Callable, cold: Callable) -> None:
    engine = engine_of(kind, exact=True, rows=6)
    first = ask(engine, BASE[:200], hold=True, marks=[(128, "client")])
    more = [*first.tokens, *prompt(70, 4)]
    second = ask(engine, more, hold=True, after=first)
    assert second.cached_tokens == 203 and same(second, cold(kind)(more))
    engine.abort(second)
    third = ask(engine, [*more[:260], *prompt(5, 6)])
    assert third.reuse["matched"] == 256, "what the second turn read is not kept"
    assert same(third, cold(kind)([*more[:260], *prompt(5, 6)]))
    assert_nothing_held(engine)


# ---- fast mode


@pytest.mark.parametrize("kind", KINDS)
def test_in_fast_mode_a_hit_is_as_near_to_cold_as_another_cut_and_a_lost_state_is_not(
    kind: str, engine_of: Callable
) -> None:
    tokens, plain = parting(256, 300), replace(ASK, max_tokens=1)
    known = ask(engine_of(kind), tokens, plain)
    # the same prompt in other chunks, and its last tokens one by one, differ by as much as rounding does
    spread = max(apart(ask(engine_of(kind, step_tokens=n), tokens, plain), known) for n in (64, 128, 192))
    bound = max(2 * spread, 1e-5)  # f32: where these happen to agree, some units in the last place of a logit
    engine = engine_of(kind, rows=6)
    ask(engine, BASE, marks=MARKS)
    poison(engine)
    warm = ask(engine, tokens, plain)
    assert warm.cached_tokens == 256 and apart(warm, known) <= bound
    replayed = ask(engine, parting(290, 299), plain)
    assert apart(replayed, ask(engine_of(kind), parting(290, 299), plain)) <= bound
    if kind == "llama":
        return
    checkpoints = reuse_of(engine).checkpoints.all
    deep = next(c for c in checkpoints.values() if c.position == 256)
    early = next(c for c in checkpoints.values() if c.position == 192)
    state = engine.manager.state
    state.copy(early.row, deep.row)  # a state of 64 tokens before
    assert apart(ask(engine, tokens, plain), known) > 10 * bound
    state.reset(deep.row)  # none at all
    assert apart(ask(engine, tokens, plain), known) > 10 * bound


# ---- what is read, and what is not


def test_a_request_says_whether_it_reads_and_whether_others_may(engine_of: Callable) -> None:
    engine = engine_of("llama", rows=0)
    assert ask(engine, BASE, cache=False).reuse["reason"] == "off" and not reuse_of(engine).columns.count
    assert ask(engine, BASE, cache="read").reuse["reason"] == "cold" and not reuse_of(engine).columns.count
    assert ask(engine, BASE, cache="write").reuse["reason"] == "off" and reuse_of(engine).columns.count
    assert ask(engine, BASE, cache="write").cached_tokens == 0
    assert ask(engine, BASE, cache=False).cached_tokens == 0
    assert ask(engine, BASE).cached_tokens == 288
    assert ask(engine, BASE, replace(ASK, prompt_logprobs=1)).cached_tokens == 0, "its prompt's logits are wanted"
    with pytest.raises(RequestError, match="cache must be True, False, 'read' or 'write', not 'both'"):
        engine.add(BASE, cache="both")
    for marks in ([(301, "client")], [(-1, "client")], [(5, "mine")], [(i, "client") for i in range(5)]):
        with pytest.raises(RequestError, match="mark"):
            engine.add(BASE, marks=marks)


def test_another_salt_sees_nothing(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5", rows=4)
    ask(engine, BASE, marks=MARKS, salt=b"one")
    for salt in (b"", b"two"):
        found = ask(engine, BASE, salt=salt)
        assert found.reuse == {
            "cached": 0, "matched": 0, "read": 300, "written": 0, "reason": "cold",
            "why": "no prompt that begins like this one is kept",
        }  # fmt: skip
    assert ask(engine, BASE, salt=b"one").cached_tokens == 256
    reuse_of(engine).forget(b"one")
    assert ask(engine, BASE, salt=b"one").cached_tokens == 0
    check(engine)


def test_a_text_is_forgotten_as_far_as_no_other_shares_it(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5", rows=16)
    reuse, one, two = reuse_of(engine), ask(engine, BASE, marks=MARKS), ask(engine, parting(200, 300), marks=MARKS)
    reuse.forget_text(b"another", np.array(one.tokens, np.int32))
    assert ask(engine, BASE).cached_tokens == 256
    reuse.forget_text(b"", np.array(one.tokens, np.int32))
    found = reuse.lookup(asked_of(engine.scheduler, two))
    assert found.cached >= 256, "the other text is as it was"
    again = ask(engine, BASE)
    assert again.cached_tokens == again.reuse["matched"] == 192, "they part at token 200"
    check(engine)
    for each in (again, two):
        reuse.forget_text(b"", np.array(each.tokens, np.int32))
    assert not reuse.columns.count and not reuse.checkpoints.all, "nothing else was read"
    assert_nothing_held(engine)


def test_every_reason_is_given_where_it_holds(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5", rows=2)
    assert ask(engine, prompt(64, 77)).reuse["reason"] == "too_short"
    assert ask(engine, BASE, marks=[(128, "client"), (256, "client")]).reuse["reason"] == "cold"
    assert ask(engine, BASE[:70]).reuse["reason"] == "no_checkpoint"
    found = ask(engine, parting(135, 250)).reuse
    assert found["reason"] == "diverged" and found["diverged_at"] == 135 and found["cached"] == 128
    assert ask(engine, parting(256, 300)).reuse["reason"] == "full"
    for seed in (1, 2):
        ask(engine, prompt(100, seed), marks=[(64, "client")])
    found = ask(engine, BASE).reuse
    assert found["reason"] == "dropped" and found["cached"] == 0 and found["matched"] == 256


def test_without_room_for_checkpoints_nothing_is_cut_and_columns_are_shared(
    engine_of: Callable, cold: Callable
) -> None:
    engine = engine_of("qwen3_5", exact=True, rows=0)
    ask(engine, BASE, marks=MARKS)
    again = ask(engine, BASE)
    assert again.cached_tokens == 0 and again.reuse["matched"] == 256 and same(again, cold("qwen3_5")(BASE))


# ---- things that go wrong


@pytest.mark.parametrize("kind", KINDS[:2])
def test_what_gave_no_numbers_is_not_kept(kind: str, engine_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(kind, rows=4)
    forward = engine.runner.forward

    def broken(inputs: object) -> torch.Tensor:
        return forward(inputs) * float("nan")

    monkeypatch.setattr(engine.runner, "forward", broken)
    bad = engine.add(BASE, ASK, marks=MARKS)
    run(engine)
    assert bad.finish_reason == "error" and not reuse_of(engine).columns.count
    assert not reuse_of(engine).checkpoints.all and not reuse_of(engine).checkpoints.reserved
    assert_nothing_held(engine)
    monkeypatch.undo()
    assert ask(engine, BASE).reuse["reason"] == "cold"


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_step_that_fails_leaves_nothing_behind(kind: str, engine_of: Callable, cold: Callable) -> None:
    engine = engine_of(kind, exact=True, rows=4, step_tokens=64)
    forward, calls = engine.runner.forward, []

    def failing(inputs: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the third step fails")
        return forward(inputs)

    engine.runner.forward = failing  # type: ignore[method-assign,assignment]
    engine.add(BASE, ASK, marks=MARKS)
    with pytest.raises(RuntimeError, match="the third step fails"):
        run(engine)
    check(engine)
    assert max(c.end for c in reuse_of(engine).columns) == 128, "two steps of 64 had ended well"
    poison(engine)
    tokens = parting(200, 210)
    warm = ask(engine, tokens)
    assert warm.cached_tokens == 128 and same(warm, cold(kind)(tokens))
    assert_nothing_held(engine)


def test_a_full_pool_drops_the_oldest_columns_and_goes_on(engine_of: Callable, cold: Callable) -> None:
    engine = engine_of("llama", exact=True, rows=0, pool=640, slots=2)
    for seed in range(6):
        tokens = prompt(200, 20 + seed)
        assert same(ask(engine, tokens), cold("llama")(tokens))
        assert ask(engine, tokens).cached_tokens == 192
    assert reuse_of(engine).counts["columns_dropped"] > 0
    assert ask(engine, prompt(200, 20)).cached_tokens < 192 and ask(engine, prompt(200, 25)).cached_tokens == 192


@pytest.mark.parametrize("kind", KINDS[1:2])
def test_steps_launched_ahead_change_nothing(kind: str, engine_of: Callable, cold: Callable) -> None:
    """On a CPU a step ends before the next is launched, but the order of all bookkeeping is that of a GPU."""
    engine = engine_of(kind, exact=True, rows=6, step_tokens=64, slots=3)
    engine.launches_ahead = True
    for at, length in ((0, 300), (256, 300), (130, 140), (200, 270), (300, 300)):
        poison(engine)
        tokens = parting(at, length, at + 1)
        first = engine.add(tokens, ASK, marks=MARKS if at == 0 else ())
        other = engine.add(tokens[: length - 5], SamplingParams(max_tokens=9, ignore_eos=True))
        run(engine)
        check(engine)
        assert first.error is None and other.error is None and same(first, cold(kind)(tokens))
    assert_nothing_held(engine)


def test_with_reuse_a_prompt_without_a_hit_gives_the_same_bits_in_fast_mode_too(engine_of: Callable) -> None:
    one, other = (ask(engine_of("qwen3_5", rows=rows), BASE) for rows in (None, 4))
    assert torch.equal(logprobs(one), logprobs(other))


# ---- prompts that come together


@pytest.mark.parametrize("kind", KINDS[:2])
def test_prompts_with_one_text_read_it_once(kind: str, engine_of: Callable) -> None:
    """They wait for the first of them, which leaves a checkpoint where they part, and others pass them."""
    engine = engine_of(kind, rows=4, slots=6, context=1600, pool=6000)
    counts, text = count_tokens(engine), prompt(1300, 3)
    asked = [engine.add([*text, *prompt(20 + i, i)], ASK) for i in range(4)]
    other = engine.add(prompt(200, 50), replace(ASK, max_tokens=1))
    engine.step()
    assert engine.scheduler.running == asked[:1] and other.finished
    run(engine)
    check(engine)
    q = reuse_of(engine).q
    assert [r.cached_tokens for r in asked] == [0, *[1300 // q * q] * 3]
    assert sum(counts) == 1320 + 200 + sum(1300 + 20 + i - 1300 // q * q for i in (1, 2, 3)) + 4 * 3
    for request, i in zip(asked, range(4), strict=True):
        alone = ask(engine_of(kind, context=1600, pool=6000), [*text, *prompt(20 + i, i)])
        assert request.generated == alone.generated and apart(request, alone) < 1e-4  # f32, cut elsewhere


def test_those_that_wait_for_a_reader_go_on_without_it(engine_of: Callable) -> None:
    engine = engine_of("qwen3_5", rows=4, slots=6, context=1600, pool=6000)
    text = prompt(1300, 3)
    first, second = (engine.add([*text, *prompt(20, i)], ASK) for i in range(2))
    engine.step()
    assert second.awaits is not None and second not in engine.scheduler.running
    engine.abort(first)
    run(engine)
    assert second.error is None and len(second.generated) == 4 and 0 < second.reuse["matched"] < 1300
    assert_nothing_held(engine)


def test_what_cannot_be_shared_is_not_waited_for(engine_of: Callable) -> None:
    for how, others in (({"cache": False}, {}), ({}, {"cache": "write"}), ({"salt": b"a"}, {"salt": b"b"})):
        engine = engine_of("llama", rows=0, slots=6, context=1600, pool=6000)
        text = prompt(1300, 3)
        engine.add([*text, 1], ASK, **how)
        engine.add([*text, 2], ASK, **others)
        engine.step()
        assert len(engine.scheduler.running) == 2
        run(engine)


# ---- many sessions


@pytest.mark.slow
def test_a_thousand_sessions_hold_their_system_prompt_once(engine_of: Callable, two_layers: Path) -> None:
    """Each is held for a next turn: an open page a stream is its own, and no page of the prompt."""
    sessions, system = 1000, prompt(128, 60)
    sizes = {"folder": two_layers, "context": 256}
    engine = engine_of("qwen3_5", rows=2, slots=3, pool=128 + 16 * (sessions + 4), **sizes)
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    held = [
        ask_only(engine, [*system, i % 97, i // 97], once, hold=True, marks=[(128, "client")]) for i in range(sessions)
    ]
    check(engine)
    assert engine.scheduler.held == held and engine.scheduler.counts["frozen"] >= sessions - 3
    [(name, table)] = engine.manager.tables.items()
    streams = table.schema.streams
    assert table.allocator.held == streams * 128 // 16 + sessions * streams, "the prompt is held more than once"
    shared = reuse_of(engine).pages(name)
    assert (table.allocator.refs[shared] == 1 + sessions).all() and reuse_of(engine).columns.count == 2
    assert [r.cached_tokens for r in held] == [0] + [128] * (sessions - 1)
    known = engine_of("qwen3_5", **sizes)
    for request in held[:: sessions // 4]:  # and each goes on as itself
        more = [*request.tokens, 5]
        turn = ask_only(engine, more, ASK, after=request)
        alone = ask(known, more)
        assert turn.cached_tokens == 130 and turn.generated == alone.generated and apart(turn, alone) < 1e-4
    for request in held:
        engine.abort(request)
    assert_nothing_held(engine)
    assert engine.manager.host.used == 0
