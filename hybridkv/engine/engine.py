"""Engine: requests in, tokens out, several at a time. It knows token ids and text pieces; prompts are tokenised by its
callers.

One thread owns an engine: the one that made it, or the one that last called `take_ownership`. A call from another
thread is an error.

An exception or an interrupt at any line of a step, Ctrl-C included, leaves an engine that works: requests whose state
may have been advanced end with an error, everything they held goes back, and all others go on (`_recover`).
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import index
from typing import Any

import numpy as np
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.cache.checkpoints import KINDS, MOST_CLIENT_MARKS
from hybridkv.cache.pins import pin
from hybridkv.cache.session import Session, check_model
from hybridkv.cache.tails import keep_end
from hybridkv.config import EvictionConfig, SamplingParams, StructuredOutputs, is_whole, shown
from hybridkv.devices import on_device
from hybridkv.engine import held, moving
from hybridkv.engine.admission import DoesNotFit
from hybridkv.engine.ahead import evict_after_step
from hybridkv.engine.copying import calibration_tokens, copying_weights
from hybridkv.engine.pipeline import InFlightStep, Pipeline
from hybridkv.engine.replay import ReplayPart, replay
from hybridkv.engine.reuse_report import finish_report
from hybridkv.engine.runner import Runner
from hybridkv.engine.scheduler import Scheduler
from hybridkv.engine.scoring import score, score_after
from hybridkv.engine.stats import stats_of
from hybridkv.errors import HybridKVError, OutOfPages, RequestError
from hybridkv.eviction import Evictor, find_policy
from hybridkv.models.decoder import Model
from hybridkv.request import Request, RequestKey
from hybridkv.text.constraint import Constraint, Thoughts
from hybridkv.text.grammar import Grammars, grammar_text
from hybridkv.text.stream import TextStream
from hybridkv.text.tokenizer import Tokenizer

INHERIT = object()  # "what the engine was opened with"
CACHE_USES = {True: (True, True), False: (False, False), "read": (True, False), "write": (False, True)}


@dataclass(frozen=True)
class Update:
    """What a step gave one request."""

    request: Request
    token: int | None
    text: str


class _Running:
    """Lives as long as a call does."""


class Engine:
    """Requests that run together on one model and one cache: `add` them, then call `step` until the engine is `idle`.

    Args:
        model: what computes.
        manager: the cache that it writes to.
        tokenizer: for stop strings and for text; None: token ids alone.
        step_tokens: tokens that one step computes at the most.
        eos_ids: tokens that end an answer.
        evictor: what evicts; None: everything is kept.
    """

    captures = True  # steps as CUDA graphs on a GPU

    def __init__(
        self,
        model: Model,
        manager: KVCacheManager,
        tokenizer: Tokenizer | None = None,
        step_tokens: int = 512,
        eos_ids: frozenset[int] = frozenset(),
        evictor: Evictor | None = None,
    ) -> None:
        self.manager, self.tokenizer, self.eos_ids = manager, tokenizer, eos_ids
        self.evictor = None
        if evictor is not None:
            weights = partial(_weights_of, weakref.ref(self))  # no cycle: what an engine holds goes with its last user
            self.evictor = replace(evictor, step_tokens=step_tokens, weights=weights)
        self.vocab = model.config.vocab
        self.grammars = Grammars(tokenizer, self.vocab)  # any thread may use it
        self.sampling_defaults: dict[str, float] = {}  # the model's own, for what a request leaves open
        self.tokens_alone = manager.tokens_alone()
        self.runner = Runner(model, manager, step_tokens, self.captures)
        self.scheduler = Scheduler(manager, step_tokens, self.evictor, self.runner.graphs, self.runner.mixed)
        self.pipeline = Pipeline(self.runner, self.scheduler)
        self.launches_ahead = manager.device.type == "cuda"  # on a CPU it would only compute in vain
        self.about: dict[str, str] = {}  # the model in words, for a session that meets another one
        self._owner = threading.get_ident()
        self._stepping = self._changing = False  # a call of that kind has begun and not come to its end
        self._running: weakref.ref[_Running] | None = None  # such a call is running now, if what it refers to lives
        self._deferred: list[Callable[[], None]] = []  # calls that came inside a step, for after it
        self._numbers = itertools.count()

    @cached_property
    def stream_weights(self) -> Tensor:
        """[streams] f32: how much each attention stream copies (copying.py), measured when first needed."""
        config = self.runner.model.config
        tokens = calibration_tokens(self.tokenizer, self.vocab, config.max_positions)
        ranks = None if self.evictor is None else self.evictor.ranks
        return copying_weights(self.runner.model, self.manager, tokens, ranks)

    def take_ownership(self) -> None:
        """From here on the calling thread owns the engine. The owner before it must not be inside a call."""
        if self._active:
            raise RequestError("the engine is in the middle of a call; its owner hands it over between calls")
        self._owner = threading.get_ident()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Inside, the calling thread owns the engine; afterwards, whoever did before."""
        before = self._owner
        self.take_ownership()
        try:
            yield
        finally:
            self._owner = before

    # ---- requests

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        hold: bool = False,
        after: Request | None = None,
        eviction: EvictionConfig | int | None | object = INHERIT,
        prefix: Request | None = None,
        cache: bool | str = True,
        salt: bytes = b"",
        marks: Sequence[tuple[int, str]] = (),
    ) -> Request:
        """Queue a prompt, or RequestError. The request grows with every `step` that it is part of.

        Args:
            tokens: the prompt.
            params: how to choose tokens and when to end.
            hold: keep the cache when finished.
            after: a held request whose cache is to be continued, as far as its tokens agree.
            eviction: what the request keeps: an EvictionConfig, a number (its budget), or None (everything). Without
                it: what the engine was opened with.
            prefix: a held request with whose cache this one begins, and whose prompt begins this one's. Unlike `after`
                it stays held, and any number of requests may begin with it. What it evicted stays evicted, also if
                its cache has to be computed again.
            cache: whether it begins with what others have read, and they with what it reads: True, False, "read" (only
                the first) or "write" (only the second).
            salt: requests of different salts see nothing of each other.
            marks: (position, kind) at which a checkpoint of its state is wished (cache/checkpoints.py: Mark).
        """
        self._check_owner()
        request = self.checked_request(tokens, params or SamplingParams(), hold, eviction, prefix)
        params, request.continues = request.params, after
        request.reads, request.writes = self.cache_uses(cache)
        request.salt, request.marks = salt, checked_marks(marks, len(request.tokens))
        for i in range(1, params.n):
            request.siblings.append(self._sibling(request, i))
        self.scheduler.add(request)
        return request

    def checked_request(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        hold: bool = False,
        eviction: EvictionConfig | int | None | object = INHERIT,
        prefix: Request | None = None,
    ) -> Request:
        """A request that is in no queue yet, checked: it can run here if it is alone. Arguments as of `add`."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be SamplingParams, not {type(params).__name__}")
        self._check_params(params)
        params = self.compiled(params)
        if params.n > 1 and hold:
            raise RequestError(f"the cache of {params.n} answers cannot be held for a next turn; ask for n=1")
        request = self.new_request(self.check_tokens(tokens), params, hold, self.resolve_eviction(eviction))
        if prefix is not None:
            self._begin_with(request, prefix)
        self._check_fits(request)
        request.bad_words = bad_word_tokens(params.bad_words, self.tokenizer)
        for token in (token for word in request.bad_words for token in word if token >= self.vocab):
            raise RequestError(f"a bad word has token id {token}, which is outside the vocabulary of {self.vocab}")
        return request

    @staticmethod
    def cache_uses(cache: bool | str) -> tuple[bool, bool]:
        """Whether a request begins with what others have read, and they with what it reads; or RequestError."""
        if cache not in CACHE_USES:
            raise RequestError(f"cache must be True, False, 'read' or 'write', not {shown(cache)}")
        return CACHE_USES[cache]

    def _sibling(self, request: Request, i: int) -> Request:
        """Answer i to the same prompt. It is in no queue until the prompt has been read."""
        params = request.params
        seed = None if params.seed is None else params.seed + i
        sibling = self.new_request(list(request.tokens), replace(params, seed=seed), eviction=request.eviction)
        sibling.bad_words, sibling.source, sibling.prefix = request.bad_words, request, request.prefix
        sibling.reads, sibling.writes, sibling.salt = request.reads, request.writes, request.salt
        return sibling

    @staticmethod
    def _begin_with(request: Request, prefix: Request) -> None:
        """The request has the past of `prefix`, what was evicted from that included, or RequestError."""
        held.check_ended(prefix, "continued")
        before = prefix.prompt_tokens
        if request.tokens[:before] != prefix.tokens[:before]:
            raise RequestError(f"the prompt does not begin with the {before} tokens that it is to go on from")
        if request.eviction is not None:
            raise RequestError("what follows a held prefix is kept whole: leave out eviction, or pass None")
        request.prefix, request.evictions = prefix, dict(prefix.evictions)

    def new_request(
        self, tokens: list[int], params: SamplingParams, hold: bool = False, eviction: EvictionConfig | None = None
    ) -> Request:
        """A request that is in no queue yet."""
        params = params.resolved(self.sampling_defaults)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        number = next(self._numbers)
        text = TextStream(self.tokenizer, params.stop)
        ends_at = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        asked = params.structured_outputs if isinstance(params.structured_outputs, Constraint) else Constraint()
        return Request(
            RequestKey(number),
            number,
            tokens,
            len(tokens),
            params,
            text,
            seed,
            hold,
            prompt_logprobs=[] if params.prompt_logprobs is None else [None],
            ends_at=ends_at,
            banned=asked.banned,
            following=asked.start(frozenset(i for i in ends_at if i < self.vocab)) if asked.follows else None,
            eviction=eviction,
        )

    def compiled(self, params: SamplingParams, thoughts: Thoughts | None = None) -> SamplingParams:
        """With what the answer must look like compiled, or RequestError. Any thread may call it, best before `add`:
        what takes time keeps no step waiting then.

        `thoughts`: of the answer, if it has any; they stay free.
        """
        asked = params.structured_outputs
        if not isinstance(asked, StructuredOutputs):
            return params
        what = f"structured_outputs.{asked.kind}"
        text = grammar_text(asked.kind, asked.given, what, thoughts is not None)
        constraint = Constraint(self.grammars.compile(text, what), thoughts, timer=self.grammars.timer)
        return replace(params, structured_outputs=constraint)

    def _check_params(self, params: SamplingParams) -> None:
        """What can be asked of this model, or RequestError."""
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this model does not have; use stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, which this model does not have; use logit_bias")
        for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens:
                if token >= self.vocab:
                    raise RequestError(
                        f"token id {token} of {name} is outside the vocabulary of {self.vocab}: ids go from 0 to "
                        f"{self.vocab - 1}"
                    )

    def resolve_eviction(
        self, asked: EvictionConfig | int | None | object, replays: bool = False
    ) -> EvictionConfig | None:
        """What a request that asks for this keeps, or HybridKVError. Any thread may call it.

        `replays`: whether its text can be read once more for the scores (policy replay).
        """
        found = self._resolve_eviction(asked)
        if found is not None and not replays and find_policy(found.policy).needs_replay:
            raise RequestError(
                "policy 'replay' reads a text once more after it was read, which is done for documents (LLM.compress, "
                "hybridkv compress) and at the end of a conversation's turn; choose another policy for a single prompt"
            )
        return found

    def _resolve_eviction(self, asked: EvictionConfig | int | None | object) -> EvictionConfig | None:
        if asked is INHERIT:
            return self.evictor.default if self.evictor is not None else None
        if asked is None:
            return None
        if not isinstance(asked, EvictionConfig) and not is_whole(asked):
            raise RequestError(
                f"eviction must be an EvictionConfig, a budget in tokens, or None, not {type(asked).__name__}"
            )
        if self.evictor is None and self.manager.schema.compressed:
            raise RequestError("this model compresses its cache itself and never evicts; leave out eviction")
        if self.evictor is None or (self.evictor.default is None and not self.manager.query_buffers.count):
            raise RequestError(
                "the queries that choose what to keep are not stored in this cache; to evict, open the model with "
                "CacheConfig(budget=...), or with query_buffers=1 or more"
            )
        found = asked if isinstance(asked, EvictionConfig) else self.evictor.with_budget(asked)  # type: ignore[arg-type]
        self.evictor.check(found, self.manager)
        return found

    def _check_fits(self, request: Request) -> None:
        """Whether the request can run if it is alone, or RequestError."""
        alone, limit = self.tokens_alone, self._longest(request)
        if len(request.tokens) >= limit:
            raise RequestError(
                f"the prompt has {len(request.tokens)} tokens, the context holds {limit} and needs room for an "
                "answer; shorten the prompt or raise max_context or memory"
            )
        held = self.scheduler.held_tokens(request, len(request.tokens) + 1)
        if held > alone:
            raise RequestError(
                f"the pools hold {alone} tokens of one request, and {held} are needed at once to read this prompt; "
                "give more memory, or lower budget or step_tokens"
            )

    def abort(self, request: Request) -> None:
        """Stop a request in whatever state it is; all it holds is released. A finished one loses its held cache.

        Siblings go on, but for those whose prompt this request is still reading: they end with it.
        """
        if self._defers(partial(self.abort, request)):
            return
        with self._change():
            if request.finished:
                self.scheduler.release_held(request)
                return
            request.hold = False
            request.finish_reason = request.finish_reason or "abort"
            self._finish(request)

    def stop(self, request: Request) -> None:
        """End a running answer where it is; a cache to be held stays held. If a step that was launched ahead has run
        past what is known of it, and its state cannot go back, the cache is given up; a next turn reads it again.
        """
        if self._defers(partial(self.stop, request)):
            return
        with self._change():
            if not request.finished:
                request.text.finish()
                request.finish_reason = "abort"
                self._finish(request)

    def let_go(self, request: Request) -> None:
        """Nobody will go on from a request: its held cache goes; an answer that is being written leaves none behind."""
        if request.finished:
            self.abort(request)
        else:
            request.hold = False

    # ---- requests that move (moving.py)

    def export(self, request: Request) -> Session:
        """A copy on the host of a request in whatever state, also in the middle of its answer, for another engine to
        `resume`; `Session.to_buffers` sends it. The request stays as it is: abort it once it has arrived. With a step
        in flight it is refused (call `drain` first).
        """
        with self._change(), on_device(self.manager.device):
            return moving.export(self, request)

    def resume(
        self,
        session: Session,
        params: SamplingParams | None = None,
        hold: bool = False,
        eviction: EvictionConfig | int | None | object = moving.AS_SENT,
        salt: bytes = b"",
        cache: bool | str = True,
    ) -> Request:
        """Go on with a request that was exported, token for token as it would have gone on there; or RequestError, and
        nothing is taken. It waits for its turn as one that was added does.

        Args:
            session: of `export`.
            params: instead of those that it came with; needed where these hold code (a logits hook, a grammar).
            hold: keep the cache when it has finished.
            eviction: instead of what it came with, as in `add`.
            salt: as in `add`.
            cache: as in `add`.
        """
        with self._change(), on_device(self.manager.device):
            return moving.resume(self, session, params, hold, eviction, salt, cache)

    # ---- held requests, saved and doubled (held.py)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around what others do to held requests (storing.py), on the engine's thread and device."""
        with self._change(), on_device(self.manager.device):
            yield

    def session(self, request: Request | None, conversation: Mapping[str, Any] | None = None) -> Session:
        """A finished request with its held cache, copied to the host; None: nothing was said yet.

        `conversation`: plain JSON values that are saved with it. `Session.save` writes the file, in any thread.
        """
        with self._change(), on_device(self.manager.device):
            return held.session_of(self, request, conversation or {})

    def check_session_model(self, model: str, about: dict[str, str]) -> None:
        """Whether a session file's model is this one, or RequestError: what differs."""
        check_model(self.manager, held.about(self), model, about)

    def restore_held(self, session: Session) -> Request:
        """A session's request as it was: finished, its cache held for a next turn (`add(after=...)`).

        Caches that are held longest make room. Where there is none, or the session is of another model or cache, it is
        refused, and nothing is taken.
        """
        with self._change(), on_device(self.manager.device):
            return held.restore_held(self, session)

    def fork_held(self, request: Request) -> Request:
        """A second finished request with the same past, which shares the pages of the first; each can go on.

        Where there is no room for it, or the first one's cache was given up, its next turn computes all again.
        """
        with self._change(), on_device(self.manager.device):
            return held.fork_held(self, request)

    def evict_held(
        self,
        request: Request,
        eviction: EvictionConfig,
        scores: Sequence[Tensor] | None = None,
        ranges: Sequence[tuple[int, int]] = (),
        seen: bool = False,
    ) -> int:
        """Evict a finished request whose cache is held, and hold what is left. Returns the pages that went back.

        Args:
            request: a request that was added with `hold`.
            eviction: its budget and the rest; `bounded` and `decode_every` have no meaning here.
            scores: [G, L] of each attention layer, in place of the policy's own.
            ranges: (begin, end) of positions whose entries stay whatever their score, as far as the budget goes.
            seen: whether the question has been read, for policy "auto".
        """
        with self._change(), on_device(self.manager.device):
            return held.evict_held(self, request, eviction, scores, ranges, seen)

    def replay(self, request: Request, part: ReplayPart, scores: list[Tensor] | None = None) -> list[Tensor]:
        """Scores [G, L] f32 of each attention layer of a held request, from reading a part of its text once more
        (replay.py): what `evict_held` chooses by. The request stays as it is.

        `scores`: what the parts before gave; they are raised in place.
        """
        with self._change(), on_device(self.manager.device):
            return replay(self, request, part, scores)

    def evict_turns(self, request: Request, turns: Sequence[tuple[int, int]], budget: int) -> dict[str, float]:
        """Evict old turns of a finished request whose cache is held, each to a budget. Returns its stats after that.

        Args:
            request: a request that was added with `hold`; one whose cache was given up is left alone.
            turns: (begin, end) of their positions. What is in none of them stays, bit for bit.
            budget: tokens of each that a stream keeps.
        """
        with self._change(), on_device(self.manager.device):
            return held.evict_turns(self, request, turns, budget)

    def check_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Plain ints, whatever kind of whole numbers they came as."""
        plain = type(tokens) is list and set(map(type, tokens)) <= {int}  # as tokenizers give them, many at a time
        try:
            found = list(tokens) if plain else [_whole(token) for token in tokens]
        except TypeError:
            raise RequestError("a prompt must be text or whole numbers, the token ids") from None
        if not found:
            raise RequestError("the prompt has no tokens; give at least one")
        for token in (min(found), max(found)):
            if not 0 <= token < self.vocab:
                raise RequestError(f"token id {token} is outside the vocabulary of {self.vocab}")
        return found

    # ---- running

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return self.scheduler.idle

    def step(self) -> list[Update]:
        """Give out the results of one forward pass over all that can run."""
        return self._run_step(self.launches_ahead)

    def slack(self) -> float:
        """Seconds that may pass before `step` is called, and the device does not wait for it. Requests that are added
        until then run in the next step.
        """
        return self.pipeline.slack() if self.launches_ahead else 0.0

    def drain(self) -> list[Update]:
        """Give out the results of the step in flight, if there is one, and launch none: then requests can be forked or
        saved.
        """
        self._check_owner()
        in_flight = self.pipeline.in_flight
        if in_flight is None or in_flight.in_vain:
            self.pipeline.in_flight = None
            return []
        return self._run_step(launch_ahead=False)

    settle = drain  # its name before 0.2

    def score(self, tokens: Sequence[int], prefill: int | None = None, chunk: int | None = None) -> Tensor:
        """Logits [T, vocab] f32 after each token: the first `prefill` in chunks, the rest one decode step each.

        Eviction applies as to a request whose prompt they are.
        """
        with self._change(), on_device(self.manager.device):
            return score(self, tokens, prefill, chunk)

    def whole_rows(self, logits: Tensor) -> Tensor:
        """Logits [S, vocab] of what `runner.forward` gives, which over ranks are those of some tokens."""
        return logits

    def score_after(self, request: Request, tokens: Sequence[int]) -> Tensor:
        """Logits [T, vocab] f32 after each of these tokens, read after a finished request whose cache is held, and held
        with it from here on. Nothing is evicted.
        """
        with self._change(), on_device(self.manager.device):
            return score_after(self, request, tokens)

    def _run_step(self, launch_ahead: bool) -> list[Update]:
        self._check_owner()
        if self._active:
            raise RequestError("a step was asked for inside a call of the same engine; ask for it after that call")
        if self._stepping or self._changing:  # an interrupt came in the middle of a recovery
            self._recover("an earlier call was interrupted")
        running = _Running()
        try:
            self._running = weakref.ref(running)
            self._stepping = True
            with on_device(self.manager.device):
                updates = self._step(launch_ahead)
            self._stepping = False
        except BaseException as problem:
            if self._stepping:
                self._recover(f"the step failed: {problem!r}")
            raise
        finally:
            self._running = None
        while self._deferred:
            self._deferred.pop()()
        return updates

    def _step(self, launch_ahead: bool) -> list[Update]:
        self.scheduler.settle_ready()
        reuse = self.manager.reuse
        if reuse is not None and self.pipeline.idle:  # else the next step would be launched too late
            reuse.settle_late()
        try:
            step = self.pipeline.next_step()
        except OutOfPages as problem:  # one request is left and fills the pools alone: it ends with what it has
            return self._end_full(self.scheduler.running[0], problem)
        except DoesNotFit as problem:
            return self._end_full(problem.request, problem)
        except RequestError as problem:
            return self._end_stuck(problem)
        if step is None:
            return self._end_failed()
        live, evicting = step.live, self.scheduler.evicting
        self.manager.commit([(request.key, n) for request, n in live])
        if reuse is not None:
            for request, _ in live:
                reuse.stage(request.key, request.tokens)
        failed = self._evict([request for request, _ in live])
        self._fork(step, failed)
        if not failed:
            if len(live) == len(step.batch.requests):
                self.pipeline.prepare_next()
            if launch_ahead:
                self.pipeline.launch_ahead()
        for request in evicting:  # the device was given the step after them: the tokens come later than their lists
            self.scheduler.settle(request)
        failed += [request for request in self.scheduler.failed if request not in failed]
        updates = [*self._extend(step, failed), *(Update(request, None, "") for request in failed)]
        if reuse is not None:
            reuse.publish([request.key for request, _ in live if request.finish_reason == "error"])
            reuse.settle_late()  # of requests that ended before this step did, which has been waited for
        self.pipeline.advance()
        self._finish_done(updates)
        return updates

    def _evict(self, requests: Sequence[Request]) -> list[Request]:
        """Evict the requests that are due, or have the device do it. Returns those in which that failed; they end, and
        all others go on.
        """
        if self.evictor is None:
            return []
        failed = []
        for request in requests:
            problem = self._evict_one(request)
            if isinstance(problem, OutOfPages) and len(self.scheduler.running) > 1:
                self.scheduler.preempt(request)  # others run on its pages: what survives has no place beside them
            elif problem is not None:  # a policy of the user's, NaN scores, or no memory for them
                request.finish_reason, request.error = "error", f"eviction failed: {problem}"
                failed.append(request)
        return failed

    def _evict_one(self, request: Request) -> Exception | SystemExit | None:
        """Evict a request if it is due, or have the device do it. Returns why that failed."""
        try:
            evict_after_step(self, request, wait=False)
            if request.evictions or request.evicting is not None:
                request.limit = self.limit(request)
        except (Exception, SystemExit) as problem:
            return problem
        return None

    def _fork(self, step: InFlightStep, failed: list[Request]) -> None:
        """Where a prompt has been read, its other answers begin."""
        assert step.sampled is not None
        for request in step.sampled.requests:
            if request.first_token_at is None:  # before it is known: a step may be launched ahead
                request.limit = self.limit(request)
            if request.siblings and request not in failed and not request.finished:
                self.scheduler.fork(request)
                if request.finish_reason == "error":
                    failed.append(request)

    def _extend(self, step: InFlightStep, failed: Sequence[Request]) -> list[Update]:
        """Give each request its next token, but for those that have failed or ended. The host waits for the device."""
        assert step.sampled is not None
        # waited for even if it gives no token: else a long prompt's steps would queue up before whatever comes next
        tokens, problems = step.sampled.wait()
        now = time.perf_counter()
        updates = []
        for request, token, problem in zip(step.sampled.requests, tokens, problems, strict=True):
            request.unseen -= 1
            if request in failed or request.source in failed or request.finished:
                continue  # a sibling ends with the request whose prompt it was to go on from
            if problem is not None:
                request.error = problem
                request.finish_reason = "error"
                request.source = None
                if self.manager.reuse is not None:
                    self.manager.reuse.discard(request.key)
                updates.append(Update(request, None, ""))
                continue
            if request.first_token_at is None:
                request.first_token_at = now
                if request.started_at is not None and request.source is None:  # a sibling has read nothing
                    read = request.prompt_tokens - request.cached_tokens
                    self.manager.host.saw_reading(read, now - request.started_at)
            request.last_token_at = now
            request.source = None
            updates.append(self.see(request, token))
        return updates

    def see(self, request: Request, token: int) -> Update:
        """A request's next token: its answer grows by it, and may end with it."""
        request.tokens.append(token)
        may_stop = request.answer_tokens > request.params.min_tokens
        try:
            seen = None if request.following is None else request.following.see(token)
        except (Exception, SystemExit) as problem:  # what a grammar raises is its own request's
            request.error, request.finish_reason = f"structured output failed: {problem}", "error"
            return Update(request, token, "")
        bound = request.following is not None and request.following.bound  # then it says what ends the answer
        ends = seen == "end" if bound else may_stop and token in request.ends_at
        try:
            text = "" if ends else request.text.push(token, may_stop)
        except Exception as problem:  # of a tokenizer: its own request ends, and the others go on
            request.error, request.finish_reason = f"the tokens have no text: {problem}", "error"
            return Update(request, None, "")
        if ends or seen == "done" or request.text.stopped is not None:
            request.finish_reason, request.end_token = "stop", ends
        elif len(request.tokens) >= request.limit:
            request.finish_reason = "length"
        return Update(request, token, text)

    def limit(self, request: Request) -> int:
        """Tokens, prompt and answer, at which the request ends."""
        longest, most = self._longest(request), request.params.max_tokens
        return longest if most is None else min(request.prompt_tokens + most, longest)

    def _longest(self, request: Request) -> int:
        """Tokens of the context, or those that the pools hold if nothing is evicted."""
        evicts = (
            request.evictions
            or request.evicting is not None
            or (request.eviction is not None and request.eviction.bounded)
        )
        return self.manager.max_tokens if evicts else self.tokens_alone

    # ---- how requests end

    def _end_full(self, request: Request, problem: Exception) -> list[Update]:
        if not request.answer_tokens:
            request.error = f"the pools are too small for this prompt: {problem}"
        request.finish_reason = "length" if request.answer_tokens else "error"
        updates = [Update(request, None, "")]
        self._finish_done(updates)
        return updates

    def _end_failed(self) -> list[Update]:
        updates = [Update(request, None, "") for request in self.scheduler.failed]
        if updates:
            self._finish_done(updates)
        return updates

    def _end_stuck(self, problem: RequestError) -> list[Update]:
        """End the requests that cannot go on, so that the others can."""
        stuck = [request for request in self.scheduler.running if not self.manager.can_continue(request.key)]
        if not stuck:
            raise problem
        for request in stuck:
            request.error = str(problem)
            request.finish_reason = "error"
        updates = [Update(request, None, "") for request in stuck]
        self._finish_done(updates)
        return updates

    def _finish_done(self, updates: list[Update]) -> None:
        for i, update in enumerate(list(updates)):
            if update.request.finish_reason is not None:
                updates[i] = Update(update.request, update.token, update.text + _last_text(update.request))
                updates += [Update(sibling, None, "") for sibling in update.request.forming]
                self._finish(update.request)
        if self.idle:
            self.manager.check_counts()

    def _finish(self, request: Request) -> None:
        if request.finish_reason != "error":
            self.scheduler.settle(request)
        for sibling in request.forming:
            sibling.error, sibling.finish_reason = request.error, request.finish_reason
            self._finish(sibling)
        request.stats = stats_of(request, self.manager)
        if self.manager.reuse is not None and request.reuse:
            finish_report(request, min(self.manager.reuse.written(request.key), request.prompt_tokens))
            if request.pins and request.finish_reason in ("stop", "length"):
                prompt = np.array(request.tokens[: request.prompt_tokens], np.int32)
                with suppress(HybridKVError):  # another one was pinned meanwhile: there is no room for both
                    request.pinned = pin(self.manager, request.salt, prompt)
            if request.finish_reason in ("stop", "length") and not request.hold and request.params.n == 1:
                keep_end(self.manager.reuse, request.key, request.tokens, self.pipeline.ended(request))
        self.scheduler.finish(request)
        self.pipeline.forget_finished()

    # ---- one owner, one device, and the way back after an interrupt

    def _check_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise RequestError(
                "this engine belongs to another thread: one thread makes all calls (add, step, abort, generate, ...). "
                "To hand it over, call engine.take_ownership() in the new thread while no call is running"
            )

    @property
    def _active(self) -> bool:
        """Whether a call is running now. It dies with the call's own frame, however that ends."""
        return self._running is not None and self._running() is not None

    def _defers(self, call: Callable[[], None]) -> bool:
        """Whether a call came inside a step, as of a generator that is collected there, and waits for its end."""
        self._check_owner()
        if self._active:
            self._deferred.append(call)
        return self._active

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Around a call that moves requests without running a step."""
        self._check_owner()
        if self._active:
            raise RequestError("a call came inside another call of the same engine; make it after that call")
        if self._stepping or self._changing:
            self._recover("an earlier call was interrupted")
        running = _Running()
        try:
            self._running = weakref.ref(running)
            self._changing = True
            yield
            self._changing = False
        except HybridKVError:
            self._changing = False
            raise
        except BaseException:
            self._recover("")
            raise
        finally:
            self._running = None

    def _recover(self, why: str) -> None:
        """Make everything consistent again. May itself be interrupted: the next call then begins here.

        Requests of steps that were launched cannot go on, since their state may be ahead of their tokens. All others
        can. What was held by requests that are in no queue any more goes back.
        """
        if self._stepping:
            for request in self.pipeline.in_doubt():
                if request.finish_reason is None:
                    request.error = why
                    request.finish_reason = "error"
        self.manager.rebuild()
        self.scheduler.rebuild()
        if self._stepping:
            self.pipeline.clear()
        self._stepping = self._changing = False


def _weights_of(engine: weakref.ref[Engine]) -> Tensor:
    found = engine()
    if found is None:
        raise HybridKVError("the engine whose streams were to be weighed is gone")
    return found.stream_weights


def _last_text(request: Request) -> str:
    """What was held back of a finished answer's text."""
    try:
        return request.text.finish()
    except Exception as problem:
        request.error, request.finish_reason = request.error or f"the tokens have no text: {problem}", "error"
        return ""


def checked_marks(marks: Sequence[tuple[int, str]], tokens: int) -> tuple[tuple[int, str], ...]:
    """Marks of a prompt, or RequestError."""
    for at, kind in marks:
        if not is_whole(at) or not 0 <= at <= tokens or kind not in KINDS:
            raise RequestError(f"a mark must be (position within {tokens} tokens, one of {KINDS}), not {(at, kind)}")
    if sum(kind == "client" for _, kind in marks) > MOST_CLIENT_MARKS:
        raise RequestError(f"a prompt has at most {MOST_CLIENT_MARKS} marks of its client's own")
    return tuple(marks)


def _whole(token: object) -> int:
    if isinstance(token, bool):
        raise TypeError("a truth value is no token id")
    return index(token)  # type: ignore[arg-type]


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences of texts that must not appear: each at the beginning of a word and inside one, as vLLM has it."""
    found: dict[tuple[int, ...], None] = {}  # each once, in order
    if tokenizer is None:
        return ()
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            # after some token: an answer is the middle of a text from its beginning on
            found[tuple(tokenizer.encode(text, special=False, after=-1))] = None
    return tuple(ids for ids in found if ids)
