"""Eviction inside the engine: when it happens, what stays the same, bounded peaks, many turns, preemption."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from long_form import more as and_more
from long_form import spread
from numerics import assert_same_bytes, logit_gap
from torch import Tensor

from engine.driving import assert_nothing_held, run
from eviction.harness import MaskedRun, dropped_by, record_logits
from hybridkv import LLM
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import LayerCache, Policy, Pyramid, SnapKV
from hybridkv.request import Request

KINDS = ("llama", "qwen3_5")
SAY = SamplingParams(max_tokens=12, ignore_eos=True)


def masked_answer(engine: Engine, request: Request, context: int = 512) -> Tensor:
    """Logits after each token of the request, by a full cache with the dropped entries masked."""
    config = engine.runner.model.config
    assert engine.evictor is not None
    dropped = dropped_by(request, config.attention_layers, config.kv_heads, context)
    table = engine.manager.tables["attention"]
    stored = {torch.float32: "f32", torch.bfloat16: "bf16", torch.uint8: "fp8"}[table.pool.tensors["k"].dtype]
    cache = CacheConfig(stored, table.schema.entries_per_page)
    masked = MaskedRun(engine.runner.model, cache, dropped, context)
    return torch.cat((masked.feed(request.tokens[: request.prompt_tokens], 64), masked.feed(request.generated, 1)))


def pages_in_use(engine: Engine) -> int:
    return engine.manager.tables["attention"].allocator.held


@pytest.mark.parametrize("dtype", ("f32", "bf16", "fp8"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", ({}, {"bounded": True}, {"decode_every": 4}), ids=("after", "bounded", "decode"))
def test_a_budget_that_covers_all_changes_not_a_bit(kind: str, dtype: str, more: dict, evicting: Callable) -> None:
    ids, seen, ends = tiny.token_ids(150), [], []
    for config in ({}, {"budget": 170, **more}):
        engine = evicting(kind, kv_dtype=dtype, **config)
        seen.append(record_logits(engine))
        request = engine.add(ids, SAY, hold=True)
        run(engine)
        table, slot = engine.manager.tables["attention"], engine.manager.slot_of[request.key]
        assert not request.evictions and not engine.manager.compactions
        ends.append((table, table.pages[slot], table.lengths[slot], request.generated))
    for a, b in zip(*seen, strict=True):
        assert_same_bytes(a, b)
    (ta, pa, la, said), (tb, pb, lb, again) = ends
    assert said == again and (pa == pb).all() and (la == lb).all()
    owned = torch.from_numpy(np.unique(pa[pa >= 0])).long()
    full = owned[torch.isin(owned, torch.from_numpy(pa[:, : int(la[0]) // 16].copy()))]  # open pages have unused places
    for name in ta.pool.tensors:
        assert_same_bytes(ta.pool.tensors[name][:, full], tb.pool.tensors[name][:, full])


@pytest.mark.parametrize("length", (48, 49, 64, 65, 150))
def test_eviction_begins_past_budget_and_window(length: int, evicting: Callable) -> None:
    engine = evicting("llama", budget=48, window=16)
    request = engine.add(tiny.token_ids(length), SAY)
    run(engine)
    assert list(request.evictions) == ([length] if length > 64 else [])
    assert_nothing_held(engine)


@pytest.mark.parametrize("scope", ("head", "layer", "global"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_is_the_same_and_the_rest_is_the_masked_caches(
    kind: str, scope: str, evicting: Callable
) -> None:
    ids = tiny.token_ids(150)
    plain = evicting(kind)
    before = record_logits(plain)
    reference = plain.add(ids, SAY)
    run(plain)
    engine = evicting(kind, budget=40, scope=scope)
    seen = record_logits(engine)
    request = engine.add(ids, SAY)
    run(engine)
    for a, b in zip(before[:3], seen[:3], strict=True):  # 64 + 64 + 22 tokens of prompt
        assert_same_bytes(a, b)
    assert request.generated[0] == reference.generated[0] and list(request.evictions) == [150]
    want = masked_answer(engine, request)[149:-1]
    assert logit_gap(want, torch.cat(seen)) < 1e-5
    # how many entries a stream holds at the end: the survivors and what was computed since
    assert request.stats["kept_tokens"] == 40 + 11
    assert request.stats["kv_bytes_kept"] < request.stats["kv_bytes_full"]
    assert_nothing_held(engine)


@spread("kind, policy", KINDS, ("auto", "snapkv", "peak:spread=all"))
def test_a_bounded_prompt_never_holds_more_than_budget_and_chunk(kind: str, policy: object, evicting: Callable) -> None:
    budget, chunk, prompt = 96, 64, 1500
    engine = evicting(kind, budget=budget, bounded=True, policy=policy, pool=2048, context=2048)
    count = engine.manager.tables["attention"].schema.streams
    request = engine.add(tiny.token_ids(prompt), SAY)
    peak, entries = 0, 0
    while not engine.idle:
        engine.step()
        if request.key in engine.manager.slot_of:
            peak = max(peak, pages_in_use(engine))
            entries = max(entries, int(engine.manager.lengths(request.key)["attention"].sum()))
    assert entries <= (budget + 12) * count, "after a step no more than the budget, and what was generated since"
    # a stream of n entries holds ceil(n / 16) pages: a page of rounding for each
    assert peak * 16 <= (budget + chunk + 16) * count
    assert len(request.evictions) > 15 and len(request.generated) == 12
    assert logit_gap(masked_answer(engine, request, 2048)[-13:-1], torch.stack(_answers(engine, request))) < 1e-5


def _answers(engine: Engine, request: Request) -> list[Tensor]:
    """The logits of each generated token, from a second run of the same request."""
    seen = record_logits(engine)
    again = engine.add(request.tokens[: request.prompt_tokens], SAY)
    run(engine)
    assert again.generated == request.generated
    return [part[-1] for part in seen if len(part)][-12:]


@pytest.mark.parametrize(("policy", "more"), (("snapkv:pooling=none", 0), ("auto", 16), ("peak:spread=all", 16)))
def test_a_bounded_prompt_runs_in_a_pool_of_budget_and_chunk(policy: str, more: int, evicting: Callable) -> None:
    """Peak is not only counted: there are no more pages than that. Streams of different lengths each fill a last page
    of their own, which takes a page more."""
    engine = evicting("llama", budget=96, bounded=True, pool=96 + 64 + more, context=4096, policy=policy)
    request = engine.add(tiny.token_ids(2000), SAY)
    run(engine)
    assert request.error is None and len(request.generated) == 12 and request.preemptions == 0
    assert_nothing_held(engine)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("scale", (16, *and_more(64)))
def test_a_prompt_of_512_windows_is_read_in_budget_and_one_step(scale: int, evicting: Callable) -> None:
    """In the long form 32,768 tokens at a budget of 2,048 and steps of 1,024."""
    budget, step, length = 32 * scale, 16 * scale, 512 * scale
    engine = evicting(
        "llama", budget=budget, bounded=True, window=scale, recent=scale, page_size=scale, pool=budget + step,
        context=length + 4, step_tokens=step, policy="auto:spread=even",
    )  # fmt: skip
    request = engine.add(tiny.token_ids(length), SamplingParams(max_tokens=2, ignore_eos=True))
    streams, peak = engine.manager.tables["attention"].schema.streams, 0
    forward = engine.runner.forward

    def watched(inputs: object) -> Tensor:
        nonlocal peak
        peak = max(peak, pages_in_use(engine))  # pages of the step are reserved here, nothing is evicted yet
        return forward(inputs)  # type: ignore[arg-type]

    engine.runner.forward = watched  # type: ignore[method-assign]
    while not engine.idle:
        engine.step()
        if request.key in engine.manager.slot_of:
            held = engine.manager.lengths(request.key)["attention"].max()
            assert held <= (budget + 1 if request.generated else budget + step - step // 4 - scale)
    assert peak * scale == (budget + step) * streams, (
        "the peak is budget + one step, to the page, what is read ahead included"
    )
    # from the first multiple of a quarter step past budget + 3/4 step - window on, and at the end
    assert (
        len(request.evictions) == (length - budget - step * 3 // 4) // (step // 4) + 1 and len(request.generated) == 2
    )


@spread("every, policy", (1, 4, 16), ("auto", "snapkv"))
def test_a_long_answer_holds_a_constant_cache(every: int, policy: str, evicting: Callable) -> None:
    engine = evicting("qwen3_5", budget=40, decode_every=every, policy=policy)
    request = engine.add(tiny.token_ids(60), SamplingParams(max_tokens=110, ignore_eos=True))
    longest, last = 0, 0
    while not engine.idle:
        engine.step()
        if request.key in engine.manager.slot_of:
            lengths = engine.manager.lengths(request.key)["attention"]
            last = float(lengths.mean()) if policy == "auto" else int(lengths.max())
            longest = max(longest, last if engine.manager.position(request.key) > 64 + every else 0)
    assert longest <= 40 + every and len(request.generated) == 110
    assert len(request.evictions) > 80 // every
    assert_nothing_held(engine)


def test_a_long_answer_equals_the_masked_cache(evicting: Callable) -> None:
    engine = evicting("llama", budget=40, decode_every=8)
    seen = record_logits(engine)
    request = engine.add(tiny.token_ids(60), SamplingParams(max_tokens=60, ignore_eos=True))
    run(engine)
    assert len(request.evictions) >= 5
    assert logit_gap(masked_answer(engine, request)[59:-1], torch.cat(seen)) < 1e-5


@spread("policy, kind", ("snapkv", "auto", "peak:spread=all"), KINDS)
def test_turns_on_a_compacted_cache(kind: str, policy: object, evicting: Callable) -> None:
    """Each turn appends at its streams' lengths with keys turned by position; past the budget it is cut again."""
    engine = evicting(kind, budget=40, policy=policy, pool=1024)
    tokens, last = tiny.token_ids(120), None
    seen = record_logits(engine)
    for turn, more in enumerate((tiny.token_ids(3, seed=1), tiny.token_ids(70, seed=2), [])):
        seen.clear()
        request = engine.add(tokens, SAY, hold=True, after=last)
        run(engine)
        done = engine.manager.position(request.key)
        if turn:
            assert request.cached_tokens > 100, "the last turn's cache was used"
        assert engine.manager.lengths(request.key)["attention"].mean() < 90 and done == len(request.tokens) - 1
        want = masked_answer(engine, request)
        got = torch.cat([part for part in seen if len(part)])
        assert logit_gap(want[request.prompt_tokens - 1 : -1], got) < 1e-5
        tokens, last = request.tokens + more, request
    assert len(request.evictions) == 2, "the second turn fits beside the first's survivors, the third does not"
    engine.abort(request)
    assert_nothing_held(engine)


@spread(
    "more, kind",
    [
        pytest.param({}, id="after"),
        pytest.param({"bounded": True}, id="bounded"),
        pytest.param({"decode_every": 4}, id="decode"),
        pytest.param({"policy": "snapkv", "bounded": True}, id="even"),
    ],
    KINDS,
)
def test_a_preempted_request_drops_the_same_entries_again(kind: str, more: dict, evicting: Callable) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    ids = tiny.token_ids(150)
    engine = evicting(kind, budget=40, **more)
    alone = engine.add(ids, params)
    run(engine)
    for when in (1, 3, 8, 20):
        engine = evicting(kind, budget=40, **more)
        request = engine.add(ids, params)
        for _ in range(when):
            engine.step()
        before = dict(request.evictions)
        engine.scheduler.preempt(request)
        assert pages_in_use(engine) == 0
        run(engine)
        assert request.preemptions == 1 and request.generated == alone.generated, f"preempted after step {when}"
        assert request.evictions.keys() == alone.evictions.keys()
        for at, keep in before.items():
            assert request.evictions[at] is keep
        assert_nothing_held(engine)


def test_a_second_turn_that_is_preempted_goes_on_as_before(evicting: Callable) -> None:
    answers = []
    for preempted in (False, True):
        engine = evicting("qwen3_5", budget=40)
        first = engine.add(tiny.token_ids(120), SAY, hold=True)
        run(engine)
        second = engine.add(first.tokens + tiny.token_ids(9, seed=1), SAY, after=first)
        for _ in range(4):
            engine.step()
        if preempted:
            engine.scheduler.preempt(second)
        run(engine)
        answers.append(second.generated)
        assert 120 in second.evictions
        assert_nothing_held(engine)
    assert answers[0] == answers[1]


def test_an_aborted_request_gives_all_back(evicting: Callable) -> None:
    for steps in (1, 3, 4, 9):
        engine = evicting("qwen3_5", budget=40, decode_every=3)
        request = engine.add(tiny.token_ids(150), SAY)
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        assert_nothing_held(engine)


def test_requests_beside_each_other_evict_their_own(evicting: Callable) -> None:
    """Different prompts, some below the budget, in one batch; each as if alone."""
    engine = evicting("qwen3_5", budget=40, pool=4096, slots=6, step_tokens=128)
    prompts = [tiny.token_ids(n, seed=n) for n in (150, 20, 97, 64, 130, 40)]
    together = [engine.add(ids, SAY) for ids in prompts]
    run(engine)
    for ids, request in zip(prompts, together):
        single = evicting("qwen3_5", budget=40, step_tokens=128)
        alone = single.add(ids, SAY)
        run(single)
        assert request.generated == alone.generated
        assert request.evictions.keys() == alone.evictions.keys()
    assert_nothing_held(engine)


class Broken(Policy):
    def score(self, layer: LayerCache) -> Tensor:
        return torch.full(layer.positions.shape, float("nan"))


def test_a_broken_policy_fails_its_request_and_frees_everything(evicting: Callable) -> None:
    engine = evicting("llama", budget=40, policy=Broken())
    request = engine.add(tiny.token_ids(100), SAY)
    run(engine)
    assert request.finish_reason == "error" and "NaN" in str(request.error)
    assert_nothing_held(engine)
    with pytest.raises(HybridKVError, match="NaN"):
        engine.score(tiny.token_ids(100))
    assert_nothing_held(engine)


def test_a_policy_by_name_and_by_object_are_the_same(evicting: Callable) -> None:
    from hybridkv.eviction.policies import Knorm

    answers = []
    for policy in ("knorm", Knorm()):
        engine = evicting("llama", budget=40, policy=policy)
        request = engine.add(tiny.token_ids(150), SAY)
        run(engine)
        answers.append(request.generated)
    assert answers[0] == answers[1]
    assert CacheConfig(budget=64).policy == "auto"


def test_freed_pages_let_a_waiting_request_in(evicting: Callable) -> None:
    """A pool for one full prompt; after it is cut, a second one runs beside it."""
    engine = evicting("llama", budget=40, pool=180)
    long = engine.add(tiny.token_ids(150), SamplingParams(max_tokens=25, ignore_eos=True))
    other = engine.add(tiny.token_ids(60, seed=1), SAY)
    engine.step()
    assert other.status.value == "waiting"
    for _ in range(4):
        engine.step()
    assert other.status.value == "running" and not long.finished
    run(engine)
    assert long.preemptions == other.preemptions == 0
    assert_nothing_held(engine)


def test_broken_scores_end_one_request_and_not_its_neighbours(evicting: Callable) -> None:
    """The policy gives NaN for one prompt; the other goes on as if alone."""
    engine = evicting("llama", budget=40, pool=600)
    evictor = engine.evictor
    assert evictor is not None
    bad = engine.add(tiny.token_ids(150), SAY)
    good = engine.add(tiny.token_ids(120, seed=3), SAY)

    class Broken(SnapKV):
        def score(self, layer: LayerCache) -> torch.Tensor:
            scores = super().score(layer)
            return scores * torch.nan if scores.shape[-1] == 150 else scores

    bad.eviction = good.eviction = replace(evictor.default, policy=Broken())
    run(engine)
    assert bad.finish_reason == "error" and "NaN" in str(bad.error)
    assert good.finish_reason == "length" and good.evictions
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    "policy", ("auto", "peak:spread=all", Pyramid(), "snapkv"), ids=("auto", "all", "pyramid", "even")
)
def test_pools_planned_for_a_bounded_prompt_are_enough(policy: Any, oracle: Callable) -> None:
    cache = CacheConfig("f32", page_size=16, budget=96, window=16, recent=16, bounded=True, policy=policy)
    folder = str(oracle("llama").folder)
    llm = LLM(folder, device="cpu", dtype="float32", cache=cache, max_requests=1, max_context=512, step_tokens=64)
    assert llm.plan.pages["attention"] < llm.plan.schema.streams[0].pages(400)  # the prompt would never fit whole
    [out] = llm.generate([tiny.token_ids(400)], SamplingParams(max_tokens=12, ignore_eos=True))
    assert out.error is None and len(out.token_ids) == 12


def test_a_bounded_prompt_that_the_pools_can_never_read_is_refused_at_once(evicting: Callable) -> None:
    engine = evicting("llama", budget=96, bounded=True, pool=112, step_tokens=128)
    for policy, most in (("snapkv", 224), ("auto", 224 + 16)):  # streams of different lengths: a page more
        with pytest.raises(RequestError, match=f"112 tokens.*{most} are needed"):
            engine.add(tiny.token_ids(400), SAY, eviction=replace(engine.evictor.default, policy=policy))
    assert_nothing_held(engine)
    small = engine.add(tiny.token_ids(90), SAY)  # the next good request works
    run(engine)
    assert small.finish_reason == "length" and len(small.generated) == 12
