"""Answers to one HTTP request on their way: tickets of the engine's thread on one side, events on the other.

    engine's thread   step ... listener: new text, tokens, ends -> loop_mail
    event loop        next(seconds) -> events, or None after so many seconds of silence

Nothing here blocks the event loop, and whatever ends a request (an error, a limit of time, a client that left) gives
back what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridkv.cache.session import Session
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import INHERIT, Engine
from hybridkv.engine.loop_mail import loop_mail
from hybridkv.engine.owner import EngineOwner, Ticket
from hybridkv.errors import HybridKVError
from hybridkv.request import Request, TokenLogprobs
from hybridkv.server.events import CallEnd, Divider, Event, Finish, Prompt, Tokens
from hybridkv.server.problems import MODEL_FAILED, ApiError, bad, unavailable
from hybridkv.server.sessions import Sessions
from hybridkv.server.transfers import Transfer
from hybridkv.text.constraint import Constraint

log = logging.getLogger("hybridkv.server")


@dataclass(frozen=True)
class Job:
    """What a dialect asks the engine for. Answer j to prompt i is choice i * n + j."""

    prompts: list[Prompt]
    params: SamplingParams
    eviction: Any = INHERIT
    read_only: bool = False  # the prompt is read, and no token is asked for
    transfer: Transfer | None = None  # to or from another server
    constraint: Callable[[], Constraint | None] | None = None  # what answers must look like: compiles it

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return len(self.prompts) * self.params.n


@dataclass
class Usage:
    """What the answers took, so far or in all."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    kept_tokens: float = 0.0  # of the answer that keeps most, a stream on average
    kv_bytes: int = 0
    full_bytes: int = 0
    policy: str | None = None
    evictions: int = 0
    reuse: dict[str, Any] = field(default_factory=dict)  # of the first prompt: what of it was there, and why not more
    loads: list[float] = field(default_factory=list)  # seconds that prompts waited for copies from the host
    written_tokens: int = 0  # of prompts: others that begin alike need not read them
    preemptions: int = 0
    wait_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


@dataclass(frozen=True)
class _News:
    """What a step gave one answer, copied on the engine's thread."""

    choice: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Request | None = None


@dataclass
class _Given:
    """How much of an answer has been copied."""

    characters: int = 0
    tokens: int = 0
    finished: bool = False


@dataclass
class Times:
    """On the loop's clock, for metrics."""

    posted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    evicted: float | None = None  # when the first eviction was seen
    gaps: list[float] = field(default_factory=list)  # between steps that gave tokens


class Generation:
    """One job in the engine. `begin`, then `next` until `over`; `cancel` at the end, whatever happened."""

    def __init__(
        self,
        owner: EngineOwner,
        job: Job,
        queue_seconds: float = 0.0,
        request_seconds: float = 0.0,
        added: Callable[[Request], None] = lambda request: None,  # told of each, on the engine's thread
        sessions: Sessions | None = None,
        sends: bool = False,  # the request's cache is held for another server
        moved: Session | None = None,  # what another server has read of it
        salt: bytes = b"",  # of the key that asked
    ) -> None:
        self.salt = salt
        self._added, self._sessions, self.sends, self._moved = added, sessions, sends, moved
        self.job, self.usage, self.times = job, Usage(), Times()
        self.over = False
        self._owner = owner
        self._queue_seconds, self._request_seconds = queue_seconds, request_seconds
        self._mail = loop_mail()
        self._news: asyncio.Queue[list[_News] | None] = asyncio.Queue()  # None: all have ended
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._given = [_Given() for _ in range(job.choices)]
        self._dividers = [job.prompts[i // job.params.n].divider(i) for i in range(job.choices)]
        self._tickets: list[Ticket] = []
        self._left = len(job.prompts)
        self._failure: ApiError | None = None
        self.problem: BaseException | None = None  # what ended it, for the log
        self.calls = {True: 0, False: 0}  # of functions: those that are whole, and those that a limit cut

    # ---- beginning and end

    async def begin(self, patience: float | None = None) -> None:
        """Hand the job to the engine; returns when that has taken all of it, or after `patience` seconds, since it
        takes nothing in the middle of a step. Raises ApiError.
        """

        def add(number: int, engine: Engine) -> Request:  # on the engine's thread
            prompt = self.job.prompts[number]
            how: dict[str, Any] = {"cache": prompt.sharing.cache, "salt": prompt.sharing.salt, "marks": prompt.marks}
            job, request = self.job, None
            if self._moved is not None:
                request = self._go_on(engine, how)
            if request is not None:
                pass
            elif prompt.prefix is not None:
                how.pop("marks")
                request = engine.add(prompt.tokens, job.params, eviction=None, prefix=prompt.prefix, **how)
            elif self.sends:
                request = engine.add(prompt.tokens, job.params, hold=True, eviction=job.eviction, **how)
            elif self._sessions is not None and prompt.sharing.conversation:
                request = self._sessions.add(engine, prompt.tokens, job.params, job.eviction, prompt.sharing, how)
            else:
                request = engine.add(prompt.tokens, self.job.params, eviction=self.job.eviction, **how)
            for each in (request, *request.siblings):
                each.whose = self.salt  # of the key alone: turns are a key's, however many salts it sends
            self._added(request)
            return request

        def tell(number: int, piece: str | None) -> None:  # on the engine's thread
            ticket = self._tickets[number]
            news = self._copy(number, ticket)
            if news or piece is None:
                self._mail.send(self._arrived, news, piece is None, ticket.problem)

        for number, prompt in enumerate(self.job.prompts):
            # what was read of a named conversation stays, also if its client leaves
            named = bool(prompt.sharing.conversation) and self.job.params.n == 1
            self._tickets.append(Ticket(partial(add, number), partial(tell, number), hold=named, every_step=False))
        # the last ticket's turn: all before it were taken
        last, first_add = self._tickets[-1], self._tickets[-1].add

        def add_last(engine: Engine) -> Request:
            request = first_add(engine)
            self._mail.send(self._taken)
            return request

        last.add = add_last
        self._owner.post(self._tickets)
        self.usage.prompt_tokens = sum(len(prompt.tokens) for prompt in self.job.prompts)
        try:
            async with asyncio.timeout(min((s for s in (self._queue_seconds, patience) if s), default=None)):
                await asyncio.shield(self._accepted)
        except TimeoutError:
            self._check_time(time.monotonic())
        if self._failure is not None:
            raise self._failure

    def _go_on(self, engine: Engine, how: dict[str, Any]) -> Request | None:
        """The request that was read elsewhere; None: it does not fit here, and is read again."""
        assert self._moved is not None
        job, kept = self.job, {name: how[name] for name in ("cache", "salt")}
        try:
            return engine.resume(self._moved, job.params, eviction=job.eviction, **kept)
        except HybridKVError as problem:
            log.warning("a prompt that was read elsewhere is read again: %s", problem)
            return None
        finally:
            self._moved = None  # its bytes go

    @property
    def accepted(self) -> bool:
        """Whether the engine has taken all of it."""
        return self._accepted.done()

    def cancel(self) -> None:
        """End what has not ended, without waiting for that."""
        self.over = True
        self._owner.cancel(self._tickets, wait=False)

    def fail(self, problem: ApiError) -> None:
        """End it with an error, as at the end of a server's time."""
        if not self.over and self._failure is None:
            self._failure = problem
            self._owner.cancel(self._tickets, wait=False)
            self._news.put_nowait([])

    @property
    def waiting(self) -> bool:
        """Whether no prompt of it is being read yet."""
        return not any(ticket.request is not None and ticket.request.started_at for ticket in self._tickets)

    @property
    def prompt_requests(self) -> list[Request]:
        """One for each prompt, once the engine has made a step."""
        return [ticket.request for ticket in self._tickets if ticket.request is not None]

    @property
    def requests(self) -> list[Request]:
        """One for each answer, once the engine has taken them."""
        return [request for ticket in self._tickets for request in ticket.requests]

    # ---- on the engine's thread

    def _copy(self, number: int, ticket: Ticket) -> list[_News]:
        found, n = [], self.job.params.n
        for j, request in enumerate(ticket.requests):
            choice = number * n + j
            given = self._given[choice]
            if given.finished:
                continue
            if request.evictions and self.times.evicted is None:
                self.times.evicted = time.monotonic()
            text = request.text.text[given.characters :]
            ids = tuple(request.tokens[request.prompt_tokens + given.tokens :])
            logprobs = tuple(request.logprobs[given.tokens :])
            given.characters += len(text)
            given.tokens += len(ids)
            given.finished = request.finished
            if text or ids or given.finished:
                found.append(_News(choice, text, ids, logprobs, request if given.finished else None))
        return found

    # ---- on the event loop

    def _taken(self) -> None:
        if not self._accepted.done():
            self._accepted.set_result(None)

    def _arrived(self, news: list[_News], ended: bool, problem: BaseException | None) -> None:
        if problem is not None and self._failure is None:
            self.problem, self._failure = problem, _told(problem, begun=self._accepted.done())
        self._left -= ended
        if news:
            self._news.put_nowait(news)
        if not self._left:
            self._taken()
            self._news.put_nowait(None)

    async def next(self, seconds: float) -> list[Event] | None:
        """Events of the next step; None: nothing came for so long. After the last ones `over` is True."""
        until = time.monotonic() + seconds
        while True:
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            self._check_time(now)
            limits = [until, *self._deadlines()]
            try:
                async with asyncio.timeout(max(0.0, min(limits) - now)):
                    news = await self._news.get()
            except TimeoutError:
                if time.monotonic() >= until:
                    return None
                continue
            if self._failure is not None:
                raise self._failure
            if news is None:
                self.over = True
                return []
            return [event for item in news for event in self._events(item)]

    def check(self) -> None:
        """Raises what has ended it meanwhile: its client has left, its time is over."""
        self._check_time(time.monotonic())

    def _deadlines(self) -> list[float]:
        found = []
        if self._request_seconds:
            found.append(self.times.posted + self._request_seconds)
        if self._queue_seconds and self.waiting:
            found.append(self.times.posted + self._queue_seconds)
        return found

    def _check_time(self, now: float) -> None:
        past = now - self.times.posted
        if self._queue_seconds and past >= self._queue_seconds and self.waiting:
            self.fail(self._too_late())
        elif self._request_seconds and past >= self._request_seconds:
            self.fail(ApiError(408, f"the answer took longer than the {self._request_seconds:g} s that a request has"))
        if self._failure is not None:
            raise self._failure

    def _too_late(self) -> ApiError:
        return unavailable(f"the request has waited {self._queue_seconds:g} s for its turn; ask again later", 5)

    def _events(self, news: _News) -> list[Event]:
        divider, now = self._dividers[news.choice], time.monotonic()
        self._count_cached()
        if self.job.read_only:
            return self._finished(news, divider) if news.finished is not None else []
        if news.ids:
            self.times.first_token = self.times.first_token or now
            if self.times.last_token is not None:
                self.times.gaps.append(now - self.times.last_token)
            self.times.last_token = now
        # half a character at the end of a cut answer is none
        text = news.text if news.finished is None else news.text.rstrip("\ufffd")
        if divider.thinking:  # before them: white space and the mark that ends thoughts are no text, and were sampled
            self.usage.reasoning_tokens += len(news.ids)
        events = divider.push(text, news.ids)
        self.usage.completion_tokens += len(news.ids)
        if news.finished is not None:
            events += self._finished(news, divider)
        for event in events:
            if isinstance(event, CallEnd):
                self.calls[event.whole] += 1
        tokens = _shown_tokens(news)
        if tokens.ids:  # before the end, after the text
            at = len(events) - (news.finished is not None)
            events.insert(at, tokens)
        return events

    def _finished(self, news: _News, divider: Divider) -> list[Event]:
        request = news.finished
        assert request is not None
        if request.finish_reason == "error":
            self.problem = self.problem or HybridKVError(request.error or "no reason was given")
            self._failure = self._failure or ApiError(500, MODEL_FAILED)
            raise self._failure
        self._count(request)
        if self.job.read_only:
            return [Finish(news.choice, "length")]
        ended = request.finish_reason == "stop"
        events = divider.finish(ended)
        prompt = self.job.prompts[news.choice // self.job.params.n]
        forgotten = request.finish_reason == "abort"  # with its conversation: none of its text stays
        if prompt.ended is not None and not forgotten:
            prompt.ended(request, divider)
        reason = request.finish_reason or "stop"
        if reason == "length" and request.answer_tokens < (request.params.max_tokens or 1 << 62):
            reason = "context"
        if divider.made_calls:
            reason = "calls"
        return [*events, Finish(news.choice, reason, request.text.stopped)]

    def _count_cached(self) -> None:
        """Known when prompts are admitted; clients are told with the first event. Siblings read nothing."""
        requests = self.prompt_requests
        self.usage.cached_tokens = sum(request.cached_tokens for request in requests)
        if requests and requests[0].reuse:
            prompt = self.job.prompts[0]
            used = {"text_memory": prompt.remembered} if prompt.remembered else {}
            used |= {"replayed_calls": prompt.replayed} if prompt.replayed else {}
            self.usage.reuse = requests[0].reuse | used

    def _count(self, request: Request) -> None:
        usage, stats = self.usage, request.stats
        if request in self.prompt_requests:  # siblings read nothing
            usage.written_tokens += request.reuse.get("written", 0)
            if "load_ms" in request.reuse:
                usage.loads.append(request.reuse["load_ms"] / 1000)
        usage.kept_tokens = max(usage.kept_tokens, stats.get("kept_tokens", 0.0))
        usage.kv_bytes += int(stats.get("kv_bytes_kept", 0))
        usage.full_bytes += int(stats.get("kv_bytes_full", 0))
        usage.preemptions += request.preemptions
        usage.policy = request.policy or usage.policy
        usage.evictions += len(request.evictions)
        for name in ("wait_s", "prefill_s", "decode_s"):
            if name in stats and getattr(usage, name) is None:
                setattr(usage, name, stats[name])


def _shown_tokens(news: _News) -> Tokens:
    """Without the token that ended the answer: it has no text."""
    ids, logprobs, request = news.ids, news.logprobs, news.finished
    if request is not None and request.end_token and ids:
        ids, logprobs = ids[:-1], logprobs[:-1]
    return Tokens(news.choice, ids, logprobs)


def _told(problem: BaseException, begun: bool) -> ApiError:
    """What a client is told of the exception that ended its request."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, HybridKVError) and "was closed" in str(problem):
        return unavailable("the server is shutting down")
    if isinstance(problem, HybridKVError) and not begun:
        return bad(str(problem))
    return ApiError(500, MODEL_FAILED)
