"""Held requests taken out of an engine, brought back, and doubled: what saving, loading and forking a conversation is.

A held request has finished and keeps its cache, so that a next turn goes on in it (`Engine.add(after=...)`). One
without a cache is right too: the next turn then computes its tokens again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.cache.frozen import fork_frozen
from hybridkv.cache.schema import ceil_div
from hybridkv.cache.session import ENDS, Session, about_cache, check_session
from hybridkv.cache.snapshot import restore_frozen, snapshot_request
from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.engine.room import pages_to_hold
from hybridkv.engine.stats import stats_of
from hybridkv.errors import HybridKVError, OutOfPages, RequestError
from hybridkv.eviction.turns import evict_turns as evict_turns_of
from hybridkv.request import Request, Status
from hybridkv.text.stream import TextStream

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine


def about(engine: Engine) -> dict[str, str]:
    """The engine's model and cache in words."""
    config = engine.runner.model.config
    sizes = {"layers": config.layers, "width": config.hidden, "vocabulary": config.vocab}
    words = engine.about | {"architecture": config.architecture} | {key: str(value) for key, value in sizes.items()}
    mode = {"mode": "exact"} if engine.manager.exact else {}
    return words | about_cache(engine.manager, engine.schema) | mode


def session_of(engine: Engine, request: Request | None, conversation: Mapping[str, Any], cache: bool = True) -> Session:
    """A copy on the host of a finished request, with its cache if that is held; the request stays as it is.

    `cache`: else it is left out, and its records of evictions stay.
    """
    manager = engine.manager
    files = manager.model_files()
    plain = Session(manager.model_fingerprint(), about(engine), conversation=dict(conversation), files=files)
    if request is None:
        return plain
    check_ended(request, "saved")
    snapshot = snapshot_request(manager, request.key) if cache and has_cache(engine, request) else None
    evicted = snapshot is not None or (not cache and request in engine.scheduler.held)
    return Session(
        plain.model,
        plain.about,
        list(request.tokens),
        request.prompt_tokens,
        str(request.finish_reason),
        request.text.text,
        request.text.stopped,
        dict(request.evictions) if evicted else {},
        snapshot,
        dict(conversation),
        request.policy if evicted else None,
        files=files,
    )


def restore_held(engine: Engine, session: Session) -> Request:
    """The session's request, finished, with its cache held where it has one. Older held caches make room."""
    manager, scheduler = engine.manager, engine.scheduler
    session = check_session(manager, session, about(engine))
    snapshot = session.snapshot
    tokens = engine.check_tokens(session.tokens)
    if session.evictions and engine.evictor is None:
        raise RequestError("the session's cache was evicted, and this model was opened without a budget")
    request = ended_request(engine, tokens, session.prompt_tokens, session.finish_reason, SamplingParams())
    request.text = TextStream.ended(session.text, session.stopped)
    if snapshot is None:
        return request
    request.evictions, request.policy = dict(session.evictions), session.policy
    need = {}
    for name, table in manager.tables.items():
        need[name] = int(np.sum([ceil_div(int(n), table.schema.entries_per_page) for n in snapshot.lengths[name]]))
    make_room(engine, need, sum(t.nbytes for t in snapshot.states.values()))
    restore_frozen(manager, snapshot, request.key)
    scheduler.held.append(request)  # last: an interrupt before this finds a cache without an owner, and releases it
    return request


def make_room(engine: Engine, need: dict[str, int], state_bytes: int) -> None:
    """Room for one more frozen cache, at the cost of those that were unused longest, or RequestError."""
    given_up = pages_to_hold(engine.scheduler, need)
    if given_up is None or not engine.scheduler.host_room(state_bytes):
        raise RequestError(_no_room(engine, need))
    for request in given_up:
        engine.scheduler.spare(request)


def fork_held(engine: Engine, request: Request) -> Request:
    """A second finished request with the same past, on the same pages. Where the first has no cache, it has none."""
    manager, scheduler = engine.manager, engine.scheduler
    check_ended(request, "forked")
    fork = ended_request(
        engine, list(request.tokens), request.prompt_tokens, str(request.finish_reason), request.params
    )
    fork.text = TextStream.ended(request.text.text, request.text.stopped)
    fork.stats = dict(request.stats)
    if not has_cache(engine, request):
        return fork
    if request.key not in manager.frozen and not _has_room_for_fork(manager, request):
        scheduler.freeze(request)  # two frozen caches need neither slots nor query buffers
        if request not in scheduler.held:
            return fork
    fork.evictions, fork.policy = dict(request.evictions), request.policy
    if request.key in manager.frozen:
        fork_frozen(manager, request.key, fork.key)
    else:
        manager.fork_request(request.key, fork.key)
    scheduler.held.append(fork)
    return fork


def _has_room_for_fork(manager: KVCacheManager, request: Request) -> bool:
    with_queries = manager.query_buffers.of[manager.slot_of[request.key]] >= 0
    return manager.free_slots > 0 and (not with_queries or manager.query_buffers.free > 0)


def evict_held(
    engine: Engine,
    request: Request,
    eviction: EvictionConfig,
    scores: Sequence[Tensor] | None = None,
    ranges: Sequence[tuple[int, int]] = (),
    seen: bool = False,
) -> int:
    """Evict a finished request whose cache is held; returns the pages that went back. See Evictor.evict_held."""
    if engine.evictor is None:
        raise RequestError("this cache keeps no queries to evict by; open the model with query_buffers=1 or more")
    if request not in engine.scheduler.held:
        raise RequestError("the request's cache is not held any more: there is nothing to evict")
    if not engine.scheduler.bring_back(request):
        raise RequestError("every slot or page is taken by requests that are running; evict when they have ended")
    engine.evictor.check(eviction, engine.manager)
    with _or_given_up(engine, request):
        return engine.evictor.evict_held(request, engine.manager, eviction, scores, ranges, seen)


@contextmanager
def _or_given_up(engine: Engine, request: Request) -> Iterator[None]:
    """An eviction of a held cache. If it is interrupted half way, entries may have moved: the cache is given up."""
    try:
        yield
    except HybridKVError:  # before anything moved
        raise
    except BaseException:
        engine.scheduler.release_held(request)
        raise


def evict_turns(engine: Engine, request: Request, turns: Sequence[tuple[int, int]], budget: int) -> dict[str, float]:
    """Evict old turns of a finished request whose cache is held; returns its stats after that.

    Where the cache was given up nothing is done: the next turn reads all of it again. Pages that a fork shares are
    copied before entries move; caches that were held longest make room for that, and without room the turns stay whole
    for now.
    """
    manager, scheduler = engine.manager, engine.scheduler
    if engine.evictor is None:
        raise RequestError("this cache never evicts; open the model with CacheConfig(keep_turns=...)")
    while scheduler.bring_back(request):
        try:
            with _or_given_up(engine, request):
                evict_turns_of(engine.evictor, request, manager, turns, budget)
        except OutOfPages:
            others = [held for held in scheduler.holding_pages if held is not request]
            if others:
                scheduler.spare(others[0])
                continue
        request.stats = stats_of(request, manager, engine.schema)
        break
    return request.stats


def has_cache(engine: Engine, request: Request) -> bool:
    """Whether the request's cache is held, and stands where it can be shared (`CacheSchema.share_every`)."""
    if request not in engine.scheduler.held:
        return False
    position = engine.manager.position(request.key)
    return position > 0 and position % engine.manager.schema.share_every == 0


def check_ended(request: Request, what: str) -> None:
    """Whether the request has an answer that a next turn can follow, or RequestError."""
    if not request.finished:
        raise RequestError(f"an answer is still being written; a conversation can be {what} after its end")
    if request.finish_reason not in ENDS:
        raise RequestError(f"a request that failed cannot be {what}: {request.error}")


def ended_request(engine: Engine, tokens: list[int], prompt: int, reason: str, params: SamplingParams) -> Request:
    """A request that has ended already, with no cache yet."""
    request = engine.new_request(tokens, params, hold=True)
    request.prompt_tokens, request.finish_reason, request.status = prompt, reason, Status.FINISHED
    return request


def _no_room(engine: Engine, need: dict[str, int]) -> str:
    manager, running = engine.manager, len(engine.scheduler.running)
    totals = {name: table.allocator.total for name, table in manager.tables.items()}
    for name, pages in need.items():
        if pages > totals[name]:
            return f"the session's cache takes {pages} pages of '{name}', the pool has {totals[name]}; give more memory"
    return (
        f"there is no room for the session's cache beside the {running} requests that are running; load it when they "
        "have ended, or give more memory"
    )
