"""Channel: what rank 0 tells the others: events, and what to do next. Never tensors, page tables or pickles.

A message is JSON: {"events": [...], "do": "step" | "drain" | "beat" | "end"}. It goes in a broadcast of one fixed size;
a longer one in a second. While nothing is to be done, rank 0 sends a beat each second, so that the others know that it
is there: they wait in a receive that has a limit.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridkv.parallel.group import Group, GroupError

HEADER = 4096  # bytes
BEAT = 1.0  # seconds

Event = dict[str, Any]


class Channel:
    """One end of it. On rank 0 the beat is another thread's: it comes between messages and what is done for them, never
    inside, where the ranks exchange other things.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sent = self.received = 0  # messages, beats among them
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None
        self.problem: GroupError | None = None  # that ended the beat
        self.on_problem: Callable[[GroupError], None] = lambda problem: None  # told of it, on the beat's thread

    @contextmanager
    def telling(self, do: str, events: list[Event] | None = None) -> Iterator[None]:
        """Tell all other ranks what to do; inside, rank 0 does it too."""
        with self._lock:
            if self._closed.is_set():
                raise self.problem or GroupError("the ranks of this model have ended; open it again")
            self._send(do, events or [])
            yield
            if do == "end":
                self._closed.set()

    def _send(self, do: str, events: list[Event]) -> None:
        data = json.dumps({"do": do, "events": events}, separators=(",", ":"), default=_plain).encode()
        header = torch.zeros(HEADER, dtype=torch.uint8)
        header[:8] = torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        short = body[: HEADER - 8]
        header[8 : 8 + len(short)] = short
        self.group.broadcast(header)
        if len(data) > HEADER - 8:
            self.group.broadcast(body)
        self.sent += 1

    def receive(self) -> tuple[str, list[Event]]:
        """The next message of rank 0."""
        header = self.group.broadcast(torch.zeros(HEADER, dtype=torch.uint8))
        length = int.from_bytes(bytes(header[:8].tolist()), "little")
        body = header[8 : 8 + length]
        if length > HEADER - 8:
            body = self.group.broadcast(torch.zeros(length, dtype=torch.uint8))
        found = json.loads(bytes(body.tolist()))
        self.received += 1
        return found["do"], found["events"]

    def begin_beat(self) -> None:
        """Rank 0: from here on the others hear something at least each second."""
        self._beating = threading.Thread(target=self._beat, name="hybridkv-beat", daemon=True)
        self._beating.start()

    def _beat(self) -> None:
        heard = self.sent
        while not self._closed.wait(BEAT):
            if self.sent == heard and self._lock.acquire(timeout=0):
                try:
                    if not self._closed.is_set():
                        self._send("beat", [])
                except GroupError as problem:
                    self.problem = problem
                    self._closed.set()
                    self.on_problem(problem)
                finally:
                    self._lock.release()
            heard = self.sent

    def close(self) -> None:
        """No message after this."""
        self._closed.set()


def _plain(value: Any) -> Any:
    """Of a caller's number that is numpy's or torch's."""
    return value.item()
