"""Calls: one thread owns an engine and makes its calls, one at a time; what comes inside a call waits or is refused.

A call that does not come to its end, whatever ended it, is noticed: what then has to be put right is the engine's
(`recover`). It may itself be interrupted; the next call begins with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hybridkv.errors import HybridKVError, RequestError

Found = TypeVar("Found")


GIVEN_BACK = 2.0  # seconds that a thread which has lent its engine waits for it, before its call is refused


class _Running:
    """Lives as long as a call does."""


class Calls:
    """Of one engine, which the thread owns that makes it."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._lender: int | None = None  # the thread that gets the engine back
        self._back = threading.Event()  # it has it
        self.stepping = self.changing = False  # a call of that kind has begun and not come to its end
        self._running: weakref.ref[_Running] | None = None  # such a call is running now, if what it refers to lives
        self._deferred: list[Callable[[], None]] = []  # calls that came inside a step, for after it

    def take_ownership(self) -> None:
        """From here on the calling thread owns the engine. The owner before it must not be inside a call."""
        if self.active:
            raise RequestError("the engine is in the middle of a call; its owner hands it over between calls")
        self._owner = threading.get_ident()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Inside, the calling thread owns the engine; afterwards, whoever did before."""
        before, back = self._owner, threading.Event()
        self.take_ownership()
        self._lender, self._back = before, back
        try:
            yield
        finally:
            self._owner = before
            back.set()

    def check_owner(self) -> None:
        """RequestError on any thread but the owner's. Who has lent the engine waits until it is back: an answer is
        there a moment before.
        """
        me = threading.get_ident()
        if me != self._owner and me == self._lender:
            self._back.wait(GIVEN_BACK)
        if me != self._owner:
            raise RequestError(
                "this engine belongs to another thread: one thread makes all calls (add, step, abort, generate, ...). "
                "To hand it over, call engine.take_ownership() in the new thread while no call is running"
            )

    @property
    def active(self) -> bool:
        """Whether a call is running now. It dies with the call's own frame, however that ends."""
        return self._running is not None and self._running() is not None

    def defers(self, call: Callable[[], None]) -> bool:
        """Whether a call came inside a step, as of a generator that is collected there, and waits for its end."""
        self.check_owner()
        if self.active:
            self._deferred.append(call)
        return self.active

    @contextmanager
    def change(self, recover: Callable[[str], None]) -> Iterator[None]:
        """Around a call that moves requests without running a step."""
        self.check_owner()
        if self.active:
            raise RequestError("a call came inside another call of the same engine; make it after that call")
        if self.stepping or self.changing:
            recover("an earlier call was interrupted")
        running = _Running()
        try:
            self._running = weakref.ref(running)
            self.changing = True
            yield
            self.changing = False
        except HybridKVError:
            self.changing = False
            raise
        except BaseException:
            recover("")
            raise
        finally:
            self._running = None

    def step(self, work: Callable[[], Found], recover: Callable[[str], None]) -> Found:
        """Run a step, then the calls that came inside it."""
        self.check_owner()
        if self.active:
            raise RequestError("a step was asked for inside a call of the same engine; ask for it after that call")
        if self.stepping or self.changing:  # an interrupt came in the middle of a recovery
            recover("an earlier call was interrupted")
        running = _Running()
        try:
            self._running = weakref.ref(running)
            self.stepping = True
            found = work()
            self.stepping = False
        except BaseException as problem:
            if self.stepping:
                recover(f"the step failed: {problem!r}")
            raise
        finally:
            self._running = None
        while self._deferred:
            self._deferred.pop()()
        return found
