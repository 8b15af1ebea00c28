"""What ranks run in tests of tensor parallelism (ranks.py). A job gets its group, and returns tensors and numbers."""

import os
import random
import signal
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import calling_ranks
import evicting_ranks
import moving_ranks
import starting_ranks
import torch
import torch.distributed as dist
from tiny_ranks import fixed_bytes
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.devices import resolve_device
from hybridkv.engine import rank_sessions
from hybridkv.engine.engine import Engine
from hybridkv.engine.lock_step import LockStepEngine
from hybridkv.engine.rank_graphs import RankConsent, WithLimit
from hybridkv.eviction import Evictor
from hybridkv.kernels.best_tokens import best_tokens
from hybridkv.kernels.linear import block_scaled
from hybridkv.kernels.step_index import StepShape
from hybridkv.models import cache_schema, load_model, open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.parallel import cuts, layers, loader
from hybridkv.parallel import group as group_module
from hybridkv.parallel.block_parts import block_shard
from hybridkv.parallel.group import Alone, Group, GroupError
from hybridkv.parallel.launch import Place
from hybridkv.parallel.layers import SplitLinear
from hybridkv.parallel.loader import load_sharded
from hybridkv.parallel.rank_bytes import block_of, rank_model_bytes
from hybridkv.parallel.shard import Shard, local
from hybridkv.planner import plan_cache

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True
CPU = resolve_device("cpu")


def run(job: dict[str, Any], rank: int) -> Any:
    """One job on one rank; `on`: "cuda", for jobs of gpu_rank_jobs.py, puts all ranks on one GPU."""
    rank_sessions.PIECE = 5000  # bytes: even tiny caches are sent in several
    given = dict(job["arguments"])
    meeting, on = f"file://{job['folder']}/meeting", resolve_device(given.pop("on", "cpu"))
    jobs = vars(import_module("gpu_rank_jobs")) if job["name"] not in globals() else globals()
    if on.type == "cuda":
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}  # else NCCL refuses to share the GPU
    group = Group.join(rank, job["size"], on, meeting, job["limit"])
    try:
        found = jobs[job["name"]](group, **given)
        if on.type == "cuda" and dist.is_initialized():
            group.part(job["limit"])
        return found
    finally:
        if on.type == "cpu":
            group.close()


def open_part(
    path: str, group: Group | Alone, dtype: str = "float32", experts: str = "auto", **how: bool
) -> tuple[Model, ModelConfig, Shard]:
    """A rank's model; of one rank: the model as it is."""
    with open_checkpoint(path) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        numbers = getattr(torch, dtype)
        if group.size == 1:
            return load_model(config, checkpoint, CPU, numbers, **how), config, Shard(0, 1)
        block = block_of(checkpoint.column_steps()) if how.get("packed") else 1
        shard = Shard(group.rank, group.size, experts, block)
        if how.get("released"):
            shard = block_shard(config, shard, checkpoint.__contains__, checkpoint.block_forms())
        return load_sharded(config, shard, group, checkpoint, CPU, numbers, **how), config, shard


def engine_of(
    model: Model, config: ModelConfig, cache: CacheConfig, context: int = 512, slots: int = 2, exact: bool = False
) -> Engine:
    """An engine around it, on the CPU in f32 unless the cache says otherwise."""
    schema = cache_schema(config, cache, "float32")
    plan = plan_cache(schema, slots, context, None)
    manager = KVCacheManager(schema, plan.pages, slots, context, CPU, exact, plan.query_buffers)
    evictor = Evictor.make(cache, manager, scale=config.attention_scale)
    return Engine(model, manager, step_tokens=512, evictor=evictor)


def score(
    group: Group | Alone,
    path: str,
    ids: list[int],
    prefill: int | None = None,
    chunk: int | None = None,
    exact: bool = False,
    **how: Any,
) -> Tensor:
    """[T, vocab] logits through the cache."""
    model, config, shard = open_part(path, group, exact=exact, **how)
    own = local(config, shard) if group.size > 1 else config
    return engine_of(model, own, CacheConfig(kv_dtype="f32"), exact=exact).score(ids, prefill, chunk)


def scores(group: Group | Alone, path: str, texts: list[list[Any]], **how: Any) -> list[Tensor]:
    """`score` of several (ids, prefill, chunk) by one model."""
    exact = how.get("exact", False)
    model, config, shard = open_part(path, group, **how)
    own = local(config, shard) if group.size > 1 else config
    engine = engine_of(model, own, CacheConfig(kv_dtype="f32"), exact=exact)
    return [engine.score(*text) for text in texts]


def coded(
    group: Group | Alone, path: str, texts: list[list[Any]], prompts: list[list[int]], dtype: str = "float32"
) -> dict[str, Any]:
    """A model whose weights stay codes: logits, greedy tokens, and bytes: planned and held, of weights and of cache."""
    model, config, shard = open_part(path, group, dtype, released=True)
    own = local(config, shard) if group.size > 1 else config
    engine = engine_of(model, own, CacheConfig(kv_dtype="f32"), slots=len(prompts))
    found: dict[str, Any] = {"logits": [engine.score(*text) for text in texts]}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    while not engine.idle:
        engine.step()
    found["tokens"] = [list(request.generated) for request in requests]
    with open_checkpoint(path) as checkpoint:
        has, forms = checkpoint.__contains__, checkpoint.block_forms()
        planned = rank_model_bytes(config, shard, has, dtype, "cpu", blocks=forms)
    schema = cache_schema(own, CacheConfig(kv_dtype="f32"), "float32")
    cache = plan_cache(schema, len(prompts), 512, None).nbytes
    found["bytes"] = [planned, model.nbytes - fixed_bytes(model), cache, engine.manager.memory_bytes()]
    found["whole"] = group.size > 1 and not shard.by_width(config)
    return found


def faulty_codes(group: Group, fault: str, **given: Any) -> dict[str, Any]:
    """`coded` with a mistake made on purpose."""
    if fault == "another block's scale":
        right = block_scaled._scales_of
        block_scaled._scales_of = lambda count, block, first, stored: right(count, block, first, stored) * 0
    elif fault == "an expert of another rank":
        plain = layers.run_own_v4_experts
        layers.run_own_v4_experts = lambda *args, first: plain(*args, first=(first + 1) % group.size)  # type: ignore[assignment]
    else:
        raise ValueError(fault)
    return coded(group, **given)


def faulty(group: Group, path: str, ids: list[int], fault: str) -> Tensor:
    """`score` with something planted that must be seen."""
    if fault == "no sum":
        Group.all_reduce = lambda self, x: x  # type: ignore[method-assign]
    if fault == "a bias on every rank":
        own = SplitLinear.__call__

        def each(self: SplitLinear, x: Tensor) -> Tensor:
            extra = 0 if self.bias is None else self.bias * (self.group.size - 1)
            return own(self, x) + extra

        SplitLinear.__call__ = each  # type: ignore[method-assign]
    if fault == "another rank's KV head":
        own_cut = cuts.cut_of

        def moved(config: ModelConfig, shard: Shard, name: str, *rest: Any) -> cuts.Cut | None:
            other = Shard((shard.rank + 1) % shard.size, shard.size) if "k_proj" in name else shard
            return own_cut(config, other, name, *rest)

        loader.cut_of = moved
    return score(group, path, ids)


def greedy(group: Group | Alone, path: str, prompts: list[list[int]], tokens: int, **how: bool) -> list[list[int]]:
    """The best next tokens of all prompts in one batch, by an engine of its own on every rank."""
    model, config, shard = open_part(path, group, **how)
    own = local(config, shard) if group.size > 1 else config
    engine = engine_of(model, own, CacheConfig(kv_dtype="f32"), slots=len(prompts))
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    while not engine.idle:
        engine.step()
    return [list(request.generated) for request in requests]


def counted(group: Group, path: str, ids: list[int]) -> dict[str, int]:
    """Exchanges of one step."""
    model, config, shard = open_part(path, group)
    engine = engine_of(model, local(config, shard), CacheConfig(kv_dtype="f32"))
    calls = count_calls(dist, "all_reduce", "broadcast") | count_calls(group_module, "all_gather_single")
    engine.score(ids)
    return {name: count for name, (count,) in calls.items() if count}


def leave(group: Group, how: str) -> None:
    """The last rank ends, stops, or does something else while the others wait for its part of a sum."""
    group.meet("leave")  # else it may be gone before the others have a group
    if group.rank == group.size - 1:
        if how == "ends":
            os._exit(9)
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        return
    group.all_reduce(torch.ones(3))


# --- in lock-step: rank 0 drives, the others follow -----------------------------------------------------------------


def lock_step_engine(group: Group, path: str, slots: int, pages: int | None = None) -> LockStepEngine:
    """An engine of this rank. `pages`: of the pool; None: enough."""
    model, config, shard = open_part(path, group)
    schema = cache_schema(local(config, shard), CacheConfig(kv_dtype="f32", page_size=16), "float32")
    context = 256
    plan = plan_cache(schema, slots, context, None)
    taken = plan.pages if pages is None else dict.fromkeys(plan.pages, pages * schema.streams[0].streams)
    manager = KVCacheManager(schema, taken, slots, context, CPU, False, plan.query_buffers)
    return LockStepEngine(model, manager, None, 64, frozenset(), None, group)


def together(
    group: Group,
    path: str,
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    pages: int | None = None,
    ahead: bool = False,
) -> dict[str, Any]:
    """Answers of all prompts, on rank 0; what every rank has counted. `ahead`: steps are launched ahead, as on GPUs."""
    engine = lock_step_engine(group, path, 4, pages)
    engine.launches_ahead, launched = ahead, count_ahead(engine)
    calls = count_calls(dist, "all_reduce", "broadcast", "gather") | count_calls(group_module, "all_gather_single")
    preempted = 0
    own = engine.scheduler.preempt

    def preempt(request: Any) -> None:
        nonlocal preempted
        preempted += 1
        own(request)

    engine.scheduler.preempt = preempt  # type: ignore[method-assign]
    answers = []
    if group.rank == 0:
        for given in params:  # JSON has no numbers for keys
            given["logit_bias"] = {int(token): value for token, value in given.get("logit_bias", {}).items()}
        requests = [engine.add(p, SamplingParams(**s)) for p, s in zip(prompts, params, strict=True)]
        while not engine.idle:
            engine.step()
        answers = [request.generated for request in requests]
        assert all(request.error is None for request in requests), [request.error for request in requests]
        with engine.channel.telling("end"):
            pass
    else:
        engine.follow()
    engine.manager.check_integrity()
    assert engine.idle and not engine.manager.slot_of
    steps = engine.pipeline.steps
    counted = {"steps": steps, "preempted": preempted, "ahead": launched[0]}
    return {"answers": answers, "calls": {k: v[0] for k, v in calls.items()}} | counted


def count_ahead(engine: Engine) -> list[int]:
    """Steps that are launched ahead from here on."""
    launched, own = [0], engine.pipeline.launch_ahead

    def launch_ahead() -> None:
        own()
        launched[0] += engine.pipeline.ahead is not None

    engine.pipeline.launch_ahead = launch_ahead  # type: ignore[method-assign]
    return launched


def count_calls(module: Any, *names: str) -> dict[str, list[int]]:
    """Calls of a module's functions from here on."""
    counts = {name: [0] for name in names}
    for name in names:
        plain = getattr(module, name)

        def count(*given: Any, own: Any = plain, name: str = name, **more: Any) -> Any:
            counts[name][0] += 1
            return own(*given, **more)

        setattr(module, name, count)
    return counts


def random_events(group: Group, path: str, seed: int, events: int, ahead: bool = False) -> list[int]:
    """Adds, aborts, stops, next turns and steps as they come, few pages. Every step the digests were compared."""
    engine = lock_step_engine(group, path, 3, 7)
    engine.launches_ahead, launched = ahead, count_ahead(engine)
    if group.rank:
        engine.follow()
        return [engine.pipeline.steps, launched[0], engine.channel.received, len(engine._to_hold)]
    chance, live, held = random.Random(seed), [], []
    ever: set[Any] = set()  # requests whose caches were to be held
    lost: set[Any] = set()  # those that nobody can go on from
    for _ in range(events):
        what = chance.choice(("add", "add", "turn", "let go", "abort", "stop", "step", "step", "step", "step"))
        live = [request for request in live if not request.finished]
        params = SamplingParams(
            max_tokens=chance.randint(1, 9), temperature=chance.choice((0, 0, 0.9)), n=chance.choice((1, 1, 1, 2))
        )
        tokens = [chance.randrange(90) for _ in range(chance.randint(1, 40))]
        hold = chance.random() < 0.3 and params.n == 1
        if what == "add" and len(live) < 6:
            live.append(engine.add(tokens, params, hold))
            held += [live[-1]] if hold else []
            ever |= {live[-1]} if hold else set()
        elif what == "turn" and held and held[-1].finished:
            after = held.pop()
            lost.add(after)
            live.append(engine.add([*after.tokens, *tokens][:90], replace(params, n=1), False, after))
        elif what == "let go" and held:
            one = held.pop(chance.randrange(len(held)))
            lost.add(one)
            engine.let_go(one)
        elif what in ("abort", "stop") and live:
            one = chance.choice(live)
            lost |= {one} if what == "abort" else set()
            getattr(engine, what)(one)
        elif what == "step" and not engine.idle:
            engine.step()
    while not engine.idle:
        engine.step()
    with engine.channel.telling("end"):
        pass
    return [engine.pipeline.steps, launched[0], engine.channel.sent, len(ever - lost)]


def diverge(group: Group, path: str, how: str, at: int = 1) -> None:
    """One rank is about to run something else than the others, in step `at`."""
    engine = lock_step_engine(group, path, 2)
    if group.rank == 1 and how == "a shorter prompt":
        own = engine._apply
        engine._apply = lambda event: own({**event, "tokens": event["tokens"][:-1]})  # type: ignore[method-assign]
    if group.rank == 1 and how == "a lost event":
        engine._apply = lambda event: None  # type: ignore[method-assign]
    if group.rank == 1 and how == "another graph":
        plain = engine.pipeline._run

        def padded(step: Any) -> None:
            shape = StepShape(64, 0, 3)
            if engine.pipeline.steps == at - 1:
                step.batch = replace(step.batch, step=replace(step.batch.step, shape=shape))
            plain(step)

        engine.pipeline._run = padded  # type: ignore[method-assign]
    forwards = count_calls(engine.runner, "forward")["forward"]
    try:
        if group.rank:
            engine.follow()
            return
        engine.add(list(range(40)), SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
        for _ in range(at):
            engine.step()
    finally:
        print(f"{forwards[0]} forward passes", file=sys.stderr)


def agree(group: Group) -> list[int]:
    """What ranks with unlike numbers go by."""
    return Place(group).agree(100 - group.rank, 5 + group.rank, 7 - group.rank)


def vote(group: Group, without: list[int]) -> list[str]:
    """What each vote on a graph comes to, if it is rank `without` that cannot have it; -1: all can."""
    consent, said = RankConsent(group), []
    for rank in without:
        try:
            consent.all_agree(RuntimeError("no memory here") if rank == group.rank else None)
            said.append("captured")
        except RuntimeError as problem:
            said.append(str(problem))
    return said


def hang(group: Group) -> str:
    """A device that never comes to an event."""

    class Never:
        def query(self) -> bool:
            return False

    try:
        WithLimit(Never(), group, lambda: None).synchronize()
    except GroupError as problem:
        return str(problem)
    return ""


def longest(group: Group, path: str) -> int:
    """What a rank takes for the longest stream of a step, if that of the other one is longer."""
    engine, found = lock_step_engine(group, path, 2), []
    own = engine.pipeline.agree

    def agree(batch: Any) -> int:
        for view in batch.step.streams.values():
            object.__setattr__(view, "max_entries", 1000 * group.rank + 7)
        found.append(own(batch))
        return found[-1]

    engine.pipeline.agree = agree  # type: ignore[method-assign]
    if group.rank:
        engine.follow()
    else:
        engine.add(list(range(40)), SamplingParams(max_tokens=2, temperature=0))
        engine.step()
        with engine.channel.telling("end"):
            pass
    return found[0]


def best(group: Group, path: str) -> list[list[list[int]]]:
    """What the ranks choose of rows with ties and broken values, and what one rank would."""
    engine = lock_step_engine(group, path, 1)
    vocab, (begin, end) = engine.vocab, engine.pipeline.vocabulary.span
    rows = torch.randn(9, vocab, generator=torch.Generator().manual_seed(1))
    rows[1, [3, vocab - 2]] = 50.0  # a tie over ranks: the lower one
    rows[2, [vocab - 9, vocab - 2]] = 50.0
    rows[3, vocab - 1] = torch.nan
    rows[4, 2] = torch.inf
    rows[5] = -torch.inf
    rows[6, : vocab // 2 + 1] = -torch.inf  # nothing in the first part
    rows[7] = 0.0
    rows[8, vocab - 1] = 60.0
    return [engine.pipeline.best(rows[:, begin:end]).tolist(), best_tokens(rows).tolist()]


# --- eviction ---------------------------------------------------------------------------------------------------------


def evictions(group: Group | Alone, path: str, cases: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
    """evicting_ranks.evictions of a model."""
    return evicting_ranks.evictions(group, open_part(path, group, exact=how.get("exact", False)), cases, **how)


def random_evictions(group: Group, path: str, **how: Any) -> list[int]:
    """evicting_ranks.random_evictions of a model."""
    return evicting_ranks.random_evictions(group, open_part(path, group), **how)


def count_evictions(group: Group, path: str, cases: list[dict[str, Any]]) -> list[int]:
    """Gathers of every case, beside the two of each step."""
    part, found = open_part(path, group), []
    for case in cases:
        calls = count_calls(group_module, "all_gather_single")
        steps = evicting_ranks.evictions(group, part, [case])["steps"]
        found.append(calls["all_gather_single"][0] - 2 * steps)
    return found


def calls(group: Group | Alone, path: str, script: str) -> Any:
    """calling_ranks.run of a model."""
    return calling_ranks.run(group, open_part(path, group), script)


def moves(group: Group | Alone, path: str, script: str, **given: Any) -> Any:
    """moving_ranks.run of a model, in exact mode."""
    return moving_ranks.run(group, open_part(path, group, exact=True), script, **given)


def start(group: Group, **given: Any) -> list[Any]:
    """starting_ranks.start."""
    return starting_ranks.start(group, **given)
