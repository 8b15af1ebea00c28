"""A crowd: requests of every kind that come while others decode, are preempted and go; each against the same request
alone.

In exact mode all is equal to the last bit. In fast mode a token may differ where rounding decides, and that has to be
shown: of the logits that the lone engine has after the same tokens, some that differ by no more than the rounding bound
give the crowd's token by the definition of sampling, with the request's own seed, position and history.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny_v4
import torch
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.runner import StepInputs
from hybridkv.engine.sampler import Filters
from hybridkv.eviction import Evictor
from hybridkv.kernels.best_tokens import best_tokens
from hybridkv.kernels.sampling.rows import SampleRow, seen_tokens
from hybridkv.kernels.sampling.sample import sample_rows_ref
from hybridkv.llm import LLM
from hybridkv.models import cache_schema
from hybridkv.request import Request

EVERY: dict[str, Any] = dict(
    temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.4,
    frequency_penalty=0.3, logit_bias={3: 1.5, 50: -4.0, 96: 0.5},
)  # fmt: skip
# prompt tokens, what is asked for; those with bad words come last, since no step is launched ahead beside them
ASKS: tuple[tuple[int, dict[str, Any]], ...] = (
    (90, {}),
    (126, {"temperature": 1.2, "seed": 5}),
    (64, EVERY | {"seed": (1 << 62) + 7}),
    (3, {"temperature": 1.5, "top_k": 12, "seed": 5}),
    (150, {"temperature": 1.4, "top_p": 0.8, "seed": 1}),
    (1, {"temperature": 1.3, "min_p": 0.05, "seed": 2}),
    (65, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5}),
    (33, EVERY | {"seed": 40, "n": 3}),
    (128, {"logit_bias": {8: 2.0, 17: -100.0}, "frequency_penalty": 1.0}),
    (17, {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "seed": 3, "min_tokens": 9, "stop_token_ids": range(48)}),
    (70, {}),
    (100, EVERY | {"seed": 9, "n": 2, "bad": ((5,), (20, 21), (60,))}),
    (2, {"bad": ((11,), (30,), (90,))}),
)
Pair = tuple[Request, Request]  # of the crowd, and alone
FAMILIES = ("llama", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v4")
EVICTING: dict[str, int] = dict(budget=48, window=16, recent=16)
HOSTILE = 7  # the token that padding names


@dataclass(frozen=True)
class Wish:
    """One request."""

    tokens: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...]

    def add(self, engine: Engine, **how: Any) -> list[Request]:
        """The request and its siblings."""
        request = engine.add(self.tokens, self.params, **how)
        for each in (request, *request.siblings):  # as ids, which need no tokenizer
            each.bad_words = self.bad_words
        return [request, *request.siblings]


def wishes(token_ids: Callable[..., list[int]], tokens: int = 14) -> list[Wish]:
    """Answers of different lengths, with logprobs."""
    found = []
    for i, (length, ask) in enumerate(ASKS):
        ask = {"max_tokens": tokens + i % 5, "logprobs": 4, "ignore_eos": True} | ask
        bad = ask.pop("bad", ())
        found.append(Wish(token_ids(length, seed=300 + i), SamplingParams(**ask), bad))
    return found


def with_seed(wish: Wish, i: int) -> Wish:
    """Answer i of several, asked for alone."""
    assert wish.params.seed is not None
    return replace(wish, params=replace(wish.params, n=1, seed=wish.params.seed + i))


def open_family(kind: str, device: str, oracle: Callable, place: Path, exact: bool = False, **cache: Any) -> LLM:
    """A tiny model in f32. `place`: an empty folder."""
    if kind == "deepseek_v4":
        folder, cache = tiny_v4.Oracle("mini", place).folder, {"block": 16}
    else:
        folder, cache = oracle(kind).folder, {"page_size": 16, **cache}
    return LLM(str(folder), device, "float32", exact, CacheConfig("f32", **cache), max_requests=1, max_context=256)


def bound(kind: str) -> float:
    """What rounding may do to a logit: that of tests against transformers; experts that are chosen among add to it."""
    return 1e-4 if kind in ("llama", "qwen3", "qwen3_5") else 1e-3


def engines(llm: LLM, pool: int = 256) -> tuple[Engine, Engine]:
    """One with room, and a small one."""
    sizes = ((1024, 4), (pool, 6))
    one, other = (engine_over(llm, pool=n, slots=s, context=256, step_tokens=128) for n, s in sizes)
    return one, other


def engine_over(
    llm: LLM,
    cache: CacheConfig | None = None,
    *,
    pool: int = 4096,
    slots: int = 8,
    context: int = 512,
    step_tokens: int = 512,
) -> Engine:
    """Another engine over a model that is open, with room for `pool` tokens; all bytes of its memory are hostile."""
    cache = cache or llm.cache_config
    schema = cache_schema(llm.config, cache, llm.dtype)
    manager = KVCacheManager(schema, schema.pool_pages(1, pool), slots, context, llm.device, llm.manager.exact)
    pools = [pool for table in manager.tables.values() for pool in table.pool.tensors.values()]
    for memory in (*pools, *manager.state.tensors.values()):
        memory.view(torch.uint8).fill_(255)  # NaN in all formats
    evictor = Evictor.make(cache, manager, scale=llm.config.attention_scale)
    return Engine(llm.model, manager, step_tokens=step_tokens, evictor=evictor)


@dataclass
class Watched:
    """What really happened while an engine ran."""

    beside: int = 0  # steps in which requests decoded and prompts were read
    replayed: int = 0  # of these, captured ones
    decoded: int = 0  # captured steps of decoding requests alone
    ahead: int = 0  # steps that were launched ahead
    padding: int = 0  # tokens of padding, all of which named a real token
    preempted: int = 0
    requests: list[list[Request]] = field(default_factory=list)  # siblings together


def watch(engine: Engine) -> Watched:
    """Count, and make padding hostile."""
    seen, forward, launch = Watched(), engine.runner.forward, engine.pipeline.launch_ahead

    def watched(inputs: StepInputs) -> Tensor:
        host = inputs.step.host
        counts = host.num_scheduled[host.real]
        inputs.tokens[counts.sum() :] = HOSTILE
        seen.padding += len(inputs.tokens) - int(counts.sum())
        mixed = bool((counts == 1).any() and (counts > 1).any())
        prompts, decodes = engine.runner.mixed, engine.runner.graphs
        seen.beside += mixed
        seen.replayed += mixed and prompts is not None and prompts.ready(inputs.step, len(inputs.rows)) is not None
        seen.decoded += decodes is not None and decodes.ready(inputs.step) is not None
        return forward(inputs)

    def launched() -> None:
        launch()
        seen.ahead += engine.pipeline.ahead is not None

    engine.runner.forward = watched  # type: ignore[method-assign]
    engine.pipeline.launch_ahead = launched  # type: ignore[method-assign]
    return seen


def run_crowd(engine: Engine, asked: Sequence[Wish], every: int = 4) -> Watched:
    """Three at once, then one more every few steps, until all have ended. Now and then the youngest is preempted, as if
    pages had run out, which may also happen.
    """
    seen, left = watch(engine), list(asked)
    engine.launches_ahead = True
    for step in range(5000):
        if not left and engine.idle:
            break
        if left and (step % every == 0 or len(seen.requests) < 3):
            seen.requests.append(left.pop(0).add(engine))
            continue
        if step % 9 == 8 and len(engine.scheduler.running) > 2:
            engine.drain()
            if len(engine.scheduler.running) > 1:
                engine.scheduler.preempt(max(engine.scheduler.running, key=lambda r: r.order))
        engine.step()
    assert engine.idle, "not idle after 5000 steps"
    engine.manager.check_integrity()
    assert engine.manager.free_slots == engine.manager.slots
    assert all(table.allocator.held == 0 for table in engine.manager.tables.values())
    seen.preempted = sum(r.preemptions for each in seen.requests for r in each)
    return seen


def run_alone(engine: Engine, wish: Wish) -> list[Request]:
    found = wish.add(engine)
    for _ in range(2000):
        if engine.idle:
            return found
        engine.step()
    raise AssertionError("not idle after 2000 steps")


def lone_and_crowd(lonely: Engine, engine: Engine, asked: Sequence[Wish]) -> tuple[list[Pair], Watched]:
    """Each request alone in one engine, and all of them in another, which is small: answers of both, side by side."""
    alone = [run_alone(lonely, wish) for wish in asked]
    seen = run_crowd(engine, asked)
    assert seen.preempted > 1 and seen.ahead > 5 and seen.beside > 3
    assert engine.runner.mixed is None or not engine.runner.mixed.sizes or (seen.replayed > 3 and seen.padding > 100)
    assert engine.runner.graphs is None or seen.decoded > 5
    found = [pair for each in zip(seen.requests, alone, strict=True) for pair in zip(*each, strict=True)]
    assert all(mine.error is its.error is None for mine, its in found)
    return found, seen


def assert_distinct(pairs: Sequence[Pair]) -> None:
    assert len({tuple(mine.generated) for mine, _ in pairs}) == len(pairs), "equal answers show nothing"


def assert_same_bits(crowd: Request, alone: Request) -> None:
    """Exact mode: tokens, logprobs, and where what was kept."""
    assert (crowd.generated, crowd.finish_reason) == (alone.generated, alone.finish_reason)
    assert crowd.logprobs == alone.logprobs
    assert list(crowd.evictions) == list(alone.evictions)
    for mine, its in zip(crowd.evictions.values(), alone.evictions.values(), strict=True):
        assert all(np.array_equal(a, b) for x, y in zip(mine.lists(), its.lists(), strict=True) for a, b in zip(x, y))


def count_near_ties(crowd: Request, alone: Request, engine: Engine, bound: float) -> int:
    """Tokens of the crowd's answer that differ from those of the lone one's logits, each shown to be a near-tie.

    `engine`: of the lone request. `bound`: what rounding does to a logit, as a part of the largest.
    """
    logits, first, ties = engine.score(crowd.tokens).cpu(), crowd.prompt_tokens, 0
    same = crowd.generated == alone.generated
    for i, token in enumerate(crowd.generated):
        x = logits[first + i - 1]
        delta = bound * float(x.abs().max())
        _check_logprobs(crowd, i, x, 2 * delta)  # of the logit itself, and of the sum of all
        chosen = {token} if same or crowd.generated[:i] != alone.generated[:i] else {token, alone.generated[i]}
        want = defined_token(x, crowd, i)
        for other in chosen - {want}:
            near = any(defined_token(moved, crowd, i) == other for moved in nudged(x, want, other, delta))
            assert near, (
                f"token {i} of request {crowd.order} is {other}, its logits give {want}, and no logits within "
                f"{delta:.2g} of them give {other}"
            )
            ties += 1
    assert same or ties, f"request {crowd.order}: {crowd.generated} in a crowd, {alone.generated} alone"
    assert crowd.finish_reason == alone.finish_reason or ties
    return ties


def nudged(x: Tensor, a: int, b: int, delta: float) -> Iterator[Tensor]:
    """Logits [V] that differ from x by `delta` at the most and let b win over a: raised above all, a lowered below all,
    or both.
    """
    for rest, of_a, of_b in ((-delta, -delta, delta), (delta, -delta, delta), (0.0, -delta, delta)):
        moved = x + rest
        moved[a], moved[b] = x[a] + of_a, x[b] + of_b
        yield moved


def defined_token(x: Tensor, request: Request, i: int) -> int:
    """Token i of the request's answer by the definition of sampling, from logits x [V] and the tokens before it."""
    prompt, before = request.tokens[: request.prompt_tokens], request.generated[:i]
    p = request.params
    forbidden = [last for *start, last in request.bad_words if len(start) <= i and before[i - len(start) :] == start]
    if i < p.min_tokens:
        forbidden += request.ends_at
    row = SampleRow(*Filters.of(p), p.frequency_penalty, p.presence_penalty, request.seed, position=len(prompt) + i)
    row.forbidden = forbidden
    if p.logit_bias:
        row.bias = torch.zeros(len(x)).index_put_(
            (torch.tensor([*p.logit_bias]),), torch.tensor([*p.logit_bias.values()])
        )
    if p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty:
        row.seen = seen_tokens(len(x), prompt, before, torch.device("cpu"))
    found = best_tokens(x[None])
    sample_rows_ref(x[None], [row], found)
    return int(found[0, 0])


def _check_logprobs(request: Request, i: int, x: Tensor, bound: float) -> None:
    """Of the token and of the best ones: differences in order are no larger than the largest of any logit."""
    want, got = x.double().log_softmax(-1), request.logprobs[i]
    best = want.topk(len(got.top)).values.numpy() - sorted(got.top.values())[::-1]
    off = max(abs(float(want[request.generated[i]]) - got.token), np.abs(best).max(initial=0))
    assert off <= bound, f"logprobs of token {i} of request {request.order} are off by {off:.2g}, more than rounding"
