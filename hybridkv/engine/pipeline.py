"""Pipeline: steps that are launched before the results of the one before them are known.

    host     prepare n+1 | launch n+1 | wait for tokens n, give them out | prepare n+2 | launch n+2 | ...
    device   ... step n ..............| step n+1 ......................................| step n+2 ...

While a decode step runs, the next one is *prepared*: its pages are reserved and its index is sent. Where it can go on
whatever the tokens are, it is also *launched*: its input tokens are on the device already. So is a step with prompts.
A step that was launched has advanced state, so its requests are in doubt until its results have been given out
(`in_doubt`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from hybridkv.cache.step import upload
from hybridkv.engine.prompt_logprobs import prompt_parts, score_prompts
from hybridkv.engine.runner import Runner, StepInputs
from hybridkv.engine.sampler import PromptScores, SampledTokens, sample
from hybridkv.engine.sampling_graphs import SamplingGraphs
from hybridkv.engine.scheduler import Batch, Scheduler
from hybridkv.engine.workspace import prompt_rows_at_once
from hybridkv.request import Request

SURE = 0.75  # of what a step is to take on the device: it takes that long at least
SMOOTH = 0.2  # of the last launch in the mean


@dataclass
class InFlightStep:
    """A step that the device has been given, and the tokens it will bring."""

    batch: Batch
    sampled: SampledTokens | None = None  # None: it is being launched

    @property
    def live(self) -> list[tuple[Request, int]]:
        """Requests that have not ended since it was launched, with their new tokens."""
        return [(r, n) for r, n in zip(self.batch.requests, self.batch.counts, strict=True) if not r.finished]

    @property
    def in_vain(self) -> bool:
        """Whether all its requests have ended."""
        return all(request.finished for request in self.batch.requests)


class Pipeline:
    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.in_flight: InFlightStep | None = None  # whose results are given out next
        self.ahead: InFlightStep | None = None  # launched behind it
        self.prepared: Batch | None = None  # the step after it, if all goes on as it is
        self.on_launch: Callable[[int], None] | None = None  # told how many tokens each step runs
        self.began_at = 0.0  # when the device has begun the step in flight, about
        self.launch_s = 0.0  # what the host takes to launch a step, smoothed
        self.draw = None if runner.graphs is None else SamplingGraphs(runner.graphs)

    def next_step(self) -> InFlightStep | None:
        """The step whose results are due: the one in flight, or a new one; None: there is nothing to do."""
        if self.in_flight is not None and not self.idle:
            return self.in_flight
        self.in_flight = None
        prepared, self.prepared = self.prepared, None
        batch = self.scheduler.schedule(prepared)
        if batch is not None:
            self.in_flight = InFlightStep(batch)
            self._launch(self.in_flight)
        return self.in_flight

    def prepare_next(self) -> None:
        """Have the step after the one in flight ready, if that only decodes. None of its requests has ended."""
        step = self.in_flight
        if step is not None and step.sampled is not None and len(step.sampled.requests) <= len(step.batch.requests):
            self.prepared = self.scheduler.prepare_next(step.batch, step.sampled.tokens)

    def launch_ahead(self) -> None:
        """Start the next step before the tokens of the one in flight are known here: the prepared one, or one with
        prompts.

        The launch is wasted for requests that finish on the pending token. Left out are those that reach their limit
        with it, and those for which it must be seen first (`Request.must_see`).
        """
        scheduler, batch = self.scheduler, self.prepared
        if (
            batch is None
            or scheduler.may_admit
            or len(scheduler.running) > len(batch.requests)
            or any(len(r.tokens) + 1 >= r.limit or r.must_see for r in batch.requests)
        ):
            batch = scheduler.schedule_ahead()
        if batch is not None:
            self.prepared = None
            self.ahead = InFlightStep(batch)
            self._launch(self.ahead)

    def advance(self) -> None:
        """The results of the step in flight have been given out."""
        self.in_flight, self.ahead = self.ahead, None
        self.began_at = time.perf_counter()

    def slack(self) -> float:
        """Seconds that the caller may wait before the next step is launched, and the device has none to wait for. A
        request that comes until then is in that step, and not in the one after it.
        """
        step = self.in_flight
        if step is None or step.in_vain or self.ahead is not None:
            return 0.0
        taken = self.scheduler.predicted(step.batch)
        if taken is None:
            return 0.0
        return max(0.0, self.began_at + SURE * taken - 2 * self.launch_s - time.perf_counter())

    def ended(self, request: Request) -> Callable[[], bool] | None:
        """Waits for the step in flight, and says whether it gave the request numbers; None: it is in none."""
        sampled = self.in_flight.sampled if self.in_flight is not None else None
        return partial(sampled.went_well, request) if sampled is not None and request in sampled.requests else None

    @property
    def idle(self) -> bool:
        """Whether no step is in flight that somebody waits for."""
        return self.in_flight is None or self.in_flight.in_vain

    def forget_finished(self) -> None:
        """Drop what was made for requests that have ended."""
        if self.prepared is not None and any(request.finished for request in self.prepared.requests):
            self.prepared = None
        if self.in_flight is not None and self.in_flight.in_vain:
            self.in_flight = None

    def in_doubt(self) -> list[Request]:
        """Requests whose state may be ahead of their tokens."""
        steps = [step for step in (self.in_flight, self.ahead) if step is not None]
        live = [request for step in steps for request, _ in step.live]
        return list(dict.fromkeys(each for request in live for each in (request, *request.forming)))

    def clear(self) -> None:
        """Forget all steps; the requests in doubt must have ended."""
        self.prepared = None
        self.ahead = None
        self.in_flight = None

    def _launch(self, step: InFlightStep) -> None:
        """Run a step. From then on its requests have a token more that only the device knows."""
        begin = time.perf_counter()
        self._run(step)
        now = time.perf_counter()
        self.launch_s += (now - begin - self.launch_s) * SMOOTH
        if step is not self.ahead:
            self.began_at = now
        assert step.sampled is not None
        for request in step.sampled.requests:
            request.unseen += 1
        if self.on_launch is not None:
            self.on_launch(sum(step.batch.counts))

    def _run(self, step: InFlightStep) -> None:
        batch = step.batch
        parts = prompt_parts(batch)
        if not parts:
            step.sampled = self._sample(batch, self.runner.forward(self._inputs(batch)))
            return
        last = [batch.last_tokens[i] for i in batch.sampled]
        rows = sorted({*last, *(row for part in parts for row in part.rows)})
        place = {row: i for i, row in enumerate(rows)}
        hidden, model = self.runner.hidden(self._inputs(batch, rows)), self.runner.model
        at_once = prompt_rows_at_once(self.scheduler.manager.slots, model.config.vocab)
        scores = score_prompts(parts, hidden, [[place[r] for r in part.rows] for part in parts], model.logits, at_once)
        wanted = upload([np.array([place[row] for row in last], np.int64)], hidden.device)
        step.sampled = self._sample(batch, model.logits(hidden.index_select(0, wanted)), prompts=scores)

    def _sample(self, batch: Batch, logits: Tensor, prompts: Sequence[PromptScores] = ()) -> SampledTokens:
        """Tokens from logits [S, vocab]. Where a prompt has been read, those of all its siblings from the same row."""
        first = [batch.requests[i] for i in batch.sampled]
        chosen = [(each, row) for row, request in enumerate(first) for each in (request, *request.forming)]
        if len(chosen) == len(first):
            return sample(logits, first, prompts=prompts, draw=self.draw)
        at_once = self.scheduler.manager.slots  # what memory was set aside for
        return sample(logits, [r for r, _ in chosen], [row for _, row in chosen], prompts, at_once, self.draw)

    def _inputs(self, batch: Batch, rows: list[int] | None = None) -> StepInputs:
        """`rows`: whose logits are wanted; None: the last one of each request that gets a token."""
        now = time.perf_counter()
        for request in batch.requests:
            request.started_at = request.started_at or now
        if batch.tokens is not None:
            return self.runner.next_inputs(batch.tokens, batch.step)
        parts, sources = [], []
        place = self._places()
        for request, first, n, last in zip(batch.requests, batch.positions, batch.counts, batch.last_tokens):
            part = request.tokens[first : first + n]
            if len(part) < n:  # its last token is on the device alone
                part = [*part, 0]
                sources.append((last, place[request]))
            parts.append(part)
        if rows is None:
            rows = [batch.last_tokens[i] for i in batch.sampled]
        before = self.in_flight.sampled.tokens if sources and self.in_flight and self.in_flight.sampled else None
        return self.runner.inputs(parts, rows, batch.step, before, sources)

    def _places(self) -> dict[Request, int]:
        """Where the token of each request is among those that the step in flight has sampled."""
        sampled = self.in_flight.sampled if self.in_flight is not None else None
        return {} if sampled is None else {request: i for i, request in enumerate(sampled.requests)}
