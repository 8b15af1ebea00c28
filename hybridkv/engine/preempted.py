"""Preempted requests whose cache waits on the host (cache/away.py), so that nothing of it is computed again.

A request goes there if there is room, and if copying it back is quicker than reading it again. Nothing else of it
changes: tokens, text, seed, grammar and records of evictions are the request's own, and it goes on with its next token.
On the host it goes before the caches of conversations and what prompts begin with, and never makes room for them.

It is asked for (`EngineConfig.keep_preempted`). What does not go there, or cannot come back (a copy fails, its columns
are gone, there is too little room even alone), is read again. Over several ranks nothing goes there: what lies on the
host, and what copies take, differs between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.cache.away import (
    bring_back,
    bytes_away,
    columns_there,
    is_whole,
    leave_columns,
    pages_to_take,
    send_away,
    shared_column,
    tokens_to_read,
)
from hybridkv.cache.lookup import Asked
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.engine.beginnings import asked_of
from hybridkv.engine.room import room_to_hold, until_eviction
from hybridkv.errors import HybridKVError, OutOfPages
from hybridkv.request import Request, Status

if TYPE_CHECKING:
    from hybridkv.engine.admission import Admission


def keep_away(admission: Admission, request: Request) -> bool:
    """Whether the cache of a running request is on the host now; else it is as it was."""
    manager, host = admission.manager, admission.manager.host
    if not host.preempted or not _can_go_on(admission, request):
        return False
    shared = shared_column(manager.reuse, request.key) if asked_of(admission, request).reads else None
    nbytes = bytes_away(manager, request.key, shared)
    if not host.pays(nbytes, tokens_to_read(manager, request.key, shared)) or not _room(admission, nbytes):
        return False
    try:
        done = send_away(manager, request.key, shared)
    except HybridKVError:  # a step that is not committed has taken its state further
        return False
    admission.counts["sent_away"] += done
    return done


def _can_go_on(admission: Admission, request: Request) -> bool:
    """Whether the next step of the request can begin with what it holds."""
    manager = admission.manager
    slot, position = manager.slot_of[request.key], manager.position(request.key)
    if request.finish_reason is not None or not position or manager.fresh[slot] > position:
        return False  # it has nothing, or is still reading what others have stored
    if admission.evictor is None or not admission.evictor.due(request, manager):
        return True
    past = manager.compactions.get(slot)
    return past is not None and past.position == position  # else an eviction here has found no room


def _room(admission: Admission, nbytes: int) -> bool:
    """Whether the host has room, at the cost of held caches; none of them goes in vain."""
    host, frozen = admission.manager.host, admission.manager.frozen
    held = [blocks for each in admission.held if each.key in frozen for blocks in frozen[each.key].blocks]
    back = sum(len(blocks.ids) for blocks in held) * BLOCK
    return host.room_for(max(0, nbytes - back)) and admission.host_room(nbytes)


def come_back(admission: Admission, request: Request) -> bool:
    """Whether a request that is away runs now, or is to be read again; False: it waits for room."""
    manager, key = admission.manager, request.key
    asked = asked_of(admission, request) if manager.reuse is not None else None
    while key in manager.away:
        away = manager.away[key]
        path = columns_there(manager.reuse, away, asked)
        if not is_whole(away, path):
            break
        tokens = len(request.tokens) + request.unseen + 1 - away.position
        need = pages_to_take(manager, away, path, until_eviction(admission, request, away.position, tokens))
        given_up = room_to_hold(admission, need, away.since >= 0)
        if given_up is not None:
            for held in given_up:
                admission.spare(held)
            if _bring_back(admission, request, asked) or key in manager.away:
                return key not in manager.away
        elif admission.running:
            return False
        elif not leave_columns(manager):
            break
    read_again(admission, request)
    return True


def _bring_back(admission: Admission, request: Request, asked: Asked | None) -> bool:
    """Whether it has a slot and pages, and its copies are on their way."""
    manager, away = admission.manager, admission.manager.away[request.key]
    try:
        bring_back(manager, request.key, columns_there(manager.reuse, away, asked))
    except HybridKVError as problem:  # what was counted as room was none, or a copy failed
        if not isinstance(problem, OutOfPages) or not admission.running:
            read_again(admission, request)
        return False
    if manager.reuse is not None and asked is not None and away.compaction is None:
        manager.reuse.adopt(request.key, asked)
    admission.counts["came_back"] += 1
    request.restored += 1
    request.restored_tokens += away.position
    request.status = Status.RUNNING
    admission.running.append(request)
    admission.waiting.remove(request)
    return True


def read_again(admission: Admission, request: Request) -> None:
    """What is away of it, if anything is, is given up; its tokens are computed again."""
    if request.key in admission.manager.away:
        admission.counts["read_again"] += 1
        admission.manager.release_request(request.key)
        request.cached_tokens = 0
