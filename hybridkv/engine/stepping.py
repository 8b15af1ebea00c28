"""One step: a forward pass over all that can run, and what its results do to the requests in it.

Which requests run is the scheduler's, when steps are launched the pipeline's, how requests end ending.py's. What an
interrupt leaves behind is put right by the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridkv.engine.admission import DoesNotFit
from hybridkv.engine.ahead import evict_after_step
from hybridkv.engine.ending import Update, end_failed, end_full, end_stuck, finish_done
from hybridkv.engine.pipeline import InFlightStep
from hybridkv.errors import OutOfPages, RequestError
from hybridkv.request import Request

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine


def step(engine: Engine, launch_ahead: bool) -> list[Update]:
    """Give out the results of one forward pass, and prepare the next; `launch_ahead`: or launch it."""
    engine.scheduler.settle_ready()
    reuse = engine.manager.reuse
    if reuse is not None and engine.pipeline.idle:  # else the next step would be launched too late
        reuse.settle_late()
    try:
        step = engine.pipeline.next_step()
    except OutOfPages as problem:  # one request is left and fills the pools alone: it ends with what it has
        return end_full(engine, engine.scheduler.running[0], problem)
    except DoesNotFit as problem:
        return end_full(engine, problem.request, problem)
    except RequestError as problem:
        return end_stuck(engine, problem)
    if step is None:
        return end_failed(engine)
    live, evicting = step.live, engine.scheduler.evicting
    engine.manager.commit([(request.key, n) for request, n in live])
    if reuse is not None:
        for request, _ in live:
            reuse.stage(request.key, request.tokens)
    failed = _evict(engine, [request for request, _ in live])
    _fork(engine, step, failed)
    if not failed:
        if len(live) == len(step.batch.requests):
            engine.pipeline.prepare_next()
        if launch_ahead:
            engine.pipeline.launch_ahead()
    for request in evicting:  # the device was given the step after them: the tokens come later than their lists
        engine.scheduler.settle(request)
    failed += [request for request in engine.scheduler.failed if request not in failed]
    updates = [*_extend(engine, step, failed), *(Update(request, None, "") for request in failed)]
    if reuse is not None:
        reuse.publish([request.key for request, _ in live if request.finish_reason == "error"])
        reuse.settle_late()  # of requests that ended before this step did, which has been waited for
    engine.pipeline.advance()
    finish_done(engine, updates)
    return updates


def _evict(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    """Evict the requests that are due, or have the device do it. Returns those in which that failed; they end, and
    all others go on.
    """
    if engine.evictor is None:
        return []
    failed = []
    for request in requests:
        problem = engine.evict_one(request)
        if isinstance(problem, OutOfPages) and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(request)  # others run on its pages: what survives has no place beside them
        elif problem is not None:  # a policy of the user's, NaN scores, or no memory for them
            request.finish_reason, request.error = "error", f"eviction failed: {problem}"
            failed.append(request)
    return failed


def _fork(engine: Engine, step: InFlightStep, failed: list[Request]) -> None:
    """Where a prompt has been read, its other answers begin."""
    assert step.sampled is not None
    for request in step.sampled.requests:
        if request.first_token_at is None:  # before it is known: a step may be launched ahead
            request.limit = engine.limit(request)
        if request.siblings and request not in failed and not request.finished:
            engine.scheduler.fork(request)
            if request.finish_reason == "error":
                failed.append(request)


def _extend(engine: Engine, step: InFlightStep, failed: Sequence[Request]) -> list[Update]:
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
            if engine.manager.reuse is not None:
                engine.manager.reuse.discard(request.key)
            updates.append(Update(request, None, ""))
            continue
        if request.first_token_at is None:
            request.first_token_at = now
            if request.started_at is not None and request.source is None:  # a sibling has read nothing
                read = request.prompt_tokens - request.cached_tokens
                engine.manager.host.saw_reading(read, now - request.started_at)
        request.last_token_at = now
        request.source = None
        updates.append(engine.see(request, token))
    return updates


def evict_one(engine: Engine, request: Request) -> Exception | SystemExit | None:
    """Evict a request if it is due, or have the device do it. Returns why that failed."""
    try:
        evict_after_step(engine, request, wait=False)
        if request.evictions or request.evicting is not None:
            request.limit = engine.limit(request)
    except (Exception, SystemExit) as problem:
        return problem
    return None
