"""What ranks run in tests of tensor parallelism (ranks.py). A job gets its group, and returns tensors and numbers."""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.devices import resolve_device
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.models import cache_schema, load_model, open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.parallel import cuts, loader
from hybridkv.parallel import group as group_module
from hybridkv.parallel.group import Alone, Group
from hybridkv.parallel.layers import SplitLinear
from hybridkv.parallel.loader import load_sharded
from hybridkv.parallel.rank_bytes import block_of
from hybridkv.parallel.shard import Shard, local
from hybridkv.planner import plan_cache

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True
CPU = resolve_device("cpu")


def run(job: dict[str, Any], rank: int) -> Any:
    """One job on one rank."""
    group = Group.join(rank, job["size"], CPU, f"file://{job['folder']}/meeting", job["limit"])
    try:
        return globals()[job["name"]](group, **job["arguments"])
    finally:
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


def greedy(group: Group | Alone, path: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The best next tokens of all prompts in one batch, by an engine of its own on every rank."""
    model, config, shard = open_part(path, group)
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
    calls: dict[str, int] = {}
    for module, name in ((dist, "all_reduce"), (group_module, "all_gather_single"), (dist, "broadcast")):
        own = getattr(module, name)

        def count(*given: Any, own: Any = own, name: str = name) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return own(*given)

        setattr(module, name, count)
    engine.score(ids)
    return calls


def leave(group: Group, how: str) -> None:
    """The last rank ends, stops, or does something else while the others wait for its part of a sum."""
    if group.rank == group.size - 1:
        if how == "ends":
            os._exit(9)
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        return
    group.all_reduce(torch.ones(3))
