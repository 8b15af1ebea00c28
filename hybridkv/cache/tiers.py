"""HostTier: bytes of the cache in host memory. What they are is the business of those who put them there.

Host memory is paged as device memory is: blocks of 256 KiB in slabs of 64 MiB, pinned where there is a GPU and taken
when first needed. What is put there is a sequence of tensors (chunks) whose bytes follow one another over blocks that
need not be neighbours; several owners may share them. Owners that give theirs up when room is needed (host_columns.py)
are counted apart, as they are for pages (`PageAllocator.spare`).

    down   compute stream: chunk -> one of two staging buffers | side stream: waits for that, buffer -> blocks
    up     side stream: blocks -> one of two staging buffers   | compute stream: waits for that, then reads the buffer

All copies between host and device are launched on the one side stream, so they happen in the order they were asked for:
blocks that were dropped and taken again are written after they were read. Rows and pages may be given away as soon as
`put` returns, since whatever writes them later comes after the copy into the staging buffer on the compute stream. A
staging buffer is not written again before the copy out of it has ended. On a CPU all of it is plain copies. Pinned
chunks of the host, as of a session that came from a GPU, go down by way of the device, too, which is three times as
fast as one thread copies; the host waits for the first half of that way, so they are the caller's again.

What nobody waits for (`aside`) is also written to its pages and rows on the side stream, after all that the compute
stream was given before; the compute stream waits for it (`Arrival`) before it reads or gives away any of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.allocator import PageAllocator
from hybridkv.cache.schema import ceil_div
from hybridkv.cache.tier_sizes import BLOCK, CPU_LIMIT, MOST, STAGING
from hybridkv.devices import free_memory
from hybridkv.errors import HybridKVError, OutOfPages

SLAB_BLOCKS = {"cuda": (64 << 20) // BLOCK, "cpu": (8 << 20) // BLOCK}
ALIGN = 16  # bytes; where each chunk begins
LAUNCHES = 1e-3  # seconds that a load takes whatever its bytes are
SURELY = 0.7  # of the time of reading: a load has to be quicker than that
MEASURED = 1024  # tokens of a prompt whose reading is timed, at the least


@dataclass(frozen=True)
class HostBlocks:
    """Chunks that lie on the host."""

    ids: np.ndarray  # blocks, in order
    layout: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of each chunk
    nbytes: int  # of the chunks


NOTHING = HostBlocks(np.zeros(0, np.int32), (), 0)


def chunks_of(tensor: Tensor, most: int = STAGING) -> Iterator[Tensor]:
    """A tensor in parts of at most so many bytes: whole leading indices, as few as will do."""
    if tensor.nbytes <= most or tensor.dim() == 0:
        yield tensor
    elif tensor.shape[0] == 1:
        yield from chunks_of(tensor[0], most)
    else:
        each = max(1, most // (tensor.nbytes // tensor.shape[0]))
        for part in tensor.split(each):
            yield from (part,) if part.nbytes <= most else chunks_of(part, most)


def default_limit(device: torch.device) -> int:
    """Bytes on the host where nobody says how many: a quarter of what is free, at most 32 GiB; 1 GiB on a CPU, where
    only the state of frozen caches goes there.
    """
    return CPU_LIMIT if device.type == "cpu" else min(MOST, free_memory(torch.device("cpu")) // 4)


class Timer:
    """How long copies took that were launched between its making and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._device, self._seconds = device, -time.perf_counter()
        if self._events is not None:
            self._events[0].record(torch.cuda.current_stream(device))

    def stop(self) -> Timer:
        """All of them have been launched."""
        self._seconds += time.perf_counter()
        if self._events is not None:
            self._events[1].record(torch.cuda.current_stream(self._device))
        return self

    @property
    def ms(self) -> float | None:
        """Milliseconds on the device; None: they have not ended."""
        if self._events is None:
            return 1e3 * self._seconds
        return self._events[0].elapsed_time(self._events[1]) if self._events[1].query() else None


class Arrival:
    """Copies that run on the side stream, and that nobody waits for yet."""

    def __init__(self, side: torch.cuda.Stream, device: torch.device) -> None:
        self._side, self._device = side, device
        self._event: Any = None  # after the last of them; None: they are still being launched

    def launched(self) -> None:
        """All of them have been."""
        self._event = self._side.record_event()

    def ready(self) -> bool:
        """Whether they have ended."""
        return self._event is not None and self._event.query()

    def wait(self) -> None:
        """What the compute stream is given from here on comes after them."""
        compute = torch.cuda.current_stream(self._device)
        if self._event is None:  # interrupted while they were launched
            compute.wait_stream(self._side)
        else:
            compute.wait_event(self._event)


class HostTier:
    """Room for `limit` bytes on the host, taken as it is needed.

    Args:
        limit: bytes that are taken at the most, rounded down to blocks.
        device: where chunks come from and go to.
        pages: whether whole caches go there, too, and not only the state of frozen ones; None: where there is a GPU. On
            a CPU both lie in the same memory.
        preempted: whether running requests that make room wait here (engine/preempted.py).
    """

    def __init__(self, limit: int, device: torch.device, pages: bool | None = None, preempted: bool = False) -> None:
        self.device, self.pages = device, device.type == "cuda" if pages is None else pages
        self.preempted = preempted
        self.blocks = PageAllocator(min(limit // BLOCK, 2**31 - 1), "host")
        self.copied_down = self.copied_up = 0  # bytes, in all
        self.failed = 0  # copies
        self.speed = 0.0  # tokens read a second, the most that was seen; 0: not known, any load is worth it
        self._slab = SLAB_BLOCKS.get(device.type, SLAB_BLOCKS["cuda"])
        self._rate: float | None = None
        self._flying: deque[tuple[Any, int]] = deque()  # when a copy to the host has ended, and its bytes
        self._slabs: dict[int, Tensor] = {}
        self._staging: list[Tensor] = []
        self._free_again: list[Any] = [None, None]  # when a staging buffer may be written
        self._arrived: list[Any] = [None, None]  # when it holds what came from the host
        self._turn = 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def limit(self) -> int:
        """Bytes that it may hold."""
        return self.blocks.total * BLOCK

    @property
    def used(self) -> int:
        """Bytes of the blocks that are owned."""
        return self.blocks.held * BLOCK

    @property
    def staging(self) -> int:
        """Bytes on the device that copies go through; they are taken with the first copy."""
        return sum(buffer.nbytes for buffer in self._staging)

    def room_for(self, nbytes: int) -> bool:
        """Whether chunks of so many bytes, each with what rounding takes, fit beside what is not given up for them."""
        need = ceil_div(nbytes, BLOCK) + 1
        return need <= self.blocks.free or need <= self.blocks.free + self.blocks.reclaimable

    @property
    def in_flight(self) -> int:
        """Bytes on their way to the host."""
        self._land()
        return sum(nbytes for _, nbytes in self._flying)

    @property
    def rate(self) -> float:
        """Bytes a second from the host to the device, measured when it is first asked for and constant afterwards."""
        if self._rate is None:
            slab = self._slab_of(0)
            for _ in range(2):  # the first one also touches memory for the first time
                begin = time.perf_counter()
                if self._side is None:
                    torch.empty_like(slab).copy_(slab)
                else:
                    with torch.cuda.stream(self._side):
                        which, buffer = self._buffer(self._side)
                        self._side.synchronize()
                        begin = time.perf_counter()
                        buffer[: slab.nbytes].copy_(slab, non_blocking=True)
                        self._free_again[which] = self._side.record_event()
                    self._side.synchronize()
                self._rate = slab.nbytes / max(1e-9, time.perf_counter() - begin)
        assert self._rate is not None
        return self._rate

    def saw_reading(self, tokens: int, seconds: float) -> None:
        """A prompt's tokens were computed in so many seconds, beside whatever else ran."""
        if tokens >= MEASURED and seconds > 0:
            self.speed = max(self.speed, tokens / seconds)

    def pays(self, nbytes: int, tokens: int) -> bool:
        """Whether copying so many bytes back is quicker than reading so many tokens. No clock is looked at."""
        return not self.speed or nbytes / self.rate + LAUNCHES < SURELY * tokens / self.speed

    def put(self, chunks: Iterable[Tensor]) -> HostBlocks | None:
        """Copy chunks of at most STAGING bytes, in order; None: there is no room, or a copy failed, and nothing was
        taken.
        """
        ids: list[np.ndarray] = []
        layout: list[tuple[tuple[int, ...], torch.dtype]] = []
        room = at = total = 0  # bytes of the blocks so far, where the next chunk begins, bytes of the chunks
        try:
            for chunk in chunks:
                need = ceil_div(at + chunk.nbytes - room, BLOCK)
                if need > 0:
                    ids.append(self.blocks.acquire(need))
                    room += need * BLOCK
                layout.append((tuple(chunk.shape), chunk.dtype))
                self._down(chunk, np.concatenate(ids) if ids else np.zeros(0, np.int32), at)
                total += chunk.nbytes
                at += ceil_div(chunk.nbytes, ALIGN) * ALIGN
        except OutOfPages:
            self.drop_ids(ids)
            return None
        except (RuntimeError, MemoryError):  # of torch: no memory for a slab or a buffer, or no copy
            self.drop_ids(ids)
            self.failed += 1
            return None
        except BaseException:
            self.drop_ids(ids)
            raise
        self.copied_down += total
        return HostBlocks(np.concatenate(ids) if ids else np.zeros(0, np.int32), tuple(layout), total)

    def get(self, blocks: HostBlocks) -> Iterator[Tensor]:
        """The chunks, on the device, one after the other. Each is to be used before the next one is asked for.
        HybridKVError where a copy fails.
        """
        waiting: list[tuple[Tensor, int | None]] = []  # the next chunk is on its way while one is used
        at = 0
        for shape, dtype in blocks.layout:
            nbytes = prod(shape) * dtype.itemsize
            try:
                buffer, which = self._up(blocks.ids, at, nbytes)
            except (RuntimeError, MemoryError) as problem:
                self.failed += 1
                raise HybridKVError(f"what lies on the host could not be copied back: {problem}") from problem
            waiting.append((buffer.view(dtype).view(shape), which))
            at += ceil_div(nbytes, ALIGN) * ALIGN
            self.copied_up += nbytes
            if len(waiting) > 1:
                yield from self._used(waiting.pop(0))
        for each in waiting:
            yield from self._used(each)

    @contextmanager
    def aside(self) -> Iterator[Arrival | None]:
        """Inside, `get` and whatever is done with its chunks run on the side stream; None: on a CPU they are done when
        they return.
        """
        if self._side is None:
            yield None
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))  # whoever had these pages and rows is done
        arrival = Arrival(self._side, self.device)
        with torch.cuda.stream(self._side):
            try:
                yield arrival
            finally:
                arrival.launched()

    def _used(self, chunk: tuple[Tensor, int | None]) -> Iterator[Tensor]:
        tensor, which = chunk
        if which is None:
            yield tensor
            return
        compute, arrived = torch.cuda.current_stream(self.device), self._arrived[which]
        assert arrived is not None
        compute.wait_event(arrived)
        try:
            yield tensor
        finally:
            self._free_again[which] = torch.cuda.current_stream(self.device).record_event()

    def read(self, blocks: HostBlocks) -> Iterator[Tensor]:
        """The chunks as tensors on the host, each a copy; waits until they have come."""
        if self._side is not None:
            self._side.synchronize()
        at = 0
        for shape, dtype in blocks.layout:
            nbytes = prod(shape) * dtype.itemsize
            out = torch.empty(nbytes, dtype=torch.uint8)
            for part, begin, end in self._ranges(blocks.ids, at, nbytes):
                out[begin:end] = part
            yield out.view(dtype).view(shape)
            at += ceil_div(nbytes, ALIGN) * ALIGN

    def share(self, blocks: HostBlocks) -> None:
        """One more owner."""
        self.blocks.share(blocks.ids)

    def drop(self, blocks: HostBlocks) -> None:
        """One owner less; without owners the blocks are free."""
        self.blocks.release(blocks.ids)

    def lend(self, blocks: HostBlocks) -> None:
        """Their one owner gives them up when room is needed, from here on; `take_back`: it does so."""
        self.blocks.share_distinct(blocks.ids, spare=True)
        self.blocks.release_distinct(blocks.ids)

    def take_back(self, blocks: HostBlocks) -> None:
        """What was lent is free."""
        self.blocks.release_distinct(blocks.ids, spare=True)

    def drop_ids(self, ids: Sequence[np.ndarray]) -> None:
        """Blocks that were taken and are part of nothing yet."""
        for each in ids:
            self.blocks.release(each)

    # ---- copies

    def _ranges(self, ids: np.ndarray, at: int, nbytes: int) -> Iterator[tuple[Tensor, int, int]]:
        """(bytes of a slab, begin, end) of each stretch of `nbytes` bytes from byte `at` of the blocks on."""
        done = 0
        while done < nbytes:
            first, offset = divmod(at + done, BLOCK)
            last = first + 1  # neighbours in a slab are one stretch
            while (
                (last - first) * BLOCK - offset < nbytes - done
                and ids[last] == ids[last - 1] + 1
                and ids[last] % self._slab
            ):
                last += 1
            count = min((last - first) * BLOCK - offset, nbytes - done)
            slab, block = divmod(int(ids[first]), self._slab)
            begin = block * BLOCK + offset
            yield self._slab_of(slab)[begin : begin + count], done, done + count
            done += count

    def _slab_of(self, number: int) -> Tensor:
        if number not in self._slabs:
            size = self._slab * BLOCK
            self._slabs[number] = torch.empty(size, dtype=torch.uint8, pin_memory=self._side is not None)
        return self._slabs[number]

    def _buffer(self, writer: torch.cuda.Stream) -> tuple[int, Tensor]:
        """A staging buffer that may be written on this stream now."""
        if not self._staging:
            self._staging = [torch.empty(STAGING, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._turn = 1 - self._turn
        event = self._free_again[self._turn]
        if event is not None:
            writer.wait_event(event)
        return self._turn, self._staging[self._turn]

    def _down(self, chunk: Tensor, ids: np.ndarray, at: int) -> None:
        nbytes = chunk.nbytes
        if not nbytes:
            return
        if self._side is None or (chunk.device.type == "cpu" and not chunk.is_pinned()):
            if self._side is not None:
                self._side.synchronize()  # the blocks may be somebody's that are still being copied
            flat = chunk.contiguous().view(-1).view(torch.uint8)
            for part, begin, end in self._ranges(ids, at, nbytes):
                part.copy_(flat[begin:end])
            return
        compute = torch.cuda.current_stream(self.device)
        which, buffer = self._buffer(compute)
        buffer[:nbytes].view(chunk.dtype).view(chunk.shape).copy_(chunk)
        self._side.wait_stream(compute)
        with torch.cuda.stream(self._side):
            for part, begin, end in self._ranges(ids, at, nbytes):
                part.copy_(buffer[begin:end], non_blocking=True)
            self._free_again[which] = self._side.record_event()
        self._land()  # here, too: not everybody asks what is in flight
        self._flying.append((self._free_again[which], nbytes))

    def _land(self) -> None:
        """Forget the copies that have ended."""
        while self._flying and self._flying[0][0].query():
            self._flying.popleft()

    def _up(self, ids: np.ndarray, at: int, nbytes: int) -> tuple[Tensor, int | None]:
        """Bytes on their way to the device, and the staging buffer that they are in; None: they are there."""
        if self._side is None:
            found = torch.empty(nbytes, dtype=torch.uint8)
            for part, begin, end in self._ranges(ids, at, nbytes):
                found[begin:end] = part
            return found, None
        with torch.cuda.stream(self._side):
            which, buffer = self._buffer(self._side)
            for part, begin, end in self._ranges(ids, at, nbytes):
                buffer[begin:end].copy_(part, non_blocking=True)
            # until it is used nobody writes there before it has come, also if it never is
            self._arrived[which] = self._free_again[which] = self._side.record_event()
        return buffer[:nbytes], which

    # ---- who owns what

    def check(self, owned: Sequence[HostBlocks], spare: Sequence[HostBlocks] = ()) -> None:
        """Every block is free or owned as often as somebody names it; `spare`: of owners that give theirs up."""
        self.blocks.check()
        named, given_up = (np.bincount(_ids(each), minlength=self.blocks.total) for each in (owned, spare))
        if not (np.array_equal(named + given_up, self.blocks.refs) and np.array_equal(given_up, self.blocks.spare)):
            raise AssertionError("blocks on the host and who owns them disagree")

    def rebuild(self, owned: Sequence[HostBlocks], spare: Sequence[HostBlocks] = ()) -> None:
        """Count owners anew: the way back after an interrupt."""
        self.blocks.rebuild(_ids(owned), _ids(spare))


def _ids(owned: Sequence[HostBlocks]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *(each.ids for each in owned)])
