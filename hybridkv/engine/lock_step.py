"""LockStepEngine: the same engine on every rank of a model, each step after the same events.

Rank 0 takes requests and tells the others what came: adds, aborts, stops. Every rank applies these in order and
schedules by itself. Nothing that decides what runs may follow from a clock, from free memory or from an error of one
rank. Before each forward pass the ranks compare a digest of what they are about to run; a difference ends the group.
On GPUs steps are captured (rank_graphs.py) and launched ahead as on one: all of this is done while a step runs.

Sampling: plain greedy rows need the best token of each rank's part of the vocabulary, 16 bytes a row. Rows that sample,
or are adjusted, are gathered on rank 0 and drawn there; all ranks get the tokens. No host waits for it.

A rank that ends, hangs or raises ends the group: requests end with an error, and the model has to be opened again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.config import SamplingParams
from hybridkv.engine.agreement import RanksAgree
from hybridkv.engine.engine import INHERIT, Update
from hybridkv.engine.pipeline import InFlightStep, Pipeline
from hybridkv.engine.rank_calls import (
    NOT_OVER_RANKS,
    eviction_of_words,
    eviction_words,
    params_of_words,
    params_words,
    take_words,
)
from hybridkv.engine.rank_graphs import WithLimit, capture_together, check_ranks_with, drop_graphs
from hybridkv.engine.rank_moves import RankMoves
from hybridkv.engine.rank_sessions import WholeCache
from hybridkv.engine.runner import Runner
from hybridkv.engine.sampler import FAILED_THERE, PromptScores, SampledTokens, _adjusts, _upload, host, sample
from hybridkv.engine.scheduler import Batch, Scheduler
from hybridkv.errors import RequestError
from hybridkv.eviction import Evictor
from hybridkv.eviction.over_ranks import OverRanks
from hybridkv.kernels.best_parts import best_part, join_parts
from hybridkv.models.decoder import Model
from hybridkv.parallel.events import Channel, Event
from hybridkv.parallel.group import Group, GroupError
from hybridkv.parallel.layers import ShardedDecoder, ShardedV4
from hybridkv.request import Request
from hybridkv.text.tokenizer import Tokenizer

DIGEST = 32  # bytes
SEEN = 5.0  # seconds that all ranks have to see that they part


class LockStepPipeline(Pipeline):
    """Steps that all ranks agree on before they run them, and whose tokens all ranks get."""

    def __init__(self, runner: Runner, scheduler: Scheduler, group: Group) -> None:
        super().__init__(runner, scheduler)
        model = runner.model
        assert isinstance(model, ShardedDecoder | ShardedV4) and model.parted
        self.group, self.vocabulary, self.vocab = group, model.vocabulary, model.config.vocab
        self.steps = 0
        self.check: Callable[[], None] = lambda: None  # raises if a rank has ended
        agreed = scheduler.agreed
        assert isinstance(agreed, RanksAgree)
        self.agreed = agreed

    def _run(self, step: InFlightStep) -> None:
        longest, graphs = self.agree(step.batch), self.runner.graphs
        if graphs is None:
            super()._run(step)
            return
        graphs.longest = longest
        try:
            super()._run(step)
        finally:
            graphs.longest = self.scheduler.manager.max_tokens  # what runs outside of steps has not been agreed on

    def agree(self, batch: Batch) -> int:
        """Entries of the longest stream of all ranks. GroupError if another rank is about to run something else."""
        self.steps += 1
        plan = self.plan_of(batch)
        own = hashlib.sha256(json.dumps(plan).encode()).digest()
        said = bytearray(own + batch.step.max_entries.to_bytes(8, "little"))
        found = [bytes(each) for each in self.group.all_gather(torch.frombuffer(said, dtype=torch.uint8)).tolist()]
        other = [rank for rank, each in enumerate(found) if each[:DIGEST] != own]
        if other:
            print(f"hybridkv: rank {self.group.rank} was about to run {plan}", file=sys.stderr, flush=True)
            with contextlib.suppress(GroupError):  # a rank that leaves at once takes what the others have not read yet
                self.group.meet("parted", limit=SEEN)
            raise GroupError(f"rank {self.group.rank}: ranks {other} are about to run another step; see their plans")
        return max(int.from_bytes(each[DIGEST:], "little") for each in found)

    def plan_of(self, batch: Batch) -> list[Any]:
        """What must be the same on every rank."""
        shape = batch.step.shape
        graph = [batch.step.rows, None if shape is None else [shape.tokens, shape.decodes, shape.chunks]]
        numbers = [request.order for request in batch.requests]
        # where heads share a budget the ranks' pages differ, and the fullest rank decides (agreement.py)
        free = None if self.agreed.uneven else self.scheduler.manager.free_pages()
        slots = [int(slot) for slot in batch.step.host.slots[: len(numbers)]]
        counts, positions = [int(n) for n in batch.counts], [int(at) for at in batch.positions]
        return [self.steps, numbers, counts, positions, slots, free, graph]

    @torch.inference_mode()
    def _sample(self, batch: Batch, logits: Tensor, prompts: Sequence[PromptScores] = ()) -> SampledTokens:
        first = [batch.requests[i] for i in batch.sampled]
        chosen = [(each, row) for row, request in enumerate(first) for each in (request, *request.forming)]
        requests, rows = [request for request, _ in chosen], [row for _, row in chosen]
        if logits.shape[1] == self.vocab:  # gathered already, for logprobs of a prompt
            logits = logits[:, slice(*self.vocabulary.span)]
        found = self.best(logits)
        if len(rows) > len(first):  # siblings share a row
            found = found.index_select(1, _upload(rows, torch.int64, found.device))
        sampled = SampledTokens(found, requests, found, prompts=list(prompts))
        some = [i for i, request in enumerate(requests) if not plainly_greedy(request)]
        if some:
            self.draw_some(logits, rows, some, sampled)
        sampled.found = host(found)
        if found.is_cuda:
            done = torch.cuda.current_stream(found.device).record_event()
            sampled.ready = WithLimit(done, self.group, self.check)
        return sampled

    def best(self, logits: Tensor) -> Tensor:
        """Own logits [S, v] -> [2, S] int64 beside them: the best tokens of all ranks, and 1 where a row is broken."""
        return join_parts(self.group.all_gather(best_part(logits, self.vocabulary.span[0])))

    def draw_some(self, logits: Tensor, rows: Sequence[int], some: list[int], sampled: SampledTokens) -> None:
        """Write the tokens of the requests `some`, which rank 0 draws, into `sampled`."""
        wanted = sorted({rows[i] for i in some})
        place = {row: at for at, row in enumerate(wanted)}
        sizes = self.vocabulary.sizes
        device = logits.device
        own = logits.index_select(0, _upload(wanted, torch.int64, device))
        parts = self.group.gather(torch.nn.functional.pad(own, (0, max(sizes) - own.shape[1])))
        drawn = torch.zeros((2, len(some)), dtype=torch.int64, device=device)
        if parts is not None:
            whole = torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)
            requests = [sampled.requests[i] for i in some]
            made = sample(whole, requests, [place[rows[i]] for i in some], at_once=self.scheduler.manager.slots)
            drawn.copy_(made.drawn)
            sampled.logprobs = [(some[i], row) for i, row in made.logprobs]
            sampled.failed = {some[i]: said for i, said in made.failed.items()}
            if made.failed:
                drawn[1].index_fill_(0, _upload(list(made.failed), torch.int64, device), FAILED_THERE)
        self.group.broadcast(drawn)
        sampled.drawn.index_copy_(1, _upload(some, torch.int64, device), drawn)


def plainly_greedy(request: Request) -> bool:
    """Whether the largest logit is the token, and nothing else is asked."""
    plain = not request.params.temperature and not _adjusts(request) and request.params.logprobs is None
    return plain and request.following is None


class LockStepEngine(RankMoves):
    """An Engine of one rank. On rank 0 it is used like any other; the others `follow` it.

    `on_failure` is told on rank 0, once, that the group has ended.
    """

    def __init__(
        self,
        model: Model,
        manager: KVCacheManager,
        tokenizer: Tokenizer | None,
        step_tokens: int,
        eos_ids: frozenset[int],
        evictor: Evictor | None,
        group: Group,
        whole: WholeCache | None = None,  # None: of an engine that neither evicts nor saves
    ) -> None:
        assert isinstance(model, ShardedDecoder | ShardedV4)
        ranks = OverRanks(group, 1 if whole is None else whole.counts.kv_heads)
        if evictor is not None:
            assert whole is not None
            evictor = replace(evictor, deferred=False, ranks=ranks)
        super().__init__(replace(model, parted=True), manager, tokenizer, step_tokens, eos_ids, evictor)
        self.group, self.channel, self.vocabulary = group, Channel(group), model.vocabulary
        self.scheduler.agreed = self.agreed = RanksAgree(group, ranks.parts)
        self.whole = whole
        capture_together(self, group)
        self.runner.logits = model.own_logits
        self.pipeline = LockStepPipeline(self.runner, self.scheduler, group)
        self.on_failure: Callable[[BaseException], None] = lambda problem: None
        self.failure: GroupError | None = None
        self._events: list[Event] = []  # since the last step
        self._known: weakref.WeakValueDictionary[int, Request] = weakref.WeakValueDictionary()
        self._to_hold: dict[int, Request] = {}  # not on rank 0, where their callers have them
        self._scores: dict[int, list[Tensor]] = {}  # of texts that were read again
        self._there: set[int] = set()  # rank 0: numbers of what the others hold so
        self._gone: deque[int] = deque()  # those that no caller has any more

    # ---- rank 0

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        hold: bool = False,
        after: Request | None = None,
        eviction: Any = INHERIT,
        prefix: Request | None = None,
        cache: bool | str = True,
        salt: bytes = b"",
        marks: Sequence[tuple[int, str]] = (),
    ) -> Request:
        """As `Engine.add`. Refused: policies of one's own."""
        self._check_alive()
        params = params or SamplingParams()
        if prefix is not None:
            self._check_there(prefix)
        words = eviction_words(self.resolve_eviction(eviction))
        request = super().add(tokens, params, hold, after, eviction, prefix, cache, salt, marks)
        self._may_share(request.eviction)
        self._known[request.order] = request
        if hold:
            self._holding(request)
        if after is not None:
            self._there.discard(after.order)
        for sibling in request.siblings:
            self._known[sibling.order] = sibling
        self._events.append(
            {
                "event": "add",
                "number": request.order,
                "tokens": list(request.tokens),
                **params_words(request),
                "hold": hold,
                "after": None if after is None else after.order,
                "prefix": None if prefix is None else prefix.order,
                "eviction": words,
            }
        )
        return request

    def abort(self, request: Request) -> None:
        if not self.calls.active and self.failure is None:
            self._events.append({"event": "abort", "number": request.order})
            self._there.discard(request.order)
        super().abort(request)

    def stop(self, request: Request) -> None:
        if not self.calls.active and self.failure is None:
            self._events.append({"event": "stop", "number": request.order})
        super().stop(request)

    def let_go(self, request: Request) -> None:
        if not request.finished and self.failure is None:
            self._events.append({"event": "let go", "number": request.order})
            self._there.discard(request.order)
        super().let_go(request)

    def step(self) -> list[Update]:
        return self._together("step", super().step)

    def drain(self) -> list[Update]:
        return self._together("drain", super().drain)

    def _together(self, do: str, work: Callable[[], list[Update]]) -> list[Update]:
        """The same on every rank. Whatever is raised ends the group."""
        self._check_alive()
        self.calls.check_owner()
        events = self._news()
        try:
            with self.channel.telling(do, events):
                return work()
        except BaseException as problem:
            self.fail(problem)

    def fail(self, problem: BaseException) -> NoReturn:
        """End the group: what it holds is not to be trusted any more."""
        self.failure = GroupError(f"a worker ended, and the model with it: {problem}; open it again")
        self.channel.close()
        self.on_failure(problem)
        raise self.failure from problem

    def watch(self, check: Callable[[], None]) -> None:
        """`check` raises if a rank has ended: asked while the device is waited for."""
        assert isinstance(self.pipeline, LockStepPipeline)
        self.pipeline.check = check
        check_ranks_with(self, check)

    def drop_graphs(self) -> None:
        """Before the group is closed."""
        drop_graphs(self)

    def _check_alive(self) -> None:
        if self.failure is None and self.channel.problem is not None:
            self.fail(self.channel.problem)
        if self.failure is not None:
            raise self.failure

    def evict_one(self, request: Request) -> Exception | SystemExit | None:
        problem = super().evict_one(request)
        if isinstance(problem, GroupError):  # no request's own
            raise problem
        return problem

    # ---- the others

    def follow(self) -> None:
        """Do what rank 0 does, until it ends."""
        while True:
            do, events = self.channel.receive()
            for event in events:
                self._apply(event)
            if do == "end":
                return
            if do == "step":
                super().step()
            elif do == "drain":
                super().drain()

    def _apply(self, event: Event) -> None:
        if event["event"] == "add":
            after = event["after"]
            self.numbers = itertools.count(event["number"])
            continued = None if after is None else self._known.get(after)
            eviction = eviction_of_words(event["eviction"])
            marks = [(at, kind) for at, kind in event["marks"]]
            params = params_of_words(event)
            prefix = None if event["prefix"] is None else self._to_hold[event["prefix"]]
            made = super().add(event["tokens"], params, event["hold"], continued, eviction, prefix, marks=marks)
            self._may_share(made.eviction)
            for request in (made, *made.siblings):
                self._known[request.order] = request
                take_words(request, event)
            self._to_hold.pop(after, None)  # whose cache it has taken over
            if event["hold"]:
                self._holding(made)
            return
        ways = {"abort": super().abort, "stop": super().stop, "let go": super().let_go}
        if event["event"] not in ways:
            self._do_call(event)
            return
        request = self._known.get(event["number"])
        if event["event"] != "stop":
            self._to_hold.pop(event["number"], None)
            self._scores.pop(event["number"], None)
        if request is not None:
            ways[event["event"]](request)

    # ---- what is not there yet

    def changing(self) -> NoReturn:
        raise RequestError(NOT_OVER_RANKS.format(what="a change of held caches"))
