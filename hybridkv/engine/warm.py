"""Warm reading: the next turn of a conversation is read before it comes, when nothing else is to be done.

Many templates leave out the thoughts of a turn once another question follows. So the next prompt differs from what was
computed, from the reply to the last question on, and would be read again from there.

    the turn        | history | question | thoughts, calls, results, thoughts, answer |
    the next one    | history | question | calls, results, answer | question ...
                                         ^ parts                  ^ read up to here, chunk by chunk

What is read becomes columns as any prompt's does, under the salt of the conversation, with a checkpoint of state at its
end. It takes a slot that is free and pages that nobody holds; no request is preempted for it, and no held cache goes.
Whatever the engine is asked for ends it after the chunk in hand, and what was read stays; it goes on from there when
there is nothing to do again. Over several ranks there is none: what one rank has time for, others may not.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from hybridkv.cache.checkpoints import NEAR, Checkpoint
from hybridkv.cache.columns import Columns
from hybridkv.cache.frozen import freeze_request, state_bytes
from hybridkv.cache.lookup import Asked, Hit, pages_of, would_keep
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.warm import keep_state, note_read
from hybridkv.config import CHUNK_QUANTUM
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, OutOfPages
from hybridkv.request import RequestKey

MOST_WAITING = 16  # conversations whose next turns are to be read; the oldest is passed over
CHUNK_SECONDS = 0.25  # that a chunk may take: so long whoever asks for something waits at the most
READING = -3  # the number of the key under which they are read

Seen = tuple[list[int], list[tuple[int, str]]]  # token ids, and where messages begin in them (Request.marks)
log = logging.getLogger("hybridkv")


@dataclass(eq=False)
class View:
    """What the next prompt of a conversation begins with.

    Args:
        salt: of the conversation.
        said: token ids of its last request, prompt and answer, as they were computed.
        parts: at how many of these the next prompt parts from them; at first, where the answer begins.
        make: its token ids, in any thread; an exception: it cannot be told.
        tokens: the same, once they are made.
    """

    salt: bytes
    said: np.ndarray
    parts: int
    make: Callable[[], Seen]
    tokens: np.ndarray | None = None
    marks: list[tuple[int, str]] = field(default_factory=list)
    cancelled: bool = False
    begun: bool = False
    kept: Checkpoint | None = None  # where its reading was stopped last
    forgotten: list[np.ndarray] = field(default_factory=list)  # texts, before its tokens were known

    def is_of(self, salt: bytes | None, tokens: np.ndarray | None) -> bool:
        """Whether it belongs to what is kept under a salt (None: any), or of one text under it: its conversation's last
        turn, or one that came after it.
        """
        if salt is not None and self.salt != salt:
            return False
        if tokens is None or _common(self.said, tokens) >= min(self.parts + 1, len(self.said)):
            return True
        return self.tokens is not None and _common(self.tokens, tokens) > self.parts


class WarmReader:
    """Reads what next turns begin with. `offer`, `forget`, `rest`, `close` from any thread, all else on the engine's.

    Args:
        least: tokens; only what saves more of them is read.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.on = True
        self.wake: Callable[[], object] = lambda: None  # has the engine's thread look for work
        self._lock = threading.Lock()
        self._waiting: list[View] = []  # the newest last
        self._all: list[View] = []  # these, the one that is made, and the one that is read
        self._now: View | None = None
        self._key = RequestKey(READING)
        self._chunk = 0  # tokens; 0: the least there may be
        self._makers: ThreadPoolExecutor | None = None

    # ---- from any thread

    def offer(self, salt: bytes, said: Sequence[int], prompt: int, make: Callable[[], Seen]) -> None:
        """A conversation's answer has been given: its next turn may be read. `prompt`: tokens of `said` before it."""
        view = View(salt, np.array(said, np.int32), prompt, make)
        with self._lock:
            if not self.on:
                return
            self._all.append(view)
            self._put(view)
        self.wake()

    def forget(self, salt: bytes | None = None, tokens: Sequence[int] | None = None) -> None:
        """What belongs to a salt (None: any), or to one text under it, is not read; a reading under way ends, too."""
        text = None if tokens is None else np.array(tokens, np.int32)
        with self._lock:
            for view in self._all:
                view.cancelled |= view.is_of(salt, text)
                if text is not None and view.tokens is None and salt in (None, view.salt):
                    view.forgotten.append(text)

    def rest(self, on: bool = False) -> None:
        """From here on nothing is taken, and nothing that was; `on`: it is again."""
        self.on = on
        if not on:
            self.forget()

    def close(self) -> None:
        """For good."""
        self.rest()
        if self._makers is not None:
            self._makers.shutdown(wait=False, cancel_futures=True)

    @property
    def busy(self) -> bool:
        """Whether something is read, or will be."""
        with self._lock:
            return any(not view.cancelled for view in self._all)

    # ---- on the engine's thread

    @property
    def waits(self) -> bool:
        """Whether there may be something to read."""
        return bool(self._waiting)

    def step(self, engine: Engine) -> bool:
        """Read a chunk, if there is nothing else to do; whether there was one to read."""
        if not engine.idle:
            self.pause(engine)
            return False
        view = self._now
        if view is not None and (view.cancelled or self._key not in engine.manager.slot_of):
            self.pause(engine)  # it was forgotten, or an interrupt has taken its slot
            view = None
        try:
            view = view or self._begin_next(engine)
            if view is not None:
                self._read(engine, view)
            return view is not None
        except Exception as problem:  # it costs no request: what was read until then stays
            log.warning("a next turn was not read ahead: %s", problem)
            if self._now is not None:
                self._now.cancelled = not isinstance(problem, OutOfPages)
                self.pause(engine, again=False)
            return False

    def pause(self, engine: Engine, again: bool = True) -> None:
        """The engine is needed: give the slot back, and keep what was read; go on with it later, or not `again`."""
        view, self._now = self._now, None
        if view is None:
            return
        if self._key in engine.manager.slot_of:
            with engine.changing():
                try:
                    if not view.cancelled and engine.manager.reuse is not None:
                        view.kept = keep_state(engine.manager.reuse, self._key, view.kept)
                except HybridKVError as problem:  # whoever needs the engine must not meet it
                    log.warning("a next turn that was read ahead could not be kept: %s", problem)
                    view.cancelled = True
                engine.manager.release_request(self._key)
        with self._lock:
            if again and not view.cancelled:
                self._put(view)
            else:
                self._drop(view)

    def _put(self, view: View) -> None:
        self._waiting.append(view)
        while len(self._waiting) > MOST_WAITING:
            self._drop(self._waiting.pop(0))

    def _drop(self, view: View) -> None:
        if view in self._all:
            self._all.remove(view)

    def _take(self) -> View | None:
        """The newest one that was not forgotten."""
        with self._lock:
            while self._waiting:
                view = self._waiting.pop()
                if not view.cancelled:
                    return view
                self._drop(view)
            return None

    def _begin_next(self, engine: Engine) -> View | None:
        """One that was begun. Those whose tokens are not known are made on a thread of their own, and come back."""
        while (view := self._take()) is not None:
            if view.tokens is None:
                if self._makers is None:
                    self._makers = ThreadPoolExecutor(1, "hybridkv-warm")
                with suppress(RuntimeError):  # it was closed
                    self._makers.submit(self._make, view)
                    continue
            else:
                self._now = view
                with engine.changing():
                    if self._begin(engine, view):
                        return view
                self._now = None
            with self._lock:
                self._drop(view)
        return None

    def _make(self, view: View) -> None:
        """What the next prompt begins with, where that is not what was computed."""
        made, fits = view.said, False
        try:
            tokens, view.marks = view.make()
            made = np.array(tokens, np.int32)
            view.parts = _common(made, view.said)
            fits = view.parts < len(view.said) - 1  # else it goes on as it is
        except Exception as problem:  # of a template, most likely
            log.debug("a next turn is not read ahead: %s", problem)
        view.make = _made  # what it holds may go
        with self._lock:
            view.tokens = made
            view.cancelled |= any(view.is_of(None, text) for text in view.forgotten)
            view.forgotten.clear()
            if fits and not view.cancelled:
                self._put(view)
            else:
                self._drop(view)
        self.wake()

    def _begin(self, engine: Engine, view: View) -> bool:
        """Whether a view has a slot, with all that is there of it."""
        reuse = engine.manager.reuse
        assert reuse is not None and view.tokens is not None
        reuse.settle_late()
        most = len(view.tokens) // reuse.q * reuse.q
        asked = Asked(view.salt, view.tokens[:most], most, most, marks=view.marks)
        hit = reuse.lookup(asked)
        least = min(self.least, NEAR) if view.begun else self.least
        if reuse.has_state and not reuse.checkpoints.rows:  # nobody could go on from what is read
            return False
        if most - hit.cached <= least or len(view.tokens) > engine.manager.max_tokens:
            return False
        if hit.load is not None or len(hit.path) < view.parts // reuse.q:  # it is not all on the device
            return False
        if not self._is_there(reuse, view) or not _has_room(engine, hit, most):
            return False
        reuse.attach(self._key, hit, asked, counted=False)
        view.begun = True
        return True

    @staticmethod
    def _is_there(reuse: Reuse, view: View) -> bool:
        """Whether what the view goes on from is kept: it is not where the conversation was forgotten."""
        known = len(view.said) - 1 if not view.begun else view.parts
        path = reuse.columns.match(view.salt, Columns.keys(view.said), known)
        return len(path) == known // reuse.q

    def _read(self, engine: Engine, view: View) -> None:
        """One chunk."""
        manager, runner, reuse = engine.manager, engine.runner, engine.manager.reuse
        assert reuse is not None and view.tokens is not None
        end, position = len(view.tokens) // reuse.q * reuse.q, manager.position(self._key)
        begin = time.perf_counter()
        with engine.changing():
            n = self._next(reuse, position, end, engine.scheduler.step_tokens)
            step = engine.scheduler.reserve([(self._key, n)])
            part = view.tokens[position : position + n].tolist()
            logits = runner.forward(runner.inputs([part], [n - 1], step))
            manager.commit([(self._key, n)])
            reuse.stage(self._key, view.tokens)  # type: ignore[arg-type]
            well = not bool(logits.isnan().any())  # waits for the device, so that no more than one chunk is there
            reuse.publish(() if well else (self._key,))
            if well:
                note_read(reuse, self._key, n)
            else:
                reuse.discard(self._key)
                view.cancelled = True
        self._learn(reuse, n, time.perf_counter() - begin, engine.scheduler.step_tokens)
        if view.cancelled or position + n >= end:
            self.pause(engine, again=False)

    def _next(self, reuse: Reuse, position: int, end: int, most: int) -> int:
        """Tokens of the next chunk. It ends where a state can be kept."""
        unit = math.lcm(reuse.q, CHUNK_QUANTUM)
        to = max((position + max(self._chunk, unit)) // unit, position // unit + 1) * unit
        return reuse.until_stop(self._key, position, min(to, end, position + max(most, unit)) - position)

    def _learn(self, reuse: Reuse, n: int, seconds: float, most: int) -> None:
        """Longer chunks where they are quick, shorter ones where whoever asks would wait."""
        unit = math.lcm(reuse.q, CHUNK_QUANTUM)
        if seconds > CHUNK_SECONDS:
            self._chunk = max(unit, n // 2)
        elif n >= self._chunk and seconds < CHUNK_SECONDS / 2:
            self._chunk = max(unit, min(2 * n, most // unit * unit))


def _has_room(engine: Engine, hit: Hit, tokens: int) -> bool:
    """Whether a slot and pages are there that nobody holds. A held cache may leave its slot, if the host has room for
    its state: it loses nothing by that.
    """
    manager, reuse = engine.manager, engine.manager.reuse
    assert reuse is not None
    need, shared, kept = manager.pages_needed(None, tokens), pages_of(reuse, hit), would_keep(reuse, hit)
    free = manager.pages_to_be_had()
    if any(max(0, n - shared[name]) + kept[name] > free[name] for name, n in need.items()):
        return False
    if manager.free_slots:
        return True
    held = next((held for held in engine.scheduler.held if held.key in manager.slot_of), None)
    if held is None or not manager.host.room_for(state_bytes(manager, held.key)):
        return False
    try:
        freeze_request(manager, held.key)
    except HybridKVError:
        return False
    engine.scheduler.counts["frozen"] += 1
    return manager.free_slots > 0


def _made() -> Seen:
    raise AssertionError("a view is made once")


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two texts begin with alike."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
