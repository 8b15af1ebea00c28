"""Opening a model: its files read, its cache sized and made, its weights loaded, and an engine put around it.

What was asked for is settings.py's, the form of weights weight_choice.py's, sizes are sizing.py's. What an LLM does
with what is open is its own; several ranks each open their part (ranks.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridkv.cache import KVCacheManager
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.rounded_states import checkpoint_dtype_of
from hybridkv.cache.tier_sizes import CPU_LIMIT
from hybridkv.cache.tiers import HostTier
from hybridkv.cache.worth import policy_of
from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.checkpoint.generation_config import SamplingDefaults, sampling_defaults
from hybridkv.checkpoint.identity import WeightsIdentity
from hybridkv.devices import check_fp8_cache, on_device, resolve_dtype
from hybridkv.embedded import Progress
from hybridkv.engine.engine import Engine
from hybridkv.engine.precompile import precompile
from hybridkv.eviction import Evictor
from hybridkv.models import check_exact, load_model, open_checkpoint, with_query_buffer
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.fingerprint import config_digest, files_name, fingerprint_of
from hybridkv.planner import CachePlan
from hybridkv.prompts import Prompts, load_tokenizer
from hybridkv.settings import Settings
from hybridkv.sizing import size_cache
from hybridkv.weight_choice import WeightChoice, choose_weights

if TYPE_CHECKING:
    from hybridkv.parallel.launch import Place
    from hybridkv.ranks import Ranks


@dataclass(frozen=True)
class Opened:
    """A model that is open."""

    path: Path
    settings: Settings  # with what its files say of them
    config: ModelConfig  # of this rank's part, where there are several
    dtype: torch.dtype
    choice: WeightChoice
    identity: WeightsIdentity
    plan: CachePlan
    prompts: Prompts
    sampling_defaults: SamplingDefaults  # what SamplingParams leaves open
    model: Model
    manager: KVCacheManager
    engine: Engine

    @property
    def weight_form(self) -> str:
        """How weights are held, in a word."""
        return self.choice.name(self.dtype)


@contextmanager
def told_to_others(tp: int | Place) -> Iterator[None]:
    """Where something else has started the ranks, they wait for this one: what is raised in here they are told."""
    try:
        yield
    except Exception as problem:
        if isinstance(tp, int) and tp != 1:
            from hybridkv.parallel.launch import tell_others

            tell_others(problem)
        raise


def over_ranks(settings: Settings, tp: int | Place, path: Path, no_store: bool) -> Settings:
    """The same for this process as one of `tp` ranks; it starts the others. `no_store`: whether nothing is saved."""
    from hybridkv.ranks import take_ranks

    limits = settings.limits
    given = dict(
        model=str(path), dtype=settings.dtype, exact=settings.exact, cache=settings.cache,
        max_requests=limits.max_requests, max_context=limits.max_context, memory=limits.memory,
        step_tokens=limits.step_tokens, weight_dtype=settings.weight_dtype, reuse=settings.reuse,
        host_cache=limits.host_cache,
    )  # fmt: skip
    ranks = take_ranks(tp, settings.device, given, no_store)
    return replace(settings, device=ranks.device, ranks=ranks)


def open_model(
    path: Path, settings: Settings, load_progress: Progress | None, compile_progress: Progress | None
) -> Opened:
    """Size the cache, load the model and put an engine around it; or HybridKVError."""
    device, exact, ranks, asked = settings.device, settings.exact, settings.ranks, settings
    if ranks is not None:
        from hybridkv.parallel.rank_bytes import reuse_over_ranks

        settings = replace(settings, reuse=reuse_over_ranks(settings.reuse, settings.cache))
    with open_checkpoint(path) as checkpoint:
        path, whole = checkpoint.path, ModelConfig.from_dict(checkpoint.config)
        config = whole
        dtype = resolve_dtype(settings.dtype, device, checkpoint.config)
        tokenizer, no_tokenizer = load_tokenizer(checkpoint)
        sampling = sampling_defaults(checkpoint)
        settings = replace(settings, cache=with_query_buffer(config, settings.cache))
        checkpoint_dtype = checkpoint_dtype_of(settings.reuse)
        check_exact(config, exact, settings.cache.state_dtype, checkpoint_dtype)
        check_fp8_cache(settings.cache, device)
        choice = choose_weights(checkpoint, config, settings, dtype)
        identity = WeightsIdentity(checkpoint.files)
        eos = tokenizer.eos_ids if tokenizer and tokenizer.eos_ids else frozenset(config.eos_ids)
        if ranks is not None and ranks.group.heeds:
            _check_alike(ranks, asked, path, identity, whole, dtype, choice, eos)
        if ranks is not None:
            config = ranks.cut(checkpoint, config, exact, choice.packed, choice.released)
        plan, reuse = size_cache(checkpoint, config, dtype, choice, settings)
        settings = replace(settings, reuse=reuse)
        model = _load(checkpoint, config, dtype, choice, settings, load_progress)
    manager = _make_cache(plan, settings)
    manager.model_fingerprint = fingerprint_of(model)
    manager.model_files = files_name(identity, whole, dtype, choice.name(dtype), exact)
    evictor = Evictor.make(settings.cache, manager, scale=config.attention_scale)
    parts = model, manager, tokenizer, settings.limits.step_tokens, eos, evictor
    engine = Engine(*parts) if ranks is None else ranks.engine(settings.cache, dtype, checkpoint_dtype, *parts)
    engine.sampling_defaults = sampling
    engine.about = _about(path, choice.name(dtype), settings)
    if ranks is None:
        precompile(engine, compile_progress)
    # a template that is open runs in a process of its own: it comes last
    prompts = Prompts(path.name, tokenizer, no_tokenizer, remembers=settings.reuse is not None and not exact)
    return Opened(path, settings, config, dtype, choice, identity, plan, prompts, sampling, model, manager, engine)


def _check_alike(
    ranks: Ranks,
    settings: Settings,
    path: Path,
    identity: WeightsIdentity,
    config: ModelConfig,
    dtype: torch.dtype,
    choice: WeightChoice,
    eos: frozenset[int],
) -> None:
    """UnlikeRanks if another rank has another model, or settings by which it would do other steps. Sizes that follow
    from a machine's memory may differ: all ranks go by the smallest.
    """
    from hybridkv.eviction.policy_words import policy_words
    from hybridkv.parallel.alike import check_alike

    limits, cache, reuse = settings.limits, settings.cache, settings.reuse
    numbers, form = str(dtype).removeprefix("torch."), choice.name(dtype)
    model = hashlib.sha256(f"{identity.glance()} {config_digest(config)}".encode()).hexdigest()
    said = {"model": f"{path} ({model[:8]})", "host_cache": repr(limits.host_cache)}
    own: dict[str, object] = {"model": model, "end tokens": sorted(eos), "dtype": numbers, "exact": settings.exact}
    own["weight_dtype"] = "plain" if form == numbers else form
    own |= {field.name: getattr(cache, field.name) for field in fields(cache)} | {"policy": policy_words(cache.policy)}
    names = "max_requests", "max_context", "step_tokens"
    own |= {name: getattr(limits, name) for name in names} | {"host_cache": limits.host_bytes != 0}
    own["reuse"] = reuse is not None
    if reuse is not None:  # no rank reads turns before they come, so what is said of that may differ
        own |= {
            f"reuse.{name}": getattr(reuse, name) for name in ("checkpoints", "every", "policy", "checkpoint_dtype")
        }
    check_alike(ranks.group, "the settings", own, said)


def _load(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    choice: WeightChoice,
    settings: Settings,
    progress: Progress | None,
) -> Model:
    """The model, or this rank's part of it, with weights in the form that was chosen."""
    device, ranks = settings.device, settings.ranks
    how = (device, dtype, progress, settings.exact, choice.fp8, choice.packed, choice.half)
    with on_device(device):  # matrices are packed and quantised by kernels
        if ranks is not None:
            return ranks.load(checkpoint, *how)
        return load_model(config, checkpoint, *how, choice.int4, choice.released)


def _make_cache(plan: CachePlan, settings: Settings) -> KVCacheManager:
    """The cache of these sizes, with what is kept on the host and for prompts that begin alike."""
    limits, reuse, alone = settings.limits, settings.reuse, settings.ranks is None
    host = None if limits.host_bytes is None else HostTier(limits.host_bytes, settings.device)
    if not alone:  # free memory, and what a copy of pages does, differ from rank to rank
        host = HostTier(CPU_LIMIT, settings.device, pages=False)
    manager = KVCacheManager(
        plan.schema, plan.pages, plan.slots, plan.max_tokens, settings.device, settings.exact, plan.query_buffers,
        checkpoints=None if reuse is None else plan.checkpoints, host=host,
    )  # fmt: skip
    manager.host.preempted = limits.keep_preempted and alone
    if reuse is not None:
        kept = Reuse(manager, reuse.every, policy_of(reuse.policy, plan.schema))
        kept.host.on = alone  # what a rank's host has room for, others do not know
    return manager


def _about(path: Path, weight_form: str, settings: Settings) -> dict[str, str]:
    """The model in words, for a session that meets another one."""
    found = {"model": path.name, "weights": weight_form}
    return found if settings.ranks is None else {**found, "ranks": str(settings.ranks.group.size)}
