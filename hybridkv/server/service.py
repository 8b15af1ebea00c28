"""What the routes share: the model, who may come in, what runs, and how the server is."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

from hybridkv.config import EvictionConfig
from hybridkv.engine.engine import INHERIT
from hybridkv.errors import HybridKVError
from hybridkv.llm import LLM
from hybridkv.server import settings as limits
from hybridkv.server.bodies import Bodies
from hybridkv.server.feed import CacheFeed
from hybridkv.server.generation import Generation, Job
from hybridkv.server.metrics import Metrics
from hybridkv.server.misses import Misses
from hybridkv.server.picture import Recorder
from hybridkv.server.problems import ApiError, bad, busy, too_long, unavailable
from hybridkv.server.sessions import Sessions
from hybridkv.server.settings import ServerSettings
from hybridkv.server.tracing import open_tracing
from hybridkv.server.transfers import Transfers
from hybridkv.server.turns import share_of, take_turns

T = TypeVar("T")
TEXT_THREADS = 4  # that tokenise and render, and write answers
GRAMMAR_THREADS = 8  # that compile what answers must look like, two of them at a time; the others wait for their turn
MOVE_THREADS = 4  # that read and write caches, on disk or at other servers
DEAD_SECONDS = {"cuda": 30.0, "cpu": 600.0}  # without a step while there is work; a large model is slow on a CPU
DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]")  # of torch's calls and of kernels: no later call works
RETRY_SECONDS = 2
SAVE_SECONDS, SAVE_SHARE = 5.0, 0.5  # of the time that a server has to end: for named conversations, if some are saved


class Service:
    """One model behind HTTP."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.metrics_prefix)
        self.misses = Misses()
        self.tracing = open_tracing()
        self.created = int(time.time())
        self.bodies = Bodies(settings.body_bytes, shared=len(settings.api_keys) > 1)
        self.generations: set[Generation] = set()
        self.draining = False
        self.fatal: str | None = None  # why nothing can be answered any more
        self._llm: LLM | None = None
        self._feed: CacheFeed | None = None
        self._unobserve: list[Callable[[], None]] = []
        self._sessions: Sessions | None = None
        self._transfers: Transfers | None = None
        self._names: list[str] = list(settings.names)
        # apart, so that neither a client's grammar nor a peer that does not answer keeps others from being read
        self._text = ThreadPoolExecutor(TEXT_THREADS, "hybridkv-text")
        self._grammars = ThreadPoolExecutor(GRAMMAR_THREADS, "hybridkv-grammar")
        self._moves = ThreadPoolExecutor(MOVE_THREADS, "hybridkv-move")
        self._answers: Counter[bytes] = Counter()  # asked for and not ended, by the salt of the key
        # where there are several keys, none has all the threads that read requests
        turns = share_of(TEXT_THREADS) if len(settings.api_keys) > 1 else TEXT_THREADS
        self._reading: defaultdict[bytes, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(turns))

    def open(self, llm: LLM) -> None:
        """From here on this model is served."""
        if not any(not _is_pattern(name) for name in self._names):
            # a folder's name may have a dot in it, Qwen3.5-4B
            self._names.insert(0, llm.path.stem if llm.path.suffix == ".gguf" else llm.path.name)
        self.metrics.watch(llm, self.names[0])
        recorder = Recorder(llm.manager)
        self._feed = CacheFeed(self, recorder)
        turns = len(self.settings.api_keys) > 1 and llm.ranks is None  # ranks must all have one order: that of arrival
        looks = [recorder.observe, take_turns] if turns else [recorder.observe]
        self._unobserve = [llm.owner.observe(look) for look in looks]
        self._sessions = Sessions(llm)
        count = self.metrics.transfers
        self._transfers = Transfers(llm, self.settings, lambda what: count.labels(self.names[0], what).inc())
        if llm.warm is not None:
            llm.warm.rest(on=True)
        self._llm = llm

    # ---- state

    @property
    def sessions(self) -> Sessions:
        """Conversations that clients have named, or 503 while the model is read."""
        self.llm  # noqa: B018
        assert self._sessions is not None
        return self._sessions

    @property
    def transfers(self) -> Transfers:
        """What goes to other servers and comes from them, or 503 while the model is read."""
        self.llm  # noqa: B018
        assert self._transfers is not None
        return self._transfers

    @property
    def llm(self) -> LLM:
        """The model, or 503 while it is read."""
        if self._llm is None:
            raise unavailable("the model is being loaded; ask again in some seconds", RETRY_SECONDS)
        return self._llm

    @property
    def feed(self) -> CacheFeed:
        """What is known of the cache, or 503 while the model is read."""
        self.llm  # noqa: B018
        assert self._feed is not None
        return self._feed

    @property
    def status(self) -> str:
        """ok, loading, draining or dead. It waits for nothing."""
        if self._llm is None:
            return "loading"
        if self.fatal is not None or self.llm.owner.closed or self.stuck:
            return "dead"
        return "draining" if self.draining else "ok"

    @property
    def stuck(self) -> bool:
        """Whether there is work and the engine has not moved for long, whoever has come or left meanwhile."""
        moved, most = self.llm.owner.moved, DEAD_SECONDS.get(self.llm.device.type, 600.0)
        return moved is not None and time.monotonic() - moved > most

    @property
    def answers(self) -> int:
        """Asked for and not ended."""
        return self._answers.total()

    @property
    def names(self) -> list[str]:
        """Names that are listed: those that are no patterns."""
        return [name for name in self._names if not _is_pattern(name)]

    def model_name(self, asked: str | None) -> str:
        """The name that was asked for, if it is served; else 404."""
        self.llm  # noqa: B018  503 while it is loading
        if asked is None:
            return self.names[0]
        if any(asked == name or (_is_pattern(name) and fnmatchcase(asked, name)) for name in self._names):
            return asked
        served = ", ".join(self._names)
        raise ApiError(404, f"no such model is served here; there is {served}", param="model", code="model_not_found")

    @property
    def context(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return min(self.llm.plan.max_tokens, self.llm.engine.tokens_alone)

    @property
    def body_limit(self) -> int:
        """Bytes of the largest body."""
        tokens = 0 if self._llm is None else self.llm.plan.max_tokens
        return max(limits.LEAST_BODY, limits.BODY_BYTES_PER_TOKEN * tokens)

    # ---- work

    async def work(self, do: Callable[..., T], *given: Any) -> T:
        """Run something that takes time on a worker thread; what the caller can mend is a 400."""
        return await _on(self._text, do, *given)

    def reading(self, salt: bytes) -> asyncio.Semaphore:
        """The turns of a key at the threads that read requests: `async with`."""
        return self._reading[salt]

    async def move(self, do: Callable[..., T], *given: Any) -> T:
        """The same for what waits for disks and other servers."""
        return await _on(self._moves, do, *given)

    async def begin(self, job: Job, patience: float | None = None, whose: tuple[bytes, str] = (b"", "")) -> Generation:
        """Hand a job to the engine, once all is checked that can be checked. `patience`: as in Generation.begin;
        `whose`: the salt of the key that asks, and the id of its HTTP request.
        """
        if self.draining:
            raise unavailable("the server is shutting down", RETRY_SECONDS)
        if self.status == "dead":
            raise unavailable(self.fatal or "the engine does not answer")
        self._check_lengths(job)
        self._check_room(job.choices, whose[0])
        self._answers[whose[0]] += job.choices  # before anything is waited for: others look for room meanwhile
        try:
            generation = await self._prepared(job, whose)
        except BaseException:
            self._answers[whose[0]] -= job.choices
            raise
        self.generations.add(generation)
        try:
            await generation.begin(patience)
        except BaseException:
            self.end(generation)
            raise
        return generation

    def _check_room(self, choices: int, salt: bytes) -> None:
        room, taken, own = self.llm.plan.slots + self.settings.queue, self.answers, self._answers[salt]
        if taken + choices > room:
            raise busy(f"{taken} answers are running or waiting, at most {room} are taken", RETRY_SECONDS)
        share = share_of(room)
        if len(self.settings.api_keys) > 1 and own and own + choices > share:
            raise busy(f"{own} answers of this key are running or waiting, at most {share} are taken", RETRY_SECONDS)

    async def _prepared(self, job: Job, whose: tuple[bytes, str]) -> Generation:
        """A generation that has not begun; what it goes on from has been fetched from disk or from another server."""
        settings = self.settings
        if job.constraint is not None:
            outputs = await _on(self._grammars, job.constraint)
            job = replace(job, params=replace(job.params, structured_outputs=outputs), constraint=None)
        for prompt in job.prompts:
            if prompt.sharing.conversation:
                await self.move(self.sessions.restore, prompt.sharing)
        document = job.prompts[0].document  # one for all of them
        if document is not None:  # its text may be read again: the threads that read requests do not wait for that
            prefix = await self.move(document.held)
            job = replace(job, prompts=[replace(prompt, prefix=prefix) for prompt in job.prompts])
        own = partial(self.feed.recorder.own, whose=whose)
        queued, longest = settings.queue_seconds, settings.request_seconds
        sends, moved = self.transfers.may_send(job.transfer, job.choices), None
        if job.transfer is not None and not sends and job.choices == 1:
            moved = await self.move(self.transfers.fetch, job.transfer, job.prompts[0].tokens, job.params)
        return Generation(self.llm.owner, job, queued, longest, own, self.sessions, sends, moved, salt=whose[0])

    async def send(self, generation: Generation) -> dict[str, Any] | None:
        """What the client is to tell the server that goes on with the answer; None: nothing."""
        if not generation.sends or not generation.requests:
            return None
        return await self.move(self.transfers.send, generation.requests[0])

    def end(self, generation: Generation) -> None:
        """Whatever became of it: nothing of it is left, here or, soon, in the engine."""
        if generation not in self.generations:
            return
        self.generations.discard(generation)
        self._answers[generation.salt] -= generation.job.choices
        if not generation.over:
            self.metrics.cancelled(generation)
        generation.cancel()
        for request in generation.requests if generation.sends else ():
            self.llm.owner.discard(request)  # its cache was held to be sent
        problem = generation.problem
        if problem is not None and any(words in str(problem) for words in DEVICE_ERRORS):
            self.fatal = "the device has failed; the server has to be started again"

    def _check_lengths(self, job: Job) -> None:
        engine, asked = self.llm.engine, job.eviction
        config = engine.resolve_eviction(INHERIT) if asked is INHERIT else asked
        bounded = isinstance(config, EvictionConfig) and config.bounded
        for prompt in job.prompts:
            evicted = bounded or (prompt.document is not None and prompt.document.evicted)
            limit = engine.manager.max_tokens if evicted else engine.tokens_alone
            if len(prompt.tokens) >= limit:
                raise too_long(len(prompt.tokens), limit - 1)

    async def drain(self) -> None:
        """Take nothing new; wait until all has ended, or the time for that is over, end what is left, and save."""
        self.draining = True
        if self._llm is not None and self._llm.warm is not None:
            self._llm.warm.rest()
        seconds = self.settings.shutdown_seconds
        until = time.monotonic() + seconds
        saving = self._llm is not None and self.fatal is None and self.sessions.saves
        answered_until = until - (min(SAVE_SECONDS, SAVE_SHARE * seconds) if saving else 0.0)
        while self.answers and time.monotonic() < answered_until:  # those that are prepared, too
            await asyncio.sleep(0.05)
        for generation in list(self.generations):
            generation.fail(unavailable("the server is shutting down; the answer was cut"))
        for _ in range(100):  # they tell their clients
            if not self.generations:
                break
            await asyncio.sleep(0.02)
        if self._llm is not None and self.fatal is None:
            await asyncio.to_thread(self.sessions.save_recent, until)
            await asyncio.to_thread(self.sessions.close)

    def close(self) -> None:
        """End the threads. The model is its owner's to close."""
        for end in self._unobserve:
            end()
        if self._transfers is not None:
            self._transfers.close()
        if self.tracing is not None:
            self.tracing.close()
        for pool in (self._text, self._grammars, self._moves):
            pool.shutdown(wait=False, cancel_futures=True)


async def _on(pool: ThreadPoolExecutor, do: Callable[..., T], *given: Any) -> T:
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, _done, do, *given)
    except HybridKVError as problem:
        raise bad(str(problem)) from None


def _done(do: Callable[..., T], *given: Any) -> T:
    try:
        return do(*given)
    except StopIteration as problem:  # which no future can hold: whoever waits would do so for ever
        raise RuntimeError("an iterator ended too early") from problem


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")
