"""Launch: the ranks of a model are started, watched and ended.

`LLM(tp=n)` is rank 0 and starts the others as processes of this machine, each with a pipe to it: they end when it does.
Under torchrun, or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, nothing is started: every process
opens the same model, rank 0 goes on with it and the others follow until it ends.

HYBRIDKV_TP_DEVICES="2,3" names the GPUs of the ranks. One that is named twice is shared, which is slow and good for
tests alone: NCCL refuses it, so such ranks are given host names of their own and talk by sockets.

A rank that ends takes the group with it (`signs.FAILED`, the exit code 3): the others see it in their next exchange.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hybridkv.errors import HybridKVError
from hybridkv.parallel.alike import check_versions
from hybridkv.parallel.group import (
    HEARD,
    LOOPBACK,
    POLL,
    TIMEOUT,
    Group,
    GroupError,
    listen,
    open_store,
    reason_of,
    torchrun_place,
)
from hybridkv.parallel.shard import Shard
from hybridkv.parallel.signs import DUMP

FOLLOWER = "hybridkv.follower"  # the module that the other ranks run
LEAVE = 10.0  # seconds that ranks have to end by themselves
ENDED = 1.0  # seconds after a failed exchange in which a rank that has ended is seen
SEEN = 0.1  # seconds after its connections have closed in which one that was killed is seen to have ended
DUMP_SECONDS = 0.3  # it has for that
DEVICES = "HYBRIDKV_TP_DEVICES"


@dataclass(frozen=True)
class Place:
    """A process as one rank of a model: what `LLM(tp=...)` takes in the processes that are not rank 0."""

    group: Group
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)  # rank 0: the others, if it started them

    def shard(self, block: int) -> Shard:
        """Of this rank. `block`: as in Shard."""
        return Shard(self.group.rank, self.group.size, block=block)

    def check(self) -> None:
        """GroupError if a rank that this one has started has ended, or one that something else has started says so."""
        check_workers(self.workers, self.group.word_of)
        self.group.heed()

    def check_soon(self) -> None:
        """The same where an exchange has failed: a rank that ends closes its connections just before."""
        until = time.monotonic() + ENDED
        while time.monotonic() < until:
            self.check()
            time.sleep(POLL)

    def agree(self, least: int, *most: int) -> list[int]:
        """Numbers that all ranks go by: the smallest of the first, the largest of each other one."""
        self.group.meet("sizes", self.check)
        found = self.group.all_gather(torch.tensor([least, *most]))
        return [int(found[:, 0].min()), *found[:, 1:].amax(0).tolist()]

    def end(self) -> None:
        """Rank 0: end the others, those that hang too, and leave the group."""
        if self.group.device.type == "cuda":  # NCCL's communicator is destroyed by all ranks at once
            try:
                self.group.part(LEAVE)
            except GroupError:
                self.kill()
                self.group.abandon()
        end_workers(self.workers, LEAVE)
        self.group.close()

    def dump_stacks(self) -> None:
        """Where this rank and those that it has started stand, on stderr: one that hangs is about to be ended."""
        time.sleep(SEEN)
        left = [worker for worker in self.workers if worker.poll() is None]
        if not left:
            return
        with contextlib.suppress(OSError, ValueError):  # no file behind stderr, or nobody who reads it
            sys.stderr.flush()
            print("hybridkv: where the ranks stand:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback()
        for worker in left:
            worker.send_signal(DUMP)
        time.sleep(DUMP_SECONDS)

    def kill(self) -> None:
        """The same at once: nothing more is expected of them."""
        end_workers(self.workers, 0.0)


def check_workers(workers: list[subprocess.Popen[bytes]], word_of: Callable[[int], str] = lambda rank: "") -> None:
    """GroupError if one has ended, with the word that it left."""
    for rank, worker in enumerate(workers, 1):
        if (code := worker.poll()) is not None:
            word = word_of(rank)
            why = f": {word}" if word else "; what it said is above"
            raise GroupError(f"rank {rank} ended with exit code {code}{why}")


def end_workers(workers: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Close their pipes, wait, and end by force what is left."""
    until = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
        worker.wait()
        if worker.stdin is not None:
            worker.stdin.close()


def rank_device(device: torch.device, rank: int) -> torch.device:
    """A GPU for each rank, from that of rank 0 on or as HYBRIDKV_TP_DEVICES says; the CPU for all."""
    if device.type != "cuda":
        return device
    local = int(os.environ.get("LOCAL_RANK", rank)) if torchrun_place() else rank
    number, named = (device.index or 0) + local, named_devices()
    if named:
        if local >= len(named):
            raise HybridKVError(f"{DEVICES}={os.environ[DEVICES]!r} has {len(named)} GPUs, and rank {rank} needs one")
        number = named[local]
    if number >= torch.cuda.device_count():
        raise HybridKVError(
            f"rank {rank} would run on GPU {number}, and there are {torch.cuda.device_count()}: use a smaller tp"
        )
    return torch.device("cuda", number)


def named_devices() -> list[int]:
    """GPUs of the ranks of this machine as HYBRIDKV_TP_DEVICES has them; empty: it says nothing."""
    text = os.environ.get(DEVICES, "")
    try:
        found = [int(number) for number in text.split(",")] if text else []
    except ValueError:
        found = [-1]
    if any(number < 0 for number in found):
        raise HybridKVError(f"{DEVICES} takes numbers of GPUs with commas between them, such as 0,1, not {text[:40]!r}")
    return found


def sharers(device: torch.device, size: int) -> int:
    """Ranks of this machine that run on a device."""
    return size if device.type == "cpu" else max(1, named_devices()[:size].count(device.index or 0))


def _apart(rank: int, size: int, environ: MutableMapping[str, str]) -> None:
    """Where ranks share a GPU, NCCL must take them for ranks of different hosts."""
    named = named_devices()[:size]
    if len(set(named)) < len(named):
        environ["NCCL_HOSTID"] = f"hybridkv-{rank}"
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def take_place(tp: int, device: torch.device, settings: Mapping[str, Any], timeout: float = TIMEOUT) -> Place:
    """Rank 0 of `tp`, the others started with the same settings of LLM; under torchrun: the rank that it gives."""
    given = torchrun_place()
    if given is not None:
        rank, size = given
        if size != tp:
            raise HybridKVError(
                f"tp={tp}, but torchrun has started {size} processes (WORLD_SIZE): give the same number"
            )
        _apart(rank, size, os.environ)
        own = rank_device(device, rank)
        how: dict[str, Any] = dict(loopback=False, heeds=True, met=check_versions)
        return Place(Group.join(rank, size, own, _torchrun_meeting(), timeout, **how))
    return start_ranks(tp, device, {"settings": dict(settings)}, timeout)


def start_ranks(
    size: int, device: torch.device, words: Mapping[str, Any], timeout: float = TIMEOUT, module: str = FOLLOWER
) -> Place:
    """This process as rank 0; the others are started with a module that reads these words and where they meet."""
    workers: list[subprocess.Popen[bytes]] = []
    listener = listen()  # before they are told of it: nobody else takes the port meanwhile
    meeting = f"tcp://{LOOPBACK}:{listener.getsockname()[1]}"
    try:
        own = rank_device(device, 0)
        for rank in range(1, size):
            told = {"rank": rank, "size": size, "meeting": meeting, "timeout": timeout, **words}
            told["device"] = str(rank_device(device, rank))
            workers.append(_start(told, size, module))
        check = partial(check_workers, workers)
        if own.type == "cuda":
            _apart(0, size, os.environ)
        return Place(Group.join(0, size, own, meeting, timeout, check=check, listener=listener), workers)
    except BaseException:
        listener.close()
        end_workers(workers, 0.0)
        raise


def tell_others(problem: Exception) -> None:
    """Why this rank cannot even join those that torchrun has started: they wait for it. No more than an attempt."""
    with contextlib.suppress(RuntimeError, ValueError, OSError):
        given = torchrun_place()
        if given is not None and not isinstance(problem, GroupError):  # which they have, or see for themselves
            store = open_store(_torchrun_meeting(), *given, HEARD)
            Group(*given, torch.device("cpu"), store, heeds=True).leave_word(reason_of(problem))


def _torchrun_meeting() -> str:
    """torchrun's own store listens at MASTER_PORT: this model's at the next one."""
    host, port = os.environ.get("MASTER_ADDR", LOOPBACK), int(os.environ.get("MASTER_PORT", "29500"))
    return f"tcp://{host}:{port + ('TORCHELASTIC_RUN_ID' in os.environ)}"


def _start(told: dict[str, Any], size: int, module: str) -> subprocess.Popen[bytes]:
    env = {**os.environ}
    if told["device"] != "cpu":
        _apart(told["rank"], size, env)
    if "OMP_NUM_THREADS" not in env and told["device"] == "cpu":
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // size))
    worker = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, env=env)
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(told).encode() + b"\n")
    worker.stdin.flush()  # it stays open: its end tells the worker that rank 0 is gone
    return worker
