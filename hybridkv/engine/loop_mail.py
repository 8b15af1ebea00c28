"""Calls from the engine's thread to event loops. Those of one step wake a loop once, at the end of the step's news: to
wake it is a system call, after which both threads want the interpreter, and many requests get a token in every step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class LoopMail:
    """What one event loop is to be told. `send` from any thread; calls run on the loop in the order they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # the loop's own mail must not keep it
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._woken = False

    def send(self, call: Callable[..., object], *given: Any) -> None:
        """`call(*given)` on the loop, soon; RuntimeError if it was closed."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._calls.append((call, given))
        waiting = getattr(_GATHERED, "mails", None)
        if waiting is None:
            self.wake()
        else:
            waiting[self] = None

    def wake(self) -> None:
        """The loop looks for calls, unless it is about to already."""
        loop = self._loop()
        if loop is None or self._woken:
            return
        self._woken = True
        with contextlib.suppress(RuntimeError):  # it was closed just now: the next one who sends is told
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what comes from here on wakes again
        while self._calls:
            call, given = self._calls.popleft()
            try:
                call(*given)
            except Exception as problem:  # the others are told all the same
                if (loop := self._loop()) is not None:
                    loop.call_exception_handler({"message": "a request's news", "exception": problem})


_GATHERED = threading.local()  # mails: those whose loop this thread has still to wake
_MAILS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMail] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def gathered() -> Iterator[None]:
    """Inside, on this thread, loops are told at the end."""
    mails: dict[LoopMail, None] = {}
    _GATHERED.mails = mails
    try:
        yield
    finally:
        _GATHERED.mails = None
        for mail in mails:
            mail.wake()


def loop_mail() -> LoopMail:
    """The mail of the loop that runs."""
    loop = asyncio.get_running_loop()
    return _MAILS.setdefault(loop, LoopMail(loop))
