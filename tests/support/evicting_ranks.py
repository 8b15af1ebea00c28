"""Evictions on one rank or several: what rank_jobs.py runs for tests/parallel/test_eviction.py."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.cache.reuse import Reuse
from hybridkv.config import CacheConfig, EvictionConfig, SamplingParams
from hybridkv.engine.agreement import RanksAgree
from hybridkv.engine.engine import Engine
from hybridkv.engine.lock_step import LockStepEngine, LockStepPipeline
from hybridkv.engine.rank_sessions import WholeCache
from hybridkv.eviction import Evictor
from hybridkv.eviction.over_ranks import OverRanks
from hybridkv.eviction.policies import KeyDiff
from hybridkv.eviction.policy import LayerCache
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.schemas import head_counts
from hybridkv.parallel.group import Alone, Group
from hybridkv.parallel.shard import Shard, local
from hybridkv.planner import plan_cache
from hybridkv.request import Request
from hybridkv.text.tokenizer import Tokenizer

CONTEXT, STEP = 320, 128
CACHE = CacheConfig(kv_dtype="f32", page_size=4, query_buffers=3, window=16, recent=8)
Lists = dict[int, list[list[list[int]]]]  # position -> of each layer and stream the entries that stayed


def engine_of(
    group: Group | Alone,
    part: tuple[Model, ModelConfig, Shard],
    exact: bool = False,
    pages: int | None = None,
    slots: int = 3,
    tokenizer: Tokenizer | None = None,
    cache: CacheConfig = CACHE,
    rows: int | None = None,  # for checkpoints of what is kept for others; None: nothing is
) -> Engine:
    """`pages`: of each pool, for each stream of this rank; None: enough."""
    model, config, shard = part
    own = local(config, shard) if group.size > 1 else config
    schema = cache_schema(own, cache, "float32")
    plan = plan_cache(schema, slots, CONTEXT, None)
    taken = plan.pages if pages is None else {"attention": pages * schema.streams[0].streams}
    device = torch.device("cpu")
    manager = KVCacheManager(schema, taken, slots, CONTEXT, device, exact, plan.query_buffers, checkpoints=rows)
    assert pages is not None or rows or manager.memory_bytes() == plan.nbytes
    if rows is not None:
        Reuse(manager)
    evictor = Evictor.make(cache, manager, scale=config.attention_scale)
    eos = frozenset() if tokenizer is None else frozenset({0})
    if isinstance(group, Alone):
        return Engine(model, manager, tokenizer, STEP, eos, evictor)
    whole = WholeCache(cache_schema(config, cache, "float32"), head_counts(config))
    return LockStepEngine(model, manager, tokenizer, STEP, eos, evictor, group, whole)


def evictions(
    group: Group | Alone,
    part: tuple[Model, ModelConfig, Shard],
    cases: list[dict[str, Any]],
    exact: bool = False,
    together: bool = False,
    pages: int | None = None,
    slots: int = 3,
    fault: str = "",
) -> dict[str, Any]:
    """Run all cases, one after the other or `together`. A case: prompt, eviction, max_tokens, and `turn`: the tokens of
    a next turn, or `n` answers.

    Returns what every rank kept of each request, and what it counted; rank 0 has the answers.
    """
    engine, met = engine_of(group, part, exact, pages, slots), []
    preempted = [0]
    _watch(engine, met, preempted)
    _plant(fault, group)
    answers: list[Any] = []
    logprobs: list[Any] = []
    if group.rank == 0:
        requests = []
        for case in cases:
            held = _add(engine, case, case["prompt"], hold="turn" in case)
            requests.append(held)
            if not together or "turn" in case:
                _run(engine)
            if "turn" in case:
                requests.append(_add(engine, case, [*held.tokens, *case["turn"]], after=held))
                _run(engine)
        _run(engine)
        found = [each for request in requests for each in (request, *request.siblings)]
        answers = [[request.error, request.generated] for request in found]
        logprobs = [[[each.token, each.top] for each in request.logprobs] for request in found]
        if isinstance(engine, LockStepEngine):
            with engine.channel.telling("end"):
                pass
    elif isinstance(engine, LockStepEngine):
        engine.follow()
    engine.manager.check_integrity()
    assert engine.idle and not engine.manager.slot_of
    return {
        "answers": answers,
        "logprobs": logprobs,
        "kept": [lists_of(request) for request in met],
        "means": [[record.kept for record in request.evictions.values()] for request in met],
        "preempted": preempted[0],
        "steps": engine.pipeline.steps if isinstance(engine.pipeline, LockStepPipeline) else 0,
        "uneven": bool(isinstance(engine, LockStepEngine) and engine.agreed.uneven),
    }


def _add(engine: Engine, case: dict[str, Any], tokens: list[int], **how: Any) -> Request:
    params = SamplingParams(
        max_tokens=case["max_tokens"], temperature=0, ignore_eos=True, n=case.get("n", 1), logprobs=case.get("logprobs")
    )
    settings = {"window": 16, "recent": 8, **case["eviction"]}
    return engine.add(tokens, params, eviction=EvictionConfig(**settings), **how)


def _run(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def lists_of(request: Request) -> Lists:
    """What was kept of a request, by position."""
    return {at: [[e.tolist() for e in layer] for layer in record] for at, record in request.evictions.items()}


def _watch(engine: Engine, met: list[Request], preempted: list[int]) -> None:
    """Requests as they are queued, siblings among them, and how many were preempted."""
    add, preempt = engine.scheduler.add, engine.scheduler.preempt

    def added(request: Request) -> None:
        met.extend((request, *request.siblings))
        add(request)

    def gone(request: Request) -> None:
        preempted[0] += 1
        preempt(request)

    engine.scheduler.add, engine.scheduler.preempt = added, gone  # type: ignore[method-assign]


def _plant(fault: str, group: Group | Alone) -> None:
    """Something that must be seen."""

    def alone(self: OverRanks, x: Tensor, *_: Any) -> Tensor:
        return torch.stack([x] * self.parts)

    faults: dict[str, Callable[[], None]] = {
        "": lambda: None,
        "scores are not gathered": lambda: setattr(OverRanks, "each", alone),
        "queries are not gathered": lambda: setattr(OverRanks, "queries", _doubled),
        "peaks are not compared": lambda: setattr(OverRanks, "largest", lambda self, x: x),
        "each rank goes by its own pages": lambda: setattr(RanksAgree, "most", lambda self, number: number),
        "a rank has no score": lambda: setattr(KeyDiff, "score", _broken_on(group.rank)),
    }
    faults[fault]()


def _doubled(ranks: OverRanks, x: Tensor, dim: int) -> Tensor:
    return torch.cat([x] * ranks.copies, dim)


def _broken_on(rank: int) -> Callable[[KeyDiff, LayerCache], Tensor]:
    def score(policy: KeyDiff, layer: LayerCache) -> Tensor:
        return torch.full(layer.positions.shape, torch.nan if rank == 1 and layer.tokens > 150 else 1.0)

    return score


POLICIES = {
    "shared": ("auto", "snapkv", "snapkv:spread=layer", "keydiff", "tova:spread=all", "random:spread=layer"),
    "even": ("snapkv", "keydiff", "tova", "peak:spread=pyramid"),
}


def kept_for_others(engine: Engine) -> int:
    """Columns that were dropped, and checkpoints that there are."""
    reuse = engine.manager.reuse
    return -1 if reuse is None else 1000 * reuse.counts["columns_dropped"] + len(reuse.checkpoints.all)


def random_evictions(
    group: Group, part: tuple[Model, ModelConfig, Shard], seed: int, events: int, policies: str, ahead: bool = False
) -> list[int]:
    """Requests with budgets, next turns, aborts, stops and steps as they come, few pages: all digests were equal.

    `policies`: "shared" budgets, or "even" ones, beside which what was read is kept for others. `ahead`: steps are
    launched ahead, as on GPUs.
    """
    engine = engine_of(group, part, False, 34, 3, rows=4 if policies == "even" else None)
    assert isinstance(engine, LockStepEngine)
    engine.launches_ahead = ahead
    if group.rank:
        engine.follow()
        engine.manager.check_integrity()
        return [engine.pipeline.steps, engine.scheduler.counts["given_up"], kept_for_others(engine)]
    chance, live, held = random.Random(seed), [], []
    for _ in range(events):
        what = chance.choice(("add", "add", "turn", "abort", "stop", "step", "step", "step", "step", "step", "step"))
        live = [request for request in live if not request.finished]
        params = SamplingParams(max_tokens=chance.randint(1, 20), temperature=0, n=chance.choice((1, 1, 1, 2)))
        tokens = [chance.randrange(90) for _ in range(chance.randint(1, 120))]
        tokens[:60] = list(range(chance.choice((0, 3)), 60))[: len(tokens)]  # many begin alike
        eviction = EvictionConfig(
            chance.choice((24, 40)), 16, 8, chance.choice(POLICIES[policies]), bounded=chance.random() < 0.3,
            decode_every=chance.choice((0, 0, 5)),
        )  # fmt: skip
        hold = chance.random() < 0.4 and params.n == 1
        if what == "add" and len(live) < 6:
            live.append(engine.add(tokens, params, hold, eviction=chance.choice((eviction, eviction, None))))
            held += [live[-1]] if hold else []
        elif what == "turn" and held and held[-1].finished:
            after = held.pop()
            given = SamplingParams(max_tokens=5, temperature=0)
            live.append(engine.add([*after.tokens, *tokens][:130], given, False, after, eviction))
        elif what in ("abort", "stop") and live:
            getattr(engine, what)(chance.choice(live))
        elif what == "step" and not engine.idle:
            engine.step()
    _run(engine)
    with engine.channel.telling("end"):
        pass
    engine.manager.check_integrity()
    return [engine.pipeline.steps, engine.scheduler.counts["given_up"], kept_for_others(engine)]
