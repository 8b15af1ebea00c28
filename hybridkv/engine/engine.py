"""Engine: requests in, tokens out, several at a time. It knows token ids and text pieces; prompts are tokenised by its
callers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import index

import torch
from torch import Tensor

from hybridkv.cache import ForwardStep, KVCacheManager
from hybridkv.config import SamplingParams
from hybridkv.engine.runner import Runner, StepInputs
from hybridkv.engine.sampler import SampledTokens, sample
from hybridkv.engine.scheduler import Batch, Scheduler
from hybridkv.errors import HybridKVError, OutOfPages, RequestError
from hybridkv.eviction import Evictor, most_held
from hybridkv.models.decoder import Model
from hybridkv.request import Request
from hybridkv.text.stream import TextStream
from hybridkv.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Update:
    """What a step gave one request."""

    request: Request
    token: int | None
    text: str


@dataclass(frozen=True)
class Flying:
    """A step that the device has been given, and the tokens it will bring."""

    batch: Batch
    drawn: SampledTokens


class Engine:
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
        self.evictor = replace(evictor, step_tokens=step_tokens) if evictor is not None else None
        self.vocab = model.config.vocab
        self.runner = Runner(model, manager)
        graphs = self.runner.graphs
        held = most_held(evictor.config, step_tokens) if evictor is not None else None
        rows = graphs.rows if graphs is not None else None
        self.scheduler = Scheduler(manager, step_tokens, held, rows, self._needs_query_buffer)
        self.longest = manager.tokens_alone() if held is None else manager.max_tokens  # prompt and answer
        self.launches_ahead = manager.device.type == "cuda"  # a CPU would only compute in vain
        self.flying: Flying | None = None
        self._numbers = itertools.count()

    # ---- requests

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        hold: bool = False,  # keep the cache when finished
        after: Request | None = None,  # a held request whose cache is to be continued, as far as its tokens agree
    ) -> Request:
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be SamplingParams, not {type(params).__name__}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this model does not have; use stop_token_ids")
        tokens = self.check_tokens(tokens)
        if len(tokens) >= self.longest:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.longest} and needs room for an "
                "answer; shorten the prompt or raise max_context or memory"
            )
        alone, held = self.manager.tokens_alone(), self.scheduler.held_tokens(len(tokens) + 1)
        if held > alone:
            raise RequestError(
                f"the pools hold {alone} tokens of one request, and {held} are needed at once to read this prompt; "
                "give more memory, or lower budget or step_tokens"
            )
        request = self._request(tokens, len(tokens), params, hold)
        if after is not None and self._take_over(request, after):
            self.scheduler.adopt(request)
        else:
            self.scheduler.add(request)
        return request

    def _request(self, tokens: list[int], prompt: int, params: SamplingParams, hold: bool = False) -> Request:
        generator = torch.Generator(device=self.manager.device)
        generator.seed() if params.seed is None else generator.manual_seed(params.seed)
        number = next(self._numbers)
        return Request(number, number, tokens, prompt, params, TextStream(self.tokenizer, params.stop), generator, hold)

    def abort(self, request: Request) -> None:
        """Stop a request in whatever state it is; all it holds is released. A finished one loses its held cache."""
        if request.finished:
            self.scheduler.release_held(request)
            return
        request.hold, request.finish_reason = False, "abort"
        self._finish(request)

    def stop(self, request: Request) -> None:
        """End a running answer where it is; a cache to be held stays held."""
        if not request.finished:
            request.finish_reason = "abort"
            request.text.finish()
            self._finish(request)

    def check_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Plain ints, whatever kind of whole numbers they came as."""
        try:
            found = [index(t) if not isinstance(t, bool) else int("bool") for t in tokens]
        except (TypeError, ValueError):
            raise RequestError("a prompt must be text or whole numbers, the token ids") from None
        if not found:
            raise RequestError("the prompt has no tokens; give at least one")
        for token in found:
            if not 0 <= token < self.vocab:
                raise RequestError(f"token id {token} is outside the vocabulary of {self.vocab}")
        return found

    # ---- running

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def step(self) -> list[Update]:
        """One forward pass over all that can run."""
        flying, self.flying = self.flying, None
        if flying is None or all(request.finished for request in flying.batch.requests):
            try:
                batch = self.scheduler.schedule()
            except OutOfPages as problem:  # one request is left and fills the pools alone: it ends with what it has
                return self._end_full(self.scheduler.running[0], problem)
            if batch is None:
                return []
        else:
            batch = flying.batch
        try:
            if flying is None or flying.batch is not batch:
                flying = self._launch(batch)
            live = [(r, n) for r, n in zip(batch.requests, batch.counts, strict=True) if not r.finished]
            self.manager.commit([(r.key, n) for r, n in live])
            failed = self._evict([r for r, _ in live])
            if not failed and len(live) == len(batch.requests):
                self.scheduler.prepare_ahead(batch, flying.drawn.tokens)
                self.flying = self._launch_ahead()
            updates = self._extend(flying, failed)
            self._finish_done([*updates, *(Update(request, None, "") for request in failed)])
        except BaseException as problem:
            # state may be half advanced, tokens not yet given out: these requests cannot go on, all others can
            self.flying = None
            for request in batch.requests:
                if not request.finished:
                    request.finish_reason, request.error = "error", f"the step failed: {problem!r}"
                    self.scheduler.finish(request)
            raise
        return updates

    def settle(self) -> list[Update]:
        """Finish the step that flies, if one does, and launch none: then requests can be forked or saved."""
        flying = self.flying
        if flying is None or all(request.finished for request in flying.batch.requests):
            self.flying = None
            return []
        ahead, self.launches_ahead = self.launches_ahead, False
        try:
            return self.step()
        finally:
            self.launches_ahead = ahead

    drain = settle

    def _launch(self, batch: Batch) -> Flying:
        logits = self.runner.forward(self._inputs(batch))
        return Flying(batch, sample(logits, [batch.requests[i] for i in batch.sampled]))

    def _launch_ahead(self) -> Flying | None:
        """Start the step that was prepared ahead before the tokens of the one that runs are known here.

        It is in vain for a request that turns out to have ended, whose pages and state are then given up: so not where
        the end is foreseen, the cache is to be held, or entries are evicted while the answer grows.
        """
        ahead, scheduler = self.scheduler.ahead, self.scheduler
        others = scheduler.waiting or (ahead is not None and len(scheduler.running) > len(ahead.requests))
        if not self.launches_ahead or ahead is None or others:
            return None
        if self.evictor is not None and (self.evictor.config.bounded or self.evictor.config.decode_every):
            return None
        for request in ahead.requests:
            after = request.answer_tokens + 1  # with the token that is not known yet
            if request.hold or after >= request.params.max_tokens or len(request.tokens) + 1 >= self._limit(request):
                return None
        scheduler.ahead = None
        return self._launch(ahead)

    def _end_full(self, request: Request, problem: OutOfPages) -> list[Update]:
        request.finish_reason = "length"
        if not request.answer_tokens:
            request.finish_reason, request.error = "error", f"the pools are too small for this prompt: {problem}"
        updates = [Update(request, None, "")]
        self._finish_done(updates)
        return updates

    def _evict(self, requests: Sequence[Request]) -> list[Request]:
        """Cut the caches that have grown past their budget. Returns requests whose scores are broken; others go on."""
        failed = []
        for request in requests if self.evictor is not None else ():
            try:
                if self.evictor is not None:
                    self.evictor.cut(request, self.manager)
            except HybridKVError as problem:
                request.finish_reason, request.error = "error", str(problem)
                failed.append(request)
        return failed

    def _needs_query_buffer(self, request: Request) -> bool:
        return self.evictor is not None and self.evictor.reads(request, self.manager)

    def _inputs(self, batch: Batch) -> StepInputs:
        now = time.perf_counter()
        for request in batch.requests:
            request.started_at = request.started_at or now
        if batch.tokens is not None:
            return self.runner.next_inputs(batch.tokens, batch.step)
        parts = [r.tokens[b : b + n] for r, b, n in zip(batch.requests, batch.num_computed, batch.counts, strict=True)]
        return self.runner.inputs(
            parts, batch.num_computed, [batch.step.query_start_loc[i + 1] - 1 for i in batch.sampled], batch.step
        )

    def _extend(self, flying: Flying, failed: Sequence[Request]) -> list[Update]:
        """Give each request its next token, but for those that have failed or ended. The host waits for the device."""
        requests = flying.drawn.requests
        if not requests:
            return []
        tokens, broken = flying.drawn.wait()
        now = time.perf_counter()
        updates = []
        for request, token, bad in zip(requests, tokens, broken, strict=True):
            if request in failed or request.finished:
                continue
            if bad:
                request.finish_reason, request.error = (
                    "error",
                    "the model gave logits that are NaN or infinite; its weights or inputs are broken",
                )
                updates.append(Update(request, None, ""))
                continue
            request.first_token_at = request.first_token_at or now
            request.last_token_at = now
            request.tokens.append(token)
            ends = token in request.params.stop_token_ids or (token in self.eos_ids and not request.params.ignore_eos)
            text = "" if ends else request.text.push(token)
            if ends or request.text.stopped is not None:
                request.finish_reason = "stop"
            elif request.answer_tokens >= request.params.max_tokens or len(request.tokens) >= self._limit(request):
                request.finish_reason = "length"
            updates.append(Update(request, token, text))
        return updates

    def _limit(self, request: Request) -> int:
        """Tokens at which an answer ends: those of the context, or those the pools hold if nothing was evicted."""
        return self.manager.max_tokens if request.evictions else self.longest

    def _finish_done(self, updates: list[Update]) -> None:
        for i, update in enumerate(updates):
            if update.request.finish_reason is not None:
                updates[i] = Update(update.request, update.token, update.text + update.request.text.finish())
                self._finish(update.request)
        if self.idle:
            self.manager.check_counts()

    def _finish(self, request: Request) -> None:
        request.stats = self._stats(request)
        self.scheduler.finish(request)

    def _stats(self, request: Request) -> dict[str, float]:
        """What the request took, in the words of the public interface."""
        stats: dict[str, float] = {"preemptions": request.preemptions, "cached_tokens": request.cached_tokens}
        if request.key in self.manager.slot_of:
            position = self.manager.position(request.key)
            lengths = [n for row in self.manager.lengths(request.key).values() for n in row.tolist()]
            kept = position if self.manager.schema.compressed else sum(lengths) / max(len(lengths), 1)
            stats |= {
                "kept_tokens": kept,
                "kv_bytes_full": self.manager.schema.kv_bytes(position),
                "kv_bytes_kept": self.manager.held_bytes(request.key),
                "state_bytes": self.manager.schema.slot_bytes,
            }
        if request.first_token_at and request.last_token_at and request.started_at:
            seconds = request.first_token_at - request.started_at
            rest = request.last_token_at - request.first_token_at
            stats |= {
                "wait_s": request.started_at - request.added_at,
                "prefill_s": seconds,
                "prefill_tok_s": (request.prompt_tokens - request.cached_tokens) / seconds,
                "decode_s": rest,
                "decode_tok_s": (request.answer_tokens - 1) / rest if rest > 0 else 0.0,
            }
        return stats

    def _take_over(self, request: Request, held: Request) -> bool:
        """Continue a held cache if what it holds is a beginning of the new request's tokens."""
        if held not in self.scheduler.held:
            return False
        position = self.manager.position(held.key)
        pairs = zip(held.tokens[:position], request.tokens[:-1], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same < position and (same == 0 or not self.manager.can_rewind(held.key, same)):
            self.scheduler.release_held(held)  # recurrent state cannot be rewound
            return False
        self.manager.truncate_request(held.key, same)
        self.scheduler.held.remove(held)
        request.key, request.cached_tokens, request.evictions = held.key, same, dict(held.evictions)
        return True

    # ---- teacher forcing

    def score(self, tokens: Sequence[int], prefill: int | None = None, chunk: int | None = None) -> Tensor:
        """Logits [T, vocab] f32 after each token: the first `prefill` in chunks, the rest one decode step each.

        Eviction applies as to a request whose prompt they are.
        """
        tokens = self.check_tokens(tokens)
        prefill = len(tokens) if prefill is None else prefill
        chunk = prefill if chunk is None else chunk
        good = all(isinstance(n, int) and not isinstance(n, bool) for n in (prefill, chunk))
        if not good or not 0 <= prefill <= len(tokens) or (prefill and chunk < 1):
            raise RequestError(f"prefill must be from 0 to {len(tokens)} and chunk positive, not {prefill} and {chunk}")
        if len(tokens) > self.manager.max_tokens:
            raise RequestError(f"{len(tokens)} tokens do not fit a context of {self.manager.max_tokens}")
        cuts = {*range(0, prefill, chunk or 1), *range(prefill, len(tokens)), len(tokens)}
        if self.evictor is not None and self.evictor.config.bounded:
            cuts.update(range(0, prefill, self.evictor.step_tokens))  # where a bounded prompt is cut
        request = self._request(tokens, prefill, SamplingParams())
        key = request.key
        if not self.manager.free_slots and self.scheduler.held:
            self.scheduler.make_room()
        self.manager.admit_request(key)
        try:
            if not self.scheduler.give_query_buffer(request):
                raise HybridKVError(
                    f"all {self.manager.query_buffers.count} query buffers are taken by prompts that are being read; "
                    "let the engine run until one has been cut, or raise max_requests"
                )
            parts = []
            for a, b in itertools.pairwise(sorted(cuts)):
                step = self._reserve(key, b - a)
                logits = self.runner.forward(self.runner.inputs([tokens[a:b]], [a], range(b - a), step))
                parts.append(logits.to(torch.float32, copy=True))  # a graph's next replay writes to the same place
                self.manager.commit([(key, b - a)])
                if self._evict([request]):
                    raise HybridKVError(str(request.error))
            return torch.cat(parts)
        finally:
            self.manager.release_request(key)

    def _reserve(self, key: Hashable, tokens: int) -> ForwardStep:
        """Pages for one request, at the cost of caches that are only held."""
        while True:
            try:
                return self.scheduler.reserve([(key, tokens)])
            except OutOfPages:
                if not self.scheduler.held:
                    raise
                self.scheduler.make_room()
