"""What ranks that share one GPU run (tests/gpu/test_ranks.py). Models have random weights (parallel/random_part.py).

Everything here also runs on CPUs, by gloo and without graphs, or with something that stands in for them: the votes, and
which steps take which graph, are then the real ones.
"""

import gc
import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rank_jobs import count_ahead, engine_of
from torch import Tensor

from hybridkv.bench.shapes import TINY_V4
from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine import capturing, graphs, mixed_graphs, runner
from hybridkv.engine.engine import Engine
from hybridkv.engine.graphs import Captured
from hybridkv.engine.lock_step import LockStepEngine
from hybridkv.engine.mixed_graphs import CapturedMixed
from hybridkv.engine.rank_graphs import RankConsent, capture_together, drop_graphs
from hybridkv.engine.rank_sessions import WholeCache
from hybridkv.eviction import Evictor
from hybridkv.models import attention, cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.known import KNOWN
from hybridkv.models.schemas import head_counts
from hybridkv.parallel.group import Group, GroupError
from hybridkv.parallel.random_part import RandomCodes, RandomTensors, random_part, random_whole
from hybridkv.parallel.shard import Shard, local
from hybridkv.planner import plan_cache

CPU = torch.device("cpu")
# sizes are alike, so that the families share kernels; three V heads a K head
LLAMA: dict[str, Any] = dict(
    model_type="llama", vocab_size=128, hidden_size=64, num_hidden_layers=3, intermediate_size=96,
    num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, rms_norm_eps=1e-5,
    tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip
QWEN: dict[str, Any] = LLAMA | dict(
    model_type="qwen3_5_text", num_hidden_layers=4, full_attention_interval=4, linear_conv_kernel_dim=4,
    linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=4, linear_num_value_heads=12,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
)  # fmt: skip
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64)
FLASH = KNOWN["DeepSeek-V4-Flash"]
FEW_LAYERS = FLASH | dict(num_hidden_layers=2, compress_ratios=[4, 128], num_hash_layers=1, n_routed_experts=32)
# widths of more than one block, and borders inside of blocks
CODED = TINY_V4 | dict(num_attention_heads=8, o_groups=4, index_topk=512, moe_intermediate_size=192)
CODES = ("v4 in codes", "v4, whole experts", "flash in codes")  # with weights as they are released
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN | MOE | {"model_type": "qwen3_5_moe_text"},
    "qwen3_next": QWEN | MOE | {"model_type": "qwen3_next", "norm_topk_prob": True},
    # all entries are read: with a choice of few, noise may choose another one
    "deepseek_v4": TINY_V4 | dict(num_attention_heads=8, o_groups=4, index_topk=512, moe_intermediate_size=64),
    "27b": KNOWN["Qwen3.5-27B"] | {"num_hidden_layers": 4},
    "whole 27b": KNOWN["Qwen3.5-27B"],
    "v4 in codes": CODED,
    "v4, whole experts": CODED | {"moe_intermediate_size": 30},  # half of which is no whole byte of FP4
    "flash": FEW_LAYERS,
    "flash in codes": FEW_LAYERS,
}
GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=9, temperature=0.9, seed=3, top_p=0.9, ignore_eos=True, n=2)
LENGTHS = (3, 17, 40, 5, 80, 33)
REPLAYS = {"decode": 0, "mixed": 0}
BUDGET, EVICTED = 48, 10  # entries of a stream; tokens after an eviction


def token_ids(count: int, seed: int, vocab: int = 128) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts() -> list[list[int]]:
    return [token_ids(length, seed=length) for length in LENGTHS]


def tensors_of(kind: str) -> RandomTensors:
    """Drawn on the CPU, so that they are the same there and on a GPU."""
    return drawn(kind, CPU, torch.float32, seed=7)


def drawn(kind: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> RandomTensors:
    """Values, or codes."""
    made = RandomCodes if kind in CODES else RandomTensors
    return made(ModelConfig.from_dict(CONFIGS[kind]), device, dtype, seed)


def reference(kind: str) -> tuple[Tensor, list[list[int]], list[list[float]]]:
    """One rank on a CPU: logits of some tokens, greedy answers to all prompts, and how far their next best was."""
    tensors = tensors_of(kind)
    engine = engine_of(random_whole(tensors, CPU), tensors.config, CacheConfig(kv_dtype="f32"))
    logits = engine.score(token_ids(150, seed=1), 140, 50)
    answers, gaps = zip(*(greedy_alone(engine, prompt) for prompt in prompts()), strict=True)
    return logits, list(answers), list(gaps)


def greedy_alone(engine: Engine, prompt: list[int]) -> tuple[list[int], list[float]]:
    """An answer, and by how much each token's logit was above the next one's."""
    params = SamplingParams(max_tokens=GREEDY.max_tokens, temperature=0, ignore_eos=True, logprobs=2)
    request = engine.add(prompt, params)
    while not engine.idle:
        engine.step()
    assert request.error is None, request.error
    best = [sorted(each.top.values())[::-1] for each in request.logprobs]
    return request.generated, [first - second for first, second in best]


# ---- on every rank


def cache_of(model: Model, budget: int | None = None) -> CacheConfig:
    """In the dtype of the weights. `budget`: even over heads, so that no rank waits for another one's choice."""
    kind = "bf16" if model.embedding.dtype == torch.bfloat16 else "f32"  # type: ignore[attr-defined]
    evicting = dict(budget=budget, policy="snapkv", window=16, recent=8, query_buffers=3) if budget else {}
    return CacheConfig(kv_dtype=kind, **evicting)  # type: ignore[arg-type]


def manager_of(model: Model, config: ModelConfig, device: torch.device, budget: int | None = None) -> KVCacheManager:
    schema = cache_schema(config, cache_of(model, budget), model.embedding.dtype)  # type: ignore[attr-defined]
    plan = plan_cache(schema, 4, 512, None)
    return KVCacheManager(schema, plan.pages, 4, 512, device, False, plan.query_buffers)


def evictor_of(model: Model, manager: KVCacheManager, config: ModelConfig, budget: int | None) -> Evictor | None:
    return Evictor.make(cache_of(model, budget), manager, scale=config.attention_scale) if budget else None


def scored(group: Group, model: Model, config: ModelConfig, ids: list[int], prefill: int) -> tuple[Tensor, int]:
    """Logits [T, vocab] through the cache, single steps replayed, and how many of these were."""
    engine, before = Engine(model, manager_of(model, config, group.device), step_tokens=64), REPLAYS["decode"]
    capture_together(engine, group)
    found = engine.score(ids, prefill, 50).cpu()
    drop_graphs(engine)
    return found, REPLAYS["decode"] - before


def families(group: Group, kinds: list[str], stand_in: bool = False) -> dict[str, Any]:
    """Every kind by one group. `stand_in`: on a CPU, with what stands in for graphs."""
    count_replays()
    if stand_in:
        stand_in_for_graphs()
    found = {}
    for kind in kinds:
        tensors = tensors_of(kind)
        shard = Shard(group.rank, group.size)
        model = random_part(tensors, shard, group, group.device)
        config = model.config
        logits, replays = scored(group, model, config, token_ids(150, seed=1), 140)
        found[kind] = {"logits": logits, "scored": replays, **answered(group, model, config, tensors.config)}
        del model
        free(group)
    return found


def lock_step(
    group: Group, model: Model, config: ModelConfig, whole: ModelConfig, budget: int | None = None
) -> LockStepEngine:
    """An engine of this rank."""
    manager = manager_of(model, config, group.device, budget)
    cache = WholeCache(cache_schema(whole, CacheConfig(kv_dtype="f32"), torch.float32), head_counts(whole))
    evictor = evictor_of(model, manager, config, budget)
    return LockStepEngine(model, manager, None, 64, frozenset(), evictor, group, cache)


def answered(
    group: Group, model: Model, config: ModelConfig, whole: ModelConfig, plant: bool = False, budget: int | None = None
) -> dict[str, Any]:
    """Answers in lock-step: greedy and sampled ones, one aborted in the middle, one added late. `plant`: the last rank
    never has memory for a graph. `budget`: requests that are longer are evicted; rank 0 has logits of such a text, too.
    """
    REPLAYS.update(decode=0, mixed=0)
    engine = lock_step(group, model, config, whole, budget)
    engine.launches_ahead = True  # as on a GPU
    launched, plain = count_ahead(engine), capturing._problem
    if plant and group.rank == group.size - 1:
        capturing._problem = lambda run: RuntimeError("planted: no memory")
    answers, kept, logits = [], {}, None
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if group.rank:
                apply = engine._apply

                def applied(event: Any) -> None:
                    apply(event)
                    kept.update(engine._known.items())

                engine._apply = applied  # type: ignore[method-assign]
                engine.follow()
            else:
                answers = drive(engine, kept)
                if budget:
                    logits = engine.score(token_ids(150, seed=1), 140, 50)[-EVICTED:].cpu()
                with engine.channel.telling("end"):
                    pass
    finally:
        capturing._problem = plain
    graphs, mixed = engine.runner.graphs, engine.runner.mixed
    engine.manager.check_integrity()
    assert engine.idle and not engine.manager.slot_of
    found = {
        "answers": answers,
        "tokens": {order: list(request.tokens) for order, request in kept.items()},
        "evicted": {order: sorted(request.evictions) for order, request in kept.items() if request.evictions},
        "evicted_logits": logits,
        "replays": dict(REPLAYS),
        "ahead": launched[0],
        "keys": [] if graphs is None or mixed is None else [*map(str, graphs.captured), *map(str, mixed.captured)],
        "said": [str(each.message) for each in said if "CUDA graph" in str(each.message)],
    }
    engine.drop_graphs()
    return found


def drive(engine: LockStepEngine, kept: dict[int, Any]) -> list[list[int]]:
    """Rank 0: the greedy answers, in order of the prompts."""
    first, *others = prompts()
    requests = [engine.add(prompt, GREEDY) for prompt in others]
    aborted = engine.add(token_ids(30, seed=9), SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    sampled = engine.add(token_ids(21, seed=8), SAMPLED)
    for _ in range(9):
        engine.step()
    late = engine.add(first, GREEDY)
    engine.abort(aborted)
    while not engine.idle:
        engine.step()
    for request in (*requests, aborted, late, sampled, *sampled.siblings):
        assert request.error is None, request.error
        kept[request.order] = request
    assert all(len(each.generated) == 9 for each in (sampled, *sampled.siblings))
    return [request.generated for request in (late, *requests)]


def refused(group: Group, kind: str, stand_in: bool = False) -> dict[str, Any]:
    """As `answered`, where one rank never has memory for a graph."""
    count_replays()
    if stand_in:
        stand_in_for_graphs()
    tensors, shard = tensors_of(kind), Shard(group.rank, group.size)
    model, whole = random_part(tensors, shard, group, group.device), tensors.config
    return answered(group, model, local(whole, shard), whole, plant=True)


def wide(group: Group, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Logits of models of real widths, whole on one rank alone and in parts on all, in bfloat16; and answers in parts,
    with an abort and, where entries are evicted, evictions.
    """
    count_replays()
    found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    ids = token_ids(150, seed=1)
    for at, kind in enumerate(kinds):  # each rank computes another one's
        if at % group.size == group.rank:
            tensors = drawn(kind, group.device, torch.bfloat16)
            model = random_whole(tensors, group.device)
            engine = Engine(model, manager_of(model, tensors.config, group.device), step_tokens=64)
            found[kind]["whole"] = engine.score(ids, 140, 50)[-20:].cpu()
            if budget_of(kind):
                manager = manager_of(model, tensors.config, group.device, BUDGET)
                evictor = evictor_of(model, manager, tensors.config, BUDGET)
                engine = Engine(model, manager, step_tokens=64, evictor=evictor)
                found[kind]["whole, evicted"] = engine.score(ids, 140, 50)[-EVICTED:].cpu()
                del manager, evictor
            del model, engine
            free(group)
    group.meet("whole models", limit=200)
    for kind in kinds:
        tensors = drawn(kind, group.device, torch.bfloat16)
        shard = Shard(group.rank, group.size)
        model = random_part(tensors, shard, group, group.device)
        logits, replays = scored(group, model, model.config, ids, 140)
        found[kind] |= {"logits": logits[-20:], "scored": replays}
        found[kind] |= answered(group, model, model.config, tensors.config, budget=budget_of(kind))
        del model
        free(group)
    return found


def budget_of(kind: str) -> int | None:
    return BUDGET if CONFIGS[kind]["model_type"] != FLASH["model_type"] else None  # which never evicts


def die(group: Group, kind: str) -> list[Any]:
    """The last rank ends in the middle of an answer. Rank 0: what it says, whether it has left the group, and whether
    its device is free again.
    """
    tensors, shard = tensors_of(kind), Shard(group.rank, group.size)
    model, config = random_part(tensors, shard, group, group.device), local(tensors.config, shard)
    engine = lock_step(group, model, config, tensors.config)
    launched = []

    def launch(tokens: int) -> None:
        launched.append(tokens)
        if group.rank and len(launched) == 8:
            os._exit(9)

    engine.pipeline.on_launch = launch
    if group.rank:
        engine.follow()
    engine.add(token_ids(30, seed=9), SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    try:
        while not engine.idle:
            engine.step()
        said = ""
    except GroupError as problem:
        said = str(problem)
    group.abandon(engine.drop_graphs)
    return [said, len(launched), dist.is_initialized(), device_is_free(group.device)]


def device_is_free(device: torch.device) -> bool:
    """Whether it does what it is given."""
    if device.type == "cpu":
        return True
    event = torch.cuda.current_stream(device).record_event()
    until = time.monotonic() + 10
    while not event.query() and time.monotonic() < until:
        time.sleep(0.01)
    return event.query()


def free(group: Group) -> None:
    gc.collect()
    if group.device.type == "cuda":
        torch.cuda.empty_cache()


class Replayed:
    """Runs on what lies in the static buffers, as a graph does, and writes where it wrote first."""

    def __init__(self, run: Callable[[], Tensor], out: Tensor) -> None:
        self.run, self.out = run, out

    def replay(self) -> None:
        self.out.copy_(self.run())

    def reset(self) -> None:
        del self.run


def stand_in_for_graphs() -> None:
    """A capture asks all ranks, and keeps the call."""

    def capture(run: Callable[[], Tensor], pool: Any, room: Any, device: Any, consent: Any) -> tuple[Any, Tensor]:
        assert isinstance(consent, RankConsent) and room(consent.warm_up(run)) > 0
        consent.all_agree(capturing._problem(lambda: None))
        out = run().clone()
        consent.all_agree(None)
        return Replayed(run, out), out

    graphs.capture = mixed_graphs.capture = capture  # type: ignore[assignment]
    runner.can_capture = lambda manager: True
    attention.turn_of = lambda *_: None  # rotations that only a CPU finds, once for a step
    torch.cuda.graph_pool_handle = lambda: None  # type: ignore[assignment]
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.empty_cache = lambda: None


def count_replays() -> None:
    """In REPLAYS, from here on."""
    for kind, name in ((Captured, "decode"), (CapturedMixed, "mixed")):
        plain = kind.replay

        def replay(*given: Any, plain: Any = plain, name: str = name) -> Tensor:
            REPLAYS[name] += 1
            return plain(*given)

        kind.replay = replay  # type: ignore[method-assign]
