"""How requests end: where their answers stop, what is left of them then, and what their callers are told.

Who gets a next token is said in stepping.py; ends that a caller wants (`stop`, `abort`) come through the engine.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.cache.pins import pin
from hybridkv.cache.tails import keep_end
from hybridkv.engine.reuse_report import finish_report
from hybridkv.engine.stats import stats_of
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.request import Request

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine


@dataclass(frozen=True)
class Update:
    """What a step gave one request."""

    request: Request
    token: int | None
    text: str


def see(request: Request, token: int) -> Update:
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


def limit(engine: Engine, request: Request) -> int:
    """Tokens, prompt and answer, at which the request ends."""
    room, most = longest(engine, request), request.params.max_tokens
    return room if most is None else min(request.prompt_tokens + most, room)


def longest(engine: Engine, request: Request) -> int:
    """Tokens of the context, or those that the pools hold if nothing is evicted."""
    evicts = (
        request.evictions or request.evicting is not None or (request.eviction is not None and request.eviction.bounded)
    )
    return engine.manager.max_tokens if evicts else engine.tokens_alone


def end_full(engine: Engine, request: Request, problem: Exception) -> list[Update]:
    """End a request for which the pools are too small, with what it has."""
    if not request.answer_tokens:
        request.error = f"the pools are too small for this prompt: {problem}"
    request.finish_reason = "length" if request.answer_tokens else "error"
    updates = [Update(request, None, "")]
    finish_done(engine, updates)
    return updates


def end_failed(engine: Engine) -> list[Update]:
    """End the requests whose evictions were found to have failed."""
    updates = [Update(request, None, "") for request in engine.scheduler.failed]
    if updates:
        finish_done(engine, updates)
    return updates


def end_stuck(engine: Engine, problem: RequestError) -> list[Update]:
    """End the requests that cannot go on, so that the others can."""
    stuck = [request for request in engine.scheduler.running if not engine.manager.can_continue(request.key)]
    if not stuck:
        raise problem
    for request in stuck:
        request.error = str(problem)
        request.finish_reason = "error"
    updates = [Update(request, None, "") for request in stuck]
    finish_done(engine, updates)
    return updates


def finish_done(engine: Engine, updates: list[Update]) -> None:
    """End the requests that have a reason to, with the rest of their texts; siblings that wait for them end, too."""
    for i, update in enumerate(list(updates)):
        if update.request.finish_reason is not None:
            updates[i] = Update(update.request, update.token, update.text + _last_text(update.request))
            updates += [Update(sibling, None, "") for sibling in update.request.forming]
            finish(engine, update.request)
    if engine.idle:
        engine.manager.check_counts()


def finish(engine: Engine, request: Request) -> None:
    """A request that has a reason to end does: its stats are made, and others may use what it has read."""
    if request.finish_reason != "error":
        engine.scheduler.settle(request)
    for sibling in request.forming:
        sibling.error, sibling.finish_reason = request.error, request.finish_reason
        finish(engine, sibling)
    request.stats = stats_of(request, engine.manager, engine.schema)
    if engine.manager.reuse is not None and request.reuse:
        finish_report(request, min(engine.manager.reuse.written(request.key), request.prompt_tokens))
        if request.pins and request.finish_reason in ("stop", "length"):
            prompt = np.array(request.tokens[: request.prompt_tokens], np.int32)
            with suppress(HybridKVError):  # another one was pinned meanwhile: there is no room for both
                request.pinned = pin(engine.manager, request.salt, prompt)
        if request.finish_reason in ("stop", "length") and not request.hold and request.params.n == 1:
            keep_end(engine.manager.reuse, request.key, request.tokens, engine.pipeline.ended(request))
    engine.scheduler.finish(request)
    request.prefix = None  # it has all of its own now; a chain of them would grow
    engine.pipeline.forget_finished()


def _last_text(request: Request) -> str:
    """What was held back of a finished answer's text."""
    try:
        return request.text.finish()
    except Exception as problem:
        request.error, request.finish_reason = request.error or f"the tokens have no text: {problem}", "error"
        return ""
