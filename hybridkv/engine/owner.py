"""EngineOwner: the thread that runs an engine, and the way other threads hand it requests.

    callers     submit(ticket) ............... pieces ... done        call(f) -> result
    the owner   | calls that came | step | updates given out | calls that came | step | ...

The engine itself belongs to one thread at a time. The owner's thread begins with the first request, takes the engine
while there is work, and hands it back to whoever had it when there is none. Everything that callers do is a call in one
queue, so requests of several threads run in the same steps.

A ticket is made before its request is. So a caller that leaves, at whatever line, can always cancel it: a request that
was not added yet never is, and one that runs is aborted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from hybridkv.cache.session import Session
from hybridkv.engine.engine import Engine, Update
from hybridkv.engine.loop_mail import gathered
from hybridkv.errors import RequestError
from hybridkv.request import Request

T = TypeVar("T")
QUIET_SECONDS = 0.1  # without a call, before anything is done in the background
EXIT_SECONDS = 10.0  # that an interpreter which ends waits for a step to end


class Ticket:
    """One caller's request, and its siblings if it asked for several answers.

    `listener`, where there is one, is called on the owner's thread: with the text of every step that ran while the
    request was there, which may be "", and at the end with None. It must not wait for anything. Without `every_step` it
    is called for steps that gave the request a token: with hundreds of requests that is much less.
    """

    def __init__(
        self,
        add: Callable[[Engine], Request],  # runs on the owner's thread
        listener: Callable[[str | None], None] | None = None,
        hold: bool = False,  # a cancelled answer ends where it is, and its cache is held for a next turn
        every_step: bool = True,
    ) -> None:
        self.add, self.listener, self.hold, self.every_step = add, listener, hold, every_step
        self.request: Request | None = None  # None: not added yet
        self.problem: BaseException | None = None  # the exception that ended it
        self.read = 0  # prompt tokens read so far
        self.cancelled = False
        self._ended = threading.Event()

    @property
    def requests(self) -> list[Request]:
        return [] if self.request is None else [self.request, *self.request.siblings]

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left in the engine, and nothing will be."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Until it has ended."""
        self._ended.wait()

    def result(self) -> Request:
        """The finished request; what ended it early is raised."""
        if self.problem is not None:
            raise self.problem
        if self.request is None:
            raise RequestError("the request was cancelled before it began")
        return self.request

    def end(self, problem: BaseException | None = None) -> None:
        """Called once, on the owner's thread or after it."""
        self.problem = self.problem or problem
        self._ended.set()
        if self.listener is not None:
            with contextlib.suppress(Exception):  # a caller that is gone
                self.listener(None)


class Background(Protocol):
    """What the engine's thread does when nobody asks for anything."""

    @property
    def waits(self) -> bool:
        """Whether there may be something to do."""
        ...

    def step(self, engine: Engine) -> bool:
        """Do a little of it; whether there was anything to do. Nothing is raised."""
        ...

    def pause(self, engine: Engine) -> None:
        """Hold nothing of the engine's from here on: somebody asks."""
        ...


class EngineOwner:
    """Runs one engine on a thread of its own. All methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[_Work | None] = SimpleQueue()
        self._state = _State()
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # in which the thread runs
        # the thread knows the engine weakly while it is idle, so that a model that nobody uses goes away
        self._finalizer = weakref.finalize(self, _end_thread, self._inbox, self._state)

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Add requests, all of them or, if one is refused, none: its error is raised here."""
        try:
            self._call(lambda serving: serving.add(tickets))
        except BaseException:
            self.cancel(tickets, wait=False)
            raise

    def post(self, tickets: Sequence[Ticket]) -> None:
        """`submit` without waiting: a ticket that is refused ends with its error, and the others with it."""
        self._send(_Work(lambda serving: serving.add_or_end(tickets), partial(_end_all, tickets)))

    def cancel(self, tickets: Sequence[Ticket], wait: bool = True) -> None:
        """End what has not ended: nothing of it is left when this returns, or soon after if `wait` is False."""
        left = [ticket for ticket in tickets if not ticket.ended]
        for ticket in left:
            ticket.cancelled = True
        if left:
            self._send(_Work(lambda serving: serving.cancel(left), partial(_end_all, left)))
        if wait and not self._on_its_thread:
            for ticket in left:
                ticket.wait()

    def discard(self, request: Request) -> None:
        """End a request and give back what it holds, without waiting for that."""
        self._send(_Work(lambda serving: serving.engine.abort(request), lambda problem: None))

    def run(self, work: Callable[[Engine], T], drained: bool = False) -> T:
        """`work(engine)` on the owner's thread, between two steps; `drained`: with no step in flight on a device."""
        return self._call(lambda serving: serving.run(work, drained))

    def check_session_model(self, model: str, about: dict[str, str], files: str) -> None:
        """As the engine's: `check` of `Session.load` and `Session.from_buffers`."""
        self._engine.manager.model_files()  # it is found in files, for which no step is to wait
        self.run(lambda engine: engine.check_session_model(model, about, files))

    def session(self, request: Request | None, conversation: Mapping[str, Any]) -> Session:
        """As the engine's."""
        self._engine.manager.model_files()  # as above
        return self.run(lambda engine: engine.session(request, conversation))

    def observe(self, look: Callable[[Engine], object]) -> Callable[[], None]:
        """Call `look(engine)` on the owner's thread after every step and every change between steps, as a picture of
        what is held needs it; returns what ends that. It must be quick, and wait for nothing.
        """
        state = self._state
        state.observers = (*state.observers, look)

        def end() -> None:
            state.observers = tuple(other for other in state.observers if other is not look)

        return end

    def in_background(self, work: Background) -> Callable[[], None]:
        """From here on this is done when nobody asks for anything. Returns what has the thread look for some to do."""
        self._state.background, inbox = work, self._inbox
        return lambda: inbox.put(_Work(lambda serving: None, lambda problem: None))

    def close(self) -> None:
        """End all requests and the thread. What is asked for later is refused."""
        self._state.closed = True
        self._inbox.put(None)
        if self._thread is not None and not self._on_its_thread and self._process == os.getpid():
            self._thread.join()

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked any more, and nothing is held."""
        return self._state.closed

    @property
    def moved(self) -> float | None:
        """When the engine last moved, of time.monotonic(): a first request came, or a step came to its end. None: no
        request is there. It waits for nothing.
        """
        serving = self._state.serving
        return self._state.moved if serving is not None and serving.tickets else None

    @property
    def _on_its_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _call(self, work: Callable[[_Serving], T]) -> T:
        if self._on_its_thread:
            raise RequestError(
                "the model was asked from inside one of its own steps (a logits hook or a policy), which would wait "
                "for itself; ask from another thread, and do not wait for it in the hook"
            )
        answer: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

        def carry_out(serving: _Serving) -> None:
            try:
                answer.put((work(serving), None))
            except BaseException as problem:
                answer.put((None, problem))

        self._send(_Work(carry_out, lambda problem: answer.put((None, problem))))
        found, problem = answer.get()
        if problem is not None:
            raise problem
        return found  # type: ignore[return-value]

    def _send(self, work: _Work) -> None:
        if self._thread is not None and self._process != os.getpid():
            work.refuse(
                RequestError(
                    "this process is a fork of the one that runs the model, and has none of its threads; open the "
                    "model here, or start processes by 'spawn'"
                )
            )
            return
        if self._thread is None and not self._state.closed:
            with self._start:
                if self._thread is None:
                    self._process = os.getpid()
                    arguments = (self._inbox, weakref.ref(self._engine), self._state)
                    thread = threading.Thread(target=_serve, args=arguments, name="hybridkv-engine", daemon=True)
                    self._thread = self._state.thread = thread
                    try:
                        thread.start()
                    except BaseException:  # an interrupt, perhaps while it begins
                        if thread.ident is None:
                            self._thread = self._state.thread = None
                        raise
        self._inbox.put(work)
        if self._state.finished or self._thread is None:
            _refuse_all(self._inbox)


class TicketsAsTheyEnd(Iterator[tuple[int, Ticket]]):
    """Requests that run together, each with its number as soon as it has ended.

    Leaving early (`close`, or dropping it) stops those that are left.
    """

    def __init__(self, owner: EngineOwner, adds: Sequence[Callable[[Engine], Request]]) -> None:
        ended: SimpleQueue[int] = SimpleQueue()

        def tell(number: int, piece: str | None) -> None:  # on the engine's thread
            if piece is None:
                ended.put(number)

        self._owner, self._ended, self._left = owner, ended, len(adds)
        self._tickets = [Ticket(add, partial(tell, number)) for number, add in enumerate(adds)]
        owner.submit(self._tickets)

    def __next__(self) -> tuple[int, Ticket]:
        if not self._left:
            raise StopIteration
        number = self._ended.get()
        self._left -= 1
        return number, self._tickets[number]

    def close(self) -> None:
        """Stop what has not ended. Nothing of it is left when this returns."""
        self._left = 0
        self._owner.cancel(self._tickets)

    def __del__(self) -> None:
        if left := [ticket for ticket in getattr(self, "_tickets", ()) if not ticket.ended]:
            self._owner.cancel(left, wait=False)


@dataclass(frozen=True)
class _Work:
    carry_out: Callable[[_Serving], object]
    refuse: Callable[[BaseException], object]  # instead, where the engine cannot be had


class _State:
    """What the thread and its owner object both know. It keeps neither the engine nor the model alive."""

    def __init__(self) -> None:
        self.closed = False  # the thread is to end
        self.finished = False  # it has
        self.thread: threading.Thread | None = None
        self.serving: _Serving | None = None  # while there is work
        self.observers: tuple[Callable[[Engine], object], ...] = ()
        self.background: Background | None = None
        self.moved = 0.0  # of time.monotonic(): when a first request came, or a step last came to its end


def _end_thread(inbox: SimpleQueue[_Work | None], state: _State) -> None:
    """The owner object is gone, or the interpreter ends: the thread ends after the step that it is in."""
    state.closed = True
    inbox.put(None)
    if state.serving is not None and state.thread is not None and state.thread is not threading.current_thread():
        state.thread.join(EXIT_SECONDS)


def _serve(inbox: SimpleQueue[_Work | None], engine_ref: weakref.ref[Engine], state: _State) -> None:
    """The thread: waits for work without holding the engine, and serves until there is none."""
    while not state.closed:
        work = inbox.get()
        engine = engine_ref()
        if work is None or engine is None:
            continue
        serving = _Serving(engine, inbox, state)
        try:
            with engine.owned():
                state.serving = serving
                serving.until_idle(work)
        except BaseException as problem:  # another thread is inside the engine
            work.refuse(problem)
            _end_all(list(serving.tickets), problem)
        finally:
            state.serving = None
        del engine, serving, work
    engine = engine_ref()
    if engine is not None:
        with contextlib.suppress(RequestError), engine.owned():  # caches held for turns that cannot come any more
            for request in list(engine.scheduler.held):
                engine.abort(request)
    del engine
    state.finished = True
    _refuse_all(inbox)


def _refuse_all(inbox: SimpleQueue[_Work | None]) -> None:
    with contextlib.suppress(Empty):
        while True:
            work = inbox.get_nowait()
            if work is not None:
                work.refuse(RequestError("this model was closed; open it again"))


def _end_all(tickets: Sequence[Ticket], problem: BaseException | None) -> None:
    for ticket in tickets:
        if not ticket.ended:
            ticket.end(problem)


class _Serving:
    """The owner's thread at work."""

    def __init__(self, engine: Engine, inbox: SimpleQueue[_Work | None], state: _State) -> None:
        self.engine, self.inbox, self.state = engine, inbox, state
        self.tickets: dict[Ticket, None] = {}  # in the order they came
        self.asked = True  # for something, since a little was done in the background

    def until_idle(self, work: _Work) -> None:
        try:
            work.carry_out(self)
            while True:
                self.take_calls()
                self._show()
                if self.state.closed:
                    self.cancel(list(self.tickets), RequestError("this model was closed while the answer was written"))
                    return
                if self.tickets:
                    self.step()
                elif not self.in_background():
                    return
        finally:
            self.pause()

    def in_background(self) -> bool:
        """Do a little of what nobody waits for; whether there was some. Who has just asked may ask for more."""
        background = self.state.background
        if background is None:
            return False
        if self.asked and background.waits:
            self.asked = False
            with contextlib.suppress(Empty):
                work = self.inbox.get(timeout=QUIET_SECONDS)
                if work is not None:
                    work.carry_out(self)
                return True
        return background.step(self.engine)

    def pause(self) -> None:
        """What is done in the background holds nothing of the engine's from here on."""
        self.asked = True
        if self.state.background is not None:
            self.state.background.pause(self.engine)

    def take_calls(self) -> None:
        """All that callers ask for by the time when the next step must be launched."""
        while True:
            self._take_waiting()
            spare = self.engine.slack() if self.tickets and not self.state.closed else 0.0
            if spare <= 0:
                return
            try:
                work = self.inbox.get(timeout=spare)
            except Empty:
                return
            if work is not None:
                work.carry_out(self)

    @gathered()
    def _take_waiting(self) -> None:
        while True:
            try:
                work = self.inbox.get_nowait()
            except Empty:
                return
            if work is not None:
                work.carry_out(self)

    def _show(self) -> None:
        for look in self.state.observers:
            with contextlib.suppress(Exception):  # a picture that fails costs no answer
                look(self.engine)

    # ---- what callers ask for

    def add(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            try:
                self._add(ticket)
            except BaseException as problem:
                ticket.problem = problem
                self.cancel(tickets)
                raise

    def add_or_end(self, tickets: Sequence[Ticket]) -> None:
        with contextlib.suppress(BaseException):  # the ticket that was refused has it
            self.add(tickets)

    def _add(self, ticket: Ticket) -> None:
        if ticket.cancelled:
            return
        self.pause()
        ticket.request = ticket.add(self.engine)
        if not self.tickets:
            self.state.moved = time.monotonic()
        self.tickets[ticket] = None

    def cancel(self, tickets: Sequence[Ticket], problem: BaseException | None = None) -> None:
        for ticket in tickets:
            if ticket.ended:
                continue
            ticket.cancelled = True
            for request in ticket.requests:
                if not request.finished:
                    (self.engine.stop if ticket.hold else self.engine.abort)(request)
            self._end(ticket, problem)

    def run(self, work: Callable[[Engine], T], drained: bool) -> T:
        self.pause()
        if drained:
            self._advance(self.engine.drain)
        return work(self.engine)

    # ---- running

    def step(self) -> None:
        self._advance(self.engine.step)

    def _advance(self, step: Callable[[], list[Update]]) -> None:
        try:
            updates = step()
        except BaseException as problem:
            self._failed(problem)
            return
        finally:
            self.state.moved = time.monotonic()
        self._give(updates)

    @gathered()
    def _give(self, updates: Sequence[Update]) -> None:
        texts = {update.request: update.text for update in updates}
        for ticket in list(self.tickets):
            request = ticket.request
            assert request is not None
            due = ticket.every_step or request in texts or request.siblings
            if ticket.listener is not None and due:
                slot = self.engine.manager.slot_of.get(request.key)
                if request.answer_tokens:
                    ticket.read = request.prompt_tokens
                elif slot is not None and not request.finished:
                    ticket.read = min(int(self.engine.manager.positions[slot]), request.prompt_tokens)
                try:
                    ticket.listener(texts.get(request, ""))
                except Exception:  # its caller is gone, as an event loop that was closed
                    self.cancel([ticket])
                    continue
            if request.finished and all(request.finished for request in ticket.requests):
                self._end(ticket)
        if self.tickets and self.engine.idle:  # they are in no queue any more: an interrupt lost them
            lost = RequestError("the request is no longer in the engine: it was lost by an interrupt; ask again")
            self.cancel(list(self.tickets), lost)

    def _failed(self, problem: BaseException) -> None:
        """A step raised. Requests that ended with it get the exception; if none did, all do, or it would come again."""
        ended = [ticket for ticket in self.tickets if any(request.finished for request in ticket.requests)]
        self.cancel(ended or list(self.tickets), problem)

    def _end(self, ticket: Ticket, problem: BaseException | None = None) -> None:
        self.tickets.pop(ticket, None)
        ticket.end(problem)
