"""Group: the processes of one model, and what they send each other.

On GPUs tensors go by NCCL, which a CUDA graph can capture; on CPUs, and for what the host says, by gloo. Every rank
must make the same calls in the same order: a rank that does not is an error after `timeout` seconds, never a wait
without end. The channels are neither encrypted nor authenticated: ranks of one machine use the loopback interface.

NCCL's own watchdog does not see what a replayed graph waits for, so the host waits for a device with a limit (`wait`).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridkv.errors import HybridKVError

TIMEOUT = 30.0  # seconds that a rank waits for the others in one exchange
POLL = 0.02  # seconds between two looks at who has come
LOOK = 1e-4  # seconds between two looks at a device, and
LOOKS = 500  # looks between two at whether all ranks live
LATER = 3  # times `timeout` after which NCCL's watchdog acts: after this project's own limits, which say what happened
ABANDON = 10.0  # seconds that communication with ranks that are gone has to end
JOIN = 120.0  # and for them to have begun
START = 3600.0  # and for all of them to have loaded their parts
HEARD = 10.0  # and to hear why one of them cannot begin
LOOPBACK = "127.0.0.1"
MOST_SAID = 300  # characters of a library's own words in an error
BACKLOG = 128  # ranks that may come at once
# torch 2.13 has a new name for it
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class GroupError(HybridKVError):
    """A rank that ended, hangs, or does something else than the others."""


class UnlikeRanks(GroupError):
    """Ranks that were started otherwise than each other: to start them once more does not help."""


class Signal(Protocol):
    """A torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


class Alone:
    """A group of one: nothing is sent."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, which is x."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x of every rank [n, ...]."""
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of one rank, on all."""
        return x

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True)
class Group:
    """This process as one of `size`. Tensors may be on the CPU (gloo) or on the rank's GPU (NCCL)."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store
    timeout: float = TIMEOUT
    heeds: bool = False  # nobody watches the processes of the ranks: while they begin, they look for each other's words

    @staticmethod
    def join(
        rank: int,
        size: int,
        device: torch.device,
        meeting: str,
        timeout: float = TIMEOUT,
        loopback: bool = True,
        start: float = JOIN,
        check: Callable[[], None] = lambda: None,
        listener: socket.socket | None = None,
        heeds: bool = False,
        met: Callable[[Group], None] = lambda group: None,
    ) -> Group:
        """Meet the other ranks; returns when all are there.

        Args:
            rank: of this process, from 0.
            size: number of processes.
            device: where this rank computes: the CPU, or its own GPU.
            meeting: where they meet: tcp://host:port or file:///path.
            timeout: seconds that an exchange may take.
            loopback: whether all ranks are on this machine.
            start: seconds that the ranks have to come.
            check: raises if one will not come.
            listener: of rank 0, where the others were told to meet it (`listen`); it is the group's from here on.
            heeds: as in Group.
            met: called when all are there, before they send each other anything.
        """
        if dist.is_initialized():
            raise HybridKVError(
                f"torch.distributed is in use in this process already, by {dist.get_world_size()} ranks: close the "
                "model that uses it first, or open this one in a process of its own"
            )
        if loopback and "GLOO_SOCKET_IFNAME" not in os.environ and "lo" in (name for _, name in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # a rank that is gone: communication ends, and the process lives to say so
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        try:
            store = open_store(meeting, rank, size, start, listener)
            group = Group(rank, size, device, store, timeout, heeds)
            group.meet("the group", check, start)
            met(group)
            limit = timedelta(seconds=timeout)
            try:
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            except RuntimeError:
                group.heed()  # a rank that was ready first may have ended meanwhile
                raise
            if device.type == "cuda":
                _watch_later(device, timedelta(seconds=LATER * timeout))
                group._begin(start, check)
        except GroupError:
            raise
        except (RuntimeError, ValueError, OSError) as problem:  # DistError and its kinds are RuntimeErrors
            raise GroupError(
                f"rank {rank} of {size} did not meet the others at {meeting}: {first_sentence(str(problem))}"
            ) from None
        return group

    def meet(self, where: str, check: Callable[[], None] = lambda: None, limit: float = START) -> None:
        """Wait until all ranks have come to `where`, which may take long, as loading does. `check` raises if a rank
        will not come.
        """
        self.store.set(f"{where}/{self.rank}", "here")
        until = time.monotonic() + limit
        for rank in range(self.size):
            with self.said(repr(where)):
                while not self.store.check([f"{where}/{rank}"]):  # `wait` would write its own warnings
                    check()
                    self.heed()
                    if time.monotonic() > until:
                        raise GroupError(
                            f"rank {self.rank} of {self.size}: rank {rank} did not come to {where!r} in {limit:g} s"
                        )
                    time.sleep(POLL)

    def leave_word(self, text: str) -> None:
        """Why this rank ends, for the one that has started it, or for all."""
        with contextlib.suppress(RuntimeError):  # that one is gone
            self.store.set(f"word/{self.rank}", text)
            self.store.set("ended", str(self.rank))
        if self.heeds:
            self.let_all_hear()

    def word_of(self, rank: int) -> str:
        """Why a rank has ended; empty: it left no word."""
        with contextlib.suppress(RuntimeError):
            return self.store.get(f"word/{rank}").decode() if self.store.check([f"word/{rank}"]) else ""
        return ""

    def heed(self) -> None:
        """GroupError with the word of a rank that has ended, where ranks look for it."""
        with contextlib.suppress(RuntimeError):
            if self.heeds and self.store.check(["ended"]):
                rank = int(self.store.get("ended"))
                word = self.word_of(rank)
                self.let_all_hear()
                raise GroupError(f"rank {rank}: {word}")

    def let_all_hear(self) -> None:
        """This rank knows that the group ends. The store goes with rank 0, which waits until the others know, too."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"heard/{self.rank}", "")
            all_heard, until = [f"heard/{rank}" for rank in range(self.size)], time.monotonic() + HEARD
            while self.rank == 0 and not self.store.check(all_heard) and time.monotonic() < until:
                time.sleep(POLL)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; the same bits on every rank."""
        if x.numel():
            with self.said("all_reduce"):
                dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x of every rank, all of one shape: [n, ...]."""
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            with self.said("all_gather"):
                all_gather_single(out.view(-1), x.view(-1))
        return out

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of one rank, on all, in place."""
        if x.numel():
            with self.said("broadcast"):
                dist.broadcast(x, source)
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """x of every rank, all of one shape, on rank 0; None on the others."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with self.said("gather"):
            dist.gather(x, parts)
        return parts

    def said(self, what: str) -> Said:
        """Turns what torch raises in an exchange into a GroupError."""
        return Said(self, what)

    # ---- the device

    def _begin(self, limit: float, check: Callable[[], None]) -> None:
        """NCCL connects the ranks when they first send: now, and not inside a graph."""
        x = torch.ones(1, device=self.device)
        self.all_reduce(x)
        self.all_gather(x)
        self.broadcast(x)
        self.wait(torch.cuda.current_stream(self.device).record_event(), check, limit)

    def wait(self, event: Signal, check: Callable[[], None] = lambda: None, limit: float | None = None) -> None:
        """Until the device has come to an event. GroupError if it does not in `limit` seconds, or in those of an
        exchange; `check` raises if a rank has ended, for which the device would wait.
        """
        limit = self.timeout if limit is None else limit
        until, looks = time.monotonic() + limit, 0
        with self.said("the device"):
            while not event.query():
                looks += 1
                if looks % LOOKS == 0:
                    check()
                if time.monotonic() > until:
                    raise GroupError(
                        f"rank {self.rank} of {self.size}: its device has waited {limit:g} s for another rank, or hangs"
                    )
                time.sleep(LOOK)

    def settle(self, check: Callable[[], None] = lambda: None) -> None:
        """Until the device has done all it was given; on a CPU that is so."""
        if self.device.type == "cuda":
            self.wait(torch.cuda.current_stream(self.device).record_event(), check)

    # ---- the end

    def close(self) -> None:
        """Leave the group. Captured graphs must be gone before: NCCL waits for them. On GPUs all ranks close at about
        the same time (`part`).
        """
        if dist.is_initialized():
            dist.destroy_process_group()

    def part(self, limit: float) -> None:
        """Leave the group together with all others."""
        self.meet("the end", limit=limit)
        self.close()

    def abandon(self, before: Callable[[], None] = lambda: None) -> None:
        """Leave a group whose other ranks are gone. What the device waits for is given up; `before`: what must have
        gone by then. Nothing here is waited for without a limit.
        """
        if not dist.is_initialized():
            return
        if self.device.type != "cuda":
            before()
            self.close()
            return
        backend = _backend(self.device)
        abort = getattr(backend, "abort", None) or getattr(backend, "_abort", None) or (lambda: None)
        # Kernels that wait for other ranks are told to stop first: graphs may not go while they run. That may wait for
        # graphs that hold NCCL's calls, so they go beside it.
        aborting = _begin("abort", abort)
        aborting.join(ABANDON / 10)
        _begin("before", before).join(ABANDON)
        aborting.join(ABANDON)
        _begin("destroy", dist.destroy_process_group).join(ABANDON)
        if dist.is_initialized():
            dist.distributed_c10d._update_default_pg(None)


def _begin(name: str, do: Callable[[], object]) -> threading.Thread:
    """A thread that does something which may hang, or fail: what is left of the group is of no use."""

    def run() -> None:
        with contextlib.suppress(Exception):
            do()

    found = threading.Thread(target=run, name=f"hybridkv-{name}", daemon=True)
    found.start()
    return found


def _backend(device: torch.device) -> object:
    """What sends tensors of a device."""
    return dist.distributed_c10d._get_default_group()._get_backend(device)


def _watch_later(device: torch.device, limit: timedelta) -> None:
    """NCCL's watchdog acts after `limit`, where torch lets that be said apart from gloo's."""
    backend = _backend(device)
    change = getattr(backend, "set_timeout", None) or getattr(backend, "_set_default_timeout", None)
    if change is not None:
        change(limit)


@dataclass(frozen=True)
class Said:
    """The guard of one exchange."""

    group: Group
    what: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, _: object) -> None:
        if isinstance(problem, RuntimeError) and not isinstance(problem, HybridKVError):
            where = f"rank {self.group.rank} of {self.group.size}"
            why = first_sentence(str(problem))
            raise GroupError(f"{where}: another rank ended or did not come to {self.what}: {why}") from problem


def first_sentence(text: str) -> str:
    """Of what torch or gloo says: without the places in their sources before it, and without what follows."""
    line = re.sub(r"^(\[[^\]]*\.(cc|cpp|h|hpp|cu):\d+\]\s*)+(err == 0\.\s*)?", "", text.strip().partition("\n")[0])
    return line.partition(". ")[0][:MOST_SAID]


def reason_of(problem: BaseException) -> str:
    """A problem as a rank's word."""
    said = isinstance(problem, HybridKVError)
    return str(problem) if said else f"{type(problem).__name__}: {first_sentence(str(problem))}"


def open_store(meeting: str, rank: int, size: int, seconds: float, listener: socket.socket | None = None) -> dist.Store:
    """Where ranks leave each other words, before they are a group too. `seconds`: that they have to come there."""
    kind, _, where = meeting.partition("://")
    if kind == "file":
        return dist.FileStore(where, size)
    host, _, port = where.rpartition(":")
    if rank == 0 and host == LOOPBACK and listener is None:
        listener = listen(int(port))
    # without a socket of ours rank 0 listens on all interfaces: where others come from is not known then
    found = None if listener is None else listener.detach()
    return dist.TCPStore(
        host, int(port), size, is_master=rank == 0, timeout=timedelta(seconds=seconds), wait_for_workers=False,
        master_listen_fd=found,
    )  # fmt: skip


def torchrun_place(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """(rank, size) if torchrun, or whatever else sets its variables, started this process; None: nothing did."""
    found = os.environ if environ is None else environ
    if "RANK" not in found or "WORLD_SIZE" not in found:
        return None
    try:
        rank, size = int(found["RANK"]), int(found["WORLD_SIZE"])
    except ValueError:
        raise HybridKVError(
            f"RANK={found['RANK'][:20]!r} and WORLD_SIZE={found['WORLD_SIZE'][:20]!r} must be whole numbers"
        ) from None
    if not 0 <= rank < size:
        raise HybridKVError(f"RANK={rank} is not a rank of WORLD_SIZE={size}")
    return rank, size


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on the loopback interface alone; 0: at any port that is free."""
    found = socket.socket()
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((LOOPBACK, port))
        found.listen(BACKLOG)
    except BaseException:
        found.close()
        raise
    return found


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with listen() as found:
        return found.getsockname()[1]
