"""Prompts that are resumed from checkpoints in bf16: how far from cold, what is rounded and what is not, and the host.

Bounds are of the largest difference of a token's logits over its largest logit. A state is rounded by up to 2^-9 of
each of its numbers. Seen over eight prompts of qwen3_5 and of qwen3_next: 5e-4 to 5.1e-3 for the first token, up to
1.0e-2 for one of the next (they ask the state other questions), 5e-5 to 2.4e-4 for the mean of 360 tokens, up to 1.0e-4
for one of the last 60, since old state decays. Bounds are twice the largest of these. Two cold runs in other chunks are
1e-5 apart at the most. qwen3_5_moe is within them for six prompts of eight: in two a near-tie of its router went the
other way, which is worth 0.3 to 0.4 of a token's logits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.driving import assert_nothing_held, prompt, run
from engine.reusing import ask, check, drive_out, poison, same
from hybridkv.cache.checkpoints import Checkpoint
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.request import Request

FIRST, ANY, MEAN, LATE = 1e-2, 2e-2, 5e-4, 2e-4
CUTS = (64, 128, 192, 256)
MARKS = [(at, "client") for at in CUTS]
AFTER = 360  # tokens
TEXT = prompt(257 + AFTER, 50)
ELSE = [next(i for i in range(97) if i not in {TEXT[at] for at in CUTS})] * 2  # the text never goes on so
STATE = ("gdn", "recurrent")
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def reuse_of(engine: Engine) -> Reuse:
    assert engine.manager.reuse is not None
    return engine.manager.reuse


def at(engine: Engine, position: int) -> Checkpoint:
    """The checkpoint there."""
    return next(c for c in reuse_of(engine).checkpoints.all.values() if c.position == position)


def forced(engine: Engine, count: int = AFTER, text: list[int] = TEXT) -> tuple[Tensor, Request]:
    """[count, vocabulary] logits after each token of the text from number 256 on: the first of them is read as the end
    of a prompt, the others as what follows it.
    """
    seen: list[Tensor] = []
    hook = SamplingParams(max_tokens=1, logits_hook=lambda _, logits: seen.append(logits.clone()), ignore_eos=True)
    request = engine.add(text[:257], hook, cache="read", hold=True)
    run(engine)
    assert request.error is None, request.error
    more = [engine.score_after(request, text[257 : 256 + count])] if count > 1 else []
    engine.abort(request)
    check(engine)
    return torch.cat([torch.stack(seen), *more]), request


def apart(found: Tensor, cold: Tensor) -> Tensor:
    """[tokens] how far logits are from those of a cold run."""
    return (found - cold).abs().amax(1) / cold.abs().amax(1)


def within(found: Tensor, cold: Tensor) -> bool:
    """Whether all bounds hold."""
    each = apart(found, cold)
    return bool(each[0] <= FIRST and each.max() <= ANY and each.mean() <= MEAN and each[-60:].max() <= LATE)


@pytest.fixture(scope="module")
def cold(engine_of: Callable) -> Callable[[str], Tensor]:
    """Logits of a run that reuses nothing."""
    made: dict[str, Tensor] = {}

    def build(kind: str) -> Tensor:
        if kind not in made:
            made[kind] = forced(engine_of(kind, context=1024))[0]
        return made[kind]

    return build


@pytest.fixture
def rounding(engine_of: Callable) -> Callable[..., Engine]:
    """`rounding("qwen3_5")`: fast mode, checkpoints in bf16."""

    def build(kind: str, **more: object) -> Engine:
        return engine_of(kind, **({"context": 1024, "rows": 6, "checkpoints": "bf16"} | more))

    return build


# ---- how far from cold


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_hit_is_as_near_to_cold_as_the_rounding_and_what_is_rounded_more_or_lost_is_not(
    kind: str, rounding: Callable, cold: Callable
) -> None:
    engine, known = rounding(kind), cold(kind)
    ask(engine, TEXT[:290], ONE, marks=MARKS)
    poison(engine)
    found, request = forced(engine)
    assert request.cached_tokens == 256 and within(found, known), apart(found, known)
    assert apart(found, known)[0] > 1e-4, "nothing was rounded"
    scale = known.abs().amax(1)
    best = known.topk(2, 1).values
    clear = (best[:, 0] - best[:, 1]) / scale > 2 * ANY  # both logits may be off by as much as that
    assert clear.sum() > AFTER // 2 and (found.argmax(1) == known.argmax(1))[clear].all()
    # the negative controls: a mantissa of three bits, as E4M3 has (first token 2.3e-2 to 0.35), a state of 64 tokens
    # before, none
    state, deep, early = engine.manager.state, at(engine, 256).row, at(engine, 192).row
    row = state.rows(deep)[STATE]
    mantissa, exponent = torch.frexp(row.float())
    row.copy_(torch.ldexp((mantissa * 16).round() / 16, exponent))
    for change in (lambda: None, lambda: state.copy(early, deep), lambda: state.reset(deep)):
        change()
        worse = forced(engine)[0]
        assert not within(worse, known) and apart(worse, known)[0] > 2 * FIRST


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_hits_upon_hits_are_no_further_from_cold(kind: str, rounding: Callable, cold: Callable) -> None:
    """Four prompts, each of which goes on from the checkpoint of the one before: every state is rounded once."""
    engine = rounding(kind)
    for begin in CUTS:
        request = ask(engine, [*TEXT[:begin], *ELSE], ONE, marks=[(begin, "client")])
        assert request.cached_tokens == begin - 64
    poison(engine)
    found, request = forced(engine)
    assert request.cached_tokens == 256 and within(found, cold(kind)), apart(found, cold(kind))


# ---- what is rounded, and what is not


def test_a_state_is_rounded_once_when_it_is_kept_and_goes_on_in_f32(rounding: Callable) -> None:
    plain, engine = rounding("qwen3_5", checkpoints="auto"), rounding("qwen3_5")
    for each in (plain, engine):
        ask(each, TEXT[:130], ONE, marks=MARKS[:1])
    wide = plain.manager.state.rows(at(plain, 64).row)
    narrow = engine.manager.state.rows(at(engine, 64).row)
    assert narrow[STATE].dtype == torch.bfloat16 and torch.equal(narrow[STATE], wide[STATE].bfloat16())
    assert not torch.equal(narrow[STATE].float(), wide[STATE]), "there was nothing to round"
    conv = ("gdn", "conv")
    assert narrow[conv].dtype == wide[conv].dtype == torch.float32 and torch.equal(narrow[conv], wide[conv])
    kept = narrow[STATE].clone()

    held = engine.add(TEXT[:65], ONE, hold=True)
    taken: list[Tensor] = []
    attach = engine.manager.attach_request

    def look(*given: object, **named: object) -> int:
        slot = attach(*given, **named)  # type: ignore[arg-type]
        taken.append(engine.manager.state.rows(slot)[STATE].clone())
        return slot

    engine.manager.attach_request = look  # type: ignore[method-assign]
    run(engine)
    assert held.cached_tokens == 64 and taken[0].dtype == torch.float32 and torch.equal(taken[0], kept.float())
    slot = engine.manager.slot_of[held.key]
    now = engine.manager.state.rows(slot)[STATE]
    assert now.dtype == torch.float32 and not torch.equal(now, now.bfloat16().float()), "it went on in bf16"
    engine.abort(held)

    # what is kept of a text that began with a rounded state is the sum in f32, rounded once more
    held = ask(engine, TEXT[:128], ONE, hold=True, marks=[(128, "client")])
    assert held.cached_tokens == 64
    now = engine.manager.state.rows(engine.manager.slot_of[held.key])[STATE]
    assert torch.equal(engine.manager.state.rows(at(engine, 128).row)[STATE], now.bfloat16())
    assert torch.equal(engine.manager.state.rows(at(engine, 64).row)[STATE], kept), "it was rounded again"
    engine.abort(held)
    assert_nothing_held(engine)


def test_last_queries_and_the_ends_of_turns(rounding: Callable) -> None:
    """A request with a budget goes on from a rounded state, and a next turn from the rounded end of the one before."""
    config = CacheConfig("f32", 16, budget=96, window=24, recent=16)
    engine = rounding("qwen3_5", eviction=config)
    queries = {key: t for key, t in engine.manager.state.tensors.items() if key[0] == "queries"}
    assert queries and not queries.keys() & engine.manager.state.rounded.keys()
    assert all(t.dtype == torch.float32 and t.shape[1] == engine.manager.query_buffers.count for t in queries.values())
    ask(engine, TEXT[:290], ONE, marks=MARKS)
    request = ask(engine, TEXT[:300], ONE)
    assert request.cached_tokens == 256 and request.evictions
    engine = rounding("qwen3_5")
    first = ask(engine, TEXT[:100], SamplingParams(max_tokens=9, ignore_eos=True))
    assert ask(engine, [*first.tokens, *TEXT[:5]], ONE).cached_tokens == 108
    assert engine.manager.state.rows(at(engine, 108).row)[STATE].dtype == torch.bfloat16


# ---- bytes, and the host


def test_bytes_are_those_of_the_rows(rounding: Callable) -> None:
    plain, engine = rounding("qwen3_5", checkpoints="auto").manager, rounding("qwen3_5").manager
    recurrent = plain.state.tensors[STATE]
    rounded = engine.state.rounded[STATE]
    assert rounded.shape[1] == 6 and engine.state.tensors[STATE].shape[1] == engine.slots
    saved = recurrent[:, -6:].nbytes // 2
    assert plain.state.nbytes - engine.state.nbytes == plain.memory_bytes() - engine.memory_bytes() == saved
    assert engine.schema.checkpoint_bytes == sum(row.nbytes for row in engine.state.rows(engine.slots).values())
    assert engine.schema.slot_bytes == sum(row.nbytes for row in engine.state.rows(0).values())
    assert plain.schema.checkpoint_bytes == plain.schema.slot_bytes
    reuse = engine.reuse
    assert reuse is not None and reuse.checkpoints.row_bytes == engine.schema.checkpoint_bytes


def test_from_the_host_it_comes_back_bit_for_bit_in_bf16(rounding: Callable) -> None:
    engine = rounding("qwen3_5", step_tokens=128, host=HostTier(400 * BLOCK, torch.device("cpu"), pages=True))
    manager, reuse = engine.manager, reuse_of(engine)
    ask(engine, TEXT[:300], ONE, marks=MARKS)
    tokens = [*TEXT[:256], *ELSE]
    known = ask(engine, tokens, cache="read")
    before = {c: {key: row.clone() for key, row in manager.state.rows(at(engine, c).row).items()} for c in CUTS}
    drive_out(engine)
    stored = list(reuse.host.states.values())
    assert len(stored) == 4 and all(s.blocks.nbytes == manager.schema.checkpoint_bytes for s in stored)
    assert reuse.host.nbytes["states"] == 4 * manager.schema.checkpoint_bytes
    for position in CUTS:
        assert ask(engine, [*TEXT[:position], *ELSE], cache="read").reuse["tier"] == "host"
        for key, row in manager.state.rows(at(engine, position).row).items():
            assert row.dtype == before[position][key].dtype
            assert torch.equal(row.contiguous().view(torch.uint8), before[position][key].view(torch.uint8)), key
    drive_out(engine)
    again = ask(engine, tokens, cache="read")
    assert again.reuse["tier"] == "host" and same(again, known), "a hit from the host is another than from the device"
    assert_nothing_held(engine)
