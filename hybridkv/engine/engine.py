"""Engine: requests in, tokens out, several at a time. It knows token ids and text pieces; prompts are tokenised by its
callers.

One thread owns an engine: the one that made it, or the one that last called `take_ownership`. A call from another
thread is an error.

An exception or an interrupt at any line of a step, Ctrl-C included, leaves an engine that works: requests whose state
may have been advanced end with an error, everything they held goes back, and all others go on (`_recover`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.cache.pins import Pin, pin, reuse_of, unpin
from hybridkv.cache.schema import CacheSchema
from hybridkv.cache.session import Session, check_model
from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.devices import on_device
from hybridkv.engine import held, moving
from hybridkv.engine.calls import Calls
from hybridkv.engine.copying import calibration_tokens, copying_weights
from hybridkv.engine.ending import Update, finish, limit, see
from hybridkv.engine.new_requests import (
    INHERIT,
    cache_uses,
    check_tokens,
    checked_marks,
    checked_request,
    compiled,
    new_request,
    resolve_eviction,
    sibling_of,
)
from hybridkv.engine.pipeline import Pipeline
from hybridkv.engine.replay import ReplayPart, replay
from hybridkv.engine.runner import Runner
from hybridkv.engine.scheduler import Scheduler
from hybridkv.engine.scoring import score, score_after
from hybridkv.engine.stepping import evict_one, step
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Evictor
from hybridkv.eviction_record import EvictionRecord
from hybridkv.models.decoder import Model
from hybridkv.request import Request
from hybridkv.text.constraint import Thoughts
from hybridkv.text.grammar import Grammars
from hybridkv.text.tokenizer import Tokenizer


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
    in_parts = False  # whether its cache lies on several ranks, a part on each

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
        self.calls = Calls()
        self.numbers = itertools.count()  # of requests to come

    @property
    def schema(self) -> CacheSchema:
        """Of the model's cache; over ranks of all of them together."""
        return self.manager.schema

    @property
    def cache_bytes(self) -> int:
        """Of the pools and what belongs to them; over ranks of all of them together."""
        return self.manager.memory_bytes()

    @cached_property
    def stream_weights(self) -> Tensor:
        """[streams] f32: how much each attention stream copies (copying.py), measured when first needed."""
        config = self.runner.model.config
        tokens = calibration_tokens(self.tokenizer, self.vocab, config.max_positions)
        ranks = None if self.evictor is None else self.evictor.ranks
        return copying_weights(self.runner.model, self.manager, tokens, ranks)

    def take_ownership(self) -> None:
        """From here on the calling thread owns the engine. The owner before it must not be inside a call."""
        self.calls.take_ownership()

    def owned(self) -> AbstractContextManager[None]:
        """Inside, the calling thread owns the engine; afterwards, whoever did before."""
        return self.calls.owned()

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
        self.calls.check_owner()
        request = self.checked_request(tokens, params or SamplingParams(), hold, eviction, prefix)
        params, request.continues = request.params, after
        request.reads, request.writes = cache_uses(cache)
        request.salt, request.marks = salt, checked_marks(marks, len(request.tokens))
        for i in range(1, params.n):
            request.siblings.append(sibling_of(self, request, i))
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
        return checked_request(self, tokens, params, hold, eviction, prefix)

    @staticmethod
    def cache_uses(cache: bool | str) -> tuple[bool, bool]:
        """Whether a request begins with what others have read, and they with what it reads; or RequestError."""
        return cache_uses(cache)

    def new_request(
        self, tokens: list[int], params: SamplingParams, hold: bool = False, eviction: EvictionConfig | None = None
    ) -> Request:
        """A request that is in no queue yet."""
        return new_request(self, tokens, params, hold, eviction)

    def compiled(self, params: SamplingParams, thoughts: Thoughts | None = None) -> SamplingParams:
        """With what the answer must look like compiled, or RequestError. Any thread may call it, best before `add`:
        what takes time keeps no step waiting then.

        `thoughts`: of the answer, if it has any; they stay free.
        """
        return compiled(self.grammars, params, thoughts)

    def resolve_eviction(
        self, asked: EvictionConfig | int | None | object, replays: bool = False
    ) -> EvictionConfig | None:
        """What a request that asks for this keeps, or HybridKVError. Any thread may call it.

        `replays`: whether its text can be read once more for the scores (policy replay).
        """
        return resolve_eviction(self, asked, replays)

    def check_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Plain ints, whatever kind of whole numbers they came as."""
        return check_tokens(tokens, self.vocab)

    def abort(self, request: Request) -> None:
        """Stop a request in whatever state it is; all it holds is released. A finished one loses its held cache.

        Siblings go on, but for those whose prompt this request is still reading: they end with it.
        """
        if self.calls.defers(partial(self.abort, request)):
            return
        with self._change():
            if request.finished:
                self.scheduler.release_held(request)
                return
            request.hold = False
            request.finish_reason = request.finish_reason or "abort"
            finish(self, request)

    def stop(self, request: Request) -> None:
        """End a running answer where it is; a cache to be held stays held. If a step that was launched ahead has run
        past what is known of it, and its state cannot go back, the cache is given up; a next turn reads it again.
        """
        if self.calls.defers(partial(self.stop, request)):
            return
        with self._change():
            if not request.finished:
                request.text.finish()
                request.finish_reason = "abort"
                finish(self, request)

    def let_go(self, request: Request) -> None:
        """Nobody will go on from a request: its held cache goes; an answer that is being written leaves none behind."""
        if request.finished:
            self.abort(request)
        else:
            request.hold = False

    def forget(self, salt: bytes | None = None, tokens: Sequence[int] | None = None) -> None:
        """Drop what is kept for others: under a salt, or all there is; `tokens`: of this text alone (Reuse)."""
        reuse = self.manager.reuse
        if reuse is not None and tokens is None:
            reuse.forget(salt)
        elif reuse is not None:
            reuse.forget_text(salt or b"", np.array(tokens, np.int32))

    # ---- texts that stay (cache/pins.py)

    def check_keeps(self) -> None:
        """Whether anything is kept for prompts to come, or HybridKVError."""
        reuse_of(self.manager)

    def pin(self, salt: bytes, tokens: Sequence[int]) -> Pin | None:
        """A text of whole columns stays, if all of it is there; None: it is not. HybridKVError: it is too long."""
        return pin(self.manager, salt, np.array(tokens, np.int32))

    def pin_when_read(self, request: Request) -> None:
        """The prompt of a request that runs is to stay (`Request.pinned`), if there is room when it has been read."""
        request.pins = True

    def unpin(self, pinned: Pin) -> None:
        """What was pinned may go like anything else. Nothing happens where it is gone already."""
        unpin(self.manager, pinned)

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

    def check_session_model(self, model: str, about: dict[str, str], files: str = "") -> None:
        """Whether a session file's model is this one, or RequestError: what differs."""
        check_model(self.manager, held.about(self), model, about, files)

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

    def bring_back(self, request: Request) -> bool:
        """Whether the held cache of a request has a slot, its pages on the device; others make room for that."""
        with self._change(), on_device(self.manager.device):
            return self.scheduler.bring_back(request)

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

    def drop_queries(self, request: Request) -> None:
        """Nothing more is chosen by the last queries of a request whose cache is held: their buffer is free."""
        with self._change(), on_device(self.manager.device):
            if request in self.scheduler.held:
                self.manager.drop_query_buffer(request.key)

    def evictions_of(self, request: Request) -> dict[int, EvictionRecord]:
        """What the evictions of a finished request kept, by position: of all heads, wherever they are. Over ranks of a
        request that was added with `hold`, and that no later turn has taken over.
        """
        held.check_ended(request, "looked at")
        return dict(request.evictions)

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
        self.calls.check_owner()
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
        def work() -> list[Update]:
            with on_device(self.manager.device):
                return step(self, launch_ahead)

        return self.calls.step(work, self._recover)

    # ---- what subclasses do otherwise

    def evict_one(self, request: Request) -> Exception | SystemExit | None:
        """Evict a request if it is due, or have the device do it. Returns why that failed."""
        return evict_one(self, request)

    def see(self, request: Request, token: int) -> Update:
        """A request's next token: its answer grows by it, and may end with it."""
        return see(request, token)

    def limit(self, request: Request) -> int:
        """Tokens, prompt and answer, at which the request ends."""
        return limit(self, request)

    # ---- around calls

    def _change(self) -> AbstractContextManager[None]:
        """Around a call that moves requests without running a step."""
        return self.calls.change(self._recover)

    def _recover(self, why: str) -> None:
        """Make everything consistent again. May itself be interrupted: the next call then begins here.

        Requests of steps that were launched cannot go on, since their state may be ahead of their tokens. All others
        can. What was held by requests that are in no queue any more goes back.
        """
        if self.calls.stepping:
            for request in self.pipeline.in_doubt():
                if request.finish_reason is None:
                    request.error = why
                    request.finish_reason = "error"
        self.manager.rebuild()
        self.scheduler.rebuild()
        if self.calls.stepping:
            self.pipeline.clear()
        self.calls.stepping = self.calls.changing = False


def _weights_of(engine: weakref.ref[Engine]) -> Tensor:
    found = engine()
    if found is None:
        raise HybridKVError("the engine whose streams were to be weighed is gone")
    return found.stream_weights
