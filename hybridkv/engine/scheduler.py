"""Scheduler: which requests run in the next step, and how many tokens of each.

Every running request that has one pending token decodes. The rest of the step's token budget goes to prompt chunks,
oldest request first, then to requests that wait, in order of arrival, as long as their pages are free. A prompt that
will be cut needs a ring for its last queries; while all are taken, it waits where it is. When pages run out, caches
held for a next turn go first, then the youngest running request is preempted: its pages are released and it waits at
the front to be computed again. The oldest request is never preempted, so work always ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridkv.cache import ForwardStep, KVCacheManager
from hybridkv.config import CHUNK_QUANTUM
from hybridkv.errors import HybridKVError, OutOfPages
from hybridkv.request import Request, Status

BESIDE_DECODING = 512  # tokens of a step in which others decode


@dataclass(frozen=True)
class Batch:
    """One step: requests with one token first. `step` has every page reserved."""

    requests: list[Request]
    counts: list[int]
    num_computed: list[int]  # position of each request's first token in the step
    step: ForwardStep
    tokens: Tensor | None = None  # [B] one of each request, where they are on the device already

    @property
    def plan(self) -> list[tuple[object, int]]:
        return [(r.key, n) for r, n in zip(self.requests, self.counts, strict=True)]

    @property
    def sampled(self) -> list[int]:
        """Indices of requests whose last token is in this step: they get a new one."""
        if self.tokens is not None:  # which are the last ones, known here or not
            return list(range(len(self.requests)))
        ends = [b + n for b, n in zip(self.num_computed, self.counts, strict=True)]
        return [i for i, r in enumerate(self.requests) if ends[i] == len(r.tokens)]


class Scheduler:
    def __init__(
        self,
        manager: KVCacheManager,
        step_tokens: int,
        most_held: int | None = None,
        graph_rows: Callable[[int], int] | None = None,  # rows of the graph that decodes so many requests
        needs_query_buffer: Callable[[Request], bool] = lambda request: (
            False
        ),  # whether its last queries are to be kept
    ) -> None:
        self.manager, self.step_tokens, self.graph_rows = manager, step_tokens, graph_rows
        self.needs_query_buffer = needs_query_buffer
        self.most_held = most_held  # tokens a stream of a request holds at the most; None: all of them
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.held: list[Request] = []  # finished, cache kept; longest unused first
        self.ahead: Batch | None = None  # the next step if all goes on as it is, prepared while this one runs

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def adopt(self, request: Request) -> None:
        """A request that takes over a held cache is resident already."""
        request.status = Status.RUNNING
        self.running.append(request)

    def schedule(self) -> Batch | None:
        while True:
            self._admit()
            plan = self._plan()
            if not plan and self.running:  # nobody here can give a ring back
                raise HybridKVError(
                    f"all {self.manager.query_buffers.count} query buffers are taken by requests outside the engine; "
                    "release a fork or a restored snapshot"
                )
            if not plan:
                return None
            begins = [self.manager.position(r.key) for r, _ in plan]
            ahead, self.ahead = self.ahead, None
            if ahead is not None and (ahead.requests, ahead.counts, ahead.num_computed) == (
                *map(list, zip(*plan)),
                begins,
            ):
                return ahead
            try:
                step = self.reserve([(r.key, n) for r, n in plan])
            except OutOfPages:
                if not self.make_room():
                    raise
                continue
            return Batch([r for r, _ in plan], [n for _, n in plan], begins, step)

    def prepare_ahead(self, batch: Batch, tokens: Tensor) -> None:
        """Have the next step ready if `batch` was one of decoding requests alone, which got `tokens` [B].

        Whoever ends or joins meanwhile makes it another step: then this one is forgotten, and the pages it took are
        there when their owners need them.
        """
        if any(n > 1 for n in batch.counts) or len(batch.sampled) < len(batch.requests):
            return
        begins = [self.manager.position(r.key) for r in batch.requests]
        if max(begins) >= self.manager.max_tokens:
            return
        try:
            step = self.reserve([(r.key, 1) for r in batch.requests])
        except OutOfPages:
            return
        self.ahead = Batch(batch.requests, batch.counts, begins, step, tokens)

    def reserve(self, plan: Sequence[tuple[Hashable, int]]) -> ForwardStep:
        """The pages of a step. One that only decodes gets the rows of the graph that it replays."""
        rows = None
        if self.graph_rows is not None and all(tokens == 1 for _, tokens in plan):
            rows = self.graph_rows(len(plan))
        return self.manager.prepare_forward(plan, rows)

    def held_tokens(self, tokens: int) -> int:
        return tokens if self.most_held is None else min(tokens, self.most_held)

    def pending(self, request: Request) -> int:
        return len(request.tokens) - self.manager.position(request.key)

    def _plan(self) -> list[tuple[Request, int]]:
        pending = {r: self.pending(r) for r in self.running}
        plan = [(r, 1) for r, n in pending.items() if n == 1 and self.give_query_buffer(r)]
        # who decodes waits for no more than a small part of a prompt, and never keeps prompts from going on
        budget = max(min(self.step_tokens, BESIDE_DECODING) - len(plan), CHUNK_QUANTUM) if plan else self.step_tokens
        for request, n in pending.items():
            if n > 1:
                position = self.manager.position(request.key)
                # a request that is computed again stops where entries were evicted the first time
                stop = min((p - position for p in request.evictions if p > position), default=n)
                if self.most_held is not None:  # a bounded request is cut at multiples of the step
                    stop = min(stop, self.step_tokens - position % self.step_tokens)
                chunk = self._chunk(position, min(n, stop), budget)
                if chunk and self.give_query_buffer(request):
                    plan.append((request, chunk))
                    budget -= chunk
        # one-token chunks of prompts join the decoding requests; in order of slots their state rows are mostly a view
        plan.sort(key=lambda item: (item[1] > 1, self.manager.slot_of[item[0].key] if item[1] == 1 else 0))
        return plan

    def give_query_buffer(self, request: Request) -> bool:
        """Whether the request can run: it has a ring, or needs none.

        Caches held for a next turn are dropped for theirs, longest unused first.
        """
        while self.needs_query_buffer(request) and not self.manager.take_query_buffer(request.key):
            if not self.held:
                return False
            self.release_held(self.held[0])
        return True

    @staticmethod
    def _chunk(position: int, pending: int, budget: int) -> int:
        """As much of a prompt as the budget allows; a cut falls on a multiple of the quantum."""
        if pending <= budget:
            return pending
        return max(0, (position + budget) // CHUNK_QUANTUM * CHUNK_QUANTUM - position)

    def _admit(self) -> None:
        """Move waiting requests in while a slot and the pages for all their known tokens, and one more, are free."""
        while self.waiting:
            request = self.waiting[0]
            spare = self._spare(request)
            if spare is None:
                return
            for held in spare:
                self.release_held(held)
            self.manager.admit_request(request.key)
            request.status = Status.RUNNING
            self.running.append(request)
            self.waiting.popleft()

    def _spare(self, request: Request) -> list[Request] | None:
        """Held caches to give up so that the request can enter, as few as will do; None if it must wait."""
        free, slots = self.manager.free_pages(), self.manager.free_slots
        need = self.manager.pages_needed(None, self.held_tokens(len(request.tokens) + 1))
        for other in self.running:  # they still need pages for tokens that are known already
            room = self.held_tokens(len(other.tokens) + 1) - self.manager.longest_stream(other.key)
            left = min(room, self.pending(other) + 1)
            for name, pages in self.manager.pages_needed(other.key, max(left, 0)).items():
                need[name] += pages
        given_up: list[Request] = []
        for held in [*self.held, None]:
            if slots and all(need[name] <= free[name] for name in need):
                return given_up
            if held is not None:
                given_up.append(held)
                slots += 1
                for name, pages in self.manager.returnable_pages(held.key).items():
                    free[name] += pages
        return None

    def make_room(self) -> bool:
        """Free the pages of whoever can best spare them. False: only the oldest request is left."""
        if self.held:
            self.release_held(self.held[0])
            return True
        if len(self.running) < 2:
            return False
        self.preempt(max(self.running, key=lambda r: r.order))
        return True

    def preempt(self, request: Request) -> None:
        """Release the cache; the tokens stay, and are computed again later."""
        self.ahead = None
        self.running.remove(request)
        self.manager.release_request(request.key)
        request.status = Status.WAITING
        request.preemptions, request.cached_tokens = request.preemptions + 1, 0
        self.waiting.appendleft(request)

    def finish(self, request: Request) -> None:
        """Take the request out of whatever queue it is in. Its cache is released, or held if it asked for that."""
        self.ahead = None
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            if request.hold and request.finish_reason != "error":
                self.held.append(request)
            else:
                self.manager.release_request(request.key)
        request.status = Status.FINISHED

    def release_held(self, request: Request) -> None:
        if request in self.held:
            self.held.remove(request)
            self.manager.release_request(request.key)
