"""Scheduler: which requests run in the next step, and how many tokens of each. Who is resident is admission.py's.

Every running request that has one pending token decodes. The rest of the step's token budget goes to prompt chunks:
an eighth to the oldest, the rest to the shortest, so that a long prompt neither stalls others nor starves.

A request whose eviction is under way on the device, or whose cache is on its way back from the host, is left out of
steps while others can run. It is waited for where nothing else is left to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from hybridkv.cache import ForwardStep, KVCacheManager
from hybridkv.cache.away import leave_columns
from hybridkv.config import CHUNK_QUANTUM
from hybridkv.engine.admission import Admission, DoesNotFit
from hybridkv.engine.graphs import DecodeGraphs
from hybridkv.engine.mixed_graphs import MixedGraphs
from hybridkv.engine.room import pending_tokens, until_eviction
from hybridkv.engine.step_cost import StepCost
from hybridkv.errors import HybridKVError, OutOfPages, OutOfPagesElsewhere, RequestError
from hybridkv.eviction import Evictor
from hybridkv.request import Request

Plan = list[tuple[Request, int]]  # (request, new tokens)
# A step is launched ahead without requests that must be seen first only if no more than one in so many are such: these
# then have a token in every second step.
FEW = 8
OLDEST = 8  # the oldest prompt has one in so many of a step's prompt tokens, and what shorter ones leave


@dataclass(frozen=True)
class Batch:
    """The requests of one step, in its order: those with one token first. `step` has every page reserved."""

    requests: list[Request]
    step: ForwardStep
    sampled: list[int]  # indices of the requests that get a next token: their last one is in this step
    tokens: Tensor | None = None  # [B] the input token of each request, where all of these are on the device already
    preemptions: list[int] | None = None  # of each request, where it was prepared: since then its pages are others

    @staticmethod
    def of(plan: Plan, step: ForwardStep) -> Batch:
        """The step of a plan."""
        requests, host = [request for request, _ in plan], step.host
        ends = (host.num_computed + host.num_scheduled)[host.real].tolist()
        sampled = [i for i, r in enumerate(requests) if ends[i] == len(r.tokens) + r.unseen]
        return Batch(requests, step, sampled)

    @cached_property
    def counts(self) -> list[int]:
        """New tokens of each request."""
        return self.step.host.num_scheduled[self.step.host.real].tolist()

    @cached_property
    def positions(self) -> list[int]:
        """Tokens that each request had seen before."""
        return self.step.host.num_computed[self.step.host.real].tolist()

    @cached_property
    def last_tokens(self) -> list[int]:
        """The last token of each request, among those of the step."""
        return (self.step.host.query_start_loc[1:][self.step.host.real] - 1).tolist()

    def is_for(self, plan: Plan, manager: KVCacheManager) -> bool:
        """Whether this decode step, prepared earlier, is the one that the plan asks for."""
        if len(plan) != len(self.requests) or self.preemptions != [r.preemptions for r in self.requests]:
            return False
        return all(
            request is mine and n == 1 and manager.position(request.key) == position
            for (request, n), mine, position in zip(plan, self.requests, self.positions)
        )


class Scheduler(Admission):
    def __init__(
        self,
        manager: KVCacheManager,
        step_tokens: int,
        evictor: Evictor | None = None,
        graphs: DecodeGraphs | None = None,  # what decode steps are replayed in
        mixed: MixedGraphs | None = None,  # what steps with prompts are replayed in
    ) -> None:
        super().__init__(manager, step_tokens, evictor)
        self.graphs, self.mixed = graphs, mixed
        self.cost = mixed.cost if mixed is not None else StepCost(0)

    # ---- the next step

    def schedule(self, prepared: Batch | None = None) -> Batch | None:
        """The next step, with its pages; None: there is nothing to do, or a request has failed and is to end first.
        `prepared` is used if it is the right one.

        A request that is preempted here is not admitted again here, so every round ends with a step or leaves one
        request fewer: this ends whatever was miscounted.
        """
        preempted: set[Request] = set()
        while True:
            self._admit(preempted)
            plan = self._plan()
            if not plan and (self._settle_some() or self.manager.await_arrivals()):
                continue
            if self.failed:
                return None
            if not plan:
                self._check_not_stuck()
                return None
            if prepared is not None and prepared.is_for(plan, self.manager):
                self.manager.check_reach(prepared.step.host)
                return prepared
            prepared = None
            try:
                self._reserve_ahead(plan)
                every_row = any(r.params.prompt_logprobs is not None for r, _ in plan)
                step = self.reserve([(request.key, n) for request, n in plan], every_row)
            except OutOfPages:
                if self._settle_some():
                    continue
                gone = self.make_room()
                if gone is None and (self._give_up_columns() or leave_columns(self.manager)):
                    continue
                if gone is None:
                    raise
                preempted.add(gone)
                continue
            return Batch.of(plan, step)

    def _give_up_columns(self) -> bool:
        """Whether pages can be had since running requests keep nothing for others: one that was read beside columns of
        the same tokens has pages of its own, and they were kept for its sake.
        """
        manager = self.manager
        if manager.reuse is None:
            return False
        before = manager.free_pages()
        for request in self.running:
            manager.reuse.let_go(request.key)
        return self.agreed.any(any(pages > before[name] for name, pages in manager.free_pages().items()))

    def schedule_ahead(self) -> Batch | None:
        """The step after the one in flight, whose tokens are not known yet: of all that goes on whatever they are.

        None: there is none, it needs room that is not free, or a request of it cannot go on, which `schedule` will say.
        """
        try:
            self._admit(set())
        except DoesNotFit:
            return None
        plan = self._plan(ahead=True)
        if not plan:
            return None
        try:
            self._reserve_ahead(plan)
            step = self.reserve([(request.key, n) for request, n in plan])
        except (OutOfPages, RequestError):
            return None
        return Batch.of(plan, step)

    def _reserve_ahead(self, plan: Plan) -> None:
        """The pages of what is read ahead when a prompt is evicted after this step."""
        for request, n in plan:
            if self.evictor is not None and (ahead := self.evictor.read_ahead(request, self.manager, n)):
                self._on_all_ranks(partial(self.manager.prepare_forward, [(request.key, n + ahead)]))

    def _on_all_ranks(self, reserve: Callable[[], ForwardStep]) -> ForwardStep:
        """What is reserved; OutOfPages where some rank has too few. What the others have taken stays for the step."""
        try:
            found = reserve()
        except OutOfPages:
            self.agreed.any(True)
            raise
        if self.agreed.any(False):
            raise OutOfPagesElsewhere()
        return found

    def reserve(self, plan: Sequence[tuple[Hashable, int]], every_row: bool = False) -> ForwardStep:
        """The pages of a step, which gets the shape of the graph that it is replayed in, if there is one.

        `every_row`: logits of more than the last token of a prompt are wanted, and no graph gives those.
        """
        return self._on_all_ranks(partial(self._reserve, plan, every_row))

    def _reserve(self, plan: Sequence[tuple[Hashable, int]], every_row: bool) -> ForwardStep:
        if all(tokens == 1 for _, tokens in plan):
            return self.manager.prepare_forward(plan, None if self.graphs is None else self.graphs.rows(len(plan)))
        shape = None
        if self.mixed is not None and not every_row:
            slots = [self.manager.slot_of[request] for request, _ in plan]
            shape = self.mixed.shape(slots, [tokens for _, tokens in plan])
        return self.manager.prepare_forward(plan, shape=shape)

    def prepare_next(self, batch: Batch, tokens: Tensor) -> Batch | None:
        """The step after `batch` if that was one of decoding requests alone, all of which got `tokens` [B].

        If the batch changes before it runs, it is dropped; its pages stay reserved for their requests.
        """
        if max(batch.counts) > 1 or len(batch.sampled) < len(batch.requests):
            return None
        if int(batch.step.host.num_computed.max()) + 1 >= self.manager.max_tokens:
            return None
        if any(request.evicting is not None for request in batch.requests):
            return None
        try:
            step = self.reserve([(request.key, 1) for request in batch.requests])
        except (OutOfPages, RequestError):  # `schedule` will say which
            return None
        return Batch(batch.requests, step, batch.sampled, tokens, [r.preemptions for r in batch.requests])

    def _plan(self, ahead: bool = False) -> Plan:
        """`ahead`: without requests that end with the token that is pending, or must be seen first."""
        running = [r for r in self.running if r.finish_reason is None and r.evicting is None]
        running = [r for r in running if self.manager.has_arrived(r.key)]
        if ahead:
            going = [r for r in running if not self._ends(r)]
            running = [r for r in going if not r.must_see]
            if FEW * (len(going) - len(running)) > len(going):
                return []
        pending = {request: pending_tokens(self, request) for request in running}
        plan = [(request, 1) for request, n in pending.items() if n == 1 and self.give_query_buffer(request)]
        prompts = [(request, n) for request, n in pending.items() if n > 1]
        if prompts:
            budget = self._prompt_tokens([request for request, _ in plan], prompts)
            most = len(prompts) if self.mixed is None else self.mixed.most_chunks(budget + len(plan))
            plan += self._chunks(prompts, budget, most)
        # one-token chunks of prompts join the decoding requests; in order of slots their state rows are mostly a view
        plan.sort(key=lambda item: (item[1] > 1, self.manager.slot_of[item[0].key] if item[1] == 1 else 0))
        return plan

    @staticmethod
    def _ends(request: Request) -> bool:
        return request.unseen > 0 and len(request.tokens) + request.unseen >= request.limit

    def _prompt_tokens(self, decoding: list[Request], prompts: Plan) -> int:
        """Tokens of these prompts in a step in which those requests decode."""
        if not decoding:
            return self.step_tokens
        held = self.manager.step_bytes([request.key for request in decoding])
        sizes = [] if self.mixed is None else self.mixed.sizes
        shortest = min(prompts, key=lambda item: item[1])[0]
        keys = (
            self.manager.longest(prompts[0][0].key) + (OLDEST - 1) * self.manager.longest(shortest.key)
        ) / OLDEST  # as `_chunks` has it
        if sizes and self.cost.seconds:  # then both count
            held, keys = self.agreed.most(held), self.agreed.most(math.ceil(keys))
        return self.cost.tokens_beside(len(decoding), held, sizes, self.step_tokens, keys) - len(decoding)

    def predicted(self, batch: Batch) -> float | None:
        """Seconds that a step takes on the device; None: not known."""
        if len(self.cost.seconds) < 2:
            return None
        parts = [(n, first) for n, first in zip(batch.counts, batch.positions) if n > 1]
        read = sum(n for n, _ in parts)
        keys = sum(n * (first + n / 2) for n, first in parts) / read if read else 0.0
        live = self.manager.slot_of
        decoding = [r.key for r, n in zip(batch.requests, batch.counts) if n == 1 and r.key in live]
        tokens = batch.step.shape.tokens if batch.step.shape is not None else sum(batch.counts)
        return self.cost.predicted(tokens, self.manager.step_bytes(decoding), keys)

    def _chunks(self, prompts: Plan, budget: int, most_prompts: int) -> Plan:
        """What is read of one prompt or more, [(request, pending tokens)], oldest first; of `most_prompts` at the most.

        A part of the budget is the oldest one's (OLDEST), the rest the shortest's; what these leave is the oldest's.
        """
        found: dict[Request, int] = {}

        def take(request: Request, tokens: int, most: int) -> int:
            position = self.manager.position(request.key)
            tokens = until_eviction(self, request, position, tokens)
            if self.manager.reuse is not None:
                tokens = self.manager.reuse.until_stop(request.key, position, tokens)
            chunk = self._chunk(position, tokens, most)
            if chunk and self.give_query_buffer(request):
                found[request] = chunk
            return found.get(request, 0)

        (oldest, tokens), *others = prompts
        own = take(oldest, tokens, max(budget // OLDEST, self.quantum) if others else budget)
        left = budget - own
        for request, n in sorted(others, key=lambda item: item[1]):
            left -= take(request, n, left) if len(found) < most_prompts else 0
        take(oldest, tokens, own + left)
        return list(found.items())

    @property
    def quantum(self) -> int:
        """Chunks end at multiples of it: of 1 where steps are graphs, which are filled to the last token. The products
        of these do not give the same bits however a prompt is cut.
        """
        return 1 if self.mixed is not None and self.mixed.sizes and not self.manager.exact else CHUNK_QUANTUM

    def _chunk(self, position: int, pending: int, budget: int) -> int:
        """As much of a prompt as the budget allows."""
        if pending <= budget:
            return pending
        return max(0, (position + budget) // self.quantum * self.quantum - position)

    def _check_not_stuck(self) -> None:
        """Whether there is really nothing to do, or HybridKVError: outsiders hold what requests wait for."""
        if self.running:
            raise HybridKVError(
                f"all {self.manager.query_buffers.count} query buffers are taken by requests outside the engine; "
                "release a fork or a restored snapshot"
            )
        if self.waiting:
            slots, free = self.manager.slots, self.manager.free_slots
            pages = {name: table.allocator for name, table in self.manager.tables.items()}
            held = ", ".join(f"{a.held} of {a.total} pages of pool '{name}'" for name, a in pages.items())
            if free == slots:
                pins = [] if self.manager.reuse is None else self.manager.reuse.pins
                raise DoesNotFit(self.waiting[0], sum(pin.tokens for pin in pins))
            raise HybridKVError(
                f"{len(self.waiting)} requests wait and none can run: {slots - free} of {slots} request slots"
                f"{' and ' + held if held else ''} are held by requests outside the engine (forks, restored snapshots, "
                "requests admitted by hand); release them"
            )
