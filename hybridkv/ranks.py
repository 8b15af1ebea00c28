"""Ranks: what `LLM` does otherwise when it is one of several ranks (docs/tensor_parallel.md)."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from hybridkv.cache import KVCacheManager
from hybridkv.cache.rounded_states import with_checkpoint_dtype
from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.checkpoint.loader import Progress
from hybridkv.config import CacheConfig
from hybridkv.engine.lock_step import LockStepEngine
from hybridkv.engine.rank_calls import NOT_OVER_RANKS
from hybridkv.engine.rank_sessions import WholeCache, group_fingerprint
from hybridkv.errors import HybridKVError
from hybridkv.eviction.policy_words import policy_words
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.schemas import head_counts
from hybridkv.models.weight_forms import RELEASED
from hybridkv.parallel.block_parts import block_shard
from hybridkv.parallel.events import BEAT
from hybridkv.parallel.group import TIMEOUT, GroupError, UnlikeRanks, reason_of
from hybridkv.parallel.launch import LEAVE, Place, sharers, take_place
from hybridkv.parallel.loader import load_sharded
from hybridkv.parallel.rank_bytes import block_of, rank_model_bytes
from hybridkv.parallel.shard import Shard, check_size, in_exact_mode, kv_copies, local
from hybridkv.parallel.signs import FAILED, leave_the_end_to_rank_0, said_by

SECONDS = "HYBRIDKV_TP_TIMEOUT"
LEAST, MOST = 2 * BEAT, 86400.0  # rank 0 is heard of with each beat
LOOK = 1.0  # seconds between two looks, while weights are loaded, at whether all ranks live


def take_ranks(tp: int | Place, device: torch.device, given: Mapping[str, Any], no_store: bool) -> Ranks:
    """This process as a rank. What is not there over several ranks is refused before any is started."""
    cache, reuse = given["cache"], given["reuse"]
    assert isinstance(cache, CacheConfig)
    if isinstance(tp, Place):
        return Ranks(tp)
    with _opened(given["model"]) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        check_size(config, tp, given["exact"])
        if config.v4 is not None and not no_store:
            raise HybridKVError(NOT_OVER_RANKS.format(what=f"a folder of saved caches of {config.architecture}"))
        if given["weight_dtype"] == RELEASED and isinstance(tp, int):
            block_shard(config, Shard(0, tp), checkpoint.__contains__, checkpoint.block_forms())
    timeout = exchange_seconds()
    settings = vars(cache) | {"policy": policy_words(cache.policy)}
    kept = None if reuse is None else asdict(reuse)
    return Ranks(take_place(tp, device, {**given, "cache": settings, "reuse": kept}, timeout))


def exchange_seconds() -> float:
    """That an exchange of ranks may take, as HYBRIDKV_TP_TIMEOUT has it, or HybridKVError."""
    text = os.environ.get(SECONDS, "") or str(TIMEOUT)
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not LEAST <= found <= MOST:  # nan, too
        raise HybridKVError(
            f"{SECONDS} takes the seconds of an exchange, from {LEAST:g} to {MOST:g}, such as {TIMEOUT:g}, not "
            f"{text[:20]!r}"
        )
    return found


def _opened(path: str) -> Checkpoint:
    from hybridkv.models import open_checkpoint

    return open_checkpoint(path)


class Ranks:
    """One rank of an LLM."""

    def __init__(self, place: Place) -> None:
        self.place, self.group = place, place.group
        self.device = place.group.device
        self.whole: ModelConfig | None = None
        self.shard = Shard(self.group.rank, self.group.size)
        self.exact = False
        self.blocks: dict[str, BlockForm] | None = None  # of what stays codes with a scale for each block
        self._engine: LockStepEngine | None = None
        self._left = False  # the group has been left: another model may have one

    def cut(
        self, checkpoint: Checkpoint, config: ModelConfig, exact: bool, packed: bool, released: bool
    ) -> ModelConfig:
        """The config of this rank's part."""
        check_size(config, self.group.size, exact)
        self.whole, self.exact = config, exact
        self.blocks = checkpoint.block_forms() if released else None
        self.shard = self.place.shard(block_of(checkpoint.column_steps()) if packed else 1)
        if self.blocks is not None:
            self.shard = block_shard(config, self.shard, checkpoint.__contains__, self.blocks)
        self.shard = in_exact_mode(self.shard) if exact else self.shard
        return local(config, self.shard)

    def weight_bytes(self, checkpoint: Checkpoint, dtype: torch.dtype, fp8: bool, packed: bool, half: bool) -> int:
        """Of this rank's part."""
        assert self.whole is not None
        name = str(dtype).removeprefix("torch.")
        cuts = checkpoint.column_steps() if packed else None
        has, kind = checkpoint.__contains__, self.device.type
        return rank_model_bytes(
            self.whole, self.shard, has, name, kind, fp8, cuts, half, self.exact, blocks=self.blocks
        )

    def agree(self, memory: int, weights: int, shared: bool) -> tuple[int, int]:
        """(memory, weights) that all ranks plan by, so that all have as many pages. `shared`: `memory` is what the
        ranks of this device, the CPU or a GPU that several were given, have together.
        """
        memory = memory // sharers(self.device, self.group.size) if shared else memory
        least, most = self.place.agree(memory, weights)
        return least, most

    def largest(self, size: int) -> int:
        """Of all ranks."""
        return self.place.agree(0, size)[1]

    @property
    def parts(self) -> int:
        """Ranks that hold different streams."""
        assert self.whole is not None
        return self.group.size // kv_copies(self.whole, self.group.size)

    def load(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress | None, *how: Any
    ) -> Model:
        """This rank's part of the model. Meanwhile it looks, once a second, whether another rank has ended."""
        assert self.whole is not None
        seen = time.monotonic()

        def loaded(done: int, total: int) -> None:
            nonlocal seen
            if progress is not None:
                progress(done, total)
            if time.monotonic() > seen + LOOK:
                self.place.check()
                seen = time.monotonic()

        parts = self.whole, self.shard, self.group, checkpoint, device, dtype, loaded
        return load_sharded(*parts, *how, released=self.blocks is not None)

    def engine(
        self,
        cache: CacheConfig,
        dtype: torch.dtype,
        checkpoint_dtype: str,
        model: Model,
        manager: KVCacheManager,
        *parts: Any,
    ) -> LockStepEngine:
        """The engine of this rank."""
        assert self.whole is not None
        schema = with_checkpoint_dtype(cache_schema(self.whole, cache, dtype), checkpoint_dtype)
        whole = WholeCache(schema, head_counts(self.whole))
        own = manager.model_fingerprint()
        self.group.meet("loaded", self.place.check)  # an exchange waits for seconds only
        name = group_fingerprint(self.group, own)
        manager.model_fingerprint = lambda: name
        self._engine = LockStepEngine(model, manager, *parts, group=self.group, whole=whole)
        return self._engine

    def opened(self, owner: object) -> None:
        """This rank is ready. Rank 0 goes on; the others follow it, and end with it, or when `owner` is gone."""
        assert self._engine is not None
        self.group.meet("ready", self.place.check)
        if self.group.rank == 0:
            weakref.finalize(owner, self.place.kill)
            gone = weakref.finalize(owner, self._forgotten)
            gone.atexit = False  # type: ignore[attr-defined]  # a process that ends needs no group left
            self._engine.on_failure = self._end_others
            self._engine.watch(self.place.check)
            self._engine.channel.begin_beat()
            return
        if threading.current_thread() is threading.main_thread():  # torchrun has started it; a worker does so at once
            leave_the_end_to_rank_0()
        try:
            self._engine.follow()
            if self.device.type == "cuda":
                self.group.settle()
                self._engine.drop_graphs()
                self.group.part(LEAVE)
        except BaseException as problem:
            print(said_by(self.group.rank, problem), file=sys.stderr, flush=True)
            os._exit(FAILED)  # no wait for a group that is gone
        self.group.close()
        sys.exit(0)

    def end_process(self) -> None:
        """From here on this process ends with the group, exit code 3: for a server, which something starts again."""
        assert self._engine is not None

        def leave(problem: BaseException) -> None:
            self._end_others(problem)
            said = f"hybridkv: error: a worker ended, and the model with it: {problem}"
            with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more
                print(said, file=sys.stderr, flush=True)
            os._exit(FAILED)

        self._engine.on_failure = self._engine.channel.on_problem = leave

    def _end_others(self, problem: BaseException) -> None:
        if not isinstance(problem, KeyboardInterrupt):  # then nobody hangs
            self.place.dump_stacks()
        self.place.kill()

    def failed(self, problem: BaseException) -> None:
        """The model could not be opened on this rank, so it is on none. GroupError: another one ended, which says more
        than that it did not come.
        """
        if self.group.rank and isinstance(problem, SystemExit):  # it has followed rank 0
            return
        if self.group.heeds and not isinstance(problem, GroupError):
            self.group.leave_word(reason_of(problem))
        if self.group.rank and not self.group.heeds:  # follower.py ends it
            return
        try:
            if isinstance(problem, GroupError) and not isinstance(problem, UnlikeRanks):
                self.place.check_soon()
        finally:
            self._abandon()

    def _forgotten(self) -> None:
        """The LLM is gone, and nobody has closed it: another one may be opened."""
        if not self._left:
            self._abandon()

    def _abandon(self) -> None:
        """End the others at once, and leave their group."""
        self._left = True
        if self._engine is not None:
            self._engine.channel.close()
        self.place.kill()
        self.group.abandon(lambda: None if self._engine is None else self._engine.drop_graphs())

    def end(self) -> None:
        """Rank 0 has closed the model."""
        if self._left:
            return
        engine = self._engine
        if engine is None or engine.failure is not None:
            self._abandon()
            return
        try:
            with engine.channel.telling("end"):
                self.group.settle(self.place.check)
            engine.drop_graphs()
        except GroupError:
            self._abandon()
            return
        engine.channel.close()
        self.place.end()
        self._left = True
